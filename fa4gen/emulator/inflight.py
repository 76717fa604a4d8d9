"""Registers of wgmma in flight: accumulators must not be touched before the wait, operands not overwritten, and what
other instructions accessed needs a ``wgmma.fence`` before wgmma uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fa4gen.emulator.errors import RaceError
from fa4gen.emulator.parser import Imm, Instr, Vec
from fa4gen.emulator.program import Block, Program
from fa4gen.emulator.registers import accesses, names

__all__ = ["InFlight"]


class _Event(NamedTuple):
    """A run of ordinary instructions ("use"), or one wgmma instruction.

    ``accessed``: what is accessed by more than a plain copy. Compilers put copies and constants between the fence and
    wgmma; ptxas allocates registers so that none remain.
    """

    kind: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    accessed: frozenset[str] = frozenset()
    instrs: tuple[Instr, ...] = ()
    keep: int = 0


@dataclass(frozen=True)
class _State:
    """Of one warp: committed groups and the open one, each (accumulators, A registers); what needs a fence."""

    groups: tuple[tuple[frozenset[str], frozenset[str]], ...] = ()
    open: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    dirty: frozenset[str] = frozenset()
    fenced: bool = False

    @property
    def accumulators(self) -> frozenset[str]:
        return frozenset().union(self.open[0], *(g[0] for g in self.groups))

    @property
    def operands(self) -> frozenset[str]:
        return frozenset().union(self.open[1], *(g[1] for g in self.groups))


class InFlight:
    """Follows every warp through the program's wgmma instructions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.used = _wgmma_registers(program)
        self.events: dict[int, list[_Event]] = {}
        self.states: dict[int, _State] = {}
        self.memory: dict[tuple[int, _State], _State] = {}

    def block(self, warps: np.ndarray, block: Block) -> None:
        """The warps run a block.

        Raises:
            RaceError: a register is touched while wgmma may still use it, or used by wgmma without a fence.
        """
        if not self.used:
            return
        if block.index not in self.events:
            self.events[block.index] = self._summarise(block)
        events = self.events[block.index]
        if not events:
            return
        for warp in warps.tolist():
            state = self.states.get(warp, _State())
            key = (block.index, state)
            if key not in self.memory:
                self.memory[key] = self._follow(events, state)
            self.states[warp] = self.memory[key]

    def _summarise(self, block: Block) -> list[_Event]:
        events: list[_Event] = []
        run: list[Instr] = []

        def flush() -> None:
            if run:
                both = [accesses(i) for i in run]
                reads = frozenset().union(*(r for r, _ in both)) & self.used
                writes = frozenset().union(*(w for _, w in both)) & self.used
                if reads or writes:
                    real = [r | w for i, (r, w) in zip(run, both, strict=True) if i.opcode != "mov"]
                    events.append(_Event("use", reads, writes, frozenset().union(*real) & self.used, tuple(run)))
                run.clear()

        for instr in block.instrs:
            if instr.opcode != "wgmma":
                run.append(instr)
                continue
            flush()
            kind = instr.mods[0]
            if kind == "mma_async":
                accumulators, operands = _mma_registers(instr)
                events.append(_Event(kind, operands, accumulators, instrs=(instr,)))
            else:
                first = instr.operands[0] if instr.operands else None
                events.append(_Event(kind, keep=int(first.value) if isinstance(first, Imm) else 0))
        flush()
        return events

    def _follow(self, events: list[_Event], state: _State) -> _State:
        for event in events:
            if event.kind == "use":
                self._check_use(event, state)
                state = replace(state, dirty=state.dirty | event.accessed)
            elif event.kind == "fence":
                state = replace(state, dirty=frozenset(), fenced=True)
            elif event.kind == "mma_async":
                state = self._issue(event, state)
            elif event.kind == "commit_group":
                state = replace(state, groups=(*state.groups, state.open), open=(frozenset(), frozenset()))
            elif event.kind == "wait_group":
                state = replace(state, groups=state.groups[max(len(state.groups) - event.keep, 0) :])
        return state

    def _check_use(self, event: _Event, state: _State) -> None:
        for touched, what in (
            ((event.reads | event.writes) & state.accumulators, "touches the accumulator"),
            (event.writes & state.operands, "overwrites the operand"),
        ):
            if touched:
                self._fail(event, touched, f"{what} {{}} of a wgmma that no wgmma.wait_group has waited for")

    def _issue(self, event: _Event, state: _State) -> _State:
        if not state.fenced:
            self._fail(event, event.writes, "first wgmma without a wgmma.fence ({})")
        unfenced = (event.reads | event.writes) & state.dirty
        if unfenced:
            self._fail(event, unfenced, "wgmma uses {}, accessed since the last wgmma.fence")
        busy = event.reads & state.accumulators
        if busy:
            self._fail(event, busy, "wgmma reads {}, the accumulator of a wgmma in flight")
        return replace(state, open=(state.open[0] | event.writes, state.open[1] | event.reads))

    def _fail(self, event: _Event, names: frozenset[str], message: str) -> None:
        for instr in event.instrs:
            reads, writes = accesses(instr) if event.kind == "use" else (event.reads, event.writes)
            for name in sorted(names & (reads | writes)):
                raise RaceError(message.format(f"register {name}"), self.program.where(instr))
        raise RaceError(message.format("a register"))


def _wgmma_registers(program: Program) -> frozenset[str]:
    names: set[str] = set()
    for instr in program.kernel.instrs:
        if instr.opcode == "wgmma" and instr.mods[0] == "mma_async":
            names.update(*_mma_registers(instr))
    return frozenset(names)


def _mma_registers(instr: Instr) -> tuple[frozenset[str], frozenset[str]]:
    """(accumulators, A registers) of a wgmma."""
    a = instr.operands[1]
    return frozenset(names(instr.operands[0])), frozenset(names(a)) if isinstance(a, Vec) else frozenset()
