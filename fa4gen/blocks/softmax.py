"""Online softmax over one warpgroup's accumulator registers; a row lives in the four lanes of a quad."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from fa4gen.blocks.exp2 import exp2_mufu, exp2_polynomial

LN2 = 0.6931471805599453


@cute.jit
def quad_max(x: Float32) -> Float32:
    """Maximum over the four lanes that share a row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """Sum over the four lanes that share a row."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


@cute.jit
def row_maximum(scores: cute.Tensor, row: cutlass.Constexpr[int]) -> Float32:
    """Maximum of one row over all its columns. Two chains: FMNMX latency, not its rate, would bound one."""
    even = scores[row, 0]
    odd = scores[row, 1]
    for j in cutlass.range(1, cute.size(scores, mode=[1]) // 2, unroll_full=True):
        even = cute.arch.fmax(even, scores[row, 2 * j])
        odd = cute.arch.fmax(odd, scores[row, 2 * j + 1])
    return quad_max(cute.arch.fmax(even, odd))


@cute.jit
def exponentiate_row(
    scores: cute.Tensor,
    row: cutlass.Constexpr[int],
    scale_log2: Float32,
    offset: Float32,
    poly_fraction: cutlass.Constexpr[float],
    poly_degree: cutlass.Constexpr[int],
) -> Float32:
    """scores[row, :] = 2^(scores · scale_log2 - offset) in place; returns this thread's sum of them.

    ``poly_fraction`` of the columns are computed by the polynomial, the others by MUFU, evenly spread so that the two
    units overlap.
    """
    total = Float32(0.0)
    if const_expr(poly_fraction == 0.0):
        for c in cutlass.range(cute.size(scores, mode=[1]), unroll_full=True):
            scores[row, c] = exp2_mufu(scores[row, c] * scale_log2 - offset)
            total += scores[row, c]
    else:
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            x = scores[row, c] * scale_log2 - offset
            if const_expr(math.floor((c + 1) * poly_fraction) > math.floor(c * poly_fraction)):
                scores[row, c] = exp2_polynomial(x, poly_degree)
            else:
                scores[row, c] = exp2_mufu(x)
            total += scores[row, c]
    return total


@cute.jit
def softmax_step(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    correction: cute.Tensor,
    scale_log2: Float32,
    first: cutlass.Constexpr[bool],
    may_be_masked: cutlass.Constexpr[bool],
    rescale_threshold: cutlass.Constexpr[object],
    poly_fraction: cutlass.Constexpr[float],
    poly_degree: cutlass.Constexpr[int],
):
    """One K/V step: scores become probabilities relative to the row maximum; sums and corrections are updated.

    ``scores``: (rows, columns) of one thread, unscaled QKᵀ. ``row_max`` (unscaled), ``row_sum`` and ``correction``:
    (rows,) fp32. What was accumulated with the old maximum must be multiplied by ``correction``. With a
    ``rescale_threshold`` in log2 units the old maximum is kept, and the correction is 1, until the new one exceeds
    it by more (FlashAttention-4, section 3.1). ``first``: nothing was accumulated yet.
    """
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        maximum = row_maximum(scores, r)
        if const_expr(not first):
            old = row_max[r]
            maximum = cute.arch.fmax(old, maximum)
            if const_expr(rescale_threshold is None):
                # 2^(-inf) = 0 for a row that saw no key so far; `safe` keeps inf - inf out.
                correction[r] = exp2_mufu((old - _finite(maximum, may_be_masked)) * scale_log2)
            else:
                # False for the NaN of a row that still has not seen a key: nothing to rescale.
                grew = (maximum - old) * scale_log2 > rescale_threshold
                correction[r] = exp2_mufu((old - maximum) * scale_log2) if grew else Float32(1.0)
                maximum = maximum if grew else old
        row_max[r] = maximum
        offset = _finite(maximum, may_be_masked) * scale_log2
        total = exponentiate_row(scores, r, scale_log2, offset, poly_fraction, poly_degree)
        if const_expr(first):
            row_sum[r] = total
        else:
            row_sum[r] = row_sum[r] * correction[r] + total


@cute.jit
def _finite(maximum: Float32, may_be_masked: cutlass.Constexpr[bool]) -> Float32:
    """0 for the maximum of a fully masked row, so that 2^(-inf - 0) = 0 and not NaN."""
    if const_expr(may_be_masked):
        maximum = Float32(0.0) if maximum == -Float32.inf else maximum
    return maximum


@cute.jit
def rescale_rows(acc: cute.Tensor, correction: cute.Tensor, conditional: cutlass.Constexpr[bool]):
    """acc[r, :] *= correction[r]; with ``conditional`` only if some row of the warp has a correction other than 1.

    ``acc``: (rows, columns) of one thread.
    """
    if const_expr(conditional):
        needed = correction[0] != 1.0
        for r in cutlass.range_constexpr(1, cute.size(acc, mode=[0])):
            needed = needed or correction[r] != 1.0
        if cute.arch.vote_any_sync(needed):
            _scale_rows(acc, correction)
    else:
        _scale_rows(acc, correction)


@cute.jit
def _scale_rows(acc: cute.Tensor, factor: cute.Tensor):
    for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
        for c in cutlass.range(cute.size(acc, mode=[1]), unroll_full=True):
            acc[r, c] = acc[r, c] * factor[r]


@cute.jit
def normalize_rows(acc: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, lse: cute.Tensor, scale_log2: Float32):
    """acc[r, :] /= row_sum[r], and lse[r] = natural log of the row's sum of exponentials.

    A row that saw no key gets 0 and minus infinity. ``row_sum`` holds each lane's own share.
    """
    for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
        total = quad_sum(row_sum[r])
        empty = total == 0.0
        inverse = Float32(0.0) if empty else cute.arch.rcp_approx(total)
        log2_total = row_max[r] * scale_log2 + cute.math.log2(total, fastmath=True)
        lse[r] = -Float32.inf if empty else log2_total * LN2
        for c in cutlass.range(cute.size(acc, mode=[1]), unroll_full=True):
            acc[r, c] = acc[r, c] * inverse
