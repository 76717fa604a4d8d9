"""tcgen05: tensor memory, its MMA, and what moves data in and out of it."""

from __future__ import annotations

from fa4gen.emulator.isa.base import Emitter, Mods, op, suspension
from fa4gen.emulator.isa.fragment import Fragment
from fa4gen.emulator.isa.synchronisation import shared_address
from fa4gen.emulator.parser import Imm, Instr, Mem, Operand, Vec

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
    emitters = {
        "mma": _mma, "commit": _commit, "ld": _load, "st": _store, "dealloc": _dealloc, "cp": _copy, "shift": _shift,
    }  # fmt: skip
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


# Registers of one repetition.
SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def _fragment(e: Emitter, m: Mods, pack: str, operands: list[Operand]) -> tuple[str, int]:
    """(name of the fragment, registers) of a tcgen05.ld or st. 16x32bx2 has one operand more, which is taken."""
    m.need("sync")
    m.need("aligned")
    shape = m.need(*SHAPES)
    repeat = int(m.need(*(f"x{1 << k}" for k in range(8)))[1:])
    packed = bool(m.take(pack))
    registers = SHAPES[shape] * repeat
    split = 0
    if shape == "16x32bx2":
        immediate = operands.pop(1)
        assert isinstance(immediate, Imm)
        split = int(immediate.value)
    if registers > 128:
        raise e.unsupported(f"{shape} {repeat} times: more than 128 registers")
    return e.constant(Fragment.of(shape, registers, packed, split)), registers


def _load(e: Emitter, i: Instr, m: Mods) -> None:
    operands = list(i.operands[1:])
    reduce, function, kind = "None", None, "u4"
    if m.take("red"):
        function = m.need("min", "max")
        absolute, nan = bool(m.take("abs")), bool(m.take("NaN"))
        kind = m.kind()
        if m.take("32x32b") is None:
            raise e.unsupported("tcgen05.ld.red of a shape whose lanes share rows")
        m.rest.append("32x32b")
        reduce = f"({function!r}, D.{kind}, {absolute}, {nan})"
        target_of_reduction = operands.pop(0)
    else:
        m.kind()
    fragment, count = _fragment(e, m, "pack::16b", operands)
    targets = e.vector(i.operands[0])
    if len(targets) != count:
        raise e.unsupported("number of registers")
    result = e.temp()
    e.line(f"{result} = M.tmem_load(F, {e.address(operands[0], False)}, {fragment}, {reduce}, {e.mask})")
    e.tmem_consumed = False
    for index, target in enumerate(targets):
        e.define(target, f"{result}[{index}]", "u4")
    if function:
        e.define(target_of_reduction, f"{result}[{count}]", kind)


def _store(e: Emitter, i: Instr, m: Mods) -> None:
    m.kind()
    operands = list(i.operands)
    fragment, count = _fragment(e, m, "unpack::16b", operands)
    values = e.vector(operands[1])
    if len(values) != count:
        raise e.unsupported("number of registers")
    items = ", ".join(e.use(v, "u4") for v in values)
    e.line(f"M.tmem_store(F, {e.address(operands[0], False)}, {fragment}, ({items},), {e.mask})")


def _copy(e: Emitter, i: Instr, m: Mods) -> None:
    group = _group(m)
    shape = m.need("128x256b", "128x128b", "64x128b", "32x128b")
    multicast = {"64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",)}.get(shape)
    how = m.need(*multicast) if multicast else ""
    rows, bits = (int(n) for n in shape[:-1].split("x"))
    address, descriptor = e.address(i.operands[0], False), e.use(i.operands[1], "u8")
    e.line(f"M.tensor_copy(F, {group}, {rows}, {bits // 8}, {how!r}, {address}, {descriptor}, {e.mask})")


def _shift(e: Emitter, i: Instr, m: Mods) -> None:
    group = _group(m)
    m.need("down")
    e.line(f"M.tensor_shift(F, {group}, {e.address(i.operands[0], False)}, {e.mask})")
