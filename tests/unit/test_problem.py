"""The problem: its text, its rules, and what forward and backward cost."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import pytest

from fa4gen.config import FlashBwdSm90Config, FlashFwdSm90Config
from fa4gen.errors import UnsupportedProblem
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant


@pytest.mark.parametrize(
    "text",
    [
        "b=2 h=16 s=4096 d=128",
        "b=1 h=8 hk=2 sq=17 sk=300 d=192 dv=128 dtype=fp16 causal lse",
        "b=2 h=16 s=4096 d=128 op=bwd",
        "b=2 h=16 hk=4 s=4096 d=64 dtype=fp16 op=bwd causal deterministic",
    ],
)
def test_text_reads_back(text: str) -> None:
    problem = AttentionProblem.parse(text)
    assert str(problem) == text
    assert AttentionProblem.parse(str(problem)) == problem
    assert AttentionProblem(**problem.to_dict()) == problem


def test_full_is_a_word() -> None:
    assert AttentionProblem.parse("h=2 s=8 d=64 full") == AttentionProblem.parse("h=2 s=8 d=64")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("h=2 s=8 d=64 deterministic", "deterministic belongs to op=bwd"),
        ("h=2 s=8 d=64 op=bwd lse", "lse belongs to op=fwd"),
        ("h=2 s=8 d=64 op=both", "op must be one of fwd, bwd"),
        ("h=2 s=8 d=64 windowed", "unknown word 'windowed'"),
    ],
)
def test_rules(text: str, reason: str) -> None:
    with pytest.raises(UnsupportedProblem, match=reason):
        AttentionProblem.parse(text)


def test_backward_costs() -> None:
    forward, backward = (AttentionProblem.parse(f"b=2 h=8 hk=2 s=512 d=128{op}") for op in ("", " op=bwd"))
    assert backward.flops == 2.5 * forward.flops
    q, k = 2 * 512 * 8 * 128 * 2, 2 * 512 * 2 * 128 * 2  # bytes of Q and of K
    assert backward.hbm_bytes == 4 * q + 4 * k + 2 * 8 * 512 * 4  # Q, O, dO, dQ; K, V, dK, dV; LSE
    wide = AttentionProblem.parse("h=1 s=64 d=192 dv=128 op=bwd")
    assert wide.flops == 2 * (3 * 192 + 2 * 128) * 64 * 64


def test_forward_digests_are_those_before_there_were_backwards() -> None:
    """Caches and grids on disk were made with them."""
    problem, config = AttentionProblem.parse("b=2 h=16 s=4096 d=128 causal lse"), FlashFwdSm90Config()
    static = {"op": "fwd", "dtype": "bf16", "head_dim": 128, "head_dim_v": 128, "gqa_ratio": 1, "causal": True,
              "return_lse": True}  # fmt: skip
    data = {"family": "flash_fwd_sm90", "arch": "sm_90a", "static": static, "config": asdict(config)}
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    assert Variant.of("sm_90a", problem, config).digest == digest[:16]


def test_deterministic_is_part_of_a_backwards_identity() -> None:
    one, other = (
        Variant.of("sm_90a", AttentionProblem.parse(f"h=2 s=64 d=64 op=bwd{flag}"), FlashBwdSm90Config())
        for flag in ("", " deterministic")
    )
    assert one.digest != other.digest and "_det_" in other.name and "_det_" not in one.name
