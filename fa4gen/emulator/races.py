"""Races by vector clocks.

Agents are warps, and what runs beside them: a warp's wgmma, the reads and the writes of its bulk stores, and the loads
that signal one mbarrier. An access is stamped (agent, time). It must know the last write, and a write every read, of
what it touches; knowledge travels with barriers, waits and fences. Each warp keeps four clocks:

- ``ORDER``: what happened before, for accesses through the generic proxy and against finished asynchronous ones;
- ``PROXY``: which generic writes the asynchronous proxy sees too: ``fence.proxy.async`` copies ``ORDER`` there;
- ``INIT``: which mbarrier initialisations ``fence.mbarrier_init`` has made visible to the cluster;
- ``CAUSE``: what happened before although nothing makes its memory visible: what the issuers of finished asynchronous
  operations knew. Phases of barriers follow each other by it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4gen.emulator.errors import RaceError
from fa4gen.emulator.fiber import Fiber
from fa4gen.emulator.inflight import InFlight
from fa4gen.emulator.program import Block
from fa4gen.emulator.state import SLOT_BITS, CountedBarrier, MBarrier

if TYPE_CHECKING:
    from fa4gen.emulator.copies import AsyncOp
    from fa4gen.emulator.memory import Region
    from fa4gen.emulator.state import State
    from fa4gen.emulator.tma import TensorMap

__all__ = ["Races", "Stamp"]

ORDER, PROXY, INIT, CAUSE = range(4)
CLOCKS = 4
# Agent 0 is everything that CTAs which are gone have done: nobody knows of it, unless through an atomic.
PAST = 0
WARP, WGMMA, BULK_READ, BULK_WRITE, TMEM_LOAD, TMEM_STORE, MMA = range(7)
KINDS = 7
KIND_NAMES = (
    "",
    "wgmma of ",
    "a bulk store of ",
    "a bulk store of ",
    "tcgen05.ld of ",
    "tcgen05.st of ",
    "tcgen05.mma of ",
)
RELEASING = ("release", "acq_rel")
ACQUIRING = ("acquire", "acq_rel")
CELLS = 1 << SLOT_BITS - 2
# A cell of tensor memory is one column of a warp's quadrant.
TMEM_CELLS = 4 * 512


@dataclass(frozen=True)
class Stamp:
    """An asynchronous operation: who, when, and what its issuer knew. ``write_agent``: who its global writes are by."""

    agent: int
    time: int
    known: np.ndarray
    write_agent: int = -1


@dataclass
class Shadow:
    """Last write and last reads by agent of every 4-byte cell; ``reduced``: the write was a reduction."""

    cells: int
    writer: np.ndarray = field(init=False)
    time: np.ndarray = field(init=False)
    reduced: np.ndarray = field(init=False)
    reads: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.writer = np.zeros(self.cells, np.int32)
        self.time = np.zeros(self.cells, np.int32)
        self.reduced = np.zeros(self.cells, bool)

    def retire(self) -> None:
        """All stamps become those of the past."""
        self.time = (self.time > 0).astype(np.int32)
        self.writer[:] = PAST
        if self.reads:
            read = np.zeros(self.cells, bool)
            for times in self.reads.values():
                read |= times > 0
            self.reads = {PAST: read.astype(np.int32)}


class Races:
    """The detector of one launch; :meth:`attach` starts a new set of resident CTAs."""

    def __init__(self) -> None:
        self.global_shadows: dict[int, Shadow] = {}
        self.atomics: dict[tuple[int, int], np.ndarray] = {}

    def attach(self, machine: State) -> None:
        self.machine = machine
        self.warps = len(machine.ctas) * machine.warps_per_cta
        for shadow in self.global_shadows.values():
            shadow.retire()
        self.size = 1 + KINDS * self.warps + 64 * len(machine.ctas)
        for key in self.atomics:
            past = np.zeros((CLOCKS, self.size), np.int32)
            past[:, PAST] = 1
            self.atomics[key] = past
        self.agents = 1 + KINDS * self.warps
        self.clocks = np.zeros((self.warps, CLOCKS, self.size), np.int32)
        own = np.arange(self.warps)
        self.clocks[own, ORDER, 1 + own] = 1
        self.fenced = np.zeros_like(self.clocks)
        # Of a warp's own writes, those that all its lanes know to be visible to the asynchronous proxy.
        self.converged = np.zeros(self.warps, np.int32)
        self.observed = np.zeros_like(self.clocks)
        # Lanes that accessed memory since their warp last met, and its time then: a lane releases what it did itself.
        self.unmet = np.zeros((self.warps, 32), bool)
        self.met = np.zeros(self.warps, np.int32)
        self.shared = [Shadow(CELLS) for _ in machine.ctas]
        self.tmem = [Shadow(TMEM_CELLS) for _ in range(len(machine.tmem))]
        self.loads_before_store = np.zeros(self.warps, np.int64)
        self.tensor_time = np.zeros((KINDS, self.warps), np.int64)
        self.names: dict[int, str] = {PAST: "a CTA that ran before"}
        self.bulk_time = [0] * self.warps
        self.wgmma_time = [1] * self.warps
        self.wgmma_groups: list[list[int]] = [[] for _ in range(self.warps)]
        self.load_agents: dict[int, int] = {}
        self.inits: dict[int, tuple[int, int]] = {}
        self.load_time: dict[int, int] = defaultdict(int)
        # By slot: the last access of every agent that could come when the CTA is gone.
        self.visits: list[dict[int, int]] = [{} for _ in machine.ctas]
        self.registers = InFlight(machine.program)
        self.generic = np.zeros(self.size, bool)
        self.generic[1 : 1 + self.warps] = True
        self.generic[PAST] = True

    def agent(self, warp: int, kind: int) -> int:
        return 1 + kind * self.warps + warp

    def name(self, agent: int) -> str:
        """An agent in words."""
        if agent in self.names:
            return self.names[agent]
        kind, warp = divmod(agent - 1, self.warps)
        slot, warp = divmod(warp, self.machine.warps_per_cta)
        who = f"warp {warp} of CTA {self.machine.cta_name(slot)}"
        return f"{KIND_NAMES[kind]}{who}"

    # Synchronisation ---------------------------------------------------------------------------------------------
    def release(
        self, warp: int, barrier: MBarrier | CountedBarrier, relaxed: bool = False, lanes: np.ndarray | None = None
    ) -> None:
        """What the warp knows goes to whoever acquires the barrier; relaxed, only what a fence has published.

        ``lanes``: those that arrive, a mask; None for all. They do not know what the others did since the warp met.
        """
        known = self.fenced[warp] if relaxed else self.clocks[warp]
        if lanes is not None and (self.unmet[warp] & ~lanes).any():
            known = known.copy()
            known[:, 1 + warp] = np.minimum(known[:, 1 + warp], self.met[warp])
        if not relaxed:
            self._arrive(barrier, 1 + warp, int(known[ORDER, 1 + warp]), known)
        barrier.arriving = known.copy() if barrier.arriving is None else np.maximum(barrier.arriving, known)
        self.clocks[warp, ORDER, 1 + warp] += 1

    def _arrive(self, barrier: MBarrier | CountedBarrier, agent: int, time: int, known: np.ndarray) -> None:
        """An arrival must know all of the phase before: else it may come earlier and count there."""
        for other, then in barrier.arrivals[1].items():
            if other != agent and then > max(known[ORDER, other], known[CAUSE, other]):
                raise RaceError(
                    f"{self.name(agent)} arrives at {barrier}, and may do so a phase too early: nothing tells it that "
                    f"{self.name(other)} arrived in the phase before"
                )
        barrier.arrivals[0][agent] = time

    def barrier_wait(self, warp: int, barrier: MBarrier, parity: int) -> None:
        """Who waits for a phase must know all of the phase before: that of the last but one has the same parity."""
        completed = (barrier.phase & 1) != (parity & 1)
        for other, then in barrier.arrivals[1 + completed].items():
            if then > max(self.clocks[warp, ORDER, other], self.clocks[warp, CAUSE, other]):
                raise RaceError(
                    f"{self.name(1 + warp)} waits for {barrier}, and may take an older phase for it: nothing tells it "
                    f"that {self.name(other)} arrived in the phase before the one waited for"
                )

    def acquire(self, warp: int, barrier: MBarrier | CountedBarrier) -> None:
        if barrier.released is not None:
            np.maximum(self.clocks[warp], barrier.released, out=self.clocks[warp])
        if isinstance(barrier, CountedBarrier):
            self.warp_sync(warp)

    def warp_sync(self, warps: np.ndarray | int) -> None:
        """Lanes of a warp have met: what one did, the others may release, and hand what it fenced to the asynchronous
        proxy.
        """
        self.converged[warps] = self.clocks[warps, PROXY, 1 + warps]
        self.met[warps] = self.clocks[warps, ORDER, 1 + warps]
        self.clocks[warps, ORDER, 1 + warps] += 1
        self.unmet[warps] = False

    def _issuing(self, warp: int) -> np.ndarray:
        """What the thread that issues an asynchronous operation knows."""
        known = self.clocks[warp].copy()
        known[PROXY, 1 + warp] = self.converged[warp]
        return known

    def fence(self, warps: np.ndarray) -> None:
        """A thread fence: relaxed operations before it acquire, those behind it release."""
        self.clocks[warps] = np.maximum(self.clocks[warps], self.observed[warps])
        self.fenced[warps] = self.clocks[warps]
        self.clocks[warps, ORDER, 1 + warps] += 1

    def fence_proxy(self, warps: np.ndarray, alone: np.ndarray) -> None:
        """``alone``: of each warp only one lane is active, which then needs no other to issue what it fenced."""
        self.clocks[warps, PROXY] = np.maximum(self.clocks[warps, PROXY], self.clocks[warps, ORDER])
        self.clocks[warps, ORDER, 1 + warps] += 1
        self.converged[warps[alone]] = self.clocks[warps[alone], PROXY, 1 + warps[alone]]

    def fence_init(self, warps: np.ndarray) -> None:
        self.clocks[warps, INIT] = np.maximum(self.clocks[warps, INIT], self.clocks[warps, ORDER])
        self.fenced[warps, INIT] = self.clocks[warps, INIT]
        self.clocks[warps, ORDER, 1 + warps] += 1

    def barrier_init(self, warp: int, barrier: MBarrier) -> None:
        if barrier.flat not in self.load_agents:
            if self.agents == self.size:
                raise RaceError(f"more than {64 * len(self.machine.ctas)} mbarriers: too many for the race detector")
            self.load_agents[barrier.flat] = self.agents
            self.agents += 1
        barrier.agent = self.load_agents[barrier.flat]
        slot, offset = barrier.flat >> SLOT_BITS, barrier.flat & (1 << SLOT_BITS) - 1
        self.names[barrier.agent] = f"a load on the mbarrier at {offset:#x} of CTA {self.machine.cta_name(slot)}"
        self.inits[barrier.flat] = (warp, int(self.clocks[warp, ORDER, 1 + warp]))

    def barrier_use(self, warp: int, barrier: MBarrier, asynchronous: bool = False) -> None:
        """The initialisation must be known; an asynchronous operation must see it through its own proxy."""
        by, time = self.inits[barrier.flat]
        known = self.clocks[warp, :, 1 + by]
        if time > max(known[PROXY] if asynchronous else known[ORDER], known[INIT]):
            how = "by an asynchronous operation, with no fence since," if asynchronous else "without knowing that"
            raise RaceError(f"{barrier} is used by {self.name(1 + warp)} {how} {self.name(1 + by)} initialised it")

        if not asynchronous:
            self._visit(warp, barrier.flat >> SLOT_BITS)

    def _visit(self, warp: int, slot: int) -> None:
        """Notes an access to the shared memory of another CTA."""
        if slot != warp // self.machine.warps_per_cta:
            self.visits[slot][1 + warp] = int(self.clocks[warp, ORDER, 1 + warp])

    def retire(self, slot: int) -> None:
        """A CTA has ended: it must have known the end of every access to its shared memory that was not its own."""
        warps = range(slot * self.machine.warps_per_cta, (slot + 1) * self.machine.warps_per_cta)
        known = self.clocks[warps.start : warps.stop, ORDER].max(axis=0)
        for agent, time in self.visits[slot].items():
            if time > known[agent]:
                cta = self.machine.cta_name(slot)
                raise RaceError(f"CTA {cta} may exit while {self.name(agent)} still uses its shared memory")
        for warp in warps:
            if self.wgmma_groups[warp]:
                raise RaceError(f"{self.name(1 + warp)} exits without having waited for its wgmma")

    # Asynchronous operations -------------------------------------------------------------------------------------
    def load_issued(self, warp: int, barrier: MBarrier) -> Stamp:
        self.barrier_use(warp, barrier, asynchronous=True)
        self.load_time[barrier.agent] += 1
        self.visits[barrier.flat >> SLOT_BITS][barrier.agent] = self.load_time[barrier.agent]
        return Stamp(barrier.agent, self.load_time[barrier.agent], self._issuing(warp))

    def commit_finished(self, stamp: Stamp, barrier: MBarrier) -> None:
        """Whoever waits will know of the MMAs, and of what they knew."""
        barrier.arriving = stamp.known if barrier.arriving is None else np.maximum(barrier.arriving, stamp.known)
        self.load_finished(stamp, barrier)

    def load_finished(self, stamp: Stamp, barrier: MBarrier) -> None:
        """Whoever waits for the barrier's phase will know of the load."""
        self._arrive(barrier, stamp.agent, stamp.time, stamp.known)
        arriving = np.zeros((CLOCKS, self.size), np.int32) if barrier.arriving is None else barrier.arriving.copy()
        arriving[:INIT, stamp.agent] = np.maximum(arriving[:INIT, stamp.agent], stamp.time)
        arriving[CAUSE] = np.maximum(arriving[CAUSE], stamp.known[[ORDER, CAUSE]].max(axis=0))
        barrier.arriving = arriving

    def bulk_issued(self, warp: int) -> Stamp:
        self.bulk_time[warp] += 1
        agent, write_agent = self.agent(warp, BULK_READ), self.agent(warp, BULK_WRITE)
        return Stamp(agent, self.bulk_time[warp], self._issuing(warp), write_agent)

    def bulk_finished(self, warp: int, op: AsyncOp, reads_only: bool) -> None:
        stamp = op.clock
        for agent in (stamp.agent,) if reads_only else (stamp.agent, stamp.write_agent):
            self._learn(warp, agent, stamp.time)

    def _learn(self, warp: int, agent: int, time: int) -> None:
        self.clocks[warp, :INIT, agent] = np.maximum(self.clocks[warp, :INIT, agent], time)

    # wgmma -------------------------------------------------------------------------------------------------------
    def wgmma_issued(self, warps: np.ndarray, form: tuple) -> tuple[np.ndarray, list[int]]:
        """What each warp knows, and the time of its open group."""
        known = self.clocks[warps]
        known[np.arange(len(warps)), PROXY, 1 + warps] = self.converged[warps]
        return known, [self.wgmma_time[w] for w in warps.tolist()]

    def wgmma_committed(self, warps: np.ndarray) -> None:
        for warp in warps.tolist():
            self.wgmma_groups[warp].append(self.wgmma_time[warp])
            self.wgmma_time[warp] += 1

    def wgmma_waited(self, warps: np.ndarray, count: int) -> None:
        for warp in warps.tolist():
            groups = self.wgmma_groups[warp]
            done = groups[: max(len(groups) - count, 0)]
            if done:
                self._learn(warp, self.agent(warp, WGMMA), done[-1])
                del groups[: len(done)]

    def wgmma_reads(
        self, warps: np.ndarray, granules: np.ndarray, issues: list[Any], row: int, rows_of_warp: int | None
    ) -> None:
        """A warpgroup's reads of an operand, (rows, steps · k) cells: each warp its own rows, or all of them (0)."""
        shadow = self.shared[int(granules.flat[0]) // CELLS]
        columns = granules.shape[1] // len(issues)
        for step, issue in enumerate(issues):
            known, times = issue.clock
            part = granules[:, step * columns : (step + 1) * columns] % CELLS
            for index, warp in enumerate(warps.tolist()):
                cells = part[rows_of_warp * index : rows_of_warp * (index + 1)] if rows_of_warp else part
                self._check_read(shadow, cells, self._seen(known[row + index]), self.agent(warp, WGMMA))
                self._record_read(shadow, cells, self.agent(warp, WGMMA), times[row + index])

    # Tensor memory -----------------------------------------------------------------------------------------------
    def tmem_lanes(self, f: Fiber, column: np.ndarray, count: int, write: bool) -> None:
        """tcgen05.ld and st: their own agents until the warp has waited for them."""
        kind = TMEM_STORE if write else TMEM_LOAD
        for row, warp in enumerate(f.warps.tolist()):
            self.tensor_time[kind, warp] += 1
            first = warp % self.machine.warps_per_cta % 4 * 512 + int(column[row])
            shadow, cells = self.tmem[int(f.slots[row])], slice(first, first + count)
            agent, time = self.agent(warp, kind), int(self.tensor_time[kind, warp])
            known = self.clocks[warp].copy()
            # One warp's loads and stores run in order.
            for own in (TMEM_LOAD, TMEM_STORE):
                known[ORDER, self.agent(warp, own)] = self.tensor_time[own, warp]
            if write:
                self.loads_before_store[warp] = self.tensor_time[TMEM_LOAD, warp]
                self._check_write(shadow, cells, known, known[ORDER], agent)
                self._record_write(shadow, cells, agent, time)
            else:
                self._check_read(shadow, cells, known[ORDER], agent)
                self._record_read(shadow, cells, agent, time)

    def tmem_waited(self, warps: np.ndarray, what: str) -> None:
        kind = TMEM_LOAD if what == "ld" else TMEM_STORE
        for warp in warps.tolist():
            self._learn(warp, self.agent(warp, kind), int(self.tensor_time[kind, warp]))
            if kind == TMEM_STORE:
                self._learn(warp, self.agent(warp, TMEM_LOAD), int(self.loads_before_store[warp]))

    def mma_issued(self, warp: int) -> Stamp:
        """MMAs of one issuer run in order: each knows those before it."""
        self.tensor_time[MMA, warp] += 1
        time, agent = int(self.tensor_time[MMA, warp]), self.agent(warp, MMA)
        known = self._issuing(warp)
        known[:INIT, agent] = time
        return Stamp(agent, time, known)

    def commit_issued(self, warp: int, barriers: list[MBarrier]) -> Stamp:
        for barrier in barriers:
            self.barrier_use(warp, barrier, asynchronous=True)
        agent, time = self.agent(warp, MMA), int(self.tensor_time[MMA, warp])
        for barrier in barriers:
            visits = self.visits[barrier.flat >> SLOT_BITS]
            visits[agent] = max(visits.get(agent, 0), time)
        # Behind the MMAs is all that they waited for; what the issuer did itself is not.
        known = self.clocks[warp].copy()
        known[:CAUSE, 1 + warp] = 0
        known[CAUSE] = self.clocks[warp, [ORDER, CAUSE]].max(axis=0)
        return Stamp(agent, time, known)

    def mma_reads_shared(self, stamp: Stamp, granules: np.ndarray) -> None:
        shadow, cells = self.shared[int(granules.flat[0]) // CELLS], granules % CELLS
        self._check_read(shadow, cells, self._seen(stamp.known), stamp.agent)
        self._record_read(shadow, cells, stamp.agent, stamp.time)

    def mma_tmem(self, stamp: Stamp, slot: int, first: int, count: int, write: bool) -> None:
        cells = (np.arange(4)[:, None] * 512 + np.arange(first, first + count)).ravel()
        if write:
            self._check_write(self.tmem[slot], cells, stamp.known, stamp.known[ORDER], stamp.agent)
            self._record_write(self.tmem[slot], cells, stamp.agent, stamp.time)
        else:
            self._check_read(self.tmem[slot], cells, stamp.known[ORDER], stamp.agent)
            self._record_read(self.tmem[slot], cells, stamp.agent, stamp.time)

    # Accesses ----------------------------------------------------------------------------------------------------
    def _seen(self, known: np.ndarray) -> np.ndarray:
        """By agent, the time up to which an asynchronous access knows its writes."""
        return np.where(self.generic, known[PROXY], known[ORDER])

    def _check_read(self, shadow: Shadow, cells: Any, seen: np.ndarray, agent: int, reduce: bool = False) -> None:
        times, writers = shadow.time[cells], shadow.writer[cells]
        late = times > seen[writers]
        if reduce:
            late &= ~shadow.reduced[cells]
        if late.any():
            self._report(shadow, cells, late, "was written by", int(writers[late].flat[0]), agent)

    def _check_write(
        self, shadow: Shadow, cells: Any, known: np.ndarray, seen: np.ndarray, agent: int, reduce: bool = False
    ) -> None:
        self._check_read(shadow, cells, seen, agent, reduce)
        for reader, times in shadow.reads.items():
            late = times[cells] > known[ORDER, reader]
            if late.any():
                self._report(shadow, cells, late, "is read by", reader, agent)

    @staticmethod
    def _record_read(shadow: Shadow, cells: Any, agent: int, time: int) -> None:
        if agent not in shadow.reads:
            shadow.reads[agent] = np.zeros(shadow.cells, np.int32)
        shadow.reads[agent][cells] = time

    @staticmethod
    def _record_write(shadow: Shadow, cells: Any, agent: int, time: int, reduce: bool = False) -> None:
        shadow.writer[cells] = agent
        shadow.time[cells] = time
        shadow.reduced[cells] = reduce

    def _report(self, shadow: Shadow, cells: Any, late: np.ndarray, what: str, other: int, agent: int) -> None:
        index = np.arange(cells.start, cells.stop) if isinstance(cells, slice) else np.broadcast_to(cells, late.shape)
        offset = 4 * int(index[late].flat[0])
        slot = next((s for s, owner in enumerate(self.shared) if owner is shadow), None)
        tensor_slot = next((s for s, owner in enumerate(self.tmem) if owner is shadow), None)
        place = f"byte {offset:#x} of "
        if slot is not None:
            place += f"the shared memory of CTA {self.machine.cta_name(slot)}"
        elif tensor_slot is not None:
            place = f"TMEM column {offset // 4 % 512} of CTA {self.machine.cta_name(tensor_slot)}"
        else:
            place += next(r.name for r in self.machine.memory.regions if self.global_shadows.get(r.base) is shadow)
        raise RaceError(
            f"{place} is accessed by {self.name(agent)}, but {what} {self.name(other)}, and nothing orders them"
        )

    def shared_lanes(self, f: Fiber, flat: np.ndarray, size: int, mask: Any, write: bool) -> None:
        """Generic accesses of active lanes, ``flat`` in lane order."""
        self.unmet[f.warps] |= True if mask is None else mask
        rows = np.repeat(np.arange(len(f.warps)), 32) if mask is None else np.nonzero(mask)[0]
        cells = (flat >> 2)[:, None] + np.arange(max(size // 4, 1))
        for row, warp in enumerate(f.warps.tolist()):
            mine = cells[rows == row].ravel()
            for slot in np.unique(mine // CELLS).tolist():
                self._visit(warp, slot)
                self._generic(warp, self.shared[slot], mine[mine // CELLS == slot] % CELLS, write)

    def _generic(self, warp: int, shadow: Shadow, cells: np.ndarray, write: bool) -> None:
        known, agent = self.clocks[warp], 1 + warp
        time = int(known[ORDER, agent])
        if write:
            self._check_write(shadow, cells, known, known[ORDER], agent)
            self._record_write(shadow, cells, agent, time)
        else:
            self._check_read(shadow, cells, known[ORDER], agent)
            self._record_read(shadow, cells, agent, time)

    def shared_async(self, stamp: Stamp, flat: int, size: int, write: bool | str) -> None:
        """A contiguous range of shared memory, accessed by a copy; ``write`` may name a reduction."""
        shadow = self.shared[flat >> SLOT_BITS]
        first = (flat & (1 << SLOT_BITS) - 1) >> 2
        self._asynchronous(stamp, shadow, slice(first, first + -(-size // 4)), write)

    def _asynchronous(self, stamp: Stamp, shadow: Shadow, cells: Any, write: bool | str) -> None:
        seen = self._seen(stamp.known)
        if write:
            reduce = isinstance(write, str)
            agent = stamp.agent if stamp.write_agent < 0 or shadow.cells == CELLS else stamp.write_agent
            self._check_write(shadow, cells, stamp.known, seen, agent, reduce)
            self._record_write(shadow, cells, agent, stamp.time, reduce)
        else:
            self._check_read(shadow, cells, seen, stamp.agent)
            self._record_read(shadow, cells, stamp.agent, stamp.time)

    # Global memory: outputs only, inputs are not written ---------------------------------------------------------
    def _global(self, region: Region) -> Shadow:
        shadow = self.global_shadows.get(region.base)
        if shadow is None:
            shadow = self.global_shadows[region.base] = Shadow(region.data.size // 4 + 1)
        return shadow

    def global_lanes(
        self,
        f: Fiber,
        region: Region,
        offsets: np.ndarray,
        size: int,
        mask: Any,
        where: np.ndarray,
        write: bool,
        order: str,
    ) -> None:
        """Generic accesses of the active lanes at positions ``where``. Ordered ones are atomics."""
        rows = (np.repeat(np.arange(len(f.warps)), 32) if mask is None else np.nonzero(mask)[0])[where]
        if order not in ("weak", "volatile"):
            for row, offset in dict.fromkeys(zip(rows.tolist(), offsets.tolist(), strict=True)):
                self.global_atomic(int(f.warps[row]), region, offset, order)
        elif region.written is not None:
            self.unmet[f.warps] |= True if mask is None else mask
            cells = (offsets >> 2)[:, None] + np.arange(max(size // 4, 1))
            for row in np.unique(rows).tolist():
                self._generic(int(f.warps[row]), self._global(region), cells[rows == row].ravel(), write)

    def global_range(self, stamp: Stamp, region: Region, offset: int, size: int, write: bool | str) -> None:
        if region.written is not None or write:
            self._asynchronous(stamp, self._global(region), slice(offset >> 2, offset + size + 3 >> 2), write)

    def tensor_access(
        self, stamp: Stamp, region: Region, tensor: TensorMap, inside: tuple[slice, ...], write: bool | str
    ) -> None:
        """The part of a tensor that a box shares with it."""
        if region.written is None and not write:
            return
        *outer, inner = inside
        offsets = np.array([tensor.address - region.base])
        for dimension, stride in zip(outer, tensor.strides[::-1], strict=True):
            offsets = (offsets[:, None] + np.arange(dimension.start, dimension.stop) * stride).ravel()
        first, last = inner.start * tensor.item, inner.stop * tensor.item
        if offsets.size and last > first:
            cells = (offsets[:, None] + np.arange(first, last, 4)) >> 2
            self._asynchronous(stamp, self._global(region), cells, write)

    def shared_atomic(self, warp: int, flat: int) -> None:
        self._atomic(warp, (-1, flat), "relaxed")

    def global_atomic(self, warp: int, region: Region, offset: int, order: str) -> None:
        self._atomic(warp, (region.base, offset), order)

    def _atomic(self, warp: int, key: tuple[int, int], order: str) -> None:
        """An atomic both takes and gives; relaxed, only together with fences."""
        place = self.atomics.setdefault(key, np.zeros((CLOCKS, self.size), np.int32))
        known = self.clocks[warp]
        np.maximum(self.observed[warp], place, out=self.observed[warp])
        if order in ACQUIRING:
            np.maximum(known, place, out=known)
        np.maximum(place, known if order in RELEASING else self.fenced[warp], out=place)
        known[ORDER, 1 + warp] += 1

    # Registers ---------------------------------------------------------------------------------------------------
    def block(self, f: Fiber, block: Block) -> None:
        self.registers.block(f.warps, block)
