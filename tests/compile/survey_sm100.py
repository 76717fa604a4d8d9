"""Compiles hundreds of sampled flash_fwd_sm100 variants: what can_implement accepts must compile clean.

``make compile-all``, or in chunks, with tests/compile and tests/emulated on PYTHONPATH: survey_sm100.py [--start 0]
[--count 500] [--jobs N] [--out FILE]. Four of five are for sm_100a, the rest for sm_103a. Each is held to what
test_flash_fwd_sm100.py asks of its own few; a line a failure is printed, then how long a variant took on one core.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from sampling import SM100, sample
from test_flash_fwd_sm100 import test_accepted_configs_compile_clean as compiles_clean

from fa4gen.arch import get_arch
from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import compile_variant
from fa4gen.config import Config, config_to_dict
from fa4gen.errors import CompileError
from fa4gen.feasibility import can_implement
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

Case = tuple[int, str, AttentionProblem, Config]  # index, arch


def drawn(start: int, count: int) -> Iterator[Case]:
    """Part of the sample: every fifth for sm_103a, whatever it was drawn for."""
    for index, case in enumerate(sample(start + count, domain=SM100)[start:], start):
        arch, config = "sm_103a" if index % 5 == 4 else "sm_100a", case.variant.config
        assert can_implement(case.problem, config, get_arch(arch)) is None
        yield index, arch, case.problem, config


def verdict(case: Case) -> tuple[Case, float, str]:
    """The case, CPU seconds to compile it, and what is wrong or ""."""
    _, *key = case
    variant = Variant.of(*key)
    started = time.process_time()
    with TemporaryDirectory() as directory:
        try:
            artifact = compile_variant(variant, ArtifactCache(Path(directory)))
        except CompileError as error:
            return case, time.process_time() - started, str(error)
        seconds = time.process_time() - started
        try:
            compiles_clean({variant: artifact}, tuple(key))
        except AssertionError as error:
            return case, seconds, f"not as promised: {traceback.format_tb(error.__traceback__)[-1].strip()}: {error}"
    return case, seconds, ""


def main(
    start: Annotated[int, typer.Option(help="First of the sample.")] = 0,
    count: Annotated[int, typer.Option(help="How many.")] = 500,
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="Appends a JSON line each.")] = None,
) -> None:
    """Prints failures and a summary."""
    console = Console()
    times, failures = [], 0
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        results = pool.map(verdict, drawn(start, count))
        for (index, arch, problem, config), seconds, message in track(results, "compiling", count, console=console):
            times.append(seconds)
            failures += bool(message)
            if message:
                console.print(f"{index} {arch} {problem} {config}: {message}", highlight=False)
            if out is not None:
                row = {"index": index, "arch": arch, "problem": str(problem), "config": config_to_dict(config)}
                with out.open("a") as file:
                    file.write(json.dumps(row | {"seconds": round(seconds, 2), "message": message}) + "\n")
    median, most = float(np.median(times)), max(times)
    console.print(f"{len(times)} variants, {failures} failures, {median:.2f} s of one core each, at most {most:.2f} s")


if __name__ == "__main__":
    typer.run(main)
