"""What the simulator saw of one CTA over a few steps: a lane for every warp role, and one for every unit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from fa4gen.errors import UsageError
from fa4gen.timing.constants import Constants, Pipe, operation
from fa4gen.timing.model import Sample, TracedVariant
from fa4gen.timing.simulator import Record, SmProgram, kinds_of, simulate

__all__ = ["State", "Timeline", "UnitLane", "WarpLane", "draw", "timeline"]

STEPS = 3  # in the window, from the middle of the longest simulated CTA
EXPONENTIALS = 64  # warp instructions of MUFU that make a softmax warp, not an epilogue
PIPES = {"MUFU": Pipe.MUFU, "FMA": Pipe.FMA, "ALU": Pipe.ALU, "TMEM": Pipe.TMEM}


class State(IntEnum):
    """What a warp does in a cycle. STALL: its own latency, a pipe, a scoreboard or the issue slot of another warp."""

    ENDED, ISSUE, STALL, MBARRIER, NAMED_BARRIER, MMA = range(6)


@dataclass(frozen=True)
class WarpLane:
    """The first of some warps that do the same. ``states``: a :class:`State` a cycle."""

    name: str
    states: np.ndarray


@dataclass(frozen=True)
class UnitLane:
    """``busy``: the share, 0 to 1, of a unit that is busy, a cycle each."""

    name: str
    busy: np.ndarray


@dataclass(frozen=True)
class Timeline:
    """Cycles ``first`` to ``last`` of a simulated CTA that takes ``steps`` K/V steps in ``cycles``."""

    first: int
    last: int
    cycles: int
    steps: float
    warps: tuple[WarpLane, ...]
    units: tuple[UnitLane, ...]


def timeline(traced: TracedVariant, constants: Constants, steps: float = STEPS) -> Timeline:
    """Simulates the longest of ``traced``'s CTAs and keeps ``steps`` steps from its middle.

    Raises:
        Stuck: the simulated CTA deadlocks.
    """
    sample, records = traced.samples[1], list[Record]()
    result = simulate(traced.arch, constants, sample.program, records)
    (record,) = records
    length = min(result.cycles, round(steps * result.cycles / sample.steps))
    first = (result.cycles - length) // 2
    window = slice(first, first + length)
    warps = tuple(
        WarpLane(name, _states(sample.program, record, warp, result.cycles)[window])
        for name, warp in _roles(sample.program)
    )
    units = [UnitLane(name, busy[window]) for name, busy in _busy(traced, sample, record, result.cycles).items()]
    used = tuple(lane for lane in units if lane.busy.any())
    return Timeline(first, first + length, result.cycles, sample.steps * sample.tiles, warps, used)


def _roles(program: SmProgram) -> list[tuple[str, int]]:
    """(name, first warp) of every group of neighbouring warps of a warpgroup that do the same."""
    warps = len(program.first) - 1
    names = [_role(program, warp) for warp in range(warps)]
    starts = [w for w in range(warps) if w % 4 == 0 or names[w] != names[w - 1]]
    ends = [*starts[1:], warps]
    return [
        (f"{names[start]} (warp{f's {start}-{end - 1}' if end - start > 1 else f' {start}'})", start)
        for start, end in zip(starts, ends, strict=True)
        if names[start] != "idle"
    ]


def _role(program: SmProgram, warp: int) -> str:
    places = slice(program.first[warp], program.first[warp + 1])
    kinds = set(kinds_of(program)[places])
    bases = [program.kernel.instructions[i].base for i in program.index[places]]
    parts = [name for kind, name in (("load", "load"), ("mma", "MMA"), ("umma", "MMA")) if kind in kinds]
    if bases.count("MUFU") > EXPONENTIALS:
        parts.append("softmax")
    elif "LDTM" in bases:
        parts.append("correction")
    elif "store" in kinds:
        parts.append("store")
    elif "next_tile" in kinds:
        parts.append("scheduler")
    return ", ".join(parts) or "idle"


def _states(program: SmProgram, record: Record, warp: int, cycles: int) -> np.ndarray:
    """A State for every cycle: what a warp waits for between two issues is told by the tokens of the two."""
    places = np.arange(program.first[warp], program.first[warp + 1])
    issued, kinds = record.issue[places], kinds_of(program)[places]
    states = np.full(cycles + 1, State.ENDED, np.int8)
    for here, (start, end) in enumerate(itertools.pairwise(issued)):
        state = State.STALL
        if kinds[here] == "wait":
            state = State.MBARRIER
        elif kinds[here] == "bar_sync":
            state = State.NAMED_BARRIER
        elif kinds[here + 1] in ("mma", "mma_wait"):
            state = State.MMA
        states[start] = State.ISSUE
        states[start + 1 : end] = state
    return states[:cycles]


def _busy(traced: TracedVariant, sample: Sample, record: Record, cycles: int) -> dict[str, np.ndarray]:
    """Share of each unit that is busy, a cycle each."""
    program = sample.program
    opcodes = [i.opcode for i in program.kernel.instructions]
    latencies = dict.fromkeys(("MUFU", "SHFL", "LDTM", "STTM"), 0.0)
    pipe, hold, _ = np.array([operation(traced.arch, opcode, latencies) for opcode in opcodes]).T[:, program.index]
    found = {"tensor cores": _covered(record.mma[:, 0], record.mma[:, 1], 1.0, cycles)}
    for name, number in PIPES.items():
        at = pipe == number
        found[name] = _covered(record.issue[at], record.issue[at] + hold[at], 0.25, cycles)
    found["issue slots"] = _covered(record.issue, record.issue + 1, 0.25, cycles)
    found["copies in flight"] = _covered(record.loads[:, 0], record.loads[:, 1], 1.0, cycles)
    return {name: np.minimum(busy, 1.0) for name, busy in found.items()}


def _covered(starts: np.ndarray, ends: np.ndarray, weight: float, cycles: int) -> np.ndarray:
    """Sum of ``weight`` over the intervals that cover each cycle."""
    change = np.zeros(cycles + 1)
    for edge, sign in ((starts, weight), (ends, -weight)):
        np.add.at(change, np.minimum(edge.astype(np.int64), cycles), sign)
    return np.cumsum(change)[:cycles]


_COLOURS = {
    State.ENDED: "white", State.ISSUE: "#1b7837", State.STALL: "#a6dba0", State.MBARRIER: "#f4a582",
    State.NAMED_BARRIER: "#ca0020", State.MMA: "#92c5de",
}  # fmt: skip


def draw(lanes: Timeline, title: str, path: Path) -> None:
    """Writes a picture of ``lanes`` to ``path``; the suffix says the format.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.colors import BoundaryNorm, ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UsageError("drawing needs matplotlib: pip install 'fa4gen[plot]'") from None
    rows = len(lanes.warps) + len(lanes.units)
    figure = Figure(figsize=(14, 0.8 + 0.42 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, gridspec_kw={"hspace": 0.0})
    colours = ListedColormap([_COLOURS[state] for state in State])
    norm = BoundaryNorm(range(len(State) + 1), len(State))
    span = (lanes.first, lanes.last)
    everything: list[WarpLane | UnitLane] = [*lanes.warps, *lanes.units]
    for axis, lane in zip(axes, everything, strict=True):
        if isinstance(lane, WarpLane):
            axis.imshow(
                lane.states[None], aspect="auto", cmap=colours, norm=norm, extent=(*span, 0, 1), interpolation="nearest"
            )
        else:
            axis.fill_between(np.arange(*span), lane.busy, step="post", color="#2166ac", linewidth=0)
            axis.set_ylim(0, 1)
        axis.set_yticks([])
        axis.set_ylabel(lane.name, rotation=0, ha="right", va="center", fontsize=8)
    axes[-1].set_xlabel("cycle")
    legend = [Patch(color=_COLOURS[s], label=s.name.lower().replace("_", " ")) for s in State if s is not State.ENDED]
    figure.legend(handles=legend, ncols=len(legend), fontsize=7, loc="outside lower right")
    axes[0].set_title(title, fontsize=9, loc="left")
    figure.savefig(path, dpi=120)
