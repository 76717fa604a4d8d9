"""Takes tuned kernels elsewhere: rows as a table file, a kernel as one source file, kernels as a shared library."""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fa4gen.artifact_cache import toolchain_versions
from fa4gen.compile import CompilePool
from fa4gen.config import config_to_dict
from fa4gen.errors import CompileError, Fa4genError, UsageError
from fa4gen.problem import AttentionProblem
from fa4gen.render import render
from fa4gen.tuned_table import Row, TunedTable, TunedTables
from fa4gen.variant import Variant
from fa4gen.workspace import workspace_elements

__all__ = ["LIBRARY", "MANIFEST", "bundle", "export_aot", "export_source", "export_table", "load_aot"]

LIBRARY = "libfa4gen_kernels.so"
MANIFEST = "manifest.json"
_PACKAGE = Path(__file__).resolve().parent

# Appended to a standalone kernel; it uses the names that a rendered kernel defines.
_RUNNER = '''"""Runner: compiles at first use, then launches on torch's current stream."""

import functools
import math

import cutlass.cute as cute
import torch


@functools.cache
def compiled():
    """The kernel as a function of (q, k, v, o, [lse,] [workspace,] softmax_scale, num_sms); compiling takes 2 s."""
    return cute.compile(entry, *fake_arguments(), options=f"--enable-tvm-ffi --gpu-arch {ARCH}")


def attention(q, k, v, softmax_scale=None):
    """q (b, sq, h, HEAD_DIM), k (b, sk, hk, HEAD_DIM), v (b, sk, hk, HEAD_DIM_V) to O (b, sq, h, HEAD_DIM_V).

    CUDA tensors of DTYPE with h = GQA_RATIO * hk; addresses and strides are multiples of 16 bytes and the last
    dimension is contiguous. With RETURN_LSE the result is (O, LSE (b, h, sq) fp32, natural logarithm).
    """
    if q.shape[2] != GQA_RATIO * k.shape[2]:
        raise ValueError(f"this kernel wants {GQA_RATIO} query heads per K/V head, got {q.shape[2]} and {k.shape[2]}")
    b, sq, h, _ = q.shape
    outputs = [q.new_empty(b, sq, h, HEAD_DIM_V)]
    if RETURN_LSE:
        outputs.append(q.new_empty(b, h, sq, dtype=torch.float32))
    if b * sq * k.shape[1] == 0:
        for output, value in zip(outputs, (0.0, -math.inf)):
            output.fill_(value)
    else:
        num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        workspace = [torch.empty(WORKSPACE, dtype=torch.float32, device=q.device)] if WORKSPACE else []
        compiled()(q, k, v, *outputs, *workspace, softmax_scale or HEAD_DIM**-0.5, num_sms)
    return tuple(outputs) if RETURN_LSE else outputs[0]
'''

# The same for a backward.
_BACKWARD_RUNNER = '''"""Runner: compiles at first use, then launches on torch's current stream."""

import functools

import cutlass.cute as cute
import torch


@functools.cache
def compiled():
    """The kernel as a function of (q, k, v, o, do, lse, dq, dk, dv, workspace, softmax_scale, num_sms)."""
    return cute.compile(entry, *fake_arguments(), options=f"--enable-tvm-ffi --gpu-arch {ARCH}")


def attention_backward(q, k, v, o, do, lse, softmax_scale=None):
    """dQ, dK, dV, like q (b, sq, h, HEAD_DIM), k (b, sk, hk, HEAD_DIM), v (b, sk, hk, HEAD_DIM_V).

    o and its gradient do are (b, sq, h, HEAD_DIM_V), lse (b, h, sq) fp32 holds natural logarithms. CUDA tensors of
    DTYPE with h = GQA_RATIO * hk; addresses and strides are multiples of 16 bytes, the last dimension is contiguous.
    """
    if q.shape[2] != GQA_RATIO * k.shape[2]:
        raise ValueError(f"this kernel wants {GQA_RATIO} query heads per K/V head, got {q.shape[2]} and {k.shape[2]}")
    b, sq, h, _ = q.shape
    gradients = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    if b * sq * k.shape[1]:
        elements = WORKSPACE_FIXED + WORKSPACE_OF_BLOCK * b * h * -(-sq // WORKSPACE_QUERIES)
        workspace = torch.empty(elements, dtype=torch.float32, device=q.device)
        num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        compiled()(q, k, v, o, do, lse, *gradients, workspace, softmax_scale or HEAD_DIM**-0.5, num_sms)
    return tuple(gradients)
'''


def export_table(device: str, path: Path, directories: Sequence[Path] | None = None) -> TunedTable:
    """Merges every row that serves the device with key ``device`` on this machine into the file at ``path``.

    Raises:
        TableError: a table cannot be read, or the file not written.
    """
    return TunedTable.update(path, device, TunedTables.load(device, directories).own_rows)


# --- standalone source ------------------------------------------------------------------------------------------------


def export_source(variant: Variant) -> str:
    """One Python file that runs ``variant`` with CuTe DSL and torch alone: ``attention(q, k, v, softmax_scale=None)``,
    or ``attention_backward(q, k, v, o, do, lse, softmax_scale=None)``.

    Raises:
        Fa4genError: two of the modules that it joins define one name differently.
    """
    target = f'"""Target."""\n\nARCH = "{variant.arch}"\n'
    if variant.static.op == "bwd":
        sizes = "".join(f"WORKSPACE_{name.upper()} = {size}\n" for name, size in _workspace_sizes(variant).items())
        return bundle(render(variant), target + sizes, _BACKWARD_RUNNER)
    names = f"RETURN_LSE = {variant.static.return_lse}\nWORKSPACE = {_workspace_sizes(variant)['fixed']}\n"
    return bundle(render(variant), target + names, _RUNNER)


def _workspace_sizes(variant: Variant) -> dict[str, int]:
    """fp32 elements of a kernel's workspace: ``fixed`` and ``of_block`` for each block of ``queries`` of a head."""
    static, queries = variant.static, variant.config.tile_m

    def elements(blocks: int) -> int:
        problem = AttentionProblem(
            1, static.gqa_ratio, 1, blocks * queries, 1, static.head_dim, static.head_dim_v,
            op=static.op, deterministic=static.deterministic,
        )  # fmt: skip
        return workspace_elements(problem, variant.config)

    of_block = (elements(2) - elements(1)) // static.gqa_ratio
    return {"fixed": 2 * elements(1) - elements(2), "of_block": of_block, "queries": queries}


@dataclass
class _Module:
    """A parsed module: what it imports from fa4gen, what from elsewhere, what it defines, and the text left over."""

    name: str
    docstring: str
    text: str
    needs: list[str] = field(default_factory=list)
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    defines: set[str] = field(default_factory=set)


def bundle(source: str, *more: str, load: Callable[[str], str] | None = None) -> str:
    """``source`` with every ``fa4gen`` module that it imports from inlined before it, and ``more`` after it.

    Comments and layout of all modules are kept. ``load`` gives the text of a fa4gen module by its dotted name.

    Raises:
        Fa4genError: an import that cannot be inlined (only ``from fa4gen.x import y`` at top level can), or two
            modules that bind one name to different things.
    """
    load = load or (lambda name: (_PACKAGE.parent / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
    ordered: dict[str, _Module] = {}

    def visit(name: str, text: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise Fa4genError(f"cannot bundle: {' -> '.join((*path, name))} import each other")
        module = _parse(name, text)
        for need in module.needs:
            if need not in ordered:
                visit(need, load(need), (*path, name))
        ordered[name] = module

    visit("kernel", source, ())
    for number, text in enumerate(more):
        visit(f"part {number + 1}", text, ())
    modules = list(ordered.values())
    _check_names(modules)
    kernel = ordered["kernel"]
    parts = [f'"""{kernel.docstring}"""\n', _merged_imports(modules)]
    for module in modules:
        title = module.docstring.partition("\n")[0]
        heading = f"# --- {module.name}: {title}" if module.name.startswith("fa4gen.") else f"# --- {title}"
        parts.append(f"{heading}\n\n{module.text}")
    return "\n\n".join(part.strip("\n") + "\n" for part in parts)


def _parse(name: str, text: str) -> _Module:
    tree = ast.parse(text)
    module = _Module(name, ast.get_docstring(tree, clean=False) or name, "")
    drop: set[int] = set()
    for position, node in enumerate(tree.body):
        documents = position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fa4gen":
            if node.module == "fa4gen" or any(alias.asname for alias in node.names):
                raise Fa4genError(f"cannot bundle {name}: {ast.unparse(node)!r} is not `from fa4gen.x import y`")
            module.needs.append(str(node.module))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module.imports.append(node)
        elif not documents and not _assigns_all(node):
            module.defines |= _bound(node)
            continue
        drop |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Import) and any(alias.name.split(".")[0] == "fa4gen" for alias in inner.names):
            raise Fa4genError(f"cannot bundle {name}: {ast.unparse(inner)!r} is not `from fa4gen.x import y`")
        if isinstance(inner, ast.ImportFrom) and inner not in tree.body and str(inner.module).startswith("fa4gen"):
            raise Fa4genError(f"cannot bundle {name}: {ast.unparse(inner)!r} is not at top level")
    lines = text.splitlines(keepends=True)
    module.text = "".join(line for number, line in enumerate(lines, start=1) if number not in drop).strip("\n") + "\n"
    return module


def _assigns_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _bound(node: ast.stmt) -> set[str]:
    """Names that a top-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _check_names(modules: list[_Module]) -> None:
    owners: dict[str, tuple[str, str]] = {}  # name -> (what it is, where)
    for module in modules:
        bindings = {name: f"{module.name}.{name}" for name in module.defines}
        for node in module.imports:
            source = "" if isinstance(node, ast.Import) else f"{node.module}."
            for alias in node.names:
                bindings[alias.asname or alias.name.partition(".")[0]] = (
                    source + alias.name if alias.asname or source else alias.name.partition(".")[0]
                )
        for name, what in bindings.items():
            if hasattr(builtins, name):
                raise Fa4genError(f"cannot bundle: {what} would hide Python's own {name} from the other modules")
            held = owners.setdefault(name, (what, module.name))
            if held[0] != what:
                raise Fa4genError(f"cannot bundle: {name} is {held[0]} in {held[1]} and {what} in {module.name}")


def _merged_imports(modules: list[_Module]) -> str:
    """One import statement a line, each thing once, the standard library first."""
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for node in (node for module in modules for node in module.imports):
        if isinstance(node, ast.Import):
            plain |= {f"import {ast.unparse(alias)}" for alias in node.names}
        else:
            names.setdefault(str(node.module), set()).update(ast.unparse(alias) for alias in node.names)
    future = [f"from __future__ import {', '.join(sorted(names.pop('__future__')))}"] if "__future__" in names else []
    lines = sorted(plain) + [
        f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items())
    ]
    standard = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    others = [line for line in lines if line not in standard]
    return "\n\n".join("\n".join(group) for group in (future, standard, others) if group)


# --- ahead of time ----------------------------------------------------------------------------------------------------


def export_aot(table: TunedTable, directory: Path, rows: Iterable[Row] | None = None) -> Path:
    """Compiles ``rows`` (default: all) of ``table`` and links them into one shared library beside a manifest.

    ``manifest.json`` lists the kernels (symbol, compile-time problem, config) and the rows (problem, symbol, times).
    :func:`load_aot` reads it back; any program can do the same with ``tvm_ffi.load_module``, once it has loaded the
    libraries that ``cutlass.cute.runtime.find_runtime_libraries`` names. A kernel takes
    (q, k, v, o, [lse,] [workspace,] softmax_scale, num_sms), a backward (q, k, v, o, do, lse, dq, dk, dv, workspace,
    softmax_scale, num_sms); ``workspace`` in the manifest tells the size. Returns the library's path.

    Raises:
        UsageError: there is no row, or no C linker (``cc``).
        CompileError: a row does not compile or the linker fails; the message holds its own.
    """
    chosen = list(table.rows if rows is None else rows)
    if not chosen:
        raise UsageError(f"the table of {table.device} has no row to export")
    linker = shutil.which("cc")
    if linker is None:
        raise UsageError("linking a library needs a C toolchain and there is no `cc` on PATH: install gcc or clang")
    variants = {table.variant(row): None for row in chosen}
    with CompilePool() as pool:
        artifacts = [future.result() for future in [pool.submit(variant) for variant in variants]]
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / LIBRARY
    objects = [str(artifact.object_path) for artifact in artifacts]
    linked = subprocess.run(
        [linker, "-shared", "-o", str(library), *objects, *_runtime_libraries()], capture_output=True, text=True
    )
    if linked.returncode:
        raise CompileError(f"{linker} cannot link {library}: {linked.stderr.strip()}")
    manifest = {
        "schema_version": 1,
        "arch": table.arch.name,
        "device": table.device,
        "library": {"file": LIBRARY, "sha256": hashlib.sha256(library.read_bytes()).hexdigest()},
        "versions": toolchain_versions(),
        "kernels": [
            {"symbol": v.name, "family": v.family.name, "problem": asdict(v.static), "config": config_to_dict(v.config)}
            | ({"workspace": sizes} if sizes["fixed"] or sizes["of_block"] else {})
            for v, sizes in ((v, _workspace_sizes(v)) for v in variants)
        ],
        "rows": [
            {
                "problem": str(row.problem),
                "symbol": table.variant(row).name,
                "median_us": row.median_us,
                "source": row.source.value,
            }
            for row in chosen
        ],
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return library


def load_aot(directory: Path) -> dict[str, Callable[..., None]]:
    """The kernels of an exported library by symbol. Needs tvm-ffi and the DSL's runtime, no compiler and no driver.

    Raises:
        UsageError: the manifest is missing or damaged, or the library is not the one it describes.
    """
    import ctypes

    import tvm_ffi

    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        library = directory / manifest["library"]["file"]
        intact = hashlib.sha256(library.read_bytes()).hexdigest() == manifest["library"]["sha256"]
        symbols = [kernel["symbol"] for kernel in manifest["kernels"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{directory} holds no readable exported library: {error!r}; export it again") from None
    if not intact:
        raise UsageError(f"{library} is not the library that its manifest describes: export it again")
    for path in _runtime_libraries():
        ctypes.CDLL(path)  # found by soname when the library is loaded
    module = tvm_ffi.load_module(str(library))
    return {symbol: module[symbol] for symbol in symbols}


def _runtime_libraries() -> list[str]:
    from cutlass import cute

    libraries: list[str] = cute.runtime.find_runtime_libraries(enable_tvm_ffi=True)
    return libraries
