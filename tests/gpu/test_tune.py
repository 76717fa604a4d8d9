"""A search on the device survives configs that hang or fault: one trial each, once."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import CompilePool
from fa4gen.config import FlashFwdSm90Config
from fa4gen.measure.base import Failure, FailureKind
from fa4gen.measure.cuda import CudaMeasurer
from fa4gen.problem import AttentionProblem
from fa4gen.tune.effort import QUICK
from fa4gen.tune.known_bad import KnownBad
from fa4gen.tune.objective import Bench
from fa4gen.tune.study import Observer, Settings, tune_problem

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

PROBLEM = AttentionProblem.parse("b=2 h=8 s=2048 d=64 causal")
HANGS = FlashFwdSm90Config(tile_m=192, tile_n=96, tile_order="longest_first")
FAULTS = dataclasses.replace(HANGS, tile_n=112)


class Recorder(Observer):
    def __init__(self) -> None:
        self.trials = []

    def on_trial(self, problem, done, total, trial, best_us):
        self.trials.append(trial)


def search(folder, seed: int) -> tuple[FlashFwdSm90Config, Recorder]:
    """A study of its own in ``folder``, with the folder's memory of bad kernels."""
    bench = Bench(
        [CudaMeasurer(timeout_s=4.0, engine="stub_engine:SabotagedEngine")],
        CompilePool(cache=ArtifactCache(folder / "artifacts")),
        KnownBad(folder / "known_bad.json"),
    )
    settings = Settings(dataclasses.replace(QUICK, trials=10), seed=seed, storage=folder / f"study{seed}.journal")
    recorder = Recorder()
    with bench:
        result = tune_problem(PROBLEM, bench, settings, seeds=[HANGS, FAULTS], observer=recorder)
    return result.config, recorder


def test_a_hang_and_a_fault_cost_one_trial_each_and_are_never_tried_again(tmp_path):
    winner, first = search(tmp_path, seed=0)
    failed = {t.config: t.outcome.result.kind for t in first.trials if isinstance(t.outcome.result, Failure)}
    assert failed[HANGS] is FailureKind.TIMEOUT
    assert failed[FAULTS] is FailureKind.CRASHED
    assert len(first.trials) == 10
    assert max(Counter(t.config for t in first.trials).values()) == 1
    assert winner.tile_n not in (96, 112)

    winner, second = search(tmp_path, seed=1)
    tried = {t.config for t in second.trials}
    assert HANGS not in tried and FAULTS not in tried
    assert len(second.trials) == 10
    assert winner.tile_n not in (96, 112)
