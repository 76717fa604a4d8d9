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


class ModelMeasurer(Measurer):
    """The timing model of :mod:`fa4gen.timing`, for Hopper: its constants were fitted on an H200.

    A measurement's samples are an ensemble's predictions, so their interval is the model's own uncertainty about
    phases, not its error.

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

        self._device = device
        self._constants = H200
        self._traced: dict[str, TracedVariant] = {}
        self.name = f"timing model {H200.digest}"

    @property
    def device(self) -> Device:
        """The device predicted for."""
        return self._device

    def measure(
        self, problem: AttentionProblem, variant: Variant, artifact: Artifact | None, *, samples: int = 20
    ) -> Measurement | Failure:
        """At least ``samples`` predictions, an ensemble's over and over; a failure where the emulator or the path
        search stops."""
        from fa4gen.timing.model import ensemble, trace_variant

        assert artifact is not None, "needs_artifact"
        try:
            if variant.digest not in self._traced:
                self._traced[variant.digest] = trace_variant(artifact, problem, variant.config)
            predictions = ensemble(self._traced[variant.digest], problem, self._device, self._constants)
        except Fa4genError as error:
            return Failure(FailureKind.CRASHED, f"no prediction: {error}")
        times = [prediction.microseconds for prediction in predictions]
        samples = max(samples, len(times))
        clock = 1000 * float(np.median([prediction.clock_ghz for prediction in predictions]))
        return Measurement(tuple(np.resize(times, samples).tolist()), Source.PREDICTED, clock_mhz=clock)
