"""Tuned tables: which config won for which problem on which device, how that is known, and the nearest row.

A table is one JSON file a device, ``<device key>.json``, one row a line, sorted, so that diffs stay readable. The
user's folder (:func:`fa4gen.knobs.tuned_dir`) is read before the shipped one. A file that cannot be read as it stands
is a :class:`TableError`, never an empty table.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from filelock import FileLock
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

import fa4gen
from fa4gen import feasibility, knobs
from fa4gen.arch import ARCHS, Arch
from fa4gen.artifact_cache import toolchain_versions
from fa4gen.config import FAMILIES, Config, config_from_dict, config_to_dict, get_family
from fa4gen.errors import Fa4genError, TableError, UnsupportedProblem, UsageError
from fa4gen.measure.base import Source
from fa4gen.problem import AttentionProblem
from fa4gen.resources import resource_dir
from fa4gen.variant import Variant

__all__ = [
    "COVERED_OCTAVES",
    "DECODE_ROWS",
    "SCHEMA_VERSION",
    "Bucket",
    "Category",
    "Provenance",
    "Resolution",
    "Row",
    "RunnerUp",
    "TableDiff",
    "TunedTable",
    "TunedTables",
    "bucket",
    "category",
    "coordinates",
    "lookup_config",
]

SCHEMA_VERSION = 1

# Up to one 64-row warpgroup tile of query rows a K/V head: such a problem streams K/V once and is bound by memory.
DECODE_ROWS = 64

# A row further away than this factor (in octaves) still serves, but the problem counts as a miss worth tuning.
COVERED_OCTAVES = 1.0

# Beyond this many tiles an SM the last wave costs less than 1/16: more tiles change nothing that a config could use.
_MAX_TILES_PER_SM = 16
_TILE_ROWS = 128


# --- rows -------------------------------------------------------------------------------------------------------------


def _read_problem(value: Any) -> AttentionProblem:
    if isinstance(value, AttentionProblem):
        return value
    if isinstance(value, str):
        return AttentionProblem.parse(value)
    raise ValueError(f'a problem is text such as "b=2 h=16 s=4096 d=128 causal", got {value!r}')


def _read_config(value: Any, family: str) -> Config:
    if not isinstance(value, dict):
        value = config_to_dict(value)
    try:
        config_from_dict(family, value)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return TypeAdapter(FAMILIES[family].config_type).validate_python(value)


_Problem = Annotated[AttentionProblem, PlainValidator(_read_problem), PlainSerializer(str)]
_Config = Annotated[Any, PlainSerializer(config_to_dict)]
_Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(lambda us: round(us, 3))]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Provenance(_Model):
    """How a row's numbers came about. ``device`` is the product name; ``clock_mhz`` the SM clock while measuring.

    ``measurer`` says what gave the times: "cuda", "replay <grid>", "bound" or "timing model <ids>".
    """

    measurer: str
    device: str
    driver: str | None = None
    clock_mhz: float | None = None
    samples: int = Field(ge=1)
    date: Annotated[AwareDatetime, AfterValidator(lambda d: d.astimezone(timezone.utc).replace(microsecond=0))]
    fa4gen: str
    versions: dict[str, str]

    @classmethod
    def now(
        cls, *, measurer: str, device: str, samples: int, driver: str | None = None, clock_mhz: float | None = None
    ) -> Provenance:
        """Provenance of a measurement taken by this installation at this moment."""
        return cls(
            measurer=measurer,
            device=device,
            driver=driver,
            clock_mhz=clock_mhz,
            samples=samples,
            date=datetime.now(timezone.utc),
            fa4gen=fa4gen.__version__,
            versions=toolchain_versions() | {"torch": metadata.version("torch")},
        )


class RunnerUp(_Model):
    """The second best config; ``gap`` is its median over the winner's, minus one."""

    config: _Config
    gap: float


class Row(_Model):
    """The winner for one problem. Times are microseconds a launch: ``interval_us`` is the median's 95 % interval.

    ``config`` is a config object of ``family``; in the file it is every knob by name. A predicted row's interval is its
    ensemble's 10th to 90th percentile, and ``shortlist`` the configs to measure first.
    """

    problem: _Problem
    family: str
    config: _Config
    median_us: _Microseconds
    interval_us: tuple[_Microseconds, _Microseconds]
    runner_up: RunnerUp | None = None
    default_us: _Microseconds | None = None
    source: Source
    shortlist: tuple[_Config, ...] = ()
    provenance: Provenance

    @field_validator("config")
    @classmethod
    def _config_of_family(cls, value: Any, info: ValidationInfo) -> Any:
        return _read_config(value, info.data.get("family", ""))

    @field_validator("shortlist")
    @classmethod
    def _shortlist_of_family(cls, value: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        return tuple(_read_config(config, info.data.get("family", "")) for config in value)

    @field_validator("runner_up")
    @classmethod
    def _runner_up_of_family(cls, value: RunnerUp | None, info: ValidationInfo) -> RunnerUp | None:
        if value is None:
            return None
        return RunnerUp(config=_read_config(value.config, info.data.get("family", "")), gap=value.gap)

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity and sort order inside a table: family, category, then lengths."""
        p = self.problem
        return (self.family, *category(p), p.seqlen_k, p.seqlen_q, p.batch, p.heads, p.heads_kv, p.return_lse)

    def beats(self, other: Row) -> bool:
        """Whether this row replaces ``other`` for the same problem: measured beats predicted, then the newer date."""
        return self._rank >= other._rank

    @property
    def _rank(self) -> tuple[bool, datetime]:
        return self.source is Source.MEASURED, self.provenance.date


# --- one file ---------------------------------------------------------------------------------------------------------


class _File(_Model):
    schema_version: int
    device: str
    rows: list[Row]


@dataclass(frozen=True)
class TableDiff:
    """What ``new`` holds against ``old``: rows by problem."""

    added: tuple[Row, ...]
    removed: tuple[Row, ...]
    changed: tuple[tuple[Row, Row], ...]


@dataclass(frozen=True)
class TunedTable:
    """The rows of one device, sorted by :attr:`Row.key`, one a problem.

    ``device`` is a :attr:`fa4gen.arch.Device.key`, for instance ``sm_90a-132sm-228kb``.

    Raises:
        TableError: ``device`` is no device key of a known arch, or two rows share a problem.
    """

    device: str
    rows: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        _parse_device_key(self.device)
        ordered = tuple(sorted(self.rows, key=lambda row: row.key))
        for one, other in itertools.pairwise(ordered):
            if one.key == other.key:
                raise TableError(f'two rows for "{one.problem}" in the table of {self.device}; keep one')
        object.__setattr__(self, "rows", ordered)

    @property
    def arch(self) -> Arch:
        """The compile target of this device."""
        return _parse_device_key(self.device)[0]

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors of this device."""
        return _parse_device_key(self.device)[1]

    @classmethod
    def load(cls, path: Path) -> TunedTable:
        """Reads a table file.

        Raises:
            TableError: it is missing, not JSON, of a newer schema, or a row is malformed; the message names the place.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TableError(f"cannot read tuned table {path}: {error.strerror}") from None
        except ValueError as error:
            raise TableError(
                f"tuned table {path} is not valid JSON ({error}): restore it from a copy, or move it away"
            ) from None
        version = data.get("schema_version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise TableError(
                f"tuned table {path} has schema {version}, this fa4gen reads up to {SCHEMA_VERSION}: "
                "update fa4gen, or move the file away"
            )
        try:
            file = _File.model_validate(data)
            return cls(file.device, tuple(file.rows))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "top level"
            raise TableError(
                f"tuned table {path} is corrupt at {place}: {first['msg']}; correct or remove it"
            ) from None
        except TableError as error:
            raise TableError(f"tuned table {path}: {error}") from None

    def dumps(self) -> str:
        """The file's text: a header line, then one row a line."""
        head = f'{{"schema_version": {SCHEMA_VERSION}, "device": {json.dumps(self.device)}, "rows": ['
        lines = (json.dumps(_dump(row), ensure_ascii=False) for row in self.rows)
        return head + ",".join(f"\n{line}" for line in lines) + "\n]}\n"

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all (temporary file, fsync, rename); creates its folder.

        Raises:
            TableError: the file system refuses.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(self.dumps())
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(temporary, 0o644)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise TableError(f"cannot write tuned table {path}: {error.strerror}") from error

    @classmethod
    def update(cls, path: Path, device: str, rows: Iterable[Row]) -> TunedTable:
        """Merges ``rows`` into the file at ``path``, which need not exist. Safe beside other processes that do so.

        Raises:
            TableError: the file is corrupt, belongs to another device, or cannot be written. It is then unchanged.
        """
        with FileLock(_lock_path(path)):
            table = cls.load(path) if path.exists() else cls(device)
            if table.device != device:
                raise TableError(f"{path} is the table of {table.device}, the rows are of {device}: name another file")
            merged = table.merge(rows)
            merged.save(path)
        return merged

    def merge(self, rows: Iterable[Row]) -> TunedTable:
        """With ``rows`` added; for one problem :meth:`Row.beats` decides. A tie goes to the later one given."""
        kept = {row.key: row for row in self.rows}
        for row in rows:
            if row.key not in kept or row.beats(kept[row.key]):
                kept[row.key] = row
        return TunedTable(self.device, tuple(kept.values()))

    def diff(self, new: TunedTable) -> TableDiff:
        """What changes from this table to ``new``."""
        old_rows, new_rows = ({row.key: row for row in table.rows} for table in (self, new))
        return TableDiff(
            added=tuple(row for key, row in new_rows.items() if key not in old_rows),
            removed=tuple(row for key, row in old_rows.items() if key not in new_rows),
            changed=tuple(
                (old_rows[key], row) for key, row in new_rows.items() if key in old_rows and old_rows[key] != row
            ),
        )

    def variant(self, row: Row) -> Variant:
        """What to compile for ``row``."""
        return Variant.of(self.arch.name, row.problem, row.config)

    def lint(self) -> list[str]:
        """One sentence for every row whose config cannot run its problem, does not render, or whose numbers disagree.

        Compiling the rows is the caller's part: ``variant`` gives what to compile.
        """
        from fa4gen.render import render

        findings = []
        for row in self.rows:
            low, high = row.interval_us
            rejection = feasibility.can_implement(row.problem, row.config, self.arch)
            if self.arch.name not in FAMILIES[row.family].archs:
                findings.append(f'"{row.problem}": family {row.family} does not run on {self.arch.name}')
            elif rejection is not None:
                findings.append(f'"{row.problem}": {rejection}')
            else:
                try:
                    render(self.variant(row))
                except Fa4genError as error:
                    findings.append(f'"{row.problem}": does not render: {error}')
            if not low <= row.median_us <= high:
                findings.append(f'"{row.problem}": median {row.median_us} us is outside its interval [{low}, {high}]')
        return findings

    def lookup(self, problem: AttentionProblem) -> Resolution:
        """What this table alone gives for ``problem`` on its own device: see :meth:`TunedTables.lookup`."""
        return TunedTables(self.device, ((self, None),)).lookup(problem)


def _dump(row: Row) -> dict[str, Any]:
    return row.model_dump(mode="json", exclude=None if row.shortlist else {"shortlist"})


def _parse_device_key(key: str) -> tuple[Arch, int]:
    match = re.fullmatch(r"(\w+)-(\d+)sm-(\d+)kb", key)
    if match is None or match[1] not in ARCHS:
        raise TableError(f"{key!r} is no device key of a known arch (for example sm_90a-132sm-228kb)")
    return ARCHS[match[1]], int(match[2])


def _lock_path(path: Path) -> Path:
    """A lock file for ``path``, outside the folder of tables, which may be under version control."""
    folder = knobs.cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / (hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16] + ".lock")


# --- where a problem lies ---------------------------------------------------------------------------------------------


class Category(NamedTuple):
    """What a row must share exactly with the problem it serves. ``grouped``: several query heads a K/V head (GQA, MQA).

    ``decode``: at most :data:`DECODE_ROWS` query rows a K/V head (seqlen_q · gqa_ratio). LSE is not in it: it moves no
    optimum. ``deterministic``: of backwards alone.
    """

    op: str
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    grouped: bool
    decode: bool
    deterministic: bool = False

    def __str__(self) -> str:
        dims = f"d={self.head_dim}" + (f" dv={self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = [self.op, self.dtype, dims, "causal" if self.causal else "full", "GQA" if self.grouped else "MHA"]
        words.append("decode" if self.decode else "prefill")
        return " ".join([*words, *["deterministic"] * self.deterministic])


class Bucket(NamedTuple):
    """Problems that one tuning run covers: a category and a cell half an octave wide in every coordinate."""

    category: Category
    cell: tuple[int, ...]


def category(problem: AttentionProblem) -> Category:
    """The categorical part of lookup, the same for tuning and dispatch."""
    ratio = problem.gqa_ratio
    decode = problem.seqlen_q * ratio <= DECODE_ROWS
    return Category(
        problem.op, problem.dtype, problem.head_dim, problem.head_dim_v, problem.causal, ratio > 1, decode,
        problem.deterministic,
    )  # fmt: skip


def coordinates(problem: AttentionProblem, sm_count: int) -> tuple[float, float, float, float]:
    """log2 of seqlen_q, seqlen_k, 128-row tiles an SM (at most 16) and gqa_ratio: what "nearest" is measured in.

    The tiles are those that CTAs own: of the queries of a K/V head, in a backward of its keys.
    """
    rows = problem.seqlen_k if problem.op == "bwd" else problem.seqlen_q * problem.gqa_ratio
    tiles = problem.batch * problem.heads_kv * -(-rows // _TILE_ROWS)
    values = (
        max(1, problem.seqlen_q),
        max(1, problem.seqlen_k),
        min(_MAX_TILES_PER_SM, max(1, tiles) / sm_count),
        problem.gqa_ratio,
    )
    log_q, log_k, log_tiles, log_ratio = (math.log2(value) for value in values)
    return log_q, log_k, log_tiles, log_ratio


def bucket(problem: AttentionProblem, sm_count: int) -> Bucket:
    """The bucket of ``problem`` on a device with ``sm_count`` SMs."""
    return Bucket(category(problem), tuple(round(2 * x) for x in coordinates(problem, sm_count)))


# --- lookup -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolution:
    """What runs for a problem, and why.

    Attributes:
        config: the config to run.
        row: the row it comes from, None for the family's default.
        reason: one sentence for people.
        distance: octaves between the problem and the row; infinite without a row.
        source: "measured", "predicted" or "default".
        path: the table file, None without a row or for a table in memory.
    """

    config: Config
    row: Row | None
    reason: str
    distance: float
    source: str
    path: Path | None = None

    @property
    def covered(self) -> bool:
        """Whether a row was measured near enough (:data:`COVERED_OCTAVES`); else the problem counts as a miss."""
        return self.source == Source.MEASURED.value and self.distance <= COVERED_OCTAVES


@dataclass(frozen=True)
class _Candidate:
    row: Row
    table: TunedTable
    path: Path | None


class TunedTables:
    """Every table that may serve one device.

    Two tables of one device may hold the same problem: the row of the table given first (the user's) stays, unless it
    is predicted and the other measured. A table of another device with the same arch serves where the device's own
    have no feasible row of a problem's category.

    Raises:
        TableError: ``device`` is no device key of a known arch.
    """

    def __init__(self, device: str, tables: Sequence[tuple[TunedTable, Path | None]]) -> None:
        self.device = device
        self.arch, self.sm_count = _parse_device_key(device)
        self._rows: dict[Category, list[_Candidate]] = {}
        best: dict[tuple[str, Any], _Candidate] = {}
        for table, path in tables:
            for row in table.rows:
                held = best.get((table.device, row.key))
                # The user's row comes first and stays, unless it is predicted where a measured one is shipped.
                if held is None or (row.source is Source.MEASURED and held.row.source is not Source.MEASURED):
                    best[table.device, row.key] = _Candidate(row, table, path)
        for candidate in best.values():
            self._rows.setdefault(category(candidate.row.problem), []).append(candidate)

    @classmethod
    def load(cls, device: str, directories: Sequence[Path] | None = None) -> TunedTables:
        """Reads the tables of ``device`` and of its arch from ``directories`` (default: the user's, the shipped).

        Raises:
            TableError: a file is corrupt, of a newer schema, or not named after its device.
        """
        arch, _ = _parse_device_key(device)
        tables = []
        for directory in directories if directories is not None else (knobs.tuned_dir(), resource_dir("tuned")):
            for path in sorted(directory.glob(f"{arch.name}-*.json")):
                table = TunedTable.load(path)
                if table.device != path.stem:
                    raise TableError(f"{path} holds the table of {table.device}: rename it to {table.device}.json")
                tables.append((table, path))
        return cls(device, tables)

    @property
    def own_rows(self) -> list[Row]:
        """The rows of this very device, one a problem."""
        candidates = (candidate for found in self._rows.values() for candidate in found)
        return [candidate.row for candidate in candidates if candidate.table.device == self.device]

    def lookup(self, problem: AttentionProblem) -> Resolution:
        """The config for ``problem``: the nearest feasible row of its category, else the family's default.

        Rows of this very device come before those of another one with the same arch, then measured rows within
        :data:`COVERED_OCTAVES` before predicted ones. Nearest is Euclidean in :func:`coordinates`; ties prefer equal
        ``return_lse``, then measured, then the smaller :attr:`Row.key`.

        Raises:
            UnsupportedProblem: not even the default can run it; the message is the rejection's.
        """
        here = coordinates(problem, self.sm_count)
        passed_over = 0
        for foreign, distance, candidate in self._nearest(problem, here):
            if feasibility.can_implement(problem, candidate.row.config, self.arch) is not None:
                passed_over += 1
                continue
            owner = f"{candidate.table.device} (same arch)" if foreign else candidate.table.device
            where = "this very problem" if candidate.row.problem == problem else f"{distance:.2f} octaves away"
            kind = "row" if candidate.row.source is Source.MEASURED else "predicted row"
            reason = f'{kind} "{candidate.row.problem}" of {owner}, {where}'
            if passed_over:
                reason += f"; {passed_over} nearer cannot run it"
            return Resolution(
                candidate.row.config, candidate.row, reason, distance, candidate.row.source.value, candidate.path
            )
        return self._default(problem, passed_over)

    def _nearest(self, problem: AttentionProblem, here: tuple[float, ...]) -> list[tuple[bool, float, _Candidate]]:
        found = []
        for candidate in self._rows.get(category(problem), ()):
            row = candidate.row
            distance = math.dist(here, coordinates(row.problem, candidate.table.sm_count))
            found.append((candidate.table.device != self.device, distance, candidate))
        return sorted(
            found,
            key=lambda item: (
                item[0],
                item[2].row.source is not Source.MEASURED or item[1] > COVERED_OCTAVES,
                item[1],
                item[2].row.problem.return_lse != problem.return_lse,
                item[2].row.source is not Source.MEASURED,
                item[2].row.key,
                item[2].table.device,
            ),
        )

    def _default(self, problem: AttentionProblem, passed_over: int) -> Resolution:
        family = get_family(problem.op, self.arch.name)
        config = family.config_type.default(problem)
        rejection = feasibility.can_implement(problem, config, self.arch)
        if rejection is not None:
            raise UnsupportedProblem(f"{family.name} cannot run {problem}: {rejection}")
        why = f"none of {passed_over} rows can run it" if passed_over else f"no row for {category(problem)}"
        return Resolution(config, None, f"{why}: default of {family.name}", math.inf, "default")


def lookup_config(problem: AttentionProblem, device: str, directories: Sequence[Path] | None = None) -> Resolution:
    """What would run for ``problem`` on the device with key ``device``; reads the tables afresh.

    Raises:
        TableError: see :meth:`TunedTables.load`.
        UnsupportedProblem: see :meth:`TunedTables.lookup`.
    """
    return TunedTables.load(device, directories).lookup(problem)
