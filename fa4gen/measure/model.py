"""Predicts instead of measuring: the throughput bound as a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa4gen.arch import Device
from fa4gen.bound import bound
from fa4gen.measure.base import Failure, Measurement, Measurer, Source
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

if TYPE_CHECKING:
    from fa4gen.artifact_cache import Artifact

__all__ = ["BoundMeasurer"]


class BoundMeasurer(Measurer):
    """Takes :func:`fa4gen.bound.bound` at ``device``'s maximum clock for the time. Most knobs do not move it."""

    name = "model"
    needs_artifact = False

    def __init__(self, device: Device) -> None:
        self._device = device

    @property
    def device(self) -> Device:
        """The device predicted for."""
        return self._device

    def measure(
        self, problem: AttentionProblem, variant: Variant, artifact: Artifact | None, *, samples: int = 20
    ) -> Measurement | Failure:
        """``samples`` times the same prediction, marked as predicted."""
        predicted = bound(problem, variant.config, self._device)
        return Measurement((predicted.microseconds,) * samples, Source.PREDICTED, clock_mhz=predicted.clock_mhz)
