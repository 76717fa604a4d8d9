from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from tiny_kernels import serialized_kernel, spilling_kernel

from fa4gen import sass
from fa4gen.artifact_cache import Artifact, ArtifactCache
from fa4gen.compile import compile_source, compile_variant
from fa4gen.config import FlashFwdSm90Config
from fa4gen.errors import Fa4genError
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    return ArtifactCache(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def flash(cache: ArtifactCache) -> Iterator[Artifact]:
    config = FlashFwdSm90Config(tile_m=128, tile_n=128)
    return compile_variant(Variant.of("sm_90a", AttentionProblem.parse("h=1 s=1 d=64"), config), cache)


def test_a_forward_kernels_mix_follows_from_its_tile(flash: Artifact) -> None:
    report = sass.inspect(flash.cubin_path)
    assert (report.registers, report.stack_bytes) == (flash.meta.registers, flash.meta.stack_bytes)
    # A thread holds 128 * 128 / 256 = 64 scores a step, and there are two steps in the text: the first, and the loop.
    assert report.mix["MUFU.EX2"] >= 128
    assert report.mix["FFMA"] >= 128 and report.mix["FMNMX"] >= 128
    # QK^T takes 64 / 16 and PV 128 / 16 instructions a step.
    assert report.mix["HGMMA"] == 2 * (4 + 8)
    assert report.mix["UTMALDG"] >= 3 and report.mix["WARPGROUP.DEPBAR"] >= 2
    assert report.mix["USETMAXREG.DEALLOC"] == report.mix["USETMAXREG.TRY_ALLOC"] == 1
    assert report.spill_loads == report.spill_stores == 0


def test_every_instruction_is_counted(flash: Artifact) -> None:
    text = sass.disassemble(flash.cubin_path)
    lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", text, re.MULTILINE)
    assert sum(sass.inspect(flash.cubin_path).mix.values()) == len(lines) > 500


def test_spills_and_serialization_show(cache: ArtifactCache) -> None:
    report = sass.inspect(compile_source(spilling_kernel(), cache).cubin_path)
    assert report.registers == 64 and report.stack_bytes > 0
    assert report.spill_loads == report.mix["LDL"] > 0 and report.spill_stores == report.mix["STL"] > 0
    serialized = sass.inspect(compile_source(serialized_kernel(), cache).cubin_path)
    assert serialized.mix["WARPGROUP.DEPBAR"] >= 2, "ptxas adds a wait after each WGMMA"


@pytest.mark.parametrize(
    ("line", "opcode"),
    [
        ("        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT ;", "HGMMA"),
        ("        /*0010*/               @P0 MUFU.EX2 R3, R4 ;", "MUFU.EX2"),
        ("        /*0010*/              @!P6 BRA `(.L_x_1) ;", "BRA"),
        ("        /*0010*/             @!UPT UIADD3 URZ, URZ, URZ, URZ ;", "UIADD3"),
        ("        /*1ffe0*/                  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;", "WARPGROUP.DEPBAR"),
        ("        /*0010*/                   FMNMX.FTZ R1, R2, R3, !PT ;", "FMNMX"),
        ("        /*0010*/                   NOP;", "NOP"),
    ],
)
def test_opcodes(line: str, opcode: str) -> None:
    assert sass.count_opcodes(line) == {opcode: 1}


def test_headers_and_labels_are_no_instructions() -> None:
    assert sass.count_opcodes("\t.target\tsm_90a\n.L_x_1:\n//--- .text.kernel ---\n") == {}


def test_what_is_not_a_cubin_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no")
    for path in (tmp_path / "text", tmp_path / "missing"):
        with pytest.raises(Fa4genError, match=f"cuobjdump cannot read {path}"):
            sass.inspect(path)


def test_a_missing_tool_is_named_with_its_package(flash: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", none_installed)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(Fa4genError, match=r"nvdisasm is neither .* pip install nvidia-cuda-nvdisasm"):
        sass.disassemble(flash.cubin_path)
