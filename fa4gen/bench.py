"""The kernel that :func:`fa4gen.attention` runs, beside its peers: one process, interleaved rounds, paired ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fa4gen.accuracy import make_inputs
from fa4gen.case import Case
from fa4gen.config import Config
from fa4gen.dispatch import dispatcher
from fa4gen.feasibility import can_implement
from fa4gen.interface import attention
from fa4gen.measure.base import median_interval
from fa4gen.measure.cuda import DeviceTimer, Timing, current_device
from fa4gen.measure.peers import Call, Peer, PeerAbsent, differentiated
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

__all__ = ["TINY", "BenchResult", "Entry", "HostCost", "bench", "host_cost", "ratio_interval", "variant_peer"]

OURS = "fa4gen"
TINY = AttentionProblem(1, 2, 2, 128, 128, 64, 64)
LAUNCHES = 5  # a turn's time is the median of so many launches
# Hides the host side of the slowest peer (about 120 us a call, several launches from another thread in a backward) from
# its device time.
HEAD_START_US = {"fwd": 400.0, "bwd": 1000.0}
ROTATE = 3  # sets of inputs


@dataclass(frozen=True)
class Entry:
    """One contestant. Without ``samples_us`` it did not run, and ``note`` says why.

    ``samples_us``: one time a round, microseconds. ``tflops`` at the median. ``speedup``: its median over ours (above
    1: ours is faster), with a 95 % bootstrap interval over rounds. ``note``: what is wrong with its output, if
    anything. ``clock_mhz`` and ``power_w``: medians while it ran, None if unknown.
    """

    name: str
    title: str
    version: str = ""
    note: str = ""
    samples_us: tuple[float, ...] = ()
    median_us: float | None = None
    interval_us: tuple[float, float] | None = None
    tflops: float | None = None
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
    relative_error: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class BenchResult:
    """One problem on one device; ``entries`` starts with ours, whose config came for ``reason``."""

    problem: str
    device: str
    reason: str
    entries: tuple[Entry, ...]

    @property
    def best_peer(self) -> Entry | None:
        """The fastest peer whose output is right."""
        ran = [e for e in self.entries if not e.name.startswith(OURS) and e.median_us is not None and not e.note]
        return min(ran, key=lambda entry: entry.median_us or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class HostCost:
    """Host microseconds a call, from Python's call to its return, medians over rounds.

    ``ratio`` is ours over torch SDPA's, with a 95 % bootstrap interval.
    """

    problem: str
    ours_us: float
    torch_us: float
    ratio: float
    ratio_interval: tuple[float, float]


@dataclass
class _Contestant:
    """One entry in the making: a call for each set of inputs, none if it cannot take part."""

    entry: Entry
    calls: list[Call]
    turns: list[Timing] = field(default_factory=list)

    @property
    def samples_us(self) -> list[float]:
        return [float(np.median(turn.samples_us)) for turn in self.turns]


@torch.no_grad()
def bench(
    problem: AttentionProblem, peers: Sequence[Peer], *, device_index: int = 0, rounds: int = 20, seed: int = 0
) -> BenchResult:
    """Checks every contestant's output once, then times all that run, in ``rounds`` rounds of random order.

    Of a backward problem the backward alone is timed, ours and the peers' through autograd.

    Times are device times as :mod:`fa4gen.measure.cuda` defines them, however long the host side of a call takes.

    Raises:
        Fa4genError: what :func:`fa4gen.attention` raises for the problem.
    """
    device = current_device(device_index)
    torch.cuda.set_device(device_index)
    cases = [Case.make(problem, "normal", seed + i, f"cuda:{device_index}") for i in range(ROTATE)]
    expected = cases[0].expect(seed)
    ours = _enter(Entry(OURS, OURS), lambda: _ours(problem), cases, expected)
    contestants = [ours, *(_enter_peer(peer, cases, expected) for peer in peers)]
    running = [contestant for contestant in contestants if contestant.calls]
    timer = DeviceTimer(device_index)
    rng = np.random.default_rng(seed)
    for turn in range(-1, rounds):  # the first round warms up
        for i in rng.permutation(len(running)):
            calls = running[i].calls
            timing = timer.time([calls[n % len(calls)] for n in range(LAUNCHES)], HEAD_START_US[problem.op])
            if turn >= 0:
                running[i].turns.append(timing)
    entries = tuple(_finish(contestant, ours, problem, seed) for contestant in contestants)
    return BenchResult(str(problem), device.name, dispatcher(device_index).resolve(problem).reason, entries)


@torch.no_grad()
def host_cost(
    problem: AttentionProblem = TINY, *, device_index: int = 0, calls: int = 300, rounds: int = 15
) -> HostCost:
    """Times calls of :func:`fa4gen.attention` and of torch SDPA (its own choice of kernel, its own layout) in turn.

    ``calls`` are made back to back without a sync: few enough for the launch queue (1024), so that no call waits.
    """
    torch.cuda.set_device(device_index)
    q, k, v = make_inputs(problem, "normal", 0, f"cuda:{device_index}")
    ours = partial(attention, q, k, v, causal=problem.causal)
    qt, kt, vt = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    theirs = partial(sdpa, qt, kt, vt, is_causal=problem.causal, enable_gqa=problem.gqa_ratio > 1)
    functions: tuple[Callable[[], Any], ...] = (ours, theirs)
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(-1, rounds):
        for function, times in zip(functions, samples, strict=True):
            elapsed = _call_us(function, calls)
            if turn >= 0:
                times.append(elapsed)
    return HostCost(
        str(problem),
        float(np.median(samples[0])),
        float(np.median(samples[1])),
        float(np.median(samples[0]) / np.median(samples[1])),
        ratio_interval(*samples),
    )


def ratio_interval(
    above: Sequence[float], below: Sequence[float], *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float]:
    """95 % bootstrap interval of median(above) / median(below); the i-th entries of both are one round."""
    pairs = np.random.default_rng(seed).integers(len(above), size=(resamples, len(above)))
    ratios = np.median(np.asarray(above)[pairs], axis=1) / np.median(np.asarray(below)[pairs], axis=1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def _call_us(function: Callable[[], Any], calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def variant_peer(title: str, change: Callable[[Config], Config], device_index: int = 0) -> Peer:
    """A contestant that runs what ``change`` makes of the config that dispatch would take for the problem."""

    def bind(problem: AttentionProblem) -> Callable[..., Call]:
        chosen = dispatcher(device_index)
        config = change(chosen.resolve(problem).config)
        rejection = can_implement(problem, config, chosen.device.arch)
        if rejection is not None:
            raise PeerAbsent(str(rejection))
        kernel = chosen.kernel(Variant.of(chosen.device.arch.name, problem, config))

        def prepare(*inputs: Tensor) -> Call:
            case = Case.of(problem, inputs)
            arguments = case.arguments(config, chosen.device.sm_count)

            def call() -> tuple[Tensor, ...]:
                kernel(*arguments)
                return tuple(case.outputs.values())

            return call

        return prepare

    return Peer(f"{OURS} {title}", f"{OURS} with {title}", "fa4gen", bind)


def _ours(problem: AttentionProblem) -> Callable[..., Call]:
    p = problem

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attention(q, k, v, causal=p.causal, return_lse=p.return_lse, deterministic=p.deterministic)
        return result[0] if isinstance(result, tuple) else result

    return differentiated(attend) if problem.op == "bwd" else partial(partial, attend)


def _enter(entry: Entry, bind: Callable[[], Callable[..., Call]], cases: Sequence[Case], expected: Any) -> _Contestant:
    """Binds a contestant and checks its output. What it raises goes through."""
    prepare = bind()
    calls = [prepare(*case.inputs.values()) for case in cases]
    result = calls[0]()
    report = cases[0].check(expected, (result,) if isinstance(result, Tensor) else result)
    note = "" if report.ok else report.message
    return _Contestant(replace(entry, note=note, relative_error=report.relative_error), calls)


def _enter_peer(peer: Peer, cases: Sequence[Case], expected: Any) -> _Contestant:
    """Like :func:`_enter`; a peer that cannot take part says why in its note."""
    entry = Entry(peer.name, peer.title, peer.version)
    try:
        return _enter(entry, lambda: peer.bind(cases[0].problem), cases, expected)
    except PeerAbsent as absent:
        note = str(absent)
    except Exception as error:  # noqa: BLE001 - other people's code refuses a problem in its own ways
        note = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return _Contestant(replace(entry, note=note), [])


def _finish(contestant: _Contestant, ours: _Contestant, problem: AttentionProblem, seed: int) -> Entry:
    samples = contestant.samples_us
    if not samples:
        return contestant.entry
    median_us = float(np.median(samples))
    is_peer = contestant is not ours
    return replace(
        contestant.entry,
        samples_us=tuple(samples),
        median_us=median_us,
        interval_us=median_interval(samples),
        tflops=problem.flops / median_us / 1e6,
        speedup=median_us / float(np.median(ours.samples_us)) if is_peer else None,
        speedup_interval=ratio_interval(samples, ours.samples_us, seed=seed) if is_peer else None,
        clock_mhz=_median([turn.clock_mhz for turn in contestant.turns]),
        power_w=_median([turn.power_w for turn in contestant.turns]),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
