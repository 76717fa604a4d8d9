"""What the search tries next: only what may run, never twice, and the best soon."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tune_fakes import H200, PROBLEM, Landscape

from fa4gen.config import FAMILIES, FlashFwdSm90Config
from fa4gen.feasibility import can_implement
from fa4gen.search_space import Knob, SearchSpace
from fa4gen.tune.effort import QUICK
from fa4gen.tune.proposer import Proposer

SPACE = SearchSpace.load(FAMILIES["flash_fwd_sm90"])
DEFAULT = FlashFwdSm90Config.default(PROBLEM)


def feasible(config) -> bool:
    return can_implement(PROBLEM, config, H200.arch) is None


def search(proposer: Proposer, landscape, trials: int, seed: int, first=DEFAULT) -> dict:
    """Times with 1 % noise, in the order of the trials."""
    rng = np.random.default_rng(seed)
    times: dict = {}
    config = first
    while config is not None and len(times) < trials:
        assert config not in times
        times[config] = landscape(config) * float(np.exp(rng.normal(0, 0.01)))
        config = proposer.propose(times)
    return times


def best_of(landscape) -> float:
    """The fastest feasible config by descent from many starts."""
    rng = np.random.default_rng(0)
    best = landscape(DEFAULT)
    for start in range(12):
        config = SPACE.sample(rng, PROBLEM) if start else DEFAULT
        while not feasible(config):
            config = SPACE.sample(rng, PROBLEM)
        while True:
            step = min(filter(feasible, SPACE.neighbours(config, PROBLEM)), key=landscape)
            if landscape(step) >= landscape(config):
                break
            config = step
        best = min(best, landscape(config))
    return best


def test_forty_trials_come_within_four_percent_of_the_best_in_nine_seeds_of_ten() -> None:
    # A kind landscape: of the first five searches on each of landscapes 0 to 7, 35 of 40 end within 3 %, here all five.
    landscape = Landscape(seed=7)
    best = best_of(landscape)
    assert landscape(DEFAULT) > 1.1 * best  # or there were nothing to find
    excess = []
    for seed in range(10):
        times = search(Proposer(SPACE, PROBLEM, feasible, seed=seed), landscape, QUICK.trials, seed)
        excess.append(landscape(min(times, key=times.__getitem__)) / best - 1)
    assert sum(e <= 0.04 for e in excess) >= 9, excess


def test_equal_histories_give_equal_proposals_and_seeds_differ() -> None:
    propose = partial(search, landscape=Landscape(1), trials=8, seed=0)
    first, second, other = (list(propose(Proposer(SPACE, PROBLEM, feasible, seed=s))) for s in (5, 5, 6))
    assert first == second != other


def test_proposes_only_what_is_allowed_and_not_what_is_pending() -> None:
    proposer = Proposer(SPACE, PROBLEM, feasible)
    times = search(proposer, Landscape(2), 8, 0)
    pending: list = []
    for _ in range(6):
        pending.append(proposer.propose(times, pending))
    assert len(set(pending)) == 6 and not set(pending) & set(times)
    assert all(feasible(c) for c in [*times, *pending])


def test_failures_push_the_search_away() -> None:
    """Half of the space fails; after some failures few proposals fall into it."""
    fails = lambda c: c.mma_pv_is_rs is False  # noqa: E731
    proposer = Proposer(SPACE, PROBLEM, feasible, seed=3)
    landscape = Landscape(3)
    times: dict = {DEFAULT: landscape(DEFAULT)}
    while len(times) < 40:
        config = proposer.propose(times)
        times[config] = None if fails(config) else landscape(config)
    late = list(times)[20:]
    assert sum(map(fails, late)) <= 5


def test_nothing_but_failures_goes_on_at_random() -> None:
    proposer = Proposer(SPACE, PROBLEM, feasible)
    times: dict = {DEFAULT: None}
    for _ in range(5):
        times[proposer.propose(times)] = None
    assert len(times) == 6


@pytest.mark.parametrize("seed", range(3))
def test_a_recorded_set_is_searched_and_then_exhausted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    recorded: dict = {DEFAULT: None}
    while len(recorded) < 150:
        config = SPACE.sample(rng, PROBLEM)
        if feasible(config):
            recorded[config] = None
    landscape = Landscape(seed)
    proposer = Proposer(SPACE, PROBLEM, feasible, recorded, seed)
    times = search(proposer, landscape, 40, seed)
    assert len(times) == 40 and set(times) <= set(recorded)
    assert landscape(min(times, key=times.__getitem__)) <= 1.03 * min(map(landscape, recorded))
    assert len(search(proposer, landscape, 1000, seed)) == 150


def test_a_small_space_is_exhausted() -> None:
    knobs = tuple(
        k if k.name in ("tile_n", "persistent") else Knob(k.name, (k.default,), k.default) for k in SPACE.knobs
    )
    small = replace(SPACE, knobs=knobs)
    proposer = Proposer(small, PROBLEM, lambda config: config.tile_n != 128)
    times = search(proposer, Landscape(0), 1000, 0, first=small.default(PROBLEM))
    assert len(times) == 13 * 2


def test_nothing_allowed() -> None:
    assert Proposer(SPACE, PROBLEM, lambda config: False).propose({}) is None
