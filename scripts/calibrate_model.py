"""Fits the timing model's constants to recorded times and prints how good they are, as in docs/model.md.

Compiles and traces a sample of every problem's configs (kept in --work), fits on half of those of the problems named
by --fit, and scores the rest. Needs no GPU; `make calibrate` runs it on the recorded grid that is shipped.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median

from fa4gen.artifact_cache import ArtifactCache
from fa4gen.bound import bound
from fa4gen.compile import compile_variant
from fa4gen.config import Config
from fa4gen.errors import Fa4genError
from fa4gen.measure.replay import Grid
from fa4gen.problem import AttentionProblem
from fa4gen.timing.calibration import Case, choose, clock_line, fit, loss, score
from fa4gen.timing.constants import H200, PRIOR, Constants
from fa4gen.timing.model import ensemble, predict, trace_variant
from fa4gen.variant import Variant

Times = dict[Config, float]


def samples(grid: Grid, count: int, unseen: int) -> dict[AttentionProblem, Times]:
    """``count`` configs of each problem; or, if ``unseen``, so many at random of those that are not among them."""
    rng = random.Random(1)
    chosen = {problem: choose(recorded, count, rng) for problem, recorded in grid.problems.items()}
    if not unseen:
        return chosen
    rng = random.Random(2)
    rest = {}
    for problem, recorded in grid.problems.items():
        times = choose(recorded, len(recorded.trials), random.Random(0))
        others = [c for c in recorded.trials if c in times and c not in chosen[problem]]
        rest[problem] = {config: times[config] for config in rng.sample(others, unseen)}
    return rest


def load_cases(grid: Grid, chosen: dict[AttentionProblem, Times], work: Path) -> dict[AttentionProblem, list[Case]]:
    """Compiles and traces the ``chosen`` configs, or takes them from an earlier run's folder."""
    artifacts = ArtifactCache(work / "artifacts")
    (work / "traces").mkdir(parents=True, exist_ok=True)
    cells: dict[AttentionProblem, list[Case]] = {}
    for problem, times in chosen.items():
        for config, measured in times.items():
            variant = Variant.of(grid.device.arch.name, problem, config)
            file = work / "traces" / f"{variant.digest}.pickle"
            try:
                if not file.exists():
                    file.write_bytes(pickle.dumps(trace_variant(compile_variant(variant, artifacts), problem, config)))
            except Fa4genError as error:
                print(f"left out {variant.name}: {error}", file=sys.stderr)
                continue
            case = Case(problem, config, measured, pickle.loads(file.read_bytes()))
            cells.setdefault(problem, []).append(case)
        print(f"{problem}: {len(cells[problem])} configs", file=sys.stderr)
    return cells


def calibrate(grid: Grid, cells: dict[AttentionProblem, list[Case]], fitted: list[AttentionProblem]) -> Constants:
    """The clock's line first, then the other constants on every other config of the ``fitted`` cells."""
    winners = []
    for problem, cases in cells.items():
        clock = grid.problems[problem].provenance.get("clock_mhz")
        winners += [(min(cases, key=lambda c: c.measured_us), clock)] if clock else []
    base, slope = clock_line(winners, grid.device)
    start = replace(PRIOR, clock_base=base, clock_slope=slope)
    halves = [cells[problem][::2] for problem in fitted]
    return fit(start, lambda constants: fmean(loss(half, grid.device, constants, prior=start) for half in halves))


def report(
    grid: Grid, cells: dict[AttentionProblem, list[Case]], fitted: list[AttentionProblem], constants: Constants
) -> None:
    """One line a cell and model."""
    for problem, cases in cells.items():
        parts = {"": cases} if problem not in fitted else {", fitted": cases[::2], ", held out": cases[1::2]}
        for name, part in parts.items():
            measured = [case.measured_us for case in part]
            models = {
                "bound": [bound(c.problem, c.config, grid.device).microseconds for c in part],
                "model": [predict(c.traced, c.problem, grid.device, constants).microseconds for c in part],
                "ensemble": [
                    median(p.microseconds for p in ensemble(c.traced, c.problem, grid.device, constants)) for c in part
                ],
            }
            print(f"{problem}{name}")
            for model, predicted in models.items():
                print(f"  {model:9s}{score(predicted, measured)}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, required=True)
    parser.add_argument("--fit", type=AttentionProblem.parse, required=True, nargs="+", help="problems fitted to")
    parser.add_argument("--configs", type=int, default=40, help="of each problem")
    parser.add_argument("--work", type=Path, default=Path("build/calibration"))
    parser.add_argument("--score", action="store_true", help="only score the constants that are in the package")
    parser.add_argument("--unseen", type=int, default=0, help="only score, so many configs outside the sample")
    options = parser.parse_args()
    grid = Grid.load(options.grid)
    cells = load_cases(grid, samples(grid, options.configs, options.unseen), options.work)
    started = time.perf_counter()
    constants = H200 if options.score or options.unseen else calibrate(grid, cells, options.fit)
    print(f"# {time.perf_counter() - started:.0f} s; constants {constants.digest}")
    for name, value in asdict(constants).items():
        print(f"{name} = {value}")
    report(grid, cells, [] if options.unseen else options.fit, constants)


if __name__ == "__main__":
    main()
