"""Fits the simulator's constants to recorded times, and says how good predictions are on what was held out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fa4gen.arch import Device
from fa4gen.config import Config
from fa4gen.errors import UsageError
from fa4gen.measure.base import Failure
from fa4gen.measure.replay import RecordedProblem
from fa4gen.problem import AttentionProblem
from fa4gen.timing.constants import Constants
from fa4gen.timing.model import TracedVariant, predict
from fa4gen.timing.simulator import Stuck

__all__ = ["FITTED", "Case", "Score", "choose", "clock_line", "fit", "loss", "score"]

# Constants that :func:`fit` may move, and how far they may go.
FITTED: Mapping[str, tuple[float, float]] = {
    "mma_start": (10, 300),
    "mma_queue": (1, 8),
    "smem_factor": (0.5, 3),
    "contention": (1, 4),
    "mufu_contention": (1, 4),
    "issue_cost": (1, 3),
    "mufu_latency": (10, 60),
    "mbarrier": (10, 300),
    "named_barrier": (5, 100),
    "mma_drain": (2, 150),
    "shuffle_latency": (15, 60),
    "fence": (10, 400),
    "l2_bytes": (20, 120),
    "load_latency": (200, 2000),
    "fresh_latency": (100, 4000),
    "store_latency": (100, 2000),
    "cta_launch": (100, 4000),
}


# Of a constant's squared distance from its prior, in logarithms: 0.1 % of error for a factor of 1.4.
PENALTY = 0.01


@dataclass(frozen=True)
class Case:
    """One recorded config of a problem: median microseconds, and what the model knows of its variant."""

    problem: AttentionProblem
    config: Config
    measured_us: float
    traced: TracedVariant


@dataclass(frozen=True)
class Score:
    """Predictions of one cell (a problem's configs) against measured times.

    ``spearman``: rank correlation. ``error``: mean relative error after the cell's median ratio ``bias`` is taken out.
    ``regret``: how much slower than the best config the first pick is; ``regret_of_five``: the best of the first five.
    """

    configs: int
    spearman: float
    error: float
    bias: float
    regret: float
    regret_of_five: float

    def __str__(self) -> str:
        return (
            f"{self.configs:4d} configs  rho {self.spearman:5.2f}  error {self.error:6.1%}  bias {self.bias:5.2f}  "
            f"regret {self.regret:6.1%}  of five {self.regret_of_five:6.1%}"
        )


def score(predicted: Sequence[float], measured: Sequence[float]) -> Score:
    """Compares two sequences of times of the same configs."""
    guess, truth = np.asarray(predicted, float), np.asarray(measured, float)
    ratio = guess / truth
    bias = float(np.median(ratio))
    order = np.argsort(guess, kind="stable")
    return Score(
        configs=len(truth),
        spearman=float(np.corrcoef(_ranks(guess), _ranks(truth))[0, 1]),
        error=float(np.mean(np.abs(ratio / bias - 1))),
        bias=bias,
        regret=float(truth[order[0]] / truth.min() - 1),
        regret_of_five=float(truth[order[:5]].min() / truth.min() - 1),
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, equal values sharing their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def choose(recorded: RecordedProblem, count: int, rng: random.Random) -> dict[Config, float]:
    """``count`` of a problem's recorded configs with their median times: the first one, the six fastest, and others at
    random. Without the fastest, the regret of a pick would mean little."""
    times = {c: float(np.median(t)) for c, t in recorded.trials.items() if not isinstance(t, Failure)}
    fastest = sorted(times, key=times.__getitem__)
    others = rng.sample(fastest, len(fastest))
    return {config: times[config] for config in list(dict.fromkeys([*list(times)[:1], *fastest[:6], *others]))[:count]}


def clock_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(base, slope) in GHz of the clock under load: the least-squares line through (tensor core utilisation, GHz).

    Raises:
        UsageError: fewer than two points.
    """
    if len(points) < 2:
        raise UsageError("the clock's line needs two kernels whose cycles were counted and which were timed")
    utilisation, clock = np.array(points).T
    slope, base = np.polyfit(utilisation, clock, 1)
    return float(f"{base:.4g}"), float(f"{-slope:.4g}")


def loss(cases: Sequence[Case], device: Device, constants: Constants, prior: Constants) -> float:
    """What :func:`fit` makes small: the mean absolute logarithm of predicted over measured without the cell's median, a
    share of that median, and how far the constants are from ``prior``: one cell does not determine them all.
    """
    logs = []
    for case in cases:
        try:
            predicted = predict(case.traced, case.problem, device, constants).microseconds
            logs.append(float(np.log(predicted / case.measured_us)))
        except Stuck:
            logs.append(1.0)
    bias = float(np.median(logs))
    moved = sum(math.log(getattr(constants, name) / getattr(prior, name)) ** 2 for name in FITTED)
    return float(np.minimum(np.abs(np.array(logs) - bias), 0.5).mean()) + 0.3 * abs(bias) + PENALTY * moved


def fit(
    start: Constants,
    loss: Callable[[Constants], float],
    names: Sequence[str] = tuple(FITTED),
    factors: Sequence[float] = (1.4, 1.15),
    progress: Callable[[Constants, float], None] | None = None,
) -> Constants:
    """Coordinate search: each constant in turn goes up or down by a factor as long as ``loss`` falls.

    ``factors``: one pass over all ``names`` each, coarse to fine. "mma_queue" moves by one. ``progress`` is told each
    improvement.
    """
    best, lowest = start, loss(start)
    for factor in factors:
        for name in names:
            for direction in (factor, 1 / factor):
                while (trial := _moved(best, name, direction)) is not None and (value := loss(trial)) < lowest:
                    best, lowest = trial, value
                    if progress is not None:
                        progress(best, lowest)
    return best


def _moved(constants: Constants, name: str, factor: float) -> Constants | None:
    """``constants`` with one moved, None where it is at its limit."""
    low, high = FITTED[name]
    old = getattr(constants, name)
    new = old + (1 if factor > 1 else -1) if name == "mma_queue" else old * factor
    new = float(f"{min(max(new, low), high):.4g}")
    return None if new == old else replace(constants, **{name: new})
