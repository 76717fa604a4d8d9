"""A random sample of forward variants on small problems: every head dim, every choice of every knob.

It depends on the count and the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from fa4gen.accuracy import TORCH_DTYPES
from fa4gen.arch import get_arch
from fa4gen.config import Config, config_to_dict, get_family
from fa4gen.feasibility import can_implement
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant

__all__ = ["NUM_SMS", "Case", "make_inputs", "sample"]

ARCH = "sm_90a"
HEAD_DIMS = (
    *((d, d) for d in (128, 64, 96, 256, 80, 192, 8, 40, 112, 16, 136, 24, 160, 72)),
    *((192, 128), (64, 128), (128, 64), (72, 40)),
)
SEQLENS_Q = (1, 7, 64, 65, 127, 129, 200, 257, 300)
SEQLENS_K = (1, 64, 65, 129, 200, 256, 257, 300, 385)
KINDS = ("normal", "peaked", "large_v")
MAX_SCORES = 300_000  # of all heads: about a second in the emulator
DRAWS = 24
# A persistent kernel walks several tiles a CTA.
NUM_SMS = 3


@dataclass(frozen=True)
class Case:
    """One kernel, one problem, one kind of inputs."""

    problem: AttentionProblem
    variant: Variant
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.variant.name}-{str(self.problem).replace(' ', '_')}"


def sample(count: int, seed: int = 0) -> list[Case]:
    """Head dims in turn; the config, of some drawn at random, that brings most choices not yet seen."""
    rng = np.random.default_rng(seed)
    space = SearchSpace.load(get_family("fwd", ARCH))
    seen: set[tuple[str, object]] = set()
    cases = []
    for i in range(count):
        problem = _problem(rng, *HEAD_DIMS[i % len(HEAD_DIMS)])
        configs = [_config(rng, space, problem) for _ in range(DRAWS)]
        config = max(configs, key=lambda c: len(set(config_to_dict(c).items()) - seen))
        seen.update(config_to_dict(config).items())
        cases.append(Case(problem, Variant.of(ARCH, problem, config), KINDS[i % len(KINDS)], seed + i))
    return cases


def _config(rng: np.random.Generator, space: SearchSpace, problem: AttentionProblem) -> Config:
    while can_implement(problem, config := space.sample(rng, problem), get_arch(ARCH)) is not None:
        pass
    return config


def _problem(rng: np.random.Generator, head_dim: int, head_dim_v: int) -> AttentionProblem:
    lengths = [(q, k) for q, k in product(SEQLENS_Q, SEQLENS_K) if q * k <= MAX_SCORES // 4]
    seqlen_q, seqlen_k = lengths[rng.integers(len(lengths))]
    ratio = (1, 1, 2, 4)[rng.integers(4)]
    fit = min(MAX_SCORES // (seqlen_q * seqlen_k * ratio), 4)
    heads_kv = int(rng.integers(1, min(fit, 2) + 1))
    return AttentionProblem(
        batch=int(rng.integers(1, min(fit // heads_kv, 2) + 1)),
        heads=heads_kv * ratio,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=("bf16", "fp16")[rng.integers(2)],
        causal=bool(rng.random() < 0.5),
        return_lse=bool(rng.random() < 0.8),
    )


def make_inputs(problem: AttentionProblem, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K, V by numpy, the same on every machine: unit normal, but "peaked" Q times 30 or "large_v" V times 1024."""
    rng = np.random.default_rng(seed)
    p, dtype = problem, TORCH_DTYPES[problem.dtype]
    shapes = {
        "q": (p.batch, p.seqlen_q, p.heads, p.head_dim),
        "k": (p.batch, p.seqlen_k, p.heads_kv, p.head_dim),
        "v": (p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v),
    }
    factors = {"q": 30.0 if kind == "peaked" else 1.0, "v": 1024.0 if kind == "large_v" else 1.0}
    q, k, v = (
        torch.from_numpy(rng.standard_normal(shape, np.float32) * np.float32(factors.get(name, 1.0))).to(dtype)
        for name, shape in shapes.items()
    )
    return q, k, v
