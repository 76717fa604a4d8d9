"""Fits the timing model's constants to recorded times and prints how good they are, as in docs/model.md.

Compiles and traces every problem's configs (kept in --work), fits on half of those of the problems named by --fit, and
scores the rest. Needs no GPU; `make calibrate` runs it on the recorded grid that is shipped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np

from fa4gen.artifact_cache import ArtifactCache
from fa4gen.bound import bound
from fa4gen.compile import compile_variant
from fa4gen.config import Config, config_to_dict
from fa4gen.errors import Fa4genError
from fa4gen.measure.base import Failure
from fa4gen.measure.model import ModelMeasurer
from fa4gen.measure.replay import Grid
from fa4gen.problem import AttentionProblem
from fa4gen.timing.calibration import FITTED, Case, choose, clock_line, fit, loss, score
from fa4gen.timing.constants import H200, PRIOR, Constants
from fa4gen.timing.model import ensemble, trace_variant
from fa4gen.timing.simulator import Stuck
from fa4gen.variant import Variant

Cells = dict[AttentionProblem, list[Case]]
DATA = Path(__file__).parents[1] / "tests" / "data"


def traced_file(work: Path, arch: str, job: tuple[AttentionProblem, Config]) -> Path | str:
    """Compiles and traces one variant, or finds it in ``work``: its file, or why there is none."""
    problem, config = job
    variant = Variant.of(arch, problem, config)
    file = work / "traces" / f"{variant.digest}.pickle"
    try:
        if not file.exists():
            artifact = compile_variant(variant, ArtifactCache(work / "artifacts"))
            file.write_bytes(pickle.dumps(trace_variant(artifact, problem, config)))
    except Fa4genError as error:
        return f"left out {variant.name}: {error}"
    return file


def load_cases(grid: Grid, count: int, work: Path, pool: ProcessPoolExecutor) -> Cells:
    """``count`` configs of each problem, compiled and traced; problems that differ in length share kernels."""
    (work / "traces").mkdir(parents=True, exist_ok=True)
    chosen = {problem: choose(recorded, count, random.Random(1)) for problem, recorded in grid.problems.items()}
    jobs = {(problem.static, config): (problem, config) for problem, times in chosen.items() for config in times}
    files = dict(zip(jobs, pool.map(partial(traced_file, work, grid.device.arch.name), jobs.values()), strict=True))
    cells: Cells = {}
    for problem, times in chosen.items():
        for config, measured in times.items():
            file = files[problem.static, config]
            if isinstance(file, str):
                print(file, file=sys.stderr)
            else:
                case = Case(problem, config, measured, pickle.loads(file.read_bytes()))
                cells.setdefault(problem, []).append(case)
    return cells


def clock_points(grid: Grid, counters: Path) -> list[tuple[float, float]]:
    """(tensor core utilisation, GHz) of kernels whose cycles were counted and whose time is in the grid, for another
    batch: the clock they ran at when they were timed, which sensors between launches do not show."""
    points = []
    for kernel in json.loads(counters.read_text())["kernels"]:
        counted, problem = kernel["counters"], AttentionProblem.parse(kernel["problem"])
        cycles = counted["gpc__cycles_elapsed.max"]
        active = counted["sm__cycles_active.sum"] / grid.device.sm_count / cycles
        tensor = counted["sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"] / 100 * active
        for timed, recorded in grid.problems.items():
            if replace(timed, batch=problem.batch) != problem:
                continue
            for config, times in recorded.trials.items():
                known = config_to_dict(config)
                if known | kernel["config"] == known and not isinstance(times, Failure):
                    microseconds = float(np.median(times)) * problem.batch / timed.batch
                    points.append((tensor, cycles / microseconds / 1000))
    return points


def calibrate(grid: Grid, cells: Cells, fitted: list[AttentionProblem], counters: Path, fixed: list[str]) -> Constants:
    """The clock's line first, then the other constants but ``fixed`` on every other config of the ``fitted`` cells."""
    base, slope = clock_line(clock_points(grid, counters))
    start = replace(PRIOR, clock_base=base, clock_slope=slope)
    halves = [cells[problem][::2] for problem in fitted]

    def told(constants: Constants, value: float) -> None:
        print(f"{value:.4f} {constants}", file=sys.stderr)

    def mean_loss(constants: Constants) -> float:
        return fmean(loss(half, grid.device, constants, prior=start) for half in halves)

    return fit(start, mean_loss, [name for name in FITTED if name not in fixed], progress=told)


def predicted_times(grid: Grid, constants: Constants, members: int, case: Case) -> list[float]:
    """Microseconds of an ensemble; none where the simulated kernel deadlocks."""
    try:
        predictions = ensemble(case.traced, case.problem, grid.device, constants, members)
    except Stuck:
        return []
    return [prediction.microseconds for prediction in predictions]


def report(grid: Grid, cells: Cells, fitted: list[AttentionProblem], times: dict[int, list[float]]) -> None:
    """A markdown table: a line a cell, the bound beside the model."""
    print("| cell | configs | model ρ | error | bias | regret | of five | bound ρ | error | regret |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for problem, cases in cells.items():
        parts = {"": cases} if problem not in fitted else {", fitted": cases[::2], ", held out": cases[1::2]}
        for name, part in parts.items():
            part = [case for case in part if times[id(case)]]
            measured = [case.measured_us for case in part]
            model = score([median(times[id(case)]) for case in part], measured)
            limit = score([bound(c.problem, c.config, grid.device).microseconds for c in part], measured)
            print(
                f"| {problem}{name} | {model.configs} | {model.spearman:.2f} | {model.error:.1%} | {model.bias:.2f} | "
                f"{model.regret:.1%} | {model.regret_of_five:.1%} | {limit.spearman:.2f} | {limit.error:.1%} | "
                f"{limit.regret:.1%} |"
            )


def save_predictions(grid: Grid, cells: Cells, times: dict[int, list[float]], path: Path) -> None:
    """For benchmarks/prefilter_replay.py."""
    rows = {
        str(problem): [[list(config_to_dict(c.config).values()), [round(t, 2) for t in times[id(c)]]] for c in cases]
        for problem, cases in cells.items()
    }
    knobs = list(config_to_dict(next(iter(cells.values()))[0].config))
    data = {"model": ModelMeasurer(grid.device).name, "family": grid.family, "knobs": knobs, "predictions": rows}
    path.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, default=DATA / "model_grid_h200.json.gz")
    parser.add_argument("--counters", type=Path, default=DATA / "counters_h200.json", help="for the clock")
    parser.add_argument("--fit", type=AttentionProblem.parse, nargs="+", default=[], help="problems fitted to")
    parser.add_argument("--fixed", nargs="*", default=["smem_factor"], help="constants that stay at their prior")
    parser.add_argument("--configs", type=int, default=1000, help="of each problem, at most")
    parser.add_argument("--members", type=int, default=7, help="of an ensemble")
    parser.add_argument("--work", type=Path, default=Path("build/calibration"))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--score", action="store_true", help="only score the constants that are in the package")
    parser.add_argument("--predictions", type=Path, help="keep the predicted times here")
    options = parser.parse_args()
    grid = Grid.load(options.grid)
    with ProcessPoolExecutor(options.jobs) as pool:
        cells = load_cases(grid, options.configs, options.work, pool)
        started = time.perf_counter()
        constants = H200
        if not options.score:
            constants = calibrate(grid, cells, options.fit, options.counters, options.fixed)
        print(f"# {time.perf_counter() - started:.0f} s; constants {constants.digest}")
        for name, value in asdict(constants).items():
            print(f"{name} = {value}")
        cases = [case for part in cells.values() for case in part]
        run = partial(predicted_times, grid, constants, options.members)
        times = {id(case): found for case, found in zip(cases, pool.map(run, cases, chunksize=4), strict=True)}
    report(grid, cells, options.fit, times)
    if options.predictions is not None:
        save_predictions(grid, cells, times, options.predictions)


if __name__ == "__main__":
    main()
