"""A random sample of problems and configs, compiled anywhere, run on a GPU, checked against float64.

The sample depends on the count and the seed alone, so it can be compiled on one machine and run on another::

    python tests/gpu/accuracy_sweep.py compile --count 200 --cache DIR
    python tests/gpu/accuracy_sweep.py run --count 200 --cache DIR
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fa4gen.accuracy import KINDS, AccuracyReport
from fa4gen.arch import get_arch
from fa4gen.artifact_cache import Artifact, ArtifactCache
from fa4gen.compile import CompilePool
from fa4gen.config import get_family
from fa4gen.errors import CompileError
from fa4gen.feasibility import can_implement
from fa4gen.measure.base import Failure
from fa4gen.measure.cuda import CudaMeasurer
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant

ARCH = "sm_90a"
HEAD_DIMS = (
    *((d, d) for d in (8, 16, 24, 40, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256)),
    *((192, 128), (64, 128), (128, 64), (72, 40)),
)
LENGTHS = (1, 2, 7, 63, 64, 65, 127, 128, 129, 200, 256, 257, 333, 511, 512, 777, 1024, 1500, 2049, 4097)


@dataclass(frozen=True)
class Case:
    """One kernel, one problem, one kind of inputs."""

    problem: AttentionProblem
    variant: Variant
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.variant.name}-{str(self.problem).replace(' ', '_')}"


def sample(count: int, seed: int = 0) -> list[Case]:
    """Head dims and kinds of inputs in turn, all else at random; one config in eight is the family's default."""
    rng = np.random.default_rng(seed)
    family, arch = get_family("fwd", ARCH), get_arch(ARCH)
    space = SearchSpace.load(family)
    cases = []
    for i in range(count):
        head_dim, head_dim_v = HEAD_DIMS[i % len(HEAD_DIMS)]
        seqlen_q, seqlen_k = (LENGTHS[j] for j in rng.integers(len(LENGTHS), size=2))
        heads_kv = int(rng.integers(1, 4))
        problem = AttentionProblem(
            batch=int(rng.integers(1, 4)),
            heads=heads_kv * (1, 2, 8)[rng.integers(3)],
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_q if rng.random() < 0.3 else seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=("bf16", "fp16")[rng.integers(2)],
            causal=bool(rng.random() < 0.5),
            return_lse=bool(rng.random() < 0.7),
        )
        config = family.config_type.default(problem)
        while i % 8 and can_implement(problem, config := space.sample(rng, problem), arch) is not None:
            pass
        kind = KINDS[(i + i // len(HEAD_DIMS)) % len(KINDS)]  # each head dim meets every kind
        cases.append(Case(problem, Variant.of(ARCH, problem, config), kind, seed + i))
    return cases


def compile_all(cases: list[Case], cache: ArtifactCache | None = None) -> dict[Variant, Artifact | CompileError]:
    """Every variant's artifact, or why it has none."""
    with CompilePool(cache=cache) as pool:
        futures = {variant: pool.submit(variant) for variant in dict.fromkeys(case.variant for case in cases)}
        results: dict[Variant, Artifact | CompileError] = {}
        for variant, future in track(futures.items(), "compiling", console=Console(stderr=True), total=len(futures)):
            try:
                results[variant] = future.result()
            except CompileError as error:
                results[variant] = error
    return results


def run_case(measurer: CudaMeasurer, case: Case, compiled: Artifact | CompileError) -> tuple[str, AccuracyReport | str]:
    """Outcome ("right", "wrong", or the kind of failure) and the report or the failure's message."""
    if isinstance(compiled, CompileError):
        return "compile", str(compiled)
    result = measurer.verify(case.problem, compiled, case.kind, case.seed, case.variant.config)
    if isinstance(result, Failure):
        return result.kind.value, result.message
    return ("right" if result.ok else "wrong"), result


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Count = Annotated[int, typer.Option(help="Cases.")]
Seed = Annotated[int, typer.Option(help="Another seed, another sample.")]
Cache = Annotated[Path | None, typer.Option(help="Artifact cache; default: the user's.")]


@app.command("compile")
def compile_command(count: Count = 200, seed: Seed = 0, cache: Cache = None) -> None:
    """Compiles the sample. Needs no GPU."""
    compiled = compile_all(sample(count, seed), cache and ArtifactCache(cache))
    errors = {variant: result for variant, result in compiled.items() if isinstance(result, CompileError)}
    for variant, error in errors.items():
        typer.echo(f"{variant.name}: {error}")
    seconds = [a.meta.compile_seconds for a in compiled.values() if isinstance(a, Artifact)]
    typer.echo(f"{len(compiled)} variants, {len(errors)} do not compile; median {np.median(seconds):.2f} s a compile")
    raise typer.Exit(bool(errors))


@app.command("run")
def run_command(count: Count = 200, seed: Seed = 0, cache: Cache = None, timeout: float = 10.0) -> None:
    """Runs the sample on the GPU and prints outcomes and worst errors. Compiles what the cache lacks."""
    cases = sample(count, seed)
    compiled = compile_all(cases, cache and ArtifactCache(cache))
    measurer = CudaMeasurer(timeout_s=timeout)
    outcomes = []
    for case in track(cases, "running", console=Console(stderr=True)):
        outcome, result = run_case(measurer, case, compiled[case.variant])
        outcomes.append((case, outcome, result))
        if outcome != "right":
            typer.echo(f"{outcome}: {case.problem} [{case.kind}, seed {case.seed}] {case.variant.config}\n    {result}")
    measurer.close()
    Console().print(_summary(outcomes))
    raise typer.Exit(any(outcome != "right" for _, outcome, _ in outcomes))


def _summary(outcomes: list[tuple[Case, str, AccuracyReport | str]]) -> Table:
    table = Table("dtype", "inputs", "outcomes", "worst O / limit", "worst LSE / limit", "worst rel. error")
    for dtype in ("bf16", "fp16"):
        for kind in (*KINDS, "all"):
            group = [o for o in outcomes if o[0].problem.dtype == dtype and kind in (o[0].kind, "all")]
            reports = [result for _, _, result in group if isinstance(result, AccuracyReport)]
            counts = ", ".join(f"{n} {name}" for name, n in Counter(outcome for _, outcome, _ in group).items())
            worst = (max((getattr(r, f) for r in reports), default=0.0) for f in ("worst", "worst_lse"))
            relative = max((r.relative_error for r in reports), default=0.0)
            table.add_row(dtype, kind, counts, *(f"{w:.2f}" for w in worst), f"{relative:.1e}")
    return table


if __name__ == "__main__":
    app()
