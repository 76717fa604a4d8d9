"""Artifacts of this test run: compiled once, shared by all emulated tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fa4gen.artifact_cache import Artifact, ArtifactCache
from fa4gen.compile import compile_variant
from fa4gen.config import FlashFwdSm90Config
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

Build = Callable[[str, FlashFwdSm90Config], tuple[Artifact, AttentionProblem]]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles the variant of a problem text and a config."""
    cache = ArtifactCache(Path(tmp_path_factory.mktemp("artifacts")))

    def build(text: str, config: FlashFwdSm90Config) -> tuple[Artifact, AttentionProblem]:
        problem = AttentionProblem.parse(text)
        return compile_variant(Variant.of("sm_90a", problem, config), cache), problem

    return build
