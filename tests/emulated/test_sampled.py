"""Any variant is right and free of races: random samples of each family, few cases or, with --whole-sample, all."""

from __future__ import annotations

import pytest
from sampling import BWD_SM100, DOMAINS, NUM_SMS, SM100, Case, Domain, sample

from fa4gen import case as cases_of
from fa4gen import emulator
from fa4gen.config import FAMILIES, config_to_dict
from fa4gen.emulator.verify import SCHEDULES
from fa4gen.search_space import SearchSpace


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole-sample")
        cases = [case for d in DOMAINS for case in sample(d.whole if whole else d.few, domain=d)]
        metafunc.parametrize("case", cases, ids=str)


def test_sampled_variant(compiled, case: Case):
    inputs = cases_of.Case.make(case.problem, case.kind, case.seed).inputs
    # "lazy" holds back what is in flight while a warp can run: those that poll memory for their turn always can.
    schedules = [s for s in SCHEDULES if s[0] != "lazy" or not case.problem.deterministic]
    verdict = emulator.verify(
        compiled(case.variant),
        case.problem,
        tuple(inputs.values()),
        config=case.variant.config,
        schedules=schedules,
        num_sms=NUM_SMS,
    )
    assert verdict.ok, f"{case.variant.config}: {verdict.message}"


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda d: d.family)
def test_the_whole_sample_meets_every_choice(domain: Domain):
    cases = sample(domain.whole, domain=domain)
    family = FAMILIES[domain.family]
    assert {(c.problem.head_dim, c.problem.head_dim_v) for c in cases} == set(domain.head_dims)
    assert {case.variant.arch for case in cases} == set(family.archs)
    for knob in SearchSpace.load(family).knobs:
        assert {config_to_dict(case.variant.config)[knob.name] for case in cases} >= set(knob.choices), knob.name


def test_the_sample_for_blackwell_meets_what_is_asked_of_it():
    problems = [case.problem for case in sample(SM100.whole, domain=SM100)]
    assert {p.gqa_ratio for p in problems} == {1, 2, 8}
    assert {p.seqlen_q for p in problems} >= set(SM100.seqlens_q) and {p.seqlen_k for p in problems} >= set(
        SM100.seqlens_k
    )
    assert any(p.causal and p.seqlen_q > p.seqlen_k for p in problems), "rows that see no key"
    assert any(p.causal and p.seqlen_q < p.seqlen_k for p in problems)


def test_about_half_of_the_sampled_backwards_are_of_a_pair():
    cases = sample(BWD_SM100.whole, domain=BWD_SM100)
    assert 0.4 <= sum(case.variant.config.use_2cta for case in cases) / len(cases) <= 0.6
    assert {case.problem.deterministic for case in cases if case.variant.config.use_2cta} == {False, True}


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda d: d.family)
def test_a_smaller_sample_begins_a_larger_one(domain: Domain):
    assert sample(domain.few, domain=domain) == sample(domain.few + 2, domain=domain)[: domain.few]
