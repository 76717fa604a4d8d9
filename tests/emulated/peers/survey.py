"""Runs flash-attn-4's forward and backward of one architecture in the emulator; prints one JSON line a case.

A process of its own: :func:`flash_attn4.install` changes torch for good. Usage: survey.py sm_90a | sm_100a
"""

from __future__ import annotations

import json
import sys

import flash_attn4
import torch

from fa4gen.accuracy import check, default_scale, expect, make_inputs
from fa4gen.emulator import EmulatorError
from fa4gen.problem import AttentionProblem

CASES = (
    "h=2 s=512 d=128 lse",
    "h=2 s=512 d=128 causal lse",
    "h=4 hk=2 s=300 d=64 causal lse",
    "h=8 hk=2 sq=130 sk=333 d=64 lse",
    "h=2 hk=1 sq=200 sk=333 d=96 lse",
    "h=2 s=256 d=192 dv=128 causal lse",
)
SCHEDULES = (("eager", True), ("lazy", False), ("random", True))
LIMIT = 0.01  # of the largest element: bf16 rounding of P, dS and the result; wrong tiles are at 0.3 and more


def forward(interface, problem, inputs):
    """Outcome of one forward under the current options, and its O and LSE."""
    out, lse = interface._flash_attn_fwd(*inputs, causal=problem.causal, return_lse=True)[:2]
    report = check(out, lse, expect(*inputs, problem, default_scale(problem)))
    return report.ok, report.message, (out, lse)


def gradients(problem, inputs, grad):
    """Float64 O, LSE and gradients."""
    q, k, v = (t.double().requires_grad_() for t in inputs)
    group = problem.gqa_ratio
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * default_scale(problem)
    if problem.causal:
        i, j = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_k)
        scores = scores.masked_fill(j > i + problem.seqlen_k - problem.seqlen_q, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(group, 2))
    out.backward(grad.double())
    return out.detach(), scores.logsumexp(-1).detach(), (q.grad, k.grad, v.grad)


def backward(interface, problem, inputs, grad, expected):
    out, lse, wanted = expected
    got = interface._flash_attn_bwd(*inputs, out.bfloat16(), grad, lse.float(), causal=problem.causal)[:3]
    errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True)]
    return max(errors) < LIMIT, f"relative errors {[f'{e:.4f}' for e in errors]}", got


def main(arch: str) -> None:
    interface = flash_attn4.install(arch)
    for text in CASES:
        problem = AttentionProblem.parse(text)
        inputs = make_inputs(problem)
        generator = torch.Generator().manual_seed(1)
        shape = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v)
        grad = torch.randn(shape, generator=generator).bfloat16()
        expected = gradients(problem, inputs, grad)
        for op in ("fwd", "bwd"):
            first = None
            for schedule, races in SCHEDULES:
                flash_attn4.OPTIONS.update(schedule=schedule, check_races=races, seed=1)
                flash_attn4.REPORTS.clear()
                try:
                    run = forward(interface, problem, inputs) if op == "fwd" else backward(
                        interface, problem, inputs, grad, expected)  # fmt: skip
                    ok, message, tensors = run
                except EmulatorError as error:
                    ok, message, tensors = False, f"{type(error).__name__}: {error}", None
                # Gradients of Q are summed by atomics: their order, so their bits, may differ.
                same = first is None or op == "bwd" or all(map(torch.equal, first, tensors or ()))
                first = first or tensors
                seconds = sum(r.seconds for r in flash_attn4.REPORTS)
                row = {"case": text, "op": op, "schedule": schedule, "races": races, "ok": ok and same}
                print(json.dumps(row | {"message": message, "seconds": round(seconds, 2)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
