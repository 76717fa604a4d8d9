"""A standalone source compiles where there is no fa4gen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fa4gen.config import FlashFwdSm90Config
from fa4gen.export import export_source
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant


@pytest.mark.parametrize("text", ["b=1 h=4 hk=2 s=64 d=64 causal lse", "b=1 h=1 s=64 d=128 dtype=fp16"])
def test_standalone_source_needs_no_fa4gen(text: str, tmp_path: Path) -> None:
    problem = AttentionProblem.parse(text)
    path = export_source(Variant.of("sm_90a", problem, FlashFwdSm90Config.default(problem)), tmp_path / "kernel")
    files = [path, *sorted((tmp_path / "kernel" / "blocks").glob("*.py"))]
    assert all("import" not in line for file in files for line in file.read_text().splitlines() if "fa4gen" in line)
    code = "import sys; sys.modules['fa4gen'] = None; import attention; print(callable(attention.compile_kernel()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=path.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "True\n"
