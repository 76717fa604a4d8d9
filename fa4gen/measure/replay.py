"""Recorded measurements: a grid file, and a measurer that serves it where there is no GPU.

A grid is JSON, gzipped where the name ends in ``.gz``, one recorded config a line::

    {"schema": 1, "device": {...}, "family": "flash_fwd_sm90", "knobs": ["tile_m", ...], "problems": [
    {"problem": "b=8 h=16 s=4096 d=128 causal", "provenance": {...}, "trials": [
    [[128, 128, 2, ...], [801.2, 803.9, ...]],
    [[256, 64, 2, ...], "timeout: no answer for 30 s"]
    ]}]}

A trial is the values of ``knobs`` and then microseconds a launch, or the failure. Of the samples of a measurement the
file keeps :data:`KEPT_SAMPLES` order statistics at even distances, minimum and maximum among them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import threading
import zlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pydantic

from fa4gen.arch import Device, get_arch
from fa4gen.config import FAMILIES, Config, config_from_dict, config_to_dict
from fa4gen.errors import UsageError
from fa4gen.measure.base import Failure, FailureKind, Measurement, Measurer
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

if TYPE_CHECKING:
    from fa4gen.artifact_cache import Artifact

__all__ = ["KEPT_SAMPLES", "Grid", "RecordedProblem", "ReplayMeasurer"]

SCHEMA = 1
KEPT_SAMPLES = 9

Recorded = tuple[float, ...] | Failure


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    class Problem(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        problem: str
        provenance: dict[str, Any]
        trials: list[tuple[list[Any], Annotated[list[pydantic.PositiveFloat], pydantic.Field(min_length=1)] | str]]

    schema_: int = pydantic.Field(alias="schema")
    device: dict[str, Any]
    family: str
    knobs: list[str]
    problems: list[Problem]


@dataclass(frozen=True)
class RecordedProblem:
    """What is known of one problem. ``provenance`` is plain data: versions, driver, date, clock."""

    provenance: dict[str, Any]
    trials: dict[Config, Recorded]


@dataclass(frozen=True)
class Grid:
    """Recorded measurements of one kernel family on one device."""

    device: Device
    family: str
    problems: dict[AttentionProblem, RecordedProblem] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Grid:
        """Reads the file ``path``.

        Raises:
            UsageError: it cannot be read, is no grid, or of a newer schema; the message names file and place.
        """
        try:
            raw = path.read_bytes()
            data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
            raise UsageError(f"grid {path} is damaged: {error}") from None
        except OSError as error:
            raise UsageError(f"cannot read grid {path}: {error.strerror or error}") from None
        if isinstance(data, dict) and isinstance(data.get("schema"), int) and data["schema"] > SCHEMA:
            raise UsageError(f"grid {path} has schema {data['schema']}; this fa4gen reads up to {SCHEMA}")
        try:
            file = _File.model_validate(data)
            return cls(_device(file.device), file.family, {_key(p): _recorded(file, p) for p in file.problems})
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UsageError(f"grid {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except (UsageError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"grid {path}: {error}") from None

    def record(
        self,
        problem: AttentionProblem,
        results: Iterable[tuple[Config, Measurement | Failure]],
        provenance: dict[str, Any],
    ) -> None:
        """Adds results of ``problem``; a config that is there already is replaced. ``provenance``: of the newest."""
        known = self.problems.get(problem)
        trials = dict(known.trials) if known else {}
        trials |= {config: r if isinstance(r, Failure) else _thin(r.samples_us) for config, r in results}
        self.problems[problem] = RecordedProblem(provenance, trials)

    def save(self, path: Path) -> None:
        """Writes ``path`` whole or not at all; equal grids give equal bytes.

        Raises:
            UsageError: the file system refuses.
        """
        content = self._dumps().encode()
        if path.suffix == ".gz":
            content = gzip.compress(content, mtime=0)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise UsageError(f"cannot write grid {path}: {error.strerror or error}") from error

    def _dumps(self) -> str:
        knobs = [f.name for f in dataclasses.fields(FAMILIES[self.family].config_type)]
        device = dataclasses.asdict(self.device) | {"arch": self.device.arch.name, "key": self.device.key}
        head = {"schema": SCHEMA, "device": device, "family": self.family, "knobs": knobs}
        return f'{json.dumps(head)[:-1]}, "problems": [' + ",".join(map(self._dumps_problem, self.problems)) + "\n]}\n"

    def _dumps_problem(self, problem: AttentionProblem) -> str:
        recorded = self.problems[problem]
        lines = []
        for config, result in recorded.trials.items():
            outcome = f"{result.kind.value}: {result.message}" if isinstance(result, Failure) else result
            lines.append("\n" + json.dumps([list(config_to_dict(config).values()), outcome]))
        head = json.dumps({"problem": str(problem), "provenance": recorded.provenance})
        return f'\n{head[:-1]}, "trials": [' + ",".join(lines) + "\n]}"


def _thin(samples: tuple[float, ...]) -> tuple[float, ...]:
    """At most :data:`KEPT_SAMPLES` order statistics, five significant digits (0.001 % is far below the noise)."""
    ordered = np.sort(samples)
    picked = np.unique(np.linspace(0, len(ordered) - 1, KEPT_SAMPLES).round().astype(int))
    return tuple(float(f"{sample:.5g}") for sample in ordered[picked])


def _device(values: dict[str, Any]) -> Device:
    values = dict(values)
    values.pop("key", None)  # derived; in the file for readers
    return pydantic.TypeAdapter(Device).validate_python({**values, "arch": get_arch(values["arch"])})


def _key(recorded: _File.Problem) -> AttentionProblem:
    return AttentionProblem.parse(recorded.problem)


def _recorded(file: _File, problem: _File.Problem) -> RecordedProblem:
    trials: dict[Config, Recorded] = {}
    adapter = pydantic.TypeAdapter(type(config_from_dict(file.family, dict.fromkeys(file.knobs))))  # names are known
    for values, outcome in problem.trials:
        config = adapter.validate_python(dict(zip(file.knobs, values, strict=True)))
        if isinstance(outcome, str):
            kind, _, message = outcome.partition(": ")
            trials[config] = Failure(FailureKind(kind), message)
        else:
            trials[config] = tuple(outcome)
    return RecordedProblem(problem.provenance, trials)


class ReplayMeasurer(Measurer):
    """Serves the recorded grid in the file ``grid``: draws, with replacement, from a config's recorded samples.

    The n-th measurement of a config gives the same draws in every process with the same ``seed``.

    Raises:
        UsageError: see :meth:`Grid.load`.
    """

    needs_artifact = False

    def __init__(self, grid: Path, seed: int = 0) -> None:
        self.grid = Grid.load(grid)
        self.name = f"replay {grid.name} {hashlib.sha256(grid.read_bytes()).hexdigest()[:8]}"
        self._seed = seed
        self._calls: Counter[tuple[AttentionProblem, str]] = Counter()
        self._lock = threading.Lock()

    @property
    def device(self) -> Device:
        """The device the grid was recorded on."""
        return self.grid.device

    def configs(self, problem: AttentionProblem) -> Collection[Config]:
        """The recorded configs, failures included; empty for a problem that is not in the grid."""
        recorded = self.grid.problems.get(problem)
        return recorded.trials.keys() if recorded else ()

    def measure(
        self, problem: AttentionProblem, variant: Variant, artifact: Artifact | None, *, samples: int = 20
    ) -> Measurement | Failure:
        """``samples`` draws; the recorded failure; or an infeasible one for what is not in the grid."""
        recorded = self.grid.problems.get(problem)
        result = recorded.trials.get(variant.config) if recorded else None
        if result is None:
            return Failure(FailureKind.INFEASIBLE, "not in the recorded grid")
        if isinstance(result, Failure):
            return result
        with self._lock:
            call = self._calls[problem, variant.digest]
            self._calls[problem, variant.digest] += 1
        rng = np.random.default_rng([self._seed, zlib.crc32(str(problem).encode()), int(variant.digest, 16), call])
        return Measurement(tuple(rng.choice(result, samples).tolist()))
