"""The Blackwell family without a compiler: what feasibility counts and why it rejects, and the rendered source."""

from __future__ import annotations

import ast
import dataclasses
from itertools import pairwise

import pytest

from fa4gen.arch import get_arch
from fa4gen.config import FAMILIES, FlashFwdSm90Config, FlashFwdSm100Config
from fa4gen.feasibility import can_implement, launch_registers, other_registers, smem_bytes, tmem_columns
from fa4gen.problem import AttentionProblem
from fa4gen.render import diff, render
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant

SM100 = get_arch("sm_100a")
BASE = FlashFwdSm100Config()
D128 = AttentionProblem.parse("b=2 h=16 s=4096 d=128")
D64 = AttentionProblem.parse("b=2 h=16 hk=4 s=1024 d=64 lse")
ONE_TILE = {"q_stages": 1, "softmax_regs": 208, "correction_regs": 112}
OTHER_VALUES = {
    "tile_n": 96,
    "q_stages": 1,
    "s_stages": 2,
    "kv_stages": 2,
    "mma_order": "grouped",
    "exp2_poly_fraction": 0.25,
    "exp2_poly_degree": 5,
    "exp2_poly_start": 0.5,
    "p_store_split": 1.0,
    "rescale_threshold": None,
    "reload_scores": True,
    "use_2cta": True,
    "softmax_regs": 184,
    "correction_regs": 88,
    "pack_gqa": True,
    "scheduler": "single",
    "tile_order": "longest_first",
    "epilogue": "registers",
}
# What one changed knob needs beside it.
WITH = {
    "q_stages": {"softmax_regs": 208},
    "s_stages": {"tile_n": 64},
    "exp2_poly_degree": {"tile_n": 96},
    "softmax_regs": {"tile_n": 96},
}

# The others change what is done, not how often or with how much; a pair also whose every barrier is.
NUMBERS = {
    *("tile_n", "kv_stages", "exp2_poly_fraction", "exp2_poly_degree", "exp2_poly_start"),
    *("rescale_threshold", "softmax_regs", "correction_regs"),
}


def source(problem: AttentionProblem = D64, **knobs: object) -> str:
    return render(Variant.of("sm_100a", problem, dataclasses.replace(BASE, **knobs)))


def code(text: str) -> str:
    body = ast.parse(text).body[1:]
    return "\n".join(ast.unparse(node) for node in body if not ast.unparse(node).startswith("NAME ="))


def test_the_table_of_other_values_covers_every_knob():
    assert set(OTHER_VALUES) == {f.name for f in dataclasses.fields(FlashFwdSm100Config)}
    assert all(getattr(BASE, name) != value for name, value in OTHER_VALUES.items())


@pytest.mark.parametrize("knob", OTHER_VALUES)
def test_each_knob_changes_the_code(knob):
    base = WITH.get(knob, {})
    other = {**base, knob: OTHER_VALUES[knob]}
    assert can_implement(D64, dataclasses.replace(BASE, **other), SM100) is None
    assert code(source(**other)) != code(source(**base))


@pytest.mark.parametrize("knob", OTHER_VALUES)
def test_a_diff_shows_what_the_knob_means(knob):
    base = dataclasses.replace(BASE, **WITH.get(knob, {}))
    other = dataclasses.replace(base, **{knob: OTHER_VALUES[knob]})
    lines = diff(*(Variant.of("sm_100a", D64, config) for config in (base, other))).splitlines()[2:]
    changed = [line for line in lines if line[0] in "+-"]
    assert changed[0].startswith(f"-  {knob}: ") and changed[1].startswith(f"+  {knob}: ")
    assert len(changed) <= (8 if knob in NUMBERS else 135 if knob == "use_2cta" else 90)


@pytest.mark.parametrize("text", ["h=4 s=64 d=128", "h=4 s=64 d=128 causal lse", "h=8 hk=2 s=64 d=64 dtype=fp16"])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"pack_gqa": True, "scheduler": "single"},
        {"tile_order": "longest_first", "epilogue": "registers"},
        {"s_stages": 2, "tile_n": 64, "p_store_split": 1.0},
        {"reload_scores": True, "epilogue": "tma_over_q"},
        {"mma_order": "grouped", **ONE_TILE},
        {"use_2cta": True, "scheduler": "single"},
        {"use_2cta": True, "scheduler": "clc", "tile_order": "longest_first"},
        {"scheduler": "clc", "epilogue": "registers"},
        {"use_2cta": True, "epilogue": "registers", "s_stages": 2, "tile_n": 64},
    ],
)
def test_source_is_clean(text, knobs):
    text = source(AttentionProblem.parse(text), **knobs)
    tree = ast.parse(text)
    imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert imported <= used, "an import that this variant does not need"
    assert "{{" not in text and "{%" not in text
    assert not any(line != line.rstrip() for line in text.splitlines()), "trailing blanks"
    assert "\n\n\n\n" not in text


@pytest.mark.parametrize("knobs", [{}, {"scheduler": "clc"}, {"scheduler": "clc", "use_2cta": True}])
def test_barriers_have_names_and_arrivals_of_the_same_length(knobs):
    tree = ast.parse(source(**knobs))
    names = {n.targets[0].id: ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign)}
    order = [name for name in names if name.endswith(("_FULL", "_EMPTY", "_TAIL", "_READY", "_DONE"))]
    for before, name in pairwise(order):
        assert names[name].startswith(before)
    assert len(ast.parse(names["ARRIVALS"], mode="eval").body.elts) == len(order)


def test_the_space_holds_the_family():
    space = SearchSpace.load(FAMILIES["flash_fwd_sm100"])
    for text in ("h=2 s=64 d=64", "h=2 s=64 d=128 causal", "h=2 s=64 d=192 dv=128", "h=2 s=64 d=256"):
        problem = AttentionProblem.parse(text)
        assert FlashFwdSm100Config.default(problem) in space
        assert can_implement(problem, space.default(problem), SM100) is None


def test_tmem_by_hand():
    assert tmem_columns(D128.static, BASE) == 2 * 128 + 2 * 128
    assert tmem_columns(D64.static, dataclasses.replace(BASE, tile_n=64, s_stages=2)) == 4 * 64 + 2 * 64
    rejection = can_implement(D128, dataclasses.replace(BASE, tile_n=144, reload_scores=True, kv_stages=2), SM100)
    assert rejection is not None and rejection.rule == "tmem"
    assert rejection.numbers == {"needed": 544, "available": 512}


def test_shared_memory_by_hand():
    q, ring, o = 2 * 128 * 128 * 2, 3 * 128 * 128 * 2, 2 * 128 * 128 * 2
    # 30 barriers, the TMEM address, a factor and a sum for each row.
    statistics = -(-(30 * 8 + 4 + (2 + 2) * 128 * 4) // 1024) * 1024
    assert smem_bytes(D128.static, BASE) == statistics + q + ring + o == SM100.smem_per_cta
    assert smem_bytes(D128.static, dataclasses.replace(BASE, epilogue="registers")) == statistics + q + ring
    # 32 barriers, the next tile's 16 bytes.
    assert smem_bytes(D128.static, dataclasses.replace(BASE, scheduler="clc")) == SM100.smem_per_cta
    wide_v = AttentionProblem.parse("h=2 s=64 d=64 dv=128").static
    over_q = dataclasses.replace(BASE, epilogue="tma_over_q")
    assert smem_bytes(wide_v, over_q) == statistics + q + ring, "O is wider than Q, and a stage as wide as V"


def test_a_cta_of_a_pair_holds_half_of_keys_and_values():
    pair = dataclasses.replace(BASE, use_2cta=True, kv_stages=6)
    assert smem_bytes(D128.static, pair) == smem_bytes(D128.static, BASE), (
        "six halves, and barriers in the same kilobyte"
    )
    assert tmem_columns(D128.static, pair) == tmem_columns(D128.static, BASE) == 512
    narrow = AttentionProblem.parse("h=2 s=64 d=64 dv=72").static
    assert tmem_columns(narrow, BASE) == 2 * (128 + 80)
    assert tmem_columns(narrow, pair) == 2 * (128 + 96), "two halves of V, each whole steps of 16 columns"


@pytest.mark.parametrize(
    ("knobs", "other"),
    [
        ({}, 48),
        ({"use_2cta": True}, 48),
        ({"softmax_regs": 200}, 32),
        (ONE_TILE, 168),
        ({**ONE_TILE, "softmax_regs": 240}, 152),
    ],
)
def test_register_split_never_exceeds_what_the_launch_gave(knobs, other):
    config = dataclasses.replace(BASE, **knobs)
    assert other_registers(config, SM100) == other
    warpgroups = config.q_stages + 2
    launch = launch_registers(128 * warpgroups, SM100)
    assert config.q_stages * config.softmax_regs + config.correction_regs + other <= launch * warpgroups
    assert other <= launch, "they only give away"


@pytest.mark.parametrize(
    ("text", "knobs", "rule"),
    [
        ("h=2 s=64 d=100", {}, "head_dim"),
        ("h=2 s=64 d=64 dv=264", {}, "head_dim"),
        ("h=2 s=64 d=64", {"tile_n": 72}, "tile_n"),
        ("h=2 s=64 d=64", {"tile_n": 288}, "tile_n"),
        ("h=2 s=64 d=64", {"q_stages": 3}, "q_stages"),
        ("h=2 s=64 d=64", {"s_stages": 0}, "s_stages"),
        ("h=2 s=64 d=64", {"kv_stages": 1}, "kv_stages"),
        ("h=2 s=64 d=64", {"mma_order": "random"}, "mma_order"),
        ("h=2 s=64 d=64", {"scheduler": "greedy"}, "scheduler"),
        ("h=2 s=64 d=64", {"epilogue": "none"}, "epilogue"),
        ("h=2 s=64 d=64", {"tile_order": "random"}, "tile_order"),
        ("h=2 s=64 d=64", {"use_2cta": True, "tile_n": 80}, "use_2cta"),
        ("h=2 s=64 d=128", {"use_2cta": True, "kv_stages": 7}, "smem"),
        ("h=2 s=64 d=200", {"use_2cta": True}, "tmem"),
        ("h=2 s=64 d=64", {"p_store_split": 0.0}, "p_store_split"),
        ("h=2 s=64 d=64", {"exp2_poly_fraction": 0.5, "exp2_poly_start": 0.75}, "exp2_poly_start"),
        ("h=2 s=64 d=64", {"exp2_poly_fraction": 1.5}, "exp2_poly_start"),
        ("h=2 s=64 d=64", {"exp2_poly_degree": 2}, "exp2_poly_degree"),
        ("h=2 s=64 d=64 dtype=fp16", {"rescale_threshold": 12.0}, "rescale_threshold"),
        ("h=2 s=64 d=64", {"softmax_regs": 120}, "softmax_regs"),
        ("h=2 s=64 d=64", {"softmax_regs": 190}, "softmax_regs"),
        ("h=2 s=64 d=64", {"correction_regs": 24}, "correction_regs"),
        ("h=2 s=64 d=64", {"softmax_regs": 208, "correction_regs": 80}, "registers"),
        ("h=2 s=64 d=64", {"softmax_regs": 160}, "registers"),
        ("h=2 s=64 d=64", {**ONE_TILE, "tile_n": 192, "reload_scores": True, "softmax_regs": 232}, "registers"),
        ("h=2 s=64 d=256", {}, "tmem"),
        ("h=2 s=64 d=128", {"kv_stages": 4}, "smem"),
        ("h=2 s=64 d=64", {"pack_gqa": True}, "pack_gqa"),
        ("h=6 hk=2 s=64 d=64", {"pack_gqa": True}, "pack_gqa"),
    ],
)
def test_each_rule_rejects(text, knobs, rule):
    rejection = can_implement(AttentionProblem.parse(text), dataclasses.replace(BASE, **knobs), SM100)
    assert rejection is not None and rejection.rule == rule


def test_a_family_runs_on_its_own_architectures():
    assert can_implement(D128, BASE, get_arch("sm_103a")) is None
    for config, arch in ((BASE, "sm_90a"), (FlashFwdSm90Config(), "sm_100a")):
        rejection = can_implement(D128, config, get_arch(arch))
        assert rejection is not None and rejection.rule == "arch"


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("head_dim_v", [8, 64, 128, 192, 256])
@pytest.mark.parametrize("rest", ["sq=1", "sq=1 causal lse", "sq=1 dtype=fp16", "sq=999"])
def test_the_default_config_is_always_feasible(head_dim, head_dim_v, rest):
    problem = AttentionProblem.parse(f"h=8 hk=2 sk=77 d={head_dim} dv={head_dim_v} {rest}")
    assert can_implement(problem, FlashFwdSm100Config.default(problem), SM100) is None
