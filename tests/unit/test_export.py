"""Bundling a kernel with its blocks, and exporting tables."""

from __future__ import annotations

import ast
import json
import textwrap
from datetime import datetime, timezone
from pathlib import Path

import pytest

from fa4gen import export
from fa4gen.arch import get_device
from fa4gen.config import FlashFwdSm90Config, get_family
from fa4gen.errors import Fa4genError, UsageError
from fa4gen.export import bundle, export_source
from fa4gen.problem import AttentionProblem
from fa4gen.tuned_table import Provenance, Row, TunedTable
from fa4gen.variant import Variant
from fa4gen.workspace import workspace_elements

H200 = get_device("h200").key

MODULES = {
    "fa4gen.blocks.low": '''
        """Low block. More text."""

        import math
        from cutlass import Int32

        __all__ = ["half"]

        _TWO = 2  # a comment that stays


        def half(x):
            """x / 2."""
            return x / _TWO + 0 * math.pi
        ''',
    "fa4gen.blocks.middle": '''
        """Middle block."""

        from cutlass import (
            Float32,
            Int32,
        )

        from fa4gen.blocks.low import half


        def quarter(x):
            return half(half(x))
        ''',
}
KERNEL = '''
    """the_kernel

    config: {}
    """

    import math

    from fa4gen.blocks.low import half
    from fa4gen.blocks.middle import quarter

    NAME = "the_kernel"

    VALUE = half(8) + quarter(math.ceil(7.5))
    '''


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def join(kernel: str = KERNEL, *more: str, **changed: str) -> str:
    modules = MODULES | {f"fa4gen.blocks.{name}": text for name, text in changed.items()}
    return bundle(dedent(kernel), *map(dedent, more), load=lambda name: dedent(modules[name]))


def test_bundle_is_one_module_in_dependency_order() -> None:
    text = join()
    tree = ast.parse(text)
    assert "fa4gen" not in {getattr(n, "module", "").split(".")[0] for n in ast.walk(tree) if hasattr(n, "module")}
    assert text.index("def half") < text.index("def quarter") < text.index("VALUE =")
    assert text.count("import math") == text.count("def half") == 1
    assert "from cutlass import Float32, Int32\n" in text
    assert "__all__" not in text
    assert text.startswith('"""the_kernel\n\nconfig: {}\n"""\n')
    assert "# a comment that stays" in text
    assert "# --- fa4gen.blocks.low: Low block. More text." in text


def test_bundle_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, object] = {}
    exec(join().replace("from cutlass import Float32, Int32\n", ""), namespace)
    assert namespace["VALUE"] == 6.0


def test_more_parts_share_the_names() -> None:
    text = join(KERNEL, '"""Part: tells."""\n\nimport functools\n\nTWICE = VALUE * 2\n')
    assert "# --- Part: tells." in text
    assert text.index("import functools") < text.index("def half") < text.index("TWICE")


def test_future_import_comes_first() -> None:
    low = MODULES["fa4gen.blocks.low"].replace("import math", "from __future__ import annotations\n        import math")
    text = join(low=low)
    assert text.index("from __future__") < text.index("import math")
    ast.parse(text)


@pytest.mark.parametrize(
    ("kernel", "changed", "message"),
    [
        ("import fa4gen.blocks.low\n", {}, "is not `from fa4gen.x import y`"),
        ("from fa4gen.blocks.low import half as h\n", {}, "is not `from fa4gen.x import y`"),
        ("from fa4gen import problem\n", {}, "is not `from fa4gen.x import y`"),
        ("def f():\n    from fa4gen.blocks.low import half\n", {}, "not at top level"),
        (KERNEL, {"middle": "from fa4gen.blocks.low import half\n_TWO = 3\ndef quarter(x): ...\n"}, "_TWO is"),
        (KERNEL, {"middle": "import cmath as math\ndef quarter(x): ...\n"}, "math is"),
        (KERNEL, {"middle": "def quarter(x): ...\ndef max(a, b): ...\n"}, "would hide Python's own max"),
        (KERNEL, {"low": "from fa4gen.blocks.middle import quarter\n"}, "import each other"),
    ],
)
def test_what_cannot_be_bundled_is_an_error(kernel: str, changed: dict[str, str], message: str) -> None:
    with pytest.raises(Fa4genError, match=message):
        join(kernel, **changed)


@pytest.mark.parametrize("text", ["b=1 h=8 s=64 d=64", "b=1 h=8 hk=2 s=64 d=128 dv=64 dtype=fp16 causal lse"])
def test_standalone_source_names_all_it_uses(text: str) -> None:
    problem = AttentionProblem.parse(text)
    source = export_source(Variant.of("sm_90a", problem, FlashFwdSm90Config.default(problem)))
    assert source == export_source(Variant.of("sm_90a", problem, FlashFwdSm90Config.default(problem)))
    tree = ast.parse(source)
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert imported <= {"__future__", "functools", "math", "cutlass", "torch"}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"entry", "kernel", "fake_arguments", "attention"} <= functions
    assert f"RETURN_LSE = {problem.return_lse}\n" in source


@pytest.mark.parametrize("flag", ["", " causal deterministic"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_standalone_backward_sizes_its_workspace(arch: str, flag: str) -> None:
    problem = AttentionProblem.parse(f"b=3 h=8 hk=2 sq=333 sk=77 d=64 op=bwd{flag}")
    variant = Variant.of(arch, problem, get_family("bwd", arch).config_type.default(problem))
    source = export_source(variant)
    functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert {"entry", "fake_arguments", "attention_backward"} <= functions
    sizes: dict[str, int] = {}
    exec("\n".join(line for line in source.splitlines() if line.startswith("WORKSPACE_")), sizes)
    blocks = 3 * 8 * -(-333 // sizes["WORKSPACE_QUERIES"])
    elements = sizes["WORKSPACE_FIXED"] + sizes["WORKSPACE_OF_BLOCK"] * blocks
    assert elements == workspace_elements(problem, variant.config)


def test_every_block_can_be_bundled_with_every_other() -> None:
    """Two blocks must not use one module-level name for two things: no variant may then fail to export."""
    blocks = sorted(path.stem for path in (Path(export.__file__).parent / "blocks").glob("[a-z]*.py"))
    assert len(blocks) > 5
    bundle("".join(f"from fa4gen.blocks.{name} import x\n" for name in blocks))


def test_export_table_collects_what_serves_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path / "cache"))
    provenance = Provenance(
        measurer="cuda",
        device="NVIDIA H200",
        samples=9,
        date=datetime(2026, 1, 1, tzinfo=timezone.utc),
        fa4gen="0",
        versions={},
    )

    def row(text: str, median: float) -> Row:
        return Row(
            problem=text,
            family="flash_fwd_sm90",
            config=FlashFwdSm90Config(),
            median_us=median,
            interval_us=(median, median),
            source="measured",
            provenance=provenance,
        )

    user, shipped = tmp_path / "user", tmp_path / "shipped"
    TunedTable(H200, (row("b=1 h=1 s=64 d=64", 1.0),)).save(user / f"{H200}.json")
    TunedTable(H200, (row("b=1 h=1 s=64 d=64", 2.0), row("b=2 h=1 s=64 d=64", 3.0))).save(shipped / f"{H200}.json")
    foreign = "sm_90a-78sm-228kb"
    TunedTable(foreign, (row("b=4 h=1 s=64 d=64", 4.0),)).save(user / f"{foreign}.json")
    table = export.export_table(H200, tmp_path / "out.json", (user, shipped))
    assert [row.median_us for row in table.rows] == [1.0, 3.0]
    assert TunedTable.load(tmp_path / "out.json") == table


def test_aot_needs_rows_and_a_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no row to export"):
        export.export_aot(TunedTable(H200), tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no `cc` on PATH"):
        export.export_aot(TunedTable(H200), tmp_path, [object()])  # type: ignore[list-item]


def test_damaged_aot_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no readable exported library"):
        export.load_aot(tmp_path)
    (tmp_path / export.LIBRARY).write_bytes(b"x")
    manifest = {"library": {"file": export.LIBRARY, "sha256": "0"}, "kernels": []}
    (tmp_path / export.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="not the library that its manifest describes"):
        export.load_aot(tmp_path)
