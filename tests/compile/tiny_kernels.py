"""Small CuTe DSL modules that honour the contract of a rendered kernel, each with one property to look for."""

from __future__ import annotations

from fa4gen.artifact_cache import KernelSource

_STREAM = """
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

NAME = "{name}"
VALUES, THREADS, SMEM_BYTES = {values}, {threads}, {smem_bytes}


@cute.kernel
def kernel(mX: cute.Tensor, mY: cute.Tensor, scale: Float32):
    thread, _, _ = cute.arch.thread_idx()
    memory.SmemAllocator().allocate(SMEM_BYTES)
    values = cute.make_rmem_tensor((VALUES,), Float32)
    for i in cutlass.range_constexpr(VALUES):
        values[i] = mX[thread, i] * scale
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(VALUES):
        mY[thread, i] = cute.math.exp2(values[i], fastmath=True) + values[VALUES - 1 - i]


@cute.jit
def entry(mX: cute.Tensor, mY: cute.Tensor, scale: Float32, stream):
    kernel(mX, mY, scale).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


def fake_arguments():
    rows = cute.sym_int()
    tensors = [make_fake_tensor(Float32, (rows, VALUES), (cute.sym_int64(), 1), assumed_align=4) for _ in range(2)]
    return (*tensors, Float32(0), make_fake_stream(use_tvm_ffi_env_stream=True))
"""

_WGMMA = """
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

NAME = "two_accumulators"
N = 256


@cute.kernel
def kernel(mO: cute.Tensor, mma: cute.TiledMma, layout: cute.ComposedLayout):
    thread, _, _ = cute.arch.thread_idx()
    sB = memory.SmemAllocator().allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    sA = cute.local_tile(sB, (64, 64), (0, 0))
    part = mma.get_slice(thread)
    rA, rB = mma.make_fragment_A(part.partition_A(sA)), mma.make_fragment_B(part.partition_B(sB))
    first = cute.make_rmem_tensor(mma.partition_shape_C((64, N)), Float32)
    second = cute.make_rmem_tensor(mma.partition_shape_C((64, N)), Float32)
    first.fill(0.0)
    second.fill(0.0)
    warpgroup.fence()
    for _ in cutlass.range(4, unroll=1):
        cute.gemm(mma, first, rA[None, None, 0], rB[None, None, 0], first)
        cute.gemm(mma, second, rA[None, None, 1], rB[None, None, 1], second)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    for i in cutlass.range_constexpr(cute.size(first)):
        mO[thread + 128 * i] = first[i] + second[i]


@cute.jit
def entry(mO: cute.Tensor, stream):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    op = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (64, N, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
    )
    mma = cute.make_tiled_mma(op)
    kernel(mO, mma, cute.tile_to_shape(atom, (N, 64), order=(0, 1))).launch(
        grid=[1, 1, 1], block=[128, 1, 1], stream=stream
    )


def fake_arguments():
    mO = make_fake_tensor(Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return mO, make_fake_stream(use_tvm_ffi_env_stream=True)
"""


def stream_kernel(name: str = "tiny", values: int = 4, threads: int = 128, smem_bytes: int = 2048) -> KernelSource:
    """Holds ``values`` floats a thread across a barrier."""
    text = _STREAM.format(name=name, values=values, threads=threads, smem_bytes=smem_bytes)
    return KernelSource(name, "sm_90a", text)


def spilling_kernel() -> KernelSource:
    """1024 threads leave 64 registers each; 128 values do not fit."""
    return stream_kernel("spilling", values=128, threads=1024)


def serialized_kernel() -> KernelSource:
    """Two WGMMA accumulators in flight, 128 registers a thread each: more than the 255 there are."""
    return KernelSource("two_accumulators", "sm_90a", _WGMMA)
