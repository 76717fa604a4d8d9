"""The engine of the measuring process, on the CPU: torch functions stand in for kernels, a fake for the timer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import backward_fakes
import pytest
import torch

from fa4gen.accuracy import reference
from fa4gen.arch import DEVICES
from fa4gen.errors import MeasureError
from fa4gen.measure import cuda
from fa4gen.measure.base import Failure, FailureKind, Measurement
from fa4gen.measure.worker import EngineFault
from fa4gen.problem import AttentionProblem

torch.set_num_threads(1)
PROBLEM = AttentionProblem.parse("b=1 h=2 hk=1 s=128 d=32 causal lse")


class Kernel:
    """Right, but for what ``spoil`` does to (q, o, lse). Counts its launches and the distinct Q it was given."""

    def __init__(self, spoil=None):
        self.spoil, self.launches, self.inputs = spoil, 0, set()

    def __call__(self, q, k, v, o, lse, scale, num_sms):
        assert num_sms == 132
        self.launches += 1
        self.inputs.add(q.data_ptr())
        p = AttentionProblem(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], 32, 32, causal=True)
        out, want_lse = reference(q, k, v, p, scale)
        o.copy_(out)
        lse.copy_(want_lse)
        if self.spoil:
            self.spoil(q, o, lse)


class FakeTimer:
    launch_us = 1000.0

    def __init__(self, index):
        pass

    def time(self, launches):
        for launch in launches[:3]:
            launch()
        return cuda.Timing((self.launch_us,) * len(launches), 1980.0, 500.0)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(cuda, "current_device", lambda index: DEVICES["NVIDIA H200"])
    monkeypatch.setattr(cuda, "DeviceTimer", FakeTimer)
    monkeypatch.setattr(cuda, "load_kernel", lambda artifact: artifact.kernel)
    monkeypatch.setattr(cuda, "_context_is_sound", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda.CudaEngine, "torch_device", "cpu")
    return cuda.CudaEngine(0)


def measure(engine, kernel, samples=20, problem=PROBLEM):
    engine.prepare(problem)
    return engine.measure(problem, SimpleNamespace(path=Path(f"/{id(kernel)}"), kernel=kernel), samples)


def test_right_kernel_is_checked_once_and_timed_on_rotating_inputs(engine):
    kernel = Kernel()
    first = measure(engine, kernel)
    assert isinstance(first, Measurement) and first.clock_mhz == 1980.0 and first.power_w == 500.0
    assert 0 < first.extra["relative_error"] < 4e-3 and first.extra["of_limit"] < 0.5
    checks_and_times = kernel.launches
    assert checks_and_times == 3 + 3 + 3
    assert len(kernel.inputs) == 2 + 3
    measure(engine, kernel)
    assert kernel.launches == checks_and_times + 3 + 3


def test_launches_follow_duration_within_limits(engine, monkeypatch):
    counts = []
    for launch_us in (5.0, 1000.0, 20_000.0):
        monkeypatch.setattr(FakeTimer, "launch_us", launch_us)
        counts.append(len(measure(engine, Kernel(), samples=10).samples_us))
    assert counts == [100, 50, 10]


def spoil_tail(q, o, lse):
    if q.shape[1] % 64:
        o[:, -1] = float("nan")


def spoil_lse(q, o, lse):
    lse[..., 5] += 0.01


def spoil_row(q, o, lse):
    o[0, 100, 1] = o[0, 101, 1]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_tail, ("sq=333 sk=517", "not finite")),
        (spoil_lse, ("LSE is wrong", "row 5")),
        (spoil_row, ("O is wrong", "row 100")),
    ],
)
def test_wrong_kernel_is_named_wrong_and_not_timed(engine, spoil, words):
    kernel = Kernel(spoil)
    failure = measure(engine, kernel)
    assert isinstance(failure, Failure) and failure.kind is FailureKind.WRONG
    assert all(word in failure.message for word in words)
    launches = kernel.launches
    assert measure(engine, kernel) == failure and kernel.launches == launches


def raising(q, o, lse):
    raise RuntimeError("CUDA error: invalid argument\nmore lines")


def test_refused_launch_and_broken_context(engine, monkeypatch):
    assert measure(engine, Kernel(raising)) == Failure(FailureKind.LAUNCH, "RuntimeError: CUDA error: invalid argument")
    monkeypatch.setattr(cuda, "_context_is_sound", lambda: False)
    with pytest.raises(EngineFault, match="CUDA error: invalid argument"):
        measure(engine, Kernel(raising))


def test_verify_takes_any_kind_of_inputs(engine):
    artifact = SimpleNamespace(path=Path("/k"), kernel=Kernel())
    for kind in ("peaked", "expanded"):
        report = engine.verify(PROBLEM, artifact, kind, 1)
        assert report.ok and report.rows == 128


class BackwardKernel:
    """Right, but for what ``spoil`` does to (launch number, dq, dk, dv)."""

    def __init__(self, spoil=None):
        self.spoil, self.launches = spoil, 0

    def __call__(self, *arguments):
        self.launches += 1
        assert bool(arguments[9].isnan().all()), "the workspace is not poisoned"
        backward_fakes.kernel(causal=True)(*arguments)
        if self.spoil:
            self.spoil(self.launches, *arguments[6:9])


@pytest.mark.parametrize("flag", ["", " deterministic"])
def test_backward_is_checked_and_timed(engine, monkeypatch, flag):
    backward_fakes.use_fake_family(monkeypatch)
    problem = AttentionProblem.parse(f"b=1 h=2 hk=1 s=128 d=32 causal op=bwd{flag}")
    kernel, config = BackwardKernel(), backward_fakes.FakeConfig()
    engine.prepare(problem)
    artifact = SimpleNamespace(path=Path("/k"), kernel=kernel)
    result = engine.measure(problem, artifact, 20, config)
    assert isinstance(result, Measurement), result
    assert 0 < result.extra["of_limit"] < 0.7 and 0 < result.extra["relative_error"] < 4e-3
    assert kernel.launches == 3 * (2 if flag else 1) + 3 + 3
    for kind in ("strided", "expanded"):
        assert engine.verify(problem, artifact, kind, 1, config).ok


def lose_dk(launch, dq, dk, dv):
    dk[:, 7] = 0


def drift(launch, dq, dk, dv):
    dv[0, 3, 0, 0] += launch * 1e-2 * dv[0, 3, 0, 0].abs().clamp(min=0.1)


def unwritten(launch, dq, dk, dv):
    if dq.shape[1] % 64:
        dq[:, -1] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(lose_dk, "dK is wrong"), (drift, "dv differs between two launches"), (unwritten, "sq=333 sk=517")],
)
def test_wrong_backward_is_named_wrong(engine, monkeypatch, spoil, words):
    backward_fakes.use_fake_family(monkeypatch)
    problem = AttentionProblem.parse("b=1 h=2 hk=1 s=128 d=32 causal op=bwd deterministic")
    engine.prepare(problem)
    artifact = SimpleNamespace(path=Path("/k"), kernel=BackwardKernel(spoil))
    failure = engine.measure(problem, artifact, 20, backward_fakes.FakeConfig())
    assert isinstance(failure, Failure) and failure.kind is FailureKind.WRONG and words in failure.message


def test_empty_problem_is_an_error(engine):
    with pytest.raises(MeasureError, match="is empty"):
        engine.prepare(AttentionProblem.parse("b=0 h=1 s=64 d=64"))


def test_memory_is_given_back_before_giving_up(engine, monkeypatch):
    real, attempts = engine._timed_case, []

    def exhausted(problem):
        attempts.append(problem)
        if len(attempts) < 2:
            raise torch.OutOfMemoryError("no memory")
        return real(problem)

    monkeypatch.setattr(engine, "_timed_case", exhausted)
    engine.prepare(PROBLEM)
    assert len(attempts) == 2
    monkeypatch.setattr(engine, "_timed_case", lambda problem: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(MeasureError, match="does not fit the memory of NVIDIA H200"):
        engine.prepare(PROBLEM)
