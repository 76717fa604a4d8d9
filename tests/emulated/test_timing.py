"""The timing model on real variants: trace, path, counts, one simulated SM, and times recorded on an H200."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import Build

from fa4gen.arch import get_arch
from fa4gen.config import FlashFwdSm90Config
from fa4gen.measure.base import Failure
from fa4gen.measure.replay import Grid
from fa4gen.problem import AttentionProblem
from fa4gen.timing.constants import H200
from fa4gen.timing.model import predict, trace_variant
from fa4gen.timing.path import PathFinder
from fa4gen.timing.sass_decode import decode
from fa4gen.timing.simulator import prepare, simulate
from fa4gen.timing.trace import trace

GRID = Path(__file__).parents[1] / "data" / "demo_grid_h200.json.gz"


def test_a_path_executes_what_the_tile_needs(build: Build) -> None:
    config = FlashFwdSm90Config(tile_m=128, tile_n=96, persistent=True)
    artifact, problem = build("b=1 h=2 sq=128 sk=480 d=64", config)
    (kernel,) = decode(artifact.cubin_path)
    traced = trace(artifact, problem, num_sms=1)
    finder = PathFinder(kernel)
    tiles, steps = 2, 5
    for tokens in traced.warps[4:]:
        path = finder.find(tokens)
        bases = Counter(kernel.instructions[s.index].base for s in path)
        assert bases["HGMMA"] == tiles * steps * (64 // 16 + 96 // 16)
        # A warp's 16 x 96 scores are 48 a lane; besides them one a row for its correction, and the normalisation.
        assert tiles * steps * 48 <= bases["MUFU"] <= tiles * (steps * (48 + 2) + 8)
        kinds = [tokens[s.token].kind for s in path if s.token >= 0]
        assert kinds == [t.kind for t in tokens]


def test_simulated_units_are_busy_as_long_as_their_work_takes(build: Build) -> None:
    artifact, problem = build("b=1 h=1 sq=128 sk=1280 d=128", FlashFwdSm90Config(tile_m=128, tile_n=128))
    (kernel,) = decode(artifact.cubin_path)
    traced = trace(artifact, problem, num_sms=1)
    finder = PathFinder(kernel)
    program = prepare(kernel, traced, [finder.find(t) for t in traced.warps])
    result = simulate(get_arch("sm_90a"), H200, program)
    assert result.tensor == 10 * 2 * 128 * 128 * 256 // 4096
    assert result.tensor < result.cycles < 3 * result.tensor
    assert simulate(get_arch("sm_90a"), H200, program) == result


@pytest.mark.parametrize("text", ["b=8 h=32 s=4096 d=64", "b=8 h=16 s=4096 d=128 causal"])
def test_times_come_near_an_h200s(build: Build, text: str) -> None:
    grid = Grid.load(GRID)
    problem = AttentionProblem.parse(text)
    config = FlashFwdSm90Config.default(problem)
    samples = grid.problems[problem].trials[config]
    assert not isinstance(samples, Failure)
    artifact, _ = build(text, config)
    prediction = predict(trace_variant(artifact, problem, config), problem, grid.device, H200)
    assert prediction.microseconds == pytest.approx(float(np.median(samples)), rel=0.15)
