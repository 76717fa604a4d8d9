"""mbarriers, named barriers, cluster barriers, register reallocation, and the waits on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fa4gen.emulator.errors import KernelFault
from fa4gen.emulator.fiber import Fiber, at, full
from fa4gen.emulator.memory import MemoryOps
from fa4gen.emulator.state import SLOT_BITS, CountedBarrier, MBarrier

if TYPE_CHECKING:
    from fa4gen.emulator.copies import AsyncOp
    from fa4gen.emulator.scheduler import Machine

__all__ = ["WAITS", "BarrierOps", "Wait"]


class BarrierOps(MemoryOps):
    """Barrier instructions that never wait: a part of the machine."""

    def mbarrier_at(self, flat: int) -> MBarrier:
        """The initialised mbarrier at a shared position."""
        barrier = self.mbarriers.get(flat)
        if barrier is None:
            slot, offset = flat >> SLOT_BITS, flat & ((1 << SLOT_BITS) - 1)
            raise KernelFault(
                f"uses the mbarrier at {offset:#x} of CTA {self.cta_name(slot)}, which nothing initialised"
            )
        return barrier

    def lanes(self, f: Fiber, mask: Any) -> np.ndarray:
        """(row, lane) of every active lane."""
        return np.argwhere(f.active if mask is None else mask)

    def mbarrier_init(self, f: Fiber, address: Any, count: Any, mask: Any) -> None:
        flats = self.shared_flat(f, address, 8, mask)
        for (row, lane), flat in zip(self.lanes(f, mask), flats.tolist(), strict=True):
            number = int(at(count, row, lane))
            if not 0 < number < 1 << 20:
                raise KernelFault(f"mbarrier.init with a count of {number}")
            barrier = self.mbarriers[flat] = MBarrier(flat, number, number)
            self.shared_written[flat >> 2 : (flat >> 2) + 2] = False
            if self.races:
                self.races.barrier_init(int(f.warps[row]), barrier)
        self.version += 1

    def mbarrier_inval(self, f: Fiber, address: Any, mask: Any) -> None:
        for flat in self.shared_flat(f, address, 8, mask).tolist():
            self.mbarrier_at(flat)
            del self.mbarriers[flat]

    def mbarrier_arrive(self, f: Fiber, address: Any, count: Any, tx: Any, relaxed: bool, mask: Any) -> Any:
        """arrive and expect_tx: tx first, then the arrivals. Returns the phase before as the state token."""
        flats = self.shared_flat(f, address, 8, mask)
        state = np.zeros(f.shape, np.uint64)
        for (row, lane), flat in zip(self.lanes(f, mask), flats.tolist(), strict=True):
            barrier = self.mbarrier_at(flat)
            state[row, lane] = barrier.phase
            if self.races:
                self.races.barrier_use(int(f.warps[row]), barrier)
                if count is not None and not relaxed:
                    self.races.release(int(f.warps[row]), barrier, lanes=None if mask is None else mask[row])
            if tx is not None:
                barrier.tx += int(at(tx, row, lane))
            if count is not None:
                barrier.pending -= int(at(count, row, lane))
                barrier.settle()
        self.version += 1
        return state

    def complete_tx(self, flat: int, size: int) -> None:
        """An asynchronous operation has delivered ``size`` bytes."""
        barrier = self.mbarrier_at(flat)
        barrier.tx -= size
        barrier.settle()
        self.version += 1

    def named_barrier(self, slot: int, number: int, threads: int | None) -> CountedBarrier:
        barrier = self.named.get((slot, number))
        if barrier is None:
            name = f"barrier {number} of CTA {self.cta_name(slot)}"
            exited = 32 * int(self.exited[slot])
            barrier = CountedBarrier(name, 32 * self.warps_per_cta, exited=exited)
            self.named[slot, number] = barrier
        if threads is not None and threads % 32:
            raise KernelFault(f"{barrier.name} with {threads} threads, not a multiple of a warp")
        if barrier.arrived and barrier.expected != threads:
            raise KernelFault(f"{barrier.name} expects {barrier.expected} threads and {threads} at once")
        barrier.expected = threads
        return barrier

    def barrier_arrive(self, f: Fiber, number: Any, threads: Any, mask: Any) -> list[tuple[CountedBarrier, int]]:
        """bar.arrive, and the arrival of bar.sync. Returns each warp's barrier and the generation it belongs to."""
        active = f.active if mask is None else mask
        tokens = []
        for row, warp in enumerate(f.warps.tolist()):
            lane = int(active[row].argmax())
            count = None if threads is None else int(at(threads, row, lane))
            barrier = self.named_barrier(int(f.slots[row]), int(at(number, row, lane)), count)
            tokens.append((barrier, barrier.generation))
            if self.races:
                self.races.release(warp, barrier)
            barrier.arrived += 32
            barrier.settle()
        self.version += 1
        return tokens

    def cluster_arrive(self, f: Fiber, relaxed: bool, mask: Any) -> None:
        for row, warp in enumerate(f.warps.tolist()):
            barrier = self.cluster_barriers[int(f.slots[row]) // self.cluster_size]
            if self.races:
                self.races.release(warp, barrier, relaxed)
            self.cluster_tokens[warp] = barrier.generation
            barrier.arrived += 32
            barrier.settle()
        self.version += 1

    def warp_sync(self, f: Fiber, members: Any, mask: Any) -> None:
        """Lanes of a warp run together between their meeting points: nothing to wait for."""
        if self.races:
            self.races.warp_sync(f.warps)

    def fence(self, f: Fiber, mask: Any) -> None:
        if self.races:
            self.races.fence(f.warps)

    def fence_proxy_async(self, f: Fiber, space: str, mask: Any) -> None:
        if self.races:
            self.races.fence_proxy(f.warps, (f.active if mask is None else mask).sum(axis=1) == 1)

    def fence_mbarrier_init(self, f: Fiber, mask: Any) -> None:
        if self.races:
            self.races.fence_init(f.warps)

    def set_registers(self, f: Fiber, count: int) -> None:
        """setmaxnreg: returns registers to the CTA's pool, or takes them from it."""
        for warp, slot in zip(f.warps.tolist(), f.slots.tolist(), strict=True):
            self.register_pool[slot] += 32 * (int(self.warp_registers[warp]) - count)
            self.warp_registers[warp] = count
        self.version += 1


class Wait:
    """A kind of wait. Operands are the parked tuple; ``tokens`` has one entry a warp, made on arrival."""

    def arrive(self, machine: Machine, f: Fiber) -> None:
        """Side effects of reaching the wait; sets ``f.tokens``."""

    def ready(self, machine: Machine, f: Fiber) -> np.ndarray:
        """Which warps may go on, (warps,)."""
        return np.ones(len(f.warps), bool)

    def leave(self, machine: Machine, f: Fiber) -> None:
        """Side effects of going on."""

    def describe(self, machine: Machine, f: Fiber) -> list[str]:
        """What each warp waits for."""
        return ["?"] * len(f.warps)


class MBarrierWait(Wait):
    """try_wait and test_wait. With a time hint it waits until the phase completes; without, it only looks."""

    def arrive(self, machine: Machine, f: Fiber) -> None:
        address, phase, parity, _, _ = f.parked  # type: ignore[misc]
        flats = machine.shared_flat(f, address, 8, f.mask)
        phases = full(phase, f.shape)
        tokens: list[list[Any]] = [[] for _ in f.warps]
        lanes = machine.lanes(f, f.mask)
        if f.mask is None and (flats.reshape(f.shape) == flats[::32, None]).all() and (phases == phases[:, :1]).all():
            lanes, flats = lanes[::32], flats[::32]
        for (row, lane), flat in zip(lanes.tolist(), flats.tolist(), strict=True):
            entry = (machine.mbarrier_at(flat), int(phases[row, lane]), parity, lane)
            if not tokens[row] or tokens[row][-1][:3] != entry[:3]:
                tokens[row].append(entry)
        f.tokens = tokens
        machine.mbarrier_waits += len(f.warps)
        if machine.races:
            for row, warp in enumerate(f.warps.tolist()):
                for barrier, phase, parity, _ in tokens[row]:
                    machine.races.barrier_use(warp, barrier)
                    if parity:
                        machine.races.barrier_wait(warp, barrier, phase)

    @staticmethod
    def _done(entry: tuple[MBarrier, int, bool, int]) -> bool:
        barrier, phase, parity, _ = entry
        return (barrier.phase & 1) != (phase & 1) if parity else barrier.phase > phase

    def ready(self, machine: Machine, f: Fiber) -> np.ndarray:
        assert f.parked is not None and f.tokens is not None
        if not f.parked[3]:
            return np.ones(len(f.warps), bool)
        return np.array([all(map(self._done, entries)) for entries in f.tokens])

    def leave(self, machine: Machine, f: Fiber) -> None:
        assert f.parked is not None and f.tokens is not None
        hinted, relaxed = f.parked[3:]
        register = machine.program.blocks[f.block].returns
        result: Any = np.bool_(True)
        if not hinted:
            result = np.zeros(f.shape, bool)
            for row, entries in enumerate(f.tokens):
                bounds = [entry[3] for entry in entries[1:]] + [32]
                for entry, bound in zip(entries, bounds, strict=True):
                    result[row, entry[3] : bound] = self._done(entry) and not machine.spurious()
        if machine.races and not relaxed:
            for row, warp in enumerate(f.warps.tolist()):
                for entry in f.tokens[row]:
                    if np.ndim(result) == 0 or result[row, entry[3]]:
                        machine.races.acquire(warp, entry[0])
        f.write(register, result)

    def describe(self, machine: Machine, f: Fiber) -> list[str]:
        assert f.tokens is not None
        return [
            " and ".join(
                f"{'parity' if parity else 'phase'} {phase} of {barrier}" for barrier, phase, parity, _ in entries
            )
            for entries in f.tokens
        ]


class BarrierWait(Wait):
    """bar.sync."""

    def arrive(self, machine: Machine, f: Fiber) -> None:
        number, threads = f.parked  # type: ignore[misc]
        f.tokens = machine.barrier_arrive(f, number, threads, f.mask)
        machine.named_waits += len(f.warps)

    def ready(self, machine: Machine, f: Fiber) -> np.ndarray:
        return np.array([barrier.generation > generation for barrier, generation in f.tokens or ()])

    def leave(self, machine: Machine, f: Fiber) -> None:
        if machine.races:
            for warp, (barrier, _) in zip(f.warps.tolist(), f.tokens or (), strict=True):
                machine.races.acquire(warp, barrier)

    def describe(self, machine: Machine, f: Fiber) -> list[str]:
        return [str(barrier) for barrier, _ in f.tokens or ()]


class ClusterWait(Wait):
    """barrier.cluster.wait for the arrival each warp made before."""

    def arrive(self, machine: Machine, f: Fiber) -> None:
        if (machine.cluster_tokens[f.warps] < 0).any():
            raise KernelFault("barrier.cluster.wait without an arrive")

    def _barriers(self, machine: Machine, f: Fiber) -> list[CountedBarrier]:
        return [machine.cluster_barriers[slot // machine.cluster_size] for slot in f.slots.tolist()]

    def ready(self, machine: Machine, f: Fiber) -> np.ndarray:
        generations = np.array([b.generation for b in self._barriers(machine, f)])
        return generations > machine.cluster_tokens[f.warps]

    def leave(self, machine: Machine, f: Fiber) -> None:
        machine.cluster_tokens[f.warps] = -1
        if machine.races:
            for warp, barrier in zip(f.warps.tolist(), self._barriers(machine, f), strict=True):
                machine.races.acquire(warp, barrier)

    def describe(self, machine: Machine, f: Fiber) -> list[str]:
        return [str(b) for b in self._barriers(machine, f)]


class BulkWait(Wait):
    """cp.async.bulk.wait_group: all but the newest groups of the thread have finished, or only finished reading."""

    def _open(self, machine: Machine, f: Fiber) -> list[list[AsyncOp]]:
        count, reads_only = f.parked  # type: ignore[misc]
        result: list[list[AsyncOp]] = [[] for _ in f.warps]
        for row, lane in machine.lanes(f, f.mask):
            groups = machine.bulk_groups.get((int(f.warps[row]), int(lane)), [])
            finished = groups[: len(groups) - count]
            result[row] += [op for group in finished for op in group if not (op.read if reads_only else op.done)]
        return result

    def ready(self, machine: Machine, f: Fiber) -> np.ndarray:
        return np.array([not ops for ops in self._open(machine, f)])

    def leave(self, machine: Machine, f: Fiber) -> None:
        count, reads_only = f.parked  # type: ignore[misc]
        for row, lane in machine.lanes(f, f.mask):
            groups = machine.bulk_groups.get((int(f.warps[row]), int(lane)), [])
            for group in groups[: len(groups) - count]:
                for op in group:
                    op.owed = False
                    if machine.races:
                        machine.races.bulk_finished(int(f.warps[row]), op, reads_only)
            if not reads_only:
                del groups[: max(len(groups) - count, 0)]

    def describe(self, machine: Machine, f: Fiber) -> list[str]:
        return [f"{len(ops)} bulk copies" for ops in self._open(machine, f)]


class RegisterWait(Wait):
    """setmaxnreg.inc waits until the CTA's pool holds the registers."""

    def ready(self, machine: Machine, f: Fiber) -> np.ndarray:
        (count,) = f.parked  # type: ignore[misc]
        ready = np.zeros(len(f.warps), bool)
        pool = machine.register_pool.copy()
        for row, (warp, slot) in enumerate(zip(f.warps.tolist(), f.slots.tolist(), strict=True)):
            need = 32 * (count - int(machine.warp_registers[warp]))
            if need <= pool[slot]:
                ready[row] = True
                pool[slot] -= need
        return ready

    def leave(self, machine: Machine, f: Fiber) -> None:
        machine.set_registers(f, f.parked[0])  # type: ignore[index]

    def describe(self, machine: Machine, f: Fiber) -> list[str]:
        (count,) = f.parked  # type: ignore[misc]
        return [
            f"{count} registers a thread: the CTA has {int(machine.register_pool[slot]) // 32} x 32 free, "
            f"this warp needs {count - int(machine.warp_registers[warp])} more"
            for warp, slot in zip(f.warps.tolist(), f.slots.tolist(), strict=True)
        ]


class AllocationWait(Wait):
    """tcgen05.alloc waits for free columns, and writes the address of the first one to shared memory."""

    def ready(self, machine: Machine, f: Fiber) -> np.ndarray:
        """A warp that finds columns has them from here on: the token is the first one."""
        _, columns, _ = f.parked  # type: ignore[misc]
        f.tokens = f.tokens or [None] * len(f.warps)
        for row, slot in enumerate(f.slots.tolist()):
            if f.tokens[row] is None:
                f.tokens[row] = machine.tmem_reserve(slot, int(at(columns, row, 0)))
        return np.array([token is not None for token in f.tokens])

    def leave(self, machine: Machine, f: Fiber) -> None:
        address = f.parked[0]  # type: ignore[index]
        lane = np.zeros(f.shape, bool)
        lane[:, 0] = True
        first = np.repeat(np.array(f.tokens, np.uint32)[:, None], 32, axis=1)
        machine.store(f, "shared", address, np.uint32, (first,), lane, "weak")

    def describe(self, machine: Machine, f: Fiber) -> list[str]:
        return [
            f"TMEM columns: {int((~machine.tmem_allocated[slot]).sum())} of 512 are free" for slot in f.slots.tolist()
        ]


class ConvergeWait(Wait):
    """Warps of a warpgroup meet in front of its first wgmma."""

    def ready(self, machine: Machine, f: Fiber) -> np.ndarray:
        groups, counts = np.unique(f.warps // 4, return_counts=True)
        return np.isin(f.warps // 4, groups[counts == 4])

    def describe(self, machine: Machine, f: Fiber) -> list[str]:
        return ["the other warps of its warpgroup"] * len(f.warps)


WAITS: dict[str, Wait] = {
    "mbarrier.wait": MBarrierWait(),
    "barrier.sync": BarrierWait(),
    "barrier.cluster.wait": ClusterWait(),
    "bulk.wait_group": BulkWait(),
    "setmaxnreg.inc": RegisterWait(),
    "tcgen05.alloc": AllocationWait(),
    "converge": ConvergeWait(),
}
