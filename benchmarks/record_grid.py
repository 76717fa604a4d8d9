"""Records the grid that the timing model is calibrated on. On an H200, from the repository root, six minutes::

    python benchmarks/record_grid.py --out tests/data/model_grid_h200.json.gz

Twelve cells: head dims 64, 128 and (192, 128), full and causal, at 1 k and 8 k keys of 32 k tokens. In each the
default, configs one to three knobs away from it, and as many at random, over all knobs of the family; both lengths of a
head dim and mask have the same ones, and so the same kernels. Compiling runs ahead of measuring. The file is saved
after every cell, with the clock (MHz) of every trial in its provenance; a second run goes on where the first stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

import fa4gen
from fa4gen.arch import Arch
from fa4gen.artifact_cache import Artifact, ArtifactCache, toolchain_versions
from fa4gen.compile import CompilePool
from fa4gen.config import Config, get_family
from fa4gen.errors import CompileError
from fa4gen.feasibility import can_implement
from fa4gen.measure.base import Failure, FailureKind, Measurement, Measurer
from fa4gen.measure.replay import Grid
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.tune.objective import slow_code
from fa4gen.variant import Variant

DIMS = ("h=32 {} d=64", "h=16 {} d=128", "h=16 {} d=192 dv=128")
LENGTHS = ("b=32 s=1024", "b=4 s=8192")
SPARE = 1.25  # candidates for each config wanted: ptxas spills or serialises some
NEAR = 0.5  # share of them that are a few knobs off the default
TIMEOUT_S = 10.0

console = Console(stderr=True)


def cells() -> list[list[AttentionProblem]]:
    """One list of lengths for every head dim and mask."""
    masks = ("", " causal")
    return [
        [AttentionProblem.parse(f"{length} {dims.format('')}{mask}") for length in LENGTHS]
        for dims in DIMS
        for mask in masks
    ]


def candidates(problem: AttentionProblem, arch: Arch, count: int, seed: int = 0) -> list[Config]:
    """``count`` different feasible configs, the default first, then near and random ones in turn."""
    space = SearchSpace.load(get_family(problem.op, arch.name))
    rng = np.random.default_rng(seed)
    default = space.default(problem)

    def near() -> Config:
        config = default
        for _ in range(rng.integers(1, 4)):
            moves = space.neighbours(config, problem)
            config = moves[rng.integers(len(moves))]
        return config

    chosen = {default: None}
    while len(chosen) < count:
        config = near() if rng.random() < NEAR else space.sample(rng, problem)
        if can_implement(problem, config, arch) is None:
            chosen[config] = None
    return list(chosen)


class Recorder:
    """Measures cells into ``grid``, ``wanted`` timed configs each, and saves it to ``path`` after each."""

    def __init__(self, grid: Grid, path: Path, measurer: Measurer, pool: CompilePool, wanted: int) -> None:
        self._grid, self._path, self._measurer, self._pool, self._wanted = grid, path, measurer, pool, wanted
        self._compiling: dict[str, Future[Artifact]] = {}

    def run(self, groups: Sequence[Sequence[AttentionProblem]], samples: int, provenance: dict[str, Any]) -> None:
        """Everything is submitted first; the compiler then stays ahead."""
        arch = self._grid.device.arch
        plan = [(problems, candidates(problems[0], arch, round(SPARE * self._wanted))) for problems in groups]
        for problems, configs in plan:
            if any(problem not in self._grid.problems for problem in problems):
                for variant in (Variant.of(arch.name, problems[0], config) for config in configs):
                    self._compiling[variant.digest] = self._pool.submit(variant)
        for problems, configs in plan:
            for problem in problems:
                if problem not in self._grid.problems:
                    self._record(problem, configs, samples, provenance)

    def _record(
        self, problem: AttentionProblem, configs: Sequence[Config], samples: int, provenance: dict[str, Any]
    ) -> None:
        started, results = time.perf_counter(), list(self._trials(problem, configs, samples))
        timed = [result for _, result in results if isinstance(result, Measurement)]
        best = min(timed, key=lambda result: result.median_us)
        clocks = [result.clock_mhz if isinstance(result, Measurement) else None for _, result in results]
        known = {"clock_mhz": best.clock_mhz, "power_w": best.power_w, "clocks_mhz": clocks, **provenance}
        known["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._grid.record(problem, results, known)
        self._grid.save(self._path)
        console.print(
            f"{problem}: {len(timed)} of {len(results)} timed, best {best.median_us:.1f} us, "
            f"{time.perf_counter() - started:.0f} s"
        )

    def _trials(
        self, problem: AttentionProblem, configs: Sequence[Config], samples: int
    ) -> Iterator[tuple[Config, Measurement | Failure]]:
        timed = 0
        for config in configs:
            if timed == self._wanted:
                return
            result = self._trial(problem, config, samples)
            timed += isinstance(result, Measurement)
            yield config, result

    def _trial(self, problem: AttentionProblem, config: Config, samples: int) -> Measurement | Failure:
        variant = Variant.of(self._grid.device.arch.name, problem, config)
        try:
            artifact = self._compiling[variant.digest].result()
        except CompileError as error:
            return Failure(FailureKind.COMPILE, str(error).splitlines()[0][:200])
        return slow_code(artifact) or self._measurer.measure(problem, variant, artifact, samples=samples)


def main(
    out: Annotated[Path, typer.Option(help="Grid file to write, or to go on with.")] = Path(
        "tests/data/model_grid_h200.json.gz"
    ),
    configs: Annotated[int, typer.Option(help="Timed configs a cell.")] = 104,
    samples: Annotated[int, typer.Option(help="Launches a config, at least.")] = 10,
    workers: Annotated[int, typer.Option(help="Compile processes.")] = 15,
    gpu: Annotated[int, typer.Option(help="CUDA device.")] = 0,
    cache: Annotated[Path | None, typer.Option(help="Artifact cache; default: the user's.")] = None,
) -> None:
    """Compiles and measures what is not in the file yet."""
    from fa4gen.measure.cuda import CudaMeasurer, driver_version

    started = time.perf_counter()
    with (
        CompilePool(workers, cache and ArtifactCache(cache)) as pool,
        contextlib.closing(CudaMeasurer(gpu, TIMEOUT_S)) as measurer,
    ):
        device = measurer.device
        grid = Grid.load(out) if out.exists() else Grid(device, get_family("fwd", device.arch.name).name)
        provenance = {
            "measurer": measurer.name,
            "driver": driver_version(),
            "fa4gen": fa4gen.__version__,
            "versions": toolchain_versions(),
        }
        Recorder(grid, out, measurer, pool, configs).run(cells(), samples, provenance)
    console.print(f"{out}: {out.stat().st_size / 1024:.0f} KB after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    typer.run(main)
