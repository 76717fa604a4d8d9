"""How much a search may spend."""

from __future__ import annotations

from dataclasses import dataclass

from fa4gen.errors import UsageError

__all__ = ["EFFORTS", "FULL", "QUICK", "Effort", "get_effort"]


@dataclass(frozen=True)
class Effort:
    """The budget of one problem.

    Attributes:
        name: for provenance and the command line.
        trials: configs tried, failures included.
        samples: launches timed a trial.
        compile_ahead: trials in flight beside those being measured, so that compiling hides behind measuring. Each
            is chosen without knowing the results of those before it, so more is not better.
        finalists: the best trials that enter the race, the default not counted.
        race_samples: launches a config and round.
        min_rounds: rounds before anything is decided.
        max_rounds: rounds after which what is not decided is a tie.
    """

    name: str
    trials: int
    samples: int
    compile_ahead: int
    finalists: int
    race_samples: int
    min_rounds: int
    max_rounds: int


QUICK = Effort(
    "quick", trials=40, samples=10, compile_ahead=4, finalists=4, race_samples=10, min_rounds=5, max_rounds=20
)
FULL = Effort(
    "full", trials=200, samples=20, compile_ahead=6, finalists=6, race_samples=20, min_rounds=6, max_rounds=50
)
EFFORTS = {effort.name: effort for effort in (QUICK, FULL)}


def get_effort(name: str) -> Effort:
    """The effort called ``name``.

    Raises:
        UsageError: unknown name; the message lists the known ones.
    """
    if name not in EFFORTS:
        raise UsageError(f"unknown effort {name!r}; known: {', '.join(EFFORTS)}")
    return EFFORTS[name]
