"""The wheel holds the package and its three data folders."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from fa4gen.config import FAMILIES
from fa4gen.resources import resource_dir

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a freshly built wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(directory), versions=["standard"])
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_the_package_and_nothing_beside_it(members: set[str]) -> None:
    assert "fa4gen/cli.py" in members and "fa4gen/blocks/exp2_coefficients.py" in members
    assert {name.split("/")[0] for name in members} == {"fa4gen", "fa4gen-0.1.0.dist-info"}


@pytest.mark.parametrize("folder", ["templates", "search_spaces", "tuned"])
def test_wheel_holds_every_data_file(members: set[str], folder: str) -> None:
    files = [path for path in resource_dir(folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert files
    for path in files:
        assert f"fa4gen/_data/{folder}/{path.relative_to(ROOT / folder)}" in members


def test_every_family_has_its_files() -> None:
    for family in FAMILIES.values():
        assert (resource_dir("templates") / family.template).is_file()
        assert (resource_dir("search_spaces") / family.search_space).is_file()
