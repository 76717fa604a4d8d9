"""Measures on a CUDA device, in a process of its own: a kernel that hangs or faults costs one trial.

What a time means here: microseconds between two CUDA events around one launch, all inputs cold in L2. Before each
launch a buffer of more than the L2's size is overwritten; that takes longer than the host needs to enqueue a launch,
so the queue never runs dry and no launch latency is in the time, however short the kernel (the events themselves
add 2 to 4 us, the same for every kernel). Between launches the device rests a little, so clocks are a little above
those of back-to-back launches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fa4gen.accuracy import AccuracyReport
from fa4gen.arch import ARCHS, DEVICES, Device
from fa4gen.artifact_cache import Artifact
from fa4gen.case import Case
from fa4gen.compile import load_kernel
from fa4gen.config import Config
from fa4gen.errors import MeasureError, NoDeviceError
from fa4gen.measure.base import Failure, FailureKind, Measurement, Measurer
from fa4gen.measure.worker import EngineFault, Worker, WorkerDied, WorkerHung
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

__all__ = ["CudaEngine", "CudaMeasurer", "DeviceTimer", "Timing", "current_device", "driver_version"]

PREPARE_TIMEOUT_S = 300.0  # inputs and float64 reference of a problem
BUDGET_US = 50_000.0  # a measurement launches until its launches took this long, within the limits below
MAX_FACTOR = 10  # ... but never more than this times the samples asked for
ROTATE_BYTES = 1 << 30  # problems below this size rotate among three sets of inputs


def current_device(index: int = 0) -> Device:
    """The silicon of CUDA device ``index``. Initialises CUDA in this process.

    Name, SM count and L2 size are the device's own. Memory rate and clock come from :data:`fa4gen.arch.DEVICES`: by
    name, or for an unknown name from the first device of its architecture (they feed bounds and tile order only).

    Raises:
        NoDeviceError: no such device, or fa4gen has no architecture for it.
    """
    if not torch.cuda.is_available():
        raise NoDeviceError(f"no CUDA device: torch {torch.__version__} sees none; this needs a GPU and its driver")
    if index >= torch.cuda.device_count():
        raise NoDeviceError(f"there is no CUDA device {index}: torch sees {torch.cuda.device_count()}")
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    arch = next((arch for arch in ARCHS.values() if arch.capability == capability), None)
    if arch is None:
        raise NoDeviceError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}; "
            f"fa4gen knows {', '.join(f'{a.capability[0]}.{a.capability[1]} ({a.name})' for a in ARCHS.values())}"
        )
    known = DEVICES.get(properties.name) or next(d for d in DEVICES.values() if d.arch == arch)
    return dataclasses.replace(
        known,
        name=properties.name,
        sm_count=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
    )


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where NVML is not there. Does not initialise CUDA."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


@dataclass(frozen=True)
class Timing:
    """One time a launch, microseconds, with medians of SM clock and board power; None where NVML is not there."""

    samples_us: tuple[float, ...]
    clock_mhz: float | None
    power_w: float | None


class DeviceTimer:
    """Times launches on the current stream of CUDA device ``index``, as the module's docstring says."""

    def __init__(self, index: int) -> None:
        l2_bytes = torch.cuda.get_device_properties(index).L2_cache_size
        self._flush = torch.empty(max(4 * l2_bytes, 256 << 20), dtype=torch.uint8, device=f"cuda:{index}")
        self._sensor = _Sensor(index)

    def time(self, launches: Sequence[Callable[[], Any]], head_start_us: float = 0.0) -> Timing:
        """Runs ``launches`` in order and waits for them.

        ``head_start_us``: how long the device spins before each, for callables whose host side takes longer than the
        L2 flush (80 us) lasts.
        """
        events = []
        for launch in launches:
            if head_start_us:
                torch.cuda._sleep(int(head_start_us * 2000))  # cycles, at about 2 GHz
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            events.append((start, end))
        clock, power = self._sensor.watch(events[-1][1])
        torch.cuda.synchronize()
        return Timing(tuple(start.elapsed_time(end) * 1e3 for start, end in events), clock, power)


class _Sensor:
    """SM clock and board power of a CUDA device through NVML (package nvidia-ml-py); knows nothing without it."""

    def __init__(self, index: int) -> None:
        self._handle = None
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(index).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._read()
        except pynvml.NVMLError:  # some virtual machines offer no sensors
            self._handle = None

    def _read(self) -> tuple[float, float]:
        nvml = self._nvml
        clock = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
        (power,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if power.nvmlReturn:
            raise nvml.NVMLError(power.nvmlReturn)
        return clock, power.value.uiVal / 1e3  # from mW; nvmlDeviceGetPowerUsage is an average over a second

    def watch(self, end: torch.cuda.Event) -> tuple[float | None, float | None]:
        """Median MHz and W from now until ``end`` has happened."""
        readings = []
        while self._handle is not None:
            readings.append(self._read())
            if end.query():
                break
        if not readings:
            return None, None
        clock, power = np.median(readings, axis=0)
        return float(clock), float(power)


class _Refused(Exception):
    """The kernel cannot be loaded or launched; the context is sound."""


class _Cases:
    """A problem on ``device``: ``sets`` sets of inputs, one of outputs, and what the first set should give."""

    def __init__(self, problem: AttentionProblem, kind: str, seed: int, sets: int, device: str) -> None:
        if not (problem.batch and problem.seqlen_q and problem.seqlen_k):
            raise MeasureError(f"{problem} is empty: there is nothing to run")
        self.problem = problem
        self._first, *others = (Case.make(problem, kind, seed + i, device) for i in range(sets))
        self._inputs = [case.inputs for case in (self._first, *others)]
        self._expected = self._first.expect(seed)

    def verify(self, kernel: Callable[..., Any], config: Config | None, num_sms: int) -> AccuracyReport:
        """Launches once on the first inputs, into poisoned outputs; twice if it must be deterministic."""
        self._launch(kernel, config, num_sms)
        report = self._first.check(self._expected)
        if not (report.ok and self.problem.deterministic):
            return report
        outputs = {name: output.clone() for name, output in self._first.outputs.items()}
        self._launch(kernel, config, num_sms)
        for name, output in self._first.outputs.items():
            if not torch.equal(output, outputs[name]):
                return dataclasses.replace(report, ok=False, message=f"{name} differs between two launches")
        return report

    def _launch(self, kernel: Callable[..., Any], config: Config | None, num_sms: int) -> None:
        self._first.poison()
        with _kernel_errors():
            self.launches(kernel, config, num_sms, 1)[0]()

    def launches(
        self, kernel: Callable[..., Any], config: Config | None, num_sms: int, count: int
    ) -> list[Callable[[], Any]]:
        """``count`` launches that rotate among the inputs. They share the outputs and, if any, the workspace."""
        rest = self._first.arguments(config, num_sms)[len(self._first.inputs) :]
        calls = [functools.partial(kernel, *inputs.values(), *rest) for inputs in self._inputs]
        return [calls[i % len(calls)] for i in range(count)]


class CudaEngine:
    """What :class:`CudaMeasurer` runs in its worker process. Keeps kernels, and the tensors of the last problems."""

    torch_device = "cuda"  # the current one, which is set once

    def __init__(self, index: int) -> None:
        self._device = current_device(index)
        torch.cuda.set_device(index)
        self._timer = DeviceTimer(index)
        self._kernels: dict[Path, Callable[..., Any]] = {}
        self._reports: dict[tuple[Path, AttentionProblem], AccuracyReport] = {}
        self._case = functools.lru_cache(maxsize=6)(functools.partial(_Cases, device=self.torch_device))

    def describe(self) -> Device:
        """The device it runs on."""
        return self._device

    def prepare(self, problem: AttentionProblem) -> None:
        """Makes the tensors that :meth:`measure` needs, or finds them.

        Raises:
            MeasureError: the problem is empty, or does not fit the device's memory.
        """
        try:
            self._ragged_cases(problem)
            try:
                self._timed_case(problem)
            except torch.OutOfMemoryError:
                self._case.cache_clear()  # it may be the earlier problems that fill the memory
                self._timed_case(problem)
        except torch.OutOfMemoryError as error:
            raise MeasureError(f"{problem} does not fit the memory of {self._device.name}: {error}") from None

    def measure(
        self, problem: AttentionProblem, artifact: Artifact, samples: int, config: Config | None = None
    ) -> Measurement | Failure:
        """Checks the kernel at its first call for ``problem``, then times at least ``samples`` launches.

        ``config`` sizes the kernel's workspace, if it takes one; see :meth:`fa4gen.case.Case.workspace`.

        Raises:
            EngineFault: the kernel broke the CUDA context.
        """
        try:
            report = self._check(problem, artifact, config)
            if not report.ok:
                return Failure(FailureKind.WRONG, report.message)
            with _kernel_errors():
                timing = self._time(problem, self._kernel(artifact), config, samples)
        except _Refused as refusal:
            return Failure(FailureKind.LAUNCH, str(refusal))
        extra = {"relative_error": report.relative_error, "of_limit": max(report.worst, report.worst_lse)}
        return Measurement(timing.samples_us, clock_mhz=timing.clock_mhz, power_w=timing.power_w, extra=extra)

    def verify(
        self, problem: AttentionProblem, artifact: Artifact, kind: str, seed: int, config: Config | None = None
    ) -> AccuracyReport | Failure:
        """Runs the kernel on inputs of ``kind``. ``config``, and EngineFault, as in :meth:`measure`."""
        try:
            return self._case(problem, kind, seed, 1).verify(self._kernel(artifact), config, self._device.sm_count)
        except _Refused as refusal:
            return Failure(FailureKind.LAUNCH, str(refusal))

    def _kernel(self, artifact: Artifact) -> Callable[..., Any]:
        if artifact.path not in self._kernels:
            with _kernel_errors():
                self._kernels[artifact.path] = load_kernel(artifact)
        return self._kernels[artifact.path]

    def _timed_case(self, problem: AttentionProblem) -> _Cases:
        return self._case(problem, "normal", 0, 3 if problem.hbm_bytes < ROTATE_BYTES else 1)

    def _ragged_cases(self, problem: AttentionProblem) -> list[_Cases]:
        """Small problems of lengths no tile divides, for the same kernel: the artifact serves every length."""
        ragged = dataclasses.replace(
            problem, batch=2, heads=2 * problem.gqa_ratio, heads_kv=2, seqlen_q=333, seqlen_k=517
        )
        return [self._case(ragged, kind, 0, 1) for kind in ("normal", "peaked")]

    def _check(self, problem: AttentionProblem, artifact: Artifact, config: Config | None) -> AccuracyReport:
        """The first report that is not ok, or that of ``problem`` itself."""
        key = (artifact.path, problem)
        if key not in self._reports:
            kernel, num_sms = self._kernel(artifact), self._device.sm_count
            for case in (*self._ragged_cases(problem), self._timed_case(problem)):
                report = self._reports[key] = case.verify(kernel, config, num_sms)
                if not report.ok:
                    self._reports[key] = dataclasses.replace(report, message=f"{case.problem}: {report.message}")
                    break
        return self._reports[key]

    def _time(
        self, problem: AttentionProblem, kernel: Callable[..., Any], config: Config | None, samples: int
    ) -> Timing:
        case = self._timed_case(problem)
        warm = self._timer.time(case.launches(kernel, config, self._device.sm_count, 3))
        wanted = BUDGET_US / np.median(warm.samples_us)
        count = int(np.clip(wanted, samples, MAX_FACTOR * samples))
        return self._timer.time(case.launches(kernel, config, self._device.sm_count, count))


@contextmanager
def _kernel_errors() -> Iterator[None]:
    """Waits for what the block launched; whatever a kernel's load or launch raised becomes _Refused or EngineFault."""
    try:
        yield
        torch.cuda.synchronize()
    except Exception as error:  # tvm-ffi, the DSL, CUDA and the linker raise what they like
        text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        raise (_Refused(text) if _context_is_sound() else EngineFault(text)) from error


def _context_is_sound() -> bool:
    """Whether CUDA still works. The first attempt may report, and so clear, the error of a refused launch."""
    for _ in range(2):
        try:
            torch.zeros(1, device="cuda").item()
            return True
        except RuntimeError:
            continue
    return False


class CudaMeasurer(Measurer):
    """Times variants on CUDA device ``device_index`` in a worker process; this process never initialises CUDA.

    A measurement that takes longer than ``timeout_s`` is taken for a hang: the worker is killed, and the next call
    starts a new one. ``engine`` names the class that the worker runs.
    """

    name = "cuda"

    def __init__(
        self, device_index: int = 0, timeout_s: float = 30.0, engine: str = "fa4gen.measure.cuda:CudaEngine"
    ) -> None:
        self._worker = Worker(engine, device_index)
        self._timeout_s = timeout_s

    @functools.cached_property
    def device(self) -> Device:
        """The device.

        Raises:
            NoDeviceError: there is none that fa4gen can use.
            MeasureError: the worker process does not start.
        """
        device: Device = self._call("describe", timeout_s=PREPARE_TIMEOUT_S)
        return device

    def measure(
        self, problem: AttentionProblem, variant: Variant, artifact: Artifact | None, *, samples: int = 20
    ) -> Measurement | Failure:
        """Accuracy at the first call for an artifact and problem, then times: see :class:`Measurer`.

        Raises:
            NoDeviceError, MeasureError: nothing can be measured here, whatever the variant.
        """
        if artifact is None:
            raise MeasureError(f"{variant.name} has no artifact: measuring on a device needs one")
        self._call("prepare", problem, timeout_s=PREPARE_TIMEOUT_S)
        return self._try("measure", problem, artifact, samples, variant.config)

    def verify(
        self,
        problem: AttentionProblem,
        artifact: Artifact,
        kind: str = "normal",
        seed: int = 0,
        config: Config | None = None,
    ) -> AccuracyReport | Failure:
        """Runs the kernel on a :class:`fa4gen.case.Case` of ``kind`` and checks all it returns; one that must be
        deterministic twice. ``config``: the variant's, without which a backward kernel cannot be run."""
        return self._try("verify", problem, artifact, kind, seed, config)

    def close(self) -> None:
        self._worker.close()

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """For calls that run no variant: their failure is nobody's fault but the machine's."""
        try:
            return self._worker.call(method, *arguments, timeout_s=timeout_s)
        except (WorkerDied, WorkerHung) as error:
            raise MeasureError(f"the measuring process failed to {method}: {error}") from None

    def _try(self, method: str, *arguments: Any) -> Any:
        try:
            return self._worker.call(method, *arguments, timeout_s=self._timeout_s)
        except WorkerHung as hung:
            return Failure(FailureKind.TIMEOUT, f"{hung}: the kernel hangs")
        except WorkerDied as died:
            return Failure(FailureKind.CRASHED, str(died))
