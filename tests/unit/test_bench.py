"""The bench on the CPU: a clock stands in for the device timer, torch functions for kernels."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import backward_fakes
import numpy as np
import pytest
import torch

from fa4gen import bench as module
from fa4gen.accuracy import default_scale, make_inputs, reference
from fa4gen.arch import DEVICES
from fa4gen.case import Case
from fa4gen.config import FlashFwdSm90Config
from fa4gen.errors import UsageError
from fa4gen.measure.cuda import Timing
from fa4gen.measure.peers import PEERS, Peer, PeerAbsent, differentiated, get_peers
from fa4gen.problem import AttentionProblem

torch.set_num_threads(1)
PROBLEM = AttentionProblem.parse("b=1 h=2 s=96 d=32 causal")


def attend_as(us, wrong=False):
    """A right (or wrong) function that takes ``us`` on the fake timer."""

    def attend(q, k, v):
        out, _ = reference(q, k, v, PROBLEM, default_scale(PROBLEM))
        return out.to(q.dtype) * (2 if wrong else 1)

    attend.us = us
    return partial(partial, attend)


class FakeTimer:
    def __init__(self, index):
        self.rng = np.random.default_rng(0)

    def time(self, launches, head_start_us):
        us = [getattr(launch, "func", launch).us * self.rng.normal(1, 0.01) for launch in launches]
        return Timing(tuple(us), 1700.0, None)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(module, "make_inputs", lambda problem, kind, seed, device: make_inputs(problem, kind, seed))
    monkeypatch.setattr(Case, "make", partial(lambda make, *where: make(*where[:3]), Case.make))  # not on a device
    monkeypatch.setattr(module, "current_device", lambda index: DEVICES["NVIDIA H200"])
    monkeypatch.setattr(module, "DeviceTimer", FakeTimer)
    monkeypatch.setattr(module, "_ours", lambda problem: attend_as(100.0))
    resolution = SimpleNamespace(reason="a tuned row")
    monkeypatch.setattr(module, "dispatcher", lambda index: SimpleNamespace(resolve=lambda problem: resolution))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def raise_(error):
    raise error


def test_bench_tells_fast_slow_wrong_and_absent_apart(on_cpu):
    peers = [
        Peer("slow", "Slow", "numpy", lambda problem: attend_as(130.0)),
        Peer("fast", "Fast", "no-such-distribution", lambda problem: attend_as(80.0)),
        Peer("wrong", "Wrong", "numpy", lambda problem: attend_as(10.0, wrong=True)),
        Peer("absent", "Absent", "numpy", lambda problem: raise_(PeerAbsent("not installed"))),
        Peer("refuses", "Refuses", "numpy", lambda problem: raise_(RuntimeError("No available kernel.\nAborting"))),
    ]
    result = module.bench(PROBLEM, peers, rounds=12)
    ours, slow, fast, wrong, absent, refuses = result.entries
    assert (result.problem, result.device, result.reason) == (str(PROBLEM), "NVIDIA H200", "a tuned row")
    assert ours.speedup is None and ours.median_us == pytest.approx(100, rel=0.02) and len(ours.samples_us) == 12
    assert ours.tflops == pytest.approx(PROBLEM.flops / 100e-6 / 1e12, rel=0.02)
    assert ours.clock_mhz == 1700.0 and ours.power_w is None and 0 < ours.relative_error < 3e-3
    assert slow.version == np.__version__ and fast.version == ""
    assert 1.2 < slow.speedup_interval[0] < slow.speedup < slow.speedup_interval[1] < 1.4
    assert fast.speedup_interval[1] < 1
    assert "O is wrong" in wrong.note and wrong.median_us is not None
    assert absent.note == "not installed" and absent.median_us is None
    assert refuses.note == "RuntimeError: No available kernel." and refuses.samples_us == ()
    assert result.best_peer is fast
    assert json.loads(json.dumps(result.to_dict()))["entries"][1]["name"] == "slow"


BACKWARD = AttentionProblem.parse("b=1 h=2 hk=1 s=96 d=32 causal op=bwd")


def attend_in_torch(q, k, v, factor=1.0):
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for t in (k, v))
    q = q.transpose(1, 2)
    return factor * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def backward_as(us, factor=1.0):
    prepare = differentiated(partial(attend_in_torch, factor=factor))

    def timed(*inputs):
        call = prepare(*inputs)
        call.us = us
        return call

    return timed


def test_backward_alone_is_timed_and_its_gradients_checked(on_cpu, monkeypatch):
    monkeypatch.setattr(FakeTimer, "time", lambda self, calls, _: Timing(tuple(call.us for call in calls), None, None))
    monkeypatch.setattr(module, "_ours", lambda problem: backward_as(100.0))
    peers = [
        Peer("slow", "Slow", "numpy", lambda problem: backward_as(130.0)),
        Peer("wrong", "Wrong", "numpy", lambda problem: backward_as(10.0, factor=1.1)),
        Peer("none", "None", "numpy", lambda problem: differentiated(lambda q, k, v: q.detach())),
    ]
    ours, slow, wrong, none = module.bench(BACKWARD, peers, rounds=3).entries
    assert ours.tflops == pytest.approx(BACKWARD.flops / 100e-6 / 1e12) and not ours.note
    assert slow.speedup == pytest.approx(1.3) and not slow.note
    assert "dV is wrong" in wrong.note and none.note == "has no backward"


def test_ours_is_attention_with_the_problems_flags(monkeypatch):
    seen = []

    def attention(q, k, v, **flags):
        seen.append(flags)
        return attend_in_torch(q, k, v)

    monkeypatch.setattr(module, "attention", attention)
    case = Case.make(dataclasses.replace(BACKWARD, deterministic=True))
    call = module._ours(case.problem)(*case.inputs.values())
    assert seen == [{"causal": True, "return_lse": False, "deterministic": True}]
    for _ in range(2):  # the graph is kept
        assert case.check(case.expect(), call()).ok
    assert len(seen) == 1


def test_a_backward_variant_launches_the_kernel_itself(monkeypatch):
    backward_fakes.use_fake_family(monkeypatch)
    config = backward_fakes.FakeConfig()
    monkeypatch.setattr(module, "can_implement", lambda problem, config, arch: None)
    chosen = SimpleNamespace(
        device=DEVICES["NVIDIA H200"],
        resolve=lambda problem: SimpleNamespace(config=config),
        kernel=lambda variant: backward_fakes.kernel(variant.static.causal),
    )
    monkeypatch.setattr(module, "dispatcher", lambda index: chosen)
    case = Case.make(BACKWARD)
    call = module.variant_peer("tile_n=64", lambda config: config).bind(BACKWARD)(*case.inputs.values())
    assert case.check(case.expect(), call()).ok


def test_paired_bootstrap_removes_drift_that_rounds_share():
    rng = np.random.default_rng(1)
    drift = rng.uniform(1, 2, 40)  # a clock that halves
    below = 10 * drift * rng.normal(1, 0.005, 40)
    low, high = module.ratio_interval(1.1 * below * rng.normal(1, 0.005, 40), below)
    assert 1.08 < low < 1.1 < high < 1.12


def test_host_cost_compares_in_turn(on_cpu, monkeypatch):
    monkeypatch.setattr(module, "attention", lambda q, k, v, causal: None)
    cost = module.host_cost(PROBLEM, calls=20, rounds=5)
    assert 0 < cost.ours_us < cost.torch_us
    assert cost.ratio == pytest.approx(cost.ours_us / cost.torch_us)
    assert cost.ratio_interval[0] <= cost.ratio <= cost.ratio_interval[1] < 1


def test_peers_by_name():
    assert get_peers("all") == list(PEERS.values()) and get_peers("none") == []
    assert [peer.name for peer in get_peers("fa4, cudnn")] == ["fa4", "cudnn"]
    with pytest.raises(UsageError, match="unknown peer 'fa5'; known: cudnn, fa2, fa3, fa4"):
        get_peers("fa5")


def test_torch_peer_agrees_with_the_reference_in_our_layout(monkeypatch):
    problem = AttentionProblem.parse("b=2 h=4 hk=2 s=64 d=32 causal")
    q, k, v = (t.double() for t in module.make_inputs(problem))
    from torch.nn.attention import SDPBackend

    monkeypatch.setattr(SDPBackend, "CUDNN_ATTENTION", SDPBackend.MATH)
    out = PEERS["cudnn"].bind(problem)(q, k, v)()
    torch.testing.assert_close(out, reference(q, k, v, problem, default_scale(problem))[0])


def test_torch_peer_differentiates(monkeypatch):
    from torch.nn.attention import SDPBackend

    monkeypatch.setattr(SDPBackend, "FLASH_ATTENTION", SDPBackend.MATH)
    case = Case.make(BACKWARD)
    assert case.check(case.expect(), PEERS["fa2"].bind(BACKWARD)(*case.inputs.values())()).ok
    with pytest.raises(PeerAbsent, match="no deterministic backward"):
        PEERS["fa2"].bind(dataclasses.replace(BACKWARD, deterministic=True))


def test_peers_say_what_they_cannot_do():
    ragged = AttentionProblem.parse("h=1 sq=64 sk=128 d=64 causal")
    with pytest.raises(PeerAbsent, match="top left"):
        PEERS["fa2"].bind(ragged)
    for name in ("fa3", "fa4"):
        if not PEERS[name].version:
            with pytest.raises(PeerAbsent, match="not installed: No module named"):
                PEERS[name].bind(ragged)


def test_a_variant_runs_the_changed_config_or_says_why_not(monkeypatch):
    built = []

    def kernel(variant):
        built.append(variant)
        return lambda q, k, v, o, scale, num_sms: o.copy_(reference(q, k, v, PROBLEM, scale)[0])

    h200 = DEVICES["NVIDIA H200"]
    resolution = SimpleNamespace(config=FlashFwdSm90Config())
    chosen = SimpleNamespace(device=h200, resolve=lambda problem: resolution, kernel=kernel)
    monkeypatch.setattr(module, "dispatcher", lambda index: chosen)
    peer = module.variant_peer("tile_n=64", lambda config: dataclasses.replace(config, tile_n=64))
    q, k, v = make_inputs(PROBLEM)
    (out,) = peer.bind(PROBLEM)(q, k, v)()
    assert torch.equal(out, reference(q, k, v, PROBLEM, default_scale(PROBLEM))[0].to(q.dtype))
    assert built[0].config == FlashFwdSm90Config(tile_n=64)
    absent = module.variant_peer("tile_n=40", lambda config: dataclasses.replace(config, tile_n=40))
    with pytest.raises(PeerAbsent, match="tile_n must be a multiple of 16"):
        absent.bind(PROBLEM)
