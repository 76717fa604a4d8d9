"""Records what a GPU computes for the sampled variants, for test_hardware.py. On an H200, from the repository root::

python tests/emulated/record_hardware.py --out tests/data/hardware_h200.npz
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from hardware import RECORDED, record, save
from rich.console import Console
from rich.progress import track
from sampling import NUM_SMS, Case, sample

from fa4gen.artifact_cache import Artifact, ArtifactCache
from fa4gen.case import Case as LaunchCase
from fa4gen.compile import CompilePool, load_kernel
from fa4gen.measure.cuda import driver_version


def run_on_gpu(
    artifact: Artifact, case: Case, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """O and LSE, on the CPU."""
    launch = LaunchCase.of(case.problem, [t.cuda() for t in inputs])
    load_kernel(artifact)(*launch.arguments(case.variant.config, NUM_SMS))
    o, *lse = (output.cpu() for output in launch.outputs.values())
    return o, lse[0] if lse else None


def main(
    out: Annotated[Path, typer.Option(help="File to write.")] = RECORDED,
    count: Annotated[int, typer.Option(help="Cases.")] = 50,
    cache: Annotated[Path | None, typer.Option(help="Artifact cache; default: the user's.")] = None,
) -> None:
    """Compiles on all cores, then runs one after another."""
    cases, console = sample(count), Console(stderr=True)
    with CompilePool(cache=cache and ArtifactCache(cache)) as pool:
        futures = [pool.submit(case.variant) for case in cases]
        artifacts = [future.result() for future in track(futures, "compiling", console=console)]
    pairs = list(zip(cases, artifacts, strict=True))
    records = [record(case, artifact, run_on_gpu) for case, artifact in track(pairs, "running", console=console)]
    versions = artifacts[0].meta.versions
    save(out, records, {"device": torch.cuda.get_device_name(), "driver": driver_version(), "versions": versions})
    console.print(f"{len(records)} cases, {out.stat().st_size:,} bytes in {out}")


if __name__ == "__main__":
    typer.run(main)
