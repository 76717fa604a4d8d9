"""Shows a search while it runs: a bar a problem, the best time so far, failures by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fa4gen.console import err, timed
from fa4gen.errors import MeasureError
from fa4gen.measure.base import Failure, Measurement, Source
from fa4gen.problem import AttentionProblem
from fa4gen.tune.ledger import TrialRecord
from fa4gen.tune.racing import Standing
from fa4gen.tune.result import TuneResult
from fa4gen.tune.study import Observer

__all__ = ["SearchProgress"]


class SearchProgress(Observer):
    """A Rich progress display on stderr. A context manager; ``failed`` collects the problems without a result."""

    def __init__(self, problems: Sequence[AttentionProblem], trials: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
        )
        self.failed: dict[AttentionProblem, str] = {}
        self._failures: Counter[str] = Counter()
        self._source = Source.MEASURED
        self._progress = Progress(*columns, console=err)
        self._tasks: dict[AttentionProblem, TaskID] = {
            problem: self._progress.add_task(str(problem), total=trials, start=False, news="") for problem in problems
        }

    def __enter__(self) -> SearchProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_start(self, problem: AttentionProblem, done: int, total: int) -> None:
        self._failures.clear()
        self._progress.start_task(self._tasks[problem])
        news = f"{done} trials of an earlier run" if done else ""
        self._progress.update(self._tasks[problem], completed=done, total=total, news=news)

    def on_trial(
        self, problem: AttentionProblem, done: int, total: int, trial: TrialRecord, best_us: float | None
    ) -> None:
        self._failures.update(_failures([trial]))
        if isinstance(trial.outcome.result, Measurement):
            self._source = trial.outcome.result.source
        words = [f"best {timed(best_us, self._source)}"] if best_us is not None else []
        news = ", ".join([*words, *_counts(self._failures)])
        self._progress.update(self._tasks[problem], completed=done, total=total, news=news)

    def on_round(self, problem: AttentionProblem, done: int, total: int, running: Sequence[Standing]) -> None:
        leader = min(standing.median_us for standing in running)
        news = f"race, round {done}: {len(running)} left, best {timed(leader, self._source)}"
        self._progress.update(self._tasks[problem], news=news)

    def on_finish(self, problem: AttentionProblem, result: TuneResult, trials: Sequence[TrialRecord]) -> None:
        done = len(trials)
        news = ", ".join([f"[green]{timed(result.median_us, result.source)}[/]", *_counts(_failures(trials))])
        self._progress.update(self._tasks[problem], completed=done, total=done, news=news)
        self._progress.stop_task(self._tasks[problem])

    def on_error(self, problem: AttentionProblem, error: MeasureError) -> None:
        self.failed[problem] = str(error)
        self._progress.update(self._tasks[problem], news=f"[red]{escape(str(error))}[/]")
        self._progress.stop_task(self._tasks[problem])


def _failures(trials: Sequence[TrialRecord]) -> Counter[str]:
    results = (trial.outcome.result for trial in trials)
    return Counter(result.kind.value for result in results if isinstance(result, Failure))


def _counts(failures: Counter[str]) -> list[str]:
    return [f"{count} {kind}" for kind, count in failures.most_common()]
