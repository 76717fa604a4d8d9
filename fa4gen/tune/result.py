"""What a search found, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import pydantic

import fa4gen
from fa4gen.arch import Device
from fa4gen.artifact_cache import toolchain_versions
from fa4gen.config import Config
from fa4gen.measure.base import Source
from fa4gen.problem import AttentionProblem
from fa4gen.tune.racing import RaceResult
from fa4gen.tuned_table import Provenance, Row, RunnerUp

__all__ = ["SHORTLIST", "TuneResult"]

SHORTLIST = 5  # configs that stand beside a predicted winner, itself included: what to measure first


@dataclass(frozen=True)
class TuneResult:
    """The winner for one problem on one device. Times are microseconds a launch, from the race.

    Attributes:
        interval_us: 95 % confidence interval of the median; of a prediction its ensemble's 10th to 90th percentile.
        shortlist: of a prediction, the configs to measure first, the winner before all; else empty.
        runner_up: the next best config that raced, None if there was none.
        runner_up_gap: its time over the winner's, minus one; slightly negative if the race was a tie.
        default_us: median of the default config, None if it cannot run or was not recorded.
        samples: launches behind ``median_us``.
        provenance: plain data: measurer, effort, trials, failures by kind, rounds, what tied, clock, versions, date.
    """

    problem: AttentionProblem
    device: Device
    family: str
    config: Config
    median_us: float
    interval_us: tuple[float, float]
    runner_up: Config | None
    runner_up_gap: float | None
    default_us: float | None
    samples: int
    source: Source
    shortlist: tuple[Config, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_race(
        cls,
        problem: AttentionProblem,
        device: Device,
        family: str,
        outcome: RaceResult,
        default: Config,
        provenance: dict[str, Any],
    ) -> TuneResult:
        """The result of a finished race; what the race itself knows is added to ``provenance``."""
        winner, *others = outcome.standings
        defaults = [s for s in outcome.standings if s.config == default]
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        source = winner.measurements[0].source
        return cls(
            problem=problem,
            device=device,
            family=family,
            config=winner.config,
            median_us=winner.median_us,
            interval_us=winner.interval_us,
            runner_up=others[0].config if others else None,
            runner_up_gap=outcome.gap(others[0]) if others else None,
            default_us=defaults[0].median_us if defaults else None,
            samples=len(winner.samples_us),
            source=source,
            shortlist=tuple(s.config for s in outcome.standings[:SHORTLIST]) if source is Source.PREDICTED else (),
            provenance={
                "rounds": outcome.rounds,
                "tied": len(outcome.tied),
                "clock_mhz": winner.clock_mhz,
                "power_w": winner.power_w,
                "fa4gen": fa4gen.__version__,
                "versions": toolchain_versions(),
                "date": now,
                **provenance,
            },
        )

    def row(self) -> Row:
        """As a row of a tuned table."""
        known = self.provenance
        runner_up = None
        if self.runner_up is not None and self.runner_up_gap is not None:
            runner_up = RunnerUp(config=self.runner_up, gap=self.runner_up_gap)
        return Row(
            problem=self.problem,
            family=self.family,
            config=self.config,
            median_us=self.median_us,
            interval_us=self.interval_us,
            runner_up=runner_up,
            default_us=self.default_us,
            source=self.source,
            shortlist=self.shortlist,
            provenance=Provenance(
                measurer=known["measurer"],
                device=self.device.name,
                driver=known.get("driver"),
                clock_mhz=known["clock_mhz"],
                samples=self.samples,
                date=known["date"],
                fa4gen=known["fa4gen"],
                versions=known["versions"],
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return data

    @classmethod
    def from_dict(cls, data: Any) -> TuneResult:
        """What :meth:`to_dict` gave."""
        return _ADAPTER.validate_python(data)


_ADAPTER = pydantic.TypeAdapter(TuneResult)
