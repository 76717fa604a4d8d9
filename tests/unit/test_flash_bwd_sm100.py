"""The Blackwell backward without a compiler: what feasibility counts and why it rejects, and the rendered source."""

from __future__ import annotations

import ast
import dataclasses
from itertools import pairwise

import pytest

from fa4gen.arch import get_arch
from fa4gen.bound import backward_tile_cycles, bound, steps_per_key_tile
from fa4gen.config import FAMILIES, FlashBwdSm90Config, FlashBwdSm100Config
from fa4gen.feasibility import (
    BWD_THREADS,
    bwd_other_registers,
    bwd_tmem_columns,
    can_implement,
    dq_chunk,
    dq_stages_used,
    launch_registers,
    smem_bytes,
)
from fa4gen.problem import AttentionProblem
from fa4gen.render import diff, render
from fa4gen.search_space import SearchSpace
from fa4gen.variant import Variant
from fa4gen.workspace import workspace_elements

SM100 = get_arch("sm_100a")
BASE = FlashBwdSm100Config()
PAIR = FlashBwdSm100Config(use_2cta=True, q_stages=1, dq_stages=1)
OTHER_VALUES = {
    "use_2cta": True,
    "q_stages": 3,
    "do_stages": 2,
    "dq_stages": 1,
    "dq_at_once": True,
    "dq_own_columns": True,
    "exp2_poly_fraction": 0.25,
    "exp2_poly_degree": 5,
    "exp2_poly_start": 0.5,
    "compute_regs": 144,
    "reduce_regs": 136,
    "tile_order": "longest_first",
}
# What one changed knob needs beside it.
POLYNOMIAL = {"exp2_poly_fraction": 0.25, "compute_regs": 144}
WITH = {
    "exp2_poly_fraction": {"compute_regs": 144},
    "exp2_poly_degree": POLYNOMIAL,
    "exp2_poly_start": POLYNOMIAL,
}
# The others change what is done, not how often or with how much.
NUMBERS = set(OTHER_VALUES) - {"use_2cta", "dq_own_columns", "tile_order"}


def problem(text: str) -> AttentionProblem:
    return AttentionProblem.parse(f"{text} op=bwd")


D128 = problem("b=2 h=16 s=4096 d=128")
D64 = problem("b=2 h=16 hk=4 s=1024 d=64 causal")


def source(of: AttentionProblem = D64, config: FlashBwdSm100Config = BASE, **knobs: object) -> str:
    return render(Variant.of("sm_100a", of, dataclasses.replace(config, **knobs)))


def code(text: str) -> str:
    body = ast.parse(text).body[1:]
    return "\n".join(ast.unparse(node) for node in body if not ast.unparse(node).startswith("NAME ="))


def test_the_table_of_other_values_covers_every_knob():
    assert set(OTHER_VALUES) == {f.name for f in dataclasses.fields(FlashBwdSm100Config)}
    assert all(getattr(BASE, name) != value for name, value in OTHER_VALUES.items())


@pytest.mark.parametrize("knob", OTHER_VALUES)
def test_each_knob_changes_the_code_as_far_as_it_means(knob):
    base = dataclasses.replace(BASE, **WITH.get(knob, {}))
    other = dataclasses.replace(base, **{knob: OTHER_VALUES[knob]})
    assert can_implement(D64, base, SM100) is None and can_implement(D64, other, SM100) is None
    assert code(source(config=other)) != code(source(config=base))
    lines = diff(*(Variant.of("sm_100a", D64, config) for config in (base, other))).splitlines()[2:]
    changed = [line for line in lines if line[0] in "+-"]
    assert changed[0].startswith(f"-  {knob}: ") and changed[1].startswith(f"+  {knob}: ")
    assert len(changed) <= (8 if knob in NUMBERS else 420 if knob == "use_2cta" else 30)


@pytest.mark.parametrize("text", ["h=4 s=64 d=128", "h=8 hk=2 s=64 d=64 causal deterministic dtype=fp16"])
@pytest.mark.parametrize("config", [BASE, PAIR], ids=["one", "pair"])
@pytest.mark.parametrize(
    "knobs", [{}, {"dq_own_columns": True, "tile_order": "shortest_first"}, {"tile_order": "longest_first"}]
)
def test_source_is_clean(text, config, knobs):
    text = source(problem(text), config, **knobs)
    tree = ast.parse(text)
    imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert imported <= used, "an import that this variant does not need"
    assert "{{" not in text and "{%" not in text
    assert not any(line != line.rstrip() for line in text.splitlines()), "trailing blanks"
    assert "\n\n\n\n" not in text


@pytest.mark.parametrize("config", [BASE, PAIR], ids=["one", "pair"])
def test_barriers_have_names_and_arrivals_of_the_same_length(config):
    tree = ast.parse(source(config=config))
    names = {n.targets[0].id: ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign)}
    order = [name for name in names if name.endswith(("_FULL", "_EMPTY", "_READY", "_PEER"))]
    for before, name in pairwise(order):
        assert names[name].startswith(before)
    assert len(ast.parse(names["ARRIVALS"], mode="eval").body.elts) == len(order)


def test_the_space_holds_the_family():
    space = SearchSpace.load(FAMILIES["flash_bwd_sm100"])
    for text in ("h=2 s=64 d=64", "h=2 s=4096 d=128 causal", "h=2 s=4096 d=96"):
        assert FlashBwdSm100Config.default(problem(text)) in space
        assert can_implement(problem(text), space.default(problem(text)), SM100) is None


def test_shared_memory_is_counted_by_hand():
    kilobyte, tile = 1024, 128 * 128 * 2
    stages_of_dq = 2 * 128 * 32 * 4
    # Barriers, LSE and Δ of two Q stages and one of dO; K, V, two of Q, dO, dS.
    assert smem_bytes(D128.static, BASE) == 2 * kilobyte + 6 * tile + stages_of_dq
    # K, V, K by columns, dS, the dS that is sent; Q and dO by rows and by columns, half of each.
    assert smem_bytes(D128.static, PAIR) == 2 * kilobyte + 4 * tile + tile // 2 + 2 * tile + stages_of_dq // 2


@pytest.mark.parametrize(
    ("head_dim", "pair", "chunk", "stages"),
    [
        (128, False, 32, 2),
        (96, False, 32, 1),
        (80, False, 16, 1),
        (128, True, 32, 2),
        (96, True, 16, 1),
        (8, True, 16, 1),
    ],
)
def test_a_step_fills_the_stages_of_dq_a_whole_number_of_times(head_dim, pair, chunk, stages):
    static = problem(f"h=1 s=64 d={head_dim}").static
    config = dataclasses.replace(BASE, use_2cta=pair, dq_stages=2)
    assert (dq_chunk(static, config), dq_stages_used(static, config)) == (chunk, stages)


def test_tensor_memory_is_full_at_128():
    for config in (BASE, PAIR):
        assert bwd_tmem_columns(D128.static, config) == 512
        own = dataclasses.replace(config, dq_own_columns=True)
        assert bwd_tmem_columns(D128.static, own) == 512 + 128 // config.ctas


@pytest.mark.parametrize(("text", "needed"), [("d=192 dv=128", 256 + 192 + 128 + 64), ("d=256", 256 + 512 + 128)])
@pytest.mark.parametrize("config", [BASE, PAIR], ids=["one", "pair"])
def test_larger_head_dims_do_not_fit_tensor_memory(text, needed, config):
    """What dQ has beyond the columns that it shares comes on top: half as much in a pair, both ways."""
    rejection = can_implement(problem(f"h=2 s=4096 {text}"), config, SM100)
    assert rejection is not None and rejection.rule == "tmem"
    extra = (needed - 256) - (192 + 128 if "192" in text else 512)
    assert rejection.numbers == {"needed": needed - extra + extra // config.ctas, "available": 512}


def test_register_split_never_exceeds_what_the_launch_gave():
    launch = launch_registers(BWD_THREADS, SM100)
    for config in (BASE, PAIR, dataclasses.replace(BASE, compute_regs=144, reduce_regs=136)):
        other = bwd_other_registers(config, SM100)
        assert 2 * config.compute_regs + config.reduce_regs + other <= 4 * launch
        assert other <= launch, "they only give away"


@pytest.mark.parametrize(
    ("text", "knobs", "rule"),
    [
        ("h=2 s=64 d=100", {}, "head_dim"),
        ("h=2 s=64 d=64 dv=264", {}, "head_dim"),
        ("h=2 s=64 d=64", {"q_stages": 1}, "q_stages"),
        ("h=2 s=64 d=64", {"do_stages": 0}, "do_stages"),
        ("h=2 s=64 d=64", {"dq_stages": 5}, "dq_stages"),
        ("h=2 s=64 d=64", {"tile_order": "random"}, "tile_order"),
        ("h=2 s=64 d=64", {"exp2_poly_fraction": 0.5, "exp2_poly_start": 0.75}, "exp2_poly_start"),
        ("h=2 s=64 d=64", {"exp2_poly_degree": 2}, "exp2_poly_degree"),
        ("h=2 s=64 d=64", {"compute_regs": 120}, "compute_regs"),
        ("h=2 s=64 d=64", {"exp2_poly_fraction": 0.25}, "compute_regs"),
        ("h=2 s=64 d=64", {"reduce_regs": 132}, "reduce_regs"),
        ("h=2 s=64 d=64", {"compute_regs": 152}, "registers"),
        ("h=2 s=64 d=128", {"dq_at_once": True}, "reduce_regs"),
        ("h=2 s=64 d=128", {"dq_own_columns": True}, "tmem"),
        ("h=2 s=64 d=128", {"q_stages": 3}, "smem"),
        ("h=2 s=64 d=128", {"use_2cta": True}, "smem"),
    ],
)
def test_each_rule_rejects(text, knobs, rule):
    rejection = can_implement(problem(text), dataclasses.replace(BASE, **knobs), SM100)
    assert rejection is not None and rejection.rule == rule


def test_the_family_runs_on_its_own_architectures_and_op():
    assert can_implement(D128, BASE, get_arch("sm_103a")) is None
    for config, arch in ((BASE, "sm_90a"), (FlashBwdSm90Config(), "sm_100a")):
        rejection = can_implement(D128, config, get_arch(arch))
        assert rejection is not None and rejection.rule == "arch"
    rejection = can_implement(dataclasses.replace(D128, op="fwd"), BASE, SM100)
    assert rejection is not None and rejection.rule == "op"


@pytest.mark.parametrize("head_dim", range(8, 129, 8))
@pytest.mark.parametrize("head_dim_v", [8, 40, 64, 96, 128])
@pytest.mark.parametrize("rest", ["s=77", "s=4096 deterministic", "s=4096 causal dtype=fp16"])
def test_the_default_config_is_always_feasible(head_dim, head_dim_v, rest):
    p = problem(f"h=8 hk=2 d={head_dim} dv={head_dim_v} {rest}")
    config = FlashBwdSm100Config.default(p)
    assert can_implement(p, config, SM100) is None
    assert workspace_elements(p, config) >= 8 * p.seqlen_q * (head_dim + 2)


def test_a_pair_moves_the_bound_from_shared_memory_to_the_mma():
    one, pair = (backward_tile_cycles(SM100, 128, 128, 128, ctas=ctas) for ctas in (1, 2))
    assert (one.mma, one.smem) == (2560, 3328)
    assert (pair.mma, pair.smem) == (2560, 2560)
    from fa4gen.arch import get_device

    cycles = [bound(D128, config, get_device("b200")).cycles for config in (BASE, PAIR)]
    assert cycles[0] / cycles[1] == pytest.approx(3328 / 2560)


def test_a_pair_walks_the_queries_of_both_its_tiles():
    causal = problem("h=1 s=512 d=128 causal")
    assert steps_per_key_tile(causal, BASE) == [4, 3, 2, 1]
    assert steps_per_key_tile(causal, PAIR) == [4, 4, 2, 2]
