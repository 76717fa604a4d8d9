"""Mutants of a kernel: one synchronising instruction left out at a time. Does the emulator notice?"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

import torch

from fa4gen.accuracy import check, default_scale, expect, make_inputs, poisoned_outputs
from fa4gen.emulator import CompiledObject, EmulatorError, Tensor, execute
from fa4gen.emulator.parser import Imm, Instr, Kernel
from fa4gen.problem import AttentionProblem

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
SCHEDULES = (("eager", 0, True), ("lazy", 0, False), ("random", 1, False))


# What is not mutated: tcgen05.fence orders nothing that the emulator could run out of order, and known-good kernels
# leave most of them out.


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


def judge(compiled: CompiledObject, problem: AttentionProblem, num_sms: int) -> tuple[str, str]:
    """How a kernel is caught, with the message; "" if all runs are right, alike and free of races."""
    inputs = make_inputs(problem, INPUTS)
    expected = expect(*inputs, problem, default_scale(problem))
    first: list[torch.Tensor] | None = None
    for schedule, seed, races in SCHEDULES:
        o, lse = poisoned_outputs(problem)
        outputs = [t for t in (o, lse) if t is not None]
        tensors = [*(Tensor(t) for t in inputs), *(Tensor(t, output=True) for t in outputs)]
        try:
            execute(
                compiled, [*tensors, default_scale(problem), num_sms], schedule=schedule, seed=seed, check_races=races
            )
        except EmulatorError as error:
            return type(error).__name__, str(error)
        report = check(o, lse, expected)
        if not report.ok:
            return "wrong", report.message
        if first is not None and not all(torch.equal(a, b) for a, b in zip(first, outputs, strict=True)):
            return "differs", schedule
        first = outputs
    return "", ""


def survey(compiled: CompiledObject, problem: AttentionProblem, num_sms: int, every: int = 1) -> list[Outcome]:
    """Outcomes of every ``every``-th mutant of each kernel of the object."""
    inputs, (o, lse) = make_inputs(problem, INPUTS), poisoned_outputs(problem)
    tensors = [*(Tensor(t) for t in inputs), *(Tensor(t, output=True) for t in (o, lse) if t is not None)]
    skipped = [
        range(first, last + 1)
        for kernel in execute(compiled, [*tensors, default_scale(problem), num_sms]).kernels
        for first, last in kernel.uncovered
    ]
    outcomes = []
    for program in compiled.programs.values():
        for index, (kind, instr, mutant) in enumerate(mutants(program.kernel)):
            if index % every == 0:
                run = not any(instr.line in lines for lines in skipped)
                how, message = judge(compiled.replace(mutant), problem, num_sms) if run else ("not run", "")
                outcomes.append(Outcome(kind, instr.line, instr.text, how, message))
    return outcomes
