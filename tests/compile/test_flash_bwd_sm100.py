"""What can_implement accepts compiles for Blackwell: no spills, the shared memory and SASS promised, one CTA or two."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from fa4gen import sass
from fa4gen.arch import get_arch
from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import CompilePool, load_kernel
from fa4gen.config import FAMILIES, FlashBwdSm100Config
from fa4gen.feasibility import can_implement, padded_v, smem_bytes
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant

ARCHS = ("sm_100a", "sm_103a")
PROBLEMS = [
    AttentionProblem.parse(f"{text} op=bwd")
    for text in (
        "h=2 s=2048 d=128 causal",
        "h=8 hk=2 s=256 d=128 causal deterministic",
        "h=2 s=256 d=64 dtype=fp16",
        "h=4 hk=2 s=256 d=64 causal deterministic",
        "h=2 s=256 d=96 causal",
        "h=2 s=256 d=8 causal dtype=fp16",
        "h=2 s=256 d=40 dv=80",
    )
]
Case = tuple[str, AttentionProblem, FlashBwdSm100Config]


def sampled() -> list[Case]:
    """The default of each problem, and a config at random for one CTA and for a pair."""
    space = SearchSpace.load(FAMILIES["flash_bwd_sm100"])
    rng = np.random.default_rng(5)
    cases: list[Case] = [("sm_100a", problem, FlashBwdSm100Config.default(problem)) for problem in PROBLEMS[:3]]
    for problem, pair in product(PROBLEMS, (False, True)):
        arch = ARCHS[len(cases) % 3 == 2]
        config = space.sample(rng, problem)
        while can_implement(problem, config, get_arch(arch)) or config.use_2cta != pair:
            config = space.sample(rng, problem)
        cases.append((arch, problem, config))
    return cases


CASES = sampled()
IDS = [f"{arch}-d{p.head_dim}-{'pair' if c.use_2cta else 'one'}-{i}" for i, (arch, p, c) in enumerate(CASES)]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    variants = dict.fromkeys(Variant.of(*case) for case in CASES)
    with CompilePool(cache=ArtifactCache(tmp_path_factory.mktemp("artifacts"))) as pool:
        futures = {variant: pool.submit(variant) for variant in variants}
        return {variant: future.result() for variant, future in futures.items()}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_accepted_configs_compile_clean(artifacts, case):
    arch, problem, config = case
    artifact = artifacts[Variant.of(*case)]
    meta = artifact.meta
    assert (meta.stack_bytes, meta.spill_store_bytes, meta.spill_load_bytes) == (0, 0, 0)
    assert meta.smem_bytes == smem_bytes(problem.static, config) <= get_arch(arch).smem_per_cta
    mix = sass.inspect(artifact.cubin_path).mix
    d, dv = padded_v(problem.head_dim, config) // 16, padded_v(problem.head_dim_v, config) // 16
    # K steps of 16, each MMA twice: of the first step, or of the last, and of the loop. dQ is over the pair's keys.
    assert mix["UTCHMMA"] == 2 * (d + dv + 8 + 8 + 8 * config.ctas)
    # The masked and the unmasked step: half a row of 128 columns.
    emulated = round(32 * config.exp2_poly_fraction)
    assert mix["MUFU.EX2"] == 2 * (64 - 2 * emulated)
    assert mix["FFMA2"] == 2 * (32 + emulated * config.exp2_poly_degree)
    assert mix["UTMASTG"] >= 2 and mix["UTMAREDG"] >= 1
    assert mix.get("USETMAXREG.TRY_ALLOC", 0) + mix["USETMAXREG.DEALLOC"] == 3
    assert callable(load_kernel(artifact))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_pair_is_one_in_sass(artifacts, case):
    """The MMAs, loads and commits of two CTAs, and dS that goes from shared memory to the other's."""
    _, _, config = case
    text = sass.disassemble(artifacts[Variant.of(*case)].cubin_path)
    for opcode in ("UTCHMMA", "UTMALDG.4D", "UTCBAR"):
        forms = set(re.findall(rf"\b{re.escape(opcode)}\S*", text))
        assert {"2CTA" in form for form in forms} == {config.use_2cta}, forms
    assert len(re.findall(r"\bUBLKCP\.S\.S\b", text)) == (2 if config.use_2cta else 0)
    assert ("UCGABAR_WAIT" in text) == config.use_2cta
