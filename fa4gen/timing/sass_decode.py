"""SASS with its control bits: what a cubin's instructions are, where they may go next, and what they wait for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fa4gen.errors import Fa4genError
from fa4gen.sass import disassemble

__all__ = ["Instruction", "SassKernel", "decode", "parse"]

NO_BARRIER = 7
_LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z]\w*(?:\.\w+)*)\s*(?P<operands>[^;]*);"
    r"\s*/\* (?P<low>0x[0-9a-f]{16}) \*/\s*\n\s*/\* (?P<high>0x[0-9a-f]{16}) \*/"
)
_LABEL = re.compile(r"^(\.L_x_\d+):\s*$")
_SECTION = re.compile(r'^\s*\.section\s+\.text\.([\w$]+),"ax"')
_TARGET = re.compile(r"`\((\.L_x_\d+)\)|(?:^|\s)(0x[0-9a-f]+)\s*$")
_TARGETS = re.compile(r"\.L_x_\d+")  # of an indirect branch, in nvdisasm's remark: BRANCH_TARGETS .L_x_1,.L_x_2
_BRANCH_PREDICATE = re.compile(r"(?:^|\s)!?U?P(?:\d+|T)\b")
# What control flow of these does is not modelled: kernels here have none.
_OPAQUE = frozenset({"BRX", "BRXU", "JMX", "JMXU", "JMP"})
# Lead nowhere: the subroutines that ptxas puts behind Blackwell kernels trap (a wrong tcgen05.dealloc). Other calls are
# refused.
_TRAPS = frozenset({"CALL", "RET"})


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction.

    ``opcode`` has its modifiers; ``target`` is the index a branch goes to, ``table`` those of an indirect one.
    ``stall``: cycles until the warp's next issue; ``may_yield``: the scheduler may switch warps at no cost;
    ``write_barrier`` and ``read_barrier``: scoreboard (0 to 5) released when the result is written or the operands are
    read, :data:`NO_BARRIER` for none; ``wait_mask``: scoreboards that must be released before issue; ``reuse``: operand
    slots kept in the reuse cache.
    """

    address: int
    predicate: str | None
    opcode: str
    operands: str
    target: int | None
    stall: int
    may_yield: bool
    write_barrier: int
    read_barrier: int
    wait_mask: int
    reuse: int
    table: tuple[int, ...] = ()

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def conditional(self) -> bool:
        """Whether it may have no effect; of a branch or exit: whether control may fall through."""
        if self.predicate is not None:
            return True
        if self.base != "BRA":
            return False
        return bool(_BRANCH_PREDICATE.search(self.operands.partition("`")[0]))


@dataclass(frozen=True, eq=False)
class SassKernel:
    """One kernel's instructions in address order. Equal to itself only."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Indices that may follow each instruction: the fall-through first, then the branch target."""
        return tuple(self._after(index) for index in range(len(self.instructions)))

    def _after(self, index: int) -> tuple[int, ...]:
        instruction = self.instructions[index]
        following = (index + 1,) if index + 1 < len(self.instructions) else ()
        if instruction.base == "EXIT" or instruction.base in _TRAPS:
            return following if instruction.conditional else ()
        if instruction.table:
            return instruction.table
        if instruction.target is None:
            return following
        return (*following, instruction.target) if instruction.conditional else (instruction.target,)


def decode(cubin: Path) -> list[SassKernel]:
    """The kernels in ``cubin``.

    Raises:
        Fa4genError: no tool, not a cubin, no kernel in it, or control flow that :func:`parse` refuses.
    """
    kernels = parse(disassemble(cubin, encodings=True))
    if not kernels:
        raise Fa4genError(f"{cubin} holds no kernel")
    return kernels


def parse(text: str) -> list[SassKernel]:
    """Kernels in ``nvdisasm -c -hex`` text.

    Raises:
        Fa4genError: an indirect branch or a call, or a branch whose target is not in the kernel.
    """
    kernels: list[SassKernel] = []
    name: str | None = None
    raw: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if section := _SECTION.match(line):
            if name and raw:
                kernels.append(_kernel(name, raw, labels))
            name, raw, labels = section.group(1), [], {}
        elif label := _LABEL.match(line):
            labels[label.group(1)] = len(raw)
        elif name and (found := _LINE.match(line + "\n" + (lines[number + 1] if number + 1 < len(lines) else ""))):
            raw.append(found)
    if name and raw:
        kernels.append(_kernel(name, raw, labels))
    return kernels


def _kernel(name: str, raw: list[re.Match[str]], labels: dict[str, int]) -> SassKernel:
    by_address = {int(found["address"], 16): index for index, found in enumerate(raw)}
    return SassKernel(name, tuple(_instruction(found, labels, by_address) for found in raw))


def _instruction(found: re.Match[str], labels: dict[str, int], by_address: dict[int, int]) -> Instruction:
    """The upper word's bits 41 to 61: stall 4, yield 1 (0 hints a switch), write and read barrier 3 each, wait mask 6,
    reuse 4; the layout known since Volta."""
    base, operands = found["opcode"].partition(".")[0], found["operands"].strip()
    table = tuple(labels[name] for name in _TARGETS.findall(operands) if name in labels) if base == "BRX" else ()
    if (base in _OPAQUE and not table) or (base == "CALL" and "trap" not in operands):
        raise Fa4genError(f"{found['opcode']} at {found['address']}: indirect control flow is not decoded")
    target = None
    if base == "BRA":
        goal = _TARGET.search(operands)
        if goal is not None:
            target = labels.get(goal[1]) if goal[1] else by_address.get(int(goal[2], 16))
        if target is None:
            raise Fa4genError(f"branch at {found['address']} to {operands!r}, which is not in the kernel")
    control = int(found["high"], 16) >> 41
    return Instruction(
        address=int(found["address"], 16),
        predicate=found["predicate"],
        opcode=found["opcode"],
        operands=operands,
        target=target,
        stall=control & 15,
        may_yield=not control >> 4 & 1,
        write_barrier=control >> 5 & 7,
        read_barrier=control >> 8 & 7,
        wait_mask=control >> 11 & 63,
        reuse=control >> 17 & 15,
        table=table,
    )
