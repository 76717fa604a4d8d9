"""The forward family, run from its own PTX by its own host code: right, and the same bits in every schedule."""

from __future__ import annotations

import time

import pytest
import torch

from fa4gen import emulator
from fa4gen.accuracy import make_inputs
from fa4gen.config import FlashFwdSm90Config as Config
from fa4gen.emulator.executor import load
from fa4gen.sass import inspect

CASES = {
    "pingpong": ("b=1 h=2 s=300 d=128 causal lse", Config()),
    "cooperative": ("b=1 h=2 sq=130 sk=400 d=128 lse", Config(schedule="cooperative", intra_wg_overlap=False)),
    "p_in_smem": ("b=1 h=1 s=256 d=128 causal lse", Config(mma_pv_is_rs=False, schedule="cooperative", tile_n=64)),
    "multicast": ("b=1 h=2 s=512 d=128 lse", Config(cluster_m=2, persistent=True)),
    "pack_gqa": (
        "b=2 h=4 hk=2 s=150 d=64 causal lse",
        Config(tile_m=192, pack_gqa=True, persistent=True, tile_order="longest_first", rescale_threshold=8.0),
    ),
    "poly_exp2": ("b=1 h=1 s=256 d=64 lse", Config(tile_m=192, exp2_poly_fraction=0.5, exp2_poly_degree=4)),
    "fp16_d8": ("b=1 h=2 sq=77 sk=200 d=8 causal dtype=fp16", Config(tile_n=64)),
    "d40_dv80": ("b=1 h=1 s=190 d=40 dv=80 lse", Config(tile_n=64, kv_stages=3)),
    "d192_dv128": ("b=1 h=1 sq=300 sk=200 d=192 dv=128 causal lse", Config(tile_n=96)),
    "d256": ("b=1 h=1 s=200 d=256", Config(tile_n=64, kv_stages=1, schedule="cooperative")),
    "q_in_registers": (
        "b=1 h=3 sq=333 sk=250 d=64 causal lse",
        Config(mma_qk_is_rs=True, persistent=True, epilogue="tma", tile_order="paired", tile_n=64),
    ),
    "q_in_registers_dv": (
        "b=1 h=3 sq=200 sk=250 d=96 dv=64",
        Config(mma_qk_is_rs=True, persistent=True, tile_m=192, tile_n=48),
    ),
    "own_epilogue": (
        "b=2 h=4 hk=2 s=500 d=128 lse",
        Config(tile_m=192, tile_n=80, persistent=True, epilogue="tma", pack_gqa=True),
    ),
    "paired": (
        "b=1 h=2 s=600 d=64 causal lse",
        Config(tile_m=192, persistent=True, tile_order="paired", epilogue="tma"),
    ),
    "dynamic": (
        "b=2 h=2 s=500 d=64 causal lse",
        Config(
            tile_m=192,
            persistent=True,
            dynamic_tiles=True,
            epilogue="tma",
            tile_order="longest_first",
        ),
    ),
    "two_ctas": (
        "b=1 h=4 s=300 d=64 causal",
        Config(tile_m=64, tile_n=96, schedule="cooperative", ctas_per_sm=2, persistent=True, epilogue="tma"),
    ),
    "one_warpgroup": ("b=1 h=2 s=100 d=64 causal", Config(tile_m=64, schedule="cooperative")),
}


@pytest.mark.parametrize("case", CASES)
def test_right_in_every_schedule(build, case):
    artifact, problem = build(*CASES[case])
    verdict = emulator.verify(artifact, problem, config=CASES[case][1])
    assert verdict.ok, verdict.message
    assert verdict.accuracy is not None and verdict.accuracy.ok


@pytest.mark.parametrize("kind", ["peaked", "strided", "expanded"])
def test_other_inputs(build, kind):
    artifact, problem = build(*CASES["pingpong"])
    from fa4gen.accuracy import check, default_scale, expect

    inputs = make_inputs(problem, kind)
    outputs = emulator.run(artifact, problem, inputs).outputs
    report = check(outputs["o"], outputs["lse"], expect(*inputs, problem, default_scale(problem)))
    assert report.ok, report.message


@pytest.mark.parametrize("case", ["pingpong", "p_in_smem", "poly_exp2"])
def test_products_are_contracted_as_ptxas_does(build, case):
    artifact, _ = build(*CASES[case])
    (program,) = load(artifact.object_path, artifact.ptx_path, artifact.variant_name).programs.values()
    instrs = [i for block in program.blocks for i in block.instrs]
    contracted = sum(i.opcode == "contracted" for i in instrs)
    explicit = sum(i.opcode == "fma" and i.mods == ("rn", "f32") for i in instrs)
    assert contracted > 50
    assert inspect(artifact.cubin_path).mix["FFMA"] == contracted + explicit


def test_ten_random_schedules_give_the_same_bits(build):
    artifact, problem = build(*CASES["multicast"])
    first = emulator.run(artifact, problem, num_sms=2).outputs
    for seed in range(10):
        again = emulator.run(artifact, problem, num_sms=2, schedule="random", seed=seed).outputs
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_report_counts_what_ran(build):
    artifact, problem = build(*CASES["multicast"])
    report = emulator.run(artifact, problem, num_sms=2)
    (kernel,) = report.kernels
    q_bytes = 2 * 512 * 2 * 128
    # Per head: four M blocks load all of K and V, half as often in pairs that share them.
    assert kernel.global_bytes_read == q_bytes + 2 * 2 * q_bytes
    assert kernel.global_bytes_written == q_bytes + 4 * 2 * 512
    tiles, steps, k_steps = 8, 4, 8
    issued_per_warp = tiles // 2 * steps * 2 * k_steps
    assert kernel.instructions["wgmma"][4:] == [kernel.instructions["wgmma"][4]] * 8
    assert kernel.instructions["wgmma"][4] > 2 * issued_per_warp
    assert kernel.instructions["wgmma"][0] == 0
    # What warpgroups without rows do is not reached: every tile is full.
    assert report.coverage > 0.8


def test_one_head_in_a_second(build):
    artifact, problem = build("b=1 h=1 s=512 d=128", Config())
    emulator.run(artifact, problem)
    started = time.process_time()
    emulator.run(artifact, problem)
    assert time.process_time() - started < 1.0
