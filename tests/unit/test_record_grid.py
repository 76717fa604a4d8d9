"""The recording script without a GPU: which cells and configs, and that a second run goes on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from tune_fakes import H200, FakeCompiler, FakeMeasurer, Landscape

from fa4gen.feasibility import can_implement
from fa4gen.measure.base import Failure, FailureKind
from fa4gen.measure.replay import Grid

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "record_grid.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("record_grid", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["record_grid"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cells_share_kernels_in_pairs_and_configs_cover_every_knob(script) -> None:
    groups = script.cells()
    assert len({problem for group in groups for problem in group}) == 12
    for group in groups:
        assert len({problem.static for problem in group}) == 1
        configs = script.candidates(group[0], H200.arch, 110)
        assert len(set(configs)) == 110 and not any(can_implement(group[0], c, H200.arch) for c in configs)
    varied = {name for name in vars(configs[0]) if len({getattr(c, name) for c in configs}) > 1}
    assert varied >= {"tile_m", "tile_n", "kv_stages", "schedule", "intra_wg_overlap", "mma_pv_is_rs", "persistent"}


def test_a_second_run_goes_on_and_failures_do_not_count(script, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(script, "SPARE", 2.0)
    path, groups = tmp_path / "grid.json.gz", script.cells()[:2]
    measurer = FakeMeasurer(
        Landscape(0), needs_artifact=True, failures=lambda c: FailureKind.WRONG if c.tile_n == 112 else None
    )
    compiler = FakeCompiler(lambda c: {"error": "no"} if c.tile_n == 48 else {})
    script.Recorder(Grid(H200, "flash_fwd_sm90"), path, measurer, compiler, 20).run(groups[:1], 5, {"driver": "1"})
    measured = len(measurer.measured)
    script.Recorder(Grid.load(path), path, measurer, compiler, 20).run(groups, 5, {"driver": "1"})
    grid = Grid.load(path)
    assert set(grid.problems) == {problem for group in groups for problem in group}
    assert len(measurer.measured) == pytest.approx(2 * measured, rel=0.3), "the first cells are not measured again"
    for recorded in grid.problems.values():
        results = list(recorded.trials.values())
        assert sum(not isinstance(result, Failure) for result in results) == 20 < len(results)
        assert len(recorded.provenance["clocks_mhz"]) == len(results)
        assert recorded.provenance["clock_mhz"] == 1500.0
