"""Tuned tables: file format, merging, and which row a problem gets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4gen.arch import get_device
from fa4gen.config import FlashBwdSm90Config, FlashFwdSm90Config
from fa4gen.errors import TableError, UnsupportedProblem
from fa4gen.problem import AttentionProblem
from fa4gen.tuned_table import (
    DECODE_ROWS,
    SCHEMA_VERSION,
    Provenance,
    Row,
    RunnerUp,
    TunedTable,
    TunedTables,
    bucket,
    category,
    coordinates,
    lookup_config,
)

H200 = get_device("h200").key
OTHER_SM90 = "sm_90a-78sm-228kb"
SMS = 132
DAY = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


def row(problem: str, *, median: float = 100.0, days: int = 0, source: str = "measured", **knobs: Any) -> Row:
    return Row(
        problem=problem,
        family="flash_fwd_sm90",
        config=FlashFwdSm90Config(**knobs),
        median_us=median,
        interval_us=(median - 1, median + 1),
        runner_up=RunnerUp(config=FlashFwdSm90Config(tile_n=64), gap=0.02),
        default_us=median * 1.1,
        source=source,
        provenance=Provenance(
            measurer="cuda",
            device="NVIDIA H200",
            samples=20,
            date=DAY + timedelta(days=days),
            fa4gen="0.1",
            versions={"torch": "2.13"},
        ),
    )


ROWS = (
    row("b=4 h=16 s=4096 d=128", tile_n=112),
    row("b=1 h=16 s=16384 d=128", tile_n=96),
    row("b=4 h=16 s=4096 d=128 causal", tile_n=80),
    row("b=4 h=16 hk=4 s=4096 d=128", tile_n=64),
)
TABLE = TunedTable(H200, ROWS)


def problem(text: str) -> AttentionProblem:
    return AttentionProblem.parse(text)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / f"{H200}.json"
    TABLE.save(path)
    assert TunedTable.load(path) == TABLE
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "a temporary file was left"


def test_one_row_a_line_and_order_does_not_matter() -> None:
    text = TABLE.dumps()
    assert TunedTable(H200, ROWS[::-1]).dumps() == text
    lines = text.splitlines()
    assert len(lines) == len(ROWS) + 2
    more = TABLE.merge([row("b=2 h=8 s=8192 d=128", tile_n=80)]).dumps().splitlines()
    changed = set(more) ^ set(lines)
    assert len(changed) <= 3, "an added row may change its own line and one comma"


def test_file_holds_every_knob_by_name() -> None:
    first = json.loads(TABLE.dumps())["rows"][0]
    assert set(first["config"]) == set(FlashFwdSm90Config.__dataclass_fields__)
    assert first["problem"] == str(problem(first["problem"]))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema_version=SCHEMA_VERSION + 1), f"schema {SCHEMA_VERSION + 1}.*update fa4gen"),
        (lambda d: d.pop("schema_version"), "schema_version"),
        (lambda d: d.update(device="h200"), "device key"),
        (lambda d: d["rows"][1].update(median_us=-1), r"rows\.1\.median_us"),
        (lambda d: d["rows"][1].update(median_us=math.nan), r"rows\.1\.median_us"),
        (lambda d: d["rows"][0]["config"].update(tile_q=1), "unknown knob 'tile_q'"),
        (lambda d: d["rows"][0]["config"].update(tile_m="wide"), r"rows\.0\.config"),
        (lambda d: d["rows"][0]["runner_up"]["config"].update(tile_q=1), "unknown knob 'tile_q'"),
        (lambda d: d["rows"][0].update(family="flash_x"), "unknown kernel family 'flash_x'"),
        (lambda d: d["rows"][0].update(problem="b=2"), "lacks heads"),
        (lambda d: d["rows"][0].update(extra=1), r"rows\.0\.extra"),
        (lambda d: d["rows"].append(d["rows"][0]), "two rows"),
        (lambda d: d["rows"][0]["provenance"].update(date="2026-03-01T00:00:00"), "timezone"),
        (lambda d: d.update(rows=None), "rows"),
    ],
)
def test_bad_file_is_one_clear_error(tmp_path: Path, edit: Any, message: str) -> None:
    data = json.loads(TABLE.dumps())
    edit(data)
    path = tmp_path / f"{H200}.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TableError, match=message) as error:
        TunedTable.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff", '{"schema_version": "1"}'])
def test_truncated_or_foreign_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TableError, match=r"t\.json"):
        TunedTable.load(path)


def test_missing_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot read"):
        TunedTable.load(tmp_path / "absent.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(TableError, match="cannot write"):
        TABLE.save(tmp_path / "file" / "t.json")


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{H200}.json"
    TABLE.save(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TableError, match="No space left"):
        TunedTable(H200, ROWS[:1]).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# --- merging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "winner"),
    [
        ({"days": 0}, {"days": 1}, "new"),
        ({"days": 1}, {"days": 0}, "old"),
        ({"source": "measured"}, {"source": "predicted", "days": 9}, "old"),
        ({"source": "predicted", "days": 9}, {"source": "measured"}, "new"),
        ({}, {}, "new"),
    ],
)
def test_merge_rule(old: dict[str, Any], new: dict[str, Any], winner: str) -> None:
    text = "b=1 h=8 s=1024 d=64"
    rows = {"old": row(text, tile_n=64, **old), "new": row(text, tile_n=96, **new)}
    assert TunedTable(H200, (rows["old"],)).merge([rows["new"]]).rows == (rows[winner],)


def test_update_makes_merges_and_refuses_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "tuned" / f"{H200}.json"
    TunedTable.update(path, H200, ROWS[:2])
    TunedTable.update(path, H200, ROWS[2:])
    assert TunedTable.load(path) == TABLE
    with pytest.raises(TableError, match="name another file"):
        TunedTable.update(path, OTHER_SM90, ROWS)
    assert TunedTable.load(path) == TABLE


def test_diff() -> None:
    slower = row("b=4 h=16 s=4096 d=128", median=120.0, days=1, tile_n=112)
    new = TunedTable(H200, (slower, *ROWS[2:], row("b=1 h=1 s=1 d=64")))
    diff = TABLE.diff(new)
    assert [str(r.problem) for r in diff.added] == ["b=1 h=1 s=1 d=64"]
    assert diff.removed == (ROWS[1],)
    assert diff.changed == ((ROWS[0], slower),)


def test_lint_names_each_bad_row() -> None:
    assert TABLE.lint() == []
    infeasible = row("b=4 h=16 s=2048 d=128", tile_n=256)
    outside = row("b=4 h=16 s=1024 d=128").model_copy(update={"interval_us": (1.0, 2.0)})
    findings = TunedTable(H200, (infeasible, outside)).lint()
    assert len(findings) == 2
    assert any("registers" in f or "shared memory" in f for f in findings)
    assert any("outside its interval" in f for f in findings)


# --- lookup -----------------------------------------------------------------------------------------------------------


def test_exact_row() -> None:
    found = TABLE.lookup(problem("b=4 h=16 s=4096 d=128"))
    assert (found.row, found.distance, found.source, found.covered) == (ROWS[0], 0.0, "measured", True)
    assert "this very problem" in found.reason


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("b=4 h=16 s=5000 d=128", 0), ("b=1 h=16 s=12000 d=128", 1), ("b=4 h=16 s=4096 d=128 lse", 0)],
)
def test_nearest_row(text: str, nearest: int) -> None:
    assert TABLE.lookup(problem(text)).row == ROWS[nearest]


def test_a_measured_row_that_covers_goes_before_a_predicted_one() -> None:
    near = row("b=4 h=16 s=5000 d=128", source="predicted", tile_n=64)
    far = row("b=1 h=1 s=128 d=128", source="predicted", tile_n=64)
    table = TunedTable(H200, (*ROWS, near, far))
    assert table.lookup(near.problem).row == ROWS[0]
    found = table.lookup(far.problem)
    assert (found.row, found.source, found.covered) == (far, "predicted", False)
    assert found.reason.startswith("predicted row")


@pytest.mark.parametrize(
    "text",
    [
        "b=4 h=16 s=4096 d=64",
        "b=4 h=16 s=4096 d=128 dv=64",
        "b=4 h=16 s=4096 d=128 dtype=fp16",
        "b=4 h=16 sq=1 sk=4096 d=128",
        "b=4 h=16 hk=4 s=4096 d=128 causal",
    ],
)
def test_other_categories_get_the_default(text: str) -> None:
    found = TABLE.lookup(problem(text))
    assert found.row is None
    assert found.config == FlashFwdSm90Config.default(problem(text))
    assert (found.source, found.distance, found.covered) == ("default", math.inf, False)


def test_backward_rows_by_determinism(tmp_path: Path) -> None:
    shape = "b=4 h=16 s=4096 d=128 op=bwd"
    rows = [
        row(f"{shape}{flag}").model_copy(
            update={"family": "flash_bwd_sm90", "config": FlashBwdSm90Config(tile_order=order), "runner_up": None}
        )
        for flag, order in (("", "linear"), (" deterministic", "longest_first"))
    ]
    TunedTable(H200, (*ROWS, *rows)).save(tmp_path / "table.json")
    table = TunedTable.load(tmp_path / "table.json")
    assert all(found in table.rows for found in rows)
    for found in rows:
        assert table.lookup(found.problem).row == found
        nearby = problem(str(found.problem).replace("s=4096", "s=4000"))
        assert table.lookup(nearby).config == found.config
    assert str(category(rows[1].problem)) == "bwd bf16 d=128 full MHA prefill deterministic"
    assert table.lookup(problem("b=4 h=16 s=4096 d=128")).row == ROWS[0]


def test_tiles_of_a_backward_are_of_keys() -> None:
    queries, keys = (problem(f"h=1 {lengths} d=64") for lengths in ("sq=4096 sk=512", "sq=512 sk=4096"))
    for op, tiles in (("fwd", (32, 4)), ("bwd", (4, 32))):
        for p, count in zip((queries, keys), tiles, strict=True):
            assert coordinates(replace(p, op=op), 1)[2] == math.log2(min(count, 16))


def test_far_row_serves_but_is_not_covered() -> None:
    found = TABLE.lookup(problem("b=1 h=1 s=256 d=128"))
    assert found.row is not None and not found.covered


def test_infeasible_row_is_passed_over() -> None:
    packed = row("b=4 h=16 hk=4 s=4096 d=128", pack_gqa=True)
    plain = row("b=1 h=16 hk=4 s=16384 d=128", tile_n=96)
    found = TunedTable(H200, (packed, plain)).lookup(problem("b=4 h=12 hk=4 s=4096 d=128"))
    assert found.row == plain
    assert "1 nearer cannot run it" in found.reason
    alone = TunedTable(H200, (packed,)).lookup(problem("b=4 h=12 hk=4 s=4096 d=128"))
    assert alone.row is None and "none of 1 rows can run it" in alone.reason


def test_equal_gqa_ratio_is_nearer() -> None:
    rows = (row("b=4 h=16 hk=2 s=4096 d=128", tile_n=64), row("b=2 h=16 hk=8 s=4096 d=128", tile_n=80))
    assert TunedTable(H200, rows).lookup(problem("b=4 h=32 hk=4 s=4096 d=128")).row == rows[0]


def test_what_nothing_can_run_is_unsupported() -> None:
    with pytest.raises(UnsupportedProblem, match="head_dim must be a multiple of 8"):
        TABLE.lookup(problem("b=1 h=1 s=128 d=100"))


def test_users_row_first_then_shipped_then_other_devices(tmp_path: Path) -> None:
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    text = "b=4 h=16 s=4096 d=128"
    mine, theirs = row(text, tile_n=64), row(text, tile_n=96, days=5)
    TunedTable(H200, (mine,)).save(user / f"{H200}.json")
    TunedTable(H200, (theirs, row("b=1 h=8 s=1024 d=64"))).save(shipped / f"{H200}.json")
    foreign = (row(text, tile_n=80), row("b=4 h=16 s=4096 d=128 causal"))
    TunedTable(OTHER_SM90, foreign).save(user / f"{OTHER_SM90}.json")

    def look(text: str) -> Any:
        return lookup_config(problem(text), H200, (user, shipped))

    assert look(text).row == mine and look(text).path == user / f"{H200}.json"
    assert look("b=1 h=8 s=1024 d=64").path == shipped / f"{H200}.json"
    assert look("b=4 h=16 s=4096 d=128 causal").row == foreign[1]
    assert "same arch" in look("b=4 h=16 s=4096 d=128 causal").reason
    TunedTable(H200, (row(text, tile_n=64, source="predicted"),)).save(user / f"{H200}.json")
    assert look(text).row == theirs, "a predicted row of the user must not hide a measured one"


def test_corrupt_user_table_is_an_error_not_a_fallback(tmp_path: Path) -> None:
    (tmp_path / f"{H200}.json").write_text("{")
    with pytest.raises(TableError, match="not valid JSON"):
        TunedTables.load(H200, (tmp_path,))
    TABLE.save(tmp_path / f"{OTHER_SM90}.json")
    (tmp_path / f"{H200}.json").unlink()
    with pytest.raises(TableError, match="rename it"):
        TunedTables.load(H200, (tmp_path,))


problems = st.builds(
    lambda b, hk, ratio, sq, sk, causal, lse: AttentionProblem(
        b, hk * ratio, hk, sq, sk, 128, 128, causal=causal, return_lse=lse
    ),
    st.integers(1, 64),
    st.integers(1, 16),
    st.sampled_from([1, 2, 3, 8, 64]),
    st.integers(1, 1 << 17),
    st.integers(1, 1 << 20),
    st.booleans(),
    st.booleans(),
)


@given(problems, problems, problems)
def test_distance_is_a_metric(a: AttentionProblem, b: AttentionProblem, c: AttentionProblem) -> None:
    def far(x: AttentionProblem, y: AttentionProblem) -> float:
        return math.dist(coordinates(x, SMS), coordinates(y, SMS))

    assert far(a, a) == 0
    assert far(a, b) == far(b, a)
    assert far(a, c) <= far(a, b) + far(b, c) + 1e-9


@given(problems, problems)
def test_lookup_never_crosses_decode_and_prefill(asked: AttentionProblem, tuned: AttentionProblem) -> None:
    found = TunedTable(H200, (row(str(tuned)),)).lookup(asked)
    if found.row is not None:
        for p in (asked, tuned):
            assert category(p) == category(asked)
        rows = [p.seqlen_q * p.gqa_ratio <= DECODE_ROWS for p in (asked, tuned)]
        assert rows[0] == rows[1]
    else:
        assert category(asked) != category(tuned)


@given(problems)
def test_one_bucket_is_near(p: AttentionProblem) -> None:
    close = replace(p, seqlen_k=p.seqlen_k + max(1, p.seqlen_k // 64))
    if bucket(p, SMS) == bucket(close, SMS):
        assert math.dist(coordinates(p, SMS), coordinates(close, SMS)) <= 1.0
    assert bucket(p, SMS) == bucket(replace(p, return_lse=not p.return_lse), SMS)
