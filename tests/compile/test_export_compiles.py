"""An exported kernel is the kernel: same object from the standalone file, and a library that loads with no driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fa4gen.arch import get_device
from fa4gen.artifact_cache import ArtifactCache, KernelSource
from fa4gen.compile import compile_source, compile_variant
from fa4gen.config import FlashFwdSm90Config
from fa4gen.export import MANIFEST, export_aot, export_source, load_aot
from fa4gen.problem import AttentionProblem
from fa4gen.tuned_table import Provenance, Row, TunedTable
from fa4gen.variant import Variant

PROBLEM = AttentionProblem.parse("b=1 h=8 hk=2 s=256 d=64 causal lse")
VARIANT = Variant.of("sm_90a", PROBLEM, FlashFwdSm90Config.default(PROBLEM))

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def test_standalone_source_compiles_to_the_same_code(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    alone = compile_source(KernelSource(VARIANT.name, VARIANT.arch, export_source(VARIANT)), cache)
    assert alone.cubin_path.read_bytes() == compile_variant(VARIANT, cache).cubin_path.read_bytes()


def test_standalone_source_needs_no_fa4gen(tmp_path: Path) -> None:
    (tmp_path / "standalone.py").write_text(export_source(VARIANT))
    code = (
        "import sys; sys.modules['fa4gen'] = None\n"
        "import standalone; f = standalone.compiled(); print(standalone.NAME, callable(f))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [VARIANT.name, "True"]


def test_aot_library_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path / "cache"))
    provenance = Provenance.now(measurer="cuda", device="NVIDIA H200", samples=20)
    rows = tuple(
        Row(
            problem=text,
            family="flash_fwd_sm90",
            config=FlashFwdSm90Config(),
            median_us=1.0,
            interval_us=(1.0, 1.0),
            source="measured",
            provenance=provenance,
        )
        for text in ("b=1 h=8 s=256 d=64", "b=1 h=8 s=512 d=64", "b=1 h=8 s=256 d=64 causal")
    )
    table = TunedTable(get_device("h200").key, rows)
    library = export_aot(table, tmp_path / "out")
    manifest = json.loads((library.parent / MANIFEST).read_text())
    symbols = [kernel["symbol"] for kernel in manifest["kernels"]]
    assert len(symbols) == 2 and {row["symbol"] for row in manifest["rows"]} == set(symbols)
    code = (
        "import sys; from pathlib import Path; from fa4gen.export import load_aot\n"
        "kernels = load_aot(Path(sys.argv[1]))\n"
        "try: next(iter(kernels.values()))(1)\n"
        "except TypeError as error: print(*sorted(kernels), 'Expects 6 parameters' in str(error))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(library.parent)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [*sorted(symbols), "True"]
    assert set(load_aot(library.parent)) == set(symbols)
