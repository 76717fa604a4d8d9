"""Functional PTX emulator: runs a compiled variant, host code and all, on a CPU.

It checks what numbers alone do not show: bounds, alignment, data nothing wrote, deadlocks, races.
"""

from __future__ import annotations

from fa4gen.emulator.errors import (
    Deadlock,
    EmulatorError,
    KernelFault,
    LaunchError,
    RaceError,
    UnsupportedInstruction,
)
from fa4gen.emulator.executor import CompiledObject, execute
from fa4gen.emulator.host import Tensor
from fa4gen.emulator.report import EmulatorReport, KernelReport
from fa4gen.emulator.verify import SCHEDULES, Verification, reduced, run, verify

__all__ = [
    "SCHEDULES",
    "CompiledObject",
    "Deadlock",
    "EmulatorError",
    "EmulatorReport",
    "KernelFault",
    "KernelReport",
    "LaunchError",
    "RaceError",
    "Tensor",
    "UnsupportedInstruction",
    "Verification",
    "execute",
    "reduced",
    "run",
    "verify",
]
