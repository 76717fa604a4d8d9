"""The element-wise part of the backward pass, on transposed tiles: a WGMMA accumulator of (keys, queries).

A thread's accumulator, seen as (row, column), holds keys g and g + 8 of its warp's 16 and, for every j, queries
8·j + 2·q and 8·j + 2·q + 1 of the tile, with g = lane // 4, q = lane % 4. LSE and Δ belong to columns.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from fa4gen.blocks.exp2 import exp2_mufu, exp2_polynomial
from fa4gen.blocks.ptx import convert_packed, reduce_add_vector


@cute.jit
def column_pairs(values: cute.Tensor, lane: Int32) -> cute.Tensor:
    """One stage of fp32 ``values`` (tile_m,) in shared memory as (2, tile_m / 8): the pairs of this lane's columns."""
    address = values.iterator.toint() + lane % 4 * 8
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=8)
    return cute.make_tensor(pointer, cute.make_layout((2, cute.size(values) // 8), stride=(1, 8)))


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    lse_log2: cute.Tensor,
    scale_log2: Float32,
    poly_fraction: cutlass.Constexpr[float],
    poly_degree: cutlass.Constexpr[int],
):
    """scores = P = 2^(scores · scale_log2 - lse_log2) in place.

    ``scores``: (row, column) view; ``lse_log2``: see :func:`column_pairs`; infinity gives 0. ``poly_fraction`` of the
    elements are computed by the polynomial, evenly spread, the others by MUFU.
    """
    offset = cute.make_rmem_tensor((2,), Float32)
    for j in cutlass.range_constexpr(cute.size(scores, mode=[1]) // 2):
        cute.autovec_copy(lse_log2[None, j], offset)
        for i in cutlass.range_constexpr(4):
            row, column = i // 2, 2 * j + i % 2
            x = scores[row, column] * scale_log2 - offset[i % 2]
            index = 4 * j + i
            if const_expr(math.floor((index + 1) * poly_fraction) > math.floor(index * poly_fraction)):
                scores[row, column] = exp2_polynomial(x, poly_degree)
            else:
                scores[row, column] = exp2_mufu(x)


@cute.jit
def mask_early_columns(p: cute.Tensor, row: cutlass.Constexpr[int], first: Int32):
    """p[row, c] = 0 where its query is before ``first``, which counts from this thread's first column."""
    for j in cutlass.range(cute.size(p, mode=[1]) // 2, unroll_full=True):
        column = 8 * j
        p[row, 2 * j] = p[row, 2 * j] if column >= first else Float32(0.0)
        p[row, 2 * j + 1] = p[row, 2 * j + 1] if column + 1 >= first else Float32(0.0)


@cute.jit
def score_gradient(dp: cute.Tensor, p: cute.Tensor, delta: cute.Tensor):
    """dp = dS = P ∘ (dP - Δ) in place, both (row, column) views, P of any type; ``delta``: see :func:`column_pairs`."""
    pair = cute.make_rmem_tensor((2,), Float32)
    for j in cutlass.range_constexpr(cute.size(p, mode=[1]) // 2):
        cute.autovec_copy(delta[None, j], pair)
        for i in cutlass.range_constexpr(4):
            row, column = i // 2, 2 * j + i % 2
            dp[row, column] = p[row, column].to(Float32) * (dp[row, column] - pair[i % 2])


@cute.jit
def store_registers(
    rounded: cute.Tensor, mma: cute.TiledMma, target: cute.Tensor, thread: Int32, transpose: cutlass.Constexpr[bool]
):
    """Writes one warpgroup's 16-bit (64, n) registers, in accumulator order, to ``target`` in shared memory.

    ``transpose``: ``target`` is (64, n) with mode 0 contiguous. On return each thread's part is visible to the async
    proxy.
    """
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4), target.element_type)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(target))
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def store_scaled(
    acc: cute.Tensor,
    scale: Float32,
    mma: cute.TiledMma,
    target: cute.Tensor,
    thread: Int32,
    transpose: cutlass.Constexpr[bool],
):
    """Rounds one warpgroup's accumulator times ``scale`` and writes it like :func:`store_registers`."""
    for i in cutlass.range(cute.size(acc), unroll_full=True):
        acc[i] = acc[i] * scale
    rounded = cute.make_fragment_like(acc, target.element_type)
    convert_packed(acc, rounded)
    store_registers(rounded, mma, target, thread, transpose)


def transposed(t: cute.Tensor) -> cute.Tensor:
    """The same elements with modes 0 and 1 exchanged."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 0, *range(2, cute.rank(t))]))


@cute.jit
def arrive(barrier: cute.Pointer):
    """This warp, all of it, has arrived: one count."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def _vectors(base: cute.Pointer, elements: int, thread: Int32) -> cute.Tensor:
    """The order in which a warpgroup keeps an fp32 accumulator in memory, private to it: (4, n) of this thread.

    Vectors of 16 bytes; a warp's lie side by side, so that neither shared memory nor global sees conflicts.
    """
    return cute.make_tensor(base + thread * 4, cute.make_layout((4, elements // 512), stride=(1, 512)))


@cute.jit
def store_vectors(acc: cute.Tensor, target: cute.Tensor, thread: Int32):
    """Writes one warpgroup's accumulator to fp32 ``target`` (elements,), see :func:`_vectors`."""
    vectors = _vectors(target.iterator, cute.size(target), thread)
    registers = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        cute.autovec_copy(registers[None, i], vectors[None, i])


@cute.jit
def reduce_vectors(acc: cute.Tensor, target: cute.Pointer, thread: Int32):
    """Adds one warpgroup's accumulator to fp32 in global memory, in the order of :func:`store_vectors`."""
    vectors = _vectors(target, cute.size(acc) * 128, thread)
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        reduce_add_vector(vectors[None, i].iterator, *(acc[4 * i + j] for j in range(4)))


@cute.jit
def load_vectors(source: cute.Pointer, acc: cute.Tensor, thread: Int32):
    """Reads what :func:`store_vectors` wrote."""
    vectors = _vectors(source, cute.size(acc) * 128, thread)
    registers = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        cute.autovec_copy(vectors[None, i], registers[None, i])


@cute.jit
def await_count(semaphore: cute.Pointer, count: Int32):
    """Waits until the Int32 in global memory has reached ``count``. What its writers did before is visible then."""
    while cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu") < count:
        pass
    cute.arch.fence_proxy("async.global")


@cute.jit
def count_up(semaphore: cute.Pointer):
    """One more, after all that this warp did."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.atomic_add(semaphore, Int32(1), sem="release", scope="gpu")
