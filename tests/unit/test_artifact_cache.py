from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import filelock
import pytest

from fa4gen import artifact_cache
from fa4gen.artifact_cache import FILES, ArtifactCache, CompileReport, KernelSource, toolchain_versions
from fa4gen.config import FlashFwdSm90Config
from fa4gen.errors import CompileError
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

SOURCE = KernelSource("kernel", "sm_90a", "NAME = 'kernel'\n")
REPORT = CompileReport(
    registers=168,
    stack_bytes=0,
    spill_store_bytes=0,
    spill_load_bytes=8,
    wgmma_serialized=True,
    smem_bytes=1024,
    remarks=["(C7512) serialized"],
    compile_seconds=1.5,
    phase_seconds={"trace": 1.0, "passes": 0.5},
)


def write_files(directory: Path) -> CompileReport:
    for name in FILES:
        (directory / name).write_text(name * 1000)
    return REPORT


def must_not_build(directory: Path) -> CompileReport:
    raise AssertionError("built again")


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "store")


def leftovers(cache: ArtifactCache) -> list[str]:
    """Everything in the store but locks and whole entries."""
    entries = {meta.parent for meta in cache.root.glob("1/*/*/meta.json")}
    return [
        str(path.relative_to(cache.root))
        for path in cache.root.rglob("*")
        if path.is_file() and path.parent not in entries and path.parent.name != "locks"
    ]


def test_an_entry_reads_back_as_it_was_committed(cache: ArtifactCache) -> None:
    assert cache.find(SOURCE) is None
    assert not cache.root.exists(), "reading must not create the store"
    built = cache.get_or_build(SOURCE, write_files)
    assert built.path == cache.root / "1" / "sm_90a" / SOURCE.key
    assert {path.name for path in built.path.iterdir()} == {*FILES, "meta.json"}
    assert cache.find(SOURCE) == built
    assert cache.get_or_build(SOURCE, must_not_build) == built
    assert built.meta.registers == 168 and built.meta.wgmma_serialized and built.meta.spill_load_bytes == 8
    assert built.meta.versions == toolchain_versions()
    assert json.loads((built.path / "meta.json").read_text())["options"] == SOURCE.options
    assert leftovers(cache) == []


def test_a_variant_is_found_through_its_rendered_source(cache: ArtifactCache) -> None:
    problem = AttentionProblem.parse("h=1 s=1 d=64")
    variant = Variant.of("sm_90a", problem, FlashFwdSm90Config.default(problem))
    assert cache.get(variant) is None
    built = cache.get_or_build(KernelSource.of(variant), write_files)
    assert cache.get(variant) == built and built.variant_name == variant.name


@pytest.mark.parametrize("change", [{"name": "other"}, {"arch": "sm_100a"}, {"text": "NAME = 1\n"}, {"opt_level": 2}])
def test_every_input_is_in_the_key(change: dict[str, object]) -> None:
    assert replace(SOURCE, **change).key != SOURCE.key


def test_the_key_covers_blocks_and_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        artifact_cache._blocks_digest.cache_clear()
        return replace(SOURCE).key

    original = key()
    assert pickle.loads(pickle.dumps(SOURCE)).key == original
    monkeypatch.setattr(artifact_cache, "_BLOCKS", tmp_path)
    (tmp_path / "softmax.py").write_text("a = 1\n")
    one = key()
    (tmp_path / "softmax.py").write_text("a = 2\n")
    assert len({original, one, key()}) == 3
    monkeypatch.undo()
    monkeypatch.setattr(artifact_cache, "toolchain_versions", lambda: {"nvidia-cutlass-dsl": "9.9"})
    assert key() != original
    artifact_cache._blocks_digest.cache_clear()


def test_toolchain_versions_lists_every_dsl_distribution_installed() -> None:
    installed = {
        distribution.name.lower(): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.name.lower().startswith(("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    }
    assert installed.keys() >= {"nvidia-cutlass-dsl", "apache-tvm-ffi"}
    assert toolchain_versions() == installed


def flip_a_bit(entry: Path) -> None:
    content = bytearray((entry / "kernel.o").read_bytes())
    content[len(content) // 2] ^= 1
    (entry / "kernel.o").write_bytes(content)


def truncate_object(entry: Path) -> None:
    os.truncate(entry / "kernel.o", 100)


def remove_cubin(entry: Path) -> None:
    (entry / "kernel.cubin").unlink()


def truncate_meta(entry: Path) -> None:
    os.truncate(entry / "meta.json", 200)


def remove_meta(entry: Path) -> None:
    (entry / "meta.json").unlink()


def edit_meta(entry: Path, **change: object) -> None:
    meta = json.loads((entry / "meta.json").read_text())
    (entry / "meta.json").write_text(json.dumps(meta | change))


def future_schema(entry: Path) -> None:
    edit_meta(entry, schema=2, new_field=1)


def unknown_field(entry: Path) -> None:
    edit_meta(entry, new_field=1)


def other_kernel(entry: Path) -> None:
    edit_meta(entry, name="other")


def not_an_object(entry: Path) -> None:
    (entry / "meta.json").write_text("[1, 2]")


DAMAGES = [
    flip_a_bit,
    truncate_object,
    remove_cubin,
    truncate_meta,
    remove_meta,
    future_schema,
    unknown_field,
    other_kernel,
    not_an_object,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_quarantined_and_built_again(
    cache: ArtifactCache, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    built = cache.get_or_build(SOURCE, write_files)
    damage(built.path)
    with caplog.at_level(logging.WARNING, "fa4gen"):
        assert cache.find(SOURCE) is None
    (grave,) = (cache.root / "quarantine").iterdir()
    assert "kernel is damaged" in caplog.text and str(grave) in caplog.text
    assert not built.path.exists() and (grave / "kernel.py").exists()
    assert cache.get_or_build(SOURCE, write_files) == built
    assert cache.find(SOURCE) == built


def test_what_the_builder_raises_goes_through_and_leaves_nothing(cache: ArtifactCache) -> None:
    def fail(directory: Path) -> CompileReport:
        write_files(directory)
        raise CompileError("no")

    with pytest.raises(CompileError, match=r"^no$"):
        cache.get_or_build(SOURCE, fail)
    assert leftovers(cache) == []
    assert cache.get_or_build(SOURCE, write_files).meta.registers == 168


def test_a_builder_that_forgets_a_file_commits_nothing(cache: ArtifactCache) -> None:
    def forget(directory: Path) -> CompileReport:
        report = write_files(directory)
        (directory / "kernel.ptx").unlink()
        return report

    with pytest.raises(CompileError, match=r"kernel\.ptx"):
        cache.get_or_build(SOURCE, forget)
    assert cache.find(SOURCE) is None and leftovers(cache) == []


def build_and_die(root: Path) -> None:
    def die(directory: Path) -> CompileReport:
        write_files(directory)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    ArtifactCache(root).get_or_build(SOURCE, die)


def test_a_process_killed_half_way_leaves_a_store_that_works(cache: ArtifactCache) -> None:
    process = multiprocessing.get_context("spawn").Process(target=build_and_die, args=(cache.root,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(leftovers(cache)) == len(FILES), "the kill came too early to test anything"
    assert cache.find(SOURCE) is None
    assert cache.get_or_build(SOURCE, write_files) == cache.find(SOURCE)
    assert leftovers(cache) == []


def build_slowly(root: Path, log: Path) -> Path:
    def build(directory: Path) -> CompileReport:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return write_files(directory)

    return ArtifactCache(root).get_or_build(SOURCE, build).path


def test_of_racing_processes_one_builds_and_all_get_its_result(cache: ArtifactCache, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.starmap(build_slowly, [(cache.root, log)] * 3, chunksize=1)
    assert log.read_text() == "built\n"
    assert set(paths) == {cache.root / "1" / "sm_90a" / SOURCE.key}


def test_a_lock_that_is_never_released_is_an_error_that_names_it(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_cache, "LOCK_TIMEOUT_S", 0.1)
    lock = cache.root / "locks" / f"{SOURCE.key}.lock"
    lock.parent.mkdir(parents=True)
    with filelock.FileLock(lock), pytest.raises(CompileError, match=str(lock)):
        cache.get_or_build(SOURCE, write_files)


@pytest.mark.parametrize("file_bytes", [2000, 9500])
def test_a_full_disk_is_one_clear_error(cache: ArtifactCache, file_bytes: int) -> None:
    # A file-size limit stands in for a full disk: it fails in the same calls. 9500 B let kernel.py through and
    # stop kernel.ptx.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, limit[1]))
    try:
        with pytest.raises(CompileError, match="make room") as caught:
            cache.get_or_build(SOURCE, write_files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(cache.root) in str(caught.value) and "FA4GEN_CACHE_DIR" in str(caught.value)
    assert leftovers(cache) == []
    assert cache.get_or_build(SOURCE, write_files) == cache.find(SOURCE)


def test_a_disk_that_fills_up_at_the_last_write_leaves_nothing(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CompileError, match="No space left on device"):
            cache.get_or_build(SOURCE, write_files)
    assert cache.find(SOURCE) is None and leftovers(cache) == []


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every new file and folder fail as on a read-only file system (permissions do not stop root)."""

    def refuse(path: object, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def apply() -> None:
        for name in ("mkdir", "rename", "replace"):
            monkeypatch.setattr(os, name, refuse)
        monkeypatch.setattr(Path, "mkdir", refuse)
        monkeypatch.setattr(Path, "rename", refuse)

    return apply


def test_a_read_only_store_still_serves_what_it_has(cache: ArtifactCache, read_only: Callable[[], None]) -> None:
    built = cache.get_or_build(SOURCE, write_files)
    read_only()
    assert cache.find(SOURCE) == built
    with pytest.raises(CompileError, match="Read-only file system") as caught:
        cache.get_or_build(replace(SOURCE, opt_level=0), write_files)
    assert str(cache.root) in str(caught.value)


def test_damage_in_a_read_only_store_reads_as_absent(
    cache: ArtifactCache, caplog: pytest.LogCaptureFixture, read_only: Callable[[], None]
) -> None:
    flip_a_bit(cache.get_or_build(SOURCE, write_files).path)
    read_only()
    with caplog.at_level(logging.WARNING, "fa4gen"):
        assert cache.find(SOURCE) is None
    assert "stays there" in caplog.text and "Read-only" in caplog.text


def test_a_root_that_is_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ArtifactCache(tmp_path / "file" / "store")
    assert cache.find(SOURCE) is None
    with pytest.raises(CompileError, match="Not a directory"):
        cache.get_or_build(SOURCE, write_files)
