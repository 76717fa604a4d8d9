"""Every environment variable that fa4gen reads: typed, at most eight, read nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

__all__ = ["cache_dir", "compile_workers", "tuned_dir"]


def cache_dir() -> Path:
    """``FA4GEN_CACHE_DIR``: where artifacts and studies live. Default: the user's cache directory."""
    value = os.environ.get("FA4GEN_CACHE_DIR")
    return Path(value) if value else Path(platformdirs.user_cache_dir("fa4gen", appauthor=False))


def tuned_dir() -> Path:
    """``FA4GEN_TUNED_DIR``: the user's tuned tables, looked up before the shipped ones.

    Default: ``tuned/`` in the user's data directory.
    """
    value = os.environ.get("FA4GEN_TUNED_DIR")
    return Path(value) if value else Path(platformdirs.user_data_dir("fa4gen", appauthor=False)) / "tuned"


def compile_workers() -> int:
    """``FA4GEN_COMPILE_WORKERS``: compile processes. Default: the CPUs this process may use (0.5 GB of memory each)."""
    value = os.environ.get("FA4GEN_COMPILE_WORKERS")
    if value:
        return max(1, int(value))
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
