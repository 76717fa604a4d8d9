"""Named lists of problems, read from ``search_spaces/presets.yaml``."""

from __future__ import annotations

from pathlib import Path

import pydantic

from fa4gen.errors import UnsupportedProblem, UsageError
from fa4gen.problem import AttentionProblem
from fa4gen.resources import resource_dir
from fa4gen.search_space import read_yaml

__all__ = ["get_preset", "load_presets"]

_Presets = pydantic.RootModel[dict[str, list[str]]]


def load_presets(path: Path | None = None) -> dict[str, tuple[AttentionProblem, ...]]:
    """Preset name -> problems, from ``path`` (default: the shipped file).

    Raises:
        UsageError: unreadable or malformed file, a preset without problems, a bad problem, a problem listed twice.
    """
    path = path or resource_dir("search_spaces") / "presets.yaml"
    return {name: _problems(path, name, lines) for name, lines in read_yaml(path, _Presets).root.items()}


def get_preset(name: str) -> tuple[AttentionProblem, ...]:
    """The problems of the shipped preset ``name``.

    Raises:
        UsageError: unknown name; the message lists the known ones.
    """
    presets = load_presets()
    if name not in presets:
        raise UsageError(f"unknown preset {name!r}; known: {', '.join(presets)}")
    return presets[name]


def _problems(path: Path, name: str, lines: list[str]) -> tuple[AttentionProblem, ...]:
    if not lines:
        raise UsageError(f"{path}: preset {name!r} lists no problem")
    try:
        problems = tuple(AttentionProblem.parse(line) for line in lines)
    except UnsupportedProblem as error:
        raise UsageError(f"{path}: preset {name!r}: {error}") from None
    for index, problem in enumerate(problems):
        if problem in problems[:index]:
            raise UsageError(f"{path}: preset {name!r} lists {str(problem)!r} twice")
    return problems
