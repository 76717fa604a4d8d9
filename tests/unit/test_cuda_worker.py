"""The measuring process may hang, crash or raise: one measurement is lost, the next one works. No GPU needed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fa4gen.arch import DEVICES
from fa4gen.errors import MeasureError, NoDeviceError
from fa4gen.measure.base import Failure, FailureKind, Measurement
from fa4gen.measure.cuda import CudaMeasurer, current_device
from fa4gen.measure.worker import Worker
from fa4gen.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("h=1 s=64 d=64")
ENGINE = "fake_engine:FakeEngine"


VARIANT = SimpleNamespace(name="v", config=None)


def artifact(behaviour: str) -> SimpleNamespace:
    return SimpleNamespace(variant_name=behaviour)


@pytest.fixture
def measurer(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    made = CudaMeasurer(0, timeout_s=1.0, engine=ENGINE)
    yield made
    made.close()


def measure(measurer: CudaMeasurer, behaviour: str, samples: int = 4) -> Measurement | Failure:
    return measurer.measure(PROBLEM, VARIANT, artifact(behaviour), samples=samples)


def test_measures_in_one_process_that_is_not_this_one(measurer):
    first, second = measure(measurer, "works"), measure(measurer, "works", samples=3)
    assert first.samples_us == (1.0, 2.0, 3.0, 4.0) and len(second.samples_us) == 3
    assert first.extra["pid"] == second.extra["pid"] != os.getpid()
    assert measurer.device == DEVICES["NVIDIA H200"]


def test_a_hang_costs_one_timeout_and_the_next_measurement_succeeds(measurer):
    before = measure(measurer, "works")
    start = time.monotonic()
    failure = measure(measurer, "hangs")
    assert 1.0 <= time.monotonic() - start < 3.0
    assert failure == Failure(FailureKind.TIMEOUT, "no answer within 1 s: the kernel hangs")
    after = measure(measurer, "works")
    assert after.samples_us == before.samples_us and after.extra["pid"] != before.extra["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(before.extra["pid"]), 0)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("segfaults", "the process was killed by SIGSEGV"),
        ("exits", "the process ended with exit code 5"),
        ("faults", "CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_crash_fails_one_measurement(measurer, behaviour, message):
    assert measure(measurer, behaviour) == Failure(FailureKind.CRASHED, message)
    assert isinstance(measure(measurer, "works"), Measurement)


def test_wrong_numbers_come_back_as_a_failure(measurer):
    assert measure(measurer, "wrong") == Failure(FailureKind.WRONG, "O is wrong at batch 0, head 0, row 3")


def test_a_bug_in_the_engine_is_raised_here_and_does_not_end_it(measurer):
    with pytest.raises(MeasureError, match="ZeroDivisionError: a bug of ours"):
        measure(measurer, "raises")
    assert isinstance(measure(measurer, "works"), Measurement)


def test_a_death_that_no_variant_caused_is_an_error(measurer):
    problem = AttentionProblem.parse("b=99 h=1 s=64 d=64")
    with pytest.raises(MeasureError, match="failed to prepare: the process was killed by SIGKILL"):
        measurer.measure(problem, VARIANT, artifact("works"))
    assert isinstance(measure(measurer, "works"), Measurement)


def test_a_worker_killed_while_idle_is_replaced(measurer):
    pid = int(measure(measurer, "works").extra["pid"])
    os.kill(pid, 9)
    deadline = time.monotonic() + 10
    while any(child.pid == pid for child in multiprocessing.active_children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert measure(measurer, "works").extra["pid"] != pid


def test_verify_goes_through_the_worker(measurer):
    assert measurer.verify(PROBLEM, artifact("k"), "peaked", 3) == (str(PROBLEM), "k", "peaked", 3)


def test_errors_at_start(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    absent = CudaMeasurer(7, engine=ENGINE)
    for _ in range(2):  # a failed start leaves nothing behind that the next call would trip over
        with pytest.raises(NoDeviceError, match="there is no CUDA device 7"):
            _ = absent.device
    with pytest.raises(MeasureError, match="does not start: the process ended with exit code 3"):
        _ = CudaMeasurer(8, engine=ENGINE).device
    with pytest.raises(MeasureError, match="No module named 'no_such_engine'"):
        _ = CudaMeasurer(0, engine="no_such_engine:Engine").device


def test_interrupt_while_waiting_does_not_leave_an_answer_behind(measurer, monkeypatch):
    pid = measure(measurer, "works").extra["pid"]
    connection = measurer._worker._connection

    class Interrupted:
        def send(self, message):
            connection.send(message)

        def poll(self, timeout):
            raise KeyboardInterrupt

        def close(self):
            connection.close()

    monkeypatch.setattr(measurer._worker, "_connection", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        measure(measurer, "works")
    assert measure(measurer, "works").extra["pid"] != pid


def test_worker_dies_with_its_parent_even_while_it_hangs(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from types import SimpleNamespace\n"
        "from fa4gen.measure.worker import Worker\n"
        "if __name__ == '__main__':\n"
        f"    worker = Worker({ENGINE!r}, 0)\n"
        "    worker.call('describe', timeout_s=60)\n"
        "    print(worker._process.pid, flush=True)\n"
        "    worker._connection.send(('prepare', (SimpleNamespace(batch=1),)))\n"
        "    worker._connection.recv()\n"
        "    worker._connection.send(('measure', (None, SimpleNamespace(variant_name='hangs'), 1)))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60)
    pid = int(parent.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_closing_twice_is_fine_and_a_closed_worker_starts_again(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    worker = Worker(ENGINE, 0)
    worker.close()
    assert worker.call("describe", timeout_s=60).name == "NVIDIA H200"
    worker.close()
    worker.close()


def fake_cuda(monkeypatch, **properties):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))


def test_current_device_of_known_unknown_and_unsupported_silicon(monkeypatch):
    hopper = {"major": 9, "minor": 0, "multi_processor_count": 132, "L2_cache_size": 60 << 20}
    fake_cuda(monkeypatch, name="NVIDIA H200", **hopper)
    assert current_device(0) == DEVICES["NVIDIA H200"]
    fake_cuda(monkeypatch, name="NVIDIA H20", **{**hopper, "multi_processor_count": 78})
    device = current_device(0)
    assert (device.key, device.name) == ("sm_90a-78sm-228kb", "NVIDIA H20")
    with pytest.raises(NoDeviceError, match="there is no CUDA device 1: torch sees 1"):
        current_device(1)
    fake_cuda(monkeypatch, name="NVIDIA A100", major=8, minor=0)
    with pytest.raises(NoDeviceError, match=r"A100 has compute capability 8.0; fa4gen knows 9.0 \(sm_90a\)"):
        current_device(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device_is_one_clear_error():
    with pytest.raises(NoDeviceError, match=r"no CUDA device: torch .* sees none"):
        _ = CudaMeasurer().device
