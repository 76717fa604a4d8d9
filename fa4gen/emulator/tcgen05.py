"""Blackwell's tensor memory and MMA.

TMEM has 128 lanes of 512 32-bit columns a CTA; an address is lane << 16 | column, and a warp reaches the 32 lanes of
its rank modulo 4. One thread issues an MMA for one CTA or a pair; it runs in order with the issuer's other MMAs, and
tcgen05.commit makes an mbarrier follow their completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fa4gen.emulator.copies import AsyncOp
from fa4gen.emulator.errors import KernelFault, UnsupportedInstruction
from fa4gen.emulator.fiber import Fiber, at, full
from fa4gen.emulator.isa.fragment import Fragment
from fa4gen.emulator.state import SLOT_BITS
from fa4gen.emulator.wgmma import WgmmaOps, element_size, operand_index, to_float

__all__ = ["COLUMNS", "LANES", "InstructionDescriptor", "TensorOps"]

LANES, COLUMNS = 128, 512
SPANS = {0: 0, 2: 128, 4: 64, 6: 32}
FORMATS = {"f16": ("f16", "bf16"), "f8f6f4": ("e4m3", "e5m2")}


@dataclass(frozen=True)
class InstructionDescriptor:
    """What an MMA's 32-bit descriptor says."""

    a: str
    b: str
    negate: bool
    a_mn: bool
    b_mn: bool
    rows: int
    columns: int

    @classmethod
    def decode(cls, bits: int, kind: str) -> InstructionDescriptor:
        """Raises UnsupportedInstruction for sparsity, saturation, other accumulators and formats."""
        formats = FORMATS[kind]
        a, b = bits >> 7 & 7, bits >> 10 & 7
        if bits & 0xF or bits >> 4 & 3 != 1 or bits >> 29 or bits >> 23 & 1 or a >= len(formats) or b >= len(formats):
            raise UnsupportedInstruction(f"tcgen05.mma.kind::{kind} with instruction descriptor {bits:#x}")
        return cls(
            formats[a], formats[b], bool((bits >> 13 ^ bits >> 14) & 1), bool(bits >> 15 & 1), bool(bits >> 16 & 1),
            (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3,
        )  # fmt: skip


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma. ``slots``: the CTAs whose tensor cores take part. ``a`` is a TMEM address or a descriptor."""

    slots: tuple[int, ...]
    form: InstructionDescriptor
    target: int
    a: int
    a_in_tmem: bool
    b: int
    accumulate: bool
    stamp: Any


def decode_descriptor(descriptor: int) -> tuple[int, int, int, int]:
    """(start, leading offset, stride offset, swizzle span) in bytes of a tcgen05 shared-memory descriptor."""
    swizzle = descriptor >> 61
    if swizzle not in SPANS or descriptor >> 46 & 3 != 1 or descriptor >> 48 & 0x1FFF:
        raise UnsupportedInstruction(f"tcgen05 shared-memory descriptor {descriptor:#x}")
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return start, leading, stride, SPANS[swizzle]


def _cells(f: Fiber, lane: np.ndarray, column: np.ndarray, shape: Fragment, register: Any = slice(None)) -> tuple:
    """Index into the TMEM of all CTAs of a fragment's registers, or of one."""
    lanes, columns = shape.lanes[register], shape.columns[register]
    return f.slots[:, None], lanes[..., None, :] + lane[:, None], columns[..., None, :] + column[:, None]


def _reduce_registers(values: np.ndarray, function: str, _: Any, absolute: bool, nan: bool) -> np.ndarray:
    if absolute:
        values = np.abs(values)
    functions = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[function]
    return functions[nan].reduce(values, axis=0)


def _multicast(data: np.ndarray, multicast: str) -> np.ndarray:
    """Rows of a tcgen05.cp as the 128 lanes get them."""
    if multicast == "warpx4":
        return np.tile(data, (4, 1))
    if multicast == "warpx2::02_13":
        return np.tile(data, (2, 1))
    if multicast == "warpx2::01_23":
        return np.concatenate([data[:32], data[:32], data[32:], data[32:]])
    return data


class TensorOps(WgmmaOps):
    """tcgen05 instructions: a part of the machine."""

    def place(self, f: Fiber, address: Any, shape: Fragment, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """(first lane, first column) of each warp's access to its own 32 lanes."""
        if mask is not None and not mask.all():
            raise KernelFault("tcgen05.ld or st by part of a warp")
        first = full(address, f.shape)[:, 0].astype(np.int64)
        lane, column = first >> 16, first & 0xFFFF
        inside = lane - f.warp_in_cta % 4 * 32
        # Shapes of 16 lanes may start at either half of a quadrant.
        if ((inside < 0) | (inside + shape.lanes.max() > 31) | (inside % 16 != 0)).any():
            raise KernelFault(f"warp {int(f.warp_in_cta[0])} accesses TMEM lane {int(lane[0])}, outside its quadrant")
        for start, count in shape.runs:
            self.check_columns(f.slots, column + start, count)
        return lane, column

    def check_columns(self, slots: np.ndarray, column: np.ndarray, count: int) -> None:
        """Faults on columns that the CTA has not allocated."""
        for slot, first in zip(np.ravel(slots).tolist(), np.ravel(column).tolist(), strict=True):
            if first + count > COLUMNS or not self.tmem_allocated[slot, first : first + count].all():
                raise KernelFault(
                    f"TMEM columns {first} to {first + count - 1} of CTA {self.cta_name(slot)} are not all allocated"
                )

    def tmem_load(self, f: Fiber, address: Any, shape: Fragment, reduce: Any, mask: Any) -> list[np.ndarray]:
        """The registers of a fragment; behind them, if ``reduce`` (function, numpy type, absolute values, NaN) asks for
        it, each lane's reduction of its own.
        """
        lane, column = self.place(f, address, shape, mask)
        index = _cells(f, lane, column, shape)
        if not self.tmem_written[index].all():
            raise KernelFault("reads TMEM that nothing wrote")
        values = self.tmem[index]
        self.tmem_bytes_read += values.nbytes
        if self.races:
            for start, count in shape.runs:
                self.races.tmem_lanes(f, column + start, count, False)
        if shape.packed:
            values = values[0::2] & np.uint32(0xFFFF) | values[1::2] << np.uint32(16)
        results = list(values)
        if reduce is not None:
            results.append(_reduce_registers(values.view(reduce[1]), *reduce))
        return results

    def tmem_store(self, f: Fiber, address: Any, shape: Fragment, values: tuple, mask: Any) -> None:
        lane, column = self.place(f, address, shape, mask)
        if shape.packed:
            words = [full(v, f.shape) for v in values]
            values = tuple(part for v in words for part in (v & np.uint32(0xFFFF), v >> np.uint32(16)))
        for register, value in enumerate(values):
            index = _cells(f, lane, column, shape, register)
            self.tmem[index] = full(value, f.shape)
            self.tmem_written[index] = True
        self.tmem_bytes_written += 128 * len(values) * len(f.warps)
        if self.races:
            for start, count in shape.runs:
                self.races.tmem_lanes(f, column + start, count, True)

    def tmem_wait(self, f: Fiber, what: str) -> None:
        """Loads and stores are done in order: only the race detector has to know."""
        if self.races:
            self.races.tmem_waited(f.warps, what)

    def tmem_reserve(self, slot: int, columns: int) -> int | None:
        """First column of a free run, marked as taken; None if there is none now.

        Raises:
            KernelFault: a number of columns that the hardware refuses.
        """
        if not 32 <= columns <= COLUMNS or columns & columns - 1:
            raise KernelFault(f"tcgen05.alloc of {columns} columns: needs a power of two from 32 to 512")
        for first in range(0, COLUMNS - columns + 1, 32):
            if not self.tmem_allocated[slot, first : first + columns].any():
                self.tmem_allocated[slot, first : first + columns] = True
                self.tmem_written[slot, :, first : first + columns] = False
                return first
        return None

    def tmem_free(self, f: Fiber, address: Any, columns: Any) -> None:
        for row, slot in enumerate(f.slots.tolist()):
            first, count = int(at(address, row, 0)) & 0xFFFF, int(at(columns, row, 0))
            if not self.tmem_allocated[slot, first : first + count].all():
                raise KernelFault(f"tcgen05.dealloc of columns {first} to {first + count - 1}, which are not allocated")
            self.tmem_allocated[slot, first : first + count] = False
        self.version += 1

    def tensor_mma(
        self, f: Fiber, group: int, kind: str, target: Any, a: Any, in_tmem: bool, b: Any, descriptor: Any,
        disabled: tuple, accumulate: Any, mask: Any,
    ) -> None:  # fmt: skip
        """One MMA for every active lane: usually one elected lane."""
        for row, lane in self.lanes(f, mask).tolist():
            if any(int(at(word, row, lane)) for word in disabled):
                raise UnsupportedInstruction("tcgen05.mma with disabled output lanes")
            slot, warp = int(f.slots[row]), int(f.warps[row])
            slots = self._group_slots(f, row, group)
            form = InstructionDescriptor.decode(int(at(descriptor, row, lane)), kind)
            stamp = self.races.mma_issued(warp) if self.races else None
            mma = Mma(
                slots, form, int(at(target, row, lane)), int(at(a, row, lane)), in_tmem, int(at(b, row, lane)),
                bool(at(accumulate, row, lane)), stamp,
            )  # fmt: skip
            self.submit(AsyncOp("tcgen05.mma", slot, partial(self._multiply_tensors, mma), pipe=slot))

    def _multiply_tensors(self, mma: Mma) -> None:
        form, slots = mma.form, mma.slots
        depth = 32 // element_size(form.a)
        rows = form.rows // len(slots)
        columns = form.columns // len(slots)
        split = len(slots) == 2 and rows == 64  # columns from N/2 sit in the upper lanes
        if rows not in (64, 128) or form.rows < 64:
            raise UnsupportedInstruction(f"tcgen05.mma with M = {form.rows} over {len(slots)} CTAs")
        b = np.concatenate([self._tensor_operand(mma, s, mma.b, columns, depth, form.b, form.b_mn) for s in slots])
        for slot in slots:
            if mma.a_in_tmem:
                a = self._tmem_operand(mma, slot, rows, depth)
            else:
                a = self._tensor_operand(mma, slot, mma.a, rows, depth, form.a, form.a_mn)
            product = a @ b.T
            if form.negate:
                product = -product
            if split:
                half = form.columns // 2
                product = np.concatenate([product[:, :half], product[:, half:]])
            self._accumulate_tmem(mma, slot, np.ascontiguousarray(product))

    def tensor_copy(
        self, f: Fiber, group: int, rows: int, size: int, multicast: str, address: Any, descriptor: Any, mask: Any
    ) -> None:
        """tcgen05.cp: ``rows`` rows of ``size`` bytes from shared memory, in every CTA of the group from its own."""
        for row, lane in self.lanes(f, mask).tolist():
            target, bits = int(at(address, row, lane)), int(at(descriptor, row, lane))
            if target >> 16:
                raise KernelFault(f"tcgen05.cp to TMEM lane {target >> 16}: starts at lane 0")
            start, leading, stride, span = decode_descriptor(bits)
            index = operand_index((start,), leading, stride, span, rows, size, 1, False)
            stamp = self.races.mma_issued(int(f.warps[row])) if self.races else None
            for slot in self._group_slots(f, row, group):
                run = partial(self._copy_tensor, slot, index, multicast, target, stamp)
                self.submit(AsyncOp("tcgen05.cp", slot, run, pipe=int(f.slots[row])))

    def _copy_tensor(self, slot: int, index: np.ndarray, multicast: str, first: int, stamp: Any) -> None:
        if int(index.max()) >= self.shared_end:
            raise KernelFault(f"a tcgen05 descriptor reaches {int(index.max()):#x}, beyond {self.shared_end:#x}")
        granules = (index[:, ::4] >> 2) + (slot << SLOT_BITS >> 2)
        self.require_shared(granules)
        data = _multicast(self.shared_typed(np.uint32)[granules], multicast)
        columns = data.shape[1]
        self.check_columns(np.array([slot]), np.array([first]), columns)
        self.tmem[slot, :, first : first + columns] = data
        self.tmem_written[slot, :, first : first + columns] = True
        self.shared_bytes_read += index.size
        self.tmem_bytes_written += data.nbytes
        if self.races:
            self.races.mma_reads_shared(stamp, granules)
            self.races.mma_tmem(stamp, slot, first, columns, True)

    def tensor_shift(self, f: Fiber, group: int, address: Any, mask: Any) -> None:
        """tcgen05.shift.down: of 32 lanes all but the last move one lane down, 32 bytes of each."""
        for row, lane in self.lanes(f, mask).tolist():
            target = int(at(address, row, lane))
            if target >> 16 & 31:
                raise KernelFault(f"tcgen05.shift from TMEM lane {target >> 16}, not a multiple of 32")
            stamp = self.races.mma_issued(int(f.warps[row])) if self.races else None
            for slot in self._group_slots(f, row, group):
                run = partial(self._shift_lanes, slot, target >> 16, target & 0xFFFF, stamp)
                self.submit(AsyncOp("tcgen05.shift", slot, run, pipe=int(f.slots[row])))

    def _shift_lanes(self, slot: int, lane: int, first: int, stamp: Any) -> None:
        self.check_columns(np.array([slot]), np.array([first]), 8)
        rows = self.tmem[slot, lane : lane + 32, first : first + 8]
        if not self.tmem_written[slot, lane : lane + 32, first : first + 8].all():
            raise KernelFault(f"tcgen05.shift of TMEM columns {first} to {first + 7}, not all written")
        rows[1:] = rows[:-1].copy()
        if self.races:
            self.races.mma_tmem(stamp, slot, first, 8, True)

    def _group_slots(self, f: Fiber, row: int, group: int) -> tuple[int, ...]:
        """CTAs that an instruction of a cta_group works in; a pair's even CTA issues it."""
        slot = int(f.slots[row])
        rank = slot % self.cluster_size
        if group == 2 and (rank % 2 or rank + 1 >= self.cluster_size):
            raise KernelFault("a cta_group::2 instruction is issued by the even CTA of a pair")
        return (slot,) if group == 1 else (slot, slot + 1)

    def _tensor_operand(
        self, mma: Mma, slot: int, descriptor: int, rows: int, depth: int, name: str, mn_major: bool
    ) -> np.ndarray:
        start, leading, stride, span = decode_descriptor(descriptor)
        item = element_size(name)
        index = operand_index((start,), leading, stride, span, rows, depth, item, mn_major)
        if int(index.max()) * item >= self.shared_end:
            raise KernelFault(f"a tcgen05 descriptor reaches {int(index.max()) * item:#x}, beyond {self.shared_end:#x}")
        granules = (index[:, :: 4 // item] * item >> 2) + (slot << SLOT_BITS >> 2)
        self.require_shared(granules)
        if self.races:
            self.races.mma_reads_shared(mma.stamp, granules)
        self.shared_bytes_read += index.size * item
        size = 1 << SLOT_BITS
        return to_float(self.shared[slot * size : (slot + 1) * size].view(f"u{item}")[index], name)

    def _tmem_operand(self, mma: Mma, slot: int, rows: int, depth: int) -> np.ndarray:
        """A from TMEM: 32 bits of a row's elements a column."""
        item = element_size(mma.form.a)
        first, count = mma.a & 0xFFFF, depth * item // 4
        if mma.a >> 16 or rows != LANES:
            raise UnsupportedInstruction("tcgen05.mma with A in other lanes than 0 to 127")
        self.check_columns(np.array([slot]), np.array([first]), count)
        if not self.tmem_written[slot, :, first : first + count].all():
            raise KernelFault(f"tcgen05.mma reads A in TMEM columns {first} to {first + count - 1}, not all written")
        if self.races:
            self.races.mma_tmem(mma.stamp, slot, first, count, False)
        words = np.ascontiguousarray(self.tmem[slot, :rows, first : first + count])
        return to_float(words.view(f"u{item}"), mma.form.a)

    def _accumulate_tmem(self, mma: Mma, slot: int, product: np.ndarray) -> None:
        """Adds to 128 lanes. 64 rows go 16 to each quadrant, to its first lanes or, with lane 16, to the others."""
        lane, first, count = mma.target >> 16, mma.target & 0xFFFF, product.shape[1]
        if lane not in ((0, 16) if len(product) == 64 else (0,)):
            raise KernelFault(f"tcgen05.mma with M = {mma.form.rows} writes from TMEM lane {lane}")
        self.check_columns(np.array([slot]), np.array([first]), count)
        rows = np.arange(len(product))
        lanes = rows // 16 * 32 + rows % 16 + lane if len(product) == 64 else rows
        place = slot, lanes[:, None], np.arange(first, first + count)
        if mma.accumulate:
            if not self.tmem_written[place].all():
                raise KernelFault(f"tcgen05.mma adds to TMEM columns {first} to {first + count - 1}, not all written")
            product = self.tmem[place].view(np.float32) + product
        self.tmem[place] = product.view(np.uint32)
        self.tmem_written[place] = True
        self.tmem_bytes_written += product.nbytes
        if self.races:
            self.races.mma_tmem(mma.stamp, slot, first, count, True)

    def tensor_commit(self, f: Fiber, address: Any, ctas: Any, mask: Any) -> None:
        """The mbarrier, or the one at that offset in every CTA of the mask, gets one arrival behind the MMAs so far."""
        for row, lane in self.lanes(f, mask).tolist():
            slot, warp = int(f.slots[row]), int(f.warps[row])
            flat = self.one_flat(slot, int(at(address, row, lane)), 8, 8)
            targets = self.targets(slot, flat, None if ctas is None else int(at(ctas, row, lane)))
            stamp = self.races.commit_issued(warp, [self.mbarrier_at(t) for t in targets]) if self.races else None

            def run(targets: list[int] = targets, stamp: Any = stamp) -> None:
                for target in targets:
                    barrier = self.mbarrier_at(target)
                    if self.races:
                        self.races.commit_finished(stamp, barrier)
                    barrier.pending -= 1
                    barrier.settle()
                self.version += 1

            self.submit(AsyncOp("tcgen05.commit", slot, run, pipe=slot))
