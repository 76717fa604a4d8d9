"""Hopper warpgroup MMA: shared-memory layouts, tiled MMAs, and issuing one GEMM."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp
from cutlass.cute.nvgpu import warpgroup as wg


def _swizzle(extent: int) -> int:
    """Bytes of the widest shared-memory swizzle whose span of 16-bit elements divides ``extent``."""
    return next(span for span in (128, 64, 32) if extent % (span // 2) == 0)


def smem_layout_k_major(
    dtype, rows: int, columns: int, stages: int, stage_stride: int = 0, swizzled: int = 0
) -> cute.ComposedLayout:
    """(rows, columns, stages), columns contiguous: Q, K, P and O tiles.

    ``stage_stride``: elements from one stage to the next; 0 packs them. ``swizzled``: columns that an MMA takes at
    once, where not all: the swizzle's span divides them.
    """
    kind = {128: "K_SW128", 64: "K_SW64", 32: "K_SW32"}[_swizzle(swizzled or columns)]
    atom = wg.make_smem_layout_atom(getattr(wg.SmemLayoutAtomKind, kind), dtype)
    layout = cute.tile_to_shape(atom, (rows, columns, 1), order=(0, 1, 2))
    outer = cute.make_layout(
        (*layout.outer.shape[:2], stages), stride=(*layout.outer.stride[:2], stage_stride or rows * columns)
    )
    return cute.make_composed_layout(layout.inner, 0, outer)


def smem_layout_mn_major(dtype, rows: int, columns: int, stages: int) -> cute.ComposedLayout:
    """(rows, columns, stages), rows contiguous: V tiles seen as (head_dim_v, tile_n)."""
    kind = {128: "MN_SW128", 64: "MN_SW64", 32: "MN_SW32"}[_swizzle(rows)]
    atom = wg.make_smem_layout_atom(getattr(wg.SmemLayoutAtomKind, kind), dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(1, 0, 2))


def make_qk_mma(dtype, tile_n: int, q_in_registers: bool) -> cute.TiledMma:
    """S (64, tile_n) = Q Kᵀ for one warpgroup, K from shared memory."""
    source = wg.OperandSource.RMEM if q_in_registers else wg.OperandSource.SMEM
    op = wg.MmaF16BF16Op(dtype, Float32, (64, tile_n, 16), source, OperandMajorMode.K, OperandMajorMode.K)
    return cute.make_tiled_mma(op, (1, 1, 1))


def make_pv_mma(dtype, head_dim_v: int, p_in_registers: bool) -> cute.TiledMma:
    """O (64, head_dim_v) += P V for one warpgroup, V from shared memory."""
    source = wg.OperandSource.RMEM if p_in_registers else wg.OperandSource.SMEM
    op = wg.MmaF16BF16Op(dtype, Float32, (64, head_dim_v, 16), source, OperandMajorMode.K, OperandMajorMode.MN)
    return cute.make_tiled_mma(op, (1, 1, 1))


def make_mma(
    dtype, columns: int, *, a_in_registers: bool = False, a_k_major: bool = True, b_k_major: bool = True
) -> cute.TiledMma:
    """(64, columns) = A·B for one warpgroup, B and by default A in shared memory."""
    source = wg.OperandSource.RMEM if a_in_registers else wg.OperandSource.SMEM
    majors = [OperandMajorMode.K if k_major else OperandMajorMode.MN for k_major in (a_k_major, b_k_major)]
    op = wg.MmaF16BF16Op(dtype, Float32, (64, columns, 16), source, *majors)
    return cute.make_tiled_mma(op, (1, 1, 1))


@cute.jit
def load_operand_a(mma: cute.TiledMma, sA: cute.Tensor, rA: cute.Tensor, thread: Int32):
    """Shared-memory tile ``sA`` (64, columns) to the register fragment ``rA`` of a WGMMA that takes A from there."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), sA.element_type)
    copy = cute.make_tiled_copy_A(atom, mma).get_slice(thread)
    cute.copy(atom, copy.partition_S(sA), copy.retile(rA))


@cute.jit
def issue_gemm(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero: cutlass.Constexpr[bool]):
    """Issues acc = a·b (``zero``) or acc += a·b as one committed wgmma group; the caller waits for it."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(wg.Field.ACCUMULATE, not zero)
    wg.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(wg.Field.ACCUMULATE, True)
    wg.commit_group()
