"""The search for one problem: seeds, proposals, trials on every measurer at once, and the race that ends it."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import BaseStorage

import fa4gen
from fa4gen import knobs
from fa4gen.artifact_cache import KernelSource
from fa4gen.config import Config, get_family
from fa4gen.errors import MeasureError, UsageError
from fa4gen.measure.base import Failure, Measurement, Measurer
from fa4gen.measure.replay import Grid
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.tune.effort import QUICK, Effort
from fa4gen.tune.ledger import Ledger, TrialRecord, open_storage
from fa4gen.tune.objective import Bench
from fa4gen.tune.proposer import Proposer
from fa4gen.tune.racing import Standing, distance, race
from fa4gen.tune.result import TuneResult
from fa4gen.tuned_table import category, coordinates

if TYPE_CHECKING:
    from fa4gen.artifact_cache import Artifact

__all__ = ["Observer", "Settings", "nearby_winners", "tune_problem", "tune_problems"]

SEEDS = 3  # winners of neighbouring problems that a search starts from
POOL = 4  # predicted configs for each trial that is measured afterwards
KEPT = 0.5  # share of them that may be measured
SEARCH_SHARE = 0.8  # of a time budget; the race has the rest, and its minimal rounds in any case


class Observer:
    """Is told how a search goes. Calls come one at a time, from any thread; they must be quick and must not raise."""

    def on_start(self, problem: AttentionProblem, done: int, total: int) -> None:
        """A search begins; ``done`` of its ``total`` trials were made by an earlier run."""

    def on_trial(
        self, problem: AttentionProblem, done: int, total: int, trial: TrialRecord, best_us: float | None
    ) -> None:
        """A trial is finished and saved. ``best_us``: fastest median so far."""

    def on_round(self, problem: AttentionProblem, done: int, total: int, running: Sequence[Standing]) -> None:
        """A round of the race is over; ``running`` were in it."""

    def on_finish(self, problem: AttentionProblem, result: TuneResult, trials: Sequence[TrialRecord]) -> None:
        """The search has its result. ``trials``: all of its study, earlier runs included."""

    def on_error(self, problem: AttentionProblem, error: MeasureError) -> None:
        """The search has no result; the next problem follows."""


@dataclass(frozen=True)
class Settings:
    """What a user asks of a search.

    ``space``: default the family's shipped one. ``storage``: an Optuna storage, RDB URL or journal file; default
    ``studies.journal`` in the cache directory. ``budget_s``: wall time a problem. ``record``: a grid file that every
    finished search is added to. A search goes on where one with the same problem, device, measurer, space and kernel
    sources stopped; ``seed`` and ``effort`` may differ.

    ``prefilter``: a bench that predicts. A search on it, of :data:`POOL` times as many trials, comes first; of its
    configs the faster :data:`KEPT` are what may be measured, by their predicted times.
    """

    effort: Effort = QUICK
    seed: int = 0
    space: SearchSpace | None = None
    storage: BaseStorage | str | Path | None = None
    budget_s: float | None = None
    record: Path | None = None
    prefilter: Bench | None = None

    def open_storage(self) -> BaseStorage:
        """The storage; see :func:`fa4gen.tune.ledger.open_storage` for what it raises."""
        if isinstance(self.storage, BaseStorage):
            return self.storage
        return open_storage(self.storage or knobs.cache_dir() / "studies.journal")

    def predicting(self) -> Settings:
        """Those of the search on :attr:`prefilter`."""
        effort = replace(self.effort, trials=POOL * self.effort.trials)
        return replace(self, effort=effort, record=None, prefilter=None)


def tune_problem(
    problem: AttentionProblem,
    bench: Bench,
    settings: Settings | None = None,
    *,
    seeds: Iterable[Config] = (),
    observer: Observer | None = None,
) -> TuneResult:
    """Finds the fastest config for ``problem`` on ``bench``.

    Tried first are the default, ``seeds`` and the starting points of the space.

    Safe to kill: a second call goes on. On KeyboardInterrupt the measurements that run are finished and saved, what
    was in flight waits in the study, and the exception goes through; the bench stays open.

    Raises:
        UsageError: the problem is empty, or nothing in the space can run it.
        MeasureError: no config could be measured, or a measurer cannot be set up.
        Fa4genError: the study or the artifact cache cannot be written.
    """
    if not (problem.batch and problem.seqlen_q and problem.seqlen_k):
        raise UsageError(f"problem {str(problem)!r} is empty: there is nothing to tune")
    settings, observer, seeds = settings or Settings(), observer or Observer(), list(seeds)
    search = _Search(problem, bench, settings, observer)
    if settings.prefilter is not None:
        pool = _Search(problem, settings.prefilter, settings.predicting(), observer, only=search.only)
        search.narrow(pool.ranking(seeds))
    return search.run(seeds)


def tune_problems(
    problems: Iterable[AttentionProblem],
    bench: Bench,
    settings: Settings | None = None,
    *,
    known: Iterable[tuple[AttentionProblem, Config]] = (),
    observer: Observer | None = None,
) -> list[TuneResult]:
    """:func:`tune_problem` for each, seeded with the nearest of ``known`` (rows of a table) and of what was just found.

    A problem whose search raises MeasureError is reported to ``observer`` and left out.
    """
    settings, observer = settings or Settings(), observer or Observer()
    settings = replace(settings, storage=settings.open_storage())
    results: list[TuneResult] = []
    known = list(known)
    for problem in problems:
        winners = [*known, *((r.problem, r.config) for r in results)]
        seeds = nearby_winners(problem, winners, bench.device.sm_count)
        try:
            results.append(tune_problem(problem, bench, settings, seeds=seeds, observer=observer))
        except MeasureError as error:
            observer.on_error(problem, error)
    return results


def nearby_winners(
    problem: AttentionProblem,
    winners: Iterable[tuple[AttentionProblem, Config]],
    sm_count: int,
    count: int = SEEDS,
) -> list[Config]:
    """At most ``count`` different winners of problems with the same op and head dims, nearest first.

    Near is as table lookup has it, problems of the same category before others.
    """
    here = coordinates(problem, sm_count)

    def distance(other: AttentionProblem) -> tuple[bool, float]:
        there = coordinates(other, sm_count)
        return category(other) != category(problem), sum((a - b) ** 2 for a, b in zip(here, there, strict=True))

    def dims(other: AttentionProblem) -> tuple[str, int, int]:
        return other.op, other.head_dim, other.head_dim_v

    near = sorted((w for w in winners if dims(w[0]) == dims(problem)), key=lambda w: distance(w[0]))
    return list(dict.fromkeys(config for _, config in near))[:count]


@dataclass(frozen=True)
class _Job:
    """A running trial, whose config is being compiled."""

    trial: optuna.Trial
    config: Config
    artifact: Future[Artifact] | None


class _Search:
    """The state of one search. ``_lock`` guards all of it; measuring happens outside. ``only``: what may be tried, None
    for the whole space; default what the measurer has times for."""

    def __init__(
        self,
        problem: AttentionProblem,
        bench: Bench,
        settings: Settings,
        observer: Observer,
        only: Collection[Config] | None = None,
    ) -> None:
        family = get_family(problem.op, bench.device.arch.name)
        self._problem = problem
        self._bench = bench
        self._settings = settings
        self._effort = settings.effort
        self._observer = observer
        self._family = family.name
        self._space = settings.space or SearchSpace.load(family)
        if self._space.family != family:
            raise UsageError(f"the search space is for {self._space.family.name}, {problem} is run by {family.name}")
        self._default = self._space.default(problem)
        self.only = only or self._recorded()
        self._grid = self._open_grid(settings.record)
        self._ledger = Ledger(settings.open_storage(), self._study_name(), self._space, problem)
        self._proposer = Proposer(self._space, problem, self._allowed, self.only, settings.seed)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._jobs: deque[_Job] = deque()
        self._started = time.monotonic()

    def run(self, seeds: Iterable[Config]) -> TuneResult:
        """Trials, then the race."""
        self._ledger.adopt()
        done = len(self._ledger.times())
        self._observer.on_start(self._problem, done, max(done, self._effort.trials))
        finished = self._finished_result()
        if finished is None:
            self._enqueue(seeds)
            self._search()
            finished = self._race()
            self._ledger.set_attr("result", self._stamp() | {"result": finished.to_dict()})
        trials = self._ledger.records()
        if self._settings.record is not None and self._grid is not None:
            results = ((trial.config, trial.outcome.result) for trial in trials)
            self._grid.record(self._problem, results, finished.provenance)
            self._grid.save(self._settings.record)
        self._observer.on_finish(self._problem, finished, trials)
        return finished

    def ranking(self, seeds: Iterable[Config]) -> dict[Config, float]:
        """Trials without a race: config -> microseconds, fastest first. Where little may be tried, all of it is.

        Raises:
            MeasureError: every trial failed.
        """
        if self.only is not None:
            seeds, self._effort = self.only, replace(self._effort, trials=len(self.only))
        self._ledger.adopt()
        done = len(self._ledger.times())
        self._observer.on_start(self._problem, done, max(done, self._effort.trials))
        self._enqueue(seeds)
        self._search()
        times = {config: us for config, us in self._ledger.times().items() if us is not None}
        if not times:
            raise MeasureError(self._no_winner())
        return {config: times[config] for config in sorted(times, key=times.__getitem__)}

    def narrow(self, predicted: dict[Config, float]) -> None:
        """Leaves the faster :data:`KEPT` of the ``predicted`` configs and the default; the proposer's prior."""
        kept = list(predicted)[: math.ceil(KEPT * len(predicted))]
        self.only = dict.fromkeys([*kept, *filter(self._allowed, [self._default])])
        self._proposer = Proposer(self._space, self._problem, self._allowed, self.only, self._settings.seed, predicted)

    # --- before -------------------------------------------------------------------------------------------------------

    def _study_name(self) -> str:
        """Times that may not be compared lie in different studies: other silicon, measurer, space or kernel sources."""
        measurer = self._bench.measurers[0]
        parts = [repr(self._space.knobs), repr(self._bench.keep_slow_code)]
        if measurer.needs_artifact:
            parts.append(KernelSource.of(self._bench.variant(self._problem, self._default)).key)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
        return f"{self._family} {self._problem} | {self._bench.device.key} | {measurer.name} | {digest}"

    def _recorded(self) -> dict[Config, None] | None:
        """The configs a replay is limited to, as far as they are configs of the space; ordered."""
        recorded = self._bench.measurers[0].configs(self._problem)
        if recorded is None:
            return None
        held = [c for c in recorded if c in self._space and self._space.config(vars(c), self._problem) == c]
        if not held:
            raise UsageError(f"{self._bench.measurers[0].name} holds no time for {str(self._problem)!r} in this space")
        return dict.fromkeys(held)

    def _open_grid(self, path: Path | None) -> Grid | None:
        device = self._bench.device
        if path is None or not path.exists():
            return Grid(device, self._family) if path else None
        grid = Grid.load(path)
        if (grid.device.key, grid.family) != (device.key, self._family):
            raise UsageError(f"{path} records {grid.family} on {grid.device.key}: name another file")
        return grid

    def _allowed(self, config: Config) -> bool:
        return (self.only is None or config in self.only) and self._bench.allows(self._problem, config)

    def _finished_result(self) -> TuneResult | None:
        """What an earlier run with this effort found, if no trial was added since."""
        stored = self._ledger.attr("result")
        if stored is None or {**stored, "result": None} != {**self._stamp(), "result": None}:
            return None
        return TuneResult.from_dict(stored["result"])

    def _stamp(self) -> dict[str, Any]:
        """What a stored result depends on."""
        return {
            "effort": asdict(self._effort),
            "prefilter": self._prefilter,
            "trials": len(self._ledger.times()),
            "fa4gen": fa4gen.__version__,
        }

    @property
    def _prefilter(self) -> str | None:
        return self._settings.prefilter.measurers[0].name if self._settings.prefilter else None

    def _enqueue(self, seeds: Iterable[Config]) -> None:
        known = {*self._ledger.times(), *self._ledger.running(), *self._ledger.waiting()}
        for seed in (self._default, *seeds, *self._space.starting_points(self._problem)):
            if seed not in self._space:
                continue
            config = self._space.config(vars(seed), self._problem)
            if config not in known and self._allowed(config):
                known.add(config)
                self._ledger.enqueue(config)

    # --- trials -------------------------------------------------------------------------------------------------------

    def _search(self) -> None:
        """Makes trials until the budget is used, one thread a measurer. What is in flight at the end is put back."""
        measurers = self._bench.measurers
        try:
            with ThreadPoolExecutor(len(measurers), "measure") as threads:
                workers = [threads.submit(self._work, measurer) for measurer in measurers]
                try:
                    wait(workers, return_when=FIRST_EXCEPTION)
                finally:  # Ctrl-C arrives in wait(): each thread finishes the measurement it is at
                    self._stop.set()
            for worker in workers:
                worker.result()
        finally:
            for job in self._jobs:
                if job.artifact is not None:
                    job.artifact.cancel()
                self._ledger.put_back(job.trial)

    def _work(self, measurer: Measurer) -> None:
        while (job := self._next()) is not None:
            try:
                outcome = self._bench.finish(self._problem, job.config, job.artifact, measurer, self._effort.samples)
            except BaseException:
                with self._lock:
                    self._jobs.append(job)  # to be put back
                raise
            with self._lock:
                self._ledger.tell(job.trial, outcome)
                times = self._ledger.times()
                best = min((us for us in times.values() if us is not None), default=None)
                record = TrialRecord(job.trial.number, job.config, outcome)
                self._observer.on_trial(self._problem, len(times), self._effort.trials, record, best)

    def _next(self) -> _Job | None:
        """The trial whose compile began first, with the queue behind it filled: order decides, not compile times, so
        that with one measurer the same seed makes the same search."""
        with self._lock:
            if self._stop.is_set() or self._over(SEARCH_SHARE):
                return None
            ahead = self._effort.compile_ahead if self._bench.measurers[0].needs_artifact else 0
            while len(self._jobs) <= ahead and (job := self._ask()) is not None:
                self._jobs.append(job)
            return self._jobs.popleft() if self._jobs else None

    def _ask(self) -> _Job | None:
        """A new running trial, or None if the budget or the space is used up."""
        times, running = self._ledger.times(), self._ledger.running()
        if len(times) + len(running) >= self._effort.trials:
            return None
        if not self._ledger.waiting():
            proposal = self._proposer.propose(times, running)
            if proposal is None:
                return None
            self._ledger.enqueue(proposal)
        trial, config = self._ledger.take()
        if config in times or config in running or not self._allowed(config):
            self._ledger.drop(trial)  # another process was faster, or it turned out bad since it was enqueued
            return self._ask()
        return _Job(trial, config, self._bench.start(self._problem, config))

    # --- after --------------------------------------------------------------------------------------------------------

    def _race(self) -> TuneResult:
        times = {c: us for c, us in self._ledger.times().items() if us is not None and self._allowed(c)}
        if not times:
            raise MeasureError(self._no_winner())
        finalists = sorted(times, key=lambda config: (times[config], distance(config, self._default)))
        del finalists[self._effort.finalists :]
        if self._default in times:
            finalists.append(self._default)
        artifacts = {config: self._bench.start(self._problem, config) for config in dict.fromkeys(finalists)}
        measurer = self._bench.measurers[0]  # one device for all: ratios between devices mean nothing
        effort = self._effort
        if measurer.margin:  # predictions: a second round says the same
            effort = replace(effort, min_rounds=1, max_rounds=1)

        def measure(config: Config) -> Measurement | Failure:
            samples = self._effort.race_samples
            return self._bench.finish(self._problem, config, artifacts[config], measurer, samples).result

        outcome = race(
            finalists,
            self._default,
            measure,
            effort,
            margin=measurer.margin,
            keep_going=lambda: not self._over(1.0),
            on_round=lambda done, running: self._observer.on_round(self._problem, done, effort.max_rounds, running),
        )
        if outcome is None:
            raise MeasureError(f"every finalist for {str(self._problem)!r} failed in the race; run again")
        return TuneResult.of_race(
            self._problem, self._bench.device, self._family, outcome, self._default, self._provenance()
        )

    def _provenance(self) -> dict[str, Any]:
        return {
            "measurer": self._bench.measurers[0].name,
            "effort": self._effort.name,
            "seed": self._settings.seed,
            "prefilter": self._prefilter,
            "trials": len(self._ledger.times()),
            "failures": dict(self._failures()),
            **self._bench.provenance,
        }

    def _failures(self) -> Counter[str]:
        results = (trial.outcome.result for trial in self._ledger.records())
        return Counter(result.kind.value for result in results if isinstance(result, Failure))

    def _no_winner(self) -> str:
        failures = self._failures()
        if not failures:
            return f"no config of the space can run {str(self._problem)!r} on {self._bench.device.arch.name}"
        results = (trial.outcome.result for trial in self._ledger.records())
        first = next(result.message for result in results if isinstance(result, Failure))
        counts = ", ".join(f"{count} {kind}" for kind, count in failures.items())
        return f"no config could be measured for {str(self._problem)!r}: {counts}; the first: {first}"

    def _over(self, share: float) -> bool:
        budget = self._settings.budget_s
        return budget is not None and time.monotonic() - self._started > share * budget
