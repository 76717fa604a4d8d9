"""What the backward pass asks of tcgen05 beside :mod:`fa4gen.blocks.tcgen05`. One load of a tile serves two MMAs."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from fa4gen.blocks.tcgen05 import TILE_ROWS, cta_group, issue_umma, operand_in_tmem


def make_dq_umma(dtype, head_dim: int, ctas: int = 1) -> cute.TiledMma:
    """dQ (128, head_dim) = dS K, both in shared memory. dS is written a key at a time, so queries are contiguous.

    With ``ctas`` 2 a pair computes the same 128 rows, 64 a CTA, over the keys of both; each holds half of K's columns.
    """
    op = tcgen05.MmaF16BF16Op(
        dtype, Float32, (TILE_ROWS, head_dim, 16), cta_group(ctas), tcgen05.OperandSource.SMEM,
        OperandMajorMode.MN, OperandMajorMode.MN,
    )  # fmt: skip
    return cute.make_tiled_mma(op)


def ds_layout(mma: cute.TiledMma, keys: int, dtype) -> cute.ComposedLayout:
    """The A operand of :func:`make_dq_umma`: (MMA, rows, k, 1) of a CTA's queries and ``keys`` of K."""
    return helpers.make_smem_layout_a(mma, (TILE_ROWS, TILE_ROWS, keys), dtype, 1)


def kt_layout(mma: cute.TiledMma, head_dim: int, keys: int, dtype) -> cute.ComposedLayout:
    """The B operand of :func:`make_dq_umma`: (MMA, rows, k, 1) of a CTA's columns and ``keys`` of K."""
    return helpers.make_smem_layout_b(mma, (TILE_ROWS, head_dim, keys), dtype, 1)


def dq_accumulator(base: cute.Pointer, column: Int32, mma: cute.TiledMma, head_dim: int) -> cute.Tensor:
    """dQ from TMEM column ``column`` on. Of one CTA (128, head_dim); of a CTA of a pair 64 rows, the left half of the
    columns in lanes 0-63 and the right half in lanes 64-127."""
    return cute.make_tensor(base + column, mma.make_fragment_C(mma.partition_shape_C((TILE_ROWS, head_dim))).layout)


def rows_layout(rows: int, columns: int, dtype) -> cute.ComposedLayout:
    """(rows, columns), columns contiguous and swizzled: the bytes of an MN-major operand of as many columns of MN."""
    kind = helpers.get_smem_layout_atom_ab(OperandMajorMode.K, dtype, (rows, columns))
    return cute.tile_to_shape(tcgen05.make_smem_layout_atom(kind, dtype), (rows, columns), order=(0, 1))


@cute.jit
def issue_from_halves(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    base: cute.Pointer,
    column: Int32,
    b: cute.Tensor,
    accumulate: Boolean,
    dtype: cutlass.Constexpr[type],
):
    """Issues acc = a·b, or acc += a·b where ``accumulate``, for a (128, 128) A operand of ``dtype`` in TMEM.

    Its halves lie, packed, where the halves of as many fp32 columns from ``column`` on begin: each was written by the
    warpgroup that had read the fp32 there, while the other one might still be reading its own.
    """
    steps = TILE_ROWS // 32
    for half in cutlass.range_constexpr(2):
        a = operand_in_tmem(base, column + half * TILE_ROWS // 4, mma, TILE_ROWS, dtype)
        issue_umma(mma, acc, a, b, accumulate if half == 0 else True, half * steps, (half + 1) * steps)


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
