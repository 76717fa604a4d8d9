"""Every config that feasibility accepts is right: a random sample, ``--sweep N`` cases (see accuracy_sweep.py)."""

from __future__ import annotations

import pytest
import torch
from accuracy_sweep import Case, compile_all, run_case, sample

from fa4gen.measure.cuda import CudaMeasurer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def pytest_generate_tests(metafunc):
    cases = sample(metafunc.config.getoption("--sweep", default=24))
    metafunc.parametrize("case", cases, ids=str)


@pytest.fixture(scope="module")
def compiled(request):
    return compile_all(sample(request.config.getoption("--sweep", default=24)))


@pytest.fixture(scope="module")
def measurer():
    made = CudaMeasurer(timeout_s=10.0)
    yield made
    made.close()


def test_accepted_config_is_right(case: Case, compiled, measurer):
    outcome, result = run_case(measurer, case, compiled[case.variant])
    assert outcome == "right", result
