"""Artifacts of this test run: compiled once, shared by all emulated tests."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from fa4gen.artifact_cache import Artifact, ArtifactCache
from fa4gen.compile import compile_variant
from fa4gen.config import Config
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

Build = Callable[..., tuple[Artifact, AttentionProblem]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-sample", action="store_true", help="test_sampled and test_hardware run all, not a few")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    """One for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return ArtifactCache(shared / "artifacts")


@pytest.fixture(scope="session")
def compiled(cache: ArtifactCache) -> Callable[[Variant], Artifact]:
    """Compiles a variant."""
    return lambda variant: compile_variant(variant, cache)


@pytest.fixture(scope="session")
def build(cache: ArtifactCache) -> Build:
    """Compiles the variant of a problem text and a config."""

    def build(text: str, config: Config, arch: str = "sm_90a") -> tuple[Artifact, AttentionProblem]:
        problem = AttentionProblem.parse(text)
        return compile_variant(Variant.of(arch, problem, config), cache), problem

    return build
