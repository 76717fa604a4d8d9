"""Every error fa4gen raises on purpose. The message states the rule, the offending value, and what to do."""

from __future__ import annotations

__all__ = [
    "CacheError",
    "CompileError",
    "Fa4genError",
    "InfeasibleConfig",
    "MeasureError",
    "NoDeviceError",
    "TableError",
    "UnsupportedProblem",
    "UsageError",
]


class Fa4genError(Exception):
    """Root of all fa4gen errors. ``exit_code`` is what the command line exits with."""

    exit_code = 1


class UsageError(Fa4genError):
    """Input a user wrote is wrong: an argument, a problem string, a YAML file."""

    exit_code = 2


class UnsupportedProblem(UsageError, ValueError):
    """No kernel family can run this problem, or the tensors do not describe one."""


class InfeasibleConfig(UsageError, ValueError):
    """A config was asked for by name that :func:`fa4gen.feasibility.can_implement` rejects."""


class CompileError(Fa4genError):
    """CuTe DSL or ptxas refused a rendered source. Holds the DSL's message and the source path."""


class CacheError(CompileError):
    """The artifact cache cannot be written or locked: nothing is known of the kernel."""


class MeasureError(Fa4genError):
    """A measurement could not be set up at all (one bad config is a ``Failure``, not this)."""


class TableError(UsageError):
    """A tuned table cannot be read, written or merged."""


class NoDeviceError(Fa4genError):
    """The call needs a CUDA device and there is none that fa4gen can use."""
