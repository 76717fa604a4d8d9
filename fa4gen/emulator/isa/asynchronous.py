"""Bulk and tensor copies, and warpgroup MMA."""

from __future__ import annotations

import re

from fa4gen.emulator.isa.base import Emitter, Mods, op
from fa4gen.emulator.isa.data import reduction
from fa4gen.emulator.isa.synchronisation import shared_address
from fa4gen.emulator.parser import Imm, Instr, Mem

__all__: list[str] = []

ELEMENTS = {"bf16": "bf16", "f16": "f16", "e4m3": "e4m3", "e5m2": "e5m2"}


@op("cp", unit="copy")
def _copy(e: Emitter, i: Instr, m: Mods) -> None:
    if m.take("reduce"):
        _reduce_copy(e, i, m)
        return
    m.need("async")
    if m.take("bulk") is None:
        _thread_copy(e, i, m)
        return
    if m.take("commit_group"):
        e.line(f"M.bulk_commit(F, {e.mask})")
    elif m.take("prefetch"):
        m.rest.clear()
    elif m.take("tensor"):
        _tensor_copy(e, i, m)
    else:
        _bulk_copy(e, i, m)


def _thread_copy(e: Emitter, i: Instr, m: Mods) -> None:
    """cp.async of single threads: done at once, so its commits and waits have nothing left to do."""
    if m.take("commit_group", "wait_group", "wait_all"):
        return
    if m.take("mbarrier"):
        m.need("arrive")
        m.need("noinc")
        m.need("b64")
        address = shared_address(e, m, i.operands[0])
        e.line(f"M.mbarrier_arrive(F, {address}, c_u4_one, None, False, {e.mask})")
        return
    m.need("ca", "cg")
    m.need("shared", "shared::cta")
    m.need("global")
    m.take("L2::64B", "L2::128B", "L2::256B")
    _cache_hint(m)
    target, source, size, *rest = i.operands
    read = e.use(rest[0], "u4") if rest else "None"
    if not isinstance(size, Imm):
        raise e.unsupported("size of cp.async")
    places = f"{e.address(target, False)}, {e.address(source, True)}"
    e.line(f"M.thread_copy(F, {places}, {int(size.value)}, {read}, {e.mask})")


def _cache_hint(m: Mods) -> None:
    m.take("L2::cache_hint")


def _tensor_copy(e: Emitter, i: Instr, m: Mods) -> None:
    rank = int(m.need("1d", "2d", "3d", "4d", "5d")[0])
    m.take("tile")
    # The order of the spaces says which way data goes: destination first.
    if m.rest and m.rest[0] == "global":
        m.need("global")
        m.need("shared::cta")
        m.need("bulk_group")
        _cache_hint(m)
        tensor, source = i.operands[:2]
        e.line(f"M.tensor_store(F, {_tensor(e, tensor, rank)}, {e.address(source, False)}, None, {e.mask})")
        return
    m.need("shared::cta", "shared::cluster")
    m.need("global")
    m.need("mbarrier::complete_tx::bytes")
    multicast = bool(m.take("multicast::cluster"))
    pair = bool(m.take("cta_group::2"))
    m.take("cta_group::1")
    _cache_hint(m)
    target, tensor, barrier = i.operands[:3]
    ctas = e.use(i.operands[3], "u2") if multicast else "None"
    e.line(
        f"M.tensor_load(F, {e.address(target, False)}, {_tensor(e, tensor, rank)}, {e.address(barrier, False)}, "
        f"{ctas}, {pair}, {e.mask})"
    )


def _tensor(e: Emitter, operand: object, rank: int) -> str:
    """Source of ``descriptor address, coordinates``."""
    if not isinstance(operand, Mem) or operand.coords is None or len(operand.coords.items) != rank:
        raise e.unsupported("tensor operand")
    coords = ", ".join(e.use(c, "i4") for c in operand.coords.items)
    return f"{e.address(Mem(operand.base, operand.offset), True)}, ({coords},)"


def _bulk_copy(e: Emitter, i: Instr, m: Mods) -> None:
    if m.rest and m.rest[0] == "global":
        m.need("global")
        m.need("shared::cta")
        m.need("bulk_group")
        _cache_hint(m)
        target, source, size = i.operands[:3]
        places = f"{e.address(target, True)}, {e.address(source, False)}"
        e.line(f"M.bulk_store(F, {places}, {e.use(size, 'u4')}, None, {e.mask})")
        return
    # Both may be shared: the destination stands first.
    if not m.rest or m.rest.pop(0) not in ("shared::cta", "shared::cluster"):
        raise e.unsupported("destination of a bulk copy")
    source_space = m.need("global", "shared::cta")
    m.need("mbarrier::complete_tx::bytes")
    multicast = bool(m.take("multicast::cluster"))
    _cache_hint(m)
    target, source, size, barrier = i.operands[:4]
    ctas = e.use(i.operands[4], "u2") if multicast else "None"
    wide = source_space == "global"
    e.line(
        f"M.bulk_load(F, {e.address(target, False)}, {source_space!r}, {e.address(source, wide)}, {e.use(size, 'u4')}, "
        f"{e.address(barrier, False)}, {ctas}, {e.mask})"
    )


def _reduce_copy(e: Emitter, i: Instr, m: Mods) -> None:
    m.need("async")
    m.need("bulk")
    if m.take("tensor"):
        rank = int(m.need("1d", "2d", "3d", "4d", "5d")[0])
        m.need("global")
        m.need("shared::cta")
        function = m.need("add", "min", "max", "inc", "dec", "and", "or", "xor")
        m.take("tile")
        m.need("bulk_group")
        _cache_hint(m)
        tensor, source = i.operands[:2]
        e.line(f"M.tensor_store(F, {_tensor(e, tensor, rank)}, {e.address(source, False)}, {function!r}, {e.mask})")
        return
    function, number, kind = reduction(e, i, m)
    target, source, size = i.operands[:3]
    reduce = f"({function!r}, {number!r}, D.{kind})"
    if m.take("shared::cluster"):
        m.need("shared::cta")
        m.need("mbarrier::complete_tx::bytes")
        places = f"{e.address(target, False)}, 'shared::cta', {e.address(source, False)}, {e.use(size, 'u4')}"
        e.line(f"M.bulk_load(F, {places}, {e.address(i.operands[3], False)}, None, {e.mask}, {reduce})")
        return
    m.need("global")
    m.need("shared::cta")
    m.need("bulk_group")
    _cache_hint(m)
    places = f"{e.address(target, True)}, {e.address(source, False)}, {e.use(size, 'u4')}"
    e.line(f"M.bulk_store(F, {places}, {reduce}, {e.mask})")


@op("wgmma", unit="wgmma")
def _wgmma(e: Emitter, i: Instr, m: Mods) -> None:
    if m.take("fence"):
        e.line("M.wgmma_fence(F)")
    elif m.take("commit_group"):
        e.line("M.wgmma_commit(F)")
        e.reload()
    elif m.take("wait_group"):
        count = i.operands[0]
        assert isinstance(count, Imm)
        e.line(f"M.wgmma_wait(F, {int(count.value)})")
        e.reload()
    elif m.take("mma_async"):
        _wgmma_mma(e, i, m)
        return
    m.need("sync")
    m.need("aligned")


def _wgmma_mma(e: Emitter, i: Instr, m: Mods) -> None:
    m.need("sync")
    m.need("aligned")
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", m.rest.pop(0))
    types = m.rest[:3]
    m.rest[:3] = []
    if shape is None or len(types) != 3 or types[0] != "f32" or types[1] not in ELEMENTS or types[2] not in ELEMENTS:
        raise e.unsupported("wgmma shape or types")
    columns, depth = int(shape.group(1)), int(shape.group(2))
    if depth != (16 if types[1].endswith("f16") else 32):
        raise e.unsupported("wgmma depth")
    accumulators = tuple(e.numbers[r.name] for r in e.vector(i.operands[0]))  # type: ignore[union-attr]
    operands = list(i.operands[1:])
    in_registers = not isinstance(operands[0], Imm) and len(e.vector(operands[0])) == 4
    if in_registers:
        a = f"({', '.join(e.use(r, 'u4') for r in e.vector(operands[0]))},)"
        a_registers = tuple(e.numbers[r.name] for r in e.vector(operands[0]))  # type: ignore[union-attr]
    else:
        a, a_registers = e.use(operands[0], "u8"), ()
    b = e.use(operands[1], "u8")
    scale = e.use(operands[2], "b1")
    immediates = [int(o.value) for o in operands[3:] if isinstance(o, Imm)]
    scale_a, scale_b, *majors = immediates
    # Only 16-bit operands in shared memory have one each; all else is K-major.
    majors = [0] * (2 - len(majors)) + majors
    op_name = e.constant(
        (columns, types[1], types[2], scale_a, scale_b, majors[0], majors[1], accumulators, a_registers)
    )
    e.flush({r.name for r in e.vector(i.operands[0])})  # type: ignore[union-attr]
    e.line(f"M.wgmma_issue(F, {op_name}, {a}, {b}, {scale})")
