"""A synthetic landscape, a measurer of it and a compiler that compiles nothing, for tests of the search."""

from __future__ import annotations

import functools
import math
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fa4gen.arch import get_device
from fa4gen.artifact_cache import Artifact, ArtifactMeta
from fa4gen.errors import CompileError
from fa4gen.measure.base import Failure, FailureKind, Measurement, Measurer
from fa4gen.problem import AttentionProblem

H200 = get_device("h200")
PROBLEM = AttentionProblem.parse("b=8 h=16 s=4096 d=128 causal")


class Landscape:
    """Noise-free time of a config: smooth in the tile, a few percent for every other choice and for some pairs."""

    PAIRS = (("tile_m", "tile_n"), ("tile_n", "intra_wg_overlap"), ("tile_m", "schedule"), ("persistent", "tile_order"))

    def __init__(self, seed: int, best_tile: tuple[int, int] = (128, 160)) -> None:
        self._seed = seed
        self._best_tile = best_tile
        self._effect = functools.cache(self._deviate)

    def _deviate(self, *key: object) -> float:
        """A standard normal deviate for ``key``."""
        return np.random.default_rng([self._seed, zlib.crc32(repr(key).encode())]).normal()

    def __call__(self, config: object) -> float:
        knobs = asdict(config)
        tile_m, tile_n = self._best_tile
        log_time = 0.1 * math.log2(knobs["tile_m"] / tile_m) ** 2 + 0.1 * math.log2(knobs["tile_n"] / tile_n) ** 2
        log_time += sum(0.01 * self._effect(n, v) for n, v in knobs.items() if n not in ("tile_m", "tile_n"))
        log_time += sum(0.005 * self._effect(a, b, knobs[a], knobs[b]) for a, b in self.PAIRS)
        return 1000 * math.exp(log_time)


class FakeMeasurer(Measurer):
    """Times from ``time_of`` with relative normal noise; ``failures`` says which configs fail. Keeps a log."""

    name = "fake"

    def __init__(
        self,
        time_of: Callable[[object], float],
        *,
        failures: Callable[[object], FailureKind | None] = lambda config: None,
        noise: float = 0.01,
        delay_s: float = 0.0,
        needs_artifact: bool = False,
        log: Path | None = None,
    ) -> None:
        self.time_of = time_of
        self.failures = failures
        self.noise = noise
        self.delay_s = delay_s
        self.needs_artifact = needs_artifact
        self.log = log
        self.measured: list[object] = []
        self.closed = 0

    @property
    def device(self):
        return H200

    def measure(self, problem, variant, artifact, *, samples=20):
        assert (artifact is not None) == self.needs_artifact
        time.sleep(self.delay_s)
        self.measured.append(variant.config)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{variant.digest} {samples}\n")
        kind = self.failures(variant.config)
        if kind is not None:
            return Failure(kind, f"a {kind.value} of the fake")
        # The n-th measurement of a config is the same in every process: a resumed search can equal an undisturbed one.
        rng = np.random.default_rng([int(variant.digest, 16), self.measured.count(variant.config)])
        times = self.time_of(variant.config) * np.exp(rng.normal(0, self.noise, samples))
        return Measurement(tuple(times.tolist()), clock_mhz=1500.0, power_w=600.0)

    def close(self):
        self.closed += 1


class FakeCompiler:
    """Artifacts whose facts ``facts(config)`` may change; raises CompileError where it says "error"."""

    def __init__(self, facts: Callable[[object], dict] = lambda config: {}) -> None:
        self.facts = facts
        self.submitted: list[object] = []
        self.closed: list[bool] = []

    def submit(self, variant):
        self.submitted.append(variant.config)
        future: Future[Artifact] = Future()
        facts = self.facts(variant.config)
        if "error" in facts:
            future.set_exception(CompileError(facts["error"]))
        else:
            future.set_result(artifact(variant, **facts))
        return future

    def close(self, *, drop=False):
        self.closed.append(drop)


def artifact(variant, **facts) -> Artifact:
    """An artifact without files."""
    known = {
        "registers": 168,
        "stack_bytes": 0,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "wgmma_serialized": False,
        "smem_bytes": 100_000,
    }
    meta = ArtifactMeta(
        **(known | facts),
        remarks=[],
        compile_seconds=1.0,
        phase_seconds={},
        schema=1,
        name=variant.name,
        arch=variant.arch,
        options="",
        versions={},
        files={},
    )
    return Artifact(Path("nowhere"), variant.name, variant.digest, variant.arch, meta)
