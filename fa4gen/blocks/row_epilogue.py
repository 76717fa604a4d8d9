"""O from TMEM to memory where a thread owns a whole row. sm_100 and later."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa4gen.blocks.ptx import convert_packed
from fa4gen.blocks.row_softmax import OUTPUT_CHUNK, load_scaled


@cute.jit
def store_output_smem(base: cute.Pointer, column: Int32, factor: Float32, sO: cute.Tensor, row: Int32):
    """This thread's row of O times ``factor``, rounded, to row ``row`` of ``sO`` (128, columns), ready for TMA."""
    columns = const_expr(cute.size(sO, mode=[1]))
    width = OUTPUT_CHUNK
    for c in cutlass.range_constexpr(0, columns, width):
        rounded = _load_rounded(base, column + c, width, factor, sO.element_type, row)
        for v in cutlass.range_constexpr(0, width, 8):
            target = cute.local_tile(sO, (1, 8), (row, (c + v) // 8))
            cute.autovec_copy(_eight(rounded, v), target)
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def store_output_global(
    base: cute.Pointer, column: Int32, factor: Float32, mO: cute.Tensor, row: Int32, rows: Int32, thread: Int32,
    padded: cutlass.Constexpr[int],
):  # fmt: skip
    """This thread's row of O times ``factor``, rounded, to row ``row`` of ``mO`` (rows, columns) if it is below
    ``rows``. ``padded``: columns in TMEM."""
    columns = const_expr(cute.size(mO, mode=[1]))
    width = OUTPUT_CHUNK
    for c in cutlass.range_constexpr(0, padded, width):
        rounded = _load_rounded(base, column + c, width, factor, mO.element_type, thread)
        if row < rows:
            for v in cutlass.range_constexpr(0, min(width, columns - c), 8):
                target = cute.local_tile(mO, (1, 8), (row, (c + v) // 8))
                cute.autovec_copy(_eight(rounded, v), target)


@cute.jit
def _load_rounded(
    base: cute.Pointer, column: Int32, width: cutlass.Constexpr[int], factor: Float32, dtype: cutlass.Constexpr[type],
    thread: Int32,
):  # fmt: skip
    values = cute.make_rmem_tensor((width,), Float32)
    load_scaled(base, column, values, factor, thread)
    rounded = cute.make_rmem_tensor((width,), dtype)
    convert_packed(values, rounded)
    return rounded


def _eight(values: cute.Tensor, first: int) -> cute.Tensor:
    """16 bytes of registers, shaped as a row's slice."""
    return cute.make_tensor(values.iterator + first, cute.make_layout((1, 8), stride=(0, 1)))
