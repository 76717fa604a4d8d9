"""A kernel as basic blocks, each compiled to a Python function when it is first reached.

A block ends where control may leave it: at a branch, at an exit, in front of a label, and behind an instruction that
may wait. Reconvergence points are immediate post-dominators; liveness says which registers a fiber has to carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fa4gen.emulator.errors import UnsupportedInstruction
from fa4gen.emulator.fiber import POISON
from fa4gen.emulator.isa import OPCODES, SUSPENSIONS, Emitter, Mods, suspension_of
from fa4gen.emulator.isa.values import NAMESPACE
from fa4gen.emulator.parser import Instr, Kernel, Reg, Sym, Vec
from fa4gen.emulator.registers import contract
from fa4gen.emulator.warp import FUNCTIONS

__all__ = ["Block", "Program"]

EXIT = -1
_FMA = frozenset(("add", "sub", "mul", "mad", "fma", "contracted"))


@dataclass
class Block:
    """Straight-line code and what ends it.

    ``end``: "goto", "branch" (the code returns the predicate), "exit" or the name of a wait (the code returns the
    operands). ``next``: the block that follows; ``target``: of a taken branch. ``meet``: immediate post-dominator,
    ``EXIT`` if there is none. ``units``: instructions by unit, the terminator included. ``returns``: number of the
    register that a wait writes, or None. ``collective``: holds wgmma that a whole warpgroup has to run.
    """

    index: int
    instrs: list[Instr]
    end: str = "goto"
    next: int = EXIT
    target: int = EXIT
    terminator: Instr | None = None
    meet: int = EXIT
    units: dict[str, int] = field(default_factory=dict)
    returns: int | None = None
    collective: bool = False
    live_in: frozenset[int] = frozenset()
    live_out: frozenset[int] = frozenset()
    code: Callable[..., Any] | None = None
    origins: list[Instr | None] = field(default_factory=list)

    @property
    def successors(self) -> tuple[int, ...]:
        if self.end == "exit":
            return ()
        return (self.next, self.target) if self.end == "branch" else (self.next,)


class Program:
    """Blocks of one kernel. ``numbers`` maps register names to the keys of a fiber's register file."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.numbers = {name: number for number, name in enumerate(kernel.registers)}
        self.uses_tmem = any(i.opcode == "tcgen05" for i in kernel.instrs)
        self.tmem_loaded = frozenset(
            item.name
            for i in kernel.instrs
            if i.opcode == "tcgen05" and i.mods[0] == "ld" and isinstance(i.operands[0], Vec)
            for item in i.operands[0].items
            if isinstance(item, Reg)
        )
        self.constants: dict[str, Any] = NAMESPACE | FUNCTIONS
        self.blocks = _split(kernel)
        contract([b.instrs for b in self.blocks], [b.terminator for b in self.blocks if b.terminator])
        emitters = [self._emit(block) for block in self.blocks]
        live = _liveness(self.blocks, emitters)
        for block, meet in zip(self.blocks, _post_dominators(self.blocks), strict=True):
            block.meet = meet
        self.poison = {
            number: POISON[1 if kind == "pred" else int(kind[1:])]
            for number, kind in enumerate(kernel.registers.values())
        }
        self.sources = []
        for block, emitter, (live_in, live_out) in zip(self.blocks, emitters, live, strict=True):
            block.live_in = frozenset(self.numbers[n] for n in live_in)
            block.live_out = frozenset(self.numbers[n] for n in live_out)
            text, block.origins = emitter.source(f"block_{block.index}", live_out)
            self.sources.append(text)

    def _emit(self, block: Block) -> Emitter:
        emitter = Emitter(self.kernel, self.numbers, self.constants, self.tmem_loaded)
        for instr in block.instrs:
            emitter.emit(instr)
            unit = _unit(instr)
            block.units[unit] = block.units.get(unit, 0) + 1
            block.collective |= instr.opcode == "wgmma"
        if block.terminator is None:
            return emitter
        emitter.instr = instr = block.terminator
        if block.end == "branch":
            assert instr.pred is not None
            emitter.line(f"return {emitter.use(instr.pred, 'b1')}")
            block.units["control"] = block.units.get("control", 0) + 1
        elif block.end not in ("goto", "exit"):
            mods = Mods(instr)
            emitter.line(f"return {SUSPENSIONS[block.end](emitter, instr, mods)}")
            mods.end()
            block.units["barrier"] = block.units.get("barrier", 0) + (block.end != "converge")
            if block.end == "mbarrier.wait":
                result = instr.operands[0]
                assert isinstance(result, Reg)
                block.returns = self.numbers[result.name]
        return emitter

    def code(self, block: Block) -> Callable[..., Any]:
        """The compiled function of a block."""
        if block.code is None:
            name = f"block_{block.index}"
            exec(compile(self.sources[block.index], self.file(block), "exec"), self.constants)
            block.code = self.constants[name]
        return block.code

    def file(self, block: Block) -> str:
        """The file name under which a block's function appears in tracebacks."""
        return f"<ptx block {block.index} of {self.kernel.name}>"

    def where(self, instr: Instr | None) -> str:
        """PTX line and, if line information was kept, source line."""
        if instr is None:
            return "an unknown instruction"
        text = str(instr)
        if instr.source and instr.source[0] in self.kernel.files:
            text += f" ({self.kernel.files[instr.source[0]]}:{instr.source[1]})"
        return text


def _split(kernel: Kernel) -> list[Block]:
    """Cuts the instructions into blocks and resolves successors."""
    instrs, starts = _lower(kernel)
    blocks: list[Block] = []
    first_of: dict[int, int] = {}
    begin = 0
    for index, instr in enumerate(instrs):
        end = _end_of(instr)
        if end is None and index + 1 < len(instrs) and index + 1 not in starts:
            continue
        body = instrs[begin : index + (end is None)]
        first_of[begin] = len(blocks)
        blocks.append(Block(len(blocks), body, end or "goto", terminator=instr if end else None))
        begin = index + 1
    for position, block in enumerate(blocks):
        block.next = position + 1 if position + 1 < len(blocks) else EXIT
        last = block.terminator
        if last is not None and last.opcode == "bra":
            label = last.operands[-1]
            if not isinstance(label, Sym) or label.name not in kernel.labels:
                raise UnsupportedInstruction("branch target", str(last))
            goal = first_of[starts_of(starts, label.name)]
            if block.end == "branch":
                block.target = goal
            else:
                block.next = goal
        if block.end != "exit" and EXIT in block.successors:
            raise UnsupportedInstruction("code that runs off the end of the kernel", str(last))
    return blocks


def starts_of(starts: dict[int, set[str]], label: str) -> int:
    """Index of the instruction behind ``label``."""
    return next(index for index, labels in starts.items() if label in labels)


def _end_of(instr: Instr) -> str | None:
    if instr.opcode == "bra":
        return "branch" if instr.pred else "goto"
    if instr.opcode in ("ret", "exit"):
        return "exit"
    return suspension_of(instr)


def _lower(kernel: Kernel) -> tuple[list[Instr], dict[int, set[str]]]:
    """Instructions with two rewrites, and the labels in front of each index.

    A predicated wait or exit becomes a branch around it. In front of a warpgroup's first wgmma in a straight line
    stands a ``converge``: the warpgroup's warps meet there.
    """
    labels_at: dict[int, set[str]] = {}
    for label, position in kernel.labels.items():
        labels_at.setdefault(position, set()).add(label)
    out: list[Instr] = []
    starts: dict[int, set[str]] = {}
    together = False
    for position, instr in enumerate(kernel.instrs):
        if position in labels_at:
            starts.setdefault(len(out), set()).update(labels_at[position])
            together = False
        if instr.opcode == "wgmma" and instr.mods[0] in ("fence", "mma_async") and not together:
            out.append(replace(instr, opcode="converge", mods=(), operands=(), pred=None))
            together = True
        end = _end_of(instr)
        together = together and end is None
        if end not in (None, "branch", "goto") and instr.pred:
            skip = f"skip#{position}"
            kernel.labels[skip] = position
            opposite = Reg(instr.pred.name, not instr.pred.negated)
            out.append(replace(instr, opcode="bra", mods=(), operands=(Sym(skip),), pred=opposite))
            out.append(replace(instr, pred=None))
            starts.setdefault(len(out), set()).add(skip)
        else:
            out.append(instr)
    return out, starts


def _liveness(blocks: list[Block], emitters: list[Emitter]) -> list[tuple[set[str], set[str]]]:
    """Registers (live in, live out) of every block. A value that a divergent lane may still need is never killed:
    fibers drop registers only while all their lanes are together."""
    live_in = [set(e.exposed) for e in emitters]
    live_out: list[set[str]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out = set().union(*(live_in[s] for s in block.successors)) if block.successors else set()
            new = emitters[block.index].exposed | (out - emitters[block.index].defined)
            if out != live_out[block.index] or new != live_in[block.index]:
                live_out[block.index], live_in[block.index] = out, new
                changed = True
    return list(zip(live_in, live_out, strict=True))


def _post_dominators(blocks: list[Block]) -> list[int]:
    """Immediate post-dominator of every block, ``EXIT`` where only the exit follows every path."""
    every = set(range(len(blocks))) | {EXIT}
    after: dict[int, set[int]] = {b.index: set(every) for b in blocks}
    after[EXIT] = {EXIT}
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            successors = block.successors or (EXIT,)
            new = set.intersection(*(after[s] for s in successors)) | {block.index}
            if new != after[block.index]:
                after[block.index] = new
                changed = True
    meets = []
    for block in blocks:
        candidates = after[block.index] - {block.index}
        # The nearest one is post-dominated by all the others.
        meets.append(next(c for c in candidates if after[c] >= candidates))
    return meets


def _unit(instr: Instr) -> str:
    """What the instruction is counted under: its opcode's unit, but floating-point sums and products are "fma"."""
    floats = instr.opcode in _FMA and any(mod.startswith(("f", "bf")) for mod in instr.mods)
    return "fma" if floats else OPCODES[instr.opcode].unit
