"""Random samples of variants on small problems: of each family every head dim and every choice of every knob.

They depend on the family's domain, the count and the seed alone; a smaller sample is the beginning of a larger one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import torch

from fa4gen.accuracy import KINDS, TORCH_DTYPES
from fa4gen.arch import Arch, get_arch
from fa4gen.config import FAMILIES, Config, config_to_dict
from fa4gen.feasibility import can_implement
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant

__all__ = ["BWD_SM100", "DOMAINS", "NUM_SMS", "SM90", "SM100", "Case", "Domain", "make_inputs", "sample"]

# A persistent kernel walks several tiles a CTA.
NUM_SMS = 3
DRAWS = 24
UP_TO_128 = (128, 64, 96, 8, 80, 40, 112, 16, 72, 120, 24, 56, 104, 32, 88, 48)


@dataclass(frozen=True)
class Domain:
    """What is sampled of a family. ``few`` and ``whole``: sizes of the sample that CI runs and of one that meets all.

    ``scores``: the most of all heads of a problem, about a second in the emulator. ``kinds`` of inputs, which numpy
    makes for the first three (:func:`make_inputs`).
    """

    family: str
    head_dims: tuple[tuple[int, int], ...]
    seqlens_q: tuple[int, ...] = (1, 7, 64, 65, 129, 257, 300, 600)
    seqlens_k: tuple[int, ...] = (1, 64, 65, 129, 200, 257, 385, 500)
    ratios: tuple[int, ...] = (1, 1, 2, 8)
    kinds: tuple[str, ...] = KINDS
    scores: int = 800_000
    few: int = 12
    whole: int = 80


SM90 = Domain(
    "flash_fwd_sm90",
    (
        *((d, d) for d in (128, 64, 96, 256, 80, 192, 8, 40, 112, 16, 136, 24, 160, 72)),
        *((192, 128), (64, 128), (128, 64), (72, 40)),
    ),
    seqlens_q=(1, 7, 64, 65, 127, 129, 200, 257, 300),
    seqlens_k=(1, 64, 65, 129, 200, 256, 257, 300, 385),
    ratios=(1, 1, 2, 4),
    kinds=("normal", "peaked", "large_v"),
    scores=300_000,
    whole=50,
)
SM100 = Domain(
    "flash_fwd_sm100",
    (
        *((128, 128), (64, 64), (192, 128), (256, 256)),
        *((d, d) for d in UP_TO_128[2:]),
        *((64, 128), (128, 64), (72, 40), (192, 192), (136, 136)),
    ),
)
BWD_SM90 = Domain(
    "flash_bwd_sm90",
    (*((d, d) for d in (128, 64, 256, 96, 8, 192, 80, 112, 40, 16)), (192, 128), (64, 128), (128, 64), (72, 40)),
    scores=120_000,
    few=4,
    whole=60,
)
BWD_SM100 = Domain(
    "flash_bwd_sm100",
    (*((d, d) for d in UP_TO_128), (64, 128), (128, 64), (72, 40), (64, 192)),
    scores=200_000,
    few=8,
    whole=60,
)
DOMAINS = (SM90, SM100, BWD_SM90, BWD_SM100)


@dataclass(frozen=True)
class Case:
    """One kernel, one problem, one kind of inputs."""

    problem: AttentionProblem
    variant: Variant
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.variant.name}-{str(self.problem).replace(' ', '_')}"


@cache
def sample(count: int, seed: int = 0, domain: Domain = SM90) -> tuple[Case, ...]:
    """Head dims and architectures in turn; of some configs drawn at random the one with most choices not yet seen."""
    rng = np.random.default_rng(seed)
    family = FAMILIES[domain.family]
    space = SearchSpace.load(family)
    seen: set[tuple[str, object]] = set()
    cases = []
    for i in range(count):
        arch = get_arch(family.archs[i % len(family.archs)])
        problem = _problem(rng, domain, family.op, *domain.head_dims[i % len(domain.head_dims)])
        configs = [_config(rng, space, problem, arch) for _ in range(DRAWS)]
        config = max(configs, key=lambda c: len(set(config_to_dict(c).items()) - seen))
        seen.update(config_to_dict(config).items())
        variant = Variant.of(arch.name, problem, config)
        cases.append(Case(problem, variant, domain.kinds[i % len(domain.kinds)], seed + i))
    return tuple(cases)


def _config(rng: np.random.Generator, space: SearchSpace, problem: AttentionProblem, arch: Arch) -> Config:
    while can_implement(problem, config := space.sample(rng, problem), arch) is not None:
        pass
    return config


def _problem(rng: np.random.Generator, domain: Domain, op: str, head_dim: int, head_dim_v: int) -> AttentionProblem:
    most = domain.scores // max(domain.ratios)
    lengths = [(q, k) for q, k in product(domain.seqlens_q, domain.seqlens_k) if q * k <= most]
    seqlen_q, seqlen_k = lengths[rng.integers(len(lengths))]
    ratio = domain.ratios[rng.integers(len(domain.ratios))]
    fit = min(domain.scores // (seqlen_q * seqlen_k * ratio), 4)
    heads_kv = int(rng.integers(1, min(fit, 2) + 1))
    problem = AttentionProblem(
        batch=int(rng.integers(1, min(fit // heads_kv, 2) + 1)),
        heads=heads_kv * ratio,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=("bf16", "fp16")[rng.integers(2)],
        causal=bool(rng.random() < 0.5),
        op=op,
    )
    rare = bool(rng.random() >= 0.8)
    return replace(problem, deterministic=rare) if op == "bwd" else replace(problem, return_lse=not rare)


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
