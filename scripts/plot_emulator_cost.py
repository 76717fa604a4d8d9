"""Emulation time against tiles: draws docs/emulator_cost.png. Needs the plot extra (matplotlib).

python scripts/plot_emulator_cost.py --out docs/emulator_cost.png
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fa4gen import emulator
from fa4gen.compile import compile_variant
from fa4gen.config import FlashFwdSm90Config as Config
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

TILE = 128
HEADS = (1, 2, 4, 8, 16, 32)
SEQLEN = 256


def measure(check_races: bool, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """(tiles of S computed, CPU seconds) for growing numbers of heads: the least of ``repeats``."""
    tiles, seconds = [], []
    for heads in HEADS:
        problem = AttentionProblem.parse(f"b=1 h={heads} s={SEQLEN} d=128")
        artifact = compile_variant(Variant.of("sm_90a", problem, Config(tile_m=TILE, tile_n=TILE)))
        emulator.run(artifact, AttentionProblem.parse(f"b=1 h=1 s={SEQLEN} d=128"))  # parses and translates
        times = []
        for _ in range(repeats):
            started = time.process_time()
            emulator.run(artifact, problem, check_races=check_races)
            times.append(time.process_time() - started)
        tiles.append(heads * (SEQLEN // TILE) ** 2)
        seconds.append(min(times))
    return np.array(tiles), np.array(seconds)


def main(
    out: Annotated[Path, typer.Option(help="Image to write.")] = Path("docs/emulator_cost.png"),
    repeats: Annotated[int, typer.Option(help="Runs a point.")] = 3,
) -> None:
    """Measures, fits lines, draws."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for check_races, label in ((False, "without race detection"), (True, "with race detection")):
        tiles, seconds = measure(check_races, repeats)
        slope, start = np.polyfit(tiles, seconds, 1)
        (line,) = axes.plot(tiles, seconds, "o", label=f"{label}: {1e3 * slope:.1f} ms a tile")
        axes.plot(tiles, slope * tiles + start, color=line.get_color())
        print(label, dict(zip(tiles.tolist(), seconds.round(3).tolist(), strict=True)), f"{1e3 * slope:.2f} ms a tile")
    axes.set(
        xlabel=f"tiles of S ({TILE} x {TILE}, d = 128)", ylabel="CPU seconds",
        title="Emulating flash_fwd_sm90, one core", xlim=(0, None), ylim=(0, None),
    )  # fmt: skip
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    typer.run(main)
