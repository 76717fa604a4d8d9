"""Search spaces: canonical configs, conditions, and one clear error for every way a YAML file can be wrong."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import numpy as np
import optuna
import pytest
import yaml

from fa4gen.config import FAMILIES
from fa4gen.errors import UsageError
from fa4gen.presets import get_preset, load_presets
from fa4gen.problem import AttentionProblem
from fa4gen.resources import resource_dir
from fa4gen.search_space import SearchSpace

FAMILY = FAMILIES["flash_fwd_sm90"]
SPACE = SearchSpace.load(FAMILY)
MHA = AttentionProblem.parse("b=8 h=16 s=4096 d=128 causal")
GQA = AttentionProblem.parse("b=1 h=32 hk=4 s=512 d=64")


def text() -> dict:
    return yaml.safe_load((resource_dir("search_spaces") / FAMILY.search_space).read_text())


def load(tmp_path: Path, content: object) -> SearchSpace:
    path = tmp_path / "space.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return SearchSpace.from_file(path)


def small(tmp_path: Path) -> SearchSpace:
    """Two tiles and the exp2 split; every other knob has one choice."""
    content = text()
    for name, knob in content["knobs"].items():
        if name not in ("tile_m", "exp2_poly_fraction", "exp2_poly_degree"):
            knob["choices"] = [knob["default"]]
    content["knobs"]["tile_m"]["choices"] = [128, 192]
    return load(tmp_path, content)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_shipped_space_has_every_knob_of_its_config_type(family) -> None:
    space = SearchSpace.load(family)
    assert sorted(k.name for k in space.knobs) == sorted(f.name for f in fields(family.config_type))
    assert {k.name: k.default for k in space.knobs} == vars(family.config_type())
    problems = [problem for preset in load_presets().values() for problem in preset]
    assert all(space.default(p) == family.config_type.default(p) for p in problems)


def test_choices_keep_their_types() -> None:
    choices = {knob.name: knob.choices for knob in SPACE.knobs}
    assert choices["rescale_threshold"] == (None, 0.0, 8.0)
    assert {type(c) for c in choices["exp2_poly_fraction"]} == {float}
    assert {type(c) for c in choices["pack_gqa"]} == {bool}
    assert {type(c) for c in choices["tile_m"]} == {int}


def test_an_inactive_knob_takes_its_default() -> None:
    assert SPACE.config({"exp2_poly_degree": 5}, MHA).exp2_poly_degree == 3
    assert SPACE.config({"exp2_poly_degree": 5, "exp2_poly_fraction": 0.25}, MHA).exp2_poly_degree == 5
    assert not SPACE.config({"pack_gqa": True}, MHA).pack_gqa
    assert SPACE.config({"pack_gqa": True}, GQA).pack_gqa


def test_samples_are_canonical_deterministic_and_cover_the_space() -> None:
    samples = [SPACE.sample(np.random.default_rng(seed), GQA) for seed in range(300)]
    assert samples == [SPACE.sample(np.random.default_rng(seed), GQA) for seed in range(300)]
    assert all(SPACE.config(vars(c), GQA) == c and c in SPACE for c in samples)
    for knob in SPACE.knobs:
        assert {getattr(c, knob.name) for c in samples} == set(knob.choices)


def test_neighbours_change_one_knob() -> None:
    base = replace(SPACE.default(MHA), persistent=False, epilogue="tma_over_q", tile_order="linear")
    neighbours = SPACE.neighbours(base, MHA)
    assert base not in neighbours and len(set(neighbours)) == len(neighbours)
    assert all(sum(vars(n)[k] != v for k, v in vars(base).items()) == 1 for n in neighbours)
    inactive = {"exp2_poly_degree", "pack_gqa", "epilogue", "dynamic_tiles"}
    assert len(neighbours) == sum(len(k.choices) - 1 for k in SPACE.knobs if k.name not in inactive)


def test_a_neighbour_that_ends_a_condition_resets_what_depends_on_it() -> None:
    base = replace(SPACE.default(MHA), exp2_poly_fraction=0.5, exp2_poly_degree=5)
    assert replace(base, exp2_poly_fraction=0.0, exp2_poly_degree=3) in SPACE.neighbours(base, MHA)


def test_enumerate_gives_each_canonical_config_once(tmp_path: Path) -> None:
    space = small(tmp_path)
    configs = list(space.enumerate(MHA))
    assert len(configs) == len(set(configs)) == 2 * (1 + 3 * 3)  # degree counts only with a fraction
    assert space.cardinality == 2 * 4 * 3
    assert all(space.config(vars(c), MHA) == c for c in configs)
    assert len(list(islice(SPACE.enumerate(MHA), 5))) == 5  # lazy: the space has millions


def test_suggest_asks_for_active_knobs_only() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(20):
        trial = study.ask()
        config = SPACE.suggest(trial, MHA)
        assert trial.params == SPACE.active_values(config, MHA)
        assert "pack_gqa" not in trial.params
        assert ("exp2_poly_degree" in trial.params) == (config.exp2_poly_fraction > 0)
        assert trial.distributions == {name: SPACE.distributions()[name] for name in trial.params}


def test_default_follows_the_family_where_the_space_allows(tmp_path: Path) -> None:
    content = text()
    content["knobs"]["tile_n"] = {"choices": [48, 64], "default": 64}
    assert load(tmp_path, content).default(MHA) == replace(FAMILY.config_type.default(MHA), tile_n=64)


BAD = {
    "unknown knob": ({"tile_k": {"choices": [1], "default": 1}}, "unknown knob 'tile_k'"),
    "missing knob": ({"tile_m": None}, "knob 'tile_m' of flash_fwd_sm90 is missing"),
    "default is no choice": ({"tile_m": {"choices": [64], "default": 128}}, "knob 'tile_m': default 128 is not among"),
    "wrong type": (
        {"tile_m": {"choices": ["64"], "default": "64"}},
        "knob 'tile_m': '64': Input should be a valid int",
    ),
    "bool for int": ({"tile_m": {"choices": [True], "default": True}}, "knob 'tile_m': True: Input should be a valid"),
    "repeated": ({"tile_m": {"choices": [64, 64], "default": 64}}, "knob 'tile_m': choices repeat"),
    "no choices": ({"tile_m": {"choices": [], "default": 64}}, "knobs.tile_m.choices: List should have at least 1"),
    "extra key": ({"tile_m": {"choices": [64], "default": 64, "when": "x"}}, "knobs.tile_m.when: Extra inputs"),
    "condition syntax": (
        {"producer_regs": {"choices": [24], "default": 24, "condition": "tile_m >"}},
        "knob 'producer_regs': condition 'tile_m >'",
    ),
    "condition with two expressions": (
        {"producer_regs": {"choices": [24], "default": 24, "condition": "tile_m 1"}},
        "knob 'producer_regs': condition 'tile_m 1'",
    ),
    "condition names a later knob": (
        {"tile_m": {"choices": [64], "default": 64, "condition": "producer_regs > 24"}},
        "knob 'tile_m': condition 'producer_regs > 24' names 'producer_regs', which is neither a knob above it",
    ),
    "condition names nothing": (
        {"producer_regs": {"choices": [24], "default": 24, "condition": "tile_q > 1"}},
        "names 'tile_q'",
    ),
    "condition compares different types": (
        {"producer_regs": {"choices": [24], "default": 24, "condition": "schedule > 1"}},
        "knob 'producer_regs': condition cannot be evaluated",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_bad_space_gives_one_error_with_file_and_knob(tmp_path: Path, change: dict, message: str) -> None:
    content = text()
    for name, knob in change.items():
        if knob is None:
            del content["knobs"][name]
        else:
            content["knobs"][name] = knob
    with pytest.raises(UsageError) as caught:
        load(tmp_path, content)
    assert message in str(caught.value)
    assert str(tmp_path / "space.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("family: [", "is not YAML"),
        ("", "Input should be"),
        ("family: nope\nknobs: {}", "unknown kernel family 'nope'"),
        ("family: flash_fwd_sm90", "knobs: Field required"),
    ],
)
def test_a_file_that_is_no_space(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(tmp_path, content)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nothing\.yaml: No such file"):
        SearchSpace.from_file(tmp_path / "nothing.yaml")


def test_presets() -> None:
    presets = load_presets()
    assert {name: len(problems) for name, problems in presets.items()} == {
        "demo": 3,
        "long": 8,
        "paper": 36,
        "small": 12,
    }
    assert set(presets["long"]) <= set(presets["paper"])
    assert all(p.batch * p.seqlen_q == 32768 for p in presets["paper"])
    assert {(p.head_dim, p.head_dim_v, p.heads) for p in presets["paper"]} == {
        (64, 64, 32),
        (128, 128, 16),
        (192, 128, 16),
    }
    assert all(p.gqa_ratio == 8 and 1 <= p.batch <= 8 and 128 <= p.seqlen_q <= 2048 for p in presets["small"])
    assert get_preset("demo")[0] == MHA
    with pytest.raises(UsageError, match="unknown preset 'nope'; known: demo, long, paper, small"):
        get_preset("nope")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: []", "preset 'a' lists no problem"),
        ("a: [h=1 s=1 d=64 q=3]", "preset 'a': unknown word 'q=3'"),
        ("a: [h=1 s=1 d=64, h=1 s=1 d=64]", "preset 'a' lists 'b=1 h=1 s=1 d=64' twice"),
        ("a: 3", "a: Input should be a valid list"),
    ],
)
def test_bad_presets(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "presets.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_presets(path)
    assert str(path) in str(caught.value)


def test_starting_points_are_canonical_configs_of_the_space(tmp_path: Path) -> None:
    for problem in (MHA, GQA):
        points = SPACE.starting_points(problem)
        assert points and len(set(points)) == len(points)
        assert all(p in SPACE and SPACE.config(vars(p), problem) == p for p in points)
    narrowed = text()
    narrowed["knobs"]["tile_n"]["choices"] = [128]
    narrowed["knobs"]["tile_n"]["default"] = 128
    assert {p.tile_n for p in load(tmp_path, narrowed).starting_points(MHA)} == {128}
    with pytest.raises(UsageError, match="start 1: unknown knob 'tile_o'"):
        load(tmp_path, {**text(), "start": [{"tile_o": 64}]})
