"""Stands in for the CUDA engine in a worker process: an artifact's name says how its kernel behaves."""

from __future__ import annotations

import os
import signal
import sys
import time

from fa4gen.arch import DEVICES
from fa4gen.errors import NoDeviceError
from fa4gen.measure.base import Failure, FailureKind, Measurement
from fa4gen.measure.worker import EngineFault


class FakeEngine:
    def __init__(self, device_index: int) -> None:
        if device_index == 7:
            raise NoDeviceError("there is no CUDA device 7")
        if device_index == 8:
            os._exit(3)
        self._prepared: list[object] = []

    def describe(self):
        return DEVICES["NVIDIA H200"]

    def prepare(self, problem):
        self._prepared.append(problem)
        if problem.batch == 99:
            os.kill(os.getpid(), signal.SIGKILL)

    def measure(self, problem, artifact, samples, config=None):
        assert problem in self._prepared
        behaviour = artifact.variant_name
        if behaviour == "hangs":
            time.sleep(3600)
        elif behaviour == "segfaults":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif behaviour == "exits":
            os._exit(5)
        elif behaviour == "faults":
            raise EngineFault("CUDA error: an illegal memory access was encountered")
        elif behaviour == "raises":
            raise ZeroDivisionError("a bug of ours")
        elif behaviour == "wrong":
            return Failure(FailureKind.WRONG, "O is wrong at batch 0, head 0, row 3")
        return Measurement(tuple(float(i + 1) for i in range(samples)), extra={"pid": float(os.getpid())})

    def verify(self, problem, artifact, kind, seed, config=None):
        return (str(problem), artifact.variant_name, kind, seed)

    def cuda_in_parent(self):
        return "torch" in sys.modules
