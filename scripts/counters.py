"""Records hardware counters of six kernels with Nsight Compute, for the timing model to be compared with. On an H200::

    python scripts/counters.py record --out tests/data/counters_h200.json

Compiles, then starts itself under ``ncu --clock-control none``, where each kernel runs once unprofiled and once
profiled (in many passes). The file holds, a kernel: problem, config, instruction counts, busy cycles and utilisation of
every pipe ncu knows on this chip, elapsed cycles and clock.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from glob import glob
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fa4gen.artifact_cache import ArtifactCache, toolchain_versions
from fa4gen.compile import CompilePool, load_kernel
from fa4gen.config import FlashFwdSm90Config, config_to_dict
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

# Both head dims and masks, either schedule, P from registers and shared memory, with and without a polynomial.
CASES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("b=2 h=32 s=8192 d=64", {}),
    ("b=2 h=32 s=8192 d=64 causal", {}),
    ("b=2 h=16 s=8192 d=128", {}),
    ("b=2 h=16 s=8192 d=128 causal", {}),
    ("b=2 h=16 s=8192 d=128", {"tile_m": 128, "tile_n": 128, "schedule": "cooperative", "mma_pv_is_rs": False}),
    ("b=2 h=32 s=8192 d=64", {"tile_m": 128, "tile_n": 96, "persistent": False, "exp2_poly_fraction": 0.25}),
)
# Of ncu's base metrics those that count warp instructions or cycles, in all and a pipe.
WANTED = re.compile(
    r"sm__(inst_executed|inst_executed_pipe_\w+|pipe_\w+_cycles_active|inst_issued|cycles_active|cycles_elapsed"
    r"|warps_active)|smsp__(inst_executed|inst_issued|issue_active|cycles_active)|gpc__cycles_elapsed"
)
SKIPPED = re.compile(r"_pred_|_realtime|_type_")
FIXED = ("gpu__time_duration.sum", "gpc__cycles_elapsed.max", "gpc__cycles_elapsed.avg.per_second")
SECTIONS = ("ComputeWorkloadAnalysis", "SpeedOfLight", "InstructionStats", "SchedulerStats")
KEPT = (".sum", ".avg.pct_of_peak_sustained_active")

app = typer.Typer(add_completion=False)
console = Console(stderr=True)


def cases() -> list[tuple[AttentionProblem, FlashFwdSm90Config]]:
    """Problems with their configs: the default with some knobs changed."""
    problems = ((AttentionProblem.parse(text), knobs) for text, knobs in CASES)
    return [(problem, dataclasses.replace(FlashFwdSm90Config.default(problem), **knobs)) for problem, knobs in problems]


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("tests/data/counters_h200.json"),
    ncu: Annotated[str | None, typer.Option(help="Nsight Compute; default: from PATH or /usr/local/cuda.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Artifact cache; default: the user's.")] = None,
) -> None:
    """Records the file."""
    from fa4gen.measure.cuda import current_device, driver_version

    tool = ncu or find_ncu()
    with CompilePool(cache=cache and ArtifactCache(cache)) as pool:
        futures = [pool.submit(Variant.of("sm_90a", problem, config)) for problem, config in cases()]
        artifacts = [future.result() for future in futures]
    console.print(f"{len(artifacts)} kernels compiled; {tool}")
    child = [sys.executable, __file__, "launch", *(["--cache", str(cache)] if cache else [])]
    sections = [option for name in SECTIONS for option in ("--section", name)]
    try:
        rows = table(profile(tool, child, *sections, "--metrics", ",".join(metrics(tool))))
    except RuntimeError as error:
        console.print(f"only ncu's own sections: {error}", markup=False)
        rows = table(profile(tool, child, *sections))
    kernels = []
    for number, ((problem, config), artifact) in enumerate(zip(cases(), artifacts, strict=True)):
        counters = kept(rows[number])
        kernel = {"problem": str(problem), "config": config_to_dict(config), "registers": artifact.meta.registers}
        kernels.append(kernel | {"counters": counters})
    data = {
        "device": current_device(0).name,
        "driver": driver_version(),
        "ncu": subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[-2],
        "versions": toolchain_versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kernels": kernels,
    }
    out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    console.print(f"{len(kernels)} kernels, {len(kernels[0]['counters'])} counters each, in {out}")


@app.command()
def launch(cache: Annotated[Path | None, typer.Option()] = None) -> None:
    """What ncu profiles: every case once to warm up, then once between cudaProfilerStart and Stop."""
    import torch

    from fa4gen.accuracy import default_scale, make_inputs, poisoned_outputs
    from fa4gen.compile import compile_variant

    artifacts = ArtifactCache(cache) if cache else ArtifactCache()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for problem, config in cases():
        kernel = load_kernel(compile_variant(Variant.of("sm_90a", problem, config), artifacts))
        o, lse = poisoned_outputs(problem, "cuda")
        outputs = [o] if lse is None else [o, lse]
        arguments = (*make_inputs(problem, device="cuda"), *outputs, default_scale(problem), num_sms)
        kernel(*arguments)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        kernel(*arguments)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def find_ncu() -> str:
    """Path of Nsight Compute's command line."""
    places = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/nsight-compute*/ncu")
    found = shutil.which("ncu") or next((path for place in places for path in sorted(glob(place))[::-1]), None)
    if found is None:
        raise typer.BadParameter("ncu (Nsight Compute) is not installed; say where it is with --ncu")
    return found


def metrics(tool: str) -> list[str]:
    """Full names of the metrics to collect, as far as ncu has them for the current chip."""
    listed = subprocess.run([tool, "--query-metrics", "--csv"], capture_output=True, text=True, check=True).stdout
    names = {match[1] for match in re.finditer(r'^"?((?:sm|smsp|gpc)__\w+)', listed, re.MULTILINE)}
    chosen = [name for name in sorted(names) if WANTED.fullmatch(name) and not SKIPPED.search(name)]
    full = list(FIXED)
    for name in chosen:
        full.append(f"{name}.sum")
        if name.endswith("_active") or "inst_issued" in name or "_pipe_" in name:
            full.append(f"{name}{KEPT[1]}")
    return list(dict.fromkeys(full))


def profile(tool: str, child: list[str], *wanted: str) -> str:
    """What ncu prints in CSV for the profiled launches of ``child``. ``wanted``: its options that say what to collect.

    Raises:
        RuntimeError: ncu fails; the message is its own.
    """
    options = ["--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    run = subprocess.run([tool, *options, *wanted, *child], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"ncu: exit code {run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
    return run.stdout


def table(text: str) -> list[dict[str, str]]:
    """Rows by column of ncu's raw page: a header, a line of units, a line a launch. Lines of other programs go.

    Raises:
        RuntimeError: there is none.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError(f"ncu profiled nothing:\n{text[-2000:]}")
    header, _, *rows = csv.reader(lines[start:])
    return [dict(zip(header, row, strict=False)) for row in rows if len(row) == len(header)]


def kept(row: Mapping[str, str]) -> dict[str, float]:
    """Of a row's columns the counters that were asked for: sums and percentages."""
    found = {}
    for name, text in row.items():
        wanted = name in FIXED or (WANTED.fullmatch(name.partition(".")[0]) and name.endswith(KEPT))
        if wanted and not SKIPPED.search(name) and (value := number_of(text)) is not None:
            found[name] = value
    return found


def number_of(text: str) -> float | None:
    """A counter's value; None for what is text."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


if __name__ == "__main__":
    app()
