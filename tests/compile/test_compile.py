from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_kernels import serialized_kernel, spilling_kernel, stream_kernel

from fa4gen import compile as fa4gen_compile
from fa4gen.artifact_cache import Artifact, ArtifactCache, KernelSource
from fa4gen.compile import CompilePool, compile_source, load_kernel, parse_remarks
from fa4gen.errors import CompileError

pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "store")


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def entries(cache: ArtifactCache) -> list[Path]:
    return list(cache.root.glob("1/*/*"))


def test_an_artifact_has_all_its_parts_and_loads_without_a_driver(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = compile_source(stream_kernel(smem_bytes=4096), cache)
    assert ".target sm_90a" in artifact.ptx_path.read_text()
    assert artifact.cubin_path.read_bytes().startswith(b"\x7fELF")
    assert artifact.source_path.read_text() == stream_kernel(smem_bytes=4096).text
    assert 0 < artifact.meta.registers < 64 and artifact.meta.smem_bytes == 4096
    assert artifact.meta.spill_store_bytes == 0 and not artifact.meta.wgmma_serialized and not artifact.meta.remarks
    assert set(artifact.meta.phase_seconds) == {"import", "trace", "passes", "export"}
    assert artifact.meta.compile_seconds == pytest.approx(sum(artifact.meta.phase_seconds.values()))
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        load_kernel(artifact)()

    monkeypatch.setattr(fa4gen_compile, "_compile_file", None)  # a hit must not compile
    assert compile_source(stream_kernel(smem_bytes=4096), cache) == artifact


def test_a_warm_kernel_is_found_and_loaded_in_milliseconds(cache: ArtifactCache) -> None:
    source = stream_kernel()
    load_kernel(compile_source(source, cache))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        artifact = cache.find(source)
        assert artifact is not None
        load_kernel(artifact)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.005


def test_the_target_is_the_sources_own(cache: ArtifactCache) -> None:
    artifact = compile_source(replace(stream_kernel(), arch="sm_100a"), cache)
    assert artifact.path.parent.name == "sm_100a"
    assert ".target sm_100a" in artifact.ptx_path.read_text()
    assert ".target sm_90a" in compile_source(stream_kernel(), cache).ptx_path.read_text()


def test_spills_are_recorded(cache: ArtifactCache) -> None:
    meta = compile_source(spilling_kernel(), cache).meta
    assert meta.registers == 64 and meta.stack_bytes > 0
    assert meta.spill_store_bytes > 0 and meta.spill_load_bytes > 0 and not meta.wgmma_serialized


def test_serialized_wgmma_is_recorded(cache: ArtifactCache) -> None:
    meta = compile_source(serialized_kernel(), cache).meta
    assert meta.wgmma_serialized
    assert any(remark.startswith("(C751") and "serialized" in remark for remark in meta.remarks)


def broken(old: str, new: str) -> KernelSource:
    source = stream_kernel("broken")
    assert old in source.text
    return replace(source, text=source.text.replace(old, new))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (stream_kernel("broken", smem_bytes=300_000), "it needs 300000 B of shared memory a CTA, sm_90a has 232448"),
        (broken("* scale", "* undefined_name"), "undefined_name"),
        (broken("def fake_arguments():", "def fake_arguments(:"), "SyntaxError"),
        (broken('NAME = "broken"', 'NAME = "other"'), "its NAME is 'other'"),
        (broken("import cutlass\n", "import cutlass\nimport missing_module\n"), "No module named 'missing_module'"),
        (replace(stream_kernel("broken"), arch="sm_77"), "unknown arch 'sm_77'"),
        (replace(serialized_kernel(), name="broken", arch="sm_100a"), "its NAME is 'two_accumulators'"),
        (replace(serialized_kernel(), arch="sm_100a"), "expects arch to be sm_90a"),
    ],
    ids=["smem", "name", "syntax", "NAME", "import", "arch", "NAME of another", "wrong arch"],
)
def test_a_failed_compile_says_why_and_keeps_the_source(
    cache: ArtifactCache, source: KernelSource, message: str
) -> None:
    with pytest.raises(CompileError) as caught:
        compile_source(source, cache)
    text = str(caught.value)
    assert message in text and "\x1b" not in text
    kept = cache.failed_path(source)
    assert text.startswith(f"{source.name} does not compile for {source.arch} ({kept}): ")
    assert kept.read_text() == source.text
    assert ".building" not in text, "the message points at a file that is gone"
    assert entries(cache) == []


def test_a_trace_error_keeps_the_dsls_message_with_the_line(cache: ArtifactCache) -> None:
    source = broken("* scale", "* undefined_name")
    line = next(i for i, text in enumerate(source.text.splitlines(), 1) if "undefined_name" in text)
    with pytest.raises(CompileError, match=rf"--> {cache.failed_path(source)}:{line}\b"):
        compile_source(source, cache)


def test_a_dump_that_ends_early_is_noticed(cache: ArtifactCache) -> None:
    # The DSL dumps PTX without looking for errors. This limit cuts the PTX short and lets the rest through.
    source = stream_kernel(values=200)
    whole = compile_source(source, cache)
    sizes = {path.name: path.stat().st_size for path in whole.path.iterdir()}
    ptx = sizes.pop("kernel.ptx")
    assert max(sizes.values()) < ptx - 200, "the limit would stop something else first"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ptx - 100, limit[1]))
    try:
        with pytest.raises(CompileError, match=r"cannot write the artifact cache .*written short.*kernel\.ptx"):
            compile_source(replace(source, text=source.text + "#\n"), cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert entries(cache) == [whole.path]


def test_remarks_without_statistics_are_an_error() -> None:
    with pytest.raises(CompileError, match="no ptxas statistics"):
        parse_remarks("--- !Analysis\n")


def test_a_damaged_object_is_never_loaded(cache: ArtifactCache) -> None:
    artifact = compile_source(stream_kernel(), cache)
    content = bytearray(artifact.object_path.read_bytes())
    content[len(content) // 2] ^= 1
    artifact.object_path.write_bytes(content)
    with pytest.raises(CompileError, match=r"damaged: kernel\.o .* compile tiny again"):
        load_kernel(artifact)
    again = compile_source(stream_kernel(), cache)
    assert callable(load_kernel(again))


SLEEPER = KernelSource("sleeper", "sm_90a", "import time\nNAME = 'sleeper'\ntime.sleep(600)\n")


def test_a_pool_compiles_caches_and_reports(cache: ArtifactCache, tmp_path: Path) -> None:
    good, bad = stream_kernel(), stream_kernel("big", smem_bytes=300_000)
    with CompilePool(1, cache) as pool:
        futures = [pool.submit_source(source) for source in (good, bad, good)]
        artifact = futures[0].result()
        with pytest.raises(CompileError, match="big does not compile"):
            futures[1].result()
        assert futures[2].result() == artifact
        processes = [worker._process for worker in pool._workers]
        assert len(processes) == 1
    assert not any(process.is_alive() for process in processes)
    assert cache.find(good) == artifact
    # Another process, the same bits: what a worker compiles is what this process would.
    mine = compile_source(good, ArtifactCache(tmp_path / "mine"))
    assert mine.meta.files == artifact.meta.files

    with CompilePool(1, cache) as pool:
        assert pool.submit_source(good).result() == artifact
        assert not pool._workers, "a hit must not start a process"


def test_a_killed_worker_fails_its_compile_only(cache: ArtifactCache) -> None:
    with CompilePool(1, cache) as pool:
        victim, survivor = pool.submit_source(SLEEPER), pool.submit_source(stream_kernel())
        wait_for(lambda: list(cache.root.glob("1/sm_90a/*.building/kernel.py")))
        (worker,) = pool._workers
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(CompileError, match=r"sleeper: the compile process died \(exit code -9\)"):
            victim.result(timeout=30)
        assert survivor.result(timeout=60).variant_name == "tiny"
        # One that is killed while idle fails nothing.
        (idle,) = pool._workers
        os.kill(idle._process.pid, signal.SIGKILL)
        idle._process.join(10)
        assert pool.submit_source(stream_kernel("next")).result(timeout=60).variant_name == "next"


def test_an_exception_drops_what_is_pending(cache: ArtifactCache) -> None:
    pool = CompilePool(1, cache)

    def leave_by_an_exception() -> None:
        with pool:
            futures.extend([pool.submit_source(SLEEPER), pool.submit_source(stream_kernel())])
            wait_for(lambda: list(cache.root.glob("1/sm_90a/*.building/kernel.py")))
            raise RuntimeError("stop")

    futures: list[Future[Artifact]] = []
    with pytest.raises(RuntimeError, match="stop"):
        leave_by_an_exception()
    running, pending = futures
    assert pending.cancelled() and isinstance(running.exception(timeout=0), CompileError)
    assert not pool._workers or not any(worker.alive for worker in pool._workers)


@pytest.mark.parametrize("body", ["futures[0].result()", "pass"], ids=["in the block", "on leaving it"])
def test_ctrl_c_ends_all_processes_quietly(tmp_path: Path, body: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
from pathlib import Path
from fa4gen.artifact_cache import ArtifactCache, KernelSource
from fa4gen.compile import CompilePool

if __name__ == "__main__":
    sleep = "import time; time.sleep(600)"
    try:
        with CompilePool(2, ArtifactCache(Path({str(tmp_path / "store")!r}))) as pool:
            futures = [pool.submit_source(KernelSource(f"sleeper{{i}}", "sm_90a", sleep)) for i in range(4)]
            {body}
    except KeyboardInterrupt:
        raise SystemExit(130)
"""
    )
    environment = os.environ | {"PYTHONPATH": str(Path(fa4gen_compile.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job may have it ignored
    )
    wait_for(lambda: len(list(tmp_path.glob("store/1/sm_90a/*.building/kernel.py"))) == 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody gets it
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == ""
    wait_for(lambda: not _group_lives(process.pid), 10)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from tiny_kernels import stream_kernel
from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import CompilePool

if __name__ == "__main__":
    pool = CompilePool(1, ArtifactCache(Path({str(tmp_path / "store")!r})))
    pool.submit_source(stream_kernel()).result()
    print("ready", flush=True)
    time.sleep(600)
"""
    )
    environment = os.environ | {"PYTHONPATH": str(Path(fa4gen_compile.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, str(script)], start_new_session=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait(10)
    wait_for(lambda: not _group_lives(process.pid), 10)


def _group_lives(group: int) -> bool:
    """Whether any process of the group runs. Zombies do not count: without an init nobody may reap an orphan."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = status.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(process_group) == group and state not in "ZX":
            return True
    return False
