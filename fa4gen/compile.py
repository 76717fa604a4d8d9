"""Kernel source to artifact for an explicit target, in this process or in a pool. Needs no GPU and no driver."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fa4gen import knobs
from fa4gen.arch import get_arch
from fa4gen.artifact_cache import Artifact, ArtifactCache, CompileReport, KernelSource
from fa4gen.errors import CompileError, Fa4genError
from fa4gen.variant import Variant

__all__ = ["CompilePool", "compile_source", "compile_variant", "load_kernel"]

# Tracing keeps its state in module globals: one compile at a time in a process.
_COMPILING = threading.Lock()
# The DSL never frees a compile's MLIR context: 2 MB and a file descriptor each. A fresh worker takes 1 s to start.
_COMPILES_PER_WORKER = 100


def compile_variant(variant: Variant, cache: ArtifactCache | None = None) -> Artifact:
    """The artifact of ``variant``: from ``cache`` (default: the user's), else compiled in this process.

    Raises:
        CompileError: the source does not compile, or the cache cannot be written.
    """
    return compile_source(KernelSource.of(variant), cache)


def compile_source(source: KernelSource, cache: ArtifactCache | None = None) -> Artifact:
    """Like :func:`compile_variant`, for a source from anywhere."""
    cache = cache or ArtifactCache()
    return cache.get_or_build(source, lambda directory: _build(source, directory, cache.failed_path(source)))


def load_kernel(artifact: Artifact) -> Callable[..., Any]:
    """The kernel as a tvm-ffi function that launches on torch's current stream. Loading needs no driver.

    Raises:
        CompileError: the object on disk is not the one that was compiled, or the DSL is not installed.
    """
    damage = artifact.damage()
    if damage:
        raise CompileError(f"artifact {artifact.path} is damaged: {damage}; compile {artifact.variant_name} again")
    cute = _import_cute()
    module = cute.runtime.load_module(str(artifact.object_path), enable_tvm_ffi=True)
    kernel: Callable[..., Any] = getattr(module, artifact.variant_name)
    return kernel


def _build(source: KernelSource, directory: Path, failed: Path) -> CompileReport:
    """Compiles into ``directory``. On failure the source stays at ``failed``, and the message speaks of that path."""
    _import_cute()
    path = directory / "kernel.py"
    path.write_text(source.text, encoding="utf-8")
    try:
        with _COMPILING:
            return _compile_file(path, source)
    except Exception as error:  # tracing runs the source, which can raise anything
        if isinstance(error, OSError) and error.errno:
            raise  # a full or read-only disk: the cache knows what to say
        failed.parent.mkdir(parents=True, exist_ok=True)
        path.replace(failed)
        message = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).replace(str(path), str(failed)).strip()
        if not isinstance(error, Fa4genError) and not message.startswith("error"):
            message = f"{type(error).__name__}: {message}"
        raise CompileError(f"{source.name} does not compile for {source.arch} ({failed}): {message}") from error


def _import_cute() -> Any:
    try:
        from cutlass import cute
    except ImportError as error:
        raise CompileError(
            f"CuTe DSL cannot be imported ({error}): pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
        ) from error
    return cute


def _compile_file(path: Path, source: KernelSource) -> CompileReport:
    from cutlass.base_dsl.compiler import DumpDir, ExtraCompilerOpts

    cute = _import_cute()
    smem_limit = get_arch(source.arch).smem_per_cta
    clock = _Phases()
    dump = path.with_name("dump")
    dump.mkdir()
    with _memory_file() as (remarks, read_remarks):
        options = (
            cute.EnableTVMFFI(True),
            cute.GPUArch(source.arch),
            cute.OptLevel(source.opt_level),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            DumpDir(str(dump)),
            # The ptxas log and the shared-memory size as YAML. "--remarks{ptx}" prints the log as well, but it also
            # tracks the source line of every operation, which makes a compile half as long again.
            cute.RemarkOutput(remarks),
            cute.PtxasOptions("-v"),
            ExtraCompilerOpts("diagnostic=ptx"),
        )
        with _imported(path, source) as module:
            arguments = module.fake_arguments()
            clock.lap("import")
            compiled = cute.compile[options](
                module.entry, *arguments, trace_finalize_hooks=lambda *_: clock.lap("trace")
            )
            clock.lap("passes")
        statistics = parse_remarks(read_remarks())
    compiled.export_to_c(str(path.with_name("kernel.o")), function_name=source.name)
    clock.lap("export")
    _only(dump, "*.ptx").replace(path.with_name("kernel.ptx"))
    _only(dump, "*.cubin").replace(path.with_name("kernel.cubin"))
    shutil.rmtree(dump)
    _check_whole(path.parent)
    if statistics["smem_bytes"] > smem_limit:  # the DSL exports it all the same, and the launch fails
        raise CompileError(
            f"it needs {statistics['smem_bytes']} B of shared memory a CTA, {source.arch} has {smem_limit}"
        )
    return CompileReport(**statistics, compile_seconds=sum(clock.seconds.values()), phase_seconds=clock.seconds)


def parse_remarks(text: str) -> dict[str, Any]:
    """The DSL's remark file as fields of :class:`CompileReport`; the largest of each where there are several kernels.

    Raises:
        CompileError: there is no ptxas log in it.
    """
    text = text.replace("''", "'")  # YAML's escape in a single-quoted string

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, text)), default=0)

    registers = largest(r"Used (\d+) registers")
    if not registers:
        raise CompileError("the DSL reports no ptxas statistics; fa4gen reads those of nvidia-cutlass-dsl 4.8")
    return {
        "registers": registers,
        "stack_bytes": largest(r"(\d+) bytes stack frame"),
        "spill_store_bytes": largest(r"(\d+) bytes spill stores"),
        "spill_load_bytes": largest(r"(\d+) bytes spill loads"),
        "wgmma_serialized": "wgmma.mma_async instructions are serialized" in text,
        "smem_bytes": largest(r"Shared memory allocated: (\d+) bytes") + largest(r"(\d+) bytes smem"),
        "remarks": re.findall(r"\(C\d{4}\) .*", text),
    }


def _check_whole(directory: Path) -> None:
    """The DSL dumps PTX and cubin without looking for errors: on a full disk they end early and nothing is said."""
    if not (directory / "kernel.ptx").read_bytes().rstrip().endswith(b"}"):
        raise OSError(errno.ENOSPC, "written short", str(directory / "kernel.ptx"))
    if (directory / "kernel.cubin").read_bytes() not in (directory / "kernel.o").read_bytes():
        raise OSError(errno.ENOSPC, "written short", str(directory / "kernel.cubin"))


@contextlib.contextmanager
def _imported(path: Path, source: KernelSource) -> Iterator[Any]:
    """The module at ``path``, executed from there (the DSL reads the file again) without leaving a ``__pycache__``."""
    module = types.ModuleType(f"fa4gen_kernel_{source.key}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses look up their annotations
    try:
        exec(compile(source.text, str(path), "exec"), module.__dict__)
        if source.name != module.NAME:
            raise CompileError(f"its NAME is {module.NAME!r}")
        yield module
    finally:
        del sys.modules[module.__name__]


@contextlib.contextmanager
def _memory_file() -> Iterator[tuple[str, Callable[[], str]]]:
    """Path of a file in memory, and a function that reads it.

    For the remarks: LLVM ends the process with status 1 if, at exit, the disk is too full to flush them.
    """
    descriptor = os.memfd_create("remarks")
    try:
        yield f"/proc/self/fd/{descriptor}", lambda: os.pread(descriptor, 1 << 24, 0).decode()
    finally:
        os.close(descriptor)


def _only(directory: Path, pattern: str) -> Path:
    found = list(directory.glob(pattern))
    if len(found) != 1:
        raise CompileError(f"the DSL wrote {len(found)} files {pattern}; fa4gen wants one compilation unit")
    return found[0]


class _Phases:
    """Wall time of consecutive phases, seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Books the time since the last lap to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class CompilePool:
    """Compiles in ``workers`` spawned processes (default: ``FA4GEN_COMPILE_WORKERS``). A context manager.

    Workers start when first needed and import the DSL once. One that dies fails only the compile it was at. Leaving
    the block waits for what was submitted; leaving it by an exception (Ctrl-C) drops that and kills the workers.
    """

    def __init__(self, workers: int | None = None, cache: ArtifactCache | None = None) -> None:
        self._cache = cache or ArtifactCache()
        self._idle: deque[_Worker] = deque()
        self._workers: set[_Worker] = set()
        self._dropped = False
        self._threads = ThreadPoolExecutor(workers or knobs.compile_workers(), "compile")  # they wait for workers

    def submit(self, variant: Variant) -> Future[Artifact]:
        """Starts compiling ``variant`` unless it is in the cache. ``result()`` raises CompileError."""
        return self.submit_source(KernelSource.of(variant))

    def submit_source(self, source: KernelSource) -> Future[Artifact]:
        """Like :meth:`submit`, for a source from anywhere."""
        return self._threads.submit(self._compile, source)

    def close(self, *, drop: bool = False) -> None:
        """Ends the workers: after everything submitted is done, or with ``drop`` at once. Safe to call twice."""
        if not drop:
            try:
                self._threads.shutdown()
            except KeyboardInterrupt:
                self.close(drop=True)
                raise
        self._dropped = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self.close(drop=error_type is not None)

    def _compile(self, source: KernelSource) -> Artifact:
        artifact = self._cache.find(source)
        if artifact is not None:
            return artifact
        worker = self._take()
        try:
            return worker.compile(source, self._cache)
        finally:
            if worker.compiles < _COMPILES_PER_WORKER and worker.alive:
                self._idle.append(worker)
            else:
                worker.kill()
                self._workers.discard(worker)

    def _take(self) -> _Worker:
        """An idle worker, or a new one: there are as many threads as there may be workers."""
        with contextlib.suppress(IndexError):  # none is idle
            while True:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                self._workers.discard(worker)  # killed while idle: nobody's compile failed
        worker = _Worker()
        self._workers.add(worker)
        if self._dropped:  # close() may have looked at the set already
            worker.kill()
        return worker


class _Worker:
    """One process that compiles what it is sent, until its pipe closes or it is killed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit the caller's threads and CUDA context
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="fa4gen-compile", daemon=True)
        # Ctrl-C reaches every process of the terminal, and what to do about it is for the main thread to say: a worker
        # inherits this thread's blocked SIGINT. (The tracker comes first because starting it unblocks SIGINT.)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        theirs.close()
        self.compiles = 0

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def compile(self, source: KernelSource, cache: ArtifactCache) -> Artifact:
        """The artifact. Raises CompileError, also when the process dies."""
        self.compiles += 1
        try:
            self._connection.send((source, cache.root))
            outcome: Artifact | Exception = self._connection.recv()
        except (EOFError, OSError):
            self.kill()
            raise CompileError(
                f"{source.name}: the compile process died (exit code {self._process.exitcode}): "
                "killed, out of memory, or a crash in the compiler"
            ) from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def kill(self) -> None:
        """Ends the process now."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    """A worker's main loop. Ends when the other side is closed or dead."""
    # tvm_ffi imports torch if it can, which takes 1 s and 180 MB; compiling does not use it.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            source, root = connection.recv()
            outcome: Artifact | Exception
            try:
                outcome = compile_source(source, ArtifactCache(root))
            except Fa4genError as error:
                outcome = error
            connection.send(outcome)
    os._exit(0)  # no teardown of the DSL's libraries
