"""What can_implement accepts compiles: no spills, no serialised WGMMA, the shared memory and SASS it promised."""

from __future__ import annotations

import numpy as np
import pytest

from fa4gen import sass
from fa4gen.arch import get_arch
from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import CompilePool, load_kernel
from fa4gen.config import FAMILIES, FlashBwdSm90Config
from fa4gen.feasibility import can_implement, padded_bwd, smem_bytes
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant

SM90 = get_arch("sm_90a")
PROBLEMS = [
    AttentionProblem.parse(f"{text} op=bwd")
    for text in (
        "h=2 s=256 d=8 causal dtype=fp16",
        "h=4 hk=2 s=256 d=64 causal",
        "h=2 s=256 d=64 deterministic",
        "h=2 s=256 d=40 dv=80",
        "h=2 s=256 d=96 causal deterministic",
        "h=8 hk=1 s=256 d=128",
        "h=2 s=256 d=128 causal dtype=fp16",
        "h=2 s=256 d=192 dv=128 causal",
        "h=2 s=256 d=256 deterministic",
    )
]
SAMPLES_PER_PROBLEM = 2


def sampled() -> list[tuple[AttentionProblem, FlashBwdSm90Config]]:
    """The default of each problem, and configs at random."""
    space = SearchSpace.load(FAMILIES["flash_bwd_sm90"])
    rng = np.random.default_rng(3)
    pairs = []
    for problem in PROBLEMS:
        found = [FlashBwdSm90Config.default(problem)]
        while len(found) <= SAMPLES_PER_PROBLEM:
            config = space.sample(rng, problem)
            if can_implement(problem, config, SM90) is None:
                found.append(config)
        pairs += [(problem, config) for config in found]
    return pairs


PAIRS = sampled()
IDS = [f"d{problem.head_dim}-{config.tile_m}-{i}" for i, (problem, config) in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    variants = dict.fromkeys(Variant.of("sm_90a", problem, config) for problem, config in PAIRS)
    with CompilePool(cache=ArtifactCache(tmp_path_factory.mktemp("artifacts"))) as pool:
        futures = {variant: pool.submit(variant) for variant in variants}
        return {variant: future.result() for variant, future in futures.items()}


@pytest.mark.parametrize(("problem", "config"), PAIRS, ids=IDS)
def test_accepted_configs_compile_clean(artifacts, problem, config):
    assert can_implement(problem, config, SM90) is None
    artifact = artifacts[Variant.of("sm_90a", problem, config)]
    meta = artifact.meta
    assert not meta.wgmma_serialized, meta.remarks
    assert (meta.stack_bytes, meta.spill_store_bytes, meta.spill_load_bytes) == (0, 0, 0)
    predicted = smem_bytes(problem.static, config)
    assert predicted - 1024 <= meta.smem_bytes <= predicted <= SM90.smem_per_cta
    mix = sass.inspect(artifact.cubin_path).mix
    d, dv, m = padded_bwd(problem.head_dim) // 16, padded_bwd(problem.head_dim_v) // 16, config.tile_m // 16
    # Unless drained: S, dP, dV and dK of the first step and of the loop; dQ of the loop and of the last step.
    copies = 2 if config.step_order == "s_ahead" else 1
    assert mix["HGMMA"] == copies * (d + dv + 2 * m + config.tile_n // 16)  # K steps of 16
    vectors = config.tile_m * padded_bwd(problem.head_dim) // 256 // 4
    reductions = mix.get("UBLKRED", 0), mix.get("REDG", 0)
    counted = int(problem.deterministic)
    assert reductions == ((1, counted) if config.dq_store == "bulk" else (0, copies * (vectors + counted)))
    assert mix["UTMASTG"] >= 3
    assert callable(load_kernel(artifact))
