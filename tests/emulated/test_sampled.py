"""Any variant is right and free of races: a random sample. ``--sampled N`` cases, by default few."""

from __future__ import annotations

from sampling import HEAD_DIMS, NUM_SMS, Case, make_inputs, sample

from fa4gen import emulator
from fa4gen.config import config_to_dict, get_family
from fa4gen.search_space import SearchSpace


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sample(metafunc.config.getoption("--sampled", default=12)), ids=str)


def test_sampled_variant(compiled, case: Case):
    inputs = make_inputs(case.problem, case.kind, case.seed)
    verdict = emulator.verify(compiled(case.variant), case.problem, inputs, num_sms=NUM_SMS)
    assert verdict.ok, f"{case.variant.config}: {verdict.message}"


def test_the_whole_sample_meets_every_choice():
    cases = sample(50)
    assert {(c.problem.head_dim, c.problem.head_dim_v) for c in cases} == set(HEAD_DIMS)
    for knob in SearchSpace.load(get_family("fwd", "sm_90a")).knobs:
        assert {config_to_dict(case.variant.config)[knob.name] for case in cases} >= set(knob.choices), knob.name
