"""Predicts instead of measuring: the throughput bound as a time, or the timing model's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa4gen.arch import Device
from fa4gen.bound import bound
from fa4gen.errors import Fa4genError, UsageError
from fa4gen.measure.base import Failure, FailureKind, Measurement, Measurer, Source
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

if TYPE_CHECKING:
    from fa4gen.artifact_cache import Artifact
    from fa4gen.timing.model import TracedVariant

__all__ = ["BoundMeasurer", "ModelMeasurer"]


class BoundMeasurer(Measurer):
    """Takes :func:`fa4gen.bound.bound` at ``device``'s maximum clock for the time. Most knobs do not move it."""

    name = "bound"
    needs_artifact = False
    margin = 0.05

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


class ModelMeasurer(Measurer):
    """The timing model of :mod:`fa4gen.timing`, for Hopper: its constants were fitted on an H200.

    A measurement's samples are the members of an ensemble, always in one order, so that members of two variants at the
    same place have the same constants. They tell the model's own uncertainty about phases, not its error: ``margin``.

    Raises:
        UsageError: ``device`` is no sm_90a, or numba is not installed.
    """

    def __init__(self, device: Device) -> None:
        if device.arch.name != "sm_90a":
            raise UsageError(f"the timing model knows sm_90a, not {device.arch.name}")
        try:
            import numba  # noqa: F401
        except ImportError:
            raise UsageError("the timing model needs numba: pip install 'fa4gen[model]'") from None
        from fa4gen.timing.constants import H200
        from fa4gen.timing.model import VERSION

        self._device = device
        self._constants = H200
        self._traced: dict[str, TracedVariant] = {}
        self.name = f"timing model {VERSION}, constants {H200.digest}"
        self.margin = 0.05

    @property
    def device(self) -> Device:
        """The device predicted for."""
        return self._device

    def measure(
        self, problem: AttentionProblem, variant: Variant, artifact: Artifact | None, *, samples: int = 20
    ) -> Measurement | Failure:
        """An ensemble of at least ``samples`` and seven predictions; a failure where the emulator or the path search
        stops."""
        from fa4gen.timing.model import MEMBERS, ensemble, trace_variant

        assert artifact is not None, "needs_artifact"
        try:
            if variant.digest not in self._traced:
                self._traced[variant.digest] = trace_variant(artifact, problem, variant.config)
            members = max(samples, MEMBERS)
            predictions = ensemble(self._traced[variant.digest], problem, self._device, self._constants, members)
        except Fa4genError as error:
            return Failure(FailureKind.INFEASIBLE, f"no prediction: {error}")
        times = tuple(prediction.microseconds for prediction in predictions)
        clock = 1000 * float(np.median([prediction.clock_ghz for prediction in predictions]))
        return Measurement(times, Source.PREDICTED, clock_mhz=round(clock))
