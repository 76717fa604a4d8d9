"""The predicate: its arithmetic, its reasons, and that defaults pass it."""

from __future__ import annotations

import dataclasses

import pytest

from fa4gen.arch import get_arch
from fa4gen.config import FlashFwdSm90Config
from fa4gen.feasibility import can_implement, launch_registers, mma_registers, smem_bytes
from fa4gen.problem import AttentionProblem

SM90 = get_arch("sm_90a")
D128 = AttentionProblem.parse("b=2 h=16 s=4096 d=128")


@pytest.mark.parametrize(
    ("tile_m", "producer_regs", "expected"),
    [(64, 24, 240), (128, 24, 240), (192, 32, 160), (192, 40, 152), (256, 24, 112)],
)
def test_register_split_never_exceeds_what_the_launch_gave(tile_m, producer_regs, expected):
    config = FlashFwdSm90Config(tile_m=tile_m, producer_regs=producer_regs)
    warpgroups = tile_m // 64
    regs = mma_registers(config, SM90)
    assert regs == expected
    launch = launch_registers(128 * (warpgroups + 1), SM90)
    assert producer_regs + warpgroups * regs <= launch * (warpgroups + 1)
    assert launch * 128 * (warpgroups + 1) <= SM90.registers_per_sm


def test_shared_memory_by_hand():
    config = FlashFwdSm90Config(tile_m=128, tile_n=128, kv_stages=2)
    q, k, v = 128 * 128 * 2, 2 * 128 * 128 * 2, 2 * 128 * 128 * 2
    assert smem_bytes(D128.static, config) == 1024 + q + k + v
    assert smem_bytes(D128.static, dataclasses.replace(config, mma_pv_is_rs=False)) == 1024 + q + k + v + 128 * 128 * 2


def test_rejection_names_the_rule_and_the_numbers():
    rejection = can_implement(D128, FlashFwdSm90Config(kv_stages=4), SM90)
    assert rejection is not None and rejection.rule == "smem"
    assert str(rejection.numbers["needed"]) in str(rejection)
    assert rejection.numbers["available"] == 232448 < rejection.numbers["needed"]


@pytest.mark.parametrize(
    ("text", "knobs", "rule"),
    [
        ("h=2 s=64 d=100", {}, "head_dim"),
        ("h=2 s=64 d=264", {}, "head_dim"),
        ("h=2 s=64 d=64 dv=12", {}, "head_dim_v"),
        ("h=2 s=64 d=64", {"tile_m": 96}, "tile_m"),
        ("h=2 s=64 d=64", {"tile_n": 264}, "tile_n"),
        ("h=2 s=64 d=64", {"tile_n": 40}, "tile_n"),
        ("h=2 s=64 d=64", {"tile_m": 64}, "schedule"),
        ("h=2 s=64 d=64", {"schedule": "chaotic"}, "schedule"),
        ("h=2 s=64 d=64", {"tile_order": "random"}, "tile_order"),
        ("h=2 s=64 d=64", {"pack_gqa": True}, "pack_gqa"),
        ("h=6 hk=2 s=64 d=64", {"pack_gqa": True}, "pack_gqa"),
        ("h=2 s=64 d=64 causal", {"cluster_m": 2, "tile_order": "linear"}, "cluster"),
        ("h=2 s=64 d=64", {"cluster_m": 2, "tile_order": "longest_first"}, "cluster"),
        ("h=2 s=64 d=64", {"producer_regs": 30}, "producer_regs"),
        ("h=2 s=64 d=128", {"tile_m": 192, "tile_n": 128}, "registers"),
        ("h=2 s=64 d=8", {"tile_m": 192, "tile_n": 224, "mma_pv_is_rs": False}, "wgmma_registers"),
        ("h=2 s=64 d=64 dtype=fp16", {"rescale_threshold": 12.0}, "rescale_threshold"),
        ("h=2 s=64 d=64", {"rescale_threshold": -1.0}, "rescale_threshold"),
        ("h=2 s=64 d=64", {"exp2_poly_fraction": 1.5}, "exp2_poly_fraction"),
        ("h=2 s=64 d=64", {"exp2_poly_degree": 2}, "exp2_poly_degree"),
        ("h=2 s=64 d=64", {"kv_stages": 0}, "kv_stages"),
    ],
)
def test_each_rule_rejects(text, knobs, rule):
    rejection = can_implement(AttentionProblem.parse(text), FlashFwdSm90Config(**knobs), SM90)
    assert rejection is not None and rejection.rule == rule


def test_other_architectures_are_rejected():
    rejection = can_implement(D128, FlashFwdSm90Config(), get_arch("sm_100a"))
    assert rejection is not None and rejection.rule == "arch"


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("head_dim_v", [8, 64, 128, 256])
@pytest.mark.parametrize("rest", ["", "causal", "dtype=fp16"])
def test_the_default_config_is_always_feasible(head_dim, head_dim_v, rest):
    problem = AttentionProblem.parse(f"h=8 hk=2 sq=1 sk=77 d={head_dim} dv={head_dim_v} {rest}")
    assert can_implement(problem, FlashFwdSm90Config.default(problem), SM90) is None
