"""Attention kernels: generated, verified, tuned, dispatched to. Importing this loads neither torch nor the DSL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fa4gen.errors import (
    CompileError,
    Fa4genError,
    InfeasibleConfig,
    MeasureError,
    NoDeviceError,
    TableError,
    UnsupportedProblem,
    UsageError,
)

if TYPE_CHECKING:
    from fa4gen.dispatch import misses
    from fa4gen.interface import attention, warmup

__all__ = [
    "CompileError",
    "Fa4genError",
    "InfeasibleConfig",
    "MeasureError",
    "NoDeviceError",
    "TableError",
    "UnsupportedProblem",
    "UsageError",
    "__version__",
    "attention",
    "misses",
    "warmup",
]

__version__ = "0.1.0"

_HOMES = {"attention": "fa4gen.interface", "warmup": "fa4gen.interface", "misses": "fa4gen.dispatch"}


def __getattr__(name: str) -> Any:
    """Loads ``attention``, ``warmup`` and ``misses`` at first use."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'fa4gen' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
