"""What a run found out: outputs, coverage, instruction counts, traffic, waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["EmulatorReport", "KernelReport"]


@dataclass
class KernelReport:
    """One launch.

    ``instructions``: warp instructions by unit and warp of the CTA, summed over CTAs. ``uncovered``: PTX lines of
    blocks that no warp reached.
    """

    name: str
    grid: tuple[int, int, int]
    blocks: int = 0
    blocks_run: int = 0
    uncovered: list[tuple[int, int]] = field(default_factory=list)
    instructions: dict[str, list[int]] = field(default_factory=dict)
    shared_bytes_read: int = 0
    shared_bytes_written: int = 0
    tmem_bytes_read: int = 0
    tmem_bytes_written: int = 0
    global_bytes_read: int = 0
    global_bytes_written: int = 0
    mbarrier_waits: int = 0
    named_barrier_waits: int = 0

    @property
    def coverage(self) -> float:
        """Share of basic blocks that ran."""
        return self.blocks_run / self.blocks if self.blocks else 1.0

    @property
    def total_instructions(self) -> int:
        """Dynamic warp instructions."""
        return sum(map(sum, self.instructions.values()))


@dataclass
class EmulatorReport:
    """One call of a compiled variant. ``outputs``: the output tensors by name, in the type they were passed in."""

    outputs: dict[str, Any]
    kernels: list[KernelReport]
    schedule: str
    seed: int
    races_checked: bool
    seconds: float

    @property
    def coverage(self) -> float:
        """Share of basic blocks that ran, over all launches."""
        blocks = sum(k.blocks for k in self.kernels)
        return sum(k.blocks_run for k in self.kernels) / blocks if blocks else 1.0

    @property
    def total_instructions(self) -> int:
        """Dynamic warp instructions over all launches."""
        return sum(k.total_instructions for k in self.kernels)
