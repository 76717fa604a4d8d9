"""Attention variants in the emulator: one run, and the verdict over several schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fa4gen.arch import DEVICES
from fa4gen.config import Config
from fa4gen.emulator.errors import EmulatorError
from fa4gen.emulator.executor import execute, load
from fa4gen.emulator.host import Tensor
from fa4gen.emulator.report import EmulatorReport
from fa4gen.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from fa4gen.accuracy import AccuracyReport
    from fa4gen.artifact_cache import Artifact
    from fa4gen.case import Case

__all__ = ["SCHEDULES", "Verification", "launch_arguments", "reduced", "run", "verify"]

# Few enough that a persistent kernel walks several tiles a CTA even on a small problem.
VERIFY_SMS = 4
SCHEDULES = (("eager", 0), ("lazy", 0), ("random", 1))


@dataclass(frozen=True)
class Verification:
    """Verdict on one variant and problem. ``message`` is a sentence; ``error`` is what stopped a run, if anything did.

    ``runs``: reports by (schedule, seed), in the order they ran. The first one's output was compared with float64; of a
    backward that need not be deterministic every one's.
    """

    ok: bool
    message: str
    accuracy: AccuracyReport | None
    runs: list[EmulatorReport]
    error: EmulatorError | None = None


def run(
    artifact: Artifact,
    problem: AttentionProblem,
    inputs: Sequence[torch.Tensor] | None = None,
    *,
    config: Config | None = None,
    schedule: str = "eager",
    seed: int = 0,
    check_races: bool = False,
    num_sms: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> EmulatorReport:
    """Runs a variant. Outputs are "o" and, if the problem asks for it, "lse"; of a backward "dq", "dk", "dv".

    ``inputs``: CPU tensors Q, K, V, of a backward Q, K, V, O, dO, LSE; default those of :class:`fa4gen.case.Case`.
    ``config``: the variant's, which a backward needs. ``num_sms`` is what a persistent kernel sizes its grid by;
    default the smallest known device of the arch. ``progress``: see :func:`execute`.

    Raises:
        EmulatorError: the kernel does something wrong, or something the emulator does not implement.
    """
    from fa4gen.case import Case

    compiled = load(artifact.object_path, artifact.ptx_path, artifact.variant_name)
    case = Case.make(problem) if inputs is None else Case.of(problem, inputs)
    if num_sms is None:
        num_sms = min(d.sm_count for d in DEVICES.values() if d.arch.name == artifact.arch)
    arguments = launch_arguments(case, config, num_sms)
    return execute(compiled, arguments, schedule=schedule, seed=seed, check_races=check_races, progress=progress)


def launch_arguments(case: Case, config: Config | None, num_sms: int) -> list[Any]:
    """:meth:`fa4gen.case.Case.arguments` for the emulator, which is told what may be written and what is scratch."""
    arguments: list[Any] = [Tensor(tensor, name=name) for name, tensor in case.inputs.items()]
    arguments += [Tensor(tensor, True, name) for name, tensor in case.outputs.items()]
    workspace = case.workspace(config)
    if workspace is not None:
        arguments.append(Tensor(workspace, name="workspace", scratch=True))
    return [*arguments, case.scale, num_sms]


def verify(
    artifact: Artifact,
    problem: AttentionProblem,
    inputs: Sequence[torch.Tensor] | None = None,
    *,
    config: Config | None = None,
    schedules: Sequence[tuple[str, int]] = SCHEDULES,
    check_races: bool = True,
    num_sms: int = VERIFY_SMS,
    progress: Callable[[float], None] | None = None,
) -> Verification:
    """Is the variant right for the problem: against float64, free of races, and the same bits in every schedule?

    A backward that need not be deterministic adds up in any order: each schedule is compared with float64 alone. Races
    are looked for in the first schedule. ``inputs``, ``config``, ``num_sms``: see :func:`run`. ``progress`` is told the
    share that is done, over all schedules.
    """
    import torch

    from fa4gen.case import Case

    case = Case.make(problem) if inputs is None else Case.of(problem, inputs)
    expected = case.expect()
    same_bits = problem.op == "fwd" or problem.deterministic
    runs: list[EmulatorReport] = []
    accuracy = None
    for index, (schedule, seed) in enumerate(schedules):

        def share(part: float, before: int = index) -> None:
            if progress is not None:
                progress((before + part) / len(schedules))

        try:
            report = run(
                artifact, problem, tuple(case.inputs.values()), config=config, schedule=schedule, seed=seed,
                check_races=check_races and index == 0, num_sms=num_sms, progress=share,
            )  # fmt: skip
        except EmulatorError as error:
            return Verification(False, f"schedule {schedule}, seed {seed}: {error}", accuracy, runs, error)
        runs.append(report)
        if accuracy is None or not same_bits:
            accuracy = case.check(expected, tuple(report.outputs.values()))
            if not accuracy.ok:
                return Verification(False, f"schedule {schedule}, seed {seed}: {accuracy.message}", accuracy, runs)
        for name, output in report.outputs.items():
            if same_bits and not torch.equal(output.view(torch.uint8), runs[0].outputs[name].view(torch.uint8)):
                return Verification(
                    False, f"{name} differs between schedules {schedules[0]} and {(schedule, seed)}", accuracy, runs
                )
    agree = f"; {len(runs)} schedules {'agree' if same_bits else 'are right'}" if len(runs) > 1 else ""
    races = ", no race" if check_races else ""
    return Verification(True, f"{accuracy.message if accuracy else ''}{agree}{races}", accuracy, runs)


def reduced(problem: AttentionProblem, config: Config) -> AttentionProblem:
    """A problem of the same variant that takes seconds: few heads, and lengths of a few tiles and a part of one.

    No extent grows; square problems stay square.
    """
    rows = config.tile_m * (getattr(config, "ctas", 1) if problem.op == "fwd" else 1)
    rows = rows // problem.gqa_ratio if getattr(config, "pack_gqa", False) else rows
    lengths = [max(2 * rows, 1) + 17, 3 * config.tile_n + 7]
    if problem.seqlen_q == problem.seqlen_k:
        lengths = [max(lengths)] * 2
    heads_kv = min(problem.heads_kv, 2 if problem.gqa_ratio <= 4 else 1)
    return replace(
        problem,
        batch=min(problem.batch, 2 if problem.gqa_ratio == 1 else 1),
        heads=heads_kv * problem.gqa_ratio,
        heads_kv=heads_kv,
        seqlen_q=min(problem.seqlen_q, lengths[0]),
        seqlen_k=min(problem.seqlen_k, lengths[1]),
    )
