"""Online softmax where a thread owns a whole row of S, as tcgen05 leaves it in TMEM. sm_100 and later."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa4gen.blocks.exp2 import exp2_mufu, exp2_polynomial_pair
from fa4gen.blocks.ptx import convert_packed
from fa4gen.blocks.softmax import LN2
from fa4gen.blocks.tcgen05 import load_row, store_row, wait

# Independent chains of the row's reductions: the latency of one would show.
_CHAINS = 4
# Columns of S, and of O, that a thread reads from TMEM at once. The correction warpgroup has few registers.
_CHUNK = 32
OUTPUT_CHUNK = 16


@cute.jit
def mask_row(scores: cute.Tensor, limit: Int32):
    """Minus infinity for the columns from ``limit`` on. ``scores``: fp32 registers (n,)."""
    for j in cutlass.range(cute.size(scores), unroll_full=True):
        scores[j] = scores[j] if j < limit else -Float32.inf


@cute.jit
def maximum_of(scores: cute.Tensor) -> Float32:
    """Maximum of ``scores``, fp32 registers (n,), n a multiple of 16. Nested pairs become three-input FMNMX3."""
    maxima = [scores[c] for c in range(_CHAINS)]
    for j in cutlass.range_constexpr(_CHAINS, cute.size(scores) - _CHAINS, 2 * _CHAINS):
        for c in cutlass.range_constexpr(_CHAINS):
            maxima[c] = cute.arch.fmax(cute.arch.fmax(maxima[c], scores[j + c]), scores[j + _CHAINS + c])
    last = cute.size(scores) - _CHAINS
    for c in cutlass.range_constexpr(_CHAINS):
        maxima[c] = cute.arch.fmax(maxima[c], scores[last + c])
    return cute.arch.fmax(cute.arch.fmax(maxima[0], maxima[1]), cute.arch.fmax(maxima[2], maxima[3]))


@cute.jit
def load_scores(base: cute.Pointer, column: Int32, scores: cute.Tensor, limit, row: Int32):
    """``scores``, fp32 registers (n,), = this thread's row of S from TMEM column ``column`` on.

    Minus infinity from column ``limit`` on, counted from the first; ``limit`` None: no column is masked.
    """
    for first in cutlass.range_constexpr(0, cute.size(scores), _CHUNK):
        size = const_expr(min(_CHUNK, cute.size(scores) - first))
        load_row(base, column + first, cute.make_tensor(scores.iterator + first, cute.make_layout(size)), row)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(limit is not None):
        mask_row(scores, limit)


@cute.jit
def maximum_in_tmem(base: cute.Pointer, column: Int32, columns: cutlass.Constexpr[int], limit, row: Int32):
    """Maximum of this thread's row of S, which stays in TMEM. ``limit`` as for :func:`load_scores`."""
    maximum = -Float32.inf
    for first in cutlass.range_constexpr(0, columns, _CHUNK):
        scores = cute.make_rmem_tensor((min(_CHUNK, columns - first),), Float32)
        load_scores(base, column + first, scores, None if const_expr(limit is None) else limit - first, row)
        maximum = cute.arch.fmax(maximum, maximum_of(scores))
    return maximum


@cute.jit
def total(sums: cute.Tensor) -> Float32:
    """Sum of the eight partial sums of :func:`exponentiate_and_store`."""
    pairs = [(sums[2 * c], sums[2 * c + 1]) for c in range(_CHAINS)]
    low = cute.arch.add_packed_f32x2(pairs[0], pairs[1])
    low, high = cute.arch.add_packed_f32x2(low, cute.arch.add_packed_f32x2(pairs[2], pairs[3]))
    return low + high


@cute.jit
def update_maximum(
    maximum: Float32,
    row_max: cute.Tensor,
    factor: cute.Tensor,
    scale_log2: Float32,
    may_be_masked: cutlass.Constexpr[bool],
    rescale_threshold: cutlass.Constexpr[object],
):
    """Takes ``maximum``, of a row of unscaled S, into ``row_max``; what was accumulated before is to be multiplied by
    ``factor``. Both (1,) fp32 registers; ``row_max`` starts at minus infinity.

    With a ``rescale_threshold`` in log2 units the old maximum stays, and the factor is 1, until the new one exceeds it
    by more (FlashAttention-4, section 3.1).
    """
    old = row_max[0]
    maximum = cute.arch.fmax(old, maximum)
    if const_expr(rescale_threshold is None):
        factor[0] = exp2_mufu((old - finite(maximum, may_be_masked)) * scale_log2)
    else:
        # False for the NaN of a row that still has not seen a key: nothing to rescale.
        grew = (maximum - old) * scale_log2 > rescale_threshold
        factor[0] = exp2_mufu((old - maximum) * scale_log2) if grew else Float32(1.0)
        maximum = maximum if grew else old
    row_max[0] = maximum


@cute.jit
def finite(maximum: Float32, may_be_masked: cutlass.Constexpr[bool]) -> Float32:
    """0 for the maximum of a fully masked row, so that 2^(-inf - 0) = 0 and not NaN."""
    if const_expr(may_be_masked):
        maximum = Float32(0.0) if maximum == -Float32.inf else maximum
    return maximum


def polynomial_pairs(columns: int, fraction: float, start: float) -> frozenset[int]:
    """Which of a row's ``columns`` / 2 pairs the polynomial computes: ``fraction`` of all, evenly spread over those
    that lie past the share ``start`` of the row."""
    pairs = columns // 2
    first = min(round(pairs * start), pairs - 1)
    count, room = round(pairs * fraction), pairs - first
    return frozenset(first + j for j in range(room) if (j + 1) * count // room > j * count // room)


@cute.jit
def exponentiate_and_store(
    scores: cute.Tensor,
    sums: cute.Tensor,
    first: cutlass.Constexpr[int],
    scale_log2: Float32,
    offset: Float32,
    emulated: cutlass.Constexpr[frozenset],
    degree: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr[type],
    base: cute.Pointer,
    column: Int32,
    row: Int32,
):
    """p[j] = 2^(scores[j] · scale_log2 - offset), rounded to ``dtype`` and packed in pairs, goes to this thread's row
    of P, which starts at TMEM column ``column``. Complete after ``fence_view_async_tmem_store``.

    ``scores``: fp32 registers (n,), n a multiple of 16, of the row's columns from ``first`` on; overwritten. ``sums``:
    (8,) partial sums of p, set where ``first`` is 0, else added to. The row's pairs in ``emulated`` are computed by the
    polynomial of ``degree``, the others by MUFU.
    """
    scale = (scale_log2, scale_log2)
    minus_offset = (-offset, -offset)
    for chunk in cutlass.range_constexpr(0, cute.size(scores), _CHUNK):
        size = const_expr(min(_CHUNK, cute.size(scores) - chunk))
        for j in cutlass.range_constexpr(chunk, chunk + size, 2):
            x = cute.arch.fma_packed_f32x2((scores[j], scores[j + 1]), scale, minus_offset)
            if const_expr((first + j) // 2 in emulated):
                p = exp2_polynomial_pair(x[0], x[1], degree)
            else:
                p = (exp2_mufu(x[0]), exp2_mufu(x[1]))
            scores[j], scores[j + 1] = p
            s = const_expr(j % (2 * _CHAINS))
            if const_expr(first + j >= 2 * _CHAINS):
                p = cute.arch.add_packed_f32x2((sums[s], sums[s + 1]), p)
            sums[s], sums[s + 1] = p
        rounded = cute.make_rmem_tensor((size,), dtype)
        convert_packed(cute.make_tensor(scores.iterator + chunk, cute.make_layout(size)), rounded)
        store_row(base, column + (first + chunk) // 2, cute.recast_tensor(rounded, Float32), row)


@cute.jit
def reload_exponentiate_and_store(
    first: cutlass.Constexpr[int],
    last: cutlass.Constexpr[int],
    limit,
    sums: cute.Tensor,
    scale_log2: Float32,
    offset: Float32,
    emulated: cutlass.Constexpr[frozenset],
    degree: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr[type],
    base: cute.Pointer,
    column: Int32,
    row: Int32,
):
    """The same for columns [first, last) of S, read from TMEM a chunk at a time. P's columns trail those of S that were
    read, so they may lie in one place. ``limit`` as for :func:`load_scores`, counted from column 0."""
    for chunk in cutlass.range_constexpr(first, last, _CHUNK):
        scores = cute.make_rmem_tensor((min(_CHUNK, last - chunk),), Float32)
        load_scores(base, column + chunk, scores, None if const_expr(limit is None) else limit - chunk, row)
        exponentiate_and_store(
            scores, sums, chunk, scale_log2, offset, emulated, degree, dtype, base, column, row
        )  # fmt: skip


@cute.jit
def rescale_output(
    base: cute.Pointer,
    column: Int32,
    columns: cutlass.Constexpr[int],
    factor: Float32,
    row: Int32,
    conditional: cutlass.Constexpr[bool],
    barrier=None,
    phase=None,
):
    """Multiplies this thread's row of O, ``columns`` wide in TMEM, by ``factor``. On return it is in TMEM.

    With ``conditional`` only if some row of the warp has a factor other than 1. ``barrier`` and ``phase``: to be waited
    for before O is touched.
    """
    if const_expr(conditional):
        if cute.arch.vote_any_sync(factor != 1.0):
            _rescale(base, column, columns, factor, row, barrier, phase)
    else:
        _rescale(base, column, columns, factor, row, barrier, phase)


@cute.jit
def _rescale(base, column, columns: cutlass.Constexpr[int], factor, row, barrier, phase):
    if const_expr(barrier is not None):
        wait(barrier, phase)
    width = OUTPUT_CHUNK
    for c in cutlass.range_constexpr(0, columns, width):
        values = cute.make_rmem_tensor((width,), Float32)
        load_scaled(base, column + c, values, factor, row)
        store_row(base, column + c, values, row)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def load_scaled(base: cute.Pointer, column: Int32, values: cute.Tensor, factor: Float32, row: Int32):
    """``values``, fp32 registers (n,), = this thread's row from TMEM column ``column`` on, times ``factor``."""
    load_row(base, column, values, row)
    cute.arch.fence_view_async_tmem_load()
    for j in cutlass.range_constexpr(0, cute.size(values), 2):
        pair = cute.arch.mul_packed_f32x2((values[j], values[j + 1]), (factor, factor))
        values[j], values[j + 1] = pair


@cute.jit
def log_sum_exp(row_max: Float32, row_sum: Float32, scale_log2: Float32) -> Float32:
    """Natural log of the row's sum of exponentials; minus infinity for a row that saw no key."""
    log2_total = row_max * scale_log2 + cute.math.log2(row_sum, fastmath=True)
    return -Float32.inf if row_sum == 0.0 else log2_total * LN2


@cute.jit
def inverse(row_sum: Float32) -> Float32:
    """1 / ``row_sum``; 0 for a row that saw no key."""
    return Float32(0.0) if row_sum == 0.0 else cute.arch.rcp_approx(row_sum)
