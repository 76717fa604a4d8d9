"""Takes tuned kernels elsewhere: a table with the rows of all folders, or source that runs without fa4gen."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from fa4gen import knobs
from fa4gen.errors import UsageError
from fa4gen.render import environment, render
from fa4gen.resources import resource_dir
from fa4gen.tuned_table import TunedTable
from fa4gen.variant import Variant

__all__ = ["export_source", "export_table"]

_BLOCKS = Path(__file__).resolve().parent / "blocks"
_IMPORT = re.compile(r"^from fa4gen\.blocks\.(\w+) import", re.MULTILINE)


def export_table(device: str, path: Path) -> TunedTable:
    """Merges the shipped and the user's rows of the device with key ``device`` into the table at ``path``.

    Raises:
        UsageError: there are none.
        TableError: a table cannot be read, or ``path`` not written.
    """
    sources = [folder / f"{device}.json" for folder in (resource_dir("tuned"), knobs.tuned_dir())]
    rows = [row for source in sources if source.exists() for row in TunedTable.load(source).rows]
    if not rows:
        raise UsageError(f"no tuned rows for {device} in {' or '.join(str(source.parent) for source in sources)}")
    return TunedTable.update(path, device, rows)


def export_source(variant: Variant, directory: Path) -> Path:
    """Writes ``attention.py``, which runs with CuTe DSL and torch alone, and the blocks it uses beside it.

    Returns the file. Existing files of these names are overwritten.
    """
    source = render(variant)
    pending, blocks = set(_IMPORT.findall(source)), dict[str, str]()
    while pending:
        name = pending.pop()
        blocks[name] = (_BLOCKS / f"{name}.py").read_text(encoding="utf-8")
        pending |= set(_IMPORT.findall(blocks[name])) - blocks.keys()
    (directory / "blocks").mkdir(parents=True, exist_ok=True)
    for name, text in blocks.items():
        (directory / "blocks" / f"{name}.py").write_text(_relocated(text), encoding="utf-8")
    (directory / "blocks" / "__init__.py").write_text("", encoding="utf-8")
    runner = environment().get_template("standalone.py.jinja").render(asdict(variant.static), arch=variant.arch)
    path = directory / "attention.py"
    path.write_text(_relocated(source) + runner, encoding="utf-8")
    return path


def _relocated(text: str) -> str:
    return _IMPORT.sub(r"from blocks.\1 import", text)
