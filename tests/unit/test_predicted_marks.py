"""A predicted time is never mistaken for a measured one: every table, report and line that holds one says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fa4gen import console
from fa4gen.arch import DEVICES, get_device
from fa4gen.cli import app
from fa4gen.config import FlashFwdSm100Config
from fa4gen.measure.base import Source
from fa4gen.problem import AttentionProblem
from fa4gen.timing.constants import CHIPS
from fa4gen.tuned_table import Provenance, Row, RunnerUp, TunedTable

ROOT = Path(__file__).parents[2]
B200 = get_device("b200")
PROBLEM = AttentionProblem.parse("b=2 h=16 s=4096 d=128")
CONFIG = FlashFwdSm100Config.default(PROBLEM)
# Times that appear nowhere else, so that a line with one of them can be found.
MEDIAN, LOW, HIGH, DEFAULT = 777.7, 766.6, 788.8, 799.9


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A predicted row in the user's table of a chip."""
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FA4GEN_TUNED_DIR", str(tmp_path / "tuned"))
    row = Row(
        problem=PROBLEM,
        family="flash_fwd_sm100",
        config=CONFIG,
        median_us=MEDIAN,
        interval_us=(LOW, HIGH),
        runner_up=RunnerUp(config=replace(CONFIG, exp2_poly_fraction=0.0), gap=0.0333),
        default_us=DEFAULT,
        source=Source.PREDICTED,
        shortlist=tuple(replace(CONFIG, exp2_poly_fraction=f) for f in (CONFIG.exp2_poly_fraction, 0.0, 0.125, 0.25)),
        provenance=Provenance.now(measurer="timing model", device=B200.name, samples=7, clock_mhz=1755.0),
    )
    path = tmp_path / "tuned" / f"{B200.key}.json"
    TunedTable.update(path, B200.key, [row])
    return path


def unmarked(text: str) -> list[str]:
    """Lines with a predicted figure (or what was made of one) and without the word."""
    figures = [re.escape(console.us(us).removesuffix(" us")) for us in (MEDIAN, LOW, HIGH, DEFAULT)]
    figures += [re.escape(console.tflops(PROBLEM, MEDIAN)), r"\+3\.3 %", r"of its \d"]
    found = re.compile("|".join(figures))
    return [line for line in text.splitlines() if found.search(line) and "predicted" not in line]


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", str(PROBLEM), "--device", "b200"),
        ("table", "explain", str(PROBLEM), "--device", "b200"),
        ("table", "diff", "EMPTY", "TABLE"),
        ("table", "diff", "TABLE", "EMPTY"),
        ("table", "lint", "TABLE"),
        ("doctor",),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_no_verb_shows_a_predicted_time_without_its_mark(table: Path, tmp_path: Path, arguments: tuple) -> None:
    empty = tmp_path / "empty.json"
    TunedTable(B200.key).save(empty)
    words = [{"TABLE": str(table), "EMPTY": str(empty)}.get(word, word) for word in arguments]
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (0, 1), result.output  # doctor: no GPU here
    assert unmarked(result.output) == []
    assert "predicted" in result.output or words[:2] == ["table", "lint"]


def test_a_search_by_prediction_marks_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path / "cache"))
    problems = [str(PROBLEM), "b=1 h=2 s=512 d=64"]
    words = [word for problem in problems for word in ("--problem", problem)]
    tuned = CliRunner().invoke(app, ["tune", *words, "--measure", "bound", "--arch", "sm_100a", "--trials", "5"])
    assert tuned.exit_code == 0, tuned.output
    lines = [line for line in tuned.output.splitlines() if line.startswith(tuple(problems))]
    assert len(lines) >= len(problems) and all("predicted" in line for line in lines)


def test_the_check_finds_what_has_no_mark() -> None:
    assert unmarked(f"median {console.us(MEDIAN)}") and not unmarked(f"predicted {console.us(MEDIAN)}")


@pytest.mark.parametrize("path", sorted((ROOT / "tuned").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_rows_say_where_their_times_come_from(path: Path) -> None:
    """A model's rows are marked, and carry model, constants, whether the chip is calibrated, and the assumed clock."""
    for row in TunedTable.load(path).rows:
        by_model = row.provenance.measurer.startswith(("timing model", "bound"))
        assert (row.source is Source.PREDICTED) == by_model, row.problem
        if by_model:
            arch = next(device.arch.name for device in DEVICES.values() if device.name == row.provenance.device)
            assert ("uncalibrated" in row.provenance.measurer) == (not CHIPS[arch].calibrated)
            assert re.search(r"timing model \d+, constants [0-9a-f]{8}", row.provenance.measurer)
            assert row.provenance.clock_mhz and row.interval_us[0] <= row.median_us <= row.interval_us[1]
            assert row.shortlist[0] == row.config


def markdown_tables(text: str) -> Iterator[list[str]]:
    for is_table, lines in groupby(text.splitlines(), key=lambda line: line.lstrip().startswith("|")):
        if is_table:
            yield list(lines)


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_tables_about_chips_that_nobody_has_say_what_their_figures_are(path: Path) -> None:
    for head, *rows in markdown_tables(path.read_text(encoding="utf-8")):
        for row in rows:
            if re.search(r"\bB[23]00\b", head + row) and re.search(r"\d (us|TFLOP/s)|TFLOP/s", head + row):
                assert re.search("predicted|published|bound", head + row), row
