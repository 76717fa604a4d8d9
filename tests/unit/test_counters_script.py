"""The script that records hardware counters, without a GPU: a stand-in prints what ncu prints."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from fa4gen.arch import get_arch
from fa4gen.feasibility import can_implement

SCRIPT = Path(__file__).parents[2] / "scripts" / "counters.py"
NCU = """#!/bin/sh
case "$*" in
*--query-metrics*) cat <<END
"Device NVIDIA H200 (GH100)"
"Metric Name","Metric Type","Metric Unit","Metric Description"
"sm__inst_executed","Counter","inst","# of warp instructions executed"
"sm__inst_executed_pipe_xu","Counter","inst","# of warp instructions executed by xu pipe"
"sm__inst_executed_pipe_xu_pred_on","Counter","inst","not wanted"
"sm__pipe_fma_cycles_active","Counter","cycle","# of cycles where fma pipe was active"
"sm__warps_launched","Counter","warp","not wanted"
END
;;
*refused*) echo "==ERROR== Failed to find metric refused"; exit 1 ;;
*) cat <<END
==PROF== Connected to process 1
a warning of the program
==PROF== Profiling "kernel" - 0: 0%....100% - 9 passes
"ID","Kernel Name","sm__inst_executed.sum","sm__inst_executed.max","gpu__time_duration.sum"
"","","inst","inst","ns"
"0","kernel_cutlass_flash","1,234","9","5.5"
END
esac
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("counters", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["counters"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ncu(tmp_path: Path) -> str:
    path = tmp_path / "ncu"
    path.write_text(NCU)
    path.chmod(0o755)
    return str(path)


def test_six_different_kernels_that_can_run(script) -> None:
    cases = script.cases()
    assert len(set(cases)) == 6
    assert not any(can_implement(problem, config, get_arch("sm_90a")) for problem, config in cases)


def test_metrics_are_those_of_the_chip(script, ncu: str) -> None:
    assert set(script.metrics(ncu)) - set(script.FIXED) == {
        "sm__inst_executed.sum",
        "sm__inst_executed_pipe_xu.sum",
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
        "sm__pipe_fma_cycles_active.sum",
        "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    }


def test_reads_what_ncu_prints(script, ncu: str) -> None:
    (row,) = script.table(script.profile(ncu, ["program"], "--metrics", "sm__inst_executed.sum"))
    assert script.kept(row) == {"sm__inst_executed.sum": 1234, "gpu__time_duration.sum": 5.5}


def test_says_what_ncu_says(script, ncu: str) -> None:
    with pytest.raises(RuntimeError, match="Failed to find metric refused"):
        script.profile(ncu, ["program"], "--metrics", "refused")
    with pytest.raises(RuntimeError, match="profiled nothing"):
        script.table("==PROF== Disconnected")
