"""The kernel before the backward's main one: Δ, LSE in log2 units, zeroed accumulators. Any architecture."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa4gen.blocks.logarithms import LOG2_E

PREPROCESS_THREADS = 256


@cute.kernel
def prepare(
    mO: cute.Tensor,
    mdO: cute.Tensor,
    mLSE: cute.Tensor,
    dq_accum: cute.Pointer,
    lse_log2: cute.Pointer,
    delta: cute.Pointer,
    semaphores: cute.Pointer,
    m_blocks: Int32,
    tile_m: cutlass.Constexpr[int],
    dq_elements: cutlass.Constexpr[int],
    semaphores_per_tile: cutlass.Constexpr[int],
):
    """One CTA a tile of ``tile_m`` queries, grid (m_blocks, heads, batches).

    mO, mdO (b, sq, h, dv), mLSE (b, h, sq) natural log. Tile ``row`` = (batch·heads + head)·m_blocks + m_block of the
    workspace gets: ``dq_elements`` zeros at ``dq_accum``; LSE·log2(e) and Δ = rowsum(O ∘ dO), ``tile_m`` each; and
    ``semaphores_per_tile`` Int32 zeros, with one more after the last tile's. Rows that saw no key or do not exist get
    LSE = infinity, so that P = 0.
    """
    thread, _, _ = cute.arch.thread_idx()
    m_block, head, batch = cute.arch.block_idx()
    _, heads, batches = cute.arch.grid_dim()
    tile = (batch * heads + head) * m_blocks + m_block
    seqlen_q = mO.shape[1]
    zero_accumulator(dq_accum + Int64(tile) * dq_elements, thread, dq_elements)
    if const_expr(semaphores_per_tile > 0):
        if thread < semaphores_per_tile:
            store_zero(semaphores + (tile * semaphores_per_tile + thread))
        if thread == 0 and tile == m_blocks * heads * batches - 1:
            store_zero(semaphores + (tile + 1) * semaphores_per_tile)

    lanes = const_expr(_lanes_per_row(mO.shape[3]))
    rows = const_expr(PREPROCESS_THREADS // lanes)
    passes = const_expr(-(-tile_m // rows))
    lane = thread % lanes
    o = cute.make_rmem_tensor((8, passes), mO.element_type)
    do = cute.make_rmem_tensor((8, passes), mO.element_type)
    o.fill(0.0)
    do.fill(0.0)
    for i in cutlass.range_constexpr(passes):
        row = m_block * tile_m + i * rows + thread // lanes
        if row < seqlen_q and lane * 8 < mO.shape[3]:
            cute.autovec_copy(cute.local_tile(mO[batch, row, head, None], (8,), (lane,)), o[None, i])
            cute.autovec_copy(cute.local_tile(mdO[batch, row, head, None], (8,), (lane,)), do[None, i])
    for i in cutlass.range_constexpr(passes):
        total = Float32(0.0)
        for j in cutlass.range_constexpr(8):
            total += o[j, i].to(Float32) * do[j, i].to(Float32)
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        within = i * rows + thread // lanes
        row = m_block * tile_m + within
        if lane == 0 and within < tile_m:
            lse = Float32.inf
            if row < seqlen_q:
                lse = mLSE[batch, head, row]
                lse = Float32.inf if lse == -Float32.inf else lse * LOG2_E
            index = Int64(tile) * tile_m + within
            cute.make_tensor(lse_log2 + index, cute.make_layout(1))[0] = lse
            cute.make_tensor(delta + index, cute.make_layout(1))[0] = total


@cute.jit
def zero_accumulator(target: cute.Pointer, thread: Int32, elements: cutlass.Constexpr[int]):
    """fp32 zeros, 16 bytes a thread at a time; ``elements`` is a multiple of 4 · ``PREPROCESS_THREADS``."""
    tile = cute.make_tensor(target, cute.make_layout((4, elements // 4)))
    zeros = cute.make_rmem_tensor((4,), Float32)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(elements // 4 // PREPROCESS_THREADS):
        cute.autovec_copy(zeros, tile[None, i * PREPROCESS_THREADS + thread])


@cute.jit
def store_zero(target: cute.Pointer):
    """One Int32 zero."""
    cute.make_tensor(target, cute.make_layout(1))[0] = Int32(0)


def _lanes_per_row(head_dim: int) -> int:
    """Lanes that read a row, 8 elements each: a power of two."""
    return 8 if head_dim <= 64 else 16 if head_dim <= 128 else 32
