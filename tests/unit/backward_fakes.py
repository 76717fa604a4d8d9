"""A backward kernel in torch, which rounds where a real one does, and a kernel family for it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa4gen import config, feasibility
from fa4gen.config import Family
from fa4gen.problem import AttentionProblem

WORKSPACE = 96  # elements of the fake family's workspace


@dataclass(frozen=True)
class FakeConfig:
    tile_m: int = 64
    tile_n: int = 128
    kv_stages: int = 1

    @classmethod
    def default(cls, problem: AttentionProblem) -> FakeConfig:
        return cls()


def use_fake_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``flash_bwd_sm90`` a family with two knobs that can run everything."""
    family = Family("flash_bwd_sm90", "bwd", ("sm_90a",), FakeConfig)  # type: ignore[arg-type]
    monkeypatch.setitem(config.FAMILIES, family.name, family)
    monkeypatch.setitem(feasibility._RULES, family.name, lambda problem, config, arch: iter(()))
    workspace = SimpleNamespace(workspace_elements=lambda problem, config: WORKSPACE)
    monkeypatch.setitem(sys.modules, "fa4gen.workspace", workspace)  # where it is imported late
    monkeypatch.setattr("fa4gen.autograd.workspace_elements", workspace.workspace_elements)


def emulate(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, scale: float, causal: bool,
    spoil: Callable[[dict[str, Tensor]], None] = lambda step: None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV: fp32, with P, dS and the results rounded to q's dtype. ``spoil`` changes P, delta, dS and scale."""
    group, shift = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    qh, oh, doh = (t.float().transpose(1, 2) for t in (q, o, do))
    kh, vh = (t.float().transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    scores = scale * (qh @ kh.mT)
    if causal:
        hidden = torch.arange(k.shape[1]) > torch.arange(q.shape[1])[:, None] + shift
        scores.masked_fill_(hidden, -math.inf)
    step = {
        "p": (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp(),
        "delta": (doh * oh).sum(-1, keepdim=True),
        "scale": torch.tensor(scale),
    }
    spoil(step)
    ds = (step["p"] * (doh @ vh.mT - step["delta"])).to(q.dtype).float()
    p = step["p"].to(q.dtype).float()
    gradients = step["scale"] * (ds @ kh), step["scale"] * (ds.mT @ qh), p.mT @ doh
    dq, dk, dv = (t.transpose(1, 2) for t in gradients)
    return dq.to(q.dtype), *(t.unflatten(2, (-1, group)).sum(3).to(q.dtype) for t in (dk, dv))


def kernel(causal: bool) -> Callable[..., None]:
    """What a compiled backward is to its caller."""

    def launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, *rest: Any) -> None:
        *outputs, workspace, scale, num_sms = rest
        assert do.stride(3) == 1 and do.data_ptr() % 16 == 0 and lse.is_contiguous() and num_sms > 0
        assert workspace.shape == (WORKSPACE,) and workspace.dtype == torch.float32
        for output, like, gradient in zip(outputs, (q, k, v), emulate(q, k, v, o, do, lse, scale, causal), strict=True):
            assert output.shape == like.shape and output.dtype == like.dtype and output.is_contiguous()
            output.copy_(gradient)

    return launch
