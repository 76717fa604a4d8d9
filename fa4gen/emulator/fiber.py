"""A fiber: warps that stand at the same place in the program, with their registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fa4gen.emulator.state import State

__all__ = ["Fiber", "Frame", "at", "full"]

# What a register holds before anything is written to it, by PTX width: a NaN as any floating-point type.
POISON = {
    1: np.bool_(True),
    8: np.uint8(0xFF),
    16: np.uint16(0x7FFF),
    32: np.uint32(0x7FFFDEAD),
    64: np.uint64(0x7FFFDEAD7FFFDEAD),
    128: np.full(2, 0x7FFFDEAD7FFFDEAD, np.uint64).view(np.complex128)[0],
}


class Registers(dict[int, Any]):
    """A register file by number. What nothing wrote reads as poison.

    It is no error: compilers leave values undefined that only masked lanes or unused bytes come from.
    """

    __slots__ = ("poison",)

    def __init__(self, poison: dict[int, Any]) -> None:
        self.poison = poison

    def __missing__(self, number: int) -> Any:
        return self.poison[number]


def full(value: Any, shape: tuple[int, int]) -> np.ndarray:
    """``value`` with one element a lane."""
    return value if getattr(value, "shape", ()) == shape else np.broadcast_to(value, shape)


def at(value: Any, row: int, lane: int) -> Any:
    """The element of one lane of an array or of a uniform value."""
    return value[row, lane] if np.ndim(value) else value


def _rows(value: Any, rows: np.ndarray) -> Any:
    return value[rows] if isinstance(value, np.ndarray) and value.ndim else value


@dataclass
class Frame:
    """Divergence: lanes ``mask`` meet again at block ``meet``; ``others`` still have to run, each from its block."""

    meet: int
    mask: np.ndarray
    others: list[tuple[int, np.ndarray]] = field(default_factory=list)


class Fiber:
    """Warps at one place. Values in ``regs`` are (warps, 32) arrays or numpy scalars.

    ``warps``: index of each warp among those resident. ``mask``: active lanes, None for all. ``parked``: operands of
    the wait at the end of ``block`` that the fiber stands at, None while it runs. ``pending``: wgmma groups
    that were not computed yet; the last one is open. They are computed before a fiber is split.
    """

    __slots__ = (
        "block",
        "checked",
        "machine",
        "mask",
        "parked",
        "pending",
        "regs",
        "slots",
        "stack",
        "tokens",
        "warps",
    )

    def __init__(self, machine: State, warps: np.ndarray, block: int = 0) -> None:
        self.machine = machine
        self.warps = warps
        self.slots = warps // machine.warps_per_cta
        self.block = block
        self.regs = Registers(machine.program.poison)
        self.mask: np.ndarray | None = None
        self.stack: list[Frame] = []
        self.parked: tuple[Any, ...] | None = None
        self.tokens: list[Any] | None = None
        self.checked = -1
        self.pending: list[Any] = []

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.warps), 32

    @property
    def active(self) -> np.ndarray:
        """Active lanes, (warps, 32)."""
        return np.ones(self.shape, bool) if self.mask is None else self.mask

    @property
    def warp_in_cta(self) -> np.ndarray:
        return self.warps % self.machine.warps_per_cta

    def special(self, name: str) -> np.ndarray:
        """A special register as an int64 array."""
        return self.machine.special(self, name)

    def merge(self, mask: np.ndarray, values: dict[int, Any]) -> None:
        """Writes registers in the lanes of ``mask`` only."""
        for number, new in values.items():
            old = self.regs[number]
            self.regs[number] = np.where(mask, new, old if old.dtype == new.dtype else old.view(new.dtype))

    def take(self, rows: np.ndarray, after: bool = False) -> Fiber:
        """A fiber of some of the warps; ``rows`` are their positions in this one. ``after``: ``block`` has run."""
        part = Fiber(self.machine, self.warps[rows], self.block)
        part.regs.update((n, _rows(v, rows)) for n, v in self._carried(after))
        part.mask = None if self.mask is None else self.mask[rows]
        part.stack = [Frame(f.meet, f.mask[rows], [(b, m[rows]) for b, m in f.others]) for f in self.stack]
        if self.parked is not None:
            part.parked = tuple(_rows(v, rows) for v in self.parked)
        if self.tokens is not None:
            part.tokens = [self.tokens[r] for r in rows]
        return part

    def _carried(self, after: bool = False) -> list[tuple[int, Any]]:
        """Registers that may still be read. All of them while lanes are apart."""
        if self.stack or self.pending:
            return list(self.regs.items())
        block = self.machine.program.blocks[self.block]
        live = block.live_out if after or self.parked is not None else block.live_in
        return [(n, v) for n, v in self.regs.items() if n in live]

    def write(self, number: int | None, value: Any) -> None:
        """Writes one register in the active lanes."""
        if number is None:
            return
        if self.mask is None:
            self.regs[number] = value
        else:
            self.merge(self.mask, {number: full(value, self.shape)})

    @staticmethod
    def join(fibers: Sequence[Fiber]) -> Fiber:
        """One fiber of several at the same place, none with lanes apart or wgmma pending."""
        first = fibers[0]
        joined = Fiber(first.machine, np.concatenate([f.warps for f in fibers]), first.block)
        carried = [dict(f._carried()) for f in fibers]
        for number in dict.fromkeys(n for regs in carried for n in regs):
            joined.regs[number] = _stack([regs.get(number, first.regs.poison[number]) for regs in carried], fibers)
        if first.parked is not None:
            joined.parked = tuple(
                _stack(list(parts), fibers) for parts in zip(*(f.parked for f in fibers), strict=True)
            )
        if first.tokens is not None:
            joined.tokens = [token for f in fibers for token in f.tokens or ()]
        order = np.argsort(joined.warps, kind="stable")
        # Warps stay sorted, so that a warpgroup's four are neighbours.
        return joined if (order[1:] > order[:-1]).all() else joined.take(order)


def _stack(values: list[Any], fibers: Sequence[Fiber]) -> Any:
    known = next((v for v in values if v is not None), None)
    if not isinstance(known, (np.generic, np.ndarray)):
        return known
    if all(v.ndim == 0 and v.dtype == known.dtype and v == known for v in values):
        return known
    parts = []
    for value, fiber in zip(values, fibers, strict=True):
        if value.dtype != known.dtype:
            value = value.view(known.dtype)
        parts.append(full(value, fiber.shape))
    return np.concatenate(parts)
