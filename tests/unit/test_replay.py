"""Recorded grids: the file format and the measurer that serves it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tune_fakes import H200, PROBLEM

from fa4gen.config import FlashFwdSm90Config
from fa4gen.errors import UsageError
from fa4gen.measure.base import Failure, FailureKind, Measurement
from fa4gen.measure.replay import KEPT_SAMPLES, Grid, ReplayMeasurer
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

DEFAULT = FlashFwdSm90Config.default(PROBLEM)
OTHER = replace(DEFAULT, tile_n=96, rescale_threshold=8.0)
HANGS = replace(DEFAULT, tile_m=256, tile_n=32)
SAMPLES = tuple(800.0 + i for i in range(20))
RESULTS = [
    (DEFAULT, Measurement(SAMPLES)),
    (OTHER, Measurement((790.123456, 791.0))),
    (HANGS, Failure(FailureKind.TIMEOUT, "no answer: for 30 s")),
]


def recorded() -> Grid:
    grid = Grid(H200, "flash_fwd_sm90")
    grid.record(PROBLEM, RESULTS, {"driver": "580.1", "clock_mhz": 1600.0})
    return grid


def measure(
    measurer: ReplayMeasurer, config: FlashFwdSm90Config, problem: AttentionProblem = PROBLEM, samples: int = 20
):
    return measurer.measure(problem, Variant.of("sm_90a", problem, config), None, samples=samples)


@pytest.mark.parametrize("name", ["grid.json", "grid.json.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / "folder" / name
    recorded().save(path)
    assert Grid.load(path) == recorded()
    again = tmp_path / name
    Grid.load(path).save(again)
    assert again.read_bytes() == path.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == [name]


def test_keeps_order_statistics_with_both_ends_and_the_median(tmp_path: Path) -> None:
    kept = recorded().problems[PROBLEM].trials
    assert len(kept[DEFAULT]) == KEPT_SAMPLES
    assert (kept[DEFAULT][0], kept[DEFAULT][-1]) == (800.0, 819.0)
    assert abs(Measurement(kept[DEFAULT]).median_us - Measurement(SAMPLES).median_us) <= 0.5
    assert kept[OTHER] == (790.12, 791.0)


def test_recording_again_replaces_configs_and_keeps_the_rest() -> None:
    grid = recorded()
    grid.record(PROBLEM, [(OTHER, Measurement((700.0,)))], {"driver": "581"})
    known = grid.problems[PROBLEM]
    assert known.trials[OTHER] == (700.0,) and len(known.trials) == 3
    assert known.provenance == {"driver": "581"}


def test_the_file_has_a_line_a_config_and_names_the_device(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    recorded().save(path)
    lines = path.read_text().splitlines()
    assert len(lines) == 2 + len(RESULTS) + 2
    assert json.loads(path.read_text())["device"]["key"] == H200.key


def test_draws_come_from_the_recorded_samples_and_repeat_with_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    recorded().save(path)
    first, second = ReplayMeasurer(path), ReplayMeasurer(path)
    runs = [[measure(m, DEFAULT).samples_us for _ in range(3)] for m in (first, second)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3
    assert {x for run in runs[0] for x in run} <= set(recorded().problems[PROBLEM].trials[DEFAULT])
    assert measure(ReplayMeasurer(path, seed=1), DEFAULT).samples_us != runs[0][0]


def test_failures_and_what_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    recorded().save(path)
    measurer = ReplayMeasurer(path)
    assert measurer.device == H200
    assert list(measurer.configs(PROBLEM)) == [DEFAULT, OTHER, HANGS]
    assert measure(measurer, HANGS) == Failure(FailureKind.TIMEOUT, "no answer: for 30 s")
    unknown = Failure(FailureKind.INFEASIBLE, "not in the recorded grid")
    assert measure(measurer, replace(DEFAULT, kv_stages=3)) == unknown
    elsewhere = replace(PROBLEM, batch=1)
    assert measure(measurer, DEFAULT, elsewhere) == unknown
    assert list(measurer.configs(elsewhere)) == []


def test_the_name_tells_grids_apart(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    recorded().save(path)
    before = ReplayMeasurer(path).name
    grid = recorded()
    grid.record(PROBLEM, [(OTHER, Measurement((1.0,)))], {})
    grid.save(path)
    assert before.startswith("replay grid.json ")
    assert ReplayMeasurer(path).name != before


def damage(change) -> str:
    data = json.loads(recorded()._dumps())
    change(data)
    return json.dumps(data)


BAD = {
    "not JSON": ("{", "is damaged"),
    "not an object": ("[]", "Input should be"),
    "newer": (damage(lambda d: d.update(schema=99)), "has schema 99; this fa4gen reads up to 1"),
    "unknown family": (damage(lambda d: d.update(family="x")), "unknown kernel family 'x'"),
    "unknown knob": (damage(lambda d: d["knobs"].__setitem__(0, "tile_q")), "unknown knob 'tile_q'"),
    "unknown arch": (damage(lambda d: d["device"].update(arch="sm_1")), "unknown arch 'sm_1'"),
    "bad problem": (damage(lambda d: d["problems"][0].update(problem="q=1")), "unknown word 'q=1'"),
    "short values": (damage(lambda d: d["problems"][0]["trials"][0][0].pop()), "shorter"),
    "wrong type": (damage(lambda d: d["problems"][0]["trials"][0][0].__setitem__(0, "wide")), "tile_m: Input should"),
    "no samples": (damage(lambda d: d["problems"][0]["trials"][0].__setitem__(1, [])), "problems.0.trials.0.1"),
    "negative time": (damage(lambda d: d["problems"][0]["trials"][0].__setitem__(1, [-1.0])), "greater than 0"),
    "unknown failure": (
        damage(lambda d: d["problems"][0]["trials"][0].__setitem__(1, "odd: x")),
        "'odd' is not a valid",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_gives_one_error_that_names_it(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "grid.json"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        Grid.load(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read grid .*: No such file"):
        Grid.load(tmp_path / "none.json")
    cut = tmp_path / "cut.json.gz"
    recorded().save(cut)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(UsageError, match="is damaged"):
        Grid.load(cut)
    plain = tmp_path / "plain.json.gz"
    plain.write_text("{}")
    with pytest.raises(UsageError, match="is damaged"):
        Grid.load(plain)


def test_saving_where_one_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write grid"):
        recorded().save(tmp_path / "file" / "grid.json")
