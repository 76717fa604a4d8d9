"""Running a compiled object: host call, launches in waves of CTAs, report."""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fa4gen.emulator.errors import KernelFault, LaunchError
from fa4gen.emulator.host import SHARED_PER_CTA, HostModule, Tensor
from fa4gen.emulator.memory import GlobalMemory, Region
from fa4gen.emulator.parser import Kernel, parse
from fa4gen.emulator.program import Program
from fa4gen.emulator.races import Races
from fa4gen.emulator.report import EmulatorReport, KernelReport
from fa4gen.emulator.scheduler import Machine
from fa4gen.emulator.state import Launch, Schedule, launch_registers, shared_layout

__all__ = ["CompiledObject", "execute", "load", "run_launch"]

# CTAs that run together. Wider numpy operations cost less a lane until the caches overflow; measured best near 8.
RESIDENT_CTAS = 8


class CompiledObject:
    """An exported object beside its PTX: programs are parsed and translated once."""

    def __init__(self, object_path: Path, ptx: str, name: str) -> None:
        self.programs = {kernel: Program(parsed) for kernel, parsed in parse(ptx).items()}
        self.host = HostModule(object_path, name)

    def replace(self, kernel: Kernel) -> CompiledObject:
        """The same host code with one kernel changed."""
        other = copy.copy(self)
        other.programs = {**self.programs, kernel.name: Program(kernel)}
        return other


@lru_cache(maxsize=16)
def load(object_path: Path, ptx_path: Path, name: str) -> CompiledObject:
    """The compiled object of an artifact; kept for the next run."""
    return CompiledObject(object_path, ptx_path.read_text(), name)


def execute(
    compiled: CompiledObject,
    arguments: Sequence[Any],
    *,
    schedule: str = "eager",
    seed: int = 0,
    check_races: bool = False,
    allow_open_stores: bool = False,
    progress: Callable[[float], None] | None = None,
    machine_type: type[Machine] = Machine,
    resident: int = RESIDENT_CTAS,
) -> EmulatorReport:
    """Calls the object's entry function and runs what it launches.

    ``arguments``: :class:`Tensor`, int, float or None, as the entry takes them (no stream). ``progress`` is told the
    share of CTAs of the current launch that have ended. ``allow_open_stores``: a CTA may exit without having waited for
    its last bulk stores to read shared memory. ``machine_type``: a subclass that watches the run. ``resident``: CTAs
    that run at a time, at least a cluster; the others wait, and cluster launch control may take them over.

    Raises:
        LaunchError: the host code refuses the arguments or the launch.
        UnsupportedInstruction, KernelFault, RaceError, Deadlock: what the kernel does wrong, and where.
    """
    started = time.perf_counter()
    order = Schedule(schedule, seed)
    memory = GlobalMemory()
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    for tensor in tensors:
        if tensor.data.size:
            memory.add(Region(tensor.name, tensor.data, tensor.address, tensor.output or tensor.scratch))
    reports: list[KernelReport] = []

    def on_launch(launch: Launch) -> None:
        program = compiled.programs[launch.kernel]
        reports.append(
            run_launch(program, launch, memory, order, check_races, allow_open_stores, progress, machine_type, resident)
        )

    kernels = {name: program.kernel for name, program in compiled.programs.items()}
    compiled.host.call(arguments, kernels, on_launch)
    for region in memory.regions:
        tensor = next(t for t in tensors if t.address == region.base)
        if tensor.output and region.written is not None and not region.written.all():
            missing = _missing(region, tensor)
            if missing:
                raise KernelFault(f"{region.name} has {missing} elements that nothing wrote")
    outputs = {t.name: t.array for t in tensors if t.output}
    return EmulatorReport(outputs, reports, schedule, seed, check_races, time.perf_counter() - started)


def _missing(region: Region, tensor: Tensor) -> int:
    """Elements of a tensor with a byte that nothing wrote; gaps between its rows do not count."""
    assert region.written is not None
    strides = tuple(s * tensor.item for s in tensor.strides)
    missing = np.zeros(tensor.shape, bool)
    for byte in range(tensor.item):
        missing |= ~np.ndarray(tensor.shape, "?", region.written.data, byte, strides)
    return int(missing.sum())


def run_launch(
    program: Program, launch: Launch, memory: GlobalMemory, order: Schedule, check_races: bool,
    allow_open_stores: bool, progress: Callable[[float], None] | None, machine_type: type[Machine] = Machine,
    resident: int = RESIDENT_CTAS,
) -> KernelReport:  # fmt: skip
    """Runs one launch, in waves of CTAs.

    Raises:
        EmulatorError: what the launch or the kernel does wrong.
    """
    _check_launch(program, launch)
    report = KernelReport(launch.kernel, launch.grid, blocks=len(program.blocks))
    warps = -(-int(np.prod(launch.block)) // 32)
    counts = np.zeros((len(program.blocks), warps), np.int64)
    read, written = memory.bytes_read, memory.bytes_written
    waiting = deque(_clusters(launch))
    total = len(waiting)
    per_wave = total if launch.cooperative else max(1, resident // len(waiting[0]))
    races = Races() if check_races else None
    while waiting:
        wave = [waiting.popleft() for _ in range(min(per_wave, len(waiting)))]
        machine = machine_type(
            program, launch, memory, [cta for cluster in wave for cta in cluster], order, counts, races
        )
        machine.allow_open_stores = allow_open_stores
        machine.waiting = waiting
        machine.run()
        report.shared_bytes_read += machine.shared_bytes_read
        report.shared_bytes_written += machine.shared_bytes_written
        report.tmem_bytes_read += machine.tmem_bytes_read
        report.tmem_bytes_written += machine.tmem_bytes_written
        report.mbarrier_waits += machine.mbarrier_waits
        report.named_barrier_waits += machine.named_waits
        if progress is not None:
            progress(1 - len(waiting) / total)
    report.global_bytes_read = memory.bytes_read - read
    report.global_bytes_written = memory.bytes_written - written
    _fill_counts(report, program, counts)
    return report


def _fill_counts(report: KernelReport, program: Program, counts: np.ndarray) -> None:
    report.blocks_run = int((counts.sum(axis=1) > 0).sum())
    for block in program.blocks:
        for unit, number in block.units.items():
            row = report.instructions.setdefault(unit, [0] * counts.shape[1])
            for warp, times in enumerate(counts[block.index].tolist()):
                row[warp] += number * times
        if not counts[block.index].any():
            lines = [i.line for i in [*block.instrs, block.terminator] if i is not None]
            report.uncovered.append((min(lines), max(lines)))


def _check_launch(program: Program, launch: Launch) -> None:
    """Refuses what the driver would refuse."""
    threads = int(np.prod(launch.block))
    if program.kernel.threads and tuple(launch.block) != program.kernel.threads:
        raise LaunchError(f"{launch.kernel} wants {program.kernel.threads} threads, is launched with {launch.block}")
    if threads > 1024 or threads % 32 or launch_registers(threads) < 24:
        raise LaunchError(f"{threads} threads a CTA: at most 1024, and whole warps")
    _, end = shared_layout(program, launch.shared_bytes)
    if end - 1024 > SHARED_PER_CTA:
        raise LaunchError(f"needs {end - 1024} bytes of shared memory, the device has {SHARED_PER_CTA}")
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise LaunchError(f"grid {launch.grid} is not a multiple of cluster {launch.cluster}")


def _clusters(launch: Launch) -> list[list[tuple[int, int, int]]]:
    """CTA coordinates, cluster by cluster in launch order; inside one by rank."""
    grid, cluster = launch.grid, launch.cluster
    steps = [range(0, g, c) for g, c in zip(grid, cluster, strict=True)]
    inside = [(x, y, z) for z, y, x in itertools.product(*(range(c) for c in reversed(cluster)))]
    return [
        [(x + dx, y + dy, z + dz) for dx, dy, dz in inside]
        for z, y, x in itertools.product(steps[2], steps[1], steps[0])
    ]
