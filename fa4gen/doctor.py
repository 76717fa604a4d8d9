"""What this machine has, and what of fa4gen works on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fa4gen import knobs
from fa4gen.errors import NoDeviceError, TableError
from fa4gen.measure.base import Source
from fa4gen.resources import resource_dir

__all__ = ["Check", "examine"]

_DISTRIBUTIONS = (
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "optuna",
    "nvidia-cuda-nvdisasm",
    "nvidia-cuda-cuobjdump",
)


@dataclass(frozen=True)
class Check:
    """One finding. ``ok``: True works, None is absent and can be done without, False needs mending."""

    name: str
    ok: bool | None
    detail: str


def examine() -> Iterator[Check]:
    """Every check, in reading order. Imports torch; asks the GPU for nothing but what it is."""
    import fa4gen

    yield Check("fa4gen", True, f"{fa4gen.__version__} in {Path(fa4gen.__file__).parent}")
    yield Check("python", True, f"{platform.python_version()} ({sys.executable}), {platform.machine()}")
    for name in _DISTRIBUTIONS:
        yield _installed(name)
    yield _gpu()
    yield _cache()
    yield from _tables("user tables", knobs.tuned_dir())
    yield from _tables("shipped tables", resource_dir("tuned"))
    yield Check("compile", True, f"{knobs.compile_workers()} processes; every target, with or without a GPU")


def _installed(name: str) -> Check:
    try:
        return Check(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, f"not installed: pip install {name}")


def _gpu() -> Check:
    from fa4gen.measure.cuda import current_device

    try:
        device = current_device(0)
    except NoDeviceError as error:
        return Check("GPU", None, f"{error} (render, compile, inspect and replay work without)")
    return Check("GPU", True, f"{device.name}, {device.key}, {device.clock_mhz:.0f} MHz")


def _cache() -> Check:
    folder = knobs.cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Check("cache", False, f"{folder} cannot be written: set FA4GEN_CACHE_DIR to another folder")
    artifacts = sum(1 for _ in folder.glob("artifacts/*/*/*/meta.json"))
    return Check("cache", True, f"{folder}, {artifacts} kernels")


def _tables(name: str, folder: Path) -> Iterator[Check]:
    from fa4gen.tuned_table import TunedTable

    paths = sorted(folder.glob("*.json"))
    if not paths:
        yield Check(name, None, f"none in {folder}")
    for path in paths:
        try:
            rows = TunedTable.load(path).rows
            predicted = sum(row.source is Source.PREDICTED for row in rows)
            yield Check(name, True, f"{path}, {len(rows)} rows" + (f", {predicted} predicted" if predicted else ""))
        except TableError as error:
            yield Check(name, False, str(error))
