"""What comes before and after the backward's main kernel, on any architecture: row statistics and zeros; dQ's cast.

The workspace, 1-D fp32, holds four arrays one after the other; rows are those of Q rounded up to whole M tiles:

- the sum of dQ, (batch, heads, rows, columns), columns the head dim as tiles hold it;
- -LSE · log2(e), (batch, heads, rows): minus infinity for rows that see no key and those beyond the sequence, so that
  P = 2^(S · scale · log2(e) + this) is 0 there;
- Δ = rowsum(dO ∘ O), (batch, heads, rows);
- if dQ is summed in a fixed order: one Int32 for each M tile, (batch, heads, tiles), 0 at first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa4gen.blocks.logarithms import LOG2_E
from fa4gen.blocks.ptx import convert_packed

# Of the kernels in this file.
PREPOST_THREADS = 128
# Elements of a 16-byte vector of a 16-bit type.
_VECTOR = 8


def workspace_views(workspace: cute.Tensor, rows: Int32, columns: int, heads: Int32, batches: Int32, tile_m: int):
    """(sum of dQ (rows, columns, heads, batches), -LSE·log2(e) (rows, heads, batches), Δ likewise, Int32 semaphores
    (rows / tile_m, heads, batches)) in ``workspace``; the last is there only if the workspace was made to hold it."""
    per_head = Int64(rows)
    per_batch = per_head * heads
    statistics = cute.make_layout((rows, heads, batches), stride=(1, per_head, per_batch))
    total = cute.make_layout(
        (rows, columns, heads, batches), stride=(columns, 1, per_head * columns, per_batch * columns)
    )
    start = workspace.iterator
    after_total = _aligned(start + per_batch * batches * columns)
    after_lse = _aligned(after_total + per_batch * batches)
    tiles = rows // tile_m
    semaphores = cute.make_layout((tiles, heads, batches), stride=(1, tiles, tiles * heads))
    return (
        cute.make_tensor(start, total),
        cute.make_tensor(after_total, statistics),
        cute.make_tensor(after_lse, statistics),
        cute.make_tensor(cute.recast_ptr(after_lse + per_batch * batches, dtype=Int32), semaphores),
    )


def _aligned(pointer: cute.Pointer) -> cute.Pointer:
    return cute.make_ptr(pointer.dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)


@cute.kernel
def preprocess(
    mO: cute.Tensor,
    mDO: cute.Tensor,
    mLSE: cute.Tensor,
    total: cute.Tensor,
    minus_lse: cute.Tensor,
    delta: cute.Tensor,
    semaphores: cute.Tensor,
    tile_m: cutlass.Constexpr[int],
    deterministic: cutlass.Constexpr[bool],
):
    """Fills the workspace, an M tile a CTA; grid (tiles, heads, batches), ``PREPOST_THREADS`` threads.

    ``mO``, ``mDO`` (seqlen, columns, heads, batches) in a 16-bit type; ``mLSE`` (seqlen, heads, batches), natural log;
    the rest as :func:`workspace_views` returns it.
    """
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = cute.arch.block_idx()
    first = tile * tile_m
    columns = const_expr(cute.size(mO, mode=[1]))
    lanes = const_expr(1 << (columns // _VECTOR - 1).bit_length())
    _row_products(
        mO[None, None, head, batch],
        mDO[None, None, head, batch],
        delta[None, head, batch],
        first,
        tile_m,
        columns,
        lanes,
        thread,
    )
    seqlen = mO.shape[0]
    for i in cutlass.range_constexpr(0, tile_m, PREPOST_THREADS):
        row = first + i + thread
        if i + thread < tile_m:
            lse = -Float32.inf
            if row < seqlen:
                lse = mLSE[row, head, batch]
            minus_lse[row, head, batch] = -Float32.inf if lse == -Float32.inf else -lse * LOG2_E
    zeros = cute.make_rmem_tensor((4,), Float32)
    zeros.fill(0.0)
    fours = const_expr(cute.size(total, mode=[1]) // 4)
    for i in cutlass.range(thread, tile_m * fours, PREPOST_THREADS, unroll=4):
        cute.autovec_copy(zeros, _row_part(total[None, None, head, batch], first + i // fours, i % fours * 4, 4))
    if const_expr(deterministic):  # noqa: SIM102 - one is decided at compile time
        if thread == 0:
            semaphores[tile, head, batch] = Int32(0)


@cute.jit
def _row_products(
    mO: cute.Tensor,
    mDO: cute.Tensor,
    delta: cute.Tensor,
    first: Int32,
    tile_m: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
    lanes: cutlass.Constexpr[int],
    thread: Int32,
):
    """delta[row] = sum over columns of dO ∘ O for the tile's rows, 0 beyond the sequence. ``lanes`` share a row."""
    column = thread % lanes * _VECTOR
    for first_of_these in cutlass.range(0, tile_m, PREPOST_THREADS // lanes):
        i = first_of_these + thread // lanes
        row = first + i
        product = Float32(0.0)
        if row < mO.shape[0] and column < columns:
            o = cute.make_rmem_tensor((_VECTOR,), mO.element_type)
            do = cute.make_rmem_tensor((_VECTOR,), mO.element_type)
            cute.autovec_copy(_row_part(mO, row, column, _VECTOR), o)
            cute.autovec_copy(_row_part(mDO, row, column, _VECTOR), do)
            for j in cutlass.range_constexpr(_VECTOR):
                product += Float32(o[j]) * Float32(do[j])
        product = cute.arch.warp_reduction_sum(product, threads_in_group=lanes)
        if column == 0 and i < tile_m:
            delta[row] = product


@cute.kernel
def postprocess(total: cute.Tensor, mDQ: cute.Tensor, scale: Float32, tile_m: cutlass.Constexpr[int]):
    """dQ = ``total`` times ``scale``, rounded; grid and threads as for :func:`preprocess`.

    ``mDQ`` (seqlen, columns, heads, batches) in a 16-bit type; ``total`` may have more columns.
    """
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = cute.arch.block_idx()
    vectors = const_expr(cute.size(mDQ, mode=[1]) // _VECTOR)
    for i in cutlass.range(thread, tile_m * vectors, PREPOST_THREADS, unroll=2):
        row = tile * tile_m + i // vectors
        column = i % vectors * _VECTOR
        if row < mDQ.shape[0]:
            values = cute.make_rmem_tensor((_VECTOR,), Float32)
            rounded = cute.make_rmem_tensor((_VECTOR,), mDQ.element_type)
            cute.autovec_copy(_row_part(total[None, None, head, batch], row, column, _VECTOR), values)
            for j in cutlass.range_constexpr(_VECTOR):
                values[j] = values[j] * scale
            convert_packed(values, rounded)
            cute.autovec_copy(rounded, _row_part(mDQ[None, None, head, batch], row, column, _VECTOR))


def _row_part(t: cute.Tensor, row: Int32, column: Int32, size: int) -> cute.Tensor:
    """``size`` elements of row ``row`` from ``column`` on, which is a multiple of it."""
    return cute.local_tile(t, (1, size), (row, column // size))[0, None]
