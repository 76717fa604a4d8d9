"""The search: trials in an Optuna study, measured on any number of devices, ended by a race."""

from fa4gen.tune.effort import EFFORTS, Effort, get_effort
from fa4gen.tune.known_bad import KnownBad
from fa4gen.tune.objective import Bench
from fa4gen.tune.result import TuneResult
from fa4gen.tune.study import Observer, Settings, tune_problem, tune_problems

__all__ = [
    "EFFORTS",
    "Bench",
    "Effort",
    "KnownBad",
    "Observer",
    "Settings",
    "TuneResult",
    "get_effort",
    "tune_problem",
    "tune_problems",
]
