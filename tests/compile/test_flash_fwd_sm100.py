"""What can_implement accepts compiles for Blackwell: no spills, the shared memory, registers and SASS it promised."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from problems import PROBLEMS

from fa4gen import sass
from fa4gen.arch import get_arch
from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import CompilePool, load_kernel
from fa4gen.config import FAMILIES, FlashFwdSm100Config
from fa4gen.feasibility import can_implement, p_split, padded, smem_bytes
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant

ARCHS = ("sm_100a", "sm_103a")
SAMPLES_PER_PROBLEM = 2
Case = tuple[str, AttentionProblem, FlashFwdSm100Config]


def sampled() -> list[Case]:
    space = SearchSpace.load(FAMILIES["flash_fwd_sm100"])
    rng = np.random.default_rng(11)
    cases: list[Case] = []
    for problem in PROBLEMS:
        for _ in range(SAMPLES_PER_PROBLEM):
            arch = ARCHS[len(cases) % 3 == 2]
            config = space.sample(rng, problem)
            while can_implement(problem, config, get_arch(arch)):
                config = space.sample(rng, problem)
            cases.append((arch, problem, config))
    return cases


CASES = sampled()
D64 = AttentionProblem.parse("h=2 s=256 d=64")
SPLITS = ((0.0, 0.0), (0.125, 0.0), (0.25, 0.5))


def split_variant(fraction: float, start: float, degree: int = 3) -> Variant:
    config = FlashFwdSm100Config(exp2_poly_fraction=fraction, exp2_poly_start=start, exp2_poly_degree=degree)
    return Variant.of("sm_100a", D64, config)


DEGREE_5 = split_variant(0.125, 0.0, 5)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    variants = [Variant.of(*case) for case in CASES]
    variants += [DEGREE_5, *(split_variant(*split) for split in SPLITS)]
    with CompilePool(cache=ArtifactCache(tmp_path_factory.mktemp("artifacts"))) as pool:
        futures = {variant: pool.submit(variant) for variant in dict.fromkeys(variants)}
        return {variant: future.result() for variant, future in futures.items()}


@pytest.mark.parametrize("case", CASES, ids=[f"{arch}-d{p.head_dim}-{i}" for i, (arch, p, _) in enumerate(CASES)])
def test_accepted_configs_compile_clean(artifacts, case):
    arch, problem, config = case
    artifact = artifacts[Variant.of(*case)]
    meta = artifact.meta
    assert (meta.stack_bytes, meta.spill_store_bytes, meta.spill_load_bytes) == (0, 0, 0)
    assert meta.smem_bytes == smem_bytes(problem.static, config) <= get_arch(arch).smem_per_cta
    mix = sass.inspect(artifact.cubin_path).mix
    # QKᵀ and PV of every Q tile: before or after the loop, and in it.
    mmas = padded(problem.head_dim) // 16 + config.tile_n // 16
    assert mix["UTCHMMA"] == 2 * config.q_stages * mmas
    text = sass.disassemble(artifact.cubin_path)
    assert {"2CTA" in form for form in re.findall(r"UTCHMMA\S*", text)} == {config.use_2cta}
    # A cluster asks once for all its CTAs.
    query = "UGETNEXTWORKID" + (".BROADCAST" if config.use_2cta else ".SELFCAST")
    assert re.findall(r"UGETNEXTWORKID\S*", text) == ([query] if config.scheduler == "clc" else [])
    # The compiler may compute the factor in each of two branches.
    assert 0 <= mix["MUFU.EX2"] - mufu_exponentials(config) <= 2
    assert mix["FFMA2"] == fused_pairs(config)
    assert ("UTMASTG" in mix) == (config.epilogue != "registers")
    assert mix["USETMAXREG.TRY_ALLOC"] + mix["USETMAXREG.DEALLOC"] == 3
    assert callable(load_kernel(artifact))


def emulated_pairs(config: FlashFwdSm100Config) -> int:
    return round(config.tile_n // 2 * config.exp2_poly_fraction)


def mufu_exponentials(config: FlashFwdSm100Config) -> int:
    """Of the masked and the unmasked step: the rest of the row, and the factor for what was accumulated."""
    return 2 * (config.tile_n - 2 * emulated_pairs(config) + 1)


def fused_pairs(config: FlashFwdSm100Config) -> int:
    """Packed multiply-adds: scale and offset of every pair, ``exp2_poly_degree`` for each emulated one."""
    return 2 * (config.tile_n // 2 + emulated_pairs(config) * config.exp2_poly_degree)


def test_exp2_split_in_sass_is_the_fraction_asked_for(artifacts):
    counts = {}
    for fraction, start in SPLITS:
        mix = sass.inspect(artifacts[split_variant(fraction, start)].cubin_path).mix
        counts[fraction] = (mix["MUFU.EX2"], mix["FFMA2"])
    scores = 2 * 128
    for fraction, (mufu, fma) in counts.items():
        assert counts[0.0][0] - mufu == fraction * scores
        assert fma - counts[0.0][1] == fraction * scores / 2 * 3
    degree_5 = sass.inspect(artifacts[DEGREE_5].cubin_path).mix
    assert degree_5["FFMA2"] - counts[0.125][1] == 0.125 * scores / 2 * 2


def test_polynomial_starts_where_it_is_asked_to():
    from fa4gen.blocks.row_softmax import polynomial_pairs

    assert polynomial_pairs(128, 0.25, 0.5) == frozenset(range(33, 64, 2))
    assert polynomial_pairs(128, 0.0, 0.0) == frozenset()
    assert len(polynomial_pairs(112, 0.1, 0.25)) == 6 and min(polynomial_pairs(112, 0.1, 0.25)) >= 14


def test_registers_of_each_role_are_those_of_the_split(artifacts):
    config = CASES[0][2]
    text = sass.disassemble(artifacts[Variant.of(*CASES[0])].cubin_path)
    asked = [int(value, 16) for value in re.findall(r"USETMAXREG\.\S+ (?:UP\d, )?(0x[0-9a-f]+)", text)]
    assert sorted(asked)[-1] == max(config.softmax_regs, config.correction_regs)
    assert {config.softmax_regs, config.correction_regs} <= set(asked)


def test_first_part_of_p_is_whole_mma_steps():
    for tile_n in range(64, 208, 16):
        for split in (0.5, 0.75, 1.0):
            part = p_split(replace(FlashFwdSm100Config(), tile_n=tile_n, p_store_split=split))
            assert part % 16 == 0 and 0 < part <= tile_n
