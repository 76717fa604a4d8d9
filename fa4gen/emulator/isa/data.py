"""Loads, stores, matrix loads and stores, atomics, prefetches, and lane exchange inside a warp."""

from __future__ import annotations

from fa4gen.emulator.isa.base import Emitter, Mods, kind_of, op
from fa4gen.emulator.isa.synchronisation import shared_address
from fa4gen.emulator.parser import Imm, Instr, Mem, Sym

__all__ = ["reduction"]

SPACES = ("param", "shared", "shared::cta", "shared::cluster", "global")
# Orderings are accepted where the emulator, which runs memory in program order, gives at least as much.
ORDERS = ("volatile", "relaxed", "acquire", "release", "weak", "acq_rel")
SCOPES = ("cta", "cluster", "gpu", "sys")
CACHE_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::no_allocate", "L1::evict_last", "L1::evict_first")


def _space(e: Emitter, m: Mods) -> tuple[str, bool]:
    """Memory of an access, and whether its addresses are 64 bits wide."""
    space = m.take(*SPACES)
    if space is None:
        return "generic", True
    if space == "param":
        return "param", True
    return ("global", True) if space == "global" else ("shared", False)


def _common(m: Mods) -> tuple[str, str]:
    order = m.take(*ORDERS) or "weak"
    scope = m.take(*SCOPES) or ""
    while m.take(*CACHE_HINTS):
        pass
    # L1::no_allocate and its kin arrive split at no dot; L2 prefetch sizes are hints as well.
    m.take("L2::64B", "L2::128B", "L2::256B")
    return order, scope


@op("ld", "ldu", unit="memory")
def _load(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    width = m.take("v2", "v4", "v8")
    space, wide = _space(e, m)
    order, _ = _common(m)
    targets = e.vector(i.operands[0])
    if len(targets) != int(width[1:] if width else 1):
        raise e.unsupported("vector width")
    mem = i.operands[1]
    if space == "param" and isinstance(mem, Mem) and isinstance(mem.base, Sym):
        offset = e.kernel.params[mem.base.name].offset + mem.base.offset + mem.offset
        for index, target in enumerate(targets):
            e.define(target, f"M.param({offset + index * int(kind[1])}, D.{kind})", kind)
        return
    address = e.address(mem, wide)
    if space == "param":
        address = f"({address} + PARAM_WINDOW)"
        space = "generic"
    result = e.temp()
    e.line(f"{result} = M.load(F, {space!r}, {address}, D.{kind}, {len(targets)}, {e.mask}, {order!r})")
    for index, target in enumerate(targets):
        e.define(target, f"{result}[{index}]", kind)


@op("st", unit="memory")
def _store(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    width = m.take("v2", "v4", "v8")
    if m.take("async"):
        _store_async(e, i, m, kind)
        return
    space, wide = _space(e, m)
    order, _ = _common(m)
    values = e.vector(i.operands[1])
    if len(values) != int(width[1:] if width else 1):
        raise e.unsupported("vector width")
    items = ", ".join(e.use(v, kind) for v in values)
    e.line(f"M.store(F, {space!r}, {e.address(i.operands[0], wide)}, D.{kind}, ({items},), {e.mask}, {order!r})")


def _store_async(e: Emitter, i: Instr, m: Mods, kind: str) -> None:
    m.take("weak")
    m.need("shared::cluster")
    m.need("mbarrier::complete_tx::bytes")
    items = ", ".join(e.use(v, kind) for v in e.vector(i.operands[1]))
    address, barrier = e.address(i.operands[0], False), e.address(i.operands[2], False)
    e.line(f"M.store_async(F, {address}, D.{kind}, ({items},), {barrier}, {e.mask})")


# PTX types of reductions that are no numpy types, and the integers that hold them.
NARROW_FLOATS = {"bf16": "u2", "f16x2": "u4", "bf16x2": "u4"}
FUNCTIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def reduction(e: Emitter, i: Instr, m: Mods) -> tuple[str, str, str]:
    """(function, PTX type, kind of its elements) of atom, red and reducing copies."""
    number = m.rest.pop()
    kind = NARROW_FLOATS.get(number) or kind_of(i, number)
    function = m.need(*FUNCTIONS)
    m.take("noftz")
    is_float = number[0] == "f" or "f16" in number
    if kind[0] == "q" or (is_float and function not in ("add", "min", "max")) or (kind in ("f4", "f8") and
                                                                                  function != "add"):  # fmt: skip
        raise e.unsupported(f"{function} on .{number}")
    return function, number, kind


@op("atom", "red", unit="memory")
def _atomic(e: Emitter, i: Instr, m: Mods) -> None:
    if m.take("async"):
        _reduce_async(e, i, m)
        return
    function, number, kind = reduction(e, i, m)
    width = m.take("v2", "v4", "v8")
    space, wide = _space(e, m)
    order, _ = _common(m)
    operands = list(i.operands)
    targets = e.vector(operands.pop(0)) if i.opcode == "atom" else ()
    values = e.vector(operands[2 if function == "cas" else 1])
    if len(values) != int(width[1:] if width else 1):
        raise e.unsupported("vector width")
    compare = e.use(operands[1], kind) if function == "cas" else "None"
    items = ", ".join(e.use(v, kind) for v in values)
    result = e.temp()
    e.line(
        f"{result} = M.atomic(F, {space!r}, {e.address(operands[0], wide)}, {function!r}, {number!r}, D.{kind}, "
        f"({items},), {compare}, {e.mask}, {order!r})"
    )
    for index, target in enumerate(targets):
        if target is not None:
            e.define(target, f"{result}[{index}]", kind)


def _reduce_async(e: Emitter, i: Instr, m: Mods) -> None:
    function, number, kind = reduction(e, i, m)
    m.need("relaxed")
    m.need("cluster")
    m.need("shared::cluster")
    m.need("mbarrier::complete_tx::bytes")
    address, barrier = e.address(i.operands[0], False), e.address(i.operands[2], False)
    value = e.use(i.operands[1], kind)
    e.line(f"M.store_async(F, {address}, D.{kind}, ({value},), {barrier}, {e.mask}, {(function, number)!r})")


@op("prefetch", "prefetchu", "applypriority", "discard", unit="memory")
def _prefetch(e: Emitter, i: Instr, m: Mods) -> None:
    """Hints: nothing happens."""
    m.rest.clear()


@op("stmatrix", "ldmatrix", unit="memory")
def _matrix(e: Emitter, i: Instr, m: Mods) -> None:
    m.need("sync")
    m.need("aligned")
    count = int(m.need("x1", "x2", "x4")[1])
    form = m.take("trans") or ""
    if m.take("m16n8" if i.opcode == "stmatrix" else "m16n16"):
        # 8-bit elements: always transposed; a 16 x 16 matrix has two registers, and there are at most two.
        m.need("b8")
        count *= 1 if i.opcode == "stmatrix" else 2
        form = "b8" if form else "missing"
    elif m.take("m8n8") is None or m.take("b16") is None:
        raise e.unsupported("matrix shape")
    memory, registers = (0, 1) if i.opcode == "stmatrix" else (1, 0)
    address = shared_address(e, m, i.operands[memory])
    items = e.vector(i.operands[registers])
    if form == "missing" or len(items) != count:
        raise e.unsupported("number of matrices")
    if i.opcode == "stmatrix":
        values = ", ".join(e.use(v, "u4") for v in items)
        e.line(f"M.store_matrix(F, {address}, ({values},), {form!r}, {e.mask})")
        return
    result = e.temp()
    e.line(f"{result} = M.load_matrix(F, {address}, {count}, {form!r}, {e.mask})")
    for index, item in enumerate(items):
        e.define(item, f"{result}[{index}]", "u4")


@op("shfl", unit="warp")
def _shuffle(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    if kind[1] != "4":
        raise e.unsupported("shfl of anything but 32 bits")
    m.need("sync")
    mode = m.need("idx", "bfly", "up", "down")
    target, predicate = e.pair(i.operands[0])
    value = e.use(i.operands[1], kind)
    lane, clamp, members = (e.use(s, "u4") for s in i.operands[2:5])
    result = e.temp()
    e.line(f"{result} = shuffle(F, {mode!r}, {value}, {lane}, {clamp}, {members}, {e.mask})")
    if target is not None:
        e.define(target, f"{result}[0]", kind)
    if predicate is not None:
        e.define(predicate, f"{result}[1]", "b1")


@op("vote", unit="warp")
def _vote(e: Emitter, i: Instr, m: Mods) -> None:
    m.need("sync")
    mode = m.need("any", "all", "uni", "ballot")
    kind = m.kind()
    predicate, members = e.use(i.operands[1], "b1"), e.use(i.operands[2], "u4")
    e.define(i.operands[0], f"vote(F, {mode!r}, {predicate}, {members}, {e.mask})", kind)


@op("redux", unit="warp")
def _redux(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    m.need("sync")
    function = m.need("add", "min", "max", "and", "or", "xor")
    value, members = e.use(i.operands[1], kind), e.use(i.operands[2], "u4")
    e.define(i.operands[0], f"reduce_lanes(F, {function!r}, {value}, {members}, {e.mask})", kind)


@op("elect", unit="warp")
def _elect(e: Emitter, i: Instr, m: Mods) -> None:
    m.need("sync")
    lane, predicate = e.pair(i.operands[0])
    result = e.temp()
    e.line(f"{result} = elect(F, {e.use(i.operands[1], 'u4')}, {e.mask})")
    if lane is not None:
        e.define(lane, f"{result}[0]", "u4")
    e.define(predicate, f"{result}[1]", "b1")


@op("activemask", unit="warp")
def _active_mask(e: Emitter, i: Instr, m: Mods) -> None:
    m.kind()
    e.define(i.operands[0], f"vote(F, 'ballot', D.b1(True), {e.use(Imm(0xFFFFFFFF), 'u4')}, {e.mask})", "u4")
