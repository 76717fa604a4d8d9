"""The timing model on real variants: trace, path, counts, one simulated SM, and times recorded on an H200."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Build

import fa4gen.timing.model
from fa4gen.arch import get_arch, get_device
from fa4gen.config import FlashFwdSm90Config
from fa4gen.errors import UsageError
from fa4gen.measure.base import Failure, FailureKind, Measurement, Source
from fa4gen.measure.model import ModelMeasurer
from fa4gen.measure.replay import Grid
from fa4gen.problem import AttentionProblem
from fa4gen.timing.calibration import Case, clock_line, loss
from fa4gen.timing.constants import H200
from fa4gen.timing.model import MEMBERS, UNITS, predict, trace_variant
from fa4gen.timing.path import NoPath, PathFinder
from fa4gen.timing.sass_decode import decode
from fa4gen.timing.simulator import prepare, simulate
from fa4gen.timing.timeline import State, draw, timeline
from fa4gen.timing.trace import trace
from fa4gen.variant import Variant

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
    config = next(iter(grid.problems[problem].trials))  # the default of when it was recorded
    assert isinstance(config, FlashFwdSm90Config)
    samples = grid.problems[problem].trials[config]
    assert not isinstance(samples, Failure)
    artifact, _ = build(text, config)
    prediction = predict(trace_variant(artifact, problem, config), problem, grid.device, H200)
    assert prediction.microseconds == pytest.approx(float(np.median(samples)), rel=0.15)


def test_masked_steps_cost_more_and_are_walked_only_on_the_diagonal(build: Build) -> None:
    text, config = "b=1 h=1 s=4096 d=64", FlashFwdSm90Config(tile_m=192, tile_n=128, persistent=True)
    full, causal = (trace_variant(*build(t, config), config) for t in (text, text + " causal"))

    def issued_a_step(samples: tuple) -> float:
        short, long = (len(sample.program.index) for sample in samples[:2])
        return (long - short) / (samples[1].steps - samples[0].steps)

    assert issued_a_step(causal.samples) == pytest.approx(issued_a_step(full.samples), rel=0.03)


def test_a_timeline_has_a_lane_for_every_role_and_unit(build: Build, tmp_path: Path) -> None:
    config = FlashFwdSm90Config(tile_m=128, tile_n=128, schedule="pingpong")
    artifact, problem = build("b=4 h=16 s=2048 d=64", config)
    traced = trace_variant(artifact, problem, config)
    lanes = timeline(traced, H200)
    assert [lane.name for lane in lanes.warps] == [
        "load (warp 0)", "MMA, softmax (warps 4-7)", "MMA, softmax (warps 8-11)",
    ]  # fmt: skip
    length = lanes.last - lanes.first
    assert length == pytest.approx(3 * lanes.cycles / lanes.steps, abs=2)
    assert all(len(lane.states) == length for lane in lanes.warps)
    load, *softmax = ([int((lane.states == state).sum()) for state in State] for lane in lanes.warps)
    assert load[State.MBARRIER] > 0.8 * length and load[State.NAMED_BARRIER] == load[State.MMA] == 0
    for counts in softmax:
        assert min(counts[State.ISSUE], counts[State.STALL], counts[State.NAMED_BARRIER], counts[State.MMA]) > 0
    busy = {lane.name: float(lane.busy.mean()) for lane in lanes.units}
    step = predict(traced, problem, get_device("h200"), H200).step_busy
    assert busy["tensor cores"] >= step["tensor"] * 0.9, "with what shared memory slows down"
    assert busy["MUFU"] == pytest.approx(step["mufu"], rel=0.15)
    assert "TMEM" not in busy and 0 < busy["copies in flight"] <= 1
    pytest.importorskip("matplotlib")
    draw(lanes, "a title", tmp_path / "lanes.png")
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")


def test_what_bounds_a_step_and_what_waits(build: Build) -> None:
    config = FlashFwdSm90Config(tile_m=128, tile_n=128)
    artifact, problem = build("b=4 h=16 s=2048 d=64", config)
    prediction = predict(trace_variant(artifact, problem, config), problem, get_device("h200"), H200)
    assert set(prediction.busy) == set(prediction.step_busy) == set(UNITS)
    # 128 x 128 exponentials and the MMAs of a step, by the rates of the chip.
    assert prediction.step_busy["mufu"] * prediction.step == pytest.approx(128 * 128 / 16, rel=0.1)
    assert prediction.step_busy["tensor"] * prediction.step == pytest.approx(4 * 128 * 128 * 64 / 4096, rel=0.01)
    assert prediction.unit == "mufu" and prediction.waiting == 1 - prediction.step_busy["mufu"]
    assert all(0 <= prediction.busy[unit] <= 1 for unit in UNITS)


def test_a_cluster_loads_half(build: Build) -> None:
    config = FlashFwdSm90Config(tile_m=128, tile_n=128, cluster_m=2)
    artifact, problem = build("b=1 h=1 sq=256 sk=512 d=64", config)
    loads = [t for t in trace(artifact, problem, num_sms=2).warps[0] if t.kind == "load"]
    keys = [t for t in loads if not t.values[3]]
    assert sum(t.values[1] for t in keys) == 4 * 128 * (64 + 64) * 2 // 2
    assert all(t.values[2] == 2 * t.values[1] for t in keys)


def test_the_measurer_predicts_and_says_so(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    device, config = get_device("h200"), FlashFwdSm90Config(tile_m=128, tile_n=128)
    artifact, problem = build("b=4 h=16 s=2048 d=64", config)
    variant = Variant.of("sm_90a", problem, config)
    measurer = ModelMeasurer(device)
    result = measurer.measure(problem, variant, artifact, samples=10)
    assert isinstance(result, Measurement) and result.source is Source.PREDICTED
    assert len(set(result.samples_us)) == len(result.samples_us) == 10
    assert len(measurer.measure(problem, variant, artifact, samples=1).samples_us) == MEMBERS
    assert problem.flops / 989e12 * 1e6 < result.median_us < 10 * problem.flops / 989e12 * 1e6
    assert H200.digest in measurer.name and measurer.measure(problem, variant, artifact) == measurer.measure(
        problem, variant, artifact
    )

    def no_path(*_: object) -> None:
        raise NoPath("no path emits token 3")

    monkeypatch.setattr(fa4gen.timing.model, "trace_variant", no_path)
    failed = ModelMeasurer(device).measure(problem, variant, artifact)
    assert isinstance(failed, Failure) and failed.kind is FailureKind.INFEASIBLE and "token 3" in failed.message
    backward = measurer.measure(replace(problem, op="bwd"), variant, artifact)
    assert isinstance(backward, Failure) and "no bwd kernels" in backward.message
    assert "uncalibrated" not in measurer.name and "uncalibrated" in ModelMeasurer(get_device("b200")).name
    assert 0 < measurer.margin < ModelMeasurer(get_device("b200")).margin


def test_the_loss_is_least_where_the_times_came_from(build: Build) -> None:
    device, config = get_device("h200"), FlashFwdSm90Config(tile_m=128, tile_n=128)
    artifact, problem = build("b=4 h=16 s=2048 d=64", config)
    traced = trace_variant(artifact, problem, config)
    case = Case(problem, config, predict(traced, problem, device, H200).microseconds, traced)
    slower = replace(H200, contention=2 * H200.contention)
    assert loss([case], device, H200, H200) == pytest.approx(0, abs=1e-9)
    assert loss([case], device, slower, slower) > 0.01 and loss([case], device, H200, slower) > 0


def test_the_clock_is_a_line_through_counted_kernels() -> None:
    assert clock_line([(0.4, 1.8), (0.6, 1.7), (0.8, 1.6)]) == (2.0, 0.5)
    with pytest.raises(UsageError, match="two kernels"):
        clock_line([(0.4, 1.8)])
