"""The Hopper backward, run from its own PTX by its own host code: right in every schedule, the same bits if asked."""

from __future__ import annotations

import pytest
import torch

from fa4gen import emulator
from fa4gen.config import FlashBwdSm90Config as Config
from fa4gen.gradients import make_gradient_inputs
from fa4gen.problem import AttentionProblem

SWAPPED = {"tile_m": 80, "ds_from_rounded_p": True, "dq_swap_ab": True, "ds_stages": 1}
COLUMNS = {"warpgroup_split": "columns", "tile_n": 64, "ds_stages": 1, "dq_store": "registers"}
CASES = {
    "d128_causal": ("b=1 h=2 s=200 d=128 causal", Config()),
    "swapped_dq": ("b=1 h=1 sq=190 sk=270 d=128", Config(**SWAPPED)),
    "d64_wide": ("b=1 h=2 s=260 d=64 causal", Config(tile_m=128, ds_from_rounded_p=True, q_stages=3)),
    "ds_in_registers": ("b=1 h=1 s=256 d=64 causal", Config(mma_dk_is_rs=True, do_stages=1)),
    "grouped": ("b=1 h=4 hk=1 sq=100 sk=300 d=96 causal", Config(mma_dk_is_rs=True, tile_order="longest_first")),
    "more_queries": ("b=2 h=1 sq=300 sk=70 d=64 causal", Config(tile_m=128, ds_from_rounded_p=True)),
    "poly_exp2": ("b=1 h=1 s=150 d=64", Config(exp2_poly_fraction=0.25, exp2_poly_degree=4)),
    "fp16_d8": ("b=1 h=2 sq=77 sk=200 d=8 causal dtype=fp16", Config()),
    "d16_wide": ("b=1 h=1 sq=140 sk=100 d=16", Config(tile_m=128, ds_from_rounded_p=True)),
    "d40_dv80": ("b=1 h=1 sq=70 sk=190 d=40 dv=80", Config(ds_stages=1)),
    "d256": ("b=1 h=1 sq=130 sk=100 d=256 causal", Config(**COLUMNS)),
    "d192_dv128": ("b=1 h=2 hk=1 sq=100 sk=70 d=192 dv=128", Config(tile_m=128, do_stages=1, **COLUMNS)),
    "drained": (
        "b=1 h=2 hk=1 sq=190 sk=270 d=128",
        Config(**{**SWAPPED, "step_order": "drained", "mma_dk_is_rs": True, "q_stages": 1}),
    ),
    "drained_columns": ("b=1 h=1 sq=70 sk=100 d=256 causal", Config(step_order="drained", **COLUMNS)),
    "rotated": ("b=1 h=4 hk=2 s=260 d=64 causal", Config(query_order="rotated", ds_stages=1)),
    "one_query": ("b=3 h=1 sq=1 sk=1 d=128", Config()),
}


def verified(build, text: str, config: Config, **arguments):
    artifact, problem = build(f"{text} op=bwd", config)
    verdict = emulator.verify(artifact, problem, config=config, **arguments)
    assert verdict.ok, verdict.message
    return verdict


@pytest.mark.parametrize("case", CASES)
def test_right_in_every_schedule(build, case):
    verdict = verified(build, *CASES[case])
    assert verdict.accuracy is not None and verdict.accuracy.ok


@pytest.mark.parametrize("kind", ["peaked", "strided", "expanded"])
def test_other_inputs(build, kind):
    text, config = CASES["d128_causal"]
    inputs = make_gradient_inputs(AttentionProblem.parse(f"{text} op=bwd"), kind)
    verified(build, text, config, inputs=inputs, schedules=(("eager", 0),))


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("b=1 h=2 hk=1 s=280 d=64 causal", Config(mma_dk_is_rs=True)),
        ("b=1 h=1 sq=130 sk=400 d=64", Config()),
        ("b=1 h=1 s=260 d=32 causal", Config(**COLUMNS)),
    ],
    ids=["causal", "full", "from_registers"],
)
def test_deterministic_in_ten_random_schedules(build, text, config):
    """Bit for bit: without the semaphores the order of dQ's sum would be the schedule's."""
    schedules = (("eager", 0), *(("random", seed) for seed in range(10)))
    verified(build, f"{text} deterministic", config, schedules=schedules, check_races=False)


def test_queries_that_see_no_key_get_zero(build):
    text, config = CASES["more_queries"]
    artifact, problem = build(f"{text} op=bwd", config)
    dq = emulator.run(artifact, problem, config=config).outputs["dq"]
    assert torch.count_nonzero(dq[:, :230]) == 0
    assert torch.count_nonzero(dq[:, 230:]) > 0


def test_reduces_each_tile_of_dq_once(build):
    """Global fp32 traffic is what the bound counts: zeros, one reduction a step, and the sum read once."""
    artifact, problem = build("b=1 h=1 s=512 d=128 op=bwd", Config())
    before, main, after = emulator.run(artifact, problem, config=Config()).kernels
    tensor, steps, tile = 512 * 128 * 2, 8 * 4, 64 * 128 * 4
    assert before.global_bytes_written == 8 * tile + 2 * 512 * 4
    assert main.global_bytes_written == steps * tile + 2 * tensor
    # K and V once; Q, dO, LSE and Δ once for each of four blocks of keys.
    assert main.global_bytes_read == 2 * tensor + 4 * (2 * tensor + 2 * 512 * 4)
    assert (after.global_bytes_read, after.global_bytes_written) == (8 * tile, tensor)
