"""Work of one 128 x 128 tile in fa4gen's kernel and in flash-attn-4's, both emulated, as a Markdown table.

Usage: compare.py PROBLEM [FRACTION], with what ``make test-peers`` installs on PYTHONPATH. PROBLEM is full attention,
or its backward, with lengths that are multiples of 128. With FRACTION, also fa4gen with that share of polynomial
exponentials. Warp instructions are the PTX's, less moves and address casts, which ptxas mostly drops; of a backward,
those of its main kernel.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import flash_attn4

from fa4gen import emulator
from fa4gen.case import Case
from fa4gen.compile import compile_variant
from fa4gen.config import get_family
from fa4gen.emulator import EmulatorReport
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

ARCH = "sm_100a"
NUM_SMS = 4
UNITS = ("mufu", "fma", "alu", "convert", "tcgen05", "memory", "copy", "warp", "barrier", "control")
BYTES = (
    *("tmem_bytes_read", "tmem_bytes_written", "shared_bytes_read", "shared_bytes_written"),
    *("global_bytes_read", "global_bytes_written"),
)


def work(report: EmulatorReport, tiles: int) -> dict[str, float]:
    """What a tile takes of each unit: warp instructions, bytes, waits."""
    kernel = max(report.kernels, key=lambda k: k.total_instructions)
    total: Counter[str] = Counter()
    total.update({unit: sum(counts) for unit, counts in kernel.instructions.items() if unit != "move"})
    total["all instructions"] = sum(total.values())
    total.update({name.replace("_", " "): getattr(kernel, name) for name in BYTES})
    total["barrier waits"] = kernel.mbarrier_waits + kernel.named_barrier_waits
    return {name: count / tiles for name, count in total.items()}


def ours(problem: AttentionProblem, **knobs: float) -> EmulatorReport:
    """A run of the default config, with ``knobs`` changed."""
    config = replace(get_family(problem.op, ARCH).config_type.default(problem), **knobs)
    artifact = compile_variant(Variant.of(ARCH, problem, config))
    return emulator.run(artifact, problem, config=config, num_sms=NUM_SMS)


def theirs(problem: AttentionProblem) -> EmulatorReport:
    """A run of what flash-attn-4 itself chooses. From then on ``cute.compile`` is not ours."""
    interface = flash_attn4.install(ARCH, NUM_SMS)
    inputs = Case.make(problem).inputs.values()
    if problem.op == "bwd":
        q, k, v, o, do, lse = inputs
        interface._flash_attn_bwd(q, k, v, o, do, lse, causal=problem.causal)
    else:
        interface._flash_attn_fwd(*inputs, causal=problem.causal, return_lse=problem.return_lse)
    reports = flash_attn4.REPORTS
    return replace(reports[0], kernels=[kernel for report in reports for kernel in report.kernels])


def main(text: str, *fractions: str) -> None:
    """Prints a row a unit, a column a kernel."""
    problem = AttentionProblem.parse(text)
    reports = {"fa4gen": ours(problem)}
    reports |= {f"fa4gen, {fraction}": ours(problem, exp2_poly_fraction=float(fraction)) for fraction in fractions}
    reports["flash-attn-4"] = theirs(problem)
    tiles = problem.batch * problem.heads * (problem.seqlen_q // 128) * (problem.seqlen_k // 128)
    columns = [work(report, tiles) for report in reports.values()]
    rows = [["128 x 128 tile", *reports], ["---"] * (len(reports) + 1)]
    for name in (*UNITS, "all instructions", *(name.replace("_", " ") for name in BYTES), "barrier waits"):
        rows.append([name, *(f"{column.get(name, 0):,.0f}" for column in columns)])
    print(f"{problem}\n", *(f"| {' | '.join(row)} |" for row in rows), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
