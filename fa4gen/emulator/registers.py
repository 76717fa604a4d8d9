"""Which registers an instruction reads and writes, and what ptxas makes of a product that one sum uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fa4gen.emulator.parser import Instr, Mem, Operand, Pair, Reg, Vec

__all__ = ["accesses", "contract", "names"]

NO_RESULT = {"st", "red", "stmatrix", "bar", "barrier", "cp", "fence", "prefetch", "bra", "ret", "exit", "setmaxnreg",
             "converge", "griddepcontrol", "nanosleep"}  # fmt: skip
# Without a rounding modifier ptxas may contract.
CONTRACTIBLE = ("f32",), ("ftz", "f32")


def names(operand: Operand) -> list[str]:
    """Registers in an operand, as often as they stand there."""
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Vec):
        return [name for item in operand.items for name in names(item)]
    if isinstance(operand, Pair):
        return names(operand.first) + names(operand.second)
    if isinstance(operand, Mem):
        return names(operand.base if isinstance(operand.base, Reg) else None) + names(operand.coords)
    return []


def accesses(instr: Instr) -> tuple[set[str], set[str]]:
    """Names of the registers that an instruction reads and writes; an accumulator of wgmma counts as written."""
    operands = list(instr.operands)
    reads = {instr.pred.name} if instr.pred else set()
    writes: set[str] = set()
    if instr.opcode not in NO_RESULT and operands and not isinstance(operands[0], Mem):
        writes.update(names(operands.pop(0)))
    for operand in operands:
        reads.update(names(operand))
    return reads, writes


def contract(blocks: Sequence[list[Instr]], others: Sequence[Instr]) -> None:
    """Makes one ``contracted`` of a product and the only sum that uses it, in the same block, as ptxas does.

    ``others``: instructions outside the blocks that read registers. ptxas of CUDA 13 contracts ``mul.f32`` with
    ``add.f32`` or ``sub.f32``, none with a rounding modifier, exactly so: in 120 to 192 places of a forward kernel, no
    more and no fewer than the FFMA of its SASS tell. Of two products the sum takes the first.
    """
    uses: Counter[str] = Counter()
    definitions: Counter[str] = Counter()
    for instr in [*(i for block in blocks for i in block), *others]:
        reads, writes = accesses(instr)
        definitions.update(writes)
        for name in reads:
            uses[name] += max(sum(names(o).count(name) for o in instr.operands), 1)
    for block in blocks:
        products: dict[str, int] = {}
        for index, instr in enumerate(block):
            if instr.pred or instr.mods not in CONTRACTIBLE:
                continue
            if instr.opcode == "mul":
                (target,) = names(instr.operands[0])
                if uses[target] == definitions[target] == 1:
                    products[target] = index
            elif instr.opcode in ("add", "sub"):
                _contract_sum(block, index, products)
        block[:] = [i for i in block if i.opcode != "contracted away"]


def _contract_sum(block: list[Instr], index: int, products: dict[str, int]) -> None:
    sum_ = block[index]
    target, *terms = sum_.operands
    for place, term in enumerate(terms):
        at = products.get(term.name) if isinstance(term, Reg) else None
        if at is None or block[at].mods != sum_.mods:
            continue
        factors = block[at].operands[1:]
        used = {name for factor in factors for name in names(factor)}
        if any(used & accesses(between)[1] for between in block[at + 1 : index]):
            continue
        function = "add" if sum_.opcode == "add" else ("sub", "rsub")[place]
        operands = (target, *factors, terms[1 - place])
        block[index] = replace(sum_, opcode="contracted", mods=(function, *sum_.mods), operands=operands)
        block[at] = replace(block[at], opcode="contracted away")
        return
