"""Memory spaces: parameters, shared memory of the resident CTAs, and global memory made of the host's buffers.

Every access is checked for bounds, alignment and data that nothing wrote. Shared memory is tracked in granules of
4 bytes, global memory by byte.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from fa4gen.emulator.errors import KernelFault, UnsupportedInstruction
from fa4gen.emulator.fiber import Fiber, at, full
from fa4gen.emulator.isa.values import PARAM_WINDOW, SHARED_WINDOW, bf16, bf16x2, f4_of_bf16, f16x2, halves
from fa4gen.emulator.state import RESERVED_SHARED, SLOT_BITS, State

__all__ = ["GlobalMemory", "MemoryOps", "Region", "combine"]

_LANE = np.arange(32)


class Region:
    """One host buffer as global memory. ``written`` is a byte map, or None for an input: all of it is data."""

    def __init__(self, name: str, data: np.ndarray, base: int, output: bool) -> None:
        self.name = name
        self.data = data
        self.base = base
        self.written = np.zeros(data.size, bool) if output else None

    @property
    def end(self) -> int:
        return self.base + self.data.size

    def typed(self, dtype: Any) -> np.ndarray:
        """The whole buffer as ``dtype``, a remainder cut off."""
        size = np.dtype(dtype).itemsize
        return self.data[: self.data.size // size * size].view(dtype)

    def mark(self, start: int, stop: int) -> None:
        if self.written is not None:
            self.written[start:stop] = True

    def require_written(self, offsets: np.ndarray, size: int) -> None:
        """Faults if bytes that are about to be read were never written."""
        if self.written is not None:
            for byte in range(size):
                if not self.written[offsets + byte].all():
                    bad = int(offsets[np.argmin(self.written[offsets + byte])])
                    raise KernelFault(f"reads {self.name} at byte {bad}, which nothing wrote")


class GlobalMemory:
    """Regions by address. ``bytes_read`` and ``bytes_written`` count traffic of the kernel."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.bases: list[int] = []
        self.bytes_read = 0
        self.bytes_written = 0

    def add(self, region: Region) -> None:
        position = bisect.bisect(self.bases, region.base)
        self.bases.insert(position, region.base)
        self.regions.insert(position, region)

    def find(self, address: int, size: int) -> Region:
        """The region that holds ``size`` bytes at ``address``.

        Raises:
            KernelFault: none does.
        """
        position = bisect.bisect(self.bases, address) - 1
        region = self.regions[position] if position >= 0 else None
        if region is not None and address + size <= region.end:
            return region
        near = f"; {region.name} ends {address - region.end} bytes before" if region is not None else ""
        raise KernelFault(f"global access of {size} bytes at {address:#x} is outside every tensor{near}")

    def split(self, addresses: np.ndarray, size: int) -> list[tuple[Region, np.ndarray, np.ndarray]]:
        """(region, positions in ``addresses``, byte offsets) for every region touched; checks bounds and alignment."""
        if (addresses % np.uint64(size)).any():
            bad = int(addresses[np.argmax(addresses % np.uint64(size) != 0)])
            raise KernelFault(f"global access of {size} bytes at {bad:#x} is misaligned")
        parts = []
        left = np.arange(len(addresses))
        while len(left):
            region = self.find(int(addresses[left[0]]), size)
            offsets = addresses[left].astype(np.int64) - region.base
            inside = (offsets >= 0) & (offsets + size <= region.data.size)
            parts.append((region, left[inside], offsets[inside]))
            left = left[~inside]
        return parts


class MemoryOps(State):
    """Loads and stores of generated code: a part of the machine."""

    def shared_symbol(self, f: Fiber, name: str, offset: int) -> Any:
        """Cluster address of a shared variable in each warp's own CTA."""
        address = self.shared_offsets[name] + offset
        if self.cluster_size == 1:
            return np.uint32(address)
        rank = (f.slots % self.cluster_size).astype(np.uint32)
        return np.repeat((rank << np.uint32(24) | np.uint32(address))[:, None], 32, axis=1)

    def shared_of_generic(self, address: Any) -> Any:
        return (address - SHARED_WINDOW).astype(np.uint32)

    def param(self, offset: int, dtype: Any) -> Any:
        """A scalar of the parameter space."""
        return self.launch.params[offset : offset + np.dtype(dtype).itemsize].view(dtype)[0]

    def shared_flat(self, f: Fiber, address: Any, size: int, mask: Any) -> np.ndarray:
        """Positions in the resident shared memory of the active lanes' addresses, checked; (n,) in lane order."""
        address = full(address, f.shape)
        first = np.repeat((f.slots // self.cluster_size * self.cluster_size)[:, None], 32, axis=1)
        if mask is not None:
            address, first = address[mask], first[mask]
        else:
            address, first = address.ravel(), first.ravel()
        rank = (address >> np.uint32(24)).astype(np.int64)
        offset = (address & np.uint32(0x00FFFFFF)).astype(np.int64)
        self.check_shared(rank, offset, size)
        if rank.size and (self.exited[first + rank] == self.warps_per_cta).any():
            raise KernelFault("uses the shared memory of a CTA that has exited")
        return ((first + rank) << SLOT_BITS) + offset

    def check_shared(self, rank: np.ndarray, offset: np.ndarray, size: int, align: int = 0) -> None:
        """Faults on a rank outside the cluster, an offset outside the CTA's allocation, or a misaligned one."""
        if rank.size == 0:
            return
        if rank.max() >= self.cluster_size:
            raise KernelFault(f"shared address names CTA {int(rank.max())} of a cluster of {self.cluster_size}")
        if offset.min() < RESERVED_SHARED or offset.max() + size > self.shared_end:
            bad = int(offset.min() if offset.min() < RESERVED_SHARED else offset.max())
            raise KernelFault(
                f"shared access of {size} bytes at {bad:#x} is outside the CTA's "
                f"{RESERVED_SHARED:#x} … {self.shared_end:#x}"
            )
        if (offset % (align or size)).any():
            bad = int(offset[np.argmax(offset % (align or size) != 0)])
            raise KernelFault(f"shared access at {bad:#x} is not aligned to {align or size} bytes")

    def shared_typed(self, dtype: Any) -> np.ndarray:
        return self.shared.view(dtype)

    def require_shared(self, granules: np.ndarray) -> None:
        """Faults if a 4-byte granule that is about to be read was never written."""
        known = self.shared_written[granules]
        if not known.all():
            bad = int(np.asarray(granules).ravel()[np.argmin(np.ravel(known))]) * 4
            slot, offset = bad >> SLOT_BITS, bad & ((1 << SLOT_BITS) - 1)
            raise KernelFault(f"reads shared memory of CTA {self.cta_name(slot)} at {offset:#x}, which nothing wrote")

    def load(self, f: Fiber, space: str, address: Any, dtype: Any, count: int, mask: Any, order: str) -> list:
        """``count`` consecutive elements a lane, each as a (warps, 32) array."""
        size = np.dtype(dtype).itemsize
        space, address = self._resolve(f, space, address, mask)
        if space == "param":
            offset = int(np.ravel(address)[0])
            return [self.param(offset + size * k, dtype) for k in range(count)]
        results = [np.zeros(f.shape, dtype) for _ in range(count)]
        if space == "shared":
            flat = self.shared_flat(f, address, size * count, mask)
            self.shared_bytes_read += size * count * len(flat)
            for granule in range(-(-size * count // 4)):
                self.require_shared((flat >> 2) + granule)
            if self.races:
                self.races.shared_lanes(f, flat, size * count, mask, False)
            values: Any = [self.shared_typed(dtype)[flat // size + k] for k in range(count)]
        else:
            active = full(address, f.shape)[mask] if mask is not None else full(address, f.shape).ravel()
            values = np.empty((count, len(active)), dtype)
            self.memory.bytes_read += size * count * len(active)
            for region, where, offsets in self.memory.split(active, size * count):
                region.require_written(offsets, size * count)
                if self.races:
                    self.races.global_lanes(f, region, offsets, size * count, mask, where, False, order)
                for k in range(count):
                    values[k, where] = region.typed(dtype)[offsets // size + k]
        for result, value in zip(results, values, strict=True):
            if mask is None:
                result.ravel()[:] = value
            else:
                result[mask] = value
        return results

    def store(self, f: Fiber, space: str, address: Any, dtype: Any, values: tuple, mask: Any, order: str) -> None:
        """Consecutive elements a lane."""
        size, count = np.dtype(dtype).itemsize, len(values)
        space, address = self._resolve(f, space, address, mask)
        lanes = [full(v, f.shape)[mask] if mask is not None else full(v, f.shape).ravel() for v in values]
        if space == "shared":
            flat = self.shared_flat(f, address, size * count, mask)
            self.shared_bytes_written += size * count * len(flat)
            for k, value in enumerate(lanes):
                self.shared_typed(dtype)[flat // size + k] = value
            for granule in range(-(-size * count // 4)):
                self.shared_written[(flat >> 2) + granule] = True
            if self.races:
                self.races.shared_lanes(f, flat, size * count, mask, True)
        elif space == "global":
            active = full(address, f.shape)[mask] if mask is not None else full(address, f.shape).ravel()
            self.memory.bytes_written += size * count * len(active)
            for region, where, offsets in self.memory.split(active, size * count):
                for k, value in enumerate(lanes):
                    region.typed(dtype)[offsets // size + k] = value[where]
                if region.written is not None:
                    for byte in range(size * count):
                        region.written[offsets + byte] = True
                if self.races:
                    self.races.global_lanes(f, region, offsets, size * count, mask, where, True, order)
        else:
            raise KernelFault("stores to the parameter space")
        self.version += 1

    def _resolve(self, f: Fiber, space: str, address: Any, mask: Any) -> tuple[str, Any]:
        """Space and address in it of a generic address; all active lanes must agree on the space."""
        if space != "generic":
            return space, address
        active = np.ravel(address) if mask is None or np.ndim(address) == 0 else address[mask]
        low, high = (int(x) for x in (active.min(), active.max())) if active.size else (0, 0)
        if low >= int(PARAM_WINDOW):
            return "param", address - PARAM_WINDOW
        if low >= int(SHARED_WINDOW):
            return "shared", (address - SHARED_WINDOW).astype(np.uint32)
        if high >= int(SHARED_WINDOW):
            raise UnsupportedInstruction("generic addresses of several spaces in one instruction")
        return "global", address

    def store_matrix(self, f: Fiber, address: Any, values: tuple, form: str, mask: Any) -> None:
        """stmatrix. ``form``: "", "trans" or "b8", which is transposed too."""
        flat = self._matrix_rows(f, address, 8 * len(values), mask)
        for index, value in enumerate(values):
            places = _stored_elements(flat, index, form)
            size = 4 // len(places)
            parts = np.ascontiguousarray(full(value, f.shape)).view(f"u{size}").reshape(*f.shape, len(places))
            for part, place in enumerate(places):
                self.shared_typed(f"u{size}")[place // size] = parts[..., part]
                self.shared_written[place >> 2] = True
                if self.races:
                    self.races.shared_lanes(f, place.ravel(), size, None, True)
        self.shared_bytes_written += 128 * len(values) * len(f.warps)
        self.version += 1

    def load_matrix(self, f: Fiber, address: Any, count: int, form: str, mask: Any) -> list:
        """ldmatrix into ``count`` registers. ``form``: "", "trans" or "b8", which is 16 x 16 and transposed."""
        flat = self._matrix_rows(f, address, 8 * count, mask)
        results = []
        for index in range(count):
            places = _loaded_elements(flat, index, form)
            size = 4 // len(places)
            parts = np.empty((*f.shape, len(places)), f"u{size}")
            for part, place in enumerate(places):
                self.require_shared(place >> 2)
                if self.races:
                    self.races.shared_lanes(f, place.ravel(), size, None, False)
                parts[..., part] = self.shared_typed(f"u{size}")[place // size]
            results.append(parts.view(np.uint32)[..., 0])
        self.shared_bytes_read += 128 * count * len(f.warps)
        return results

    def _matrix_rows(self, f: Fiber, address: Any, rows: int, mask: Any) -> np.ndarray:
        """Shared positions of rows of 16 bytes, whose addresses the first lanes hold: (warps, 32)."""
        if mask is not None and not mask.all():
            raise KernelFault("matrix load or store by part of a warp")
        address = full(address, f.shape)
        used = np.where(rows > _LANE, address, address[:, :1])
        return self.shared_flat(f, used, 16, None).reshape(f.shape)

    def atomic(
        self, f: Fiber, space: str, address: Any, function: str, number: str, dtype: Any, values: tuple, compare: Any,
        mask: Any, order: str,
    ) -> list:  # fmt: skip
        """atom and red: lanes one after another. ``number``: the PTX type. Returns the old values, one array each."""
        size = np.dtype(dtype).itemsize
        space, address = self._resolve(f, space, address, mask)
        results = [np.zeros(f.shape, dtype) for _ in values]
        for row, lane in np.argwhere(f.active if mask is None else mask):
            place = at(address, row, lane)
            for k, value in enumerate(values):
                data, index = self._atomic_place(f, space, int(place) + size * k, row, dtype, order)
                old = data[index]
                new = at(value, row, lane)
                if function == "cas":
                    data[index] = new if old == at(compare, row, lane) else old
                else:
                    data[index] = combine(function, old, new, number)
                results[k][row, lane] = old
        self.version += 1
        return results

    def _atomic_place(self, f: Fiber, space: str, address: int, row: int, dtype: Any, order: str) -> tuple:
        size = np.dtype(dtype).itemsize
        if space == "shared":
            one = f.take(np.array([row]))
            mask = np.zeros((1, 32), bool)
            mask[0, 0] = True
            flat = self.shared_flat(one, np.uint32(address), size, mask)
            self.require_shared(flat >> 2)
            if self.races:
                self.races.shared_atomic(int(f.warps[row]), int(flat[0]))
            return self.shared_typed(dtype), int(flat[0]) // size
        region = self.memory.find(address, size)
        offset = address - region.base
        region.require_written(np.array([offset]), size)
        if self.races:
            self.races.global_atomic(int(f.warps[row]), region, offset, order)
        return region.typed(dtype), offset // size


def _stored_elements(flat: np.ndarray, index: int, form: str) -> list[np.ndarray]:
    """Shared positions of the parts of stmatrix's register ``index``, lowest first, each (warps, 32).

    Matrix ``index`` has its rows at lanes 8 * index and up. Lane 4 * r + q holds of row r the 32 bits q; transposed, of
    column r the elements 2 * q and 2 * q + 1; of 8-bit elements also those of column r + 8.
    """
    row, quad = _LANE // 4, _LANE % 4
    if form == "b8":
        return [flat[:, 8 * index + 2 * quad + part % 2] + row + 8 * (part // 2) for part in range(4)]
    return _loaded_elements(flat, index, form)


def _loaded_elements(flat: np.ndarray, index: int, form: str) -> list[np.ndarray]:
    """The same for ldmatrix. A 16 x 16 matrix of 8-bit elements fills two registers: columns r, then r + 8."""
    row, quad = _LANE // 4, _LANE % 4
    if form == "trans":
        return [flat[:, 8 * index + 2 * quad + part] + 2 * row for part in (0, 1)]
    if form == "b8":
        return [flat[:, 16 * (index // 2) + 4 * quad + part] + row + 8 * (index % 2) for part in range(4)]
    return [flat[:, 8 * index + row] + 4 * quad]


def combine(function: str, old: Any, new: Any, number: str) -> Any:
    """One reduction of atom, red or a copy, on arrays or numpy scalars. ``number`` is the PTX type."""
    if number in ("bf16", "f16x2", "bf16x2"):
        return _combine_narrow(function, old, new, number)
    one = old.dtype.type(1)
    if function == "inc":
        return np.where(old >= new, one - one, old + one)
    if function == "dec":
        return np.where((old == 0) | (old > new), new, old - one)
    if function == "exch":
        return new
    # A NaN loses against a number, as in min and max.
    least, most = (np.fmin, np.fmax) if old.dtype.kind == "f" else (np.minimum, np.maximum)
    ufunc = {"add": np.add, "min": least, "max": most, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor}[function]  # fmt: skip
    return ufunc(old, new)


def _combine_narrow(function: str, old: Any, new: Any, number: str) -> Any:
    """The same on bf16, or on both halves of 32 bits: computed in fp32, rounded once."""
    if number == "bf16":
        return bf16(combine(function, f4_of_bf16(old), f4_of_bf16(new), "f32"))
    name = number[:-2]
    parts = [combine(function, a, b, "f32") for a, b in zip(halves(old, name), halves(new, name), strict=True)]
    return (bf16x2 if name == "bf16" else f16x2)(*parts)
