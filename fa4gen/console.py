"""What the command line prints: Rich renderables from the library's values, and the two consoles they go to."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fa4gen.arch import DEVICES, Device
from fa4gen.bound import Bound, bound
from fa4gen.config import Config
from fa4gen.problem import AttentionProblem

if TYPE_CHECKING:
    from fa4gen.bench import BenchResult
    from fa4gen.emulator import Verification
    from fa4gen.measure.base import Source
    from fa4gen.timing.model import Prediction
    from fa4gen.timing.timeline import Timeline
    from fa4gen.tune.result import TuneResult
    from fa4gen.tuned_table import Row

__all__ = [
    "bench_summary",
    "bench_table",
    "bound_table",
    "config_text",
    "diff_text",
    "efficiency",
    "emulation_facts",
    "err",
    "facts",
    "grid",
    "instruction_table",
    "note",
    "out",
    "row_facts",
    "simulation_facts",
    "timed",
    "timeline_view",
    "us",
]

# Piped output is for other programs and logs: paths must not be broken over lines.
_WIDTH = None if sys.stdout.isatty() else 200

out = Console(highlight=False, width=_WIDTH)
err = Console(stderr=True, highlight=False, width=_WIDTH)

UNIT_NAMES = {"mma": "MMA", "mufu": "MUFU", "fma": "FMA", "smem": "shared memory", "hbm": "HBM"}


def note(message: str) -> None:
    """One dim line on stderr."""
    err.print(f"[dim]note: {escape(message)}[/]")


def us(value: float) -> str:
    """Microseconds with four significant digits."""
    return f"{value:.4g} us" if value < 10_000 else f"{value:,.0f} us"


def timed(value: float, source: Source) -> str:
    """Microseconds, marked where they are predicted."""
    return us(value) if source.value == "measured" else f"{us(value)} predicted"


def interval(low: float, high: float) -> str:
    """An interval in microseconds, without the unit."""
    return f"[{us(low)}, {us(high)}]".replace(" us", "")


def percent(ratio: float) -> str:
    """A ratio as a signed percentage above 1."""
    return f"{100 * (ratio - 1):+.1f} %"


def facts(rows: Iterable[tuple[str, Any]]) -> Table:
    """A borderless two-column table: a label, and text or a renderable."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    return table


def grid(*columns: str, rows: Iterable[Iterable[Any]]) -> Table:
    """A light table; columns whose name ends in ``>`` are right-aligned."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, Text) else str(value) for value in row))
    return table


def config_text(config: Config, default: Config | None = None) -> Text:
    """Every knob; those that differ from ``default`` stand out."""
    text = Text()
    for field in fields(config):
        value = getattr(config, field.name)
        changed = default is not None and value != getattr(default, field.name)
        text.append(f"{field.name}={value} ", style="bold green" if changed else "")
    return text


def changes_text(config: Config, base: Config, same: str = "the default") -> str:
    """Only the knobs that differ from ``base``; ``same`` where none does."""
    changed = (f.name for f in fields(config) if getattr(config, f.name) != getattr(base, f.name))
    return " ".join(f"{name}={getattr(config, name)}" for name in changed) or same


def diff_text(diff: str) -> Text:
    """A unified diff, added and removed lines in colour."""
    styles = {"---": "bold", "+++": "bold", "@@ ": "cyan", "-": "red", "+": "green"}
    text = Text()
    for line in diff.splitlines(keepends=True):
        text.append(line, next((style for start, style in styles.items() if line.startswith(start)), ""))
    return text


def bound_table(limits: Bound) -> Group:
    """Busy time of every unit, longest first."""
    rows = [
        (UNIT_NAMES[name], f"{cycles:,.0f}", us(cycles / limits.clock_mhz), "█" * round(20 * cycles / limits.cycles))
        for name, cycles in sorted(limits.units.items(), key=lambda item: -item[1])
        if limits.cycles
    ]
    return Group(grid("unit", "cycles>", f"at {limits.clock_mhz:.0f} MHz>", "", rows=rows))


def efficiency(row: Row, device: Device) -> str:
    """Which unit bounds a tuned row, and at what percentage of that bound it runs."""
    measured_on = DEVICES.get(row.provenance.device, device)
    limits = bound(row.problem, row.config, measured_on)
    if not limits.cycles:
        return "nothing to do"
    share = 100 * limits.microseconds / row.median_us
    text = f"{UNIT_NAMES[limits.unit]}: {share:.0f} % of its {us(limits.microseconds)} at {limits.clock_mhz:.0f} MHz"
    if row.source.value == "predicted":
        return f"{text}, predicted"
    clock = row.provenance.clock_mhz
    if clock and clock != limits.clock_mhz:
        there = bound(row.problem, row.config, replace(measured_on, clock_mhz=clock))
        text += f", {100 * there.microseconds / row.median_us:.0f} % at the {clock:.0f} MHz it ran at"
    return text


def row_facts(row: Row, device: Device) -> list[tuple[str, Any]]:
    """How a row is known, what it beat, and what bounds it."""
    provenance, (low, high) = row.provenance, row.interval_us
    default = type(row.config).default(row.problem)
    if row.source.value == "measured":
        median = f"{us(row.median_us)} {interval(low, high)}"
        how = f"{provenance.samples} samples by {provenance.measurer} on {provenance.device}"
    else:
        median = timed(row.median_us, row.source) + (f" {interval(low, high)}" if low < high else "")
        how = f"not measured: by {provenance.measurer} for {provenance.device}"
    if provenance.clock_mhz:
        how += f" at {provenance.clock_mhz:.0f} MHz" + ("" if row.source.value == "measured" else " (assumed)")
    versions = ", ".join(f"{name} {version}" for name, version in provenance.versions.items() if "-libs" not in name)
    found: list[tuple[str, Any]] = [
        (row.source.value, f"{median}, {tflops(row.problem, row.median_us)}"),
        ("", f"{how}, {provenance.date:%Y-%m-%d}, fa4gen {provenance.fa4gen}, {versions}"),
    ]
    if row.default_us:
        found.append(("default", f"{timed(row.default_us, row.source)} ({percent(row.default_us / row.median_us)})"))
    if row.runner_up:
        changes = changes_text(row.runner_up.config, default)
        mark = "" if row.source.value == "measured" else " predicted"
        found.append(("runner-up", f"{percent(1 + row.runner_up.gap)}{mark}: {changes}"))
    if len(row.shortlist) > 1:
        others = (changes_text(config, default) for config in row.shortlist[1:])
        found += [("" if index else "measure too", text) for index, text in enumerate(others)]
    return [*found, ("bounded by", efficiency(row, device))]


def winners_table(results: Sequence[TuneResult]) -> Group:
    """What a search found: winners with their intervals, what they gained on the default, and what bounds them.

    One measurer and device for all, named in the title; a predicted time says so in its row, and its interval is an
    ensemble's, not an error.
    """
    rows = []
    for result in results:
        default = type(result.config).default(result.problem)
        limits = bound(result.problem, result.config, result.device)
        gain = percent(result.default_us / result.median_us) if result.default_us else "-"
        gap = f"{100 * result.runner_up_gap:+.1f} %" if result.runner_up_gap is not None else "-"
        rows.append(
            (
                str(result.problem),
                us(result.median_us),
                interval(*result.interval_us) if len(set(result.interval_us)) > 1 else "-",
                tflops(result.problem, result.median_us),
                us(result.default_us) if result.default_us else "-",
                gain,
                gap + (" (tie)" if result.provenance.get("tied", 1) > 1 else ""),
                f"{UNIT_NAMES[limits.unit]} {100 * limits.microseconds / result.median_us:.0f} %",
                result.source.value,
                changes_text(result.config, default),
            )
        )
    by, on, what = ("by", "on", "95 % interval")
    if results[0].source.value == "predicted":
        by, on, what = ("predicted by", "for", "10-90 % of ensemble")
    columns = ("problem", "median>", what, "rate>", "default>", "gain>", "runner-up>", "of its bound>")
    table = grid(*columns, "source", "knobs off the default", rows=rows)
    title = {f"{r.provenance['measurer']} {on} {r.device.name} ({r.device.key})" for r in results}
    return Group(Text(f"winners {by} " + ", ".join(sorted(title)), style="bold"), table)


def bench_table(result: BenchResult) -> Group:
    """Contestants by time, ours marked; those that did not run or are wrong say why."""
    ran = sorted((e for e in result.entries if e.median_us is not None), key=lambda entry: entry.median_us or 0.0)
    rows = []
    for entry in [*ran, *(e for e in result.entries if e.median_us is None)]:
        name = Text(f"{entry.title} {entry.version}".strip(), style="bold green" if entry is result.entries[0] else "")
        if entry.median_us is None or entry.interval_us is None:
            rows.append((name, "-", "", "-", "", "", entry.note))
            continue
        against = f"{entry.speedup:.3f}" if entry.speedup else ""
        between = "[{:.3f}, {:.3f}]".format(*entry.speedup_interval) if entry.speedup_interval else ""
        rows.append(
            (
                name,
                us(entry.median_us),
                interval(*entry.interval_us),
                f"{entry.tflops:.0f}",
                against,
                between,
                entry.note,
            )
        )
    columns = ("kernel", "median>", "95 % interval", "TFLOP/s>", "time over ours>", "95 % interval", "")
    head = Text(f"{result.problem} on {result.device}; ours by {result.reason}", style="bold")
    return Group(head, grid(*columns, rows=rows), "")


def bench_summary(results: Sequence[BenchResult]) -> Group:
    """A line a problem, ours beside its best peer, and the geometric mean of all that have one."""
    rows, speedups = [], []
    for result in results:
        ours, peer = result.entries[0], result.best_peer
        clock = f"{ours.clock_mhz:.0f} MHz" if ours.clock_mhz else ""
        power = f"{ours.power_w:.0f} W" if ours.power_w else ""
        rate = f"{ours.tflops:.0f}" if ours.tflops else "-"
        if peer is None or peer.speedup is None or peer.speedup_interval is None:
            rows.append((result.problem, rate, "-", "", "", clock, power))
            continue
        speedups.append(peer.speedup)
        between = "[{:.3f}, {:.3f}]".format(*peer.speedup_interval)
        rows.append(
            (result.problem, rate, f"{peer.title} {peer.tflops:.0f}", f"{peer.speedup:.3f}", between, clock, power)
        )
    columns = ("problem", "TFLOP/s>", "best peer", "its time over ours>", "95 % interval", "clock>", "power>")
    mean = statistics.geometric_mean(speedups) if speedups else math.nan
    lowest = min(speedups, default=math.nan)
    head = Text(f"ours beside the best peer of each: geometric mean {mean:.3f}, lowest {lowest:.3f}", style="bold")
    return Group(head, grid(*columns, rows=rows), "")


def emulation_facts(verdict: Verification) -> list[tuple[str, Any]]:
    """What the emulator's first schedule ran, waited for and moved."""
    first = verdict.runs[0]
    kernels = first.kernels
    missed = [str(low) if low == high else f"{low}-{high}" for k in kernels for low, high in k.uncovered]
    lines = f"; PTX lines not reached: {', '.join(missed)}" if missed else ""
    moved = [
        f"{name} {sum(getattr(k, f'{key}_bytes_read') for k in kernels):,} B read, "
        f"{sum(getattr(k, f'{key}_bytes_written') for k in kernels):,} B written"
        for name, key in (("global memory", "global"), ("shared memory", "shared"), ("TMEM", "tmem"))
        if key != "tmem" or any(k.tmem_bytes_written for k in kernels)
    ]
    waits = sum(k.mbarrier_waits for k in kernels), sum(k.named_barrier_waits for k in kernels)
    schedules = ", ".join(f"{run.schedule} {run.seconds:.1f} s" for run in verdict.runs)
    return [
        ("schedules", schedules + ("; races looked for in the first" if first.races_checked else "")),
        ("coverage", f"{100 * first.coverage:.0f} % of basic blocks{lines}"),
        ("waits", f"{waits[0]:,} on mbarriers, {waits[1]:,} on named barriers"),
        *(("" if index else "moved", text) for index, text in enumerate(moved)),
    ]


def instruction_table(verdict: Verification) -> Table:
    """Dynamic warp instructions by class of the emulator's first schedule, most first."""
    units: Counter[str] = Counter()
    for kernel in verdict.runs[0].kernels:
        units.update({unit: sum(counts) for unit, counts in kernel.instructions.items()})
    total = units.total()
    rows = [(unit, f"{count:,}", f"{100 * count / total:.1f} %") for unit, count in units.most_common() if count]
    return grid("class", "warp instructions>", "share>", rows=[*rows, ("all", f"{total:,}", "")])


# Names of the simulator's units, fa4gen.timing.model.UNITS.
_SIMULATED = {
    "tensor": "tensor cores", "smem": "shared memory (MMA operands)", "issue": "issue slots", "fma": "FMA",
    "alu": "ALU", "mufu": "MUFU", "lsu": "load/store", "uniform": "uniform pipe", "control": "branches",
    "tmem": "tensor memory",
}  # fmt: skip


def simulation_facts(predictions: Sequence[Prediction], model: str) -> Table:
    """A predicted time with its ensemble's spread, which unit bounds a step, and what is lost to dependencies."""
    own, times = predictions[0], sorted(p.microseconds for p in predictions)
    busy = sorted(own.step_busy.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{_SIMULATED[name]} {100 * share:.0f} %" for name, share in busy if share >= 0.05)
    middle = times[len(times) // 2]
    return facts(
        [
            ("predicted", f"{us(middle)} {interval(times[0], times[-1])}, not measured: by {model}"),
            ("", f"{own.cycles:,.0f} cycles at an assumed {own.clock_ghz:.3f} GHz; a K/V step takes {own.step:,.0f}"),
            ("bounded by", f"{_SIMULATED[own.unit]}; {100 * own.waiting:.0f} % of a step is lost to dependencies"),
            ("busy in a step", shares),
        ]
    )


_GLYPHS = {"ENDED": (" ", ""), "ISSUE": ("█", "green"), "STALL": ("▒", "green"), "MBARRIER": ("·", "yellow"),
           "NAMED_BARRIER": ("-", "red"), "MMA": ("=", "blue")}  # fmt: skip
_LEGEND = "█ issues  ▒ stalls  · waits at a mbarrier  - at a named barrier  = for its MMAs; units: ▁ to █ of their rate"


def timeline_view(lanes: Timeline, width: int) -> Group:
    """A character for some cycles of each lane: a warp's commonest state, where a quarter of issues counts as issuing;
    a unit's mean share."""
    import numpy as np

    names = [*(lane.name for lane in lanes.warps), *(lane.name for lane in lanes.units)]
    columns = min(max(width - max(map(len, names)) - 3, 20), lanes.last - lanes.first)
    rows: list[tuple[str, Text]] = []
    for lane in lanes.warps:
        text = Text()
        for part in np.array_split(lane.states, columns):
            counts = np.bincount(part, minlength=len(_GLYPHS))
            state = 1 if counts[1] >= 0.25 * len(part) else int(counts.argmax())
            glyph, style = list(_GLYPHS.values())[state]
            text.append(glyph, style)
        rows.append((lane.name, text))
    for unit in lanes.units:
        shares = (float(part.mean()) for part in np.array_split(unit.busy, columns))
        rows.append((unit.name, Text("".join(" ▁▂▃▄▅▆▇█"[round(8 * share)] for share in shares), "cyan")))
    head = f"predicted: cycles {lanes.first:,} to {lanes.last:,} of a simulated CTA; {lanes.steps:g} steps take "
    head += f"{lanes.cycles:,}; a character is {(lanes.last - lanes.first) / columns:.0f} cycles"
    return Group(Text(head), facts(rows), Text(_LEGEND, "dim"))


def tflops(problem: AttentionProblem, microseconds: float) -> str:
    """Useful TFLOP/s."""
    return f"{problem.flops / microseconds / 1e6:.0f} TFLOP/s"
