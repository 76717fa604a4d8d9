"""What can_implement accepts compiles: no spills, no serialised WGMMA, the shared memory and SASS it promised."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from problems import PROBLEMS

from fa4gen import sass
from fa4gen.arch import get_arch
from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import CompilePool, load_kernel
from fa4gen.config import FAMILIES, FlashFwdSm90Config
from fa4gen.feasibility import can_implement, padded, smem_bytes
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant

SM90 = get_arch("sm_90a")
SAMPLES_PER_PROBLEM = 2


def sampled() -> list[tuple[AttentionProblem, FlashFwdSm90Config]]:
    space = SearchSpace.load(FAMILIES["flash_fwd_sm90"])
    rng = np.random.default_rng(7)
    pairs = []
    for problem in PROBLEMS:
        found: list[FlashFwdSm90Config] = []
        while len(found) < SAMPLES_PER_PROBLEM:
            config = space.sample(rng, problem)
            if can_implement(problem, config, SM90) is None:
                found.append(config)
        pairs += [(problem, config) for config in found]
    return pairs


PAIRS = sampled()
D64 = AttentionProblem.parse("h=2 s=256 d=64")
SPLITS = (0.0, 0.25, 0.5)


def split_variant(fraction: float) -> Variant:
    return Variant.of("sm_90a", D64, FlashFwdSm90Config(tile_n=64, exp2_poly_fraction=fraction, exp2_poly_degree=3))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    variants = [Variant.of("sm_90a", problem, config) for problem, config in PAIRS]
    variants += [split_variant(fraction) for fraction in SPLITS]
    with CompilePool(cache=ArtifactCache(tmp_path_factory.mktemp("artifacts"))) as pool:
        futures = {variant: pool.submit(variant) for variant in dict.fromkeys(variants)}
        return {variant: future.result() for variant, future in futures.items()}


IDS = [f"d{problem.head_dim}-{i}" for i, (problem, _) in enumerate(PAIRS)]


@pytest.mark.parametrize(("problem", "config"), PAIRS, ids=IDS)
def test_accepted_configs_compile_clean(artifacts, problem, config):
    artifact = artifacts[Variant.of("sm_90a", problem, config)]
    meta = artifact.meta
    assert not meta.wgmma_serialized, meta.remarks
    assert (meta.stack_bytes, meta.spill_store_bytes, meta.spill_load_bytes) == (0, 0, 0)
    # The last part is not padded to 1 KB, so the predicate may be over by less than that, never under.
    predicted = smem_bytes(problem.static, config)
    assert predicted - 1024 <= meta.smem_bytes <= predicted <= SM90.smem_per_cta
    mix = sass.inspect(artifact.cubin_path).mix
    qk = padded(problem.head_dim) // 16
    pv = config.tile_n // 16
    loops = 2 if problem.causal else 1  # masked and whole tiles
    # QKᵀ: first step and each loop. PV: each loop, and once more alone.
    assert mix["HGMMA"] == (1 + loops) * (qk + pv)
    assert mix["UTMASTG"] >= 1
    assert mix["USETMAXREG.DEALLOC"] == 1
    assert mix["USETMAXREG.TRY_ALLOC"] == 1
    assert callable(load_kernel(artifact))


def test_exp2_split_in_sass_is_the_fraction_asked_for(artifacts):
    """Steps: first and loop, 64·tile_n/128 scores each; a polynomial leaves one FADD.RM where a MUFU.EX2 was."""
    scores = 2 * 64 * 64 // 128
    counts = {f: sass.inspect(artifacts[split_variant(f)].cubin_path).mix["MUFU.EX2"] for f in SPLITS}
    for fraction in SPLITS:
        assert counts[0.0] - counts[fraction] == round(fraction * scores)


def test_one_artifact_serves_every_length():
    longer = dataclasses.replace(D64, seqlen_q=7, seqlen_k=100_000, batch=9)
    config = FlashFwdSm90Config()
    assert Variant.of("sm_90a", longer, config) == Variant.of("sm_90a", D64, config)
