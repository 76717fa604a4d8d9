"""The final: the best few configs and the default, interleaved, until the leader's advantage is certain or it is a tie.

Times of distant moments differ by several percent on a GPU (clock, temperature, power), times of one round by much
less. So configs are compared by ratios within rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from fa4gen.config import Config
from fa4gen.measure.base import Failure, Measurement, Source, median_interval
from fa4gen.tune.effort import Effort

__all__ = ["RaceResult", "Standing", "distance", "race", "ratio_interval"]

CONFIDENCE = 0.99  # of each comparison; there are several a race, looked at after every round
_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass
class Standing:
    """One contender: a median (us) a round it ran in, and all of its measurements.

    A predicted measurement is a round a sample: members of an ensemble, each with constants that all contenders share.
    """

    config: Config
    rounds: list[float] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    @property
    def samples_us(self) -> tuple[float, ...]:
        """Every launch of every round."""
        return tuple(sample for measurement in self.measurements for sample in measurement.samples_us)

    @property
    def median_us(self) -> float:
        """Median of every launch."""
        return float(np.median(self.samples_us))

    @property
    def interval_us(self) -> tuple[float, float]:
        """95 % confidence interval of the median; of predictions the 10th to the 90th percentile of the ensemble."""
        if self.measurements[0].source is Source.MEASURED:
            return median_interval(self.samples_us)
        low, high = np.percentile(self.samples_us, (10, 90))
        return float(low), float(high)

    @property
    def clock_mhz(self) -> float | None:
        """Median SM clock, None if it was not known."""
        return _median([m.clock_mhz for m in self.measurements])

    @property
    def power_w(self) -> float | None:
        """Median board power, None if it was not known."""
        return _median([m.power_w for m in self.measurements])


@dataclass(frozen=True)
class RaceResult:
    """``standings``: the winner, then the others that never failed, fastest first. ``tied``: the configs among which
    nearness to the default decided, the winner included."""

    standings: tuple[Standing, ...]
    tied: tuple[Config, ...]
    rounds: int

    @property
    def winner(self) -> Standing:
        """The config to run."""
        return self.standings[0]

    def gap(self, standing: Standing) -> float:
        """Time of ``standing`` over the winner's, minus one; from common rounds. Below 0 only for a tied config."""
        return math.exp(_mean_log_ratio(standing, self.winner)) - 1


def race(
    contenders: Sequence[Config],
    default: Config,
    measure: Callable[[Config], Measurement | Failure],
    effort: Effort,
    *,
    margin: float = 0.0,
    keep_going: Callable[[], bool] = lambda: True,
    on_round: Callable[[int, Sequence[Standing]], None] = lambda *_: None,
) -> RaceResult | None:
    """Races ``contenders``, best guess first.

    A round measures each once; the order rotates. After ``effort.min_rounds``, a contender that is slower than the
    leader by more than ``margin`` (of its time) with confidence drops out. It ends when the leader is alone, after
    ``effort.max_rounds``, or when ``keep_going`` says no; of those still in it, the one with fewest knobs off
    ``default`` wins, then the faster one. A contender that fails is out.

    Returns:
        None if every contender failed.
    """
    standings = [Standing(config) for config in dict.fromkeys(contenders)]
    running = list(standings)
    rounds = 0
    while rounds < effort.max_rounds and (rounds < effort.min_rounds or keep_going()):
        for standing in running[rounds % len(running) :] + running[: rounds % len(running)]:
            result = measure(standing.config)
            if isinstance(result, Failure):
                running.remove(standing)
                standings.remove(standing)
            else:
                predicted = result.source is Source.PREDICTED
                standing.rounds += result.samples_us if predicted else [result.median_us]
                standing.measurements.append(result)
        if not running:
            return None
        rounds += 1
        on_round(rounds, running)
        if rounds >= effort.min_rounds:
            leader = min(running, key=_mean_log)
            running = [s for s in running if s is leader or not _beaten(s, leader, margin)]
            if len(running) == 1:
                break
    winner = min(running, key=lambda s: (distance(s.config, default), _mean_log(s)))
    others = sorted((s for s in standings if s is not winner), key=lambda s: _mean_log_ratio(s, winner))
    return RaceResult((winner, *others), tuple(s.config for s in running), rounds)


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Student-t interval of the mean of paired log ratios, at :data:`CONFIDENCE`; needs at least two."""
    mean = float(np.mean(ratios))
    half = _student_t(len(ratios) - 1) * float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios))
    return mean - half, mean + half


def _student_t(freedom: int) -> float:
    """Quantile of Student's t for a two-sided interval: Abramowitz and Stegun 26.7.5, 2 % short at 4 degrees."""
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _beaten(standing: Standing, leader: Standing, margin: float) -> bool:
    low, _ = ratio_interval(_log_ratios(standing, leader))
    return low > math.log1p(margin)


def _log_ratios(standing: Standing, other: Standing) -> list[float]:
    """Over common rounds: a contender that dropped out ran in the first ones."""
    return [math.log(a / b) for a, b in zip(standing.rounds, other.rounds, strict=False)]


def _mean_log_ratio(standing: Standing, other: Standing) -> float:
    return float(np.mean(_log_ratios(standing, other)))


def _mean_log(standing: Standing) -> float:
    return float(np.mean(np.log(standing.rounds)))


def distance(config: Config, default: Config) -> int:
    """How many knobs are off the default."""
    return sum(value != vars(default)[name] for name, value in vars(config).items())
