"""Rendering: deterministic, self-contained, and every knob is a real difference in the source."""

from __future__ import annotations

import ast
import dataclasses

import pytest
import yaml

from fa4gen.arch import get_arch
from fa4gen.config import FlashFwdSm90Config
from fa4gen.feasibility import can_implement
from fa4gen.problem import AttentionProblem
from fa4gen.render import diff, render
from fa4gen.variant import Variant

GQA = AttentionProblem.parse("b=2 h=16 hk=4 s=1024 d=64 lse")
BASE = FlashFwdSm90Config(tile_n=48)  # two CTAs of it fit an SM
OTHER_VALUES = {
    "tile_m": 192,
    "tile_n": 96,
    "kv_stages": 3,
    "schedule": "cooperative",
    "intra_wg_overlap": False,
    "mma_pv_is_rs": False,
    "mma_qk_is_rs": True,
    "exp2_poly_fraction": 0.25,
    "exp2_poly_degree": 5,
    "rescale_threshold": 4.0,
    "pack_gqa": True,
    "ctas_per_sm": 2,
    "persistent": not BASE.persistent,
    "dynamic_tiles": True,
    "epilogue": "tma" if BASE.epilogue == "tma_over_q" else "tma_over_q",
    "tile_order": "longest_first" if BASE.tile_order == "linear" else "linear",
    "cluster_m": 2,
    "producer_regs": 40,
}

# The others change what is done, not how often or with how much.
NUMBERS = {
    *("tile_m", "tile_n", "kv_stages", "exp2_poly_fraction", "exp2_poly_degree"),
    *("rescale_threshold", "producer_regs"),
}


def source(problem: AttentionProblem = GQA, **knobs: object) -> str:
    return render(Variant.of("sm_90a", problem, dataclasses.replace(BASE, **knobs)))


def code(text: str) -> str:
    """The source without its header and name, which hold the digest and so always differ."""
    body = ast.parse(text).body[1:]
    return "\n".join(ast.unparse(node) for node in body if not ast.unparse(node).startswith("NAME ="))


def test_the_table_of_other_values_covers_every_knob():
    assert set(OTHER_VALUES) == {f.name for f in dataclasses.fields(FlashFwdSm90Config)}
    assert all(getattr(BASE, name) != value for name, value in OTHER_VALUES.items())


def before_and_after(knob: str) -> tuple[FlashFwdSm90Config, FlashFwdSm90Config]:
    base = dataclasses.replace(BASE, persistent=True) if knob == "dynamic_tiles" else BASE
    return base, dataclasses.replace(base, **{knob: OTHER_VALUES[knob]})


@pytest.mark.parametrize("knob", OTHER_VALUES)
def test_each_knob_changes_the_code(knob):
    one, other = before_and_after(knob)
    assert can_implement(GQA, other, get_arch("sm_90a")) is None
    assert code(render(Variant.of("sm_90a", GQA, one))) != code(render(Variant.of("sm_90a", GQA, other)))


def changed_lines(knob: str) -> list[str]:
    one, other = (Variant.of("sm_90a", GQA, config) for config in before_and_after(knob))
    old_name, new_name, *lines = diff(one, other).splitlines()
    assert (old_name, new_name) == (f"--- {one.name}", f"+++ {other.name}")
    return [line for line in lines if line[0] in "+-"]


@pytest.mark.parametrize("knob", OTHER_VALUES)
def test_a_diff_shows_what_the_knob_means(knob):
    changed = changed_lines(knob)
    assert changed[0].startswith(f"-  {knob}: ") and changed[1].startswith(f"+  {knob}: ")
    assert len(changed) <= (6 if knob in NUMBERS else 70)


def test_a_diff_of_a_constant_is_that_constant():
    assert changed_lines("rescale_threshold") == [
        "-  rescale_threshold: 8.0",
        "+  rescale_threshold: 4.0",
        "-RESCALE_THRESHOLD = 8.0",
        "+RESCALE_THRESHOLD = 4.0",
    ]


def test_a_diff_leaves_out_what_only_moved_into_a_loop():
    text = "\n".join(changed_lines("persistent"))
    assert "while tile < tiles:" in text and "softmax_step(" not in text


def test_no_diff_without_a_difference():
    assert diff(Variant.of("sm_90a", GQA, BASE), Variant.of("sm_90a", GQA, BASE)) == ""


def test_same_variant_same_bytes():
    assert source() == source()


def test_header_states_name_digest_and_config():
    variant = Variant.of("sm_90a", GQA, BASE)
    header = ast.get_docstring(ast.parse(render(variant)))
    assert header.startswith(variant.name)
    assert f"digest: {variant.digest}" in header
    assert yaml.safe_load(header.split("config:\n")[1]) == dataclasses.asdict(BASE)


@pytest.mark.parametrize("text", ["h=4 s=64 d=128", "h=4 s=64 d=128 causal", "h=8 hk=2 s=64 d=192 dv=128 dtype=fp16"])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"pack_gqa": True},
        {"persistent": True, "tile_order": "longest_first"},
        {"cluster_m": 2, "persistent": False},
    ],
)
def test_source_is_clean(text, knobs):
    problem = AttentionProblem.parse(text)
    text = source(problem, **knobs)
    tree = ast.parse(text)
    imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert imported <= used | {"make_fake_stream"}, "an import that this variant does not need"
    assert "{{" not in text and "{%" not in text
    assert not any(line != line.rstrip() for line in text.splitlines()), "trailing blanks"
    assert "\n\n\n\n" not in text


def test_digests_tell_variants_apart():
    digests = {Variant.of("sm_90a", GQA, dataclasses.replace(BASE, **{k: v})).digest for k, v in OTHER_VALUES.items()}
    assert len(digests) == len(OTHER_VALUES)
    assert Variant.of("sm_90a", GQA, BASE).digest not in digests


def test_lengths_do_not_select_a_variant():
    longer = dataclasses.replace(GQA, seqlen_q=77, seqlen_k=9999, batch=5, heads=8, heads_kv=2)
    assert Variant.of("sm_90a", longer, BASE) == Variant.of("sm_90a", GQA, BASE)
