"""The record of one search: an Optuna study whose trials survive a kill at any moment, and are never made twice."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pydantic
from filelock import FileLock
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from fa4gen.config import Config, config_to_dict
from fa4gen.errors import Fa4genError, UsageError
from fa4gen.measure.base import Measurement
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import SearchSpace
from fa4gen.tune.objective import Outcome

__all__ = ["Ledger", "TrialRecord", "open_storage"]

_OUTCOME = pydantic.TypeAdapter(Outcome)
_HOST = socket.gethostname()
# Whoever runs a trial on another host may be alive as long as this; then its trial is made again.
_PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class TrialRecord:
    """One finished trial."""

    number: int
    config: Config
    outcome: Outcome


def open_storage(location: str | Path) -> BaseStorage:
    """Optuna storage at ``location``: an RDB URL (with ``://``), else a journal file, made if absent.

    Raises:
        UsageError: it cannot be opened, or is no study file.
    """
    if "://" in str(location):
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return RDBStorage(str(location))
        except (SQLAlchemyError, ImportError, optuna.exceptions.OptunaError) as error:
            raise UsageError(f"cannot open study storage {location}: {error}") from error
    path = Path(location)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        backend = JournalFileBackend(str(path), lock_obj=_JournalLock(path))  # type: ignore[arg-type]
        return JournalStorage(backend)
    except OSError as error:
        raise UsageError(f"cannot open study file {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no study file, or damaged: {error!r}; move it away") from error


class _JournalLock:
    """What Optuna locks a journal with before it appends. The kernel drops it with its holder, where Optuna's own lock
    outlives a killed process for half a minute. Whoever gets it first cuts off a last line without an end, which a
    full disk or a power cut left: it was never acknowledged, and appending to it would damage the file for good."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(f"{path}.lock")

    def acquire(self) -> bool:
        """Waits for it."""
        self._lock.acquire()
        with self._path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Lets the next one in."""
        self._lock.release()


class Ledger:
    """Trials of the study ``name`` about ``problem``, as configs of ``space``.

    A trial is created WAITING with all of its parameters, then RUNNING, then gets its outcome as the user attribute
    ``outcome`` and is COMPLETE (value: microseconds) or FAIL. FAIL without outcome means interrupted: such a trial
    counts for nothing, and its config waits again. Not thread-safe.

    Every method raises Fa4genError where the storage fails.
    """

    def __init__(self, storage: BaseStorage, name: str, space: SearchSpace, problem: AttentionProblem) -> None:
        self._space = space
        self._problem = problem
        self._owner = f"{_HOST}:{os.getpid()}"
        self._configs: dict[int, Config] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it reports every trial otherwise
        with _storage_errors():
            self._study = optuna.create_study(
                storage=storage,
                study_name=name,
                load_if_exists=True,
                sampler=optuna.samplers.RandomSampler(),  # never asked: trials come with their parameters
            )

    def records(self) -> list[TrialRecord]:
        """Finished trials, oldest first."""
        return [
            TrialRecord(trial.number, self._config(trial), _OUTCOME.validate_python(trial.user_attrs["outcome"]))
            for trial in self._trials(TrialState.COMPLETE, TrialState.FAIL)
            if "outcome" in trial.user_attrs
        ]

    def times(self) -> dict[Config, float | None]:
        """Config of every finished trial -> microseconds, None for a failure."""
        trials = self._trials(TrialState.COMPLETE, TrialState.FAIL)
        return {self._config(trial): trial.value for trial in trials if "outcome" in trial.user_attrs}

    def running(self) -> list[Config]:
        """Configs being tried, by any process."""
        return [self._config(trial) for trial in self._trials(TrialState.RUNNING)]

    def waiting(self) -> list[Config]:
        """Configs that :meth:`take` will give, in order."""
        return [self._config(trial) for trial in self._trials(TrialState.WAITING)]

    def enqueue(self, config: Config) -> None:
        """Adds a waiting trial."""
        params = self._space.active_values(config, self._problem)
        distributions = self._space.distributions()
        trial = create_trial(
            state=TrialState.WAITING,
            params=params,
            distributions={name: distributions[name] for name in params},
            user_attrs={"config": config_to_dict(config), "owner": self._owner},
        )
        with _storage_errors():
            self._study.add_trial(trial)

    def take(self) -> tuple[optuna.Trial, Config]:
        """The oldest waiting trial, which is RUNNING now, and its config. There must be one."""
        with _storage_errors():
            trial = self._study.ask()
            if trial.user_attrs.get("owner") != self._owner:
                trial.set_user_attr("owner", self._owner)
            return trial, self._space.suggest(trial, self._problem)

    def tell(self, trial: optuna.Trial, outcome: Outcome) -> None:
        """Finishes a running trial. The outcome is written first: once it is there, the trial is never made again."""
        with _storage_errors():
            trial.set_user_attr("outcome", _OUTCOME.dump_python(outcome, mode="json"))
            self._finish(trial.number, outcome)

    def put_back(self, trial: optuna.Trial | FrozenTrial) -> None:
        """Ends a running trial as interrupted; its config waits again, unless it was tried or waits already."""
        config = self._config(trial)
        if config not in self.times() and config not in self.waiting():
            self.enqueue(config)  # before the trial ends: a kill between the two leaves it to adopt()
        self.drop(trial)

    def drop(self, trial: optuna.Trial | FrozenTrial) -> None:
        """Ends a running trial as if it had never been."""
        with _storage_errors():
            self._study.tell(trial.number, state=TrialState.FAIL)

    def adopt(self) -> None:
        """Deals with the running trials of processes that are gone."""
        for trial in self._trials(TrialState.RUNNING):
            if not self._abandoned(trial):
                continue
            if "outcome" in trial.user_attrs:
                with _storage_errors():
                    self._finish(trial.number, _OUTCOME.validate_python(trial.user_attrs["outcome"]))
            else:
                self.put_back(trial)

    def attr(self, name: str) -> Any:
        """An attribute of the whole study, None if it was never set."""
        with _storage_errors():
            return self._study.user_attrs.get(name)

    def set_attr(self, name: str, value: Any) -> None:
        """Stores plain data with the study."""
        with _storage_errors():
            self._study.set_user_attr(name, value)

    def _finish(self, number: int, outcome: Outcome) -> None:
        if isinstance(outcome.result, Measurement):
            self._study.tell(number, outcome.result.median_us)
        else:
            self._study.tell(number, state=TrialState.FAIL)

    def _abandoned(self, trial: FrozenTrial) -> bool:
        """Called before this process runs trials itself: one with its id is of an earlier process."""
        host, _, pid = trial.user_attrs["owner"].rpartition(":")
        if host == _HOST and (int(pid) == os.getpid() or not _alive(int(pid))):
            return True
        return trial.datetime_start is not None and datetime.now() - trial.datetime_start > _PATIENCE

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        with _storage_errors():
            return self._study.get_trials(deepcopy=False, states=states)

    def _config(self, trial: optuna.Trial | FrozenTrial) -> Config:
        if trial.number not in self._configs:
            self._configs[trial.number] = self._space.config(trial.params, self._problem)
        return self._configs[trial.number]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, optuna.exceptions.StorageInternalError) as error:
        raise Fa4genError(
            f"cannot write the study: {error}; every trial finished before is kept: mend that and run again"
        ) from error
