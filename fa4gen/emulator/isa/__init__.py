"""One emitter per opcode family; importing this package registers all of them."""

from __future__ import annotations

from fa4gen.emulator.isa import arithmetic, asynchronous, cluster_launch, data, synchronisation, tensor  # noqa: F401
from fa4gen.emulator.isa.base import OPCODES, SUSPENSIONS, Emitter, Mods
from fa4gen.emulator.isa.synchronisation import suspension_of

__all__ = ["OPCODES", "SUSPENSIONS", "Emitter", "Mods", "suspension_of"]
