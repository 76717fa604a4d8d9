"""What the backward pass asks of tcgen05 beside :mod:`fa4gen.blocks.tcgen05`. One load of a tile serves two MMAs."""

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from fa4gen.blocks.tcgen05 import TILE_ROWS


def make_dq_umma(dtype, head_dim: int) -> cute.TiledMma:
    """dQ (128, head_dim) = dS K, both in shared memory. dS is written a key at a time, so queries are contiguous."""
    op = tcgen05.MmaF16BF16Op(
        dtype, Float32, (TILE_ROWS, head_dim, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM,
        OperandMajorMode.MN, OperandMajorMode.MN,
    )  # fmt: skip
    return cute.make_tiled_mma(op)


def viewed(tile: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
    """The same bytes of shared memory in another layout: a K-major tile as an MN-major operand, or the reverse.

    Both order whole swizzle atoms along the tile's rows first, so element (r, c) of one is (c, r) of the other.
    """
    return cute.make_tensor(cute.recast_ptr(tile.iterator, layout.inner, dtype=tile.element_type), layout.outer)


def staging_layout(rows: int, columns: int, stages: int) -> cute.ComposedLayout:
    """(rows, columns, stages) of fp32, rows of 128 or 64 bytes, swizzled: on its way to a TMA reduction."""
    kind = helpers.get_smem_layout_atom_ab(OperandMajorMode.K, Float32, (rows, columns))
    atom = tcgen05.make_smem_layout_atom(kind, Float32)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))
