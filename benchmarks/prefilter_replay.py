"""How many trials does --prefilter model save? In replay, where the best config is known::

    python benchmarks/prefilter_replay.py --seeds 20

Searches the recorded grid of an H200 with the effort quick, then with half its trials, then with half and the
prefilter. What the timing model predicted for the grid's configs is recorded too (scripts/calibrate_model.py
--predictions): the searches are limited to those configs. Printed a problem: the winner's median over the best
recorded one, over the seeds, and how many trials were measured until a config within 2 % of it was.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import optuna
import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from fa4gen.arch import Device
from fa4gen.config import Config, config_from_dict
from fa4gen.measure.base import Failure, FailureKind, Measurement, Measurer, Source
from fa4gen.measure.replay import ReplayMeasurer
from fa4gen.problem import AttentionProblem
from fa4gen.tune.effort import QUICK
from fa4gen.tune.known_bad import KnownBad
from fa4gen.tune.ledger import TrialRecord
from fa4gen.tune.objective import Bench
from fa4gen.tune.study import Observer, Settings, tune_problem

DATA = Path(__file__).parents[1] / "tests" / "data"
GOAL = 0.02

Predictions = Mapping[AttentionProblem, Mapping[Config, Sequence[float]]]


def load_predictions(path: Path) -> tuple[str, Predictions]:
    """(model, predicted microseconds of each problem's configs)."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    return data["model"], {
        AttentionProblem.parse(problem): {
            config_from_dict(data["family"], dict(zip(data["knobs"], values, strict=True))): times
            for values, times in rows
        }
        for problem, rows in data["predictions"].items()
    }


class RecordedModel(Measurer):
    """Serves recorded predictions."""

    name, needs_artifact, margin = "recorded predictions", False, 0.05

    def __init__(self, predictions: Predictions, device: Device) -> None:
        self._predictions, self._device = predictions, device

    @property
    def device(self) -> Device:
        return self._device

    def measure(self, problem, variant, artifact, *, samples: int = 20) -> Measurement | Failure:  # type: ignore[no-untyped-def]
        times = self._predictions[problem].get(variant.config)
        if times is None:
            return Failure(FailureKind.INFEASIBLE, "not predicted")
        return Measurement(tuple(times), Source.PREDICTED)


class PredictedOnly(ReplayMeasurer):
    """A replay of those configs of the grid that were predicted."""

    def __init__(self, grid: Path, seed: int, predictions: Predictions) -> None:
        super().__init__(grid, seed)
        self._predictions = predictions

    def configs(self, problem: AttentionProblem) -> Collection[Config]:
        return [config for config in super().configs(problem) if config in self._predictions[problem]]


class _Measured(Observer):
    """Keeps the configs that were measured, in order."""

    def __init__(self) -> None:
        self.configs: list[Config] = []

    def on_trial(
        self, problem: AttentionProblem, done: int, total: int, trial: TrialRecord, best_us: float | None
    ) -> None:
        if isinstance(trial.outcome.result, Measurement) and trial.outcome.result.source is Source.MEASURED:
            self.configs.append(trial.config)


def search(
    grid: Path, problem: AttentionProblem, predictions: Predictions, trials: int, prefilter: bool, seed: int
) -> tuple[float, int]:
    """(winner's median over the best - 1, trials until a config within 2 % of it; ``trials`` + 1 if none was)."""
    with tempfile.TemporaryDirectory() as folder:
        known_bad = KnownBad(Path(folder) / "known_bad.json")
        replay = PredictedOnly(grid, seed, predictions)
        model = Bench([RecordedModel(predictions, replay.device)], None, known_bad)
        settings = Settings(
            effort=dataclasses.replace(QUICK, trials=trials),
            seed=seed,
            storage=optuna.storages.InMemoryStorage(),
            prefilter=model if prefilter else None,
        )
        seen = _Measured()
        winner = tune_problem(problem, Bench([replay], None, known_bad), settings, observer=seen).config
    recorded = replay.grid.problems[problem].trials
    medians = {
        c: float(np.median(recorded[c])) for c in replay.configs(problem) if not isinstance(recorded[c], Failure)
    }
    best = min(medians.values())
    near = (number for number, config in enumerate(seen.configs, 1) if medians[config] <= (1 + GOAL) * best)
    return medians[winner] / best - 1, next(near, trials + 1)


def main(
    grid: Annotated[Path, typer.Option(help="Recorded grid.")] = DATA / "demo_grid_h200.json.gz",
    predicted: Annotated[Path, typer.Option(help="Recorded predictions.")] = DATA / "demo_predicted_h200.json.gz",
    seeds: Annotated[int, typer.Option(help="Searches a problem and setting.")] = 20,
) -> None:
    """Prints three lines a problem."""
    model, predictions = load_predictions(predicted)
    columns = ("configs", "measured trials", "prefilter", "mean regret", "worst", f"within {GOAL:.0%}", "median trials")
    table = Table(Column("problem", no_wrap=True), *columns, box=box.SIMPLE, title=f"predicted by {model}")
    for problem, configs in predictions.items():
        for trials, prefilter in ((QUICK.trials, False), (QUICK.trials // 2, False), (QUICK.trials // 2, True)):
            found = [search(grid, problem, predictions, trials, prefilter, seed) for seed in range(seeds)]
            regret, reached = np.array(found).T
            table.add_row(
                str(problem), str(len(configs)), str(trials), "yes" if prefilter else "no", f"{regret.mean():.2%}",
                f"{regret.max():.2%}", f"{np.sum(regret <= GOAL)} of {seeds}", f"{np.median(reached):.0f}",
            )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
