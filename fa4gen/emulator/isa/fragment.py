"""Data shapes of tcgen05.ld and st: which cell of tensor memory every register of every lane is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

__all__ = ["Fragment"]


@dataclass(frozen=True)
class Fragment:
    """Which cell each register of each lane of a tcgen05.ld or st is, relative to the address.

    ``lanes``, ``columns``: (registers, 32). ``packed``: a register is the low halves of two neighbouring columns, which
    count as two registers here. ``runs``: (first column, number) of the columns touched.
    """

    lanes: np.ndarray
    columns: np.ndarray
    packed: bool
    runs: tuple[tuple[int, int], ...]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, shape: str, registers: int, packed: bool, split: int = 0) -> Fragment:
        """``shape`` as in PTX; ``split``: columns from the first to the second half of 16x32bx2."""
        r, t = np.arange(registers)[:, None], np.arange(32)
        if shape == "16x256b":
            lanes, columns = t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)
        elif shape == "16x128b":
            lanes, columns = t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
        elif shape == "16x64b":
            lanes, columns = t // 4 + 8 * (t % 2) + 0 * r, t // 2 % 2 + 2 * r
        elif shape == "16x32bx2":
            lanes, columns = t % 16 + 0 * r, r + 0 * t
        else:
            lanes, columns = t + 0 * r, r + 0 * t
        if packed:
            lanes = np.repeat(lanes, 2, axis=0)
            columns = np.stack([2 * columns, 2 * columns + 1], axis=1).reshape(lanes.shape)
        width = int(columns.max()) + 1
        if shape == "16x32bx2":
            return cls(lanes, columns + split * (t // 16), packed, ((0, width), (split, width)))
        return cls(lanes, columns, packed, ((0, width),))
