"""Kernels that hung, crashed or were wrong, remembered over all studies: such a config costs one trial, once."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock

from fa4gen import knobs
from fa4gen.artifact_cache import KernelSource, toolchain_versions
from fa4gen.measure.base import Failure, FailureKind
from fa4gen.variant import Variant

__all__ = ["KnownBad"]

log = logging.getLogger(__name__)

SCHEMA = 1
REMEMBERED = frozenset({FailureKind.TIMEOUT, FailureKind.CRASHED, FailureKind.WRONG})


def _kernel_key(variant: Variant) -> str:
    return KernelSource.of(variant).key


class KnownBad:
    """The memory in the JSON file ``path`` (default: ``known_bad.json`` in the cache directory). Thread-safe.

    An entry holds for one variant as long as ``identity(variant)`` stays what it was: by default the artifact key,
    which changes with the rendered source, the blocks, the arch and the toolchain. So a mended kernel is tried again.
    A file that cannot be read is moved aside, and the memory starts empty.
    """

    def __init__(self, path: Path | None = None, identity: Callable[[Variant], str] = _kernel_key) -> None:
        self._path = path or knobs.cache_dir() / "known_bad.json"
        self._identity = identity
        self._lock = threading.Lock()
        self._entries = self._read()

    def get(self, variant: Variant) -> Failure | None:
        """How ``variant`` failed, or None."""
        if not self._entries:  # spares every candidate of a search its digest
            return None
        entry = self._entries.get(variant.digest)
        if entry is None or entry["key"] != self._identity(variant):
            return None
        return Failure(FailureKind(entry["kind"]), entry["message"])

    def add(self, variant: Variant, failure: Failure) -> None:
        """Remembers ``variant`` if ``failure`` is of a kind that is worth it (timeout, crashed, wrong).

        Raises:
            OSError: the file cannot be written.
        """
        if failure.kind not in REMEMBERED:
            return
        entry = {
            "key": self._identity(variant),
            "variant": variant.name,
            "arch": variant.arch,
            "config": asdict(variant.config),
            "kind": failure.kind.value,
            "message": failure.message,
            "versions": toolchain_versions(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, FileLock(f"{self._path}.lock"):
            self._entries = {**self._read(), variant.digest: entry}
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            temporary.write_text(json.dumps({"schema": SCHEMA, "entries": self._entries}, indent=1), encoding="utf-8")
            temporary.replace(self._path)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']}")
            entries: dict[str, dict[str, Any]] = data["entries"]
            if not all({"key", "kind", "message"} <= entry.keys() for entry in entries.values()):
                raise ValueError("an entry lacks key, kind or message")
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            aside = self._path.with_name(f"{self._path.name}.damaged")
            self._path.replace(aside)
            log.warning("%s cannot be read (%s); moved to %s, starting empty", self._path, error, aside)
            return {}
        return entries
