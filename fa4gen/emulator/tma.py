"""TMA: tensor maps, and moving their boxes between global and shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fa4gen.emulator.errors import KernelFault, UnsupportedInstruction

__all__ = ["TensorMap", "box_chunks", "decode"]

ELEMENT_TYPES = {0: "u1", 1: "u2", 2: "u4", 3: "i4", 4: "u8", 6: "f2", 7: "f4", 10: "u2"}
BF16 = 10


@dataclass(frozen=True)
class TensorMap:
    """A tensor map. Extents are in elements, innermost first; ``strides`` in bytes, of dimensions 1 and up."""

    address: int
    rank: int
    element: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def dtype(self) -> str:
        return ELEMENT_TYPES[self.element]

    @cached_property
    def item(self) -> int:
        """Bytes of an element."""
        return int(self.dtype[1])

    @cached_property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.item

    @cached_property
    def span(self) -> int:
        """Bytes from the first to behind the last element of the tensor."""
        return sum((d - 1) * s for d, s in zip(self.dims, (self.item, *self.strides), strict=True)) + self.item

    def view(self, data: np.ndarray, offset: int, dtype: str = "") -> np.ndarray:
        """The tensor over a buffer of bytes in which it starts at ``offset``; outermost dimension first."""
        strides = (self.item, *self.strides)
        return np.ndarray(self.dims[::-1], dtype or self.dtype, data.data, offset, strides[::-1])

    def mark(self, written: np.ndarray, offset: int, inside: tuple[slice, ...]) -> None:
        """Sets the byte map of a part of the tensor."""
        for byte in range(self.item):
            self.view(written, offset + byte, "?")[inside] = True

    def inside(self, coords: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Slices of the tensor and of the box, outermost first, that a box at ``coords`` shares with it."""
        tensor, box = [], []
        for start, extent, dim in zip(coords[::-1], self.box[::-1], self.dims[::-1], strict=True):
            low, high = max(start, 0), min(start + extent, dim)
            high = max(high, low)
            tensor.append(slice(low, high))
            box.append(slice(low - start, high - start))
        return tuple(tensor), tuple(box)


@lru_cache(maxsize=256)
def decode(raw: bytes) -> TensorMap:
    """The tensor map in 128 bytes of descriptor.

    Raises:
        UnsupportedInstruction: a field has a value that is not implemented.
        KernelFault: it breaks a rule of the hardware.
    """
    q = np.frombuffer(raw[:64], np.uint64).tolist()
    address, control = q[0], q[1]
    rank = (control >> 4 & 7) + 1
    element = control >> 7 & 15
    interleave, swizzle = control >> 11 & 3, control >> 13 & 3
    if control & 15 != 2 or element not in ELEMENT_TYPES or interleave:
        raise UnsupportedInstruction(f"tensor map with control word {control & 0xFFFFFFFF:#x}")
    low = [q[1] >> 32, q[2] & 0xFFFFFFFF, q[2] >> 32, q[3] & 0xFFFFFFFF]
    strides = [((q[3] >> (32 + 4 * k) & 15) << 32 | low[k]) << 4 for k in range(4)]
    dims = [q[4] & 0xFFFFFFFF, q[4] >> 32, q[5] & 0xFFFFFFFF, q[5] >> 32, q[6] & 0xFFFFFFFF]
    box = [q[6] >> 56, *(q[7] >> 8 * k & 255 for k in range(4))]
    result = TensorMap(
        address,
        rank,
        element,
        tuple(d + 1 for d in dims[:rank]),
        tuple(strides[: rank - 1]),
        tuple(b + 1 for b in box[:rank]),
        swizzle,
    )
    if address % 16 or result.box[0] * result.item % 16:
        raise KernelFault(f"tensor map with address {address:#x} and a box row of {result.box[0] * result.item} bytes")
    return result


@lru_cache(maxsize=256)
def box_chunks(base: int, size: int, swizzle: int) -> np.ndarray:
    """16-byte positions of a box's chunks, in box order, for a box of ``size`` bytes at shared address ``base``.

    ``base`` matters modulo 1024 only: callers pass that and add the rest.
    """
    address = base + 16 * np.arange(size // 16, dtype=np.int64)
    mask = (0, 1, 3, 7)[swizzle]
    return (address ^ (((address >> 7) & mask) << 4)) >> 4
