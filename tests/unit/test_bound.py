"""The throughput bound: the paper's figures, and what each knob moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa4gen.arch import ARCHS, get_device
from fa4gen.bound import TileCycles, backward_tile_cycles, bound, steps_per_key_tile, steps_per_tile, tile_cycles
from fa4gen.config import Config, FlashBwdSm90Config, FlashFwdSm90Config, FlashFwdSm100Config
from fa4gen.problem import AttentionProblem, attended_pairs

H200 = get_device("h200")
CONFIG = FlashFwdSm90Config(tile_m=128, tile_n=128, rescale_threshold=None)
SM100 = FlashFwdSm100Config(tile_n=128, q_stages=1, exp2_poly_fraction=0.0)


def ranked(arch: str, config: Config, head_dim: int) -> list[str]:
    """Units by cycles of a step, most first."""
    cycles = tile_cycles(ARCHS[arch], config, head_dim, head_dim)._asdict()
    return sorted(cycles, key=lambda unit: -cycles[unit])


@pytest.mark.parametrize(("q_stages", "expected"), [(1, (1024, 1024, 768)), (2, (2048, 2048, 1536))])
def test_blackwell_figures_of_the_paper(q_stages: int, expected: tuple[int, int, int]) -> None:
    cycles = tile_cycles(ARCHS["sm_100a"], replace(SM100, q_stages=q_stages), 128, 128)
    assert (cycles.mma, cycles.mufu, cycles.smem) == expected


def test_backward_figures_of_the_paper() -> None:
    cycles = backward_tile_cycles(ARCHS["sm_100a"], 128, 128, 128)
    assert (cycles.mma, cycles.smem, cycles.mufu) == (2560, 3328, 1024)
    assert backward_tile_cycles(ARCHS["sm_103a"], 128, 128, 128)._replace(mufu=1024) == cycles


def test_backward_steps_cover_the_attended_pairs() -> None:
    config = FlashBwdSm90Config(tile_m=64, tile_n=128)
    for text, steps in {
        "h=4 sq=200 sk=300 d=64": [4, 4, 4],
        "h=4 hk=2 sq=200 sk=300 d=64": [8, 8, 8],
        "h=4 sq=256 sk=256 d=64 causal": [4, 2],
        "h=4 sq=256 sk=300 d=64 causal": [4, 3, 1],  # key 128 is first seen by query 84, key 256 by 212
        "h=4 sq=300 sk=200 d=64 causal": [4, 2],  # queries 0 to 99 see nothing
    }.items():
        assert steps_per_key_tile(AttentionProblem.parse(f"{text} op=bwd"), config) == steps


def test_backward_bound_is_two_and_a_half_forwards_of_mma() -> None:
    forward = AttentionProblem.parse("b=8 h=16 s=8192 d=128")
    backward = AttentionProblem.parse(f"{forward} op=bwd")
    config = FlashBwdSm90Config(tile_m=64, tile_n=128)
    ours, theirs = bound(backward, config, H200), bound(forward, CONFIG, H200)
    assert ours.mma == pytest.approx(2.5 * theirs.mma, rel=0.02)
    assert ours.unit == "mma" and ours.mma == pytest.approx(backward.flops / 132 / ARCHS["sm_90a"].mma_flops, rel=0.02)
    polynomial = bound(backward, FlashBwdSm90Config(tile_m=64, tile_n=128, exp2_poly_fraction=0.25), H200)
    assert polynomial.mufu == pytest.approx(0.75 * ours.mufu) and polynomial.fma > ours.fma


def test_the_bound_moves_from_hopper_to_blackwell_to_blackwell_ultra() -> None:
    """d=128, no polynomial: twice the MMA makes MUFU its equal; twice the MUFU leaves MMA alone, then shared memory."""
    steps = {
        name: tile_cycles(ARCHS[name], config, 128, 128)
        for name, config in (("sm_90a", CONFIG), ("sm_100a", SM100), ("sm_103a", SM100))
    }
    assert {name: (step.mma, step.mufu, step.smem) for name, step in steps.items()} == {
        "sm_90a": (2048, 1024, 1280),
        "sm_100a": (1024, 1024, 768),
        "sm_103a": (1024, 512, 768),
    }
    assert ranked("sm_90a", CONFIG, 128)[:2] == ["mma", "smem"]
    assert set(ranked("sm_100a", SM100, 128)[:2]) == {"mma", "mufu"}
    assert ranked("sm_103a", SM100, 128)[:2] == ["mma", "smem"]


@pytest.mark.parametrize(
    ("arch", "head_dim", "units"),
    [
        # Share of polynomial exponentials: 0, 1/8, 1/4, 1/2, 1.
        ("sm_90a", 128, ["mma", "mma", "mma", "mma", "mma"]),
        ("sm_90a", 64, ["mma", "mma", "mma", "mma", "fma"]),
        ("sm_100a", 128, ["mma", "mma", "mma", "mma", "fma"]),
        ("sm_100a", 64, ["mufu", "mufu", "mufu", "fma", "fma"]),
        ("sm_103a", 128, ["mma", "mma", "mma", "mma", "fma"]),
        ("sm_103a", 64, ["mma", "mma", "mma", "fma", "fma"]),
    ],
)
def test_the_bound_moves_with_the_polynomial_share(arch: str, head_dim: int, units: list[str]) -> None:
    config = replace(CONFIG if arch == "sm_90a" else SM100, rescale_threshold=8.0)
    found = [
        ranked(arch, replace(config, exp2_poly_fraction=share), head_dim)[0] for share in (0.0, 0.125, 0.25, 0.5, 1.0)
    ]
    assert found == units


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_share_of_polynomials_lowers_the_blackwell_bound_until_fma_takes_over(head_dim: int) -> None:
    def most(share: float) -> TileCycles:
        return tile_cycles(ARCHS["sm_100a"], replace(SM100, exp2_poly_fraction=share), head_dim, head_dim)

    softmax = [max(most(share / 32).mufu, most(share / 32).fma) for share in range(33)]
    best = softmax.index(min(softmax))
    assert 0 < best < 32
    assert softmax[: best + 1] == sorted(softmax[: best + 1], reverse=True) and softmax[best:] == sorted(softmax[best:])
    default = FlashFwdSm100Config.default(AttentionProblem.parse(f"h=1 s=64 d={head_dim}"))
    assert 0 < default.exp2_poly_fraction <= best / 32, "the default stays on the side where MUFU has more"


def test_hopper_tile() -> None:
    cycles = tile_cycles(ARCHS["sm_90a"], CONFIG, 128, 128)
    assert (cycles.mma, cycles.mufu) == (2048, 1024)
    # Two warpgroups, each: 64 x 128 of Q, 128 x 128 of K, 128 x 128 of V, 2 B an element, 128 B a clock.
    assert cycles.smem == 2 * (64 + 128 + 128) * 128 * 2 / 128
    through_smem = tile_cycles(ARCHS["sm_90a"], replace(CONFIG, mma_pv_is_rs=False), 128, 128)
    assert through_smem.smem - cycles.smem == 2 * 128 * 128 * 2 / 128


def test_b300_doubles_mufu() -> None:
    assert tile_cycles(ARCHS["sm_103a"], SM100, 128, 128).mufu == 512


def test_polynomial_moves_exponentials_from_mufu_to_fma() -> None:
    for arch, config, slots in (("sm_90a", CONFIG, 9), ("sm_100a", SM100, 6)):
        configs = (config, replace(config, exp2_poly_fraction=0.25))
        plain, moved = (tile_cycles(ARCHS[arch], config, 128, 128) for config in configs)
        assert moved.mufu == 0.75 * plain.mufu
        assert moved.fma - plain.fma == 0.25 * slots * 128 * 128 / 128
    split = replace(CONFIG, exp2_poly_fraction=0.25)
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


def test_each_q_tile_skips_what_it_does_not_see() -> None:
    problem = AttentionProblem.parse("b=1 h=1 s=1024 d=128 causal")
    two = replace(SM100, q_stages=2)
    assert steps_per_tile(problem, SM100) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps_per_tile(problem, two) == [1.5, 3.5, 5.5, 7.5]
    assert steps_per_tile(problem, replace(two, use_2cta=True)) == [3, 3, 7, 7], "256 rows a Q tile: 2, 4, 6, 8 steps"
    assert steps_per_tile(replace(problem, causal=False), two) == [8] * 4


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
