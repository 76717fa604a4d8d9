"""What may be chosen: every knob of a family with its choices, default and condition, read from YAML."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import jinja2
import jinja2.meta
import pydantic
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fa4gen.config import FAMILIES, Config, Family
from fa4gen.errors import UsageError
from fa4gen.problem import AttentionProblem
from fa4gen.resources import resource_dir

if TYPE_CHECKING:
    import numpy as np
    import optuna

__all__ = ["Choice", "Knob", "SearchSpace", "StrictModel", "read_yaml"]

Choice = bool | int | float | str | None
Model = TypeVar("Model", bound=pydantic.BaseModel)

_JINJA = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
_PROBLEM_NAMES = (*(f.name for f in fields(AttentionProblem)), "gqa_ratio")
# Conditions are evaluated once at load time, on this, so that one that cannot be evaluated is found there.
_PROBE = AttentionProblem(1, 2, 1, 128, 128, 64, 64)


class StrictModel(pydantic.BaseModel):
    """Base of the YAML files' schemas: no unknown key, no silent conversion."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class _KnobText(StrictModel):
    choices: list[Choice] = pydantic.Field(min_length=1)
    default: Choice
    condition: str | None = None


class _SpaceText(StrictModel):
    family: str
    knobs: dict[str, _KnobText]
    start: list[dict[str, Choice]] = []


def read_yaml(path: Path, model: type[Model]) -> Model:
    """The YAML file ``path`` as ``model``.

    Raises:
        UsageError: it cannot be read, is not YAML, or does not fit; the message names the file and the first place.
    """
    try:
        return model.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"{path}: {where}: {first['msg']}") from None


@dataclass(frozen=True)
class Knob:
    """One field of a config type. Without ``condition``, a jinja2 expression, the knob is always active."""

    name: str
    choices: tuple[Choice, ...]
    default: Choice
    condition: str | None = None

    def active(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition holds for ``values`` (problem fields and the knobs above this one)."""
        if self.condition is None:
            return True
        return _holds(self.condition, tuple((name, values[name]) for name in _names(self.condition)))


@functools.cache
def _names(condition: str) -> frozenset[str]:
    """The variables in it. Raises jinja2.TemplateSyntaxError."""
    _JINJA.compile_expression(condition)  # rejects what is no single expression
    return frozenset(jinja2.meta.find_undeclared_variables(_JINJA.parse("{{" + condition + "}}")))


@functools.cache  # a search asks a hundred thousand times, about few values; jinja2 takes 20 us
def _holds(condition: str, values: tuple[tuple[str, Any], ...]) -> bool:
    return bool(_JINJA.compile_expression(condition, undefined_to_none=False)(dict(values)))


@dataclass(frozen=True)
class SearchSpace:
    """The knobs of one family, in the order of their file.

    A config is canonical when each inactive knob has its default: two canonical configs differ where their kernels do.
    Every method returns canonical configs. Feasibility is not looked at here. ``start``: knob values, off the knobs'
    defaults, of configs that led somewhere before.
    """

    family: Family
    knobs: tuple[Knob, ...]
    start: tuple[tuple[tuple[str, Choice], ...], ...] = ()

    @classmethod
    def load(cls, family: Family) -> SearchSpace:
        """The shipped space of ``family``."""
        return cls.from_file(resource_dir("search_spaces") / family.search_space)

    @classmethod
    def from_file(cls, path: Path) -> SearchSpace:
        """The space written in the YAML file ``path``.

        Raises:
            UsageError: unreadable or malformed file, unknown family, unknown or missing knob, a choice of the wrong
                type, a default that is no choice, a bad condition. The message names file and knob.
        """
        text = read_yaml(path, _SpaceText)
        if text.family not in FAMILIES:
            raise UsageError(f"{path}: unknown kernel family {text.family!r}; known: {', '.join(FAMILIES)}")
        family = FAMILIES[text.family]
        types = get_type_hints(family.config_type)
        for name in [*text.knobs, *types]:
            if name not in types:
                raise UsageError(f"{path}: unknown knob {name!r}; {family.name} has: {', '.join(types)}")
            if name not in text.knobs:
                raise UsageError(f"{path}: knob {name!r} of {family.name} is missing")
        knobs: list[Knob] = []
        for name, knob_text in text.knobs.items():
            try:
                knobs.append(_knob(name, knob_text, types[name], [k.name for k in knobs]))
            except ValueError as error:
                raise UsageError(f"{path}: knob {name!r}: {error}") from None
        for number, values in enumerate(text.start, start=1):
            if unknown := sorted(set(values) - set(types)):
                raise UsageError(f"{path}: start {number}: unknown knob {unknown[0]!r}")
        space = cls(family, tuple(knobs), tuple(tuple(values.items()) for values in text.start))
        space._probe(path)
        return space

    def _probe(self, path: Path) -> None:
        values = {**_problem_values(_PROBE), **{knob.name: knob.default for knob in self.knobs}}
        for knob in self.knobs:
            try:
                knob.active(values)
            except (jinja2.TemplateError, TypeError, ArithmeticError) as error:
                raise UsageError(f"{path}: knob {knob.name!r}: condition cannot be evaluated: {error}") from None

    @property
    def cardinality(self) -> int:
        """Product of the choices' counts: an upper bound, since conditions merge configs and many are infeasible."""
        return math.prod(len(knob.choices) for knob in self.knobs)

    def config(self, values: Mapping[str, Any], problem: AttentionProblem) -> Config:
        """The canonical config with ``values`` where they are active (an absent knob takes its default)."""
        scope = _problem_values(problem)
        for knob in self.knobs:
            scope[knob.name] = values.get(knob.name, knob.default) if knob.active(scope) else knob.default
        return self._build(scope)

    def default(self, problem: AttentionProblem) -> Config:
        """The family's default for ``problem``, knob by knob where this space holds it, else the space's own."""
        wanted = self.family.config_type.default(problem)
        held = {k.name: getattr(wanted, k.name) for k in self.knobs if getattr(wanted, k.name) in k.choices}
        return self.config(held, problem)

    def starting_points(self, problem: AttentionProblem) -> list[Config]:
        """The configs of :attr:`start` for ``problem``, as far as the space has their choices. A search tries them
        before it proposes its own."""
        configs = dict.fromkeys(self.config(dict(values), problem) for values in self.start)
        return [config for config in configs if config in self]

    def __contains__(self, config: Config) -> bool:
        """Whether every knob of ``config`` is among its choices."""
        return all(getattr(config, knob.name) in knob.choices for knob in self.knobs)

    def active_values(self, config: Config, problem: AttentionProblem) -> dict[str, Any]:
        """The active knobs of a canonical ``config``: what identifies it in a study."""
        known = {**_problem_values(problem), **{k.name: getattr(config, k.name) for k in self.knobs}}
        return {k.name: known[k.name] for k in self.knobs if k.active(known)}

    def distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        """Knob name to Optuna distribution; all are categorical."""
        from optuna.distributions import CategoricalDistribution

        return {knob.name: CategoricalDistribution(knob.choices) for knob in self.knobs}

    def suggest(self, trial: optuna.Trial, problem: AttentionProblem) -> Config:
        """Asks ``trial`` for the active knobs only."""
        scope = _problem_values(problem)
        for knob in self.knobs:
            active = knob.active(scope)
            scope[knob.name] = trial.suggest_categorical(knob.name, knob.choices) if active else knob.default
        return self._build(scope)

    def sample(self, rng: np.random.Generator, problem: AttentionProblem) -> Config:
        """Every active knob uniform over its choices."""
        draws = rng.integers([len(knob.choices) for knob in self.knobs])
        return self.config({k.name: k.choices[i] for k, i in zip(self.knobs, draws, strict=True)}, problem)

    def neighbours(self, config: Config, problem: AttentionProblem) -> list[Config]:
        """The distinct configs that one changed knob of ``config`` gives, in the order of knobs and choices."""
        values = {knob.name: getattr(config, knob.name) for knob in self.knobs}
        moves = (self.config({**values, knob.name: choice}, problem) for knob in self.knobs for choice in knob.choices)
        return [move for move in dict.fromkeys(moves) if move != config]

    def enumerate(self, problem: AttentionProblem) -> Iterator[Config]:
        """Every canonical config once, lazily. A shipped space has millions; restrict it before exhausting this."""

        def extend(scope: dict[str, Any], rest: tuple[Knob, ...]) -> Iterator[Config]:
            if not rest:
                yield self._build(scope)
                return
            knob = rest[0]
            for choice in knob.choices if knob.active(scope) else (knob.default,):
                yield from extend({**scope, knob.name: choice}, rest[1:])

        yield from extend(_problem_values(problem), self.knobs)

    def _build(self, scope: Mapping[str, Any]) -> Config:
        return self.family.config_type(**{knob.name: scope[knob.name] for knob in self.knobs})


def _problem_values(problem: AttentionProblem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in _PROBLEM_NAMES}


def _knob(name: str, text: _KnobText, type_: Any, above: list[str]) -> Knob:
    """A validated knob. ``above``: the knobs before it, the only ones its condition may name.

    Raises:
        ValueError: a rule is broken; the message does not name the knob.
    """
    adapter = pydantic.TypeAdapter(type_, config=pydantic.ConfigDict(strict=True))
    try:
        choices = tuple(adapter.validate_python(choice) for choice in text.choices)
        default = adapter.validate_python(text.default)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['input']!r}: {first['msg']}") from None
    if len(set(choices)) < len(choices):
        raise ValueError(f"choices repeat: {list(choices)}")
    if default not in choices:
        raise ValueError(f"default {default!r} is not among the choices {list(choices)}")
    if text.condition is not None:
        _check_condition(text.condition, {*above, *_PROBLEM_NAMES})
    return Knob(name, choices, default, text.condition)


def _check_condition(condition: str, known: set[str]) -> None:
    try:
        names = _names(condition)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"condition {condition!r}: {error}") from None
    if not names <= known:
        raise ValueError(
            f"condition {condition!r} names {min(names - known)!r}, which is neither a knob above it nor a "
            f"problem field ({', '.join(_PROBLEM_NAMES)})"
        )
