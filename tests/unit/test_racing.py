"""The race: certain differences are found, noise is not taken for one, ties go to the config nearest the default."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tune_fakes import PROBLEM

from fa4gen.config import FlashFwdSm90Config
from fa4gen.measure.base import Failure, FailureKind, Measurement, Source
from fa4gen.tune.effort import QUICK
from fa4gen.tune.racing import race, ratio_interval

DEFAULT = FlashFwdSm90Config.default(PROBLEM)
NEAR = replace(DEFAULT, kv_stages=3)
FAR = replace(DEFAULT, kv_stages=3, tile_n=96, tile_m=192)


class Track:
    """Launch noise on top of a drift of the whole device that is larger than the differences."""

    def __init__(self, times: dict, seed: int, noise: float = 0.005, source: Source = Source.MEASURED) -> None:
        self.times = times
        self.rng = np.random.default_rng(seed)
        self.noise = noise
        self.source = source
        self.runs: list[FlashFwdSm90Config] = []

    def __call__(self, config):
        self.runs.append(config)
        drift = 1 + 0.05 * np.sin(len(self.runs) / 40)
        samples = self.times[config] * drift * np.exp(self.rng.normal(0, self.noise, 10))
        return Measurement(tuple(samples.tolist()), self.source)


@pytest.mark.parametrize("seed", range(10))
def test_finds_the_faster_one_under_drift(seed: int) -> None:
    track = Track({DEFAULT: 102.0, NEAR: 101.0, FAR: 100.0}, seed)
    result = race([NEAR, FAR, DEFAULT], DEFAULT, track, QUICK)
    assert result.winner.config == FAR
    assert result.tied == (FAR,)
    assert result.rounds < QUICK.max_rounds
    assert [s.config for s in result.standings] == [FAR, NEAR, DEFAULT]
    assert result.gap(result.standings[1]) == pytest.approx(0.01, abs=0.007)
    assert result.gap(result.standings[2]) == pytest.approx(0.02, abs=0.007)


def test_equal_configs_tie_and_the_default_wins() -> None:
    winners = []
    for seed in range(20):
        result = race([FAR, NEAR, DEFAULT], DEFAULT, Track({DEFAULT: 100.0, NEAR: 100.0, FAR: 100.0}, seed), QUICK)
        winners.append(result.winner.config)
    assert winners.count(DEFAULT) >= 17  # each comparison errs in 1 %, and there are up to 16 looks a race


def test_without_the_default_a_tie_goes_to_the_nearest() -> None:
    result = race([FAR, NEAR], DEFAULT, Track({NEAR: 100.0, FAR: 100.0}, 3), QUICK)
    assert result.winner.config == NEAR and set(result.tied) == {NEAR, FAR}
    assert result.rounds == QUICK.max_rounds


def test_a_loser_drops_out_and_rounds_rotate() -> None:
    track = Track({DEFAULT: 150.0, NEAR: 100.0, FAR: 100.0}, 0)
    race([NEAR, FAR, DEFAULT], DEFAULT, track, QUICK)
    assert track.runs.count(DEFAULT) == QUICK.min_rounds
    assert track.runs[:6] == [NEAR, FAR, DEFAULT, FAR, DEFAULT, NEAR]
    assert track.runs.count(NEAR) == track.runs.count(FAR) == QUICK.max_rounds


def test_a_config_twice_runs_once_a_round() -> None:
    track = Track({DEFAULT: 100.0}, 0)
    result = race([DEFAULT, DEFAULT], DEFAULT, track, QUICK)
    assert len(track.runs) == result.rounds == QUICK.min_rounds
    assert len(result.winner.samples_us) == 10 * QUICK.min_rounds
    assert result.standings == (result.winner,)


def test_the_budget_ends_it_after_the_least_rounds() -> None:
    track = Track({NEAR: 100.0, FAR: 100.0}, 3)
    assert race([FAR, NEAR], DEFAULT, track, QUICK, keep_going=lambda: False).rounds == QUICK.min_rounds


def test_a_contender_that_fails_is_out() -> None:
    track = Track({DEFAULT: 100.0, FAR: 50.0}, 0)

    def measure(config):
        if config == FAR and track.runs.count(FAR) == 2:
            return Failure(FailureKind.CRASHED, "fault")
        return track(config)

    result = race([FAR, DEFAULT], DEFAULT, measure, QUICK)
    assert [s.config for s in result.standings] == [DEFAULT]
    assert race([FAR], DEFAULT, lambda config: Failure(FailureKind.CRASHED, "x"), QUICK) is None


def test_predictions_within_five_percent_tie() -> None:
    times = {DEFAULT: 104.0, NEAR: 100.0, FAR: 97.0}
    near = race([FAR, NEAR, DEFAULT], DEFAULT, Track(times, 0, 0.0, Source.PREDICTED), QUICK, margin=0.05)
    assert near.winner.config in (DEFAULT, NEAR) and FAR in near.tied
    far = race(
        [FAR, DEFAULT], DEFAULT, Track({DEFAULT: 110.0, FAR: 97.0}, 0, 0.0, Source.PREDICTED), QUICK, margin=0.05
    )
    assert far.winner.config == FAR


@pytest.mark.parametrize(("count", "t"), [(5, 4.604), (10, 3.250), (30, 2.756)])
def test_interval_is_students(count: int, t: float) -> None:
    values = [0.0, 1.0] * (count // 2) + [0.5] * (count % 2)
    low, high = ratio_interval(values)
    half = t * np.std(values, ddof=1) / count**0.5
    assert (low + high) / 2 == pytest.approx(0.5)
    assert (high - low) / 2 == pytest.approx(half, rel=0.02)
