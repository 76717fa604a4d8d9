"""Runs small hand-written kernels: a body between the registers and parameters of a fixed frame."""

from __future__ import annotations

from ast import literal_eval
from typing import Any

import numpy as np

from fa4gen.emulator import KernelReport, Tensor
from fa4gen.emulator.executor import run_launch
from fa4gen.emulator.memory import GlobalMemory, Region
from fa4gen.emulator.parser import parse
from fa4gen.emulator.program import Program
from fa4gen.emulator.state import Launch, Schedule

FRAME = """
.version 9.0
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({params})
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<32>;
    .reg .b16 %h<32>;
    .reg .b32 %r<300>;
    .reg .f32 %f<64>;
    .reg .b64 %rd<64>;
    .reg .b128 %q<4>;
    mov.u32 %r0, %tid.x;
    mov.b32 %r1, smem;
{loads}
{body}
    ret;
}}
"""


def run_ptx(
    body: str,
    *arguments: Any,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    smem: int = 4096,
    schedule: str = "eager",
    seed: int = 0,
    races: bool = False,
    target: str = "sm_90a",
    outputs: tuple[int, ...] = (),
) -> KernelReport:
    """Runs ``body`` in every thread.

    Argument i, an array (its address) or an integer, is in %rd<40 + i>; 128 raw bytes become a tensor map parameter
    whose address is there. %r0 is tid.x and %r1 the dynamic shared memory. ``outputs``: arguments never written yet.
    """
    params, loads, chunks, keep = [], [], [], []
    memory = GlobalMemory()
    for i, argument in enumerate(arguments):
        if isinstance(argument, bytes):
            params.append(f".param .align 64 .b8 p{i}[128]")
            loads += [f"mov.b64 %rd{40 + i}, p{i};", f"cvta.param.u64 %rd{40 + i}, %rd{40 + i};"]
            chunks.append(argument)
            continue
        params.append(f".param .u64 p{i}")
        loads.append(f"ld.param.b64 %rd{40 + i}, [p{i}];")
        value = argument
        if isinstance(argument, np.ndarray):
            tensor = Tensor(argument)
            keep.append(tensor)
            memory.add(Region(f"argument {i}", tensor.data, tensor.address, i in outputs))
            value = tensor.address
        chunks.append(int(value).to_bytes(8, "little"))
    text = FRAME.format(
        target=target, params=", ".join(params), threads=threads, loads="\n".join(loads), body=body
    )  # fmt: skip
    program = Program(parse(text)["kernel"])
    raw = np.zeros(max(program.kernel.param_bytes, 1), np.uint8)
    for chunk, param in zip(chunks, program.kernel.params.values(), strict=True):
        raw[param.offset : param.offset + param.size] = np.frombuffer(chunk, np.uint8)
    launch = Launch("kernel", (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), smem, raw)
    return run_launch(program, launch, memory, Schedule(schedule, seed), races, False, None)


def per_thread(
    body: str, result: str, *arguments: Any, dtype: Any = np.uint32, threads: int = 32, **options: Any
) -> Any:
    """What every thread leaves in register ``result``, (threads,), as ``dtype``. Input arrays are %rd41 and up."""
    item = np.dtype(dtype).itemsize
    out = np.zeros(threads, dtype)
    store = f"""
    mul.wide.u32 %rd1, %r0, {item};
    add.s64 %rd1, %rd40, %rd1;
    st.global.b{8 * item} [%rd1], {result};
    """
    run_ptx(body + store, out, *arguments, threads=threads, **options)
    return out


def cute_layout(text: str) -> np.ndarray:
    """(threads, values) of a CuTe layout of two modes, such as ((4,8),(1,2)):((1,4),(1,32))."""
    shape, stride = (literal_eval(part) for part in text.split(":"))
    modes = []
    for extents, steps in zip(shape, stride, strict=True):
        index = np.zeros(1, np.int64)
        for extent, step in zip(np.atleast_1d(extents).tolist(), np.atleast_1d(steps).tolist(), strict=True):
            index = (np.arange(extent)[:, None] * step + index).ravel()
        modes.append(index)
    return modes[0][:, None] + modes[1]


def tensor_map(array: np.ndarray, box: tuple[int, ...], swizzle: int = 0, element: int | None = None) -> bytes:
    """A tensor map over an array (outermost dimension first), with a box innermost first."""
    element = {"float32": 7, "float16": 6, "int32": 3, "uint16": 10}[array.dtype.name] if element is None else element
    dims, strides = array.shape[::-1], array.strides[::-1]
    rank = len(dims)
    q = [0] * 16
    q[0] = array.ctypes.data
    q[1] = 2 | (rank - 1) << 4 | element << 7 | swizzle << 13 | 1 << 18
    padded = [*(s >> 4 for s in strides[1:]), 0, 0, 0, 0][:4]
    q[1] |= (padded[0] & 0xFFFFFFFF) << 32
    q[2] = padded[1] & 0xFFFFFFFF | (padded[2] & 0xFFFFFFFF) << 32
    q[3] = padded[3] & 0xFFFFFFFF
    extents = [*(d - 1 for d in dims), 0, 0, 0, 0][:5]
    q[4] = extents[0] | extents[1] << 32
    q[5] = extents[2] | extents[3] << 32
    boxes = [*(b - 1 for b in box), 0, 0, 0, 0][:5]
    q[6] = extents[4] | boxes[0] << 56
    q[7] = sum(b << 8 * k for k, b in enumerate(boxes[1:]))
    return b"".join(x.to_bytes(8, "little") for x in q)
