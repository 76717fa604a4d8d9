"""Which keys a row may see, and minus infinity for the others."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr


@cute.jit
def key_limit(row: Int32, seqlen_q: Int32, seqlen_k: Int32, causal: cutlass.Constexpr[bool]) -> Int32:
    """Keys visible to query ``row``: those below the returned index. Causal masks align to the bottom right."""
    limit = seqlen_k
    if const_expr(causal):
        limit = cutlass.min(seqlen_k, row + 1 + seqlen_k - seqlen_q)
    return limit


@cute.jit
def mask_columns(scores: cute.Tensor, row: cutlass.Constexpr[int], limit: Int32):
    """Sets scores[row, c] to minus infinity where its column is at least ``limit``.

    ``scores``: (rows, columns) view of one thread's accumulator; ``limit`` counts from this thread's first column.
    A thread's columns are 8·j and 8·j + 1: constants here, so one compare and one select an element.
    """
    for j in cutlass.range(cute.size(scores, mode=[1]) // 2, unroll_full=True):
        column = 8 * j
        scores[row, 2 * j] = scores[row, 2 * j] if column < limit else -Float32.inf
        scores[row, 2 * j + 1] = scores[row, 2 * j + 1] if column + 1 < limit else -Float32.inf
