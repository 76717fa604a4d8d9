"""One trial: a config becomes an artifact, passes the family's policy, and is measured."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fa4gen.arch import Device
from fa4gen.errors import CacheError, CompileError, UsageError
from fa4gen.feasibility import can_implement
from fa4gen.measure.base import Failure, FailureKind, Measurement, Measurer
from fa4gen.problem import AttentionProblem
from fa4gen.tune.known_bad import KnownBad
from fa4gen.variant import Variant

if TYPE_CHECKING:
    from fa4gen.artifact_cache import Artifact

__all__ = ["Bench", "Compiler", "Outcome", "slow_code"]

FACTS = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "smem_bytes", "wgmma_serialized")


class Compiler(Protocol):
    """What :class:`fa4gen.compile.CompilePool` offers to a search."""

    def submit(self, variant: Variant) -> Future[Artifact]:
        """Starts compiling; ``result()`` raises CompileError."""

    def close(self, *, drop: bool = False) -> None:
        """Frees its processes; ``drop``: without finishing what was submitted."""


@dataclass(frozen=True)
class Outcome:
    """What a trial gave. ``facts``: of the artifact (registers, spills, ...), empty where there is none."""

    result: Measurement | Failure
    facts: dict[str, Any] = field(default_factory=dict)


def slow_code(artifact: Artifact) -> Failure | None:
    """Why ``artifact`` is not worth measuring, or None: spilled accumulators or serialised WGMMA, the families' policy.

    Only ptxas knows, so it is a failed trial, of kind infeasible.
    """
    spilled = artifact.meta.spill_store_bytes + artifact.meta.spill_load_bytes
    if spilled:
        return Failure(FailureKind.INFEASIBLE, f"ptxas spills {spilled} B a thread")
    if artifact.meta.wgmma_serialized:
        return Failure(FailureKind.INFEASIBLE, "ptxas serialises its wgmma instructions")
    return None


@dataclass(frozen=True)
class Bench:
    """What trials run on: one measurer per device, all for the same silicon. A context manager that closes them.

    ``keep_slow_code`` measures what :func:`slow_code` would reject. ``provenance`` is added to every result's.

    Raises:
        UsageError: no measurer, measurers of different devices or kinds, or none to compile what they need.
    """

    measurers: Sequence[Measurer]
    compiler: Compiler | None = None
    known_bad: KnownBad = field(default_factory=KnownBad)
    keep_slow_code: bool = False
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = sorted({f"{m.name} on {m.device.name} ({m.device.key})" for m in self.measurers})
        if len(kinds) != 1:
            raise UsageError(f"a search needs measurers of one kind of device, got: {', '.join(kinds) or 'none'}")
        if self.compiler is None and self.measurers[0].needs_artifact:
            raise UsageError(f"measurer {self.measurers[0].name} needs compiled kernels, and there is no compiler")

    @property
    def device(self) -> Device:
        """The silicon."""
        return self.measurers[0].device

    def variant(self, problem: AttentionProblem, config: Any) -> Variant:
        """The variant a trial of ``config`` runs."""
        return Variant.of(self.device.arch.name, problem, config)

    def allows(self, problem: AttentionProblem, config: Any) -> bool:
        """Whether ``config`` may be tried: it can run, and is not known to hang, crash or be wrong."""
        if can_implement(problem, config, self.device.arch) is not None:
            return False
        return not self._compiles or self.known_bad.get(self.variant(problem, config)) is None

    def start(self, problem: AttentionProblem, config: Any) -> Future[Artifact] | None:
        """Starts compiling; None where the measurers need no artifact."""
        return self.compiler.submit(self.variant(problem, config)) if self._compiles and self.compiler else None

    def finish(
        self,
        problem: AttentionProblem,
        config: Any,
        artifact: Future[Artifact] | None,
        measurer: Measurer,
        samples: int,
    ) -> Outcome:
        """Waits for the artifact and measures it.

        Raises:
            CacheError: the artifact cache cannot be written, which says nothing about ``config``.
            MeasureError: the measurer cannot be set up.
        """
        variant = self.variant(problem, config)
        if artifact is None:
            return Outcome(measurer.measure(problem, variant, None, samples=samples))
        try:
            compiled = artifact.result()
        except CacheError:
            raise
        except CompileError as error:
            return Outcome(Failure(FailureKind.COMPILE, str(error)))
        facts = {name: getattr(compiled.meta, name) for name in FACTS}
        rejected = None if self.keep_slow_code else slow_code(compiled)
        if rejected is not None:
            return Outcome(rejected, facts)
        result = measurer.measure(problem, variant, compiled, samples=samples)
        if isinstance(result, Failure):
            self.known_bad.add(variant, result)
        return Outcome(result, facts)

    @property
    def _compiles(self) -> bool:
        return self.measurers[0].needs_artifact

    def close(self, *, drop: bool = False) -> None:
        """Closes measurers and compiler; ``drop``: without finishing what is being compiled."""
        for measurer in self.measurers:
            measurer.close()
        if self.compiler is not None:
            self.compiler.close(drop=drop)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self.close(drop=error_type is not None)
