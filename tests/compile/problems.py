"""Problems that the families' compile tests sample configs for."""

from __future__ import annotations

from fa4gen.problem import AttentionProblem

PROBLEMS = [
    AttentionProblem.parse(text)
    for text in (
        "h=2 s=256 d=8 causal lse",
        "h=2 s=256 d=40 dv=80",
        "h=4 hk=2 s=256 d=64 causal",
        "h=2 s=256 d=64 dtype=fp16 lse",
        "h=2 s=256 d=96 causal",
        "h=2 s=256 d=128",
        "h=8 s=256 d=128 hk=1 causal lse",
        "h=2 s=256 d=192 dv=128 causal",
        "h=2 s=256 d=256",
    )
]
