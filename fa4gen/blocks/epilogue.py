"""O from accumulator registers to global memory, and LSE."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from fa4gen.blocks.ptx import convert_packed


@cute.jit
def store_tile(
    acc: cute.Tensor,
    mma: cute.TiledMma,
    sO: cute.Tensor,
    thread: Int32,
    barrier_id: Int32,
):
    """Rounds one warpgroup's (64, N) accumulator and writes it to shared memory, ready for a TMA store.

    On return the warpgroup has met at named barrier ``barrier_id`` and the tile is visible to the async proxy.
    """
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), sO.element_type)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    rounded = cute.make_fragment_like(acc, sO.element_type)
    convert_packed(acc, rounded)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(sO))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)


@cute.jit
def store_probabilities(p: cute.Tensor, mma: cute.TiledMma, sP: cute.Tensor, thread: Int32):
    """Writes one warpgroup's 16-bit P (64, tile_n), in accumulator order, to shared memory for the PV WGMMA.

    A warp syncs with itself only: WGMMA reads each warp's 16 rows of A from that warp's own stores.
    """
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), sP.element_type)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(atom, copy.retile(p), copy.partition_D(sP))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@cute.jit
def store_lse(mLSE: cute.Tensor, lse: cute.Tensor, row: Int32, limit: Int32):
    """Writes one thread's two LSE values, for rows ``row`` and ``row`` + 8 of ``mLSE`` (rows,) below ``limit``.

    Lane 0 of each quad calls it.
    """
    for r in cutlass.range_constexpr(2):
        if row + 8 * r < limit:
            mLSE[row + 8 * r] = lse[r]
