"""Content-addressed store of compiled kernels. An entry appears whole or not at all, and a broken one heals itself.

Layout under the root::

    <schema>/<arch>/<key>/{kernel.py, kernel.ptx, kernel.cubin, kernel.o, meta.json}
    locks/<key>.lock    one compile of a key at a time, over all processes
    quarantine/         entries that did not check out
    failed/<name>.py    sources that did not compile

An entry is built in ``<key>.building`` beside its place, meta.json last, and renamed into it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fa4gen import knobs
from fa4gen.errors import CacheError
from fa4gen.variant import Variant

__all__ = ["Artifact", "ArtifactCache", "ArtifactMeta", "CompileReport", "KernelSource", "toolchain_versions"]

log = logging.getLogger(__name__)

SCHEMA = 1
FILES = ("kernel.py", "kernel.ptx", "kernel.cubin", "kernel.o")
LOCK_TIMEOUT_S = 600.0
_BLOCKS = Path(__file__).resolve().parent / "blocks"


@dataclass(frozen=True)
class KernelSource:
    """All of a compile's input but the toolchain; picklable.

    ``text`` is a Python module that defines ``NAME`` (equal to ``name``, a C identifier), ``entry`` (a ``@cute.jit``
    host function) and ``fake_arguments()`` (what ``cute.compile`` gets beside it).
    """

    name: str
    arch: str
    text: str
    opt_level: int = 3

    @classmethod
    def of(cls, variant: Variant) -> KernelSource:
        """The rendered source of ``variant``."""
        return _render(variant)

    @property
    def options(self) -> str:
        """The compile options that can change the object, as the DSL spells them."""
        return f"--enable-tvm-ffi --gpu-arch {self.arch} --opt-level {self.opt_level}"

    @functools.cached_property
    def key(self) -> str:
        """32 hexadecimal digits over all that can change the object: source, blocks, toolchain, options, host CPU."""
        data = {
            "schema": SCHEMA,
            "source": asdict(self),
            "options": self.options,
            "blocks": _blocks_digest(),
            "versions": toolchain_versions(),
            "host": platform.machine(),
        }
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=4096)
def _render(variant: Variant) -> KernelSource:
    from fa4gen.render import render  # jinja2: wanted only once a kernel is

    return KernelSource(variant.name, variant.arch, render(variant))


@functools.cache
def _blocks_digest() -> str:
    """SHA-256 over names and bytes of ``fa4gen/blocks/*.py``, read once: a process compiles the blocks it imported."""
    digest = hashlib.sha256()
    for path in sorted(_BLOCKS.glob("*.py")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def toolchain_versions() -> dict[str, str]:
    """Distribution name → version of everything installed that takes part in a compile. Empty without the DSL."""
    versions: dict[str, str] = {}
    queue = ["nvidia-cutlass-dsl", "apache-tvm-ffi"]
    while queue:  # follows the DSL's own requirements: its compilers come as nvidia-cutlass-dsl-libs-*
        name = queue.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions[name] = distribution.version
        required = {match[0] for r in distribution.requires or () if (match := re.match(r"[\w.-]+", r))}
        queue += [r for r in required if r.startswith("nvidia-cutlass-dsl") and r not in versions]
    return dict(sorted(versions.items()))


@dataclass(frozen=True)
class CompileReport:
    """What the compiler says of one kernel. Bytes and registers are per thread, ``smem_bytes`` per CTA.

    ``wgmma_serialized``: ptxas waits after every wgmma (C7510 to C7514). ``remarks``: its advisories, in full.
    ``phase_seconds``: wall time of import, trace, passes (ptxas included) and export.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    wgmma_serialized: bool
    smem_bytes: int
    remarks: list[str]
    compile_seconds: float
    phase_seconds: dict[str, float]


@dataclass(frozen=True)
class ArtifactMeta(CompileReport):
    """meta.json. ``files`` maps each other file to its SHA-256."""

    schema: int
    name: str
    arch: str
    options: str
    versions: dict[str, str]
    files: dict[str, str]

    @property
    def source_sha256(self) -> str:
        """SHA-256 of kernel.py."""
        return self.files["kernel.py"]


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel on disk. ``digest`` is the key it is stored under."""

    path: Path
    variant_name: str
    digest: str
    arch: str
    meta: ArtifactMeta

    @property
    def object_path(self) -> Path:
        """Host object with the cubin inside; exports ``__tvm_ffi_<variant_name>``."""
        return self.path / "kernel.o"

    @property
    def ptx_path(self) -> Path:
        """PTX text."""
        return self.path / "kernel.ptx"

    @property
    def cubin_path(self) -> Path:
        """The cubin alone."""
        return self.path / "kernel.cubin"

    @property
    def source_path(self) -> Path:
        """The source it was compiled from."""
        return self.path / "kernel.py"

    def damage(self) -> str | None:
        """What is wrong with the files, or None: every file has the recorded SHA-256 (0.3 ms in all)."""
        for name, sha256 in self.meta.files.items():
            try:
                content = (self.path / name).read_bytes()
            except OSError as error:
                return f"{name} cannot be read: {error.strerror}"
            if hashlib.sha256(content).hexdigest() != sha256:
                return f"{name} ({len(content)} bytes) does not have the recorded SHA-256"
        return None


class ArtifactCache:
    """The store at ``root`` (default: ``artifacts`` in the cache directory). Creates nothing before the first write.

    Safe for any number of processes. Reading needs no write permission. A damaged entry is logged, moved to
    ``quarantine/`` and reads as absent.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or knobs.cache_dir() / "artifacts").absolute()

    def get(self, variant: Variant) -> Artifact | None:
        """The artifact of ``variant``, checked; None where it is not in the store."""
        return self.find(KernelSource.of(variant))

    def find(self, source: KernelSource) -> Artifact | None:
        """The artifact of ``source``, checked; None where it is not in the store."""
        try:
            return self._read(source)
        except _Damaged as damaged:
            try:
                with self._lock(source):
                    return self._read_or_quarantine(source)
            except OSError as error:
                log.warning("%s: %s; it stays there: %s", self._entry(source), damaged, error)
                return None

    def get_or_build(self, source: KernelSource, build: Callable[[Path], CompileReport]) -> Artifact:
        """The artifact of ``source``; if absent, ``build(directory)`` writes :data:`FILES` and this commits them.

        Of several processes that ask at once, one builds and the others take its result. Whatever ``build`` raises
        goes through, and leaves nothing behind.

        Raises:
            CacheError: the store cannot be written.
        """
        artifact = self.find(source)
        if artifact is not None:
            return artifact
        try:
            with self._lock(source):
                artifact = self._read_or_quarantine(source)  # another process may have built it while we waited
                return artifact or self._build(source, build)
        except OSError as error:
            raise CacheError(
                f"cannot write the artifact cache {self.root}: {error}; "
                "make room or make it writable, or set FA4GEN_CACHE_DIR to another folder"
            ) from error

    def failed_path(self, source: KernelSource) -> Path:
        """Where the source of a failed compile is kept."""
        return self.root / "failed" / f"{source.name}.py"

    def _entry(self, source: KernelSource) -> Path:
        return self.root / str(SCHEMA) / source.arch / source.key

    def _read(self, source: KernelSource) -> Artifact | None:
        """Raises _Damaged where something is there that does not check out."""
        entry = self._entry(source)
        try:
            meta = _parse_meta((entry / "meta.json").read_bytes(), source)
        except (FileNotFoundError, NotADirectoryError):
            if entry.exists():
                raise _Damaged("meta.json is missing") from None
            return None
        except OSError as error:
            raise _Damaged(f"meta.json cannot be read: {error}") from error
        artifact = Artifact(entry, source.name, source.key, source.arch, meta)
        damage = artifact.damage()
        if damage:
            raise _Damaged(damage)
        return artifact

    def _read_or_quarantine(self, source: KernelSource) -> Artifact | None:
        """Like :meth:`_read`, with the damaged entry moved away. Call with the lock held."""
        try:
            return self._read(source)
        except _Damaged as damaged:
            grave = self.root / "quarantine" / f"{source.key}-{time.time_ns()}"
            grave.parent.mkdir(parents=True, exist_ok=True)
            self._entry(source).rename(grave)
            log.warning("artifact of %s is damaged: %s; moved to %s", source.name, damaged, grave)
            return None

    def _build(self, source: KernelSource, build: Callable[[Path], CompileReport]) -> Artifact:
        staging = self._entry(source).with_name(f"{source.key}.building")
        shutil.rmtree(staging, ignore_errors=True)  # of a process killed half-way: we hold the lock, so it is gone
        staging.mkdir(parents=True)
        try:
            return self._commit(source, staging, build(staging))
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _commit(self, source: KernelSource, staging: Path, report: CompileReport) -> Artifact:
        meta = ArtifactMeta(
            **asdict(report),
            schema=SCHEMA,
            name=source.name,
            arch=source.arch,
            options=source.options,
            versions=toolchain_versions(),
            files={name: hashlib.sha256((staging / name).read_bytes()).hexdigest() for name in FILES},
        )
        (staging / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")
        for path in (*(staging / name for name in FILES), staging / "meta.json", staging):
            _fsync(path)
        entry = self._entry(source)
        staging.rename(entry)
        _fsync(entry.parent)
        return Artifact(entry, source.name, source.key, source.arch, meta)

    @contextmanager
    def _lock(self, source: KernelSource) -> Iterator[None]:
        import filelock  # asyncio and 40 ms; a warm read does without

        path = self.root / "locks" / f"{source.key}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, timeout=LOCK_TIMEOUT_S)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise CacheError(
                f"another process has been compiling {source.name} for {LOCK_TIMEOUT_S:.0f} s (it holds {path}); "
                "stop it and try again"
            ) from None
        try:
            yield
        finally:
            lock.release()


class _Damaged(Exception):
    """An entry that does not check out; the message says why."""


def _parse_meta(content: bytes, source: KernelSource) -> ArtifactMeta:
    try:
        data = json.loads(content)
        if data["schema"] != SCHEMA:
            raise _Damaged(f"meta.json has schema {data['schema']}, this version of fa4gen reads {SCHEMA}")
        meta = ArtifactMeta(**data)
        if (meta.name, meta.arch) != (source.name, source.arch) or set(meta.files) != set(FILES):
            raise _Damaged(f"meta.json describes {meta.name} for {meta.arch}, not {source.name} for {source.arch}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _Damaged(f"meta.json cannot be read: {error}") from error
    return meta


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
