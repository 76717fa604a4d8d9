"""The command line: parses arguments and prints. Exit codes: 0 done, 1 failure, 2 bad input, 130 Ctrl-C."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.markup import escape
from rich.text import Text
from typer.core import TyperGroup

from fa4gen import knobs
from fa4gen.arch import DEVICES, Device, get_arch, get_device
from fa4gen.bound import bound
from fa4gen.config import Config, config_from_dict, config_to_dict, get_family
from fa4gen.console import (
    bench_summary,
    bench_table,
    bound_table,
    changes_text,
    config_text,
    diff_text,
    emulation_facts,
    err,
    facts,
    grid,
    instruction_table,
    note,
    out,
    row_facts,
    simulation_facts,
    timed,
    timeline_view,
    us,
    winners_table,
)
from fa4gen.errors import CompileError, Fa4genError, InfeasibleConfig, NoDeviceError, UnsupportedProblem, UsageError
from fa4gen.feasibility import can_implement
from fa4gen.problem import AttentionProblem
from fa4gen.resources import resource_dir
from fa4gen.variant import Variant

if TYPE_CHECKING:
    from fa4gen.artifact_cache import Artifact
    from fa4gen.measure.base import Measurer
    from fa4gen.tune.objective import Bench
    from fa4gen.tune.result import TuneResult
    from fa4gen.tune.study import Settings
    from fa4gen.tuned_table import Resolution, TunedTable, TunedTables

__all__ = ["app", "main"]

MIX_ROWS = 20


class _Group(TyperGroup):
    """Turns errors into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            err.print("[yellow]interrupted[/]: everything finished is saved")
            raise typer.Exit(130) from None
        except (Fa4genError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(getattr(error, "exit_code", 1)) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Generates, compiles, verifies and tunes attention kernels.",
)
table_app = typer.Typer(no_args_is_help=True, help="Tuned tables: lint, diff, merge, explain.")
app.add_typer(table_app, name="table")

ProblemText = Annotated[str, typer.Argument(metavar="PROBLEM", help='For example "b=2 h=16 s=4096 d=128 causal".')]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="h200, b200, … or a device key. Default: the current GPU, else h200.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="Overrides a knob of the config. Repeatable.")
]
TableFile = Annotated[Path | None, typer.Option("--table", help="Look up here, not in the user's and shipped tables.")]

Gpu = Annotated[int, typer.Option("--gpu", help="CUDA device index.")]


class OpName(str, Enum):
    """What a kernel computes."""

    FWD = "fwd"
    BWD = "bwd"


Op = Annotated[
    OpName | None,
    typer.Option("--op", help="Run the problems as this op, those of a preset too. Default: as they say."),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Run backward problems with the same bits at every launch.")
]


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    """Options before the verb."""


def main() -> None:
    """Entry point of the ``fa4gen`` command."""
    app(prog_name="fa4gen")


# --- what to look at --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Selection:
    """A problem, a device, and the config that a verb works on."""

    problem: AttentionProblem
    device: Device
    config: Config
    resolution: Resolution

    @property
    def variant(self) -> Variant:
        return Variant.of(self.device.arch.name, self.problem, self.config)


def _select(text: str, device: Device, table: Path | None, overrides: list[str] | None) -> _Selection:
    """What would run for a problem, with ``overrides`` ("tile_n=96") on top.

    Raises:
        UsageError: a bad problem, table or knob; a config that cannot run.
    """
    problem = AttentionProblem.parse(text)
    resolution = _tables(device, table).lookup(problem)
    chosen = _Selection(problem, device, resolution.config, resolution)
    return _changed(chosen, overrides) if overrides else chosen


def _changed(chosen: _Selection, overrides: list[str], option: str = "--set") -> _Selection:
    """``chosen`` with ``overrides`` on top. Raises what :func:`_select` raises for them."""
    problem, arch = chosen.problem, chosen.device.arch
    config = _override(chosen.config, overrides, get_family(problem.op, arch.name).name, option)
    rejection = can_implement(problem, config, arch)
    if rejection:
        raise InfeasibleConfig(str(rejection))
    return replace(chosen, config=config)


def _device(name: str | None) -> Device:
    """The device called ``name``; without a name the current GPU, and where there is none the H200."""
    if name:
        return get_device(name)
    from fa4gen.measure.cuda import current_device

    try:
        return current_device(0)
    except NoDeviceError:
        note("no GPU here, so this is for the H200; --device names another")
        return get_device("h200")


def _tables(device: Device, table: Path | None) -> TunedTables:
    from fa4gen.tuned_table import TunedTable, TunedTables

    if table is None:
        return TunedTables.load(device.key)
    return TunedTables(device.key, [(TunedTable.load(table), table)])


def _override(config: Config, overrides: list[str], family: str, option: str = "--set") -> Config:
    """``config`` with settings such as "tile_m=192", values in YAML's notation. ``option`` is where they come from."""
    import pydantic
    import yaml

    values: dict[str, Any] = {}
    for setting in overrides:
        name, sign, value = setting.partition("=")
        if not sign:
            raise UsageError(f"{option} wants KNOB=VALUE, got {setting!r}")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"{option} {name}: {value!r} is no YAML value") from None
    config_from_dict(family, values)
    types = get_type_hints(type(config))
    for name, value in values.items():
        try:
            values[name] = pydantic.TypeAdapter(types[name]).validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            raise UsageError(f"{option} {name}={value}: {error.errors()[0]['msg']}") from None
    return replace(config, **values)


# --- one variant ------------------------------------------------------------------------------------------------------


@app.command()
def render(
    problem: ProblemText,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="Another problem, or 'KNOB=VALUE ...', for --diff.")
    ] = None,
    overrides: Overrides = None,
    compare: Annotated[bool, typer.Option("--diff", help="How the source changes from PROBLEM to OTHER.")] = False,
    device: DeviceName = None,
    table: TableFile = None,
    output: Annotated[Path | None, typer.Option("--out", help="Write to a file.")] = None,
) -> None:
    """Prints the source of the kernel that would run for PROBLEM, or how it changes for another or with some knobs."""
    from fa4gen.render import diff
    from fa4gen.render import render as render_source

    if compare != (other is not None):
        raise UsageError("--diff and what to compare with, a problem or KNOB=VALUE, go together")
    chosen = _select(problem, _device(device), table, overrides)
    if other is None:
        text = render_source(chosen.variant)
    elif any(setting.partition("=")[0] in config_to_dict(chosen.config) for setting in other.split()):
        text = diff(chosen.variant, _changed(chosen, other.split(), "--diff").variant)
    else:
        text = diff(chosen.variant, _select(other, chosen.device, table, overrides).variant)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    elif other is None:
        typer.echo(text, nl=False)
    elif text:
        out.print(diff_text(text), end="", soft_wrap=True)
    else:
        note("the same variant: no difference")


@app.command("compile")
def compile_(
    problem: ProblemText, overrides: Overrides = None, device: DeviceName = None, table: TableFile = None
) -> None:
    """Compiles the kernel that would run for PROBLEM into the cache. Needs no GPU."""
    from fa4gen.artifact_cache import ArtifactCache
    from fa4gen.compile import compile_variant

    variant = _select(problem, _device(device), table, overrides).variant
    cache = ArtifactCache()
    cached = cache.get(variant)
    artifact = cached or compile_variant(variant, cache)
    state = "in the cache already" if cached else f"compiled in {artifact.meta.compile_seconds:.1f} s"
    out.print(facts([("variant", f"{artifact.variant_name}, {state}"), *_artifact_facts(artifact)]))


def _artifact_facts(artifact: Artifact) -> list[tuple[str, Any]]:
    meta = artifact.meta
    spills = f"{meta.spill_store_bytes} B stored, {meta.spill_load_bytes} B loaded"
    return [
        ("registers", f"{meta.registers} a thread, stack {meta.stack_bytes} B, spills {spills}"),
        ("shared memory", f"{meta.smem_bytes} B a CTA"),
        *([("warning", "ptxas serialises the WGMMAs")] if meta.wgmma_serialized else []),
        *(("ptxas", remark) for remark in meta.remarks),
        ("artifact", str(artifact.path)),
    ]


@app.command()
def inspect(
    problem: ProblemText,
    overrides: Overrides = None,
    device: DeviceName = None,
    table: TableFile = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="What its warps and units do in the simulator.")] = False,
    picture: Annotated[Path | None, typer.Option("--png", help="Draw the timeline to a file.")] = None,
) -> None:
    """Registers, spills, instruction mix and bound of the kernel that would run for PROBLEM."""
    from fa4gen.compile import compile_variant
    from fa4gen.sass import inspect as inspect_cubin

    chosen = _select(problem, _device(device), table, overrides)
    artifact = compile_variant(chosen.variant)
    report = inspect_cubin(artifact.cubin_path)
    out.print(facts([("variant", artifact.variant_name), *_artifact_facts(artifact)]))
    out.print()
    if timeline or picture is not None:
        _show_timeline(chosen, artifact, picture)
        return
    shown = list(report.mix.items())[:MIX_ROWS]
    rest = sum(report.mix.values()) - sum(count for _, count in shown)
    out.print(grid("opcode", "static count>", rows=[*shown, ("others", rest)]))
    out.print()
    out.print(bound_table(bound(chosen.problem, chosen.config, chosen.device)))


def _show_timeline(chosen: _Selection, artifact: Artifact, picture: Path | None) -> None:
    """Simulates a kernel, prints its lanes, and draws them to ``picture``."""
    from fa4gen.measure.model import ModelMeasurer
    from fa4gen.timing.timeline import draw, timeline

    model = ModelMeasurer(chosen.device)
    lanes = timeline(model.traced(chosen.problem, chosen.variant, artifact), model.constants)
    title = f"predicted by {model.name} for {chosen.device.name}: {artifact.variant_name}"
    out.print(simulation_facts(model.predict(chosen.problem, chosen.variant, artifact), model.name))
    out.print()
    out.print(timeline_view(lanes, out.width))
    if picture is not None:
        draw(lanes, title, picture)
        out.print(f"drawn in {picture}", soft_wrap=True)


class ScheduleName(str, Enum):
    """Orders in which the emulator runs what may run in any order."""

    EAGER = "eager"
    LAZY = "lazy"
    RANDOM = "random"


@app.command()
def verify(
    problem: ProblemText,
    overrides: Overrides = None,
    device: DeviceName = None,
    table: TableFile = None,
    gpu: Gpu = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the random inputs, and of --schedule random.")] = 0,
    emulate: Annotated[bool, typer.Option("--emulate", help="On the CPU, from its PTX. Needs no GPU.")] = False,
    schedule: Annotated[
        list[ScheduleName] | None, typer.Option("--schedule", help="Emulated order. Repeatable; default: all three.")
    ] = None,
    races: Annotated[bool, typer.Option("--races/--no-races", help="Look for races in the emulator.")] = True,
    whole: Annotated[bool, typer.Option("--whole", help="Emulate PROBLEM itself, not a reduced one.")] = False,
) -> None:
    """Runs the kernel for PROBLEM, on the GPU or in the emulator, against a float64 reference.

    On the GPU: ordinary and hostile inputs. In the emulator: a smaller problem that the same kernel serves, races,
    deadlocks, reads of what nothing wrote, and the same bits in every schedule.
    """
    if emulate:
        chosen = _select(problem, _device(device), table, overrides)
        ok = _emulate(chosen, [name.value for name in schedule or ScheduleName], races, seed, whole)
    elif device or schedule or whole:
        raise UsageError("--device, --schedule and --whole are for --emulate; on the GPU say --gpu")
    else:
        ok = _verify_on_gpu(problem, overrides, table, gpu, seed)
    if not ok:
        raise typer.Exit(1)


def _verify_on_gpu(problem: str, overrides: list[str] | None, table: Path | None, gpu: int, seed: int) -> bool:
    from fa4gen.accuracy import KINDS
    from fa4gen.compile import compile_variant
    from fa4gen.measure.base import Failure
    from fa4gen.measure.cuda import CudaMeasurer

    rows, wrong = [], False
    with contextlib.closing(CudaMeasurer(gpu)) as measurer:
        chosen = _select(problem, measurer.device, table, overrides)
        artifact = compile_variant(chosen.variant)
        for kind in KINDS:
            report = measurer.verify(chosen.problem, artifact, kind, seed, chosen.config)
            if isinstance(report, Failure):
                rows.append((kind, "-", "-", f"{report.kind.value}: {report.message}"))
                wrong = True
            else:
                rows.append((kind, f"{report.relative_error:.1e}", f"{report.worst:.2f}", report.message))
                wrong = wrong or not report.ok
    out.print(grid("inputs", "relative error>", "of the limit>", "verdict", rows=rows))
    return not wrong


def _emulate(chosen: _Selection, schedules: list[str], races: bool, seed: int, whole: bool) -> bool:
    """Verifies in the emulator and prints what it found."""
    from rich.progress import Progress

    from fa4gen import emulator
    from fa4gen.case import Case
    from fa4gen.compile import compile_variant

    artifact = compile_variant(chosen.variant)
    problem = chosen.problem if whole else emulator.reduced(chosen.problem, chosen.config)
    inputs = Case.make(problem, seed=seed).inputs.values()
    with Progress(console=err) as bars:
        task = bars.add_task(f"emulating {problem}", total=1.0)
        verdict = emulator.verify(
            artifact,
            problem,
            tuple(inputs),
            config=chosen.config,
            schedules=[(name, seed) for name in schedules],
            check_races=races,
            progress=lambda share: bars.update(task, completed=share),
        )
    same = "as given" if problem == chosen.problem else "reduced: the kernel is the same for every length"
    rows: list[tuple[str, Any]] = [
        ("variant", artifact.variant_name),
        ("emulated", f"{problem} ({same})"),
        ("verdict", Text(verdict.message, style="green" if verdict.ok else "bold red")),
    ]
    if not verdict.runs:
        out.print(facts(rows))
        return False
    out.print(facts([*rows, *emulation_facts(verdict)]))
    out.print()
    out.print(instruction_table(verdict))
    return verdict.ok


@app.command()
def show(problem: ProblemText, device: DeviceName = None, table: TableFile = None) -> None:
    """What would run for PROBLEM: which row and config, how it was measured, and what bounds it."""
    chosen = _select(problem, _device(device), table, None)
    resolution, config = chosen.resolution, chosen.config
    place = f" ({resolution.path})" if resolution.path else ""
    rows: list[tuple[str, Any]] = [
        ("problem", f"{chosen.problem} on {chosen.device.name} ({chosen.device.key})"),
        ("row" if resolution.row else "no row", resolution.reason + place),
        ("config", config_text(config, type(config).default(chosen.problem))),
        ("variant", chosen.variant.name),
    ]
    if resolution.row:
        rows += row_facts(resolution.row, chosen.device)
    limits = bound(chosen.problem, config, chosen.device)
    out.print(facts(rows))
    out.print(f"\nThe throughput bound of this problem with this config is {us(limits.microseconds)}:")
    out.print(bound_table(limits))
    _show_simulation(chosen)
    if not resolution.covered:
        known = "predicted, not measured" if resolution.source == "predicted" else "not tuned"
        note(f'{known}: fa4gen tune --problem "{chosen.problem}"')


def _show_simulation(chosen: _Selection) -> None:
    """What bounds a compiled kernel in the simulator, and how much it waits."""
    from fa4gen.artifact_cache import ArtifactCache
    from fa4gen.measure.model import ModelMeasurer

    artifact = ArtifactCache().get(chosen.variant)
    if artifact is None:
        note("its kernel is not compiled, so nothing is simulated: fa4gen compile, or inspect --timeline")
        return
    try:
        model = ModelMeasurer(chosen.device)
        predictions = model.predict(chosen.problem, chosen.variant, artifact)
    except Fa4genError as error:
        note(f"not simulated: {error}")
        return
    out.print()
    out.print(simulation_facts(predictions, model.name))


@app.command()
def bench(
    problems: Annotated[list[str] | None, typer.Argument(metavar="PROBLEM...")] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="A named list: long, demo, paper, small.")] = None,
    op: Op = None,
    deterministic: Deterministic = False,
    peers: Annotated[str, typer.Option(help="Comma-separated names, all, or none.")] = "all",
    variants: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="'KNOB=VALUE ...'", help="Also the config with these knobs changed. Repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of random order.")] = 20,
    gpu: Gpu = 0,
    host: Annotated[bool, typer.Option("--host", help="Also the host cost of a call, beside torch SDPA.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write all samples to a file.")] = None,
) -> None:
    """Times fa4gen.attention beside its peers and its own variants, interleaved in one process.

    Of a backward problem the gradient alone.
    """
    from fa4gen.bench import bench as run_bench
    from fa4gen.bench import host_cost, variant_peer
    from fa4gen.measure.cuda import current_device
    from fa4gen.measure.peers import get_peers

    parsed = _as_op(_problems_named(preset, problems, None), op, deterministic)
    contestants = get_peers(peers)
    if not parsed and not host:
        raise UsageError("nothing to bench: give problems, --preset or --host")
    device = current_device(gpu)
    _compile_ahead(parsed, gpu)
    results = []
    refused = False
    for problem in parsed:
        family = get_family(problem.op, device.arch.name).name
        changes = {text: partial(_override, overrides=text.split(), family=family) for text in variants or ()}
        own = [variant_peer(text, change, gpu) for text, change in changes.items()]
        try:
            result = run_bench(problem, [*contestants, *own], device_index=gpu, rounds=rounds)
        except UnsupportedProblem as error:
            err.print(f"[bold red]cannot run[/] {problem}: {escape(str(error))}", soft_wrap=True)
            refused = True
            continue
        results.append(result)
        out.print(bench_table(result))
    if len(results) > 1:
        out.print(bench_summary(results))
    written = [result.to_dict() for result in results]
    if host:
        cost = host_cost(device_index=gpu)
        low, high = cost.ratio_interval
        out.print(
            f"host cost of a call ({cost.problem}): {us(cost.ours_us)}, torch SDPA {us(cost.torch_us)}, "
            f"ratio {cost.ratio:.2f} [{low:.2f}, {high:.2f}]"
        )
        written.append(asdict(cost))
    if output is not None:
        output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if refused:
        raise typer.Exit(1)


def _compile_ahead(problems: list[AttentionProblem], gpu: int) -> None:
    """Compiles what dispatch will run, on all cores; a failure is the later call's to report."""
    from fa4gen.compile import CompilePool
    from fa4gen.dispatch import dispatcher

    variants = dict.fromkeys(dispatcher(gpu).variant(problem) for problem in problems)
    with CompilePool() as pool, contextlib.suppress(CompileError):
        for future in [pool.submit(variant) for variant in variants]:
            future.result()


# --- search -----------------------------------------------------------------------------------------------------------


class MeasurerKind(str, Enum):
    """Where times come from."""

    CUDA = "cuda"
    REPLAY = "replay"
    MODEL = "model"
    BOUND = "bound"


class PrefilterKind(str, Enum):
    """What chooses the configs that are worth measuring."""

    MODEL = "model"


@app.command()
def tune(
    preset: Annotated[str | None, typer.Option("--preset", help="A named list: demo, paper, small.")] = None,
    problem: Annotated[list[str] | None, typer.Option("--problem", help="A problem. Repeatable.")] = None,
    shapes: Annotated[Path | None, typer.Option("--shapes", help="File with a problem a line; # comments.")] = None,
    from_misses: Annotated[bool, typer.Option("--from-misses", help="What programs called and no row covers.")] = False,
    op: Op = None,
    deterministic: Deterministic = False,
    measure: Annotated[MeasurerKind, typer.Option("--measure", help="Where times come from.")] = MeasurerKind.CUDA,
    grid_file: Annotated[Path | None, typer.Option("--grid", help="Recorded times, for --measure replay.")] = None,
    devices: Annotated[str, typer.Option("--devices", help="GPUs to measure on: 0,1 or all; one kind.")] = "0",
    prefilter: Annotated[
        PrefilterKind | None, typer.Option("--prefilter", help="Measure only what is predicted to be fast.")
    ] = None,
    arch: Annotated[str | None, typer.Option("--arch", help="Target of --measure model, bound; else a check.")] = None,
    effort: Annotated[str, typer.Option("--effort", help="quick or full.")] = "quick",
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Trials a problem. Default: by effort; half with --prefilter."),
    ] = None,
    compile_ahead: Annotated[
        int | None,
        typer.Option(min=0, help="Trials in flight beside those measured. Default: by effort; more for many cores."),
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="Seconds a problem.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of every random choice.")] = 0,
    storage: Annotated[str | None, typer.Option("--storage", help="Journal file or Optuna URL of the studies.")] = None,
    space: Annotated[Path | None, typer.Option("--space", help="A search space instead of the shipped one.")] = None,
    record: Annotated[Path | None, typer.Option("--record", help="Add all times to this grid, for replay.")] = None,
    output: Annotated[
        Path | None, typer.Option("--out", help="Table to write. Default with cuda: the user's; else none.")
    ] = None,
) -> None:
    """Searches for the fastest config of each problem. Kill it at any moment and run it again: it goes on."""
    from fa4gen.search_space import SearchSpace
    from fa4gen.tune.effort import get_effort
    from fa4gen.tune.objective import Bench
    from fa4gen.tune.study import Settings

    budgeted = get_effort(effort)
    ahead = budgeted.compile_ahead if compile_ahead is None else compile_ahead
    settings = Settings(
        effort=replace(budgeted, trials=trials or budgeted.trials // (2 if prefilter else 1), compile_ahead=ahead),
        seed=seed,
        space=SearchSpace.from_file(space) if space else None,
        storage=storage,
        budget_s=budget,
        record=record,
    )
    problems = _as_op(_problems_named(preset, problem, shapes), op, deterministic)
    if record is not None and measure is not MeasurerKind.CUDA:
        raise UsageError(f"--record keeps measurements: it needs --measure cuda, not {measure.value}")
    if prefilter is not None and measure in (MeasurerKind.MODEL, MeasurerKind.BOUND):
        raise UsageError(f"--prefilter chooses what to measure, and --measure {measure.value} measures nothing")
    if not problems and not from_misses:
        raise UsageError("nothing to tune: give --preset, --problem, --shapes or --from-misses")
    with contextlib.ExitStack() as stack:
        measurers = _measurers(measure, grid_file, devices, arch, seed)
        for measurer in measurers:
            stack.callback(measurer.close)
        device = measurers[0].device
        if arch not in (None, device.arch.name):
            raise UsageError(f"--arch {arch}, but {device.name} is {device.arch.name}")
        if from_misses:
            problems += _missed(device)
        if output is None and measure is MeasurerKind.CUDA:
            output = knobs.tuned_dir() / f"{device.key}.json"
        compiler = None
        if measurers[0].needs_artifact or prefilter is not None:
            from fa4gen.compile import CompilePool

            compiler = CompilePool()
        if prefilter is not None:
            settings = replace(settings, prefilter=Bench([_predictor(device, fall_back=False)], compiler))
        provenance: dict[str, Any] = {}
        if measure is MeasurerKind.CUDA:
            from fa4gen.measure.cuda import driver_version

            provenance["driver"] = driver_version()
        bench = stack.enter_context(Bench(measurers, compiler, provenance=provenance))
        missing = _search(problems, bench, settings, output)
    if missing:
        raise typer.Exit(1)


def _problems_named(preset: str | None, texts: list[str] | None, shapes: Path | None) -> list[AttentionProblem]:
    """The problems of a preset, of texts and of a file, each once, in order."""
    from fa4gen.presets import get_preset

    problems = list(get_preset(preset)) if preset else []
    problems += [AttentionProblem.parse(text) for text in texts or ()]
    if shapes is not None:
        lines = (line.partition("#")[0].strip() for line in shapes.read_text(encoding="utf-8").splitlines())
        problems += [AttentionProblem.parse(line) for line in lines if line]
    return list(dict.fromkeys(problems))


def _as_op(problems: list[AttentionProblem], op: OpName | None, deterministic: bool) -> list[AttentionProblem]:
    """``problems`` as the options have them, each once.

    Raises:
        UnsupportedProblem: ``deterministic``, and one is a forward.
    """
    changes: dict[str, Any] = {"deterministic": True} if deterministic else {}
    if op is OpName.BWD:
        changes |= {"op": "bwd", "return_lse": False}
    elif op is OpName.FWD:
        changes |= {"op": "fwd", "deterministic": deterministic}
    return list(dict.fromkeys(replace(problem, **changes) for problem in problems))


def _missed(device: Device) -> list[AttentionProblem]:
    from fa4gen import dispatch

    missed = [miss.problem for miss in dispatch.misses() if miss.device == device.key]
    if not missed:
        raise UsageError(f"no misses are recorded for {device.key}: nothing to tune")
    return missed


def _measurers(kind: MeasurerKind, grid_file: Path | None, devices: str, arch: str | None, seed: int) -> list[Measurer]:
    if (kind is MeasurerKind.REPLAY) != (grid_file is not None):
        raise UsageError("--measure replay and --grid FILE belong together")
    if grid_file is not None:
        from fa4gen.measure.replay import ReplayMeasurer

        return [ReplayMeasurer(grid_file, seed)]
    if kind in (MeasurerKind.MODEL, MeasurerKind.BOUND):
        from fa4gen.measure.model import BoundMeasurer

        target = get_arch(arch or "sm_90a")
        device = next(device for device in DEVICES.values() if device.arch == target)
        return [BoundMeasurer(device) if kind is MeasurerKind.BOUND else _predictor(device)]
    return _cuda_measurers(devices)


def _predictor(device: Device, *, fall_back: bool = True) -> Measurer:
    """The timing model for ``device``; where there is none the throughput bound, if it may ``fall_back``."""
    from fa4gen.measure.model import BoundMeasurer, ModelMeasurer

    try:
        return ModelMeasurer(device)
    except UsageError as error:
        if not fall_back:
            raise
        note(f"{error}; the throughput bound stands in")
        return BoundMeasurer(device)


def _cuda_measurers(devices: str) -> list[Measurer]:
    from fa4gen.measure.cuda import CudaMeasurer

    if devices != "all":
        try:
            return [CudaMeasurer(int(index)) for index in devices.split(",")]
        except ValueError:
            raise UsageError(f"--devices wants indices such as 0,1 or all, got {devices!r}") from None
    measurers: list[Measurer] = []
    while True:  # only the worker of a device asks CUDA whether it is there
        measurer = CudaMeasurer(len(measurers))
        try:
            _ = measurer.device
        except NoDeviceError:
            measurer.close()
            if not measurers:
                raise
            return measurers
        measurers.append(measurer)


def _search(problems: list[AttentionProblem], bench: Bench, settings: Settings, output: Path | None) -> bool:
    """Tunes one problem after the other, saves each row as soon as it is known, prints the winners.

    Returns whether a problem has no result.
    """
    from fa4gen.progress import SearchProgress
    from fa4gen.tune.study import tune_problems
    from fa4gen.tuned_table import TunedTable

    known: list[tuple[AttentionProblem, Config]] = []
    if bench.measurers[0].needs_artifact:  # a recorded grid or a model is searched from scratch
        known = [(row.problem, row.config) for row in _tables(bench.device, None).own_rows]
    settings = replace(settings, storage=settings.open_storage())
    results: list[TuneResult] = []
    try:
        with SearchProgress(problems, settings.effort.trials) as progress:
            for problem in problems:
                found = tune_problems([problem], bench, settings, known=known, observer=progress)
                known += [(result.problem, result.config) for result in found]
                results += found
                if output is not None:
                    TunedTable.update(output, bench.device.key, [result.row() for result in found])
    finally:
        if results:
            out.print(winners_table(results))
    for problem, reason in progress.failed.items():
        err.print(f"[bold red]no result[/] for {problem}: {escape(reason)}", soft_wrap=True)
    if output is not None and results:
        out.print(f"{len(results)} rows in {output}", soft_wrap=True)
    return bool(progress.failed)


# --- tables -----------------------------------------------------------------------------------------------------------


@table_app.command()
def lint(
    files: Annotated[list[Path] | None, typer.Argument(help="Default: the user's and the shipped tables.")] = None,
    compile_rows: Annotated[bool, typer.Option("--compile", help="Compile every row's kernel as well.")] = False,
) -> None:
    """Checks that every row has a config that can run its problem, renders, and has sane numbers."""
    from fa4gen.tuned_table import TunedTable

    clean = True
    for path in files or sorted(p for d in (knobs.tuned_dir(), resource_dir("tuned")) for p in d.glob("*.json")):
        table = TunedTable.load(path)
        findings = table.lint()
        if compile_rows and not findings:
            findings = _compile_findings(table)
        for finding in findings:
            err.print(f"{path}: {finding}", markup=False, soft_wrap=True)
        out.print(f"{path}: {len(table.rows)} rows, {len(findings)} findings", markup=False, soft_wrap=True)
        clean = clean and not findings
    if not clean:
        raise typer.Exit(1)


def _compile_findings(table: TunedTable) -> list[str]:
    from rich.progress import track

    from fa4gen.compile import CompilePool

    findings = []
    with CompilePool() as pool:
        futures = [(row, pool.submit(table.variant(row))) for row in table.rows]
        for row, future in track(futures, "compiling", console=err, transient=True):
            try:
                future.result()
            except CompileError as error:
                findings.append(f'"{row.problem}": {error}')
    return findings


@table_app.command()
def diff(old: Path, new: Path) -> None:
    """Prints the rows that NEW adds to, drops from or changes in OLD."""
    from fa4gen.tuned_table import TunedTable

    changes = TunedTable.load(old).diff(TunedTable.load(new))
    rows = [("+", row.problem, timed(row.median_us, row.source), "") for row in changes.added]
    rows += [("-", row.problem, timed(row.median_us, row.source), "") for row in changes.removed]
    for before, after in changes.changed:
        times = f"{timed(before.median_us, before.source)} -> {timed(after.median_us, after.source)}"
        rows.append(("~", after.problem, times, changes_text(after.config, before.config, "same config")))
    out.print(grid("", "problem", "median>", "changed knobs", rows=rows) if rows else "no difference")


@table_app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Tables of one device.")],
    output: Annotated[Path, typer.Option("--out", help="Table to merge into; created if absent.")],
) -> None:
    """Merges tables into one: measured rows beat predicted ones, then the newer date wins."""
    from fa4gen.tuned_table import TunedTable

    tables = [TunedTable.load(path) for path in files]
    for path, table in zip(files, tables, strict=True):
        if table.device != tables[0].device:
            raise UsageError(f"{path} is the table of {table.device}, {files[0]} that of {tables[0].device}")
    merged = TunedTable.update(output, tables[0].device, [row for table in tables for row in table.rows])
    out.print(f"{output}: {len(merged.rows)} rows of {merged.device}")


@table_app.command()
def explain(problem: ProblemText, device: DeviceName = None, table: TableFile = None) -> None:
    """Why PROBLEM gets the row that it gets."""
    from fa4gen.tuned_table import category, coordinates

    chosen = _select(problem, _device(device), table, None)
    names = ("seqlen_q", "seqlen_k", "tiles an SM", "query heads a K/V head")
    places = zip(names, coordinates(chosen.problem, chosen.device.sm_count), strict=True)
    resolution = chosen.resolution
    rows = [
        ("category", f"{category(chosen.problem)}: a row must share it"),
        ("place", ", ".join(f"{name} 2^{place:.2f}" for name, place in places)),
        ("choice", resolution.reason),
        ("source", f"{resolution.source}{f', {resolution.path}' if resolution.path else ''}"),
        ("covered", "yes" if resolution.covered else "no: a call counts as a miss"),
        ("config", changes_text(resolution.config, type(resolution.config).default(chosen.problem))),
    ]
    out.print(facts(rows))


@app.command()
def misses(clear: Annotated[bool, typer.Option("--clear", help="Forget them.")] = False) -> None:
    """Problems that programs on this machine called and no tuned row covers."""
    from fa4gen import dispatch

    found = dispatch.misses()
    rows = [(miss.device, miss.problem, miss.calls) for miss in found]
    out.print(grid("device", "problem", "calls>", rows=rows) if rows else "no misses recorded")
    if clear:
        dispatch.clear_misses()
    elif found:
        note("fa4gen tune --from-misses tunes them")


@app.command()
def export(
    problem: Annotated[str | None, typer.Argument(metavar="[PROBLEM]", help="With --source.")] = None,
    table: Annotated[Path | None, typer.Option("--table", help="Write all tuned rows of the device here.")] = None,
    source: Annotated[Path | None, typer.Option("--source", help="Write PROBLEM's kernel as one file here.")] = None,
    aot: Annotated[Path | None, typer.Option("--aot", help="Compile all tuned rows into a library here.")] = None,
    overrides: Overrides = None,
    device: DeviceName = None,
) -> None:
    """Takes tuned kernels to where fa4gen is not: as a table, as standalone source, as a compiled library."""
    from fa4gen import export as exporting
    from fa4gen.tuned_table import TunedTable

    if [table, source, aot].count(None) != 2 or (source is None) != (problem is None):
        raise UsageError("say what to export: --table FILE, --aot FOLDER, or PROBLEM --source FILE")
    chosen_device = _device(device)
    if table is not None:
        exported = exporting.export_table(chosen_device.key, table)
        out.print(f"{table}: {len(exported.rows)} rows of {exported.device}")
    elif aot is not None:
        rows = _tables(chosen_device, None).own_rows
        library = exporting.export_aot(TunedTable(chosen_device.key, tuple(rows)), aot)
        out.print(f"{library}: {len(rows)} rows of {chosen_device.key}")
    elif source is not None and problem is not None:
        text = exporting.export_source(_select(problem, chosen_device, None, overrides).variant)
        source.write_text(text, encoding="utf-8")
        out.print(f"{source}: runs with CuTe DSL and torch alone")


# --- this machine -----------------------------------------------------------------------------------------------------


@app.command()
def doctor() -> None:
    """Versions, GPU, cache, tables, and what works here."""
    from fa4gen.doctor import examine

    checks = list(examine())
    marks = {True: "[green]ok[/]", False: "[red]no[/]", None: "[yellow]--[/]"}
    out.print(facts((check.name, f"{marks[check.ok]} {escape(check.detail)}") for check in checks))
    if any(check.ok is False for check in checks):
        raise typer.Exit(1)
