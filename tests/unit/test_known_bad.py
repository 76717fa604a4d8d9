"""The memory of kernels that hang, crash or are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tune_fakes import PROBLEM

from fa4gen.config import FlashFwdSm90Config
from fa4gen.measure.base import Failure, FailureKind
from fa4gen.tune.known_bad import KnownBad
from fa4gen.variant import Variant

DEFAULT = FlashFwdSm90Config.default(PROBLEM)
VARIANT = Variant.of("sm_90a", PROBLEM, DEFAULT)
OTHER = Variant.of("sm_90a", PROBLEM, replace(DEFAULT, tile_n=96))
HANG = Failure(FailureKind.TIMEOUT, "no answer for 30 s")


def test_remembers_over_processes_what_hung_crashed_or_was_wrong(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "bad.json"
    memory = KnownBad(path)
    assert memory.get(VARIANT) is None
    memory.add(VARIANT, HANG)
    assert memory.get(VARIANT) == KnownBad(path).get(VARIANT) == HANG
    assert KnownBad(path).get(OTHER) is None
    entry = json.loads(path.read_text())["entries"][VARIANT.digest]
    assert entry["arch"] == "sm_90a" and entry["config"]["tile_m"] == DEFAULT.tile_m
    assert "nvidia-cutlass-dsl" in entry["versions"]


@pytest.mark.parametrize("kind", [FailureKind.INFEASIBLE, FailureKind.COMPILE, FailureKind.LAUNCH])
def test_other_failures_are_not_remembered(tmp_path: Path, kind: FailureKind) -> None:
    memory = KnownBad(tmp_path / "bad.json")
    memory.add(VARIANT, Failure(kind, "x"))
    assert memory.get(VARIANT) is None and not (tmp_path / "bad.json").exists()


def test_a_kernel_built_differently_is_tried_again(tmp_path: Path) -> None:
    KnownBad(tmp_path / "bad.json", identity=lambda v: "old toolchain").add(VARIANT, HANG)
    assert KnownBad(tmp_path / "bad.json", identity=lambda v: "old toolchain").get(VARIANT) == HANG
    assert KnownBad(tmp_path / "bad.json").get(VARIANT) is None


def test_writers_do_not_lose_each_others_entries(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    first, second = KnownBad(path), KnownBad(path)
    first.add(VARIANT, HANG)
    second.add(OTHER, HANG)
    both = KnownBad(path)
    assert both.get(VARIANT) == both.get(OTHER) == HANG


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"schema": 9, "entries": {}}', '{"schema": 1, "entries": {"x": {"kind": "wrong"}}}']
)
def test_a_damaged_file_is_moved_aside(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    memory = KnownBad(path)
    assert memory.get(VARIANT) is None
    assert "cannot be read" in caplog.text
    assert (tmp_path / "bad.json.damaged").read_text() == content
    memory.add(VARIANT, HANG)
    assert KnownBad(path).get(VARIANT) == HANG
