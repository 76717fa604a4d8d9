"""The Blackwell backward, on one CTA and on a pair, run from its own PTX by its own host code, and what it moves."""

from __future__ import annotations

import pytest
import torch

from fa4gen import emulator
from fa4gen.config import FlashBwdSm100Config as Config
from fa4gen.gradients import make_gradient_inputs
from fa4gen.problem import AttentionProblem

PAIR = {"use_2cta": True, "q_stages": 1, "do_stages": 1, "dq_stages": 1}
POLY = {"exp2_poly_degree": 4, "compute_regs": 144}
CASES = {
    "default_d128": ("b=1 h=2 s=300 d=128 causal", None),
    "default_d64": ("b=2 h=1 s=260 d=64", None),
    "one_cta_d128": ("b=1 h=2 sq=200 sk=333 d=128", Config()),
    "grouped": ("b=1 h=4 hk=1 sq=150 sk=300 d=96 causal", Config(dq_stages=3, do_stages=2, tile_order="longest_first")),
    "own_columns": ("b=1 h=2 s=400 d=64 causal", Config(dq_own_columns=True, q_stages=4, do_stages=3)),
    "poly": ("b=1 h=2 s=200 d=40 dv=80", Config(exp2_poly_fraction=0.25, exp2_poly_start=0.5, **POLY)),
    "fp16_d8": ("b=1 h=2 sq=77 sk=200 d=8 causal dtype=fp16", Config()),
    "one_query": ("b=2 h=1 sq=1 sk=1 d=128", Config()),
    "pair_d128": ("b=1 h=2 sq=200 sk=600 d=128", Config(**PAIR)),
    "pair_grouped": ("b=1 h=4 hk=2 sq=300 sk=500 d=128 causal", Config(**PAIR, tile_order="longest_first")),
    "pair_own_columns": (
        "b=1 h=2 s=400 d=64 causal",
        Config(**{**PAIR, "dq_own_columns": True, "q_stages": 2, "do_stages": 3}),
    ),
    "pair_more_queries": ("b=2 h=1 sq=500 sk=200 d=64 causal", Config(**PAIR)),
    "pair_poly": (
        "b=1 h=1 sq=129 sk=300 d=24 dv=104",
        Config(**PAIR, exp2_poly_fraction=0.125, compute_regs=144, reduce_regs=112),
    ),
    "pair_one_query": ("b=1 h=2 sq=1 sk=130 d=128 causal dtype=fp16", Config(**PAIR)),
}


def verified(build, text: str, config: Config | None, arch: str = "sm_100a", **arguments):
    config = config or Config.default(AttentionProblem.parse(f"{text} op=bwd"))
    artifact, problem = build(f"{text} op=bwd", config, arch)
    verdict = emulator.verify(artifact, problem, config=config, **arguments)
    assert verdict.ok, verdict.message
    return verdict


@pytest.mark.parametrize("case", CASES)
def test_right_in_every_schedule(build, case):
    verdict = verified(build, *CASES[case], arch="sm_103a" if case in ("poly", "pair_poly") else "sm_100a")
    assert verdict.accuracy is not None and verdict.accuracy.ok


@pytest.mark.parametrize("case", ["one_cta_d128", "pair_grouped"])
@pytest.mark.parametrize("kind", ["peaked", "strided", "expanded"])
def test_other_inputs(build, case, kind):
    text, config = CASES[case]
    inputs = make_gradient_inputs(AttentionProblem.parse(f"{text} op=bwd"), kind)
    verified(build, text, config, inputs=inputs, schedules=(("eager", 0),))


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("b=1 h=2 hk=1 s=280 d=64 causal", Config(tile_order="shortest_first")),
        ("b=1 h=1 sq=130 sk=400 d=64", Config(dq_own_columns=True)),
        ("b=1 h=1 sq=200 sk=700 d=64 causal", Config(**PAIR, tile_order="shortest_first")),
    ],
    ids=["causal", "full", "pair"],
)
def test_deterministic_in_random_schedules(build, text, config):
    schedules = (("eager", 0), *(("random", seed) for seed in range(6)))
    verified(build, f"{text} deterministic", config, schedules=schedules, check_races=False)


@pytest.mark.parametrize("case", ["grouped", "pair_more_queries"])
def test_queries_that_see_no_key_get_zero(build, case):
    text, config = CASES[case]
    text = text.replace("sq=150", "sq=450")
    artifact, problem = build(f"{text} op=bwd", config, "sm_100a")
    dq = emulator.run(artifact, problem, config=config).outputs["dq"]
    blind = problem.seqlen_q - problem.seqlen_k
    assert torch.count_nonzero(dq[:, :blind]) == 0
    assert torch.count_nonzero(dq[:, blind:]) > 0


TILE = 128 * 128
# Bytes of a 128 x 128 x 128 step: what the MMAs read, and dQ in fp32, to and from where the reduction reads it.
OPERANDS = {"one_cta": 8 * TILE * 2, "pair": 6 * TILE * 2}
DQ = {"one_cta": TILE * 4, "pair": TILE * 2}
# dS is written once; half of a pair's also leaves, is read and is written where it arrives.
DS = {"one_cta": TILE * 2, "pair": TILE * 2 + TILE * 2}
# FlashAttention-4, section 3.2.1: 3328 cycles of 128 bytes; of a pair, 5 % more than the MMA's 2560.
PAPER_CYCLES = {"one_cta": 3328, "pair": 2688}


def added_by_steps(build, config: Config) -> dict[str, float]:
    """What a step of 128 queries adds to a CTA's traffic, in bytes."""
    reports = []
    for seqlen_q in (256, 512):
        artifact, problem = build(f"b=1 h=1 sq={seqlen_q} sk=512 d=128 op=bwd", config, "sm_100a")
        reports.append(emulator.run(artifact, problem, config=config).kernels[1])
    names = ("shared_bytes_read", "shared_bytes_written", "global_bytes_written")
    return {name: (getattr(reports[1], name) - getattr(reports[0], name)) / (2 * 4) for name in names}


@pytest.mark.parametrize("kind", PAPER_CYCLES)
def test_traffic_of_a_step_is_the_papers(build, kind):
    bytes_ = added_by_steps(build, Config(**PAIR) if kind == "pair" else Config())
    assert bytes_["global_bytes_written"] == DQ[kind], "each CTA of a pair reduces half of the rows"
    # Beside what the paper counts: Q, dO, LSE and Δ come in, and eight warps read LSE and Δ, 4 bytes a lane.
    loads = 2 * TILE * 2 + 2 * 128 * 4
    statistics = 2 * TILE * 4
    counted = bytes_["shared_bytes_read"] + bytes_["shared_bytes_written"] - loads - statistics
    assert counted == OPERANDS[kind] + DS[kind] + 2 * DQ[kind]
    assert counted / 128 == pytest.approx(PAPER_CYCLES[kind], rel=0.05)
