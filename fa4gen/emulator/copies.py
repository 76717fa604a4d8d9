"""Asynchronous copies: tensor and bulk, either way, with reduction, multicast and bulk groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fa4gen.emulator.barriers import BarrierOps
from fa4gen.emulator.errors import KernelFault
from fa4gen.emulator.fiber import Fiber, at, full
from fa4gen.emulator.isa.values import PARAM_WINDOW
from fa4gen.emulator.memory import combine
from fa4gen.emulator.state import SLOT_BITS
from fa4gen.emulator.tma import BF16, TensorMap, box_chunks, decode

__all__ = ["AsyncOp", "CopyOps"]


@dataclass
class AsyncOp:
    """An operation in flight. ``run`` does all of it at once.

    ``read``: its sources may be overwritten; ``done``: its results are visible; ``owed``: it still needs the shared
    memory of CTA ``slot``, as far as the issuing thread has waited for. ``pipe``: operations that name the same one
    run in the order they were issued. ``clock`` is the race detector's.
    """

    what: str
    slot: int
    run: Callable[[], None]
    read: bool = False
    done: bool = False
    owed: bool = True
    pipe: Any = None
    clock: Any = None


class CopyOps(BarrierOps):
    """Copy instructions: a part of the machine."""

    def submit(self, op: AsyncOp) -> None:
        """Starts an asynchronous operation: at once, or when the schedule says."""
        waits = op.pipe is not None and any(other.pipe == op.pipe for other in self.in_flight)
        if not waits and self.schedule.run_now():
            self.finish(op)
        else:
            self.in_flight.append(op)

    def finish(self, op: AsyncOp) -> None:
        op.run()
        op.read = op.done = True
        self.version += 1

    def issuers(self, f: Fiber, mask: Any, *operands: Any) -> list[list[int]]:
        """(row, lane) of the lanes that start a copy.

        Copies leave through the warp's uniform datapath: where all active lanes of a warp name the same operands,
        the hardware starts one (ptxas emits one UTMALDG or UTMASTG), for the lowest lane.
        """
        lanes = self.lanes(f, mask).tolist()
        chosen: dict[tuple, list[int]] = {}
        for row, lane in lanes:
            chosen.setdefault((row, *(int(at(o, row, lane)) for o in operands if o is not None)), [row, lane])
        return list(chosen.values())

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map at a generic address: kernel parameters or global memory."""
        if address >= int(PARAM_WINDOW):
            offset = address - int(PARAM_WINDOW)
            raw = self.launch.params[offset : offset + 128].tobytes()
        else:
            region = self.memory.find(address, 128)
            raw = region.data[address - region.base : address - region.base + 128].tobytes()
        return decode(raw)

    def targets(self, slot: int, flat: int, ctas: int | None) -> list[int]:
        """Shared positions that a load writes: one, or the same offset in every CTA of a multicast mask."""
        if ctas is None:
            return [flat]
        first = slot // self.cluster_size * self.cluster_size
        if ctas >> self.cluster_size or not ctas:
            raise KernelFault(f"multicast mask {ctas:#x} in a cluster of {self.cluster_size}")
        offset = flat & ((1 << SLOT_BITS) - 1)
        slots = [first + rank for rank in range(self.cluster_size) if ctas >> rank & 1]
        if any(self.exited[s] == self.warps_per_cta for s in slots):
            raise KernelFault("a multicast copy goes to a CTA that has exited")
        return [s << SLOT_BITS | offset for s in slots]

    def one_flat(self, slot: int, address: int, size: int, align: int) -> int:
        """Checked shared position of one address."""
        rank, offset = address >> 24, address & 0xFFFFFF
        self.check_shared(np.array([rank]), np.array([offset]), size, align)
        return (slot // self.cluster_size * self.cluster_size + rank) << SLOT_BITS | offset

    def put_shared(self, flat: int, chunks: np.ndarray, positions: np.ndarray | slice) -> None:
        """Writes 16-byte chunks at positions counted in chunks."""
        self.shared.view(np.uint64).reshape(-1, 2)[positions] = chunks.view(np.uint64).reshape(-1, 2)
        size = chunks.nbytes
        self.shared_written[flat >> 2 : (flat + size) >> 2] = True
        self.shared_bytes_written += size

    def tensor_load(
        self, f: Fiber, target: Any, descriptor: Any, coords: tuple, barrier: Any, ctas: Any, pair: bool, mask: Any
    ) -> None:  # fmt: skip
        """cp.async.bulk.tensor to shared memory: one box for every active lane."""
        for row, lane in self.issuers(f, mask, target, descriptor, *coords, barrier, ctas):
            slot, warp = int(f.slots[row]), int(f.warps[row])
            tensor = self.tensor_map(int(at(descriptor, row, lane)))
            place = tuple(int(at(c, row, lane)) for c in coords)
            align = (128, 256, 512, 1024)[tensor.swizzle] if tensor.swizzle else 128
            flat = self.one_flat(slot, int(at(target, row, lane)), tensor.box_bytes, min(align, 128))
            signal = self.one_flat(slot, int(at(barrier, row, lane)), 8, 8)
            mask_bits = None if ctas is None else int(at(ctas, row, lane))
            targets = self.targets(slot, flat, mask_bits)
            signals = self.targets(slot, signal, mask_bits)
            if pair:
                # cta_group::2: a barrier address may name the peer's; every target signals the pair's leader.
                signals = [signal] * len(targets)
            self._load_box(warp, slot, tensor, place, targets, signals)

    def _load_box(
        self, warp: int, slot: int, tensor: TensorMap, coords: tuple, targets: list[int], signals: list[int]
    ) -> None:
        clocks: list[Any] = [self.races and self.races.load_issued(warp, self.mbarrier_at(s)) for s in signals]

        def run() -> None:
            box = np.zeros(tensor.box[::-1], tensor.dtype)
            region = self.memory.find(tensor.address, tensor.span)
            inside, part = tensor.inside(coords)
            box[part] = tensor.view(region.data, tensor.address - region.base)[inside]
            start = tensor.address - region.base
            if region.written is not None and not tensor.view(region.written, start, "?")[inside].all():
                raise KernelFault(f"a tensor load reads {region.name} where nothing wrote")
            self.memory.bytes_read += box[part].nbytes
            if self.races:
                self.races.tensor_access(clocks[0], region, tensor, inside, False)
            for flat, signal, clock in zip(targets, signals, clocks, strict=True):
                base = flat & 1023
                positions = box_chunks(base, tensor.box_bytes, tensor.swizzle) + ((flat - base) >> 4)
                self.put_shared(flat, box.reshape(-1), positions)
                if self.races:
                    self.races.shared_async(clock, flat, tensor.box_bytes, True)
                    self.races.load_finished(clock, self.mbarrier_at(signal))
                self.complete_tx(signal, tensor.box_bytes)

        self.submit(AsyncOp(f"tensor load to {targets[0] & ((1 << SLOT_BITS) - 1):#x}", slot, run))

    def tensor_store(
        self, f: Fiber, descriptor: Any, coords: tuple, source: Any, reduce: str | None, mask: Any
    ) -> None:
        """cp.async.bulk.tensor or its reduction from shared memory: one box for every active lane."""
        for row, lane in self.issuers(f, mask, descriptor, *coords, source):
            slot = int(f.slots[row])
            tensor = self.tensor_map(int(at(descriptor, row, lane)))
            place = tuple(int(at(c, row, lane)) for c in coords)
            flat = self.one_flat(slot, int(at(source, row, lane)), tensor.box_bytes, 128)
            run = partial(self._store_box, tensor, place, flat, reduce)
            self._start_bulk(f, row, lane, "tensor store", run)

    def _store_box(self, tensor: TensorMap, coords: tuple, flat: int, reduce: str | None, clock: Any) -> None:
        base = flat & 1023
        positions = box_chunks(base, tensor.box_bytes, tensor.swizzle) + ((flat - base) >> 4)
        self.require_shared(np.arange(flat >> 2, (flat + tensor.box_bytes) >> 2))
        chunks = self.shared.view(np.uint64).reshape(-1, 2)[positions]
        box = chunks.reshape(-1).view(tensor.dtype).reshape(tensor.box[::-1])
        self.shared_bytes_read += tensor.box_bytes
        region = self.memory.find(tensor.address, tensor.span)
        inside, part = tensor.inside(coords)
        view = tensor.view(region.data, tensor.address - region.base)
        value = box[part]
        if self.races:
            self.races.shared_async(clock, flat, tensor.box_bytes, False)
            self.races.tensor_access(clock, region, tensor, inside, reduce or True)
        number = "bf16" if tensor.element == BF16 else tensor.dtype
        view[inside] = value if reduce is None else combine(reduce, view[inside], value, number)
        if region.written is not None:
            tensor.mark(region.written, tensor.address - region.base, inside)
        self.memory.bytes_written += value.nbytes

    def _start_bulk(self, f: Fiber, row: int, lane: int, what: str, run: Callable[[Any], None]) -> None:
        """Starts a copy out of shared memory in the thread's open bulk group."""
        warp, slot = int(f.warps[row]), int(f.slots[row])
        clock = self.races.bulk_issued(warp) if self.races else None
        op = AsyncOp(what, slot, lambda: run(clock), clock=clock)
        self.bulk_open.setdefault((warp, int(lane)), []).append(op)
        self.submit(op)

    def bulk_commit(self, f: Fiber, mask: Any) -> None:
        for row, lane in self.lanes(f, mask):
            key = (int(f.warps[row]), int(lane))
            self.bulk_groups.setdefault(key, []).append(self.bulk_open.pop(key, []))

    def bulk_load(
        self, f: Fiber, target: Any, space: str, source: Any, size: Any, barrier: Any, ctas: Any, mask: Any,
        reduce: tuple[str, str, Any] | None = None,
    ) -> None:  # fmt: skip
        """cp.async.bulk or cp.reduce.async.bulk to shared memory, from global memory or from this CTA's.

        ``reduce``: function, PTX type and numpy type.
        """
        for row, lane in self.issuers(f, mask, target, source, size, barrier, ctas):
            slot, warp, count = int(f.slots[row]), int(f.warps[row]), int(at(size, row, lane))
            if count % 16 or int(at(source, row, lane)) % 16:
                raise KernelFault(
                    f"bulk copy of {count} bytes from {int(at(source, row, lane)):#x}: not multiples of 16"
                )
            flat = self.one_flat(slot, int(at(target, row, lane)), count, 16)
            signal = self.one_flat(slot, int(at(barrier, row, lane)), 8, 8)
            mask_bits = None if ctas is None else int(at(ctas, row, lane))
            self._load_bulk(
                warp, slot, space, int(at(source, row, lane)), count, self.targets(slot, flat, mask_bits),
                self.targets(slot, signal, mask_bits), reduce,
            )  # fmt: skip

    def _load_bulk(
        self, warp: int, slot: int, space: str, source: int, count: int, targets: list[int], signals: list[int],
        reduce: tuple[str, str, Any] | None,
    ) -> None:  # fmt: skip
        clocks: list[Any] = [self.races and self.races.load_issued(warp, self.mbarrier_at(s)) for s in signals]

        def run() -> None:
            if space == "global":
                region = self.memory.find(source, count)
                offset = source - region.base
                region.require_written(np.arange(offset, offset + count), 1)
                data = region.data[offset : offset + count].copy()
                self.memory.bytes_read += count
                if self.races:
                    self.races.global_range(clocks[0], region, offset, count, False)
            else:
                start = self.one_flat(slot, source, count, 16)
                self.require_shared(np.arange(start >> 2, (start + count) >> 2))
                data = self.shared[start : start + count].copy()
                self.shared_bytes_read += count
                if self.races:
                    self.races.shared_async(clocks[0], start, count, False)
            for flat, signal, clock in zip(targets, signals, clocks, strict=True):
                value = data
                if reduce:
                    function, number, dtype = reduce
                    self.require_shared(np.arange(flat >> 2, (flat + count) >> 2))
                    value = combine(function, self.shared[flat : flat + count].view(dtype), data.view(dtype), number)
                self.put_shared(flat, value, slice(flat >> 4, (flat + count) >> 4))
                if self.races:
                    self.races.shared_async(clock, flat, count, reduce[0] if reduce else True)
                    self.races.load_finished(clock, self.mbarrier_at(signal))
                self.complete_tx(signal, count)

        self.submit(AsyncOp(f"bulk copy to {targets[0] & ((1 << SLOT_BITS) - 1):#x}", slot, run))

    def bulk_store(self, f: Fiber, target: Any, source: Any, size: Any, reduce: Any, mask: Any) -> None:
        """cp.async.bulk or cp.reduce.async.bulk from shared to global memory."""
        for row, lane in self.issuers(f, mask, target, source, size):
            count, place = int(at(size, row, lane)), int(at(target, row, lane))
            if count % 16 or place % 16:
                raise KernelFault(f"bulk copy of {count} bytes to {place:#x}: not multiples of 16")
            flat = self.one_flat(int(f.slots[row]), int(at(source, row, lane)), count, 16)
            self._start_bulk(f, row, lane, "bulk store", partial(self._store_bulk, place, flat, count, reduce))

    def _store_bulk(self, target: int, flat: int, count: int, reduce: Any, clock: Any) -> None:
        self.require_shared(np.arange(flat >> 2, (flat + count) >> 2))
        data = self.shared[flat : flat + count]
        region = self.memory.find(target, count)
        offset = target - region.base
        if self.races:
            self.races.shared_async(clock, flat, count, False)
            self.races.global_range(clock, region, offset, count, reduce[0] if reduce else True)
        if reduce is None:
            region.data[offset : offset + count] = data
        else:
            region.require_written(np.arange(offset, offset + count), 1)
            function, number, dtype = reduce
            old = region.data[offset : offset + count].view(dtype)
            old[:] = combine(function, old, data.view(dtype), number)
        region.mark(offset, offset + count)
        self.shared_bytes_read += count
        self.memory.bytes_written += count

    def thread_copy(self, f: Fiber, target: Any, source: Any, size: int, read: Any, mask: Any) -> None:
        """cp.async: ``read`` bytes a lane, the rest of ``size`` zeros; None reads all."""
        active = f.active if mask is None else mask
        count = full(np.uint32(size) if read is None else read, f.shape)
        words = [np.zeros(f.shape, np.uint32) for _ in range(size // 4)]
        for index, word in enumerate(words):
            part = active & (count > 4 * index)
            if part.any():
                address = source + np.uint64(4 * index)
                word[part] = self.load(f, "global", address, np.uint32, 1, part, "weak")[0][part]
        self.store(f, "shared", target, np.uint32, tuple(words), active, "weak")

    def store_async(
        self, f: Fiber, target: Any, dtype: Any, values: tuple, barrier: Any, mask: Any,
        reduce: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        """st.async and red.async: elements into shared memory of the cluster, signalled by complete_tx there.

        ``reduce``: function and PTX type.
        """
        size = np.dtype(dtype).itemsize * len(values)
        for row, lane in self.lanes(f, mask):
            slot, warp = int(f.slots[row]), int(f.warps[row])
            flat = self.one_flat(slot, int(at(target, row, lane)), size, size)
            signal = self.one_flat(slot, int(at(barrier, row, lane)), 8, 8)
            data = np.array([at(v, row, lane) for v in values], dtype)
            clock: Any = self.races and self.races.load_issued(warp, self.mbarrier_at(signal))

            def run(flat: int = flat, signal: int = signal, data: np.ndarray = data, clock: Any = clock) -> None:
                place = self.shared[flat : flat + size].view(dtype)
                if reduce:
                    self.require_shared(np.arange(flat >> 2, (flat + size) >> 2))
                place[:] = combine(reduce[0], place, data, reduce[1]) if reduce else data
                self.shared_written[flat >> 2 : (flat + size + 3) >> 2] = True
                self.shared_bytes_written += size
                if self.races:
                    self.races.shared_async(clock, flat, size, reduce[0] if reduce else True)
                    self.races.load_finished(clock, self.mbarrier_at(signal))
                self.complete_tx(signal, size)

            self.submit(AsyncOp(f"{'red' if reduce else 'st'}.async to {flat & ((1 << SLOT_BITS) - 1):#x}", slot, run))
