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
    from fa4gen.timing.model import Prediction, TracedVariant

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
    """The timing model of :mod:`fa4gen.timing`. Its constants were fitted on an H200; those of Blackwell are assumed.

    A measurement's samples are the members of an ensemble, always in one order, so that members of two variants at the
    same place have the same constants. They tell the model's own uncertainty about phases, not its error: ``margin``.

    Raises:
        UsageError: numba is not installed.
    """

    def __init__(self, device: Device) -> None:
        try:
            import numba  # noqa: F401
        except ImportError:
            raise UsageError("the timing model needs numba: pip install 'fa4gen[model]'") from None
        from fa4gen.timing.constants import CHIPS
        from fa4gen.timing.model import VERSION

        chip = CHIPS[device.arch.name]
        self._device = device
        self.constants = chip.constants
        self._traced: dict[str, TracedVariant] = {}
        self.name = f"timing model {VERSION}, constants {chip.constants.digest}"
        self.name += "" if chip.calibrated else " (chip uncalibrated)"
        self.margin = chip.margin

    @property
    def device(self) -> Device:
        """The device predicted for."""
        return self._device

    def measure(
        self, problem: AttentionProblem, variant: Variant, artifact: Artifact | None, *, samples: int = 20
    ) -> Measurement | Failure:
        """An ensemble of at least ``samples`` and seven predictions; a failure where the emulator or the path search
        stops."""
        assert artifact is not None, "needs_artifact"
        try:
            predictions = self.predict(problem, variant, artifact, samples)
        except Fa4genError as error:
            return Failure(FailureKind.INFEASIBLE, f"no prediction: {error}")
        times = tuple(prediction.microseconds for prediction in predictions)
        clock = 1000 * float(np.median([prediction.clock_ghz for prediction in predictions]))
        return Measurement(times, Source.PREDICTED, clock_mhz=round(clock))

    def predict(
        self, problem: AttentionProblem, variant: Variant, artifact: Artifact, members: int = 0
    ) -> list[Prediction]:
        """An ensemble of at least ``members`` and seven; the first is the model's own.

        Raises:
            Fa4genError: see :meth:`traced`, or the simulated kernel deadlocks.
        """
        from fa4gen.timing.model import MEMBERS, ensemble

        traced = self.traced(problem, variant, artifact)
        return ensemble(traced, problem, self._device, self.constants, max(members, MEMBERS))

    def traced(self, problem: AttentionProblem, variant: Variant, artifact: Artifact) -> TracedVariant:
        """What the simulator needs of a variant; made once.

        Raises:
            Fa4genError: a backward kernel, or the emulator or the path search stops.
        """
        from fa4gen.timing.model import trace_variant

        if problem.op != "fwd":
            raise UsageError(f"the timing model knows no {problem.op} kernels")
        if variant.digest not in self._traced:
            self._traced[variant.digest] = trace_variant(artifact, problem, variant.config)
        return self._traced[variant.digest]
