"""Tile index to (M block, head, batch)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa4gen.blocks.ptx import cancelled_cluster

# K and V of the heads walked together stay under this, so that their M blocks find them in L2. A quarter of the
# smallest L2 served (H100: 50 MB, in two partitions that each hold a copy).
L2_SECTION_BYTES = 16 << 20
RESPONSE_BYTES = 16  # of clusterlaunchcontrol


@cute.jit
def linear_tile(tile: Int32, m_blocks: Int32, heads: Int32, rotated: cutlass.Constexpr[bool] = False):
    """M blocks innermost, then heads, then batches. Returns (m_block, head, batch).

    ``rotated``: each head starts one M block later than the one before. A persistent CTA would else get the same M
    block of every head when the grid is a multiple of their number, and some CTAs only the short last ones.
    """
    row = tile // m_blocks
    batch = row // heads
    m_block = tile - row * m_blocks
    if const_expr(rotated):
        m_block = (m_block + row) % m_blocks
    return m_block, row - batch * heads, batch


@cute.jit
def paired_tile(tile: Int32, m_blocks: Int32, heads: Int32):
    """Tiles 2·i and 2·i + 1 are the i-th last and the i-th M block of a head. Returns (m_block, head, batch).

    Under a causal mask all pairs see about as many keys, so that CTAs which take turns have equal work. Numbers go up
    to heads · batches · ceil(m_blocks / 2) · 2: the middle one of an odd number has no partner.
    """
    pairs = (m_blocks + 1) // 2
    row = tile // 2 // pairs
    depth = tile // 2 - row * pairs
    batch = row // heads
    m_block = m_blocks - 1 - depth if tile % 2 == 0 else depth
    return m_block, row - batch * heads, batch


@cute.jit
def next_paired_tile(tile: Int32, m_blocks: Int32, grid: Int32) -> Int32:
    """A persistent CTA's next tile: the other one of the pair, then the pair ``grid`` further."""
    depth = tile // 2 % ((m_blocks + 1) // 2)
    alone = 2 * depth == m_blocks - 1
    return tile + 1 if tile % 2 == 0 and not alone else tile - tile % 2 + 2 * grid


@cute.jit
def request_tile(full: cute.Pointer, response: cute.Pointer, issue, multicast: cutlass.Constexpr[bool]):
    """Asks for a cluster of the grid that has not started; ``full`` signals that the answer is in ``response``.

    A warp calls it in every CTA of the cluster; the one where ``issue`` asks, for all of them if ``multicast``. Asking
    again after the answer was no is undefined.
    """
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, RESPONSE_BYTES)
        if issue:
            cute.arch.issue_clc_query(full, response, multicast)


@cute.jit
def granted_tile(
    full: cute.Pointer,
    phase: Int32,
    response: cute.Pointer,
    read: cute.Pointer,
    ctas: cutlass.Constexpr[int],
) -> Int32:
    """The tile, a cluster of ``ctas`` CTAs each, that a request was answered with; -1 when there are no more.

    A warp calls it and arrives at ``read``, of the cluster's first CTA, when the next answer may come.
    """
    cute.arch.mbarrier_wait(full, phase)
    first_cta = cancelled_cluster(response.toint())
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(read, 0 if const_expr(ctas > 1) else None)
    return first_cta // ctas


@cute.jit
def longest_first_tile(tile: Int32, m_blocks: Int32, heads: Int32, batches: Int32, section: Int32):
    """Heads in sections of ``section``; within one, M blocks from the last, which sees most keys, to the first.

    Returns (m_block, head, batch). Longest-processing-time-first keeps the last wave short under a causal mask.
    """
    index = tile // (section * m_blocks)
    within = tile - index * (section * m_blocks)
    heads_here = cutlass.min(section, heads * batches - index * section)
    depth = within // heads_here
    row = index * section + within - depth * heads_here
    batch = row // heads
    return m_blocks - 1 - depth, row - batch * heads, batch


@cute.jit
def section_heads(
    seqlen_k: Int32, bytes_per_key: cutlass.Constexpr[int], heads_per_kv: cutlass.Constexpr[int]
) -> Int32:
    """Heads whose K and V fit ``L2_SECTION_BYTES``: at least one K/V head with all its query heads."""
    return cutlass.max(Int32(L2_SECTION_BYTES // bytes_per_key) // seqlen_k, Int32(1)) * heads_per_kv
