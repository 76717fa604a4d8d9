"""Problem to loaded kernel, one dispatcher a device, and the log of problems that no tuned row covers."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4gen import knobs
from fa4gen.arch import Device
from fa4gen.errors import Fa4genError, UsageError
from fa4gen.measure.base import Source
from fa4gen.problem import AttentionProblem
from fa4gen.tuned_table import Bucket, Resolution, TunedTables, bucket
from fa4gen.variant import Variant

__all__ = ["Dispatcher", "Miss", "clear_misses", "dispatcher", "flush_misses", "miss_file", "misses", "record_miss"]

Kernel = Callable[..., None]

log = logging.getLogger("fa4gen")

# Held while a kernel is compiled or loaded: CuTe DSL cannot trace in two threads. Warm calls never take it.
_lock = threading.RLock()
_dispatchers: dict[int, Dispatcher] = {}
_predicted: dict[str, Resolution] = {}  # device key -> the first predicted row in use


# --- kernels ----------------------------------------------------------------------------------------------------------


def build_kernel(variant: Variant, at_call_time: bool) -> Kernel:
    """The loaded kernel of ``variant``: from the artifact cache, else compiled now, with a warning if at call time.

    Raises:
        CompileError: it does not compile.
        UsageError: the current stream is being captured; loading a kernel would break the capture.
    """
    import torch

    from fa4gen.artifact_cache import ArtifactCache
    from fa4gen.compile import compile_variant, load_kernel

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            f"kernel {variant.name} is not loaded and the current stream is being captured into a CUDA graph: "
            "call fa4gen.warmup(q, k, v, ...) before the capture"
        )
    cache = ArtifactCache()
    artifact = cache.get(variant)
    if artifact is None:
        started = time.perf_counter()
        artifact = compile_variant(variant, cache)
        seconds = time.perf_counter() - started
        if at_call_time:
            log.warning("compiled %s at call time in %.1f s; fa4gen.warmup() does it ahead", variant.name, seconds)
        else:
            log.info("compiled %s in %.1f s", variant.name, seconds)
    return load_kernel(artifact)


class Dispatcher:
    """The tables and the loaded kernels of one device. Safe to share between threads."""

    def __init__(
        self, device: Device, tables: TunedTables, build: Callable[[Variant, bool], Kernel] = build_kernel
    ) -> None:
        self.device = device
        self._tables = tables
        self._build = build
        self._kernels: dict[Variant, Kernel] = {}

    def resolve(self, problem: AttentionProblem) -> Resolution:
        """What runs for ``problem`` and why: see :meth:`fa4gen.tuned_table.TunedTables.lookup`.

        A process is warned once of each kind of device whose configs are predicted.
        """
        found = self._tables.lookup(problem)
        if found.source == Source.PREDICTED.value and _predicted.setdefault(self.device.key, found) is found:
            log.warning(
                "on %s configs are predicted, not measured, such as that of %s (%s): fa4gen tune measures",
                self.device.name,
                problem,
                found.path or "a table in memory",
            )
        return found

    def variant(self, problem: AttentionProblem) -> Variant:
        """The variant that runs ``problem``."""
        return Variant.of(self.device.arch.name, problem, self.resolve(problem).config)

    def loaded(self, variant: Variant) -> bool:
        """Whether :meth:`kernel` returns at once."""
        return variant in self._kernels

    def kernel(self, variant: Variant, *, at_call_time: bool = True) -> Kernel:
        """The loaded kernel of ``variant``, built once however many threads ask. Raises what ``build`` raises."""
        found = self._kernels.get(variant)
        if found is None:
            with _lock:
                found = self._kernels.get(variant)
                if found is None:
                    found = self._kernels[variant] = self._build(variant, at_call_time)
        return found


def dispatcher(index: int) -> Dispatcher:
    """The dispatcher of CUDA device ``index``, made at first use.

    Raises:
        NoDeviceError: no such device, or none that a kernel family runs on.
        TableError: a tuned table on the search path cannot be read.
    """
    found = _dispatchers.get(index)
    if found is None:
        from fa4gen.measure.cuda import current_device

        with _lock:
            found = _dispatchers.get(index)
            if found is None:
                device = current_device(index)
                found = _dispatchers[index] = Dispatcher(device, TunedTables.load(device.key))
    return found


# --- misses -----------------------------------------------------------------------------------------------------------


@dataclass
class Miss:
    """A problem that no tuned row covers on the device with key ``device``, and how often it was called.

    It stands for its whole :class:`Bucket`. ``calls`` is approximate when threads count at once.
    """

    device: str
    problem: AttentionProblem
    calls: int = 0


_pending: dict[tuple[str, Bucket], Miss] = {}


def miss_file() -> Path:
    """JSON lines ``{"device", "problem", "calls"}``, appended to by every process that missed."""
    return knobs.cache_dir() / "misses.jsonl"


def record_miss(device: Device, problem: AttentionProblem) -> Miss:
    """The counter of ``problem``'s bucket: the caller increments ``calls``. Written to the file at exit."""
    if not _pending:
        atexit.unregister(flush_misses)
        atexit.register(flush_misses)
    return _pending.setdefault((device.key, bucket(problem, device.sm_count)), Miss(device.key, problem))


def flush_misses() -> None:
    """Appends the counts since the last flush to :func:`miss_file` in one write; a full disk is logged, not raised."""
    lines = []
    counted = [miss for miss in list(_pending.values()) if miss.calls]
    for miss in counted:
        lines.append(json.dumps({"device": miss.device, "problem": str(miss.problem), "calls": miss.calls}) + "\n")
    if not lines:
        return
    try:
        miss_file().parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(miss_file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, "".join(lines).encode())
        finally:
            os.close(handle)
    except OSError as error:
        log.warning("cannot record misses in %s: %s", miss_file(), error.strerror)
        return
    for miss in counted:
        miss.calls = 0


def misses() -> list[Miss]:
    """Problems called on this machine, by any process, that today's tables do not cover; the most called first.

    One entry a bucket. A damaged line is skipped with a warning in the log.

    Raises:
        TableError: a tuned table on the search path cannot be read.
    """
    flush_misses()
    path = miss_file()
    tables: dict[str, TunedTables] = {}
    found: dict[tuple[str, Bucket], Miss] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
        try:
            record: dict[str, Any] = json.loads(line)
            device, problem = record["device"], AttentionProblem.parse(record["problem"])
            calls = int(record["calls"])
        except (ValueError, KeyError, TypeError, Fa4genError):
            log.warning("%s:%d is damaged and was skipped", path, number)
            continue
        if device not in tables:
            tables[device] = TunedTables.load(device)
        key = device, bucket(problem, tables[device].sm_count)
        found.setdefault(key, Miss(device, problem)).calls += calls
    uncovered = [miss for miss in found.values() if not tables[miss.device].lookup(miss.problem).covered]
    return sorted(uncovered, key=lambda miss: (-miss.calls, miss.device, str(miss.problem)))


def clear_misses() -> None:
    """Forgets every recorded miss, this process's included."""
    for miss in list(_pending.values()):
        miss.calls = 0
    miss_file().unlink(missing_ok=True)


def _reset_after_fork() -> None:
    """A forked child shares no CUDA context, may inherit a held lock, and must not report its parent's misses."""
    global _lock
    _lock = threading.RLock()
    _dispatchers.clear()
    _pending.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
