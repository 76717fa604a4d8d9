"""Imports point one way, and ``import fa4gen`` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fa4gen"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own layer and from those above it in this list.
LAYERS = (
    ("errors",),
    ("knobs", "resources"),
    ("problem", "arch", "config", "variant"),
    ("feasibility", "workspace", "bound", "search_space", "presets"),
    ("render", "artifact_cache", "compile", "sass"),
    ("accuracy", "gradients", "case", "emulator", "measure", "timing"),
    ("tune",),
    ("tuned_table",),
    ("dispatch",),
    ("autograd", "interface"),
    ("export", "bench"),
    ("cli", "console", "doctor", "progress"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
EXCEPTIONS = {("tune", "tuned_table")}  # the search returns rows
CUDA = {"measure/cuda.py", "measure/peers.py", "dispatch.py", "interface.py", "bench.py"}
# Imported by rendered kernels, besides each other, and by nobody else on the host.
BLOCKS = "blocks"


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "fa4gen")


def targets(path: Path) -> set[str]:
    """The fa4gen layers that a module imports, anywhere in it."""
    names = [name.split(".") for name in imports(ast.parse(path.read_text()))]
    return {parts[1] for parts in names if parts[0] == "fa4gen" and len(parts) > 1}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        return
    if layer == BLOCKS:
        assert targets(path) <= {BLOCKS}
        return
    assert layer in RANK, f"{name_of(path)} is in no layer"
    for target in targets(path):
        assert RANK[target] <= RANK[layer] or (layer, target) in EXCEPTIONS, f"{layer} imports {target}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_named_modules_touch_cuda(path: Path) -> None:
    tree = ast.parse(path.read_text())
    touches = any(name == "torch.cuda" or name.startswith("torch.cuda.") for name in imports(tree)) or any(
        isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(tree)
    )
    assert not touches or name_of(path) in CUDA


def test_import_is_light() -> None:
    code = "import sys, fa4gen; print([m for m in ('torch', 'cutlass', 'optuna', 'numpy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module", ["fa4gen.tune", "fa4gen.measure", "fa4gen.cli", "fa4gen.bound", "fa4gen.feasibility"]
)
def test_host_modules_load_neither_torch_nor_the_dsl(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'cutlass') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
