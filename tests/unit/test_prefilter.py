"""The prefilter: what is predicted to be slow is not measured, and half the trials do."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from tune_fakes import PROBLEM, FakeMeasurer, Landscape

from fa4gen.config import FAMILIES, FlashFwdSm90Config
from fa4gen.measure.base import FailureKind
from fa4gen.search_space import SearchSpace
from fa4gen.tune.effort import QUICK
from fa4gen.tune.known_bad import KnownBad
from fa4gen.tune.objective import Bench
from fa4gen.tune.proposer import Proposer
from fa4gen.tune.study import KEPT, POOL, Settings, tune_problem

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "prefilter_replay.py"
LANDSCAPE = Landscape(3)
DEFAULT = FlashFwdSm90Config.default(PROBLEM)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("prefilter_replay", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["prefilter_replay"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(known_bad: KnownBad, **options) -> tuple[FakeMeasurer, Bench]:
    measurer = FakeMeasurer(lambda config: 1.1 * LANDSCAPE(config), noise=0.0, **options)
    measurer.name = "a model"
    return measurer, Bench([measurer], None, known_bad)


def tune(tmp_path: Path, trials: int = 8, **options):
    """(configs measured, predictor, result)."""
    known_bad = KnownBad(tmp_path / "known_bad.json")
    predictor, prefilter = model(known_bad, **options)
    measurer = FakeMeasurer(LANDSCAPE)
    settings = Settings(
        effort=replace(QUICK, trials=trials, max_rounds=5),
        storage=optuna.storages.InMemoryStorage(),
        prefilter=prefilter,
    )
    result = tune_problem(PROBLEM, Bench([measurer], None, known_bad), settings)
    return list(dict.fromkeys(measurer.measured)), predictor, result


def test_only_the_better_predicted_are_measured(tmp_path: Path) -> None:
    measured, predictor, result = tune(tmp_path)
    predicted = sorted(dict.fromkeys(predictor.measured), key=LANDSCAPE)
    assert len(predicted) == POOL * 8 and len(measured) == 8
    kept = predicted[: round(KEPT * len(predicted))]
    assert set(measured) - {DEFAULT} <= set(kept) and measured[0] == DEFAULT
    assert predicted[0] in measured[:3], "the fastest first, after the default and what the space starts from"
    assert result.provenance["prefilter"] == "a model" and result.config in measured


def test_a_config_without_prediction_is_not_measured_but_the_default_is(tmp_path: Path) -> None:
    measured, _, _ = tune(tmp_path, failures=lambda c: FailureKind.INFEASIBLE if c.kv_stages == 2 else None)
    assert all(config.kv_stages != 2 for config in measured if config != DEFAULT) and DEFAULT in measured


def test_the_search_learns_where_predictions_are_off() -> None:
    """One value of a knob is 30 % slower than predicted: it is avoided once that was seen."""
    configs = [replace(DEFAULT, tile_n=n, kv_stages=k) for n in (48, 64, 80, 96, 112) for k in (2, 3)]
    predicted = {config: 100.0 + (5 if config.kv_stages == 2 else 0) + i for i, config in enumerate(configs)}
    truth = {config: us * (1.3 if config.kv_stages == 3 else 1.0) for config, us in predicted.items()}
    space = SearchSpace.load(FAMILIES["flash_fwd_sm90"])
    proposer = Proposer(space, PROBLEM, lambda config: True, configs, 0, predicted)
    times: dict = {}
    while (config := proposer.propose(times)) is not None:
        times[config] = truth[config]
    order = [config.kv_stages for config in times]
    assert set(times) == set(configs)
    assert order[4:8].count(2) >= 2 and order[-1] == 3


@pytest.mark.parametrize("seed", range(2))
def test_half_the_trials_come_within_two_percent_in_replay(script, seed: int) -> None:
    """Of the figures in docs/model.md, the cell that gains most."""
    name, predictions = script.load_predictions(script.DATA / "demo_predicted_h200.json.gz")
    assert name.startswith("timing model")
    problem = next(p for p in predictions if p.head_dim == 64 and not p.causal)
    grid = script.DATA / "demo_grid_h200.json.gz"
    regret, reached = script.search(grid, problem, predictions, QUICK.trials // 2, True, seed)
    assert regret <= 0.02 and reached <= QUICK.trials // 2
