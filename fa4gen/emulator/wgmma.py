"""Warpgroup MMA: operands from shared-memory descriptors or registers, fp32 accumulation, groups in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fa4gen.emulator.copies import CopyOps
from fa4gen.emulator.errors import KernelFault, UnsupportedInstruction
from fa4gen.emulator.fiber import Fiber, full
from fa4gen.emulator.isa.values import FP8, f4_of_bf16
from fa4gen.emulator.state import SLOT_BITS

__all__ = ["Issue", "WgmmaOps", "element_size", "operand_index", "to_float"]

SPANS = {1: 128, 2: 64, 3: 32}


class Issue(NamedTuple):
    """One wgmma as issued: static form, operand values, and whether the accumulator is added to."""

    form: tuple
    a: Any
    b: Any
    scale: Any
    clock: Any


@dataclass
class Group:
    """wgmma operations between two commits."""

    issues: list[Issue]
    committed: bool = False


def element_size(name: str) -> int:
    return 2 if name.endswith("f16") else 1


def to_float(raw: np.ndarray, name: str) -> np.ndarray:
    """Elements of an MMA operand, given as unsigned integers, in fp32."""
    if name == "bf16":
        return f4_of_bf16(raw)
    if name == "f16":
        return raw.view(np.float16).astype(np.float32)
    return FP8[name][raw]


@lru_cache(maxsize=1024)
def operand_index(
    starts: tuple[int, ...], leading: int, stride: int, span: int, rows: int, depth: int, item: int, mn_major: bool
) -> np.ndarray:
    """Element positions in a CTA's shared memory of an operand: (rows, depth · steps), one start address a step.

    ``leading`` and ``stride`` are the descriptor's byte offsets, ``span`` the swizzle's bytes (0: none).
    """
    r = np.arange(rows, dtype=np.int64)[:, None]
    k = np.arange(depth, dtype=np.int64)[None, :]
    if not span:
        if mn_major:
            raise UnsupportedInstruction("an MN-major operand without swizzle")
        relative = r // 8 * stride + r % 8 * 16 + k * item // 16 * leading + k * item % 16
    elif mn_major:
        width = span // item
        relative = r // width * leading + r % width * item + k // 8 * stride + k % 8 * span
    else:
        relative = r // 8 * stride + r % 8 * span + k * item
    address = np.concatenate([start + relative for start in starts], axis=1)
    address ^= ((address >> 7) & (span // 16 - 1 if span else 0)) << 4
    return (address // item).astype(np.int32)


def decode_descriptor(descriptor: int) -> tuple[int, int, int, int]:
    """(start, leading offset, stride offset, swizzle span) in bytes of a wgmma matrix descriptor."""
    swizzle = descriptor >> 62
    if descriptor >> 46 & 0xFFFF:
        raise UnsupportedInstruction(f"wgmma descriptor {descriptor:#x}: base offset or reserved bits")
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return start, leading, stride, SPANS[swizzle] if swizzle else 0


class WgmmaOps(CopyOps):
    """wgmma instructions: a part of the machine."""

    def wgmma_fence(self, f: Fiber) -> None:
        """Orders registers; the race detector follows those block by block."""
        self._require_warpgroups(f)

    def _require_warpgroups(self, f: Fiber) -> None:
        if f.mask is not None or len(f.warps) % 4 or (f.warps[::4] % 4).any():
            raise KernelFault("wgmma by part of a warpgroup")

    def wgmma_issue(self, f: Fiber, form: tuple, a: Any, b: Any, scale: Any) -> None:
        self._require_warpgroups(f)
        clock = self.races.wgmma_issued(f.warps, form) if self.races else None
        if not f.pending or f.pending[-1].committed:
            f.pending.append(Group([]))
        f.pending[-1].issues.append(Issue(form, a, b, scale, clock))

    def wgmma_commit(self, f: Fiber) -> None:
        if self.races:
            self.races.wgmma_committed(f.warps)
        if not f.pending or f.pending[-1].committed:
            f.pending.append(Group([]))
        f.pending[-1].committed = True
        if self.schedule.run_now():
            self.wgmma_drain(f)

    def wgmma_wait(self, f: Fiber, count: int) -> None:
        """Computes all but the ``count`` newest committed groups."""
        committed = [group for group in f.pending if group.committed]
        for group in committed[: max(len(committed) - count, 0)]:
            self._compute(f, group)
            f.pending.remove(group)
        if self.races:
            self.races.wgmma_waited(f.warps, count)

    def wgmma_drain(self, f: Fiber) -> None:
        """Computes everything that is pending: the hardware may be this fast."""
        for group in f.pending:
            self._compute(f, group)
        f.pending.clear()

    def _compute(self, f: Fiber, group: Group) -> None:
        """Issues of the same form that add to each other become one deeper matrix product."""
        issues = group.issues
        while issues:
            form = issues[0].form
            run = 1
            while run < len(issues) and issues[run].form == form and np.all(issues[run].scale):
                run += 1
            self._multiply(f, form, issues[:run])
            issues = issues[run:]

    def _multiply(self, f: Fiber, form: tuple, issues: list[Issue]) -> None:
        columns, type_a, type_b, scale_a, scale_b, a_mn, b_mn, accumulators, _ = form
        groups = len(f.warps) // 4
        depth = 32 // element_size(type_a)
        product = np.empty((groups, 64, columns), np.float32)
        in_registers = isinstance(issues[0].a, tuple)
        a_all = _register_operand([i.a for i in issues], type_a, f.shape) if in_registers else None
        known: dict[tuple, np.ndarray] = {}
        for group in range(groups):
            row = 4 * group
            slot = int(f.slots[row])
            b_key = (slot, tuple(_lane0(i.b, row) for i in issues))
            if b_key not in known:
                known[b_key] = self._shared_operand(f, row, *b_key, columns, depth, type_b, bool(b_mn), issues, None)
            if a_all is not None:
                a = a_all[group]
            else:
                starts = tuple(_lane0(i.a, row) for i in issues)
                a = self._shared_operand(f, row, slot, starts, 64, depth, type_a, bool(a_mn), issues, 16)
            np.matmul(a, known[b_key].T, out=product[group])
            if self.races and b_key in known:
                self._shared_operand(f, row, *b_key, columns, depth, type_b, bool(b_mn), issues, 0)
        if scale_a * scale_b < 0:
            np.negative(product, out=product)
        self._accumulate(f, accumulators, product, issues[0].scale)

    def _shared_operand(
        self, f: Fiber, row: int, slot: int, descriptors: tuple[int, ...], rows: int, depth: int, name: str,
        mn_major: bool, issues: list[Issue], rows_of_warp: int | None,
    ) -> np.ndarray:  # fmt: skip
        """An operand in fp32, (rows, depth · steps), through one descriptor a step.

        ``rows_of_warp`` tells the race detector who reads: each warp its own so many rows, 0: every warp of the group
        all of them (then only the reads are recorded), None: nobody yet.
        """
        decoded = [decode_descriptor(d) for d in descriptors]
        leading, stride, span = decoded[0][1:]
        if any(d[1:] != decoded[0][1:] for d in decoded):
            raise UnsupportedInstruction("wgmma descriptors of one product that differ in layout")
        item = element_size(name)
        index = operand_index(tuple(d[0] for d in decoded), leading, stride, span, rows, depth, item, mn_major)
        granules = (index[:, :: 4 // item] * item >> 2) + (slot << SLOT_BITS >> 2)
        if self.races and rows_of_warp is not None:
            self.races.wgmma_reads(f.warps[row : row + 4], granules, issues, row, rows_of_warp)
            if rows_of_warp == 0:
                return granules
        if int(index.max()) * item >= self.shared_end:
            raise KernelFault(f"a wgmma descriptor reaches {int(index.max()) * item:#x}, beyond {self.shared_end:#x}")
        self.require_shared(granules)
        size = 1 << SLOT_BITS
        memory = self.shared[slot * size : (slot + 1) * size].view(f"u{item}")
        self.shared_bytes_read += index.size * item
        return to_float(memory[index], name)

    def _accumulate(self, f: Fiber, accumulators: tuple[int, ...], product: np.ndarray, scale: Any) -> None:
        """Adds (groups, 64, columns) to the accumulator fragments, or replaces them where ``scale`` is false.

        Register 4·j + 2·h + c of lane 4·r + q in warp w holds row 16·w + 8·h + r, column 8·j + 2·q + c.
        """
        groups, _, columns = product.shape
        parts = product.reshape(groups, 4, 2, 8, columns // 8, 4, 2)  # g w h r j q c
        fragments = np.ascontiguousarray(parts.transpose(4, 2, 6, 0, 1, 3, 5)).reshape(columns // 2, groups * 4, 32)
        regs = f.regs
        if not np.any(scale):
            for number, value in zip(accumulators, fragments, strict=True):
                regs[number] = value
            return
        every = bool(np.all(scale))
        for number, value in zip(accumulators, fragments, strict=True):
            old = full(regs[number].view(np.float32), f.shape)
            regs[number] = old + value if every else np.where(scale, old + value, value)


def _lane0(value: Any, row: int) -> int:
    return int(value[row, 0]) if np.ndim(value) else int(value)


def _register_operand(steps: list[tuple], name: str, shape: tuple[int, int]) -> np.ndarray:
    """The A operand from registers, (groups, 64, depth · steps) in fp32.

    Register h + 2·kk of lane 4·r + q in warp w holds row 16·w + 8·h + r and the 32 bits at depth 4·kk + q.
    """
    item = element_size(name)
    words = np.stack([full(register.view(np.uint32), shape) for step in steps for register in step])
    groups = shape[0] // 4
    raw = words.view(f"u{item}").reshape(len(steps), 2, 2, groups, 4, 8, 4, 4 // item)  # s kk h g w r q c
    raw = raw.transpose(3, 4, 2, 5, 0, 1, 6, 7)  # g w h r s kk q c
    return to_float(np.ascontiguousarray(raw).reshape(groups, 64, -1), name)
