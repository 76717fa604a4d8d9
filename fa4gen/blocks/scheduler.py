"""Tile index to (M block, head, batch)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

# K and V of the heads walked together stay under this, so that their M blocks find them in L2. A quarter of the
# smallest L2 served (H100: 50 MB, in two partitions that each hold a copy).
L2_SECTION_BYTES = 16 << 20


@cute.jit
def linear_tile(tile: Int32, m_blocks: Int32, heads: Int32):
    """M blocks innermost, then heads, then batches. Returns (m_block, head, batch)."""
    row = tile // m_blocks
    batch = row // heads
    return tile - row * m_blocks, row - batch * heads, batch


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
