"""The timing model beside counters of an H200 (scripts/counters.py): instructions, cycles, and how busy pipes are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Build

from fa4gen.arch import get_device
from fa4gen.config import FlashFwdSm90Config
from fa4gen.problem import AttentionProblem
from fa4gen.timing.constants import H200
from fa4gen.timing.model import predict, trace_variant

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "counters_h200.json").read_text())
PERCENT = ".avg.pct_of_peak_sustained_active"
# The simulator's units by what ncu calls them.
PIPES = {
    "tensor": "sm__pipe_tensor_op_hmma_cycles_active",
    "mufu": "sm__inst_executed_pipe_xu",
    "alu": "sm__pipe_alu_cycles_active",
    "fma": "sm__pipe_fma_cycles_active",
    "issue": "sm__inst_issued",
}


@pytest.mark.parametrize("number", range(len(RECORDED["kernels"])))
def test_counts_and_pipes_are_those_of_an_h200(build: Build, number: int) -> None:
    kernel = RECORDED["kernels"][number]
    config = FlashFwdSm90Config(**kernel["config"])
    artifact, problem = build(kernel["problem"], config)
    assert isinstance(problem, AttentionProblem)
    prediction = predict(trace_variant(artifact, problem, config), problem, get_device("h200"), H200)
    counters = kernel["counters"]
    assert prediction.instructions == pytest.approx(counters["smsp__inst_executed.sum"], rel=0.01)
    for unit, name in PIPES.items():  # ncu's peak is that of the cycles in which an SM is active
        assert 100 * prediction.busy[unit] / prediction.active == pytest.approx(counters[name + PERCENT], abs=4), unit
