"""The machine: resident CTAs, fibers and their scheduling, divergence, deadlocks."""

from __future__ import annotations

import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4gen.emulator.barriers import WAITS
from fa4gen.emulator.cluster_launch import ClusterLaunchOps
from fa4gen.emulator.errors import Deadlock, EmulatorError, KernelFault
from fa4gen.emulator.fiber import Fiber, Frame
from fa4gen.emulator.memory import GlobalMemory
from fa4gen.emulator.program import Block, Program
from fa4gen.emulator.state import Launch, Schedule

if TYPE_CHECKING:
    from fa4gen.emulator.races import Races

__all__ = ["Machine"]

# Blocks a fiber runs before another one gets a turn: keeps spinning loops from starving the others.
TURN = 512
# Blocks run while nothing changed that a wait or a poll could see: so many let an operation in flight finish, and so
# many mean that warps spin for ever.
QUIET_BLOCKS, STUCK_BLOCKS = 200, 50_000


class Machine(ClusterLaunchOps):
    """Runs the resident CTAs of one launch: fibers, schedules, divergence, errors."""

    def __init__(self, program: Program, launch: Launch, memory: GlobalMemory, ctas: list[tuple[int, int, int]],
                 schedule: Schedule, counts: np.ndarray, races: Races | None = None) -> None:  # fmt: skip
        super().__init__(program, launch, memory, ctas, schedule, counts, races)
        self.queue: deque[Fiber] = deque([Fiber(self, np.arange(len(ctas) * self.warps_per_cta))])
        self.allow_open_stores = False
        self.blocks_run = self.blocks_at_change = self.version_seen = 0
        if races:
            races.attach(self)

    # The loop ----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Runs the resident CTAs to their ends.

        Raises:
            Deadlock: nothing can run any more.
            EmulatorError: an instruction is unsupported or faults.
        """
        with np.errstate(all="ignore"):
            while self.queue:
                if self.schedule.kind == "random" and self.in_flight and self.schedule.random.random() < 0.3:
                    self._finish_one()
                quiet = self._quiet_blocks()
                fiber = self._next() if quiet <= QUIET_BLOCKS or not self.in_flight else None
                if fiber is not None and quiet <= STUCK_BLOCKS:
                    self._run_fiber(fiber)
                elif self.in_flight:
                    self._finish_one()
                else:
                    raise Deadlock(self._deadlock_report([*self.queue, *([fiber] if fiber else [])]))
            while self.in_flight:
                self._finish_one()
            self._check_end()

    def _quiet_blocks(self) -> int:
        """Blocks that ran since anything changed that another warp could see."""
        if self.version != self.version_seen:
            self.version_seen, self.blocks_at_change = self.version, self.blocks_run
        return self.blocks_run - self.blocks_at_change

    def _finish_one(self) -> None:
        index = self.schedule.random.randrange(len(self.in_flight)) if self.schedule.kind == "random" else 0
        pipe = self.in_flight[index].pipe
        if pipe is not None:
            index = next(i for i, other in enumerate(self.in_flight) if other.pipe == pipe)
        op = self.in_flight.pop(index)
        try:
            self.finish(op)
        except EmulatorError as error:
            error.where = error.where or f"asynchronous {op.what} of CTA {self.cta_name(op.slot)}"
            raise

    def _next(self) -> Fiber | None:
        """The next fiber to run: the oldest that can, joined by all others at the same place."""
        order = list(range(len(self.queue)))
        if self.schedule.kind == "random":
            self.schedule.random.shuffle(order)
        for index in order:
            ready = self._ready_part(self.queue[index], index)
            if ready is not None:
                return self._shrink(self._gather(ready))
        return None

    def _ready_part(self, fiber: Fiber, index: int) -> Fiber | None:
        """The warps of a queued fiber that can go on, taken out of the queue; None if there are none."""
        if fiber.parked is not None:
            if fiber.checked == self.version:
                return None
            rows = WAITS[self.program.blocks[fiber.block].end].ready(self, fiber)
            if not rows.any():
                fiber.checked = self.version
                return None
            if not rows.all():
                self.queue[index] = self.split(fiber, ~rows)
                return self.split(fiber, rows)
        del self.queue[index]
        return fiber

    def _gather(self, fiber: Fiber) -> Fiber:
        """Joins the fiber with those queued at the same place that can run too."""
        if fiber.stack or fiber.pending or self.schedule.chance(0.5):
            return fiber
        same = [fiber]
        for index in reversed(range(len(self.queue))):
            other = self.queue[index]
            if other.block != fiber.block or (other.parked is None) != (fiber.parked is None):
                continue
            if not other.stack and not other.pending:
                ready = self._ready_part(other, index)
                if ready is not None:
                    same.append(ready)
        return Fiber.join(same) if len(same) > 1 else fiber

    def _shrink(self, fiber: Fiber) -> Fiber:
        """At random, leaves some warps behind; warpgroups that must stay together do."""
        if len(fiber.warps) == 1 or not self.schedule.chance(0.3):
            return fiber
        block = self.program.blocks[fiber.block]
        together = fiber.pending or block.collective or block.end == "converge"
        unit = fiber.warps // 4 if together else fiber.warps
        keep = np.isin(unit, [u for u in np.unique(unit) if self.schedule.random.random() < 0.5])
        if keep.all() or not keep.any():
            return fiber
        self.queue.append(self.split(fiber, ~keep))
        return self.split(fiber, keep)

    def split(self, fiber: Fiber, rows: np.ndarray, after: bool = False) -> Fiber:
        """The warps of ``rows`` (a mask) as a fiber of their own. ``after``: its block has run."""
        if fiber.pending:
            self.wgmma_drain(fiber)
        return fiber.take(np.flatnonzero(rows), after)

    def _run_fiber(self, fiber: Fiber) -> None:
        """Runs a fiber until it waits, ends, or its turn is over."""
        f: Fiber | None = fiber
        for _ in range(TURN):
            if f is None:
                return
            block = self.program.blocks[f.block]
            if f.parked is None:
                try:
                    operands = self._execute(f, block)
                except EmulatorError as error:
                    self._locate(error, f, block)
                    raise
                if block.end == "branch":
                    f = self._branch(f, block, operands)
                elif block.end == "goto":
                    f = self._go(f, block.next)
                elif block.end == "exit":
                    f = self._exit(f)
                else:
                    f.parked = operands
                    f = self._arrive(f, block)
            else:
                self._guarded(f, block, "leave")
                f.parked = f.tokens = None
                f = self._go(f, block.next)
            if self.schedule.chance(0.2):
                break
        if f is not None:
            self.queue.append(f)

    def _execute(self, f: Fiber, block: Block) -> Any:
        self.blocks_run += 1
        self.counts[block.index, f.warp_in_cta] += 1 if len(self.ctas) == 1 else 0
        if len(self.ctas) > 1:
            np.add.at(self.counts[block.index], f.warp_in_cta, 1)
        if self.races:
            self.races.block(f, block)
        code = block.code or self.program.code(block)
        return code(self, f, f.regs, f.mask)

    def _arrive(self, f: Fiber, block: Block) -> Fiber | None:
        """Reaches a wait: the fiber if all its warps may go on at once, else None and it is queued."""
        self._guarded(f, block, "arrive")
        f.checked = -1
        wait = WAITS[block.end]
        if block.end == "converge":
            f = self._meet_warpgroups(f)
        if block.end == "mbarrier.wait" and f.parked is not None and not f.parked[3]:
            self.queue.append(f)  # a poll: the others run first
            return None
        if self.schedule.kind != "random" and wait.ready(self, f).all():
            return f
        self.queue.append(f)
        return None

    def _meet_warpgroups(self, f: Fiber) -> Fiber:
        """Joins a fiber that holds part of a warpgroup with the other warps that already wait here."""
        if f.stack:
            raise KernelFault(
                "wgmma while lanes of a warp are apart", self._place(f, self.program.blocks[f.block].terminator)
            )
        if WAITS["converge"].ready(self, f).all():
            return f
        here = [o for o in self.queue if o.block == f.block and o.parked is not None and not o.stack]
        for other in [f, *here]:
            self.wgmma_drain(other)
        self.queue = deque(o for o in self.queue if o not in here)
        return Fiber.join([f, *here])

    def _guarded(self, f: Fiber, block: Block, step: str) -> None:
        try:
            getattr(WAITS[block.end], step)(self, f)
        except EmulatorError as error:
            error.where = error.where or self._place(f, block.terminator)
            raise

    # Control flow ------------------------------------------------------------------------------------------------
    def _branch(self, f: Fiber, block: Block, predicate: Any) -> Fiber | None:
        """Splits the fiber by warp, and warps by lane: those run one side first, the other at the meeting point."""
        if np.ndim(predicate) == 0:
            return self._go(f, block.target if predicate else block.next)
        active = f.active
        taken, fallen = predicate & active, ~predicate & active
        some_taken, some_fallen = taken.any(axis=1), fallen.any(axis=1)
        both = some_taken & some_fallen
        result: Fiber | None = None
        for rows, goal in ((both, None), (some_taken & ~both, block.target), (~some_taken, block.next)):
            if not rows.any():
                continue
            part: Fiber | None = f if rows.all() else self.split(f, rows, after=True)
            assert part is not None
            part = self._diverge(part, block, taken[rows], fallen[rows]) if goal is None else self._go(part, goal)
            if result is None:
                result = part
            elif part is not None:
                self.queue.append(part)
        return result

    def _diverge(self, f: Fiber, block: Block, taken: np.ndarray, fallen: np.ndarray) -> Fiber:
        frame = Frame(block.meet, f.active)
        f.stack.append(frame)
        sides = [(block.next, fallen), (block.target, taken)]
        run = [(where, lanes) for where, lanes in sides if where != block.meet]
        frame.others = run[1:]
        f.block, f.mask = run[0]
        return f

    def _go(self, f: Fiber, block: int) -> Fiber | None:
        """Moves to a block; at a meeting point the other lanes run, or all go on together."""
        f.block = block
        while f.stack and f.block == f.stack[-1].meet:
            frame = f.stack[-1]
            if frame.others:
                f.block, f.mask = frame.others.pop()
                continue
            f.stack.pop()
            f.mask = frame.mask if f.stack or not frame.mask.all() else None
        return f

    def _exit(self, f: Fiber) -> Fiber | None:
        """Active lanes end. The rest of their warps, if any, goes on."""
        if not f.stack:
            self._retire(f)
            return None
        gone = f.active
        for frame in f.stack:
            frame.mask = frame.mask & ~gone
            frame.others = [(b, m & ~gone) for b, m in frame.others if (m & ~gone).any()]
        while f.stack:
            frame = f.stack[-1]
            if frame.others:
                f.block, f.mask = frame.others.pop()
                return f
            f.stack.pop()
            if frame.mask.any():
                f.block, f.mask = frame.meet, frame.mask
                return self._go(f, frame.meet)
        self._retire(f)
        return None

    def _retire(self, f: Fiber) -> None:
        """Warps end: barriers no longer count them."""
        place = self._place(f, self.program.blocks[f.block].terminator)
        if f.pending:
            raise KernelFault("exits with wgmma in flight", place)
        for row, slot in enumerate(f.slots.tolist()):
            self.exited[slot] += 1
            self.register_pool[slot] += 32 * int(self.warp_registers[f.warps[row]])
            barriers = [b for (owner, _), b in self.named.items() if owner == slot]
            for barrier in [*barriers, self.cluster_barriers[slot // self.cluster_size]]:
                barrier.exited += 32
                barrier.settle()
            if self.races and self.exited[slot] == self.warps_per_cta:
                self.races.retire(slot)
        self.version += 1

    # Randomness and polling --------------------------------------------------------------------------------------
    def spurious(self) -> bool:
        """Whether a wait without a time hint reports failure although the phase is complete: it may."""
        return self.schedule.chance(0.2)

    # Errors ------------------------------------------------------------------------------------------------------
    def _place(self, f: Fiber, instr: Any, warps: np.ndarray | None = None) -> str:
        warps = f.warps if warps is None else warps
        named: dict[str, list[int]] = {}
        for w in warps.tolist():
            named.setdefault(self.cta_name(w // self.warps_per_cta), []).append(w % self.warps_per_cta)
        cta, members = next(iter(named.items()))
        others = f" and in {len(named) - 1} other CTAs" if len(named) > 1 else ""
        return f"{self.program.where(instr)}, CTA {cta} warps {', '.join(map(str, members))}{others}"

    def _locate(self, error: EmulatorError, f: Fiber, block: Block) -> None:
        """Notes in the error the PTX line on which the block's function stopped."""
        instr = block.terminator
        file = self.program.file(block)
        for entry in traceback.extract_tb(error.__traceback__):
            if entry.filename == file and entry.lineno is not None:
                instr = block.origins[entry.lineno - 1]
        error.where = error.where or self._place(f, instr)

    def _deadlock_report(self, fibers: list[Fiber]) -> str:
        lines = ["no warp can run and nothing is in flight"]
        for fiber in fibers:
            block = self.program.blocks[fiber.block]
            reasons: dict[str, list[int]] = {}
            if fiber.parked is None:
                described = ["something it polls"] * len(fiber.warps)
            else:
                described = WAITS[block.end].describe(self, fiber)
            for w, reason in zip(fiber.warps.tolist(), described, strict=True):
                reasons.setdefault(reason, []).append(w)
            for reason, warps in reasons.items():
                lines.append(f"waits for {reason}\n    at {self._place(fiber, block.terminator, np.array(warps))}")
        return "\n  ".join(lines)

    def _check_end(self) -> None:
        """What must not be left over when all CTAs have ended."""
        if self.tmem_allocated.any():
            slot = int(self.tmem_allocated.any(axis=1).argmax())
            columns = int(self.tmem_allocated[slot].sum())
            raise KernelFault(f"CTA {self.cta_name(slot)} exits with {columns} TMEM columns that it never freed")
        if self.allow_open_stores:
            return
        for (w, lane), groups in self.bulk_groups.items():
            owed = [op for group in groups for op in group if op.owed]
            if owed:
                cta = self.cta_name(w // self.warps_per_cta)
                raise KernelFault(
                    f"CTA {cta} exits while a {owed[0].what} of warp {w % self.warps_per_cta}, lane {lane} may still "
                    "read its shared memory: no cp.async.bulk.wait_group covers it"
                )
        for key, ops in self.bulk_open.items():
            if ops:
                raise KernelFault(
                    f"warp {key[0] % self.warps_per_cta} exits with a {ops[0].what} that it never committed"
                )
