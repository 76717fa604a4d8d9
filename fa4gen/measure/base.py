"""Where a trial gets its number: the interface of all measurers, and the two things one can return."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from fa4gen.arch import Device
from fa4gen.config import Config
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

if TYPE_CHECKING:
    from fa4gen.artifact_cache import Artifact

__all__ = ["Failure", "FailureKind", "Measurement", "Measurer", "Source", "median_interval"]


class FailureKind(str, Enum):
    """Why a variant has no time."""

    INFEASIBLE = "infeasible"
    COMPILE = "compile"
    LAUNCH = "launch"
    TIMEOUT = "timeout"
    WRONG = "wrong"
    CRASHED = "crashed"


class Source(str, Enum):
    """Where a time comes from. A predicted time never stands beside a measured one without this mark."""

    MEASURED = "measured"
    PREDICTED = "predicted"


@dataclass(frozen=True)
class Failure:
    """A variant that could not be measured. A result, not an exception: the search goes on."""

    kind: FailureKind
    message: str


@dataclass(frozen=True)
class Measurement:
    """Times of one variant on one problem.

    ``samples_us``: one entry a launch, microseconds. ``clock_mhz`` and ``power_w``: medians while it ran, None where
    the measurer cannot know them.
    """

    samples_us: tuple[float, ...]
    source: Source = Source.MEASURED
    clock_mhz: float | None = None
    power_w: float | None = None
    extra: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def median_us(self) -> float:
        """Median of the samples, microseconds."""
        return float(np.median(self.samples_us))

    @property
    def interval_us(self) -> tuple[float, float]:
        """95 % confidence interval of the median, microseconds."""
        return median_interval(self.samples_us)


def median_interval(samples: tuple[float, ...] | list[float], z: float = 1.96) -> tuple[float, float]:
    """Distribution-free confidence interval of the median from order statistics.

    Ranks n/2 ± z·√n/2 (the normal approximation of the binomial), clamped to the sample; z = 1.96 gives 95 %.
    """
    ordered = sorted(samples)
    n = len(ordered)
    if n == 0:
        raise ValueError("median_interval needs at least one sample")
    half = z * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - half))
    high = min(n - 1, math.ceil(n / 2 + half))
    return ordered[low], ordered[high]


class Measurer(ABC):
    """Measures variants for one device. ``needs_artifact`` says whether :meth:`measure` wants a compiled object.

    ``name`` says what gives the times ("cuda", "bound", a recorded grid): it goes into provenance, and times of
    measurers with different names are never mixed in one search. ``margin``: a relative difference of times below
    which they order nothing, however often they are taken; above 0 for predictions.
    """

    name: str = "custom"
    needs_artifact: bool = True
    margin: float = 0.0

    @property
    @abstractmethod
    def device(self) -> Device:
        """The silicon the times are for."""

    @abstractmethod
    def measure(
        self, problem: AttentionProblem, variant: Variant, artifact: Artifact | None, *, samples: int = 20
    ) -> Measurement | Failure:
        """Times ``variant`` on ``problem``, at least ``samples`` launches. Never raises for a bad variant."""

    def configs(self, problem: AttentionProblem) -> Collection[Config] | None:
        """The only configs it has times for, or None where it measures any."""
        return None

    def close(self) -> None:
        """Frees what the measurer holds (worker processes). Safe to call twice."""
