"""What every measurer must do, on every one that runs without a GPU. The CUDA one is held to it in tests/gpu."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tune_fakes import H200, PROBLEM, FakeMeasurer, Landscape

from fa4gen.arch import Device
from fa4gen.bound import bound
from fa4gen.config import FlashFwdSm90Config
from fa4gen.measure.base import Failure, Measurement, Measurer, Source
from fa4gen.measure.model import BoundMeasurer
from fa4gen.measure.replay import Grid, ReplayMeasurer
from fa4gen.variant import Variant

DEFAULT = FlashFwdSm90Config.default(PROBLEM)


def replay(folder: Path) -> Measurer:
    grid = Grid(H200, "flash_fwd_sm90")
    grid.record(PROBLEM, [(DEFAULT, Measurement((10.0, 11.0, 12.0)))], {})
    grid.save(folder / "grid.json")
    return ReplayMeasurer(folder / "grid.json")


MEASURERS = {
    "replay": replay,
    "model": lambda folder: BoundMeasurer(H200),
    "fake": lambda folder: FakeMeasurer(Landscape(0)),
}


@pytest.fixture(params=MEASURERS.values(), ids=MEASURERS)
def measurer(request: pytest.FixtureRequest, tmp_path: Path) -> Measurer:
    return request.param(tmp_path)


def measure(measurer: Measurer, config: FlashFwdSm90Config = DEFAULT, **options: int) -> Measurement | Failure:
    return measurer.measure(PROBLEM, Variant.of("sm_90a", PROBLEM, config), None, **options)


@pytest.mark.parametrize("samples", [1, 7, 100])
def test_at_least_the_samples_asked_for_all_positive(measurer: Measurer, samples: int) -> None:
    result = measure(measurer, samples=samples)
    assert isinstance(result, Measurement)
    assert len(result.samples_us) >= samples
    assert all(isinstance(us, float) and us > 0 for us in result.samples_us)
    low, high = result.interval_us
    assert low <= result.median_us <= high


def test_names_itself_and_its_device(measurer: Measurer) -> None:
    assert isinstance(measurer.device, Device)
    assert measurer.name != Measurer.name
    assert measurer.device == measurer.device


def test_a_variant_it_has_no_time_for_is_a_result(measurer: Measurer) -> None:
    result = measure(measurer, replace(DEFAULT, kv_stages=4))
    assert isinstance(result, Measurement | Failure)
    known = measurer.configs(PROBLEM)
    assert isinstance(result, Failure) == (known is not None and replace(DEFAULT, kv_stages=4) not in known)


def test_closing_twice(measurer: Measurer) -> None:
    measurer.close()
    measurer.close()


def test_the_model_predicts_the_bound_and_says_so() -> None:
    result = measure(BoundMeasurer(H200))
    assert result.source is Source.PREDICTED
    assert result.median_us == bound(PROBLEM, DEFAULT, H200).microseconds
    assert result.clock_mhz == H200.clock_mhz
