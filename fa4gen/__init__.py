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

    __version__: str

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

_HOMES = {"attention": "fa4gen.interface", "warmup": "fa4gen.interface", "misses": "fa4gen.dispatch"}


def __getattr__(name: str) -> Any:
    """Loads ``attention``, ``warmup``, ``misses`` and ``__version__`` at first use."""
    from importlib import import_module, metadata

    if name == "__version__":
        try:
            value: Any = metadata.version("fa4gen")
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            value = "unknown"
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'fa4gen' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
