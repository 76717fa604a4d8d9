"""Cluster launch control."""

from __future__ import annotations

from fa4gen.emulator.isa.base import Emitter, Mods, op
from fa4gen.emulator.isa.synchronisation import shared_address
from fa4gen.emulator.parser import Instr

__all__: list[str] = []


@op("clusterlaunchcontrol", unit="barrier")
def _cluster_launch(e: Emitter, i: Instr, m: Mods) -> None:
    if m.take("try_cancel"):
        m.need("async")
        m.need("mbarrier::complete_tx::bytes")
        everywhere = bool(m.take("multicast::cluster::all"))
        m.need("b128")
        space = m.take("shared::cta")
        places = []
        for operand in i.operands[:2]:
            m.rest += [space] if space else []
            places.append(shared_address(e, m, operand))
        e.line(f"M.try_cancel(F, {', '.join(places)}, {everywhere}, {e.mask})")
        return
    m.need("query_cancel")
    m.need("b128")
    response = e.use(i.operands[1], "qG")
    if m.take("is_canceled"):
        m.need("pred")
        e.define(i.operands[0], f"unpack128({response}, 3, D.u4) != D.u4(0)", "b1")
        return
    axis = m.need("get_first_ctaid", *(f"get_first_ctaid::{letter}" for letter in "xyz"))
    m.need("b32")
    if axis == "get_first_ctaid":
        m.need("v4")
        targets = dict(enumerate(e.vector(i.operands[0])[:3]))
    else:
        targets = {"xyz".index(axis[-1]): i.operands[0]}
    for index, target in targets.items():
        if target is not None:
            e.define(target, f"unpack128({response}, {index}, D.u4)", "u4")
