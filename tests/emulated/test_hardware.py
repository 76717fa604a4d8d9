"""The emulator's outputs beside an H200's, recorded by record_hardware.py: same variants, same inputs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hardware import RECORDED, Record, difference, inputs_digest, load, lse_limit, record, save, take_rows
from sampling import NUM_SMS, SM90, make_inputs, sample

from fa4gen import emulator

needs_recording = pytest.mark.skipif(
    not RECORDED.exists(), reason=f"no {RECORDED.name}: tests/emulated/record_hardware.py on an H200 writes it"
)


@cache
def recorded() -> list[Record]:
    return load(RECORDED)


def emulate(artifact, case, inputs):
    outputs = emulator.run(artifact, case.problem, inputs, config=case.variant.config, num_sms=NUM_SMS).outputs
    return outputs["o"], outputs.get("lse")


def pytest_generate_tests(metafunc):
    if "index" in metafunc.fixturenames:
        metafunc.parametrize("index", range(SM90.whole if metafunc.config.getoption("--whole-sample") else SM90.few))


@needs_recording
def test_outputs_agree(compiled, index):
    if index >= len(recorded()):
        pytest.skip(f"{len(recorded())} cases were recorded")
    expected = recorded()[index]
    case = expected.case
    got = record(case, compiled(case.variant), emulate)
    assert got.inputs == expected.inputs, "this machine makes other inputs than the recording one"
    ulp = difference(expected.o, got.o, case.problem.dtype)
    assert ulp.max() <= 2 and np.mean(ulp <= 1) >= 0.999, f"{case}: {ulp.max()} ulp, {np.mean(ulp > 1):.2%} beyond 1"
    assert np.array_equal(np.isinf(got.lse), np.isinf(expected.lse))
    finite = np.isfinite(expected.lse)
    off = np.abs(got.lse[finite] - expected.lse[finite])
    assert (off <= lse_limit(case.variant.config, expected.lse[finite])).all(), f"{case}: {off.max()}"


def test_what_is_saved_is_loaded(compiled, tmp_path):
    case = next(c for c in sample(12) if c.problem.return_lse)
    saved = record(case, compiled(case.variant), emulate)
    save(tmp_path / "records.npz", [saved], {"device": "none"})
    (loaded,) = load(tmp_path / "records.npz")
    assert loaded.case == case and loaded.inputs == saved.inputs
    assert np.array_equal(loaded.o, saved.o) and np.array_equal(loaded.lse, saved.lse)
    assert saved.o.nbytes <= 16384 and not difference(loaded.o, saved.o, case.problem.dtype).any()


def test_differences_count_units_in_the_last_place():
    a = torch.tensor([[1.0, 2.0, -4.0, 0.001]], dtype=torch.bfloat16)
    b = torch.tensor([[1.0 + 2**-7, 2.0 - 2**-6, -4.0, 0.0]], dtype=torch.bfloat16)
    ulp = difference(*(x.view(torch.int16).numpy() for x in (a, b)), "bf16")
    # The last one is small beside its row, whose root mean square is 2.3: an eighth of that has ulps of 2^-9.
    assert np.allclose(ulp, [[1, 1, 0, 0.001 * 2**9]], rtol=1e-2)


def test_the_same_inputs_everywhere():
    case = sample(1)[0]
    assert inputs_digest(make_inputs(case.problem, case.kind, case.seed)) == "44de91a587996940"
    o = torch.zeros(case.problem.batch, case.problem.seqlen_q, case.problem.heads, case.problem.head_dim_v)
    rows, lse = take_rows(case, o.to(torch.bfloat16), None)
    assert rows.shape[1] == case.problem.head_dim_v and lse.size == 0
