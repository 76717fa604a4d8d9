"""Blackwell tcgen05 MMA and tensor memory: shared-memory layouts, tiled MMAs, issuing one GEMM, rows in TMEM."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from fa4gen.blocks.ptx import tcgen05_fence_after, tcgen05_fence_before

# Rows of one accumulator in a CTA: one a TMEM lane. A CTA pair computes twice as many.
TILE_ROWS = 128
PAIR = 0b11  # both CTAs of a pair, as a multicast mask
# A lane's address is in the upper half of a TMEM address, its column in the lower.
_LANE_STRIDE = 1 << 16


def make_qk_umma(dtype, tile_n: int, ctas: int = 1) -> cute.TiledMma:
    """S (128, tile_n) = Q Kᵀ, both operands in shared memory, S in TMEM.

    With ``ctas`` 2 a pair computes 256 rows: each CTA holds its 128 rows of Q and S, and half of the rows of K.
    """
    return _make_mma(dtype, tile_n, tcgen05.OperandSource.SMEM, OperandMajorMode.K, ctas)


def make_pv_umma(dtype, head_dim_v: int, ctas: int = 1) -> cute.TiledMma:
    """O (128, head_dim_v) += P V, P and O in TMEM, V from shared memory.

    With ``ctas`` 2 as above; each CTA holds half of the columns of V.
    """
    return _make_mma(dtype, head_dim_v, tcgen05.OperandSource.TMEM, OperandMajorMode.MN, ctas)


def cta_group(ctas: int) -> tcgen05.CtaGroup:
    """What one instruction occupies: a CTA or a pair."""
    return tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE


def _make_mma(dtype, columns, source, b_major, ctas):
    op = tcgen05.MmaF16BF16Op(
        dtype, Float32, (TILE_ROWS * ctas, columns, 16), cta_group(ctas), source, OperandMajorMode.K, b_major
    )
    return cute.make_tiled_mma(op)


def _rows_of(mma: cute.TiledMma) -> int:
    return TILE_ROWS * cute.size(mma.thr_id.shape)


def smem_layout_a(mma: cute.TiledMma, columns: int, dtype, stages: int, stage_stride: int) -> cute.ComposedLayout:
    """The A operand (MMA, rows, k, stage) of a CTA's 128 rows and ``columns`` of K.

    ``stage_stride``: elements from one stage to the next.
    """
    layout = helpers.make_smem_layout_a(mma, (_rows_of(mma), TILE_ROWS, columns), dtype, 1)
    return _with_stages(layout, stages, stage_stride)


def smem_layout_b(
    mma: cute.TiledMma, rows: int, columns: int, dtype, stages: int, stage_stride: int
) -> cute.ComposedLayout:
    """The B operand (MMA, rows, k, stage) of ``rows`` of N, in a pair half of them, and ``columns`` of K;
    ``stage_stride`` as above."""
    layout = helpers.make_smem_layout_b(mma, (_rows_of(mma), rows, columns), dtype, 1)
    return _with_stages(layout, stages, stage_stride)


def smem_layout_rows(dtype, columns: int, stages: int, stage_stride: int) -> cute.ComposedLayout:
    """(128, columns, stages), columns contiguous: O on its way to a TMA store; ``stage_stride`` as above."""
    kind = helpers.get_smem_layout_atom_ab(OperandMajorMode.K, dtype, (TILE_ROWS, columns))
    atom = tcgen05.make_smem_layout_atom(kind, dtype)
    return _with_stages(cute.tile_to_shape(atom, (TILE_ROWS, columns, 1), order=(0, 1, 2)), stages, stage_stride)


def _with_stages(layout: cute.ComposedLayout, stages: int, stride: int) -> cute.ComposedLayout:
    """``layout`` of one stage, its last mode, with ``stages`` of them ``stride`` elements apart."""
    shape, strides = layout.outer.shape[:-1], layout.outer.stride[:-1]
    return cute.make_composed_layout(layout.inner, 0, cute.make_layout((*shape, stages), stride=(*strides, stride)))


def accumulator(base: cute.Pointer, column: Int32, mma: cute.TiledMma, columns: int) -> cute.Tensor:
    """The accumulator, (128, columns) a CTA, of ``mma`` that starts at TMEM column ``column``."""
    layout = mma.make_fragment_C(mma.partition_shape_C((_rows_of(mma), columns))).layout
    return cute.make_tensor(base + column, layout)


def operand_in_tmem(base: cute.Pointer, column: Int32, mma: cute.TiledMma, columns: int, dtype) -> cute.Tensor:
    """The A operand (MMA, rows, k) of ``mma``, 16-bit pairs packed from TMEM column ``column`` on."""
    layout = helpers.make_smem_layout_a(mma, (_rows_of(mma), TILE_ROWS, columns), dtype, 1)
    fragment = mma.make_fragment_A(cute.make_tensor(base, layout.outer))
    pointer = cute.recast_ptr(base + column, dtype=dtype)
    return cute.make_tensor(pointer, fragment.layout)[None, None, None, 0]


@cute.jit
def issue_umma(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: Boolean,
    first_k: cutlass.Constexpr[int] = 0,
    last_k: cutlass.Constexpr[object] = None,
):
    """Issues acc = a·b, or acc += a·b where ``accumulate``, over the steps [first_k, last_k) of K (default: all).

    A warp calls it and one lane issues. Asynchronous: a later commit of the same warp says when it is done. MMAs of
    one CTA run in the order of issue.
    """
    atom = cute.make_mma_atom(mma.op)
    atom.set(tcgen05.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(first_k, cute.size(a, mode=[2]) if last_k is None else last_k):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(tcgen05.Field.ACCUMULATE, True)


@cute.jit
def commit(barrier: cute.Pointer, pair: cutlass.Constexpr[bool] = False):
    """One arrival at ``barrier`` when everything that this warp issued so far is done.

    ``pair``: that were MMAs of a CTA pair; the arrival comes to the same barrier of both.
    """
    with cute.arch.elect_one():
        if const_expr(pair):
            tcgen05.commit(barrier, PAIR, tcgen05.CtaGroup.TWO)
        else:
            tcgen05.commit(barrier)


@cute.jit
def wait(barrier: cute.Pointer, phase: Int32):
    """Waits for an mbarrier phase; tcgen05 operations that follow come after what it signals."""
    cute.arch.mbarrier_wait(barrier, phase)
    tcgen05_fence_after()


@cute.jit
def arrive_warp(barrier: cute.Pointer, rank: cutlass.Constexpr[object] = None, tmem: cutlass.Constexpr[bool] = True):
    """One arrival for the whole warp, after all that its lanes did in shared memory and, waited for, in TMEM.

    ``rank``: the CTA of the cluster whose barrier it is, this one by default. ``tmem`` False: of TMEM it says nothing.
    """
    if const_expr(tmem):
        tcgen05_fence_before()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, rank)


def _rows(base, column, columns):
    return cute.make_tensor(base + column, cute.make_layout((TILE_ROWS, columns), stride=(_LANE_STRIDE, 1)))


def _repetition(columns: int) -> tcgen05.Repetition:
    """The widest power of two up to 32 that divides ``columns``."""
    return tcgen05.Repetition(min(columns & -columns, 32))


@cute.jit
def load_row(base: cute.Pointer, column: Int32, target: cute.Tensor, thread: Int32):
    """Starts reading this thread's row from TMEM column ``column`` on into ``target``, fp32 registers (n,).

    ``thread`` is the thread's place in its warpgroup and the row. Complete after ``fence_view_async_tmem_load``.
    """
    columns = cutlass.const_expr(cute.size(target))
    source = _rows(base, column, columns)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(_repetition(columns)), Float32)
    copy = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
    part = copy.partition_S(source)
    shape = copy.partition_D(cute.make_identity_tensor((TILE_ROWS, columns))).shape
    cute.copy(copy, part, cute.make_tensor(target.iterator, cute.make_layout(shape)))


@cute.jit
def store_row(base: cute.Pointer, column: Int32, source: cute.Tensor, thread: Int32):
    """Starts writing ``source``, fp32 registers (n,), to this thread's row from TMEM column ``column`` on.

    Complete after ``fence_view_async_tmem_store``.
    """
    columns = cutlass.const_expr(cute.size(source))
    target = _rows(base, column, columns)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(_repetition(columns)), Float32)
    copy = tcgen05.make_tmem_copy(atom, target).get_slice(thread)
    shape = copy.partition_S(cute.make_identity_tensor((TILE_ROWS, columns))).shape
    cute.copy(copy, cute.make_tensor(source.iterator, cute.make_layout(shape)), copy.partition_D(target))
