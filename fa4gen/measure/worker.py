"""A process that runs the methods of an engine for its parent, and may hang or die without harm to it.

An engine is any class, named as "module:Class" and made in the process: whatever it initialises (CUDA) stays there.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from fa4gen.errors import Fa4genError, MeasureError

__all__ = ["EngineFault", "Worker", "WorkerDied", "WorkerHung"]

_REAP_S = 10.0  # a killed process may wait for its driver before it is gone


class EngineFault(Exception):
    """Raised by an engine whose process is of no further use (a CUDA context after a fault). Ends the process."""


class WorkerDied(Exception):
    """The process ended during the call; the message says how."""


class WorkerHung(Exception):
    """The call did not answer in time; the process was killed."""


class Worker:
    """One process with one engine. It starts at the first call, and again at the next call after it hung or died.

    Starting it imports the caller's ``__main__`` (as every spawned process does): guard scripts by
    ``if __name__ == "__main__"``. Not for use by several threads at once.
    """

    def __init__(self, engine: str, *arguments: Any, start_timeout_s: float = 180.0) -> None:
        self._engine = engine
        self._arguments = arguments
        self._start_timeout_s = start_timeout_s
        self._process: Any = None
        self._connection: Connection | None = None

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What ``method`` of the engine returns. Arguments and result travel by pickle.

        Raises:
            WorkerHung: no answer within ``timeout_s``.
            WorkerDied: the process ended, or the engine raised :class:`EngineFault`.
            Fa4genError: the engine raised it, or (as MeasureError) anything else; or the process does not start.
        """
        if self._process is None or not self._process.is_alive():
            self._start()
        return self._exchange((method, arguments), timeout_s)

    def close(self) -> None:
        """Ends the process; a busy one is killed. Safe to call twice."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.join(_REAP_S)

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA if its parent did
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="fa4gen-measure", daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._exchange((self._engine, self._arguments), self._start_timeout_s)
        except (WorkerDied, WorkerHung) as error:
            raise MeasureError(f"the measuring process does not start: {error}") from None
        except BaseException:  # it runs, but has no engine
            self.close()
            raise

    def _exchange(self, message: tuple[str, tuple[Any, ...]], timeout_s: float) -> Any:
        assert self._connection is not None
        try:
            self._connection.send(message)
            if not self._connection.poll(timeout_s):
                raise WorkerHung(f"no answer within {timeout_s:g} s")
            kind, value = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(_REAP_S)
            code = self._process.exitcode
            self.close()
            raise WorkerDied(_describe(code)) from None
        except BaseException:  # hung, or Ctrl-C while waiting: an answer to come would be taken for the next call's
            self.close()
            raise
        if kind == "fault":
            self.close()
            raise WorkerDied(value)
        if kind == "raised":
            raise value
        return value


def _describe(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _serve(connection: Connection) -> None:
    """The process: makes the engine, answers calls until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    engine: Any = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, arguments = connection.recv()
            try:
                if engine is None:
                    engine, answer = _make(name, arguments), None
                else:
                    answer = getattr(engine, name)(*arguments)
                reply = ("value", answer)
            except EngineFault as fault:
                reply = ("fault", str(fault))
            except Fa4genError as error:
                reply = ("raised", error)
            except Exception:  # noqa: BLE001 - whatever it is, the parent has to raise it
                reply = ("raised", MeasureError(f"the measuring process failed:\n{traceback.format_exc()}"))
            connection.send(reply)
            if reply[0] == "fault":
                break
    os._exit(0)  # no teardown of a CUDA context that may be broken


def _make(engine: str, arguments: tuple[Any, ...]) -> Any:
    module, _, name = engine.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def _die_with_parent() -> None:
    """A process that hangs in a kernel does not see its pipe close."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
