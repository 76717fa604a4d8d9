"""Runs the exported object's own host code on this machine, with a CUDA runtime that only records launches.

``__tvm_ffi_<name>`` checks its arguments, builds tensor maps and launch attributes, and calls about a dozen runtime
functions. LLVM's MCJIT loads the object; those functions are ctypes callbacks. CPU tensors pose as CUDA ones.
"""

from __future__ import annotations

import ctypes as ct
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fa4gen.emulator.errors import LaunchError, UnsupportedInstruction
from fa4gen.emulator.parser import Kernel
from fa4gen.emulator.state import Launch

__all__ = ["HostModule", "Tensor"]

FATBIN_MAGIC = 0xBA55ED50
SHARED_PER_CTA = 232448
MAX_SHARED_ATTRIBUTE = 97
CUDA_DEVICE = 2
# Launch attributes: id → meaning; the others are hints, or refused.
COOPERATIVE, CLUSTER, PROGRAMMATIC = 2, 4, 6
HINTS = {PROGRAMMATIC, 8, 11}  # 8 priority, 11 preferred shared memory carve-out

_P, _I, _U = ct.c_void_p, ct.c_int, ct.c_uint


class _DLTensor(ct.Structure):
    _fields_ = (
        ("data", _P), ("device_type", _I), ("device_id", _I), ("ndim", _I), ("code", ct.c_uint8), ("bits", ct.c_uint8),
        ("lanes", ct.c_uint16), ("shape", _P), ("strides", _P), ("byte_offset", ct.c_uint64),
    )  # fmt: skip


class _Any(ct.Structure):
    """TVMFFIAny: types 0 None, 1 int, 3 float, 7 DLTensor*, 71 array object."""

    _fields_ = (("type", _I), ("pad", ct.c_uint32), ("value", ct.c_uint64))


class Tensor:
    """A buffer as the kernel sees it, a torch CPU tensor or numpy array.

    Nothing was written yet in an ``output``, which a kernel must write whole, and in a ``scratch``, which it need not.
    """

    def __init__(self, array: Any, output: bool = False, name: str = "tensor", scratch: bool = False) -> None:
        self.array = array
        self.output = output
        self.scratch = scratch
        self.name = name
        self.shape = tuple(int(n) for n in array.shape)
        if isinstance(array, np.ndarray):
            self.item = array.itemsize
            self.strides = tuple(s // self.item for s in array.strides)
            self.address = array.ctypes.data
            codes = {"i": 0, "u": 1, "f": 2, "b": 6}
            self.code, self.bits = codes[array.dtype.kind], 8 * self.item
        else:
            self.item = array.element_size()
            self.strides = tuple(array.stride())
            self.address = array.data_ptr()
            self.code, self.bits = _torch_code(str(array.dtype)), 8 * self.item

    @property
    def data(self) -> np.ndarray:
        """The bytes from the first to the last element."""
        span = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1
        if 0 in self.shape:
            return np.empty(0, np.uint8)
        return np.ctypeslib.as_array((ct.c_uint8 * (span * self.item)).from_address(self.address))


def _torch_code(dtype: str) -> int:
    name = dtype.removeprefix("torch.")
    codes = {"bfloat16": 4, "bool": 6, "float8_e4m3fn": 10, "float8_e5m2": 12}
    if name in codes:
        return codes[name]
    return {"i": 0, "u": 1, "f": 2}[name[0]]


class HostModule:
    """One exported object, loaded. :meth:`call` runs its entry and hands every launch to ``on_launch``."""

    def __init__(self, path: Path, name: str) -> None:
        import llvmlite.binding as llvm

        _install_runtime()
        target = llvm.Target.from_default_triple().create_target_machine()
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        self.engine.add_object_file(str(path))
        self.engine.finalize_object()
        address = self.engine.get_function_address(f"__tvm_ffi_{name}")
        if not address:
            raise LaunchError(f"{path} exports no __tvm_ffi_{name}")
        self.function = ct.CFUNCTYPE(_I, _P, _P, _I, _P)(address)

    def call(self, arguments: Sequence[Any], kernels: dict[str, Kernel], on_launch: Callable[[Launch], None]) -> None:
        """Calls the entry with :class:`Tensor`, int, float or None arguments, or tuples of the last three.

        Raises:
            LaunchError: the host code refused the arguments; the message is its own.
            EmulatorError: whatever ``on_launch`` raised.
        """
        keep: list[Any] = []
        packed = (_Any * len(arguments))(*(_pack(a, keep) for a in arguments))
        result = _Any()
        _RUNTIME.begin(kernels, on_launch)
        status = self.function(None, ct.addressof(packed), len(arguments), ct.addressof(result))
        if _RUNTIME.failure is not None:
            raise _RUNTIME.failure
        if status:
            raise LaunchError(_RUNTIME.message or f"the host function failed with status {status}")


def _pack(value: Any, keep: list[Any]) -> _Any:
    if value is None:
        return _Any(0, 0, 0)
    if isinstance(value, int):
        return _Any(1, 0, value & (2**64 - 1))
    if isinstance(value, float):
        return _Any(3, 0, struct.unpack("<Q", struct.pack("<d", value))[0])
    if isinstance(value, tuple):
        import tvm_ffi

        array = tvm_ffi.convert(value)
        keep.append(array)
        return _Any(71, 0, array.__chandle__())
    shape = (ct.c_int64 * len(value.shape))(*value.shape)
    strides = (ct.c_int64 * len(value.shape))(*value.strides)
    tensor = _DLTensor(
        value.address,
        CUDA_DEVICE,
        0,
        len(value.shape),
        value.code,
        value.bits,
        1,
        ct.addressof(shape),
        ct.addressof(strides),
        0,
    )
    keep += [shape, strides, tensor]
    return _Any(7, 0, ct.addressof(tensor))


class _Runtime:
    """The CUDA runtime as far as the host code calls it. Handles are small integers."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.kernels: dict[str, Kernel] = {}
        self.on_launch: Callable[[Launch], None] = lambda launch: None
        self.failure: Exception | None = None
        self.message = ""
        self.callbacks: list[Any] = []

    def begin(self, kernels: dict[str, Kernel], on_launch: Callable[[Launch], None]) -> None:
        self.kernels, self.on_launch = kernels, on_launch
        self.failure, self.message = None, ""

    def init_once(self, library: int, init: int, load: int, _error: int) -> int:
        if not _P.from_address(library).value:
            ct.CFUNCTYPE(_I, _P)(init)(library)
            return ct.CFUNCTYPE(_I, _P, _I)(load)(library, 0)
        return 0

    def load_data(self, library: int, code: int, *_options: Any) -> int:
        if ct.c_uint32.from_address(code).value != FATBIN_MAGIC:
            self.message = "the device code is no fat binary"
            return 1
        _P.from_address(library).value = 1
        return 0

    def get_kernel(self, kernel: int, _library: int, name: bytes) -> int:
        # Not from zero: a null handle means failure.
        handle = len(self.names) + 1
        self.names[handle] = name.decode()
        _P.from_address(kernel).value = handle
        return 0

    def kernel_attribute(self, value: int, _attribute: int, _kernel: int, _device: int) -> int:
        _I.from_address(value).value = 0
        return 0

    def device_attribute(self, value: int, attribute: int, _device: int) -> int:
        if attribute != MAX_SHARED_ATTRIBUTE:
            self.message = f"the host code asks for device attribute {attribute}, which is not emulated"
            return 1
        _I.from_address(value).value = SHARED_PER_CTA
        return 0

    def get_device(self, device: int) -> int:
        _I.from_address(device).value = 0
        return 0

    def launch(self, config: int, kernel: int, arguments: int) -> int:
        try:
            self.on_launch(self._read_launch(config, self.names[kernel], arguments))
        except Exception as error:  # noqa: BLE001 - it cannot cross the C frames: call() raises it again
            self.failure = error
            return 1
        return 0

    def _read_launch(self, config: int, name: str, arguments: int) -> Launch:
        sizes = (ct.c_uint32 * 6).from_address(config)
        shared = ct.c_uint64.from_address(config + 0x18).value
        attributes = ct.c_uint64.from_address(config + 0x28).value
        count = ct.c_uint32.from_address(config + 0x30).value
        cluster, cooperative = (1, 1, 1), False
        for index in range(count):
            base = attributes + 72 * index
            kind = ct.c_uint32.from_address(base).value
            value = (ct.c_uint32 * 3).from_address(base + 8)
            if kind == CLUSTER:
                cluster = (value[0], value[1], value[2])
            elif kind == COOPERATIVE:
                cooperative = bool(value[0])
            elif kind not in HINTS and any(value):
                raise UnsupportedInstruction(f"launch attribute {kind} of {name}")
        kernel = self.kernels.get(name)
        if kernel is None:
            raise LaunchError(f"the host code launches {name}, which the PTX does not hold")
        params = np.zeros(max(kernel.param_bytes, 1), np.uint8)
        pointers = (ct.c_uint64 * len(kernel.params)).from_address(arguments)
        for pointer, param in zip(pointers, kernel.params.values(), strict=True):
            params[param.offset : param.offset + param.size] = np.frombuffer(
                ct.string_at(pointer, param.size), np.uint8
            )
        grid, block = (sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5])
        return Launch(name, grid, block, cluster, shared, params, cooperative)

    def cuda_error(self, code: int) -> None:
        self.message = self.message or f"CUDA error {code}"

    def raised(self, kind: bytes, message: bytes) -> None:
        self.message = f"{kind.decode()}: {message.decode()}"

    def raised_parts(self, kind: bytes, parts: Any, count: int) -> None:
        self.raised(kind, b"".join(parts[i] for i in range(count)))


_RUNTIME = _Runtime()


@cache
def _install_runtime() -> None:
    """Makes the runtime's symbols known to LLVM, once a process."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    zero = lambda *_: 0  # noqa: E731
    text = ct.c_char_p
    table: dict[str, tuple[Any, tuple[Any, ...], Callable[..., Any]]] = {
        "cuda_dialect_init_library_once": (_I, (_P, _P, _P, _P), _RUNTIME.init_once),
        "cuda_dialect_unload_library_once": (_I, (_P, _P), zero),
        "_cudaLibraryLoadData": (_I, (_P, _P, _P, _P, _U, _P, _P, _U), _RUNTIME.load_data),
        "_cudaLibraryGetKernel": (_I, (_P, _P, text), _RUNTIME.get_kernel),
        "_cuKernelGetAttribute": (_I, (_P, _I, _P, _I), _RUNTIME.kernel_attribute),
        "_cudaFuncSetAttribute": (_I, (_P, _I, _I), zero),
        "_cudaKernelSetAttributeForDevice": (_I, (_P, _I, _I, _I), zero),
        "_cudaGetDevice": (_I, (_P,), _RUNTIME.get_device),
        "_cudaSetDevice": (_I, (_I,), zero),
        "_cudaDeviceGetAttribute": (_I, (_P, _I, _I), _RUNTIME.device_attribute),
        "_cudaLaunchKernelEx": (_I, (_P, _P, _P), _RUNTIME.launch),
        "CuteDSLRT_TVMFFISetRaisedCudaError": (None, (_I,), _RUNTIME.cuda_error),
        "TVMFFIEnvGetStream": (_P, (_I, _I), lambda *_: None),
        "TVMFFIErrorSetRaisedFromCStr": (None, (text, text), _RUNTIME.raised),
        "TVMFFIErrorSetRaisedFromCStrParts": (None, (text, ct.POINTER(text), _I), _RUNTIME.raised_parts),
    }
    for name, (result, parameters, function) in table.items():
        callback = ct.CFUNCTYPE(result, *parameters)(function)
        _RUNTIME.callbacks.append(callback)
        llvm.add_symbol(name, ct.cast(callback, _P).value)
