"""Finds ``templates/``, ``search_spaces/`` and ``tuned/``, in a checkout or in a wheel."""

from __future__ import annotations

from pathlib import Path

__all__ = ["resource_dir"]

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """The directory ``name`` ("templates", "search_spaces" or "tuned").

    A wheel carries them as ``fa4gen/_data/<name>``; an editable install uses the checkout's own.
    """
    packaged = _PACKAGE / "_data" / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / name
