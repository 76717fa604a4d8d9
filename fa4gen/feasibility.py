"""The one predicate on what can run: search, dispatch, command line and tests all ask here."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Rejection"]


@dataclass(frozen=True)
class Rejection:
    """Why a config cannot run. ``rule`` is a stable identifier, ``message`` a sentence, ``numbers`` what it compared."""

    rule: str
    message: str
    numbers: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message
