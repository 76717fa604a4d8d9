"""The Blackwell forward family, run from its own PTX by its own host code: right, free of races, the same bits."""

from __future__ import annotations

import pytest

from fa4gen import emulator
from fa4gen.accuracy import check, default_scale, expect, make_inputs
from fa4gen.config import FlashFwdSm100Config as Config
from fa4gen.problem import AttentionProblem

ONE_TILE = {"q_stages": 1, "softmax_regs": 208, "correction_regs": 112}
RELOAD = {"reload_scores": True, "softmax_regs": 208, "correction_regs": 64}
CASES = {
    "default_d128": ("b=1 h=2 s=700 d=128 causal lse", None),
    "default_d64": ("b=2 h=3 s=300 d=64", None),
    "default_d192_dv128": ("b=1 h=1 sq=300 sk=500 d=192 dv=128 causal lse", None),
    "default_d256": ("b=1 h=2 s=400 d=256 lse", None),
    "persistent": ("b=3 h=4 sq=200 sk=333 d=128 lse", Config(scheduler="persistent")),
    "pack_gqa": ("b=2 h=8 hk=1 sq=100 sk=777 d=128 causal lse", Config(pack_gqa=True, tile_order="longest_first")),
    "gqa": ("b=2 h=4 hk=2 sq=777 sk=300 d=64 causal lse", Config(scheduler="single")),
    "two_slots": ("b=1 h=5 s=450 d=64 causal lse", Config(s_stages=2, tile_n=64)),
    "two_slots_always_rescaled": (
        "b=1 h=5 s=450 d=64 lse",
        Config(s_stages=2, tile_n=64, rescale_threshold=None, p_store_split=1.0),
    ),
    "one_q_tile": ("b=2 h=3 s=333 d=128 causal", Config(**ONE_TILE, epilogue="tma_over_q", kv_stages=2)),
    "grouped": ("b=1 h=2 s=600 d=128 lse", Config(mma_order="grouped", rescale_threshold=0.0)),
    "from_registers": ("b=1 h=5 s=300 d=96 lse", Config(epilogue="registers", p_store_split=0.5)),
    "over_q": ("b=2 h=4 s=300 d=128 dtype=fp16 lse", Config(epilogue="tma_over_q", kv_stages=2)),
    "reload": ("b=1 h=2 s=600 d=64 causal lse", Config(**RELOAD, tile_n=192)),
    "poly": (
        "b=1 h=2 s=400 d=8 lse",
        Config(tile_n=96, exp2_poly_fraction=0.25, exp2_poly_degree=5, exp2_poly_start=0.5),
    ),
    "odd_tile": ("b=1 h=2 s=401 d=40 dv=80 causal", Config(tile_n=80, kv_stages=5)),
    "pair": ("b=1 h=3 s=600 d=128 causal lse", Config(use_2cta=True, kv_stages=6)),
    "pair_one_row": ("b=1 h=2 sq=1 sk=1 d=64 lse", Config(use_2cta=True)),
    "pair_pack_gqa": (
        "b=2 h=8 hk=1 sq=70 sk=333 d=128 causal lse",
        Config(use_2cta=True, pack_gqa=True, tile_order="longest_first", scheduler="single"),
    ),
    "pair_gqa": ("b=1 h=4 hk=2 sq=777 sk=300 d=64 causal lse", Config(use_2cta=True)),
    "pair_two_slots": (
        "b=1 h=2 s=450 d=40 dv=80 lse",
        Config(use_2cta=True, s_stages=2, tile_n=64, rescale_threshold=None, p_store_split=1.0, kv_stages=5),
    ),
    "pair_over_q": (
        "b=1 h=5 s=300 d=64 dv=128 lse",
        Config(use_2cta=True, epilogue="tma_over_q", tile_n=96, mma_order="grouped"),
    ),
    "pair_from_registers": (
        "b=1 h=2 sq=400 sk=300 d=192 dv=128 causal dtype=fp16",
        Config(use_2cta=True, epilogue="registers", tile_n=128),
    ),
    "pair_one_q_tile": (
        "b=1 h=2 s=300 d=256 lse",
        Config(**ONE_TILE, use_2cta=True, s_stages=2, tile_n=96, epilogue="tma_over_q", exp2_poly_fraction=0.0),
    ),
    "clc": ("b=1 h=14 sq=300 sk=150 d=64 causal lse", Config(scheduler="clc", tile_order="longest_first")),
    "clc_pair": ("b=2 h=4 hk=2 sq=600 sk=150 d=128 lse", Config(scheduler="clc", use_2cta=True, epilogue="registers")),
    "one_row": ("b=1 h=2 sq=1 sk=1 d=64 lse", Config()),
    "one_query": ("b=1 h=2 sq=1 sk=900 d=128 causal lse", Config(scheduler="single")),
}


def built(build, case: str, arch: str = "sm_100a"):
    text, config = CASES[case]
    return build(text, config or Config.default(AttentionProblem.parse(text)), arch)


@pytest.mark.parametrize("case", CASES)
def test_right_in_every_schedule(build, case):
    artifact, problem = built(build, case, "sm_103a" if case in ("poly", "one_row") else "sm_100a")
    verdict = emulator.verify(artifact, problem)
    assert verdict.ok, verdict.message
    assert verdict.accuracy is not None and verdict.accuracy.ok


@pytest.mark.parametrize("case", ["default_d128", "two_slots", "pair"])
@pytest.mark.parametrize("kind", ["peaked", "constant", "large_v", "strided", "expanded"])
def test_other_inputs(build, case, kind):
    artifact, problem = built(build, case)
    inputs = make_inputs(problem, kind)
    outputs = emulator.run(artifact, problem, inputs, num_sms=2).outputs
    report = check(outputs["o"], outputs["lse"], expect(*inputs, problem, default_scale(problem)))
    assert report.ok, report.message


@pytest.mark.parametrize("case", ["persistent", "pair_over_q"])
def test_several_tiles_a_cta(build, case):
    artifact, problem = built(build, case)
    assert emulator.verify(artifact, problem, num_sms=1).ok


def test_a_pair_reads_each_half_of_keys_and_values_once(build):
    read = []
    for use_2cta in (False, True):
        artifact, problem = build("b=1 h=1 s=512 d=128", Config(use_2cta=use_2cta), "sm_100a")
        (kernel,) = emulator.run(artifact, problem).kernels
        read.append(kernel.shared_bytes_read)
    tiles, operand = (512 // 128) ** 2, 128 * 128 * 2
    assert read[0] - read[1] == tiles * operand, "of Q, K and V a tile, half of K and half of V"


def test_each_q_tile_takes_only_the_steps_it_sees(build):
    artifact, problem = build("b=1 h=1 s=512 d=64 causal", Config(exp2_poly_fraction=0.0), "sm_100a")
    (kernel,) = emulator.run(artifact, problem).kernels
    exponentials = sum(kernel.instructions["mufu"]) * 32
    # 1, 2, 3 and 4 tiles of 128 x 128 for four Q tiles; beside them a factor a row and step.
    assert 10 * 128 * 128 <= exponentials < 10 * 128 * 130


def test_the_polynomial_moves_exponentials_from_mufu_to_packed_fma(build):
    counts = []
    for fraction in (0.0, 0.25):
        artifact, problem = build("b=1 h=1 s=256 d=64", Config(exp2_poly_fraction=fraction), "sm_100a")
        (kernel,) = emulator.run(artifact, problem, num_sms=1).kernels
        counts.append({unit: sum(warps) for unit, warps in kernel.instructions.items()})
    moved = 256 * 256 / 32 * 0.25
    assert counts[0]["mufu"] - counts[1]["mufu"] == moved
    # A pair: the magic number in and out, the fraction, three multiply-adds.
    assert counts[1]["fma"] - counts[0]["fma"] == moved / 2 * 6
