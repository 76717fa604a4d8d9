"""Environment variables: one module reads them, and there are few."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from fa4gen import knobs

PACKAGE = Path(__file__).parents[2] / "fa4gen"


def test_only_knobs_reads_the_environment() -> None:
    readers = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"os\.environ\b|os\.getenv|FA4GEN_\w+[\"']\s*[\],)]", path.read_text())
    ]
    assert readers == ["knobs.py"]


def test_at_most_eight_and_each_documented() -> None:
    variables = set(re.findall(r"FA4GEN_\w+", inspect.getsource(knobs)))
    assert 1 <= len(variables) <= 8
    documented = " ".join(inspect.getdoc(getattr(knobs, name)) or "" for name in knobs.__all__)
    assert all(variable in documented for variable in variables)


def test_directories_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable, knob in (("FA4GEN_CACHE_DIR", knobs.cache_dir), ("FA4GEN_TUNED_DIR", knobs.tuned_dir)):
        monkeypatch.setenv(variable, str(tmp_path))
        assert knob() == tmp_path
        monkeypatch.setenv(variable, "")
        assert knob() != tmp_path and "fa4gen" in str(knob())


def test_compile_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4GEN_COMPILE_WORKERS", "3")
    assert knobs.compile_workers() == 3
    monkeypatch.delenv("FA4GEN_COMPILE_WORKERS")
    assert knobs.compile_workers() >= 1
