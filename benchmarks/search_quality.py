"""How good is the search? Against a recorded grid, where the best config is known::

    python benchmarks/search_quality.py --grid tests/data/model_grid_h200.json.gz --trials 40 --seeds 10

For every problem of the grid: the regret of the winner, its median over the best of all recorded configs, over the
seeds; the share of seeds within 2 %; and the most by which two seeds' winners differ.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from fa4gen.config import get_family
from fa4gen.measure.base import Failure
from fa4gen.measure.replay import Grid, ReplayMeasurer
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.tune.effort import QUICK
from fa4gen.tune.objective import Bench
from fa4gen.tune.study import Settings, tune_problem

GOAL = 0.02


def regrets(grid: Path, problem: AttentionProblem, trials: int, seeds: int, start: bool) -> np.ndarray:
    """(seeds,) of winner's median / best recorded median - 1. ``start``: with the starting points of the space."""
    loaded = Grid.load(grid)
    recorded = loaded.problems[problem].trials
    medians = {config: float(np.median(times)) for config, times in recorded.items() if not isinstance(times, Failure)}
    best = min(medians.values())
    effort = dataclasses.replace(QUICK, trials=trials)
    space = SearchSpace.load(get_family(problem.op, loaded.device.arch.name))
    space = space if start else dataclasses.replace(space, start=())
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder, Bench([ReplayMeasurer(grid)]) as bench:
            settings = Settings(effort=effort, seed=seed, space=space, storage=Path(folder) / "studies.journal")
            found.append(medians[tune_problem(problem, bench, settings).config] / best - 1)
    return np.array(found)


def main(
    grid: Annotated[Path, typer.Option(help="Recorded grid.")] = Path("tests/data/model_grid_h200.json.gz"),
    trials: Annotated[int, typer.Option(help="Trials a search.")] = 40,
    seeds: Annotated[int, typer.Option(help="Searches a problem.")] = 10,
    start: Annotated[bool, typer.Option(help="Try the starting points first; some come from this grid.")] = True,
) -> None:
    """Prints a line a problem."""
    columns = ("configs", "mean regret", "worst", f"within {GOAL:.0%}", "seeds differ by")
    table = Table(Column("problem", no_wrap=True), *columns, box=box.SIMPLE)
    problems = list(Grid.load(grid).problems.items())
    console = Console()
    for problem, recorded in track(problems, "searching", console=Console(stderr=True)):
        found = regrets(grid, problem, trials, seeds, start)
        spread = (1 + found.max()) / (1 + found.min()) - 1
        table.add_row(
            str(problem), str(len(recorded.trials)), f"{found.mean():.2%}", f"{found.max():.2%}",
            f"{np.sum(found <= GOAL)} of {seeds}", f"{spread:.2%}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
