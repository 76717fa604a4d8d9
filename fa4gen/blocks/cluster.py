"""Shared memory of another CTA of the cluster."""

from cutlass import Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4gen.blocks.ptx import _asm


@dsl_user_op
def send(target, source, size: int, barrier, rank: Int32, *, loc=None, ip=None):
    """Starts copying ``size`` bytes of this CTA's shared memory to where ``target`` is in CTA ``rank``.

    Their bytes arrive at ``barrier`` there. Pointers are this CTA's own; addresses and size are multiples of 16 bytes.
    The calling thread issues it, and may reuse ``source`` only when it knows that the bytes have arrived.
    """
    to, at, of = (p.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip) for p in (target, barrier, source))
    rank = Int32(rank).ir_value(loc=loc, ip=ip)
    to, at = (_asm(T.i32(), [a, rank], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", loc, ip) for a in (to, at))
    operands = [to, of, Int32(size).ir_value(loc=loc, ip=ip), at]
    text = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _asm(None, operands, text, "r,r,r,r", loc, ip, volatile=True)
