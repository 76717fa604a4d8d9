"""Vector-clock race detection."""

from __future__ import annotations


class Races:
    """Placeholder until the detector is in."""
