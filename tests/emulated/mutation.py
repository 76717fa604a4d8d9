"""Mutants of a kernel: one synchronising instruction left out at a time. Does the emulator notice?

The whole survey of docs/emulator.md, or some of :data:`SUBJECTS`::

python tests/emulated/mutation.py [SUBJECT...]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from fa4gen.case import Case
from fa4gen.compile import compile_variant
from fa4gen.config import Config, FlashFwdSm90Config, FlashFwdSm100Config
from fa4gen.emulator import CompiledObject, EmulatorError, EmulatorReport, Tensor, execute
from fa4gen.emulator.executor import load
from fa4gen.emulator.parser import Imm, Instr, Kernel
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

# What counts as synchronising: opcode and the modifier that says what it does.
SYNCHRONISING = {
    "mbarrier": ("init", "arrive", "try_wait"),
    "bar": ("sync", "arrive"),
    "barrier": ("sync", "arrive", "wait"),
    "fence": ("proxy", "mbarrier_init"),
    "wgmma": ("fence", "commit_group", "wait_group"),
    "cp": ("commit_group", "wait_group"),
    "tcgen05": ("commit", "wait::ld", "wait::st"),
}
# Row maxima that keep moving: else kernels skip rescaling, and what synchronises it.
INPUTS = "peaked"
SCHEDULES = (("eager", 0, True), ("lazy", 0, False), ("random", 1, True))  # kind, seed, whether races are looked for

# What is not mutated: tcgen05.fence orders nothing that the emulator could run out of order, and known-good kernels
# leave most of them out.


@dataclass(frozen=True)
class Subject:
    """A kernel, and problems that run all of it between them: several steps, one and two, several tiles a CTA."""

    arch: str
    config: Config
    problems: tuple[str, ...]
    num_sms: int = 3

    @property
    def variant(self) -> Variant:
        return Variant.of(self.arch, AttentionProblem.parse(self.problems[0]), self.config)

    def run(self, compiled: CompiledObject, case: Case, **options: Any) -> EmulatorReport:
        """One run of the kernel, or of a mutant."""
        tensors = [Tensor(t, name=name) for name, t in case.inputs.items()]
        tensors += [Tensor(t, True, name) for name, t in case.outputs.items()]
        workspace = case.workspace(self.config)
        if workspace is not None:
            tensors.append(Tensor(workspace, name="workspace", scratch=True))
        return execute(compiled, [*tensors, case.scale, self.num_sms], **options)


ONE_TILE = {"q_stages": 1, "softmax_regs": 208, "correction_regs": 112}
SUBJECTS = {
    "sm_90 pingpong": Subject(
        "sm_90a",
        FlashFwdSm90Config(persistent=True),
        ("h=2 s=300 d=128 lse", "h=3 sq=200 sk=90 d=128 lse", "h=5 sq=100 sk=200 d=128 lse"),
    ),
    "sm_90 cooperative": Subject(
        "sm_90a",
        FlashFwdSm90Config(mma_pv_is_rs=False, schedule="cooperative", tile_n=64),
        ("h=2 sq=300 sk=430 d=128 causal lse", "h=5 sq=40 sk=100 d=128 causal lse", "h=5 sq=70 sk=40 d=128 causal lse"),
    ),
    "sm_90 cluster": Subject(
        "sm_90a",
        FlashFwdSm90Config(cluster_m=2, persistent=True),
        ("h=2 sq=300 sk=512 d=128 lse", "h=4 sq=512 sk=90 d=128 lse", "h=4 sq=256 sk=200 d=128 lse"),
        4,
    ),
    "sm_90 packed": Subject(
        "sm_90a",
        FlashFwdSm90Config(tile_m=192, pack_gqa=True, persistent=True, tile_order="longest_first"),
        (
            "b=2 h=4 hk=2 sq=300 sk=310 d=64 causal lse",
            "b=3 h=4 hk=2 sq=100 sk=60 d=64 causal lse",
            "b=3 h=4 hk=2 sq=100 sk=200 d=64 causal lse",
        ),
    ),
    "sm_100 causal": Subject(
        "sm_100a",
        FlashFwdSm100Config(exp2_poly_fraction=0.09375, scheduler="single", tile_order="longest_first"),
        ("h=2 s=300 d=128 causal lse", "h=2 sq=300 sk=90 d=128 causal lse"),
    ),
    "sm_100 two slots": Subject(
        "sm_100a",
        FlashFwdSm100Config(s_stages=2, tile_n=64),
        ("h=3 sq=300 sk=200 d=64 lse", "h=6 sq=257 sk=60 d=64 lse", "h=6 sq=70 sk=100 d=64 lse"),
    ),
    "sm_100 one tile": Subject(
        "sm_100a",
        FlashFwdSm100Config(**ONE_TILE, epilogue="tma_over_q", kv_stages=2),
        ("h=2 s=333 d=128 causal lse", "h=7 sq=100 sk=90 d=128 causal lse", "h=7 sq=100 sk=200 d=128 causal lse"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What happened to one mutant. ``how``: the kind of error, "wrong", "differs", "not run" or "" for a survivor."""

    kind: str
    line: int
    text: str
    how: str
    message: str = ""


def kind_of(instr: Instr) -> str | None:
    """ "mbarrier.arrive" and so on, None if the instruction does not synchronise."""
    action = next((m for m in SYNCHRONISING.get(instr.opcode, ()) if m in instr.mods), None)
    if action is None:
        return None
    if "expect_tx" in instr.mods:
        action += ".expect_tx"
    group = (
        ".cluster" if "cluster" in instr.mods and instr.opcode == "barrier" else ".warp" if "warp" in instr.mods else ""
    )
    return f"{instr.opcode}{group}.{action}"


def mutants(kernel: Kernel) -> Iterator[tuple[str, Instr, Kernel]]:
    """(kind, instruction left out, mutant). A wait is left out by taking its answer for true."""
    for index, instr in enumerate(kernel.instrs):
        kind = kind_of(instr)
        if kind is None:
            continue
        mutant = copy(kernel)
        mutant.instrs = list(kernel.instrs)
        mutant.labels = dict(kernel.labels)
        if "try_wait" in instr.mods:
            always = (instr.operands[0], Imm(0), Imm(0))
            mutant.instrs[index] = replace(instr, opcode="setp", mods=("eq", "u32"), operands=always)
        else:
            mutant.instrs[index] = replace(instr, opcode="griddepcontrol", mods=("wait",), operands=())
        yield kind, instr, mutant


def judge(
    compiled: CompiledObject,
    subject: Subject,
    problem: AttentionProblem,
    schedules: Sequence[tuple[str, int, bool]] = SCHEDULES,
) -> tuple[str, str]:
    """How a kernel is caught, with the message; "" if all runs are right, alike and free of races."""
    case = Case.make(problem, INPUTS)
    expected = case.expect()
    first: dict[str, torch.Tensor] | None = None
    for schedule, seed, races in schedules:
        case.poison()
        try:
            outputs = subject.run(compiled, case, schedule=schedule, seed=seed, check_races=races).outputs
        except EmulatorError as error:
            return type(error).__name__, str(error)
        report = case.check(expected, tuple(outputs.values()))
        if not report.ok:
            return "wrong", report.message
        outputs = {name: t.clone() for name, t in outputs.items()}
        first = first or outputs
        same_bits = problem.op == "fwd" or problem.deterministic
        if same_bits and not all(torch.equal(t, outputs[name]) for name, t in first.items()):
            return "differs", schedule
    return "", ""


def unreached(compiled: CompiledObject, subject: Subject, problem: AttentionProblem) -> dict[str, list[range]]:
    """By kernel, the lines of blocks that the problem does not run."""
    kernels = subject.run(compiled, Case.make(problem, INPUTS)).kernels
    return {kernel.name: [range(first, last + 1) for first, last in kernel.uncovered] for kernel in kernels}


def survey(compiled: CompiledObject, subject: Subject, every: int = 1) -> Iterator[Outcome]:
    """Outcomes of every ``every``-th mutant of each kernel of the object. One problem that catches it is enough; all
    are tried in the schedule in which races are cheapest to find, the first one in the others.

    Raises:
        ValueError: something is reported on the kernel itself.
    """
    problems = [AttentionProblem.parse(text) for text in subject.problems]
    for problem in problems:
        if (verdict := judge(compiled, subject, problem)) != ("", ""):
            raise ValueError(f"{subject.variant.name} on {problem}: {verdict}")
    missed = [(problem, unreached(compiled, subject, problem)) for problem in problems]
    for name, program in compiled.programs.items():
        for kind, instr, mutant in list(mutants(program.kernel))[::every]:
            reached = [p for p, lines in missed if not any(instr.line in block for block in lines[name])]
            trials = [(p, SCHEDULES[:1]) for p in reached] + [(p, SCHEDULES[1:]) for p in reached[:1]]
            changed = compiled.replace(mutant)
            verdicts = (judge(changed, subject, *trial) for trial in trials)
            how, message = next((v for v in verdicts if v[0]), ("", "") if reached else ("not run", ""))
            yield Outcome(kind, instr.line, instr.text, how, message)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Subjects; default: all.")] = None,
) -> None:
    """Prints what was caught, and every mutant that was not, with its line in the PTX."""
    console = Console()
    for name in names or SUBJECTS:
        subject = SUBJECTS[name]
        artifact = compile_variant(subject.variant)
        compiled = load(artifact.object_path, artifact.ptx_path, artifact.variant_name)
        total = sum(len(list(mutants(program.kernel))) for program in compiled.programs.values())
        outcomes = list(track(survey(compiled, subject), name, total, console=console))
        counts = Counter(outcome.how or "survived" for outcome in outcomes)
        console.print(name, artifact.ptx_path, len(outcomes), dict(counts), highlight=False)
        for outcome in outcomes:
            if outcome.how in ("", "not run"):
                console.print(f"  {outcome.kind:24} {outcome.line}: {outcome.text} {outcome.how}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
