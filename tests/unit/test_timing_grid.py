from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa4gen.bound import steps_per_tile
from fa4gen.config import FlashFwdSm90Config
from fa4gen.problem import AttentionProblem
from fa4gen.timing.calibration import FITTED, fit, score
from fa4gen.timing.constants import H200, Constants
from fa4gen.timing.grid import makespan, tile_steps, turns


def test_makespan_of_a_dynamic_and_a_static_deal() -> None:
    costs = [4.0, 1.0, 1.0, 4.0, 1.0, 1.0]
    assert makespan(costs, 2, static=True) == 6.0  # 4 + 1 + 1 each
    assert makespan([5.0, 1.0, 1.0, 1.0], 2, static=False) == 5.0
    assert makespan([5.0, 1.0, 1.0, 1.0], 2, static=True) == 6.0
    assert makespan([3.0], 132, static=True) == makespan([3.0], 132, static=False) == 3.0


@pytest.mark.parametrize("order", ["linear", "longest_first", "paired"])
@pytest.mark.parametrize("pack", [False, True])
def test_every_tile_is_in_the_order_once(order: str, pack: bool) -> None:
    problem = AttentionProblem.parse("b=3 h=16 hk=4 s=700 d=128 causal")
    config = FlashFwdSm90Config(tile_m=128, tile_n=64, tile_order=order, pack_gqa=pack)
    blocks = steps_per_tile(problem, config)
    rows = 3 * (4 if pack else 16)
    steps = tile_steps(problem, config)
    assert sorted(steps) == sorted(blocks * rows)
    assert steps[0] == (blocks[0] if order == "linear" else max(blocks))


@pytest.mark.parametrize(("length", "middle"), [(1024, []), (1152, [[5]])])
def test_pairs_are_of_equal_work(length: int, middle: list) -> None:
    problem = AttentionProblem.parse(f"b=1 h=2 s={length} d=64 causal")
    config = FlashFwdSm90Config(tile_m=128, tile_n=128, tile_order="paired", persistent=True)
    blocks = length // 128
    assert turns(problem, config) == [*([blocks - i, i + 1] for i in range(blocks // 2)), *middle] * 2
    head = [[i + 1] for i in range(blocks)]
    assert turns(problem, replace(config, tile_order="linear")) == head + head[1:] + head[:1]  # rotated


def test_longest_first_takes_one_depth_of_all_heads_of_a_section() -> None:
    problem = AttentionProblem.parse("b=1 h=4 s=256 d=64 causal")
    config = FlashFwdSm90Config(tile_m=128, tile_n=128, tile_order="longest_first")
    assert tile_steps(problem, config) == [2] * 4 + [1] * 4


def test_a_cluster_rounds_the_blocks_up() -> None:
    problem = AttentionProblem.parse("b=1 h=1 s=384 d=64")
    assert len(tile_steps(problem, FlashFwdSm90Config(tile_m=128, cluster_m=2))) == 4


def test_score() -> None:
    truth = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    exact = score([2 * t for t in truth], truth)
    assert exact.spearman == pytest.approx(1) and exact.error == pytest.approx(0) and exact.bias == 2.0
    assert exact.regret == exact.regret_of_five == 0
    wrong = score(truth[::-1], truth)
    assert wrong.spearman == pytest.approx(-1)
    assert wrong.regret == pytest.approx(5.0) and wrong.regret_of_five == pytest.approx(1.0)
    # Ties share a rank: two equal predictions of two different times are worth less than the right order.
    assert 0.9 < score([1, 1, 3, 4, 5, 6], truth).spearman < 1


def test_fit_finds_constants_and_keeps_its_limits() -> None:
    def loss(c: Constants) -> float:
        return abs(np.log(c.mma_start / 140)) + abs(c.mma_queue - 5) + abs(np.log(c.l2_bytes / 1e6))

    best = fit(H200, loss, ["mma_start", "mma_queue", "l2_bytes"], factors=(1.3, 1.05, 1.01))
    assert best.mma_start == pytest.approx(140, rel=0.01) and best.mma_queue == 5
    assert best.l2_bytes == FITTED["l2_bytes"][1]
    assert best.mbarrier == H200.mbarrier and best.digest != H200.digest
