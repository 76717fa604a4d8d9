"""Every backward config that feasibility accepts is right: a random sample, ``--sweep N`` cases (backward_sweep.py)."""

from __future__ import annotations

import pytest
import torch
from accuracy_sweep import Case, compile_all, run_case
from backward_sweep import sample

from fa4gen.measure.cuda import CudaMeasurer

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() not in {(9, 0)}:
    pytest.skip("the sample is for sm_90a", allow_module_level=True)


def pytest_generate_tests(metafunc):
    metafunc.parametrize("case", sample(metafunc.config.getoption("--sweep", default=24)), ids=str)


@pytest.fixture(scope="module")
def compiled(request):
    return compile_all(sample(request.config.getoption("--sweep", default=24)))


@pytest.fixture(scope="module")
def measurer():
    made = CudaMeasurer(timeout_s=20.0)
    yield made
    made.close()


def test_accepted_config_is_right(case: Case, compiled, measurer):
    outcome, result = run_case(measurer, case, compiled[case.variant])
    assert outcome == "right", result
