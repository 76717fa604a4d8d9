"""The timing model on Blackwell kernels: tcgen05, tensor memory, CTA pairs, tiles from cluster launch control."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from conftest import Build

from fa4gen.arch import get_device
from fa4gen.bound import tile_cycles
from fa4gen.config import FlashFwdSm100Config
from fa4gen.problem import AttentionProblem
from fa4gen.timing.constants import CHIPS
from fa4gen.timing.grid import cluster_size
from fa4gen.timing.model import predict, trace_variant
from fa4gen.timing.timeline import timeline
from fa4gen.timing.trace import trace

B200 = get_device("b200")
TEXT = "b=4 h=16 s=4096 d=64"
SINGLE = replace(FlashFwdSm100Config.default(AttentionProblem.parse(TEXT)), use_2cta=False, scheduler="persistent")
PAIR = replace(SINGLE, use_2cta=True, scheduler="clc")


def test_a_pairs_first_cta_gets_what_both_signal(build: Build) -> None:
    artifact, problem = build(TEXT, PAIR, "sm_100a")
    small = replace(problem, batch=1, heads=1, heads_kv=1, seqlen_q=2 * PAIR.tile_m, seqlen_k=3 * PAIR.tile_n)
    traced = trace(artifact, small, cluster_size(PAIR), PAIR)
    tokens = [token for warp in traced.warps for token in warp]
    kinds = Counter(token.kind for token in tokens)
    # Two Q tiles, three steps, QK^T over the head dim and PV over the keys, in instructions of depth 16.
    assert kinds["umma"] == 2 * 3 * (64 // 16 + PAIR.tile_n // 16)
    assert {token.values[2] for token in tokens if token.kind == "umma"} == {PAIR.tile_n // 2, 64 // 2}, "half of B"
    assert kinds["next_tile"] >= 1
    arrivals, expected, delivered = Counter(), Counter(), Counter()
    for token in tokens:
        if token.kind == "arrive":
            arrivals[token.values[0]] += token.values[1]
            expected[token.values[0]] += token.values[2]
        elif token.kind in ("umma_commit", "next_tile"):
            arrivals[token.values[0]] += token.kind == "umma_commit"
            delivered[token.values[0]] += token.values[1] if token.kind == "next_tile" else 0
        elif token.kind == "load":
            delivered[token.values[0]] += token.values[2]
    assert +expected == +delivered
    assert all(arrivals[barrier] % count == 0 for barrier, count in traced.mbarriers.items()), "whole phases"


@pytest.mark.parametrize("config", [SINGLE, PAIR], ids=["single, persistent", "pair, clc"])
def test_a_step_takes_as_long_as_its_units_need_and_not_twice_that(build: Build, config: FlashFwdSm100Config) -> None:
    artifact, problem = build(TEXT, config, "sm_100a")
    traced = trace_variant(artifact, problem, config)
    prediction = predict(traced, problem, B200, CHIPS["sm_100a"].constants)
    tile = tile_cycles(B200.arch, config, 64, 64)
    assert prediction.step_busy["tensor"] * prediction.step == pytest.approx(tile.mma, rel=0.02)
    assert prediction.step_busy["smem"] * prediction.step == pytest.approx(tile.smem, rel=0.02)
    assert prediction.step_busy["mufu"] * prediction.step == pytest.approx(tile.mufu, rel=0.1)
    assert max(tile) <= prediction.step < 2 * max(tile)
    lanes = timeline(traced, CHIPS["sm_100a"].constants)
    names = [lane.name.partition(" (")[0] for lane in lanes.warps]
    assert names[:2] == ["softmax", "softmax"] and {"correction", "MMA", "load"} <= set(names)
    assert ("scheduler" in names) == (config.scheduler == "clc")
    assert "TMEM" in [lane.name for lane in lanes.units]
