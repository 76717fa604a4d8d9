"""A random sample of backward problems and configs: compiled anywhere, checked against float64 on a GPU or emulated.

The sample depends on count, seed and target alone, so it can be compiled on one machine and run on another::

    python tests/gpu/backward_sweep.py compile --count 150 --cache DIR
    python tests/gpu/backward_sweep.py run --count 150 --cache DIR
    python tests/gpu/backward_sweep.py emulate --arch sm_100a --count 60

A deterministic case runs twice on the GPU and must give the same bits; emulated, over all schedules.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from accuracy_sweep import Case, compile_all, run_case
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fa4gen import emulator
from fa4gen.accuracy import KINDS, AccuracyReport
from fa4gen.arch import get_arch
from fa4gen.artifact_cache import Artifact, ArtifactCache
from fa4gen.config import get_family
from fa4gen.errors import CompileError
from fa4gen.feasibility import can_implement
from fa4gen.gradients import make_gradient_inputs
from fa4gen.measure.cuda import CudaMeasurer
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant

HEAD_DIMS = (
    *((d, d) for d in (64, 128, 32, 96, 8, 80, 112, 40, 192, 256)),
    *((192, 128), (128, 64), (64, 128), (72, 40)),
)
LENGTHS = (1, 2, 7, 63, 64, 65, 127, 128, 129, 200, 256, 257, 333, 511, 512, 777, 1024, 1500, 2049)
EMULATED_LENGTHS = (1, 7, 64, 65, 127, 129, 200, 257, 300)
EMULATED_SCORES = 150_000  # of all heads: some seconds in the emulator

Outcome = tuple[Case, str, AccuracyReport | str]


def sample(count: int, seed: int = 0, arch: str = "sm_90a", emulated: bool = False) -> list[Case]:
    """Head dims that can run and kinds of inputs in turn, all else at random; one config in eight is the default."""
    rng = np.random.default_rng(seed)
    family, target = get_family("bwd", arch), get_arch(arch)
    space = SearchSpace.load(family)
    dims = [(d, dv) for d, dv in HEAD_DIMS if _runs(AttentionProblem(1, 1, 1, 64, 64, d, dv, op="bwd"), arch)]
    cases: list[Case] = []
    while len(cases) < count:
        i = len(cases)
        problem = _problem(rng, *dims[i % len(dims)], EMULATED_LENGTHS if emulated else LENGTHS)
        if emulated and problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k > EMULATED_SCORES:
            continue
        config = family.config_type.default(problem)
        while i % 8 and can_implement(problem, config := space.sample(rng, problem), target) is not None:
            pass
        kind = KINDS[(i + i // len(dims)) % len(KINDS)]  # each head dim meets every kind
        cases.append(Case(problem, Variant.of(arch, problem, config), kind, seed + i))
    return cases


def _runs(problem: AttentionProblem, arch: str) -> bool:
    """Whether the default can run it, and so whether any config can."""
    default = get_family("bwd", arch).config_type.default(problem)
    return can_implement(problem, default, get_arch(arch)) is None


def _problem(rng: np.random.Generator, head_dim: int, head_dim_v: int, lengths: tuple[int, ...]) -> AttentionProblem:
    seqlen_q, seqlen_k = (lengths[j] for j in rng.integers(len(lengths), size=2))
    heads_kv = int(rng.integers(1, 4))
    return AttentionProblem(
        batch=int(rng.integers(1, 4)),
        heads=heads_kv * (1, 2, 8)[rng.integers(3)],
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if rng.random() < 0.3 else seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=("bf16", "fp16")[rng.integers(2)],
        causal=bool(rng.random() < 0.5),
        op="bwd",
        deterministic=bool(rng.random() < 0.4),
    )


def emulate_case(case: Case, compiled: Artifact | CompileError) -> tuple[str, AccuracyReport | str]:
    """As :func:`accuracy_sweep.run_case`, on the CPU: races are looked for as well."""
    if isinstance(compiled, CompileError):
        return "compile", str(compiled)
    inputs = make_gradient_inputs(case.problem, case.kind, case.seed)
    verdict = emulator.verify(compiled, case.problem, inputs, config=case.variant.config)
    if verdict.ok and verdict.accuracy is not None:
        return "right", verdict.accuracy
    return "wrong", verdict.message


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Count = Annotated[int, typer.Option(help="Cases.")]
Seed = Annotated[int, typer.Option(help="Another seed, another sample.")]
Arch = Annotated[str, typer.Option(help="Target.")]
Cache = Annotated[Path | None, typer.Option(help="Artifact cache; default: the user's.")]
Only = Annotated[list[int] | None, typer.Option(help="Only these cases of the sample, by number. Repeatable.")]


@app.command("compile")
def compile_command(count: Count = 150, seed: Seed = 0, arch: Arch = "sm_90a", cache: Cache = None) -> None:
    """Compiles the sample that ``run`` takes. Needs no GPU."""
    compiled = compile_all(sample(count, seed, arch), cache and ArtifactCache(cache))
    errors = {variant: result for variant, result in compiled.items() if isinstance(result, CompileError)}
    for variant, error in errors.items():
        typer.echo(f"{variant.name}: {error}")
    artifacts = [result for result in compiled.values() if isinstance(result, Artifact)]
    spilling = sum(artifact.meta.spill_store_bytes > 0 for artifact in artifacts)
    seconds = np.median([artifact.meta.compile_seconds for artifact in artifacts])
    typer.echo(f"{len(compiled)} variants, {len(errors)} do not compile, {spilling} spill; {seconds:.2f} s a compile")
    raise typer.Exit(bool(errors))


@app.command("run")
def run_command(
    count: Count = 150, seed: Seed = 0, cache: Cache = None, timeout: float = 20.0, only: Only = None
) -> None:
    """Runs the sample on the GPU and prints outcomes and worst errors. Compiles what the cache lacks."""
    measurer = CudaMeasurer(timeout_s=timeout)
    cases = _chosen(sample(count, seed, measurer.device.arch.name), only)
    compiled = compile_all(cases, cache and ArtifactCache(cache))
    outcomes = [
        _tell(case, *run_case(measurer, case, compiled[case.variant]))
        for case in track(cases, "running", console=Console(stderr=True))
    ]
    measurer.close()
    _finish(outcomes)


@app.command("emulate")
def emulate_command(
    count: Count = 60, seed: Seed = 0, arch: Arch = "sm_100a", cache: Cache = None, only: Only = None
) -> None:
    """Runs a sample of small problems in the emulator, in three schedules. Needs no GPU."""
    cases = _chosen(sample(count, seed, arch, emulated=True), only)
    compiled = compile_all(cases, cache and ArtifactCache(cache))
    outcomes = [
        _tell(case, *emulate_case(case, compiled[case.variant]))
        for case in track(cases, "emulating", console=Console(stderr=True))
    ]
    _finish(outcomes)


def _chosen(cases: list[Case], only: list[int] | None) -> list[Case]:
    return [cases[i] for i in only] if only else cases


def _tell(case: Case, outcome: str, result: AccuracyReport | str) -> Outcome:
    if outcome != "right":
        message = result.message if isinstance(result, AccuracyReport) else result
        typer.echo(f"{outcome}: {case.problem} [{case.kind}, seed {case.seed}] {case.variant.config}\n    {message}")
    return case, outcome, result


def _finish(outcomes: list[Outcome]) -> None:
    """Prints the summary; exit code 1 if anything is not right."""
    table = Table("dtype", "inputs", "outcomes", "deterministic", "worst / limit", "worst rel. error")
    for dtype in ("bf16", "fp16"):
        for kind in (*KINDS, "all"):
            group = [o for o in outcomes if o[0].problem.dtype == dtype and kind in (o[0].kind, "all")]
            reports = [result for _, _, result in group if isinstance(result, AccuracyReport)]
            counts = ", ".join(f"{n} {name}" for name, n in Counter(outcome for _, outcome, _ in group).items())
            deterministic = sum(case.problem.deterministic for case, _, _ in group)
            worst = max((report.worst for report in reports), default=0.0)
            relative = max((report.relative_error for report in reports), default=0.0)
            table.add_row(dtype, kind, counts, str(deterministic), f"{worst:.2f}", f"{relative:.1e}")
    Console().print(table)
    raise typer.Exit(any(outcome != "right" for _, outcome, _ in outcomes))


if __name__ == "__main__":
    app()
