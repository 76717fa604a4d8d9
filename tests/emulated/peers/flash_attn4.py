"""flash-attn-4's own Python interface on CPU tensors: what it compiles is run in the emulator.

Only ``cute.compile`` and the questions about a GPU are replaced: tile choices, host code and kernels are theirs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fa4gen.emulator import CompiledObject, EmulatorReport, Tensor, execute

REPORTS: list[EmulatorReport] = []
OPTIONS: dict[str, Any] = {"schedule": "eager", "check_races": False, "allow_open_stores": True}
_COMPILED: list[Any] = []


def install(arch: str, sm_count: int = 4) -> Any:
    """Prepares the process for ``arch`` ("sm_90a", "sm_100a") and returns ``flash_attn.cute.interface``."""
    os.environ["FLASH_ATTENTION_ARCH"] = arch.rstrip("a")
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(sm_count)
    os.environ["CUTE_DSL_ARCH"] = arch
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (int(arch[3:-2]), int(arch[-2]))  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: type("P", (), {"multi_processor_count": sm_count})  # type: ignore
    import cutlass.cute as cute

    real = cute.compile

    def compile(function: Any, *arguments: Any, options: str = "", **rest: Any) -> Callable[..., None]:
        directory = Path(tempfile.mkdtemp(prefix="fa4gen-peer-"))
        name = f"peer_{len(_COMPILED)}"
        flags = f"{options} --gpu-arch {arch} --keep-ptx --dump-dir {directory}"
        compiled = real(function, *arguments, options=flags, **rest)
        compiled.export_to_c(str(directory / "kernel.o"), function_name=name)
        text = compiled.__ptx__
        program = CompiledObject(directory / "kernel.o", text if isinstance(text, str) else text.decode(), name)
        _COMPILED.append(program)

        def call(*values: Any) -> None:
            REPORTS.append(execute(program, [_wrap(v) for v in values], **OPTIONS))

        return call

    cute.compile = compile
    from cutlass.utils import HardwareInfo

    HardwareInfo.__init__ = lambda self, *_: None  # type: ignore[method-assign]
    HardwareInfo.get_device_multiprocessor_count = lambda self: sm_count
    HardwareInfo.get_max_active_clusters = lambda self, size, *_: sm_count // size
    import flash_attn.cute.interface as interface

    interface.to_cute_tensor = _fake_tensor
    return interface


def _fake_tensor(t: Any, assumed_align: int = 16, leading_dim: int = -1, fully_dynamic: bool = False, **_: Any) -> Any:
    """The compile-time view of a tensor: a CUDA one with dynamic layout."""
    if t is None:
        return None
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    types = {
        torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32,
        torch.int32: cutlass.Int32, torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2,
    }  # fmt: skip
    unit = None if fully_dynamic else leading_dim % t.ndim
    strides = [1 if axis == unit else cute.sym_int64() for axis in range(t.ndim)]
    shape = [cute.sym_int() for _ in range(t.ndim)]
    return make_fake_tensor(types[t.dtype], tuple(shape), tuple(strides), assumed_align=assumed_align)


def _wrap(value: Any) -> Any:
    return Tensor(value.detach()) if isinstance(value, torch.Tensor) else value
