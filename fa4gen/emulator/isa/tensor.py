"""tcgen05: tensor memory, its MMA, and what moves data in and out of it."""

from __future__ import annotations

from fa4gen.emulator.isa.base import Emitter, Mods, op, suspension
from fa4gen.emulator.isa.synchronisation import shared_address
from fa4gen.emulator.parser import Instr, Mem, Operand, Vec

__all__: list[str] = []


def _group(m: Mods) -> int:
    """1 or 2 CTAs."""
    return int(m.need("cta_group::1", "cta_group::2")[-1])


@suspension("tcgen05.alloc")
def _alloc(e: Emitter, i: Instr, m: Mods) -> str:
    """Waits until the columns are free."""
    m.need("alloc")
    group = _group(m)
    m.need("sync")
    m.need("aligned")
    m.need("b32")
    address = shared_address(e, m, i.operands[0])
    return f"({address}, {e.use(i.operands[1], 'u4')}, {group})"


@op("tcgen05", unit="tcgen05")
def _tcgen05(e: Emitter, i: Instr, m: Mods) -> None:
    action = m.rest.pop(0)
    emitters = {"mma": _mma, "commit": _commit, "ld": _load, "st": _store, "dealloc": _dealloc}
    if action in emitters:
        emitters[action](e, i, m)
    elif action in ("wait::ld", "wait::st"):
        m.need("sync")
        m.need("aligned")
        e.line(f"M.tmem_wait(F, {action[-2:]!r})")
    elif action == "relinquish_alloc_permit":
        _group(m)
        m.need("sync")
        m.need("aligned")
    elif action not in ("fence::before_thread_sync", "fence::after_thread_sync"):
        # The fences order tcgen05 with thread synchronisation, which clocks follow anyway.
        raise e.unsupported(f"tcgen05.{action}")


def _dealloc(e: Emitter, i: Instr, m: Mods) -> None:
    _group(m)
    m.need("sync")
    m.need("aligned")
    m.need("b32")
    e.line(f"M.tmem_free(F, {e.use(i.operands[0], 'u4')}, {e.use(i.operands[1], 'u4')})")


def _mma(e: Emitter, i: Instr, m: Mods) -> None:
    group = _group(m)
    kind = m.need("kind::f16", "kind::f8f6f4")
    for hint in ("fill", "use", "lastuse", "discard"):
        m.take(f"collector::a::{hint}")
    target, a, b, descriptor, *rest = i.operands
    lanes: tuple[Operand, ...] = ()
    if rest and isinstance(rest[0], Vec):
        lanes = rest.pop(0).items  # type: ignore[union-attr]
    if len(rest) != 1:
        raise e.unsupported("scaled accumulator input")
    in_tmem = isinstance(a, Mem)
    first = e.address(a, False) if in_tmem else e.use(a, "u8")
    disabled = ", ".join(e.use(lane, "u4") for lane in lanes)
    accumulate = e.use(rest[0], "b1")
    e.line(
        f"M.tensor_mma(F, {group}, {kind[6:]!r}, {e.address(target, False)}, {first}, {in_tmem}, {e.use(b, 'u8')}, "
        f"{e.use(descriptor, 'u4')}, ({disabled}{',' * bool(lanes)}), {accumulate}, {e.mask})"
    )


def _commit(e: Emitter, i: Instr, m: Mods) -> None:
    _group(m)
    m.need("mbarrier::arrive::one")
    multicast = bool(m.take("multicast::cluster"))
    m.need("b64")
    address = shared_address(e, m, i.operands[0])
    ctas = e.use(i.operands[1], "u2") if multicast else "None"
    e.line(f"M.tensor_commit(F, {address}, {ctas}, {e.mask})")


def _shape(e: Emitter, m: Mods) -> int:
    """Registers a lane of a 32x32b access."""
    m.need("sync")
    m.need("aligned")
    if m.take("32x32b") is None:
        raise e.unsupported("tcgen05 data shape other than 32x32b")
    count = next((r for r in m.rest if r[0] == "x" and r[1:].isdigit()), None)
    if count is None:
        raise e.unsupported("tcgen05 repetition")
    m.need(count)
    return int(count[1:])


def _load(e: Emitter, i: Instr, m: Mods) -> None:
    reduce = "None"
    function = None
    if m.take("red"):
        function = m.need("min", "max")
        if m.take("abs", "NaN"):
            raise e.unsupported("reduction of absolute values or NaN")
        kind = m.kind()
        reduce = f"({function!r}, D.{kind})"
    else:
        kind = m.kind()
    count = _shape(e, m)
    targets = e.vector(i.operands[0])
    if len(targets) != count:
        raise e.unsupported("number of registers")
    result = e.temp()
    e.line(f"{result} = M.tmem_load(F, {e.address(i.operands[-1], False)}, {count}, {reduce}, {e.mask})")
    e.tmem_consumed = False
    for index, target in enumerate(targets):
        e.define(target, f"{result}[{index}]", "u4")
    if function:
        e.define(i.operands[1], f"{result}[{count}]", kind)


def _store(e: Emitter, i: Instr, m: Mods) -> None:
    m.kind()
    count = _shape(e, m)
    values = e.vector(i.operands[1])
    if len(values) != count:
        raise e.unsupported("number of registers")
    items = ", ".join(e.use(v, "u4") for v in values)
    e.line(f"M.tmem_store(F, {e.address(i.operands[0], False)}, ({items},), {e.mask})")
