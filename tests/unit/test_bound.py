"""The throughput bound: the paper's figures, and what each knob moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa4gen.arch import ARCHS, get_device
from fa4gen.bound import bound, steps_per_tile, tile_cycles
from fa4gen.config import FlashFwdSm90Config
from fa4gen.problem import AttentionProblem, attended_pairs

H200 = get_device("h200")
CONFIG = FlashFwdSm90Config(tile_m=128, tile_n=128, rescale_threshold=None)


@pytest.mark.parametrize(("tile_m", "expected"), [(128, (1024, 1024, 768)), (256, (2048, 2048, 1536))])
def test_blackwell_figures_of_the_paper(tile_m: int, expected: tuple[int, int, int]) -> None:
    cycles = tile_cycles(ARCHS["sm_100a"], replace(CONFIG, tile_m=tile_m), 128, 128)
    assert (cycles.mma, cycles.mufu, cycles.smem) == expected


def test_hopper_tile() -> None:
    cycles = tile_cycles(ARCHS["sm_90a"], CONFIG, 128, 128)
    assert (cycles.mma, cycles.mufu) == (2048, 1024)
    # Two warpgroups, each: 64 x 128 of Q, 128 x 128 of K, 128 x 128 of V, 2 B an element, 128 B a clock.
    assert cycles.smem == 2 * (64 + 128 + 128) * 128 * 2 / 128
    through_smem = tile_cycles(ARCHS["sm_90a"], replace(CONFIG, mma_pv_is_rs=False), 128, 128)
    assert through_smem.smem - cycles.smem == 2 * 128 * 128 * 2 / 128


def test_b300_doubles_mufu() -> None:
    assert tile_cycles(ARCHS["sm_103a"], CONFIG, 128, 128).mufu == 512


def test_polynomial_moves_exponentials_from_mufu_to_fma() -> None:
    split = replace(CONFIG, exp2_poly_fraction=0.25)
    for arch, slots in (("sm_90a", 9), ("sm_100a", 6)):
        plain, moved = (tile_cycles(ARCHS[arch], config, 128, 128) for config in (CONFIG, split))
        assert moved.mufu == 0.75 * plain.mufu
        assert moved.fma - plain.fma == 0.25 * slots * 128 * 128 / 128
    degree_5 = tile_cycles(ARCHS["sm_90a"], replace(split, exp2_poly_degree=5), 128, 128)
    assert degree_5.fma > tile_cycles(ARCHS["sm_90a"], split, 128, 128).fma


def test_rescale_threshold_takes_the_output_pass_away() -> None:
    lazy = tile_cycles(ARCHS["sm_90a"], replace(CONFIG, rescale_threshold=8.0), 128, 128)
    assert tile_cycles(ARCHS["sm_90a"], CONFIG, 128, 128).fma - lazy.fma == 128 * 128 / 128


@pytest.mark.parametrize("text", ["sq=1000 sk=1000", "sq=300 sk=1000", "sq=1000 sk=300", "sq=1 sk=77", "sq=128 sk=0"])
@pytest.mark.parametrize("pack_gqa", [False, True])
def test_causal_steps_against_the_mask(text: str, pack_gqa: bool) -> None:
    """A step counts exactly when its tile holds at least one visible pair or lies left of one that does."""
    problem = AttentionProblem.parse(f"b=1 h=4 hk=1 {text} d=64 causal")
    config = replace(CONFIG, tile_n=96, pack_gqa=pack_gqa)
    ratio = 4 if pack_gqa else 1
    rows = [query for query in range(problem.seqlen_q) for _ in range(ratio)]
    expected = []
    for start in range(0, len(rows), config.tile_m):
        visible = max(0, rows[start : start + config.tile_m][-1] + 1 + problem.seqlen_k - problem.seqlen_q)
        expected.append(len(range(0, min(visible, problem.seqlen_k), config.tile_n)))
    assert steps_per_tile(problem, config) == expected


def test_causal_waste_is_the_diagonal() -> None:
    problem = AttentionProblem.parse("b=1 h=1 s=4096 d=128 causal")
    tiles = sum(steps_per_tile(problem, CONFIG))
    assert tiles == 32 * 33 // 2
    assert 1 < tiles * 128 * 128 / attended_pairs(4096, 4096) < 1.04


def test_whole_problem() -> None:
    problem = AttentionProblem.parse("b=2 h=66 s=4096 d=128")  # 132 heads on 132 SMs: 32 tiles of 32 steps each
    got = bound(problem, CONFIG, H200)
    assert got.mma == 32 * 32 * 2048
    assert got.unit == "mma" and got.cycles == got.mma
    assert got.microseconds == pytest.approx(problem.flops / (132 * 4096 * H200.clock_mhz * 1e6) * 1e6)


def test_small_grid_is_bound_by_its_longest_tile() -> None:
    one, many = (bound(AttentionProblem.parse(f"b=1 h={h} s=128 d=128"), CONFIG, H200) for h in (1, 132))
    assert one.mma == many.mma == 2048
    assert bound(AttentionProblem.parse("b=1 h=133 s=128 d=128"), CONFIG, H200).mma == 2 * 2048


def test_unit_moves_with_head_dim_and_shape() -> None:
    def unit(text: str, **knobs: object) -> str:
        return bound(AttentionProblem.parse(text), replace(CONFIG, **knobs), H200).unit

    assert unit("b=4 h=16 s=4096 d=128") == "mma"
    assert unit("b=4 h=16 s=4096 d=32") == "mufu"
    assert unit("b=64 h=16 sq=64 sk=256 d=64", tile_m=64) == "hbm"


def test_empty_problem() -> None:
    assert bound(AttentionProblem.parse("b=0 h=1 s=128 d=128"), CONFIG, H200).cycles == 0
