"""What a machine is made of: a launch, its resident CTAs, their memories, barriers and registers."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4gen.emulator.errors import KernelFault, LaunchError
from fa4gen.emulator.fiber import Fiber
from fa4gen.emulator.program import Program

if TYPE_CHECKING:
    from fa4gen.emulator.copies import AsyncOp
    from fa4gen.emulator.memory import GlobalMemory
    from fa4gen.emulator.races import Races

__all__ = [
    "RESERVED_SHARED",
    "SLOT_BITS",
    "CountedBarrier",
    "Launch",
    "MBarrier",
    "Schedule",
    "State",
    "launch_registers",
    "shared_layout",
]

# Bytes from one CTA's shared memory to the next one's: above the largest a CTA can have.
SLOT_BITS = 18
# The first kilobyte of every CTA's shared memory is the system's.
RESERVED_SHARED = 1024


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the host asked for it. ``params``: the parameter space; sizes in CTAs, threads, bytes."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    params: np.ndarray
    cooperative: bool = False


class Schedule:
    """Which legal order is run.

    "eager" finishes asynchronous work when it is issued; "lazy" when nothing else can run; "random" at any time, with
    warps taken in random order and fibers split at random.
    """

    def __init__(self, kind: str, seed: int = 0) -> None:
        if kind not in ("eager", "lazy", "random"):
            raise LaunchError(f"schedule must be eager, lazy or random, got {kind!r}")
        self.kind = kind
        self.random = random.Random(seed)

    def run_now(self) -> bool:
        return self.kind == "eager" or (self.kind == "random" and self.random.random() < 0.3)

    def chance(self, probability: float) -> bool:
        return self.kind == "random" and self.random.random() < probability


@dataclass
class MBarrier:
    """An mbarrier in shared memory. ``phase`` counts completed phases; ``tx`` may go negative.

    The race detector's: ``arriving`` and ``released``, clocks of the running and of the last completed phase, and
    ``arrivals``, who came when, of the running phase and of the two before it.
    """

    flat: int
    count: int
    pending: int
    phase: int = 0
    tx: int = 0
    arriving: Any = None
    released: Any = None
    arrivals: tuple[dict[int, int], ...] = field(default_factory=lambda: ({}, {}, {}))
    agent: int = -1

    def settle(self) -> None:
        """Completes the phase if nothing is pending."""
        if self.pending < 0:
            raise KernelFault(
                f"mbarrier at {self.flat & ((1 << SLOT_BITS) - 1):#x} gets more arrivals than its {self.count}"
            )
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.released = self.arriving
            self.arrivals = ({}, *self.arrivals[:2])

    def __str__(self) -> str:
        return (
            f"mbarrier at {self.flat & ((1 << SLOT_BITS) - 1):#x} (phase {self.phase}, "
            f"{self.pending} of {self.count} arrivals and {self.tx} bytes pending)"
        )


@dataclass
class CountedBarrier:
    """A named barrier of a CTA, or the barrier of a cluster. ``expected`` None: every warp that has not exited."""

    name: str
    members: int
    expected: int | None = None
    arrived: int = 0
    generation: int = 0
    exited: int = 0
    arriving: Any = None
    released: Any = None
    arrivals: tuple[dict[int, int], ...] = field(default_factory=lambda: ({}, {}))

    def settle(self) -> None:
        """Completes if enough threads came. ``members`` and ``exited`` are threads."""
        need = self.members - self.exited if self.expected is None else self.expected
        if self.arrived and self.arrived >= need:
            if self.arrived > need:
                raise KernelFault(f"{self.name} gets {self.arrived} threads, expects {need}")
            self.arrived = 0
            self.generation += 1
            self.released, self.arriving = self.arriving, None
            self.arrivals = ({}, self.arrivals[0])

    def __str__(self) -> str:
        need = self.members - self.exited if self.expected is None else self.expected
        return f"{self.name} ({self.arrived} of {need} threads arrived)"


class State:
    """Resident CTAs of one launch. ``ctas`` are their grid coordinates: clusters together, in slot order.

    A warp is named by its index among the resident ones; its CTA's *slot* is that index over the warps of a CTA.
    ``version`` counts changes that a wait could see.
    """

    def __init__(
        self, program: Program, launch: Launch, memory: GlobalMemory, ctas: list[tuple[int, int, int]],
        schedule: Schedule, counts: np.ndarray, races: Races | None = None,
    ) -> None:  # fmt: skip
        self.program = program
        self.launch = launch
        self.memory = memory
        self.ctas = ctas
        self.schedule = schedule
        self.races = races
        self.counts = counts
        self.cluster_size = int(np.prod(launch.cluster))
        threads = int(np.prod(launch.block))
        self.warps_per_cta = -(-threads // 32)
        warps = len(ctas) * self.warps_per_cta
        self.shared_offsets, self.shared_end = shared_layout(program, launch.shared_bytes)
        self.shared = np.zeros(len(ctas) << SLOT_BITS, np.uint8)
        self.shared_written = np.zeros((len(ctas) << SLOT_BITS) // 4, bool)
        self.shared_bytes_read = self.shared_bytes_written = 0
        tensor_ctas = len(ctas) if program.uses_tmem else 0
        self.tmem = np.zeros((tensor_ctas, 128, 512), np.uint32)
        self.tmem_written = np.zeros(self.tmem.shape, bool)
        self.tmem_allocated = np.zeros((tensor_ctas, 512), bool)
        self.tmem_bytes_read = self.tmem_bytes_written = 0
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[tuple[int, int], CountedBarrier] = {}
        clusters = len(ctas) // self.cluster_size
        self.cluster_barriers = [
            CountedBarrier(f"cluster barrier {c}", 32 * self.warps_per_cta * self.cluster_size) for c in range(clusters)
        ]
        self.cluster_tokens = np.full(warps, -1, np.int64)
        self.exited = np.zeros(len(ctas), np.int64)
        registers = launch_registers(threads)
        self.warp_registers = np.full(warps, registers, np.int64)
        self.register_pool = np.zeros(len(ctas), np.int64)
        self.bulk_open: dict[tuple[int, int], list[AsyncOp]] = {}
        self.bulk_groups: dict[tuple[int, int], list[list[AsyncOp]]] = {}
        self.in_flight: list[AsyncOp] = []
        # Clusters of the launch that have not started, shared by all of its waves.
        self.waiting: deque[list[tuple[int, int, int]]] = deque()
        self.version = 0
        self.mbarrier_waits = self.named_waits = 0
        self.specials = self._specials(threads)

    def _specials(self, threads: int) -> dict[str, np.ndarray]:
        """Per resident warp: (warps, 1) or (warps, 32) tables."""
        warps = len(self.ctas) * self.warps_per_cta
        linear = np.arange(self.warps_per_cta * 32).reshape(-1, 32)
        thread = np.tile(linear, (len(self.ctas), 1))
        block, grid, cluster = self.launch.block, self.launch.grid, self.launch.cluster
        cta = np.repeat(np.array(self.ctas, np.int64), self.warps_per_cta, axis=0)
        table = {
            "laneid": np.tile(np.arange(32), (warps, 1)),
            "warpid": (np.arange(warps) % self.warps_per_cta)[:, None],
        }
        table["tid.x"] = thread % block[0]
        table["tid.y"] = thread // block[0] % block[1]
        table["tid.z"] = thread // (block[0] * block[1])
        rank = np.zeros(warps, np.int64)
        for axis, letter in reversed(list(enumerate("xyz"))):
            table[f"ctaid.{letter}"] = cta[:, axis : axis + 1]
            table[f"cluster_ctaid.{letter}"] = cta[:, axis : axis + 1] % cluster[axis]
            table[f"clusterid.{letter}"] = cta[:, axis : axis + 1] // cluster[axis]
            rank = rank * cluster[axis] + cta[:, axis] % cluster[axis]
            for name, size in (("ntid", block), ("nctaid", grid), ("cluster_nctaid", cluster)):
                table[f"{name}.{letter}"] = np.full((warps, 1), size[axis])
            table[f"nclusterid.{letter}"] = np.full((warps, 1), grid[axis] // cluster[axis])
        table["cluster_ctarank"] = rank[:, None]
        table["cluster_nctarank"] = np.full((warps, 1), self.cluster_size)
        return table

    def special(self, f: Fiber, name: str) -> np.ndarray:
        """A special register of every lane."""
        table = self.specials.get(name)
        if table is None:
            raise KernelFault(f"special register %{name} is not implemented")
        return np.broadcast_to(table[f.warps], f.shape)

    def cta_name(self, slot: int) -> str:
        """A CTA by its grid coordinates."""
        return "({}, {}, {})".format(*self.ctas[slot])


def launch_registers(threads: int) -> int:
    """Registers a thread at launch with one CTA an SM; setmaxnreg redistributes these."""
    return min(65536 // max(threads, 1), 255) // 8 * 8


def shared_layout(program: Program, dynamic_bytes: int) -> tuple[dict[str, int], int]:
    """Offset of every shared variable, statics first, and the end of the CTA's allocation."""
    offsets, end = {}, RESERVED_SHARED
    variables = sorted(program.kernel.shared.items(), key=lambda item: item[1][1] == 0)
    for name, (align, size) in variables:
        end = -(-end // align) * align
        offsets[name] = end
        end += size
    return offsets, end + dynamic_bytes
