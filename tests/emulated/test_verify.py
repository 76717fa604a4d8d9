"""The verdict on a variant as the command line gives it, and the problems it is given on."""

from __future__ import annotations

import importlib

import pytest
from backward_fakes import emulate
from typer.testing import CliRunner

from fa4gen import emulator
from fa4gen.accuracy import default_scale, make_inputs
from fa4gen.case import Case
from fa4gen.cli import app
from fa4gen.config import FlashFwdSm90Config as Config
from fa4gen.emulator import EmulatorReport, KernelFault, Verification
from fa4gen.errors import UsageError
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

verify_module = importlib.import_module("fa4gen.emulator.verify")  # the package has a function of this name


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path))


def run(*arguments: str):
    return CliRunner().invoke(app, ["verify", *arguments, "--emulate", "--device", "h200"])


def test_report():
    result = run("b=4 h=8 hk=2 s=4096 d=64 causal lse", "--set", "tile_m=128", "--set", "tile_n=64")
    assert result.exit_code == 0, result.output
    for text in ("b=1 h=8 hk=2 s=273 d=64 causal lse (reduced", "3 schedules agree, no race", "races looked for in the",
                 "of basic blocks", "on mbarriers", "global memory", "wgmma", "mufu"):  # fmt: skip
        assert text in result.stdout, text
    assert "TMEM" not in result.stdout


def test_one_schedule_of_the_whole_problem():
    arguments = ("--whole", "--no-races", "--schedule", "random", "--seed", "3", "--set", "tile_n=64")
    result = run("b=1 h=1 s=100 d=64", *arguments)
    assert result.exit_code == 0, result.output
    assert "b=1 h=1 s=100 d=64 (as given)" in result.stdout and "random" in result.stdout
    assert "race" not in result.stdout and "eager" not in result.stdout


def test_a_fault_is_told_and_fails(monkeypatch):
    fault = KernelFault("reads shared memory that nothing wrote", "PTX line 7: ld.shared.b32 %r1, [%r2]")
    verdict = Verification(False, f"schedule lazy, seed 0: {fault}", None, [], fault)
    monkeypatch.setattr(emulator, "verify", lambda *_, **__: verdict)
    result = run("b=1 h=1 s=100 d=64")
    assert result.exit_code == 1
    assert "nothing wrote" in result.stdout and "PTX line 7" in result.stdout


def test_options_of_the_emulator_need_it():
    result = CliRunner().invoke(app, ["verify", "b=1 h=1 s=64 d=64", "--whole"])
    assert result.exit_code == 2 and "--emulate" in result.stderr


def test_backward_report():
    result = run("b=1 h=2 hk=1 s=4096 d=64 causal op=bwd deterministic", "--schedule", "eager", "--schedule", "lazy")
    assert result.exit_code == 0, result.output
    for text in ("op=bwd causal deterministic (reduced", "2 schedules agree, no race", "of every head, at"):
        assert text in result.stdout, text


def fake_runs(monkeypatch, *drift):
    """Runs of a backward in torch; the n-th adds ``drift[n]`` to an element of dV."""
    drifts = iter(drift)

    def run(artifact, problem, inputs, *, config, schedule, seed, **_):
        dq, dk, dv = emulate(*inputs, default_scale(problem), problem.causal)
        dv[0, 0, 0, 0] += next(drifts)
        return EmulatorReport({"dq": dq, "dk": dk, "dv": dv}, [], schedule, seed, False, 0.0)

    monkeypatch.setattr(verify_module, "run", run)


@pytest.mark.parametrize(
    ("flag", "drift", "verdict"),
    [
        (" deterministic", (0.0, 0.0, 0.0), "3 schedules agree"),
        (" deterministic", (0.0, 0.0, 0.01), "dv differs between schedules ('eager', 0) and ('random', 1)"),
        ("", (0.0, 0.01, 0.0), "3 schedules are right"),
        ("", (0.0, 0.0, 5.0), "schedule random, seed 1: dV is wrong at batch 0, head 0, row 0"),
    ],
)
def test_backward_is_held_to_bits_only_where_it_is_deterministic(monkeypatch, flag, drift, verdict):
    fake_runs(monkeypatch, *drift)
    problem = AttentionProblem.parse(f"h=2 s=70 d=64 op=bwd{flag}")
    found = emulator.verify(None, problem)
    assert verdict in found.message and found.ok == ("schedules a" in verdict)


def test_a_backward_needs_its_config_and_all_of_its_inputs():
    problem = AttentionProblem.parse("h=2 s=70 d=64 op=bwd")
    with pytest.raises(UsageError, match="workspace depends on its config"):
        Case.make(problem).arguments(None, 4)
    with pytest.raises(UsageError, match="op bwd takes q, k, v, o, do, lse; got 3 tensors"):
        Case.of(problem, make_inputs(problem))


@pytest.mark.parametrize(
    "text",
    ["b=8 h=32 hk=4 s=8192 d=128 causal", "b=1 h=64 hk=1 sq=1 sk=100000 d=64", "b=3 h=3 sq=40 sk=20 d=128 lse"],
)
def test_reduced_problems_keep_the_variant_and_never_grow(text):
    problem = AttentionProblem.parse(text)
    for config in (Config(), Config(pack_gqa=True, tile_m=192, tile_n=64)):
        small = emulator.reduced(problem, config)
        assert Variant.of("sm_90a", small, config) == Variant.of("sm_90a", problem, config)
        for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k"):
            assert 0 < getattr(small, name) <= getattr(problem, name)
        assert small.seqlen_q < 500 and small.seqlen_k < 500
