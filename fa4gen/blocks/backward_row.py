"""Backward softmax where a thread owns a key: a row of Sᵀ and of dPᵀ, as tcgen05 leaves them in TMEM. sm_100 and later.

Statistics are of queries, so of columns here: all threads of a warp read the same ones.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa4gen.blocks.exp2 import exp2_mufu, exp2_polynomial_pair
from fa4gen.blocks.ptx import convert_packed
from fa4gen.blocks.tcgen05 import arrive_warp, load_row, store_row

# Columns that a thread reads from TMEM at once.
_PIECE = 32


@cute.jit
def first_visible(
    key: Int32, first_query: Int32, seqlen_q: Int32, seqlen_k: Int32, causal: cutlass.Constexpr[bool]
) -> Int32:
    """Queries from ``first_query`` on that ``key`` is hidden from; more than a tile has beyond the sequence."""
    hidden = Int32(0)
    if const_expr(causal):
        hidden = key + seqlen_q - seqlen_k - first_query
    return hidden if key < seqlen_k else Int32(1 << 20)


@cute.jit
def recompute_probabilities(
    base: cute.Pointer,
    score_column: Int32,
    probability_column: Int32,
    p: cute.Tensor,
    minus_lse: cute.Pointer,
    hidden,
    scale_log2: Float32,
    emulated: cutlass.Constexpr[frozenset],
    degree: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr[type],
    key: Int32,
    other_loads=None,
):
    """p[j] = 2^(S[j] · scale_log2 + minus_lse[j]), and 0 in the first ``hidden`` columns (None: in none of them).

    ``p``: fp32 registers (n,), of this thread's row of Sᵀ from TMEM column ``score_column`` on. Rounded to ``dtype``
    and packed it also goes to TMEM from ``probability_column`` on, complete after ``fence_view_async_tmem_store``.
    ``minus_lse``: n fp32 in shared memory. ``emulated``, ``degree``: the pairs that a polynomial computes.
    ``other_loads``: called when S is in registers, to wait for those who load where P goes.
    """
    columns = const_expr(cute.size(p))
    for first in cutlass.range_constexpr(0, columns, _PIECE):
        load_row(base, score_column + first, _part(p, first), key)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(other_loads is not None):
        other_loads()
    if const_expr(hidden is not None):
        for j in cutlass.range(columns, unroll_full=True):
            p[j] = p[j] if j >= hidden else -Float32.inf
    for first in cutlass.range_constexpr(0, columns, _PIECE):
        for j in cutlass.range_constexpr(first, first + _PIECE, 4):
            offset = _four(minus_lse, j)
            for i in cutlass.range_constexpr(0, 4, 2):
                x = cute.arch.fma_packed_f32x2(
                    (p[j + i], p[j + i + 1]), (scale_log2, scale_log2), (offset[i], offset[i + 1])
                )
                if const_expr((j + i) // 2 in emulated):
                    p[j + i], p[j + i + 1] = exp2_polynomial_pair(x[0], x[1], degree)
                else:
                    p[j + i], p[j + i + 1] = exp2_mufu(x[0]), exp2_mufu(x[1])
        rounded = cute.make_rmem_tensor((_PIECE,), dtype)
        convert_packed(_part(p, first), rounded)
        store_row(base, probability_column + first // 2, cute.recast_tensor(rounded, Float32), key)


@cute.jit
def score_gradients(
    base: cute.Pointer,
    product_column: Int32,
    gradient_column: Int32,
    p: cute.Tensor,
    delta: cute.Pointer,
    gradients: cute.Tensor,
    key: Int32,
):
    """gradients[j] = p[j] · (dP[j] - delta[j]) of this thread's row of dPᵀ from TMEM column ``product_column`` on.

    ``gradients``: 16-bit registers (n,); packed they also go to TMEM from ``gradient_column`` on, complete after
    ``fence_view_async_tmem_store``. ``p``: fp32 registers (n,). ``delta``: n fp32 in shared memory.
    """
    for first in cutlass.range_constexpr(0, cute.size(p), _PIECE):
        product = cute.make_rmem_tensor((_PIECE,), Float32)
        load_row(base, product_column + first, product, key)
        cute.arch.fence_view_async_tmem_load()
        for j in cutlass.range_constexpr(0, _PIECE, 4):
            offset = _four(delta, first + j)
            for i in cutlass.range_constexpr(0, 4, 2):
                x = cute.arch.sub_packed_f32x2((product[j + i], product[j + i + 1]), (offset[i], offset[i + 1]))
                x = cute.arch.mul_packed_f32x2(x, (p[first + j + i], p[first + j + i + 1]))
                product[j + i], product[j + i + 1] = x
        rounded = _part(gradients, first)
        convert_packed(product, rounded)
        store_row(base, gradient_column + first // 2, cute.recast_tensor(rounded, Float32), key)


@cute.jit
def store_gradients(gradients: cute.Tensor, sDS: cute.Tensor, key: Int32):
    """``gradients``, 16-bit registers (n,), to row ``key`` of ``sDS`` (keys, n). Visible to the async proxy."""
    for v in cutlass.range_constexpr(0, cute.size(gradients), 8):
        eight = cute.make_tensor(gradients.iterator + v, cute.make_layout((1, 8), stride=(0, 1)))
        cute.autovec_copy(eight, cute.local_tile(sDS, (1, 8), (key, v // 8)))
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def reduce_rows(
    base: cute.Pointer,
    column: Int32,
    columns: cutlass.Constexpr[int],
    sStage: cute.Tensor,
    tma: cute.CopyAtom,
    staged: cute.Tensor,
    target: cute.Tensor,
    read: cute.Pointer,
    thread: Int32,
    at_once: cutlass.Constexpr[bool],
    rank: cutlass.Constexpr[object] = None,
    semaphore=None,
    turn=None,
):
    """Adds a warp's 32 rows of a (128, columns) accumulator, from TMEM column ``column`` on, to global memory.

    ``sStage`` (32, some columns, stages): the warp's own staging; ``staged`` and ``target``: it and the rows in global
    memory as ``tma`` takes them, mode 1 stage or column tile. One arrival at ``read`` (``rank`` as for
    :func:`arrive_warp`) once the accumulator is in registers: whole rows if ``at_once``, else a stage's columns at a
    time. ``semaphore``, ``turn``: nothing is added before the Int32 in global memory counts ``turn``; it counts one
    more when all is.
    """
    width, stages = const_expr(cute.size(sStage, mode=[1])), const_expr(cute.size(sStage, mode=[2]))
    held = const_expr(columns if at_once else width)
    values = cute.make_rmem_tensor((held,), Float32)
    for c in cutlass.range_constexpr(0, columns, width):
        stage = const_expr(c // width % stages)
        if const_expr(c % held == 0):
            for first in cutlass.range_constexpr(0, held, width):
                load_row(base, column + c + first, _part(values, first, width), thread)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(c + held == columns):
                arrive_warp(read, rank)
        # The reduction that last read this stage.
        cute.arch.cp_async_bulk_wait_group(stages - 1, read=True)
        cute.arch.sync_warp()
        for v in cutlass.range_constexpr(0, width, 4):
            four = cute.make_tensor(values.iterator + (c % held + v), cute.make_layout((1, 4), stride=(0, 1)))
            cute.autovec_copy(four, cute.local_tile(sStage[None, None, stage], (1, 4), (thread % 32, v // 4)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if const_expr(semaphore is not None and c == 0):
            _wait_for(semaphore, turn)
        cute.copy(tma, staged[None, stage], target[None, c // width])
        cute.arch.cp_async_bulk_commit_group()
    if const_expr(semaphore is not None):
        cute.arch.cp_async_bulk_wait_group(0)
        with cute.arch.elect_one():
            cute.arch.atomic_add(semaphore, Int32(1), sem="release", scope="gpu")


@cute.jit
def _wait_for(semaphore: cute.Pointer, count: Int32):
    while cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu") < count:
        pass


@cute.jit
def load_statistics(source: cute.Pointer, target: cute.Pointer, barrier: cute.Pointer, count: cutlass.Constexpr[int]):
    """Starts copying ``count`` fp32 from global to shared memory. Arrives at ``barrier``, which awaits their bytes."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    source, target = _vector(source, count), _vector(target, count)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * 4)
        cute.copy(atom, source, target, mbar_ptr=barrier)


def _part(values: cute.Tensor, first: int, size: int = _PIECE) -> cute.Tensor:
    return cute.make_tensor(values.iterator + first, cute.make_layout(size))


@cute.jit
def _four(pointer: cute.Pointer, first: cutlass.Constexpr[int]) -> cute.Tensor:
    """Registers with the four fp32 from ``first`` on, in one load."""
    values = cute.make_rmem_tensor((4,), Float32)
    cute.autovec_copy(_vector(pointer + first, 4), values)
    return values


def _vector(pointer: cute.Pointer, count: int) -> cute.Tensor:
    """``count`` fp32 from ``pointer`` on, which is aligned to 16 bytes, though its type may not say so."""
    aligned = cute.make_ptr(Float32, pointer.toint(), pointer.memspace, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(count))
