"""Single PTX instructions that CuTe DSL has no function for, or whose placement must be pinned."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result_type, operands, text, constraints, loc, ip, volatile=False):
    return llvm.inline_asm(
        result_type,
        operands,
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def add_round_down(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a + b in fp32, rounded towards minus infinity, denormals flushed."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(_asm(T.f32(), operands, "add.rm.ftz.f32 $0, $1, $2;", "=f,f,f", loc, ip))


@dsl_user_op
def bits_of(x: Float32, *, loc=None, ip=None) -> Int32:
    """The 32 bits of a float."""
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_of(bits: Int32, *, loc=None, ip=None) -> Float32:
    """The float with these 32 bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def _cvt_bf16x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]  # PTX takes the high half first
    return Int32(_asm(T.i32(), operands, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", loc, ip))


@dsl_user_op
def _cvt_f16x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    return Int32(_asm(T.i32(), operands, "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", loc, ip))


@cute.jit
def convert_packed(source: cute.Tensor, target: cute.Tensor):
    """Rounds fp32 registers to the 16-bit type of ``target``, element by element in the same order.

    One cvt instruction a pair, pinned by inline assembly: left to the compiler, the conversion of a value that
    crosses a loop back-edge sinks below it, and the fp32 registers stay live instead of half as many packed ones.
    """
    packed = cute.recast_tensor(target, Int32)
    for i in cutlass.range(cute.size(packed), unroll_full=True):
        if const_expr(target.element_type is BFloat16):
            packed[i] = _cvt_bf16x2(source[2 * i], source[2 * i + 1])
        else:
            packed[i] = _cvt_f16x2(source[2 * i], source[2 * i + 1])


@dsl_user_op
def unhoisted(x: Int32, changing: Int32, unknown: Int32, *, loc=None, ip=None) -> Int32:
    """x, but what is computed from it is computed here and not before the loop in which ``changing`` changes.

    For warps of few registers: dozens of invariant addresses, once hoisted, would be spilled. ``changing`` +
    ``unknown`` is never negative, which the compilers must not be able to prove: let ``unknown`` be a kernel parameter.
    """
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (x, changing, unknown)]
    text = "{ .reg .b32 t; add.s32 t, $2, $3; shr.u32 t, t, 31; add.s32 $0, $1, t; }"
    return Int32(_asm(T.i32(), operands, text, "=r,r,r,r", loc, ip))


def rebased(pointer: cute.Pointer, alignment: int, unknown: Int32) -> cute.Pointer:
    """The same address in shared memory, computed here: ``pointer`` itself need not live on. See :func:`unhoisted`."""
    address = unhoisted(pointer.toint(), 0, unknown)
    return cute.make_ptr(pointer.dtype, address, cute.AddressSpace.smem, assumed_align=alignment)


@dsl_user_op
def cancelled_cluster(response: Int32, *, loc=None, ip=None) -> Int32:
    """x of the first CTA of the cluster that a clusterlaunchcontrol response hands over; -1 if it hands over none.

    ``response``: shared address of its 16 bytes.
    """
    text = """{ .reg .pred granted; .reg .b128 response; ld.shared.b128 response, [$1];
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 granted, response; mov.b32 $0, -1;
        @granted clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 $0, response; }"""
    operands = [Int32(response).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, text, "=r,r", loc, ip, volatile=True))


@dsl_user_op
def tcgen05_fence_before(*, loc=None, ip=None):
    """Orders this thread's tcgen05 operations before the synchronisation that follows."""
    _asm(None, [], "tcgen05.fence::before_thread_sync;", "", loc, ip, volatile=True)


@dsl_user_op
def tcgen05_fence_after(*, loc=None, ip=None):
    """Orders the tcgen05 operations that follow after the synchronisation before it."""
    _asm(None, [], "tcgen05.fence::after_thread_sync;", "", loc, ip, volatile=True)


@dsl_user_op
def bulk_reduce_add(target: cute.Pointer, source: cute.Pointer, size: int, *, loc=None, ip=None):
    """Adds ``size`` bytes of fp32 in shared memory to global memory, asynchronously: one bulk operation of this thread.

    Addresses and size are multiples of 16 bytes. Belongs to the thread's current bulk group.
    """
    operands = [p.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip) for p in (target, source)]
    operands.append(Int32(size).ir_value(loc=loc, ip=ip))
    text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    _asm(None, operands, text, "l,r,r", loc, ip, volatile=True)


@dsl_user_op
def reduce_add_vector(target: cute.Pointer, a: Float32, b: Float32, c: Float32, d: Float32, *, loc=None, ip=None):
    """Adds four numbers to fp32 in global memory, 16-byte aligned. sm_90 and later."""
    operands = [target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d)]
    text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    _asm(None, operands, text, "l,f,f,f,f", loc, ip, volatile=True)


@dsl_user_op
def bulk_load(target: cute.Pointer, source: cute.Pointer, size: int, barrier: cute.Pointer, *, loc=None, ip=None):
    """Copies ``size`` contiguous bytes from global to shared memory, asynchronously; they count at the mbarrier.

    Addresses and size are multiples of 16 bytes. One thread calls it.
    """
    operands = [p.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip) for p in (target, source, barrier)]
    operands.insert(2, Int32(size).ir_value(loc=loc, ip=ip))
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _asm(None, operands, text, "r,l,r,r", loc, ip, volatile=True)
