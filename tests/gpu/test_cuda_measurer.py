"""Measuring on a real device: numbers that repeat, and a process that survives what kernels do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fa4gen.accuracy import KINDS
from fa4gen.bench import bench, host_cost
from fa4gen.compile import compile_variant
from fa4gen.config import get_family
from fa4gen.measure.base import Failure, FailureKind, Measurement
from fa4gen.measure.cuda import CudaMeasurer, current_device
from fa4gen.measure.peers import get_peers
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROBLEM = AttentionProblem.parse("b=4 h=16 s=2048 d=128 causal lse")


@pytest.fixture(scope="module")
def real():
    measurer = CudaMeasurer()
    variant = Variant.of(measurer.device.arch.name, PROBLEM, get_family("fwd", "sm_90a").config_type.default(PROBLEM))
    yield measurer, variant, compile_variant(variant)
    measurer.close()


def test_measurements_repeat(real):
    measurer, variant, artifact = real
    first, second = (measurer.measure(PROBLEM, variant, artifact, samples=10) for _ in range(2))
    assert isinstance(first, Measurement), first
    assert len(first.samples_us) >= 10
    assert second.median_us == pytest.approx(first.median_us, rel=0.1)
    bound_us = PROBLEM.flops / 989e12 * 1e6
    assert bound_us < first.median_us < 5 * bound_us


@pytest.mark.parametrize("kind", KINDS)
def test_default_config_is_right_on_every_kind_of_inputs(real, kind):
    measurer, _, artifact = real
    report = measurer.verify(PROBLEM, artifact, kind)
    assert not isinstance(report, Failure) and report.ok, report


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        ("hangs", FailureKind.TIMEOUT, "no answer within 5 s"),
        ("faults", FailureKind.CRASHED, "CUDA error: device-side assert triggered"),
        ("refuses", FailureKind.LAUNCH, "ValueError: Mismatched type on argument #0"),
        ("writes_nothing", FailureKind.WRONG, "not finite"),
    ],
)
def test_misbehaviour_costs_one_measurement(monkeypatch, behaviour, kind, words):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    problem = AttentionProblem.parse("h=2 s=256 d=64")
    measurer = CudaMeasurer(timeout_s=5.0, engine="stub_engine:StubEngine")
    failure, after = (
        measurer.measure(
            problem, SimpleNamespace(config=None), SimpleNamespace(path=Path(name), variant_name=name), samples=3
        )
        for name in (behaviour, "works")
    )
    measurer.close()
    assert isinstance(failure, Failure) and failure.kind is kind and words in failure.message
    assert isinstance(after, Measurement)


def test_parent_sees_the_same_device(real):
    assert real[0].device == current_device(0)


def test_bench_runs_beside_torch():
    result = bench(AttentionProblem.parse("b=2 h=8 s=1024 d=128"), get_peers("cudnn,fa2"), rounds=5)
    for entry in result.entries:
        assert entry.median_us is not None and not entry.note, entry
    assert result.best_peer.speedup_interval[0] <= result.best_peer.speedup <= result.best_peer.speedup_interval[1]


def test_host_cost_is_below_torch():
    cost = host_cost()
    assert cost.ratio_interval[1] < 1, cost
