"""Compiles hundreds of sampled flash_fwd_sm100 variants: what can_implement accepts must compile clean.

``make compile-all``, or in chunks, with tests/compile and tests/emulated on PYTHONPATH: survey_sm100.py [--start 0]
[--count 500] [--out FILE]. Four of five are for sm_100a, the rest for sm_103a. Each is held to what
test_flash_fwd_sm100.py asks of its own few; a line a failure is printed, then how long a variant took on one core.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from sampling import SM100, sample
from test_flash_fwd_sm100 import test_accepted_configs_compile_clean as compiles_clean

from fa4gen.arch import get_arch
from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import compile_variant
from fa4gen.config import config_to_dict
from fa4gen.errors import CompileError
from fa4gen.feasibility import can_implement
from fa4gen.variant import Variant


def verdict(case: Any, cache: ArtifactCache) -> tuple[float, str]:
    """(CPU seconds to compile, what is wrong or "") of (arch, problem, config)."""
    started = time.process_time()
    try:
        artifact = compile_variant(Variant.of(*case), cache)
    except CompileError as error:
        return time.process_time() - started, str(error)
    seconds = time.process_time() - started
    try:
        compiles_clean({Variant.of(*case): artifact}, case)
    except AssertionError as error:
        return seconds, f"not as promised: {error} (line {error.__traceback__.tb_next.tb_lineno})"  # type: ignore
    return seconds, ""


def main(
    start: Annotated[int, typer.Option(help="First of the sample.")] = 0,
    count: Annotated[int, typer.Option(help="How many.")] = 500,
    out: Annotated[Path | None, typer.Option(help="Appends a JSON line each.")] = None,
) -> None:
    """Prints failures and a summary."""
    console = Console()
    times, failures = [], 0
    for index, sampled in enumerate(sample(start + count, domain=SM100)[start:], start):
        arch = "sm_103a" if index % 5 == 4 else "sm_100a"
        case = (arch, sampled.problem, sampled.variant.config)
        assert can_implement(sampled.problem, sampled.variant.config, get_arch(arch)) is None
        with TemporaryDirectory() as directory:
            seconds, message = verdict(case, ArtifactCache(Path(directory)))
        times.append(seconds)
        failures += bool(message)
        if message:
            console.print(f"{index} {arch} {sampled.problem} {sampled.variant.config}: {message}", highlight=False)
        if out is not None:
            row = {"index": index, "arch": arch, "problem": str(sampled.problem), "seconds": round(seconds, 2)}
            row |= {"config": config_to_dict(sampled.variant.config), "message": message}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    median, most = float(np.median(times)), max(times)
    console.print(f"{len(times)} variants, {failures} failures, {median:.2f} s of one core each, at most {most:.2f} s")


if __name__ == "__main__":
    typer.run(main)
