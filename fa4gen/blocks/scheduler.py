"""Tile index to (M block, head, batch)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

# K and V of the heads walked together stay under this, so that their M blocks find them in L2. A quarter of the
# smallest L2 served (H100: 50 MB, in two partitions that each hold a copy).
L2_SECTION_BYTES = 16 << 20


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

    Under a causal mask all pairs see about as many keys, so that CTAs which take turns have equal work. Numbers go up to
    heads · batches · ceil(m_blocks / 2) · 2: the middle one of an odd number has no partner.
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
