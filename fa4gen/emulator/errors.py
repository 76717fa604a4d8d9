"""What a run in the emulator can go wrong with. Every message says where: PTX line, warp, address or barrier."""

from __future__ import annotations

from fa4gen.errors import Fa4genError

__all__ = ["Deadlock", "EmulatorError", "KernelFault", "LaunchError", "RaceError", "UnsupportedInstruction"]


class EmulatorError(Fa4genError):
    """Root of the emulator's errors. ``where`` is filled in by the scheduler: PTX line and text."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where

    def __str__(self) -> str:
        return f"{self.message}\n  at {self.where}" if self.where else self.message


class UnsupportedInstruction(EmulatorError):
    """An opcode, modifier, descriptor field or launch attribute that the emulator does not implement."""


class LaunchError(EmulatorError):
    """The host code refused its arguments, or asked for a launch that the hardware would refuse."""


class KernelFault(EmulatorError):
    """The kernel did what faults or is undefined on hardware: out of bounds, misaligned, never-written data, …"""


class RaceError(KernelFault):
    """Two accesses that nothing orders, at least one of them a write."""


class Deadlock(EmulatorError):
    """No warp can run and no asynchronous operation is in flight."""
