"""Every shipped row is measured or marked, resolves to a feasible config, renders, compiles clean."""

from __future__ import annotations

import pytest

from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import CompilePool
from fa4gen.measure.base import Source
from fa4gen.resources import resource_dir
from fa4gen.tune.objective import slow_code
from fa4gen.tuned_table import TunedTable, TunedTables

PATHS = sorted(resource_dir("tuned").glob("*.json"))


def test_there_are_shipped_tables():
    assert PATHS


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_rows_lint_resolve_and_compile(path, tmp_path):
    table = TunedTable.load(path)
    assert table.dumps() == path.read_text(), "not as the table writes itself"
    assert table.lint() == []
    tables = TunedTables.load(table.device, [path.parent])
    for row in table.rows:
        resolution = tables.lookup(row.problem)
        assert resolution.row == row and resolution.config == row.config
        measured = row.provenance.measurer.split()[0] in ("cuda", "replay")  # replay: of a grid recorded on the device
        assert measured == (row.source is Source.MEASURED)
    variants = dict.fromkeys(table.variant(row) for row in table.rows)
    with CompilePool(cache=ArtifactCache(tmp_path)) as pool:
        artifacts = [pool.submit(variant) for variant in variants]
        assert [slow_code(artifact.result()) for artifact in artifacts] == [None] * len(artifacts)
