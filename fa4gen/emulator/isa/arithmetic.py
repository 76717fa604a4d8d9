"""Integer, floating-point, logic, comparison, conversion and approximation opcodes."""

from __future__ import annotations

from fa4gen.emulator.isa.base import Emitter, Mods, kind_of, op
from fa4gen.emulator.parser import Imm, Instr, Operand, Vec

__all__: list[str] = []

ROUNDINGS = ("rn", "rz", "rm", "rp")


@op("add", "sub", "mul", "mad", "fma", unit="alu")
def _arithmetic(e: Emitter, i: Instr, m: Mods) -> None:
    ptx_type = m.rest[-1] if m.rest else ""
    if ptx_type == "f32x2":
        _packed_pair(e, i, m)
    elif m.rest[-2:] in (["f32", "bf16"], ["f32", "f16"]):
        _mixed_arithmetic(e, i, m)
    elif ptx_type == "f32":
        _float_arithmetic(e, i, m)
    elif ptx_type in ("f64", "f16", "f16x2", "bf16", "bf16x2"):
        raise e.unsupported(f"{i.opcode} on .{ptx_type}")
    else:
        _integer_arithmetic(e, i, m)


def _integer_arithmetic(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    target, *sources = i.operands
    if i.opcode in ("add", "sub"):
        a, b = (e.use(s, kind) for s in sources)
        e.define(target, f"{a} {'+' if i.opcode == 'add' else '-'} {b}", kind)
        return
    part = m.need("lo", "wide", "hi")
    a, b = (e.use(s, kind) for s in sources[:2])
    if part == "lo":
        product, kind_out = f"{a} * {b}", kind
    elif part == "wide":
        kind_out = f"{kind[0]}{2 * int(kind[1])}"
        product = f"widen({a}, D.{kind_out}) * {b}"
    elif kind[1] in "24":
        kind_out = kind
        wide, bits = f"D.{kind[0]}{2 * int(kind[1])}", f"c{8 * int(kind[1])}"
        product = f"((widen({a}, {wide}) * {b}) >> {bits}).astype(D.{kind})"
    else:
        raise e.unsupported("high half of a 64-bit product")
    if i.opcode == "mad":
        product = f"{product} + {e.use(sources[2], kind_out)}"
    e.define(target, product, kind_out)


def _float_arithmetic(e: Emitter, i: Instr, m: Mods) -> None:
    m.kind()
    ftz = m.take("ftz")
    rounding = m.take(*ROUNDINGS) or "rn"
    if m.take("sat"):
        raise e.unsupported("saturation")
    values = [e.use(s, "f4") for s in i.operands[1:]]
    e.define(i.operands[0], float_expression(e, i.opcode, rounding, bool(ftz), values), "f4")


@op("contracted", unit="alu")
def _contracted(e: Emitter, i: Instr, m: Mods) -> None:
    """Pseudo-instruction of a product and its sum, rounded once: a·b + c, a·b - c or c - a·b."""
    m.kind()
    function = m.need("add", "sub", "rsub")
    a, b, c = (e.use(s, "f4") for s in i.operands[1:])
    values = [f"-{a}" if function == "rsub" else a, b, f"-{c}" if function == "sub" else c]
    e.define(i.operands[0], float_expression(e, "fma", "rn", bool(m.take("ftz")), values), "f4")


def _mixed_arithmetic(e: Emitter, i: Instr, m: Mods) -> None:
    """fp32 arithmetic whose sources, but for the last of fma and the second of add and sub, are 16-bit floats."""
    narrow = m.rest.pop()
    m.kind()
    rounding = m.take(*ROUNDINGS) or "rn"
    widened = 2 if i.opcode == "fma" else 1
    values = []
    for position, source in enumerate(i.operands[1:]):
        if position >= widened:
            values.append(e.use(source, "f4"))
        elif narrow == "bf16":
            values.append(f"f4_of_bf16({e.use(source, 'u2')})")
        else:
            values.append(f"{e.use(source, 'f2')}.astype(D.f4)")
    e.define(i.operands[0], float_expression(e, i.opcode, rounding, False, values), "f4")


def float_expression(e: Emitter, opcode: str, rounding: str, ftz: bool, values: list[str]) -> str:
    """Source of one fp32 operation with its rounding."""
    if ftz:
        values = [f"flush({v})" for v in values]
    if opcode in ("fma", "mad"):
        text = (
            f"fma({', '.join(values)})" if rounding == "rn" else f"directed({rounding!r}, 'fma', {', '.join(values)})"
        )
    elif rounding == "rn":
        text = {"add": " + ", "sub": " - ", "mul": " * "}[opcode].join(values)
    else:
        text = f"directed({rounding!r}, {opcode!r}, {', '.join(values)})"
    return f"flush({text})" if ftz else text


def _packed_pair(e: Emitter, i: Instr, m: Mods) -> None:
    """Two fp32 operations on the halves of 64-bit registers."""
    m.rest.pop()
    ftz = m.take("ftz")
    rounding = m.take(*ROUNDINGS) or "rn"
    halves = []
    for half in ("low", "high"):
        values = [f"{half}_f4({e.use(s, 'u8')})" for s in i.operands[1:]]
        halves.append(float_expression(e, i.opcode, rounding, bool(ftz), values))
    e.define(i.operands[0], f"pack_f4({halves[0]}, {halves[1]})", "u8")


@op("min", "max", unit="alu")
def _extremum(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    values = [e.use(s, kind) for s in i.operands[1:]]
    if kind[0] == "f":
        ftz, nan = m.take("ftz"), m.take("NaN")
        function = (
            {"min": "fmin", "max": "fmax"}[i.opcode] if not nan else {"min": "minimum", "max": "maximum"}[i.opcode]
        )
        if ftz:
            values = [f"flush({v})" for v in values]
    else:
        function = {"min": "minimum", "max": "maximum"}[i.opcode]
    text = values[0]
    for value in values[1:]:
        text = f"np.{function}({text}, {value})"
    if m.take("relu"):
        text = f"np.maximum({text}, {e.use(Imm(0), kind)})"
    e.define(i.operands[0], text, kind)


@op("div", "rem", unit="alu")
def _division(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    a, b = (e.use(s, kind) for s in i.operands[1:])
    if kind == "f4":
        if i.opcode == "rem" or not m.take("rn", "approx", "full"):
            raise e.unsupported("rounding of a division")
        text = f"{a} / {b}"
        e.define(i.operands[0], f"flush({text})" if m.take("ftz") else text, kind)
        return
    e.define(i.operands[0], f"integer_{i.opcode}({a}, {b})", kind)


@op("and", "or", "xor", unit="alu")
def _logic(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    a, b = (e.use(s, kind) for s in i.operands[1:])
    e.define(i.operands[0], f"{a} {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[i.opcode]} {b}", kind)


@op("not", "neg", "abs", unit="alu")
def _unary(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    ftz = m.take("ftz")
    a = e.use(i.operands[1], kind)
    text = {"not": f"~{a}", "neg": f"-{a}", "abs": f"np.abs({a})"}[i.opcode]
    e.define(i.operands[0], f"flush({text})" if ftz else text, kind)


@op("lop3", unit="alu")
def _lop3(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    a, b, c = (e.use(s, kind) for s in i.operands[1:4])
    table = i.operands[4]
    assert isinstance(table, Imm)
    terms = [
        " & ".join(v if index >> shift & 1 else f"~{v}" for v, shift in ((a, 2), (b, 1), (c, 0)))
        for index in range(8)
        if int(table.value) >> index & 1
    ]
    e.define(i.operands[0], " | ".join(f"({t})" for t in terms) or f"{a} & {e.use(Imm(0), kind)}", kind)


@op("shl", "shr", unit="alu")
def _shift(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    # numpy defines shifts by the width or more as PTX does: zeros, or the sign.
    a = e.use(i.operands[1], kind)
    count = i.operands[2]
    amount = e.use(count, kind) if isinstance(count, Imm) else f"{e.use(count, 'u4')}.astype(D.{kind})"
    e.define(i.operands[0], f"{a} {'<<' if i.opcode == 'shl' else '>>'} {amount}", kind)


@op("bfe", unit="alu")
def _bit_field(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    if kind != "u4":
        raise e.unsupported("bfe of anything but .u32")
    a, position, length = (e.use(s, "u4") for s in i.operands[1:])
    e.define(i.operands[0], f"bit_field({a}, {position}, {length})", kind)


@op("dp2a", unit="alu")
def _dot_product(e: Emitter, i: Instr, m: Mods) -> None:
    part = m.need("lo", "hi")
    a_kind, b_kind = (kind_of(i, m.rest.pop(0)) for _ in range(2))
    a, b = (e.use(s, "u4") for s in i.operands[1:3])
    kind = "i4" if "i" in a_kind + b_kind else "u4"
    types = f"(D.{a_kind[0]}2,), (D.{b_kind[0]}1,)"
    e.define(i.operands[0], f"dot_product_2({a}, {b}, {e.use(i.operands[3], kind)}, {part == 'hi'}, {types})", kind)


@op("prmt", unit="alu")
def _permute(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    a, b, selector = (e.use(s, "u4") for s in i.operands[1:])
    e.define(i.operands[0], f"permute_bytes({a}, {b}, {selector})", kind)


COMPARISONS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


@op("setp", unit="alu")
def _set_predicate(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    ftz = m.take("ftz")
    combine = m.take("and", "or", "xor")
    comparison = m.rest.pop(0)
    a, b = (e.use(s, kind) for s in i.operands[1:3])
    if ftz:
        a, b = f"flush({a})", f"flush({b})"
    if comparison in ("num", "nan") and kind[0] == "f":
        text = f"(({a} == {a}) & ({b} == {b}))"
        text = text if comparison == "num" else f"(~{text})"
    elif comparison in COMPARISONS and not (comparison == "ne" and kind[0] == "f"):
        text = f"({a} {COMPARISONS[comparison]} {b})"
    elif comparison == "ne":
        text = f"(({a} < {b}) | ({a} > {b}))"
    elif kind[0] == "f" and comparison[-1] == "u" and comparison[:-1] in COMPARISONS:
        # Unordered: true for a NaN, so the complement of the opposite ordered comparison.
        opposite = {"eq": f"(({a} < {b}) | ({a} > {b}))", "ne": f"({a} == {b})", "lt": f"({a} >= {b})",
                    "le": f"({a} > {b})", "gt": f"({a} <= {b})", "ge": f"({a} < {b})"}[comparison[:-1]]  # fmt: skip
        text = f"(~{opposite})"
    else:
        raise e.unsupported(f"comparison .{comparison}")
    first, second = e.pair(i.operands[0])
    other = None
    if combine:
        symbol = dict(zip(("and", "or", "xor"), "&|^", strict=True))[combine]
        predicate = e.use(i.operands[3], "b1")
        other = f"(~{text}) {symbol} {predicate}"
        text = f"{text} {symbol} {predicate}"
    if second is not None:
        e.define(second, other or f"~{text}", "b1")
    e.define(first, text, "b1")


@op("selp", unit="alu")
def _select(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    a, b = (e.use(s, kind) for s in i.operands[1:3])
    e.define(i.operands[0], f"where({e.use(i.operands[3], 'b1')}, {a}, {b})", kind)


@op("mov", unit="move")
def _move(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    target, source = i.operands
    if kind == "qG":
        _move_128(e, target, source)
    elif isinstance(target, Vec):
        part = kind_of(i, f"b{8 * int(kind[1]) // len(target.items)}")
        value = e.use(source, f"u{kind[1]}")
        for index, item in enumerate(target.items):
            if item is not None:
                e.define(item, f"unpack({value}, {index}, D.{part})", part)
    elif isinstance(source, Vec):
        part = kind_of(i, f"b{8 * int(kind[1]) // len(source.items)}")
        items = ", ".join(e.use(item, part) for item in source.items)
        e.define(target, f"pack(D.u{kind[1]}, {items})", f"u{kind[1]}")
    else:
        e.define(target, e.use(source, kind), kind)


def _move_128(e: Emitter, target: Operand, source: Operand) -> None:
    """mov.b128: between registers, or from and to two of 64 bits."""
    if isinstance(target, Vec):
        value = e.use(source, "qG")
        for index, item in enumerate(target.items):
            if item is not None:
                e.define(item, f"unpack128({value}, {index}, D.u8)", "u8")
    elif isinstance(source, Vec):
        e.define(target, f"pack128({', '.join(e.use(item, 'u8') for item in source.items)})", "qG")
    else:
        e.define(target, e.use(source, "qG"), "qG")


@op("cvta", unit="move")
def _to_generic(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    back = m.take("to")
    space = m.need("shared", "shared::cta", "shared::cluster", "global", "param", "local", "const")
    if space in ("local", "const"):
        raise e.unsupported(f"space .{space}")
    value = e.use(i.operands[1], kind)
    window = {"global": "c0", "param": "PARAM_WINDOW"}.get(space, "SHARED_WINDOW")
    e.define(i.operands[0], f"{value} {'-' if back else '+'} {window}", kind)


@op("mapa", unit="move")
def _map_shared(e: Emitter, i: Instr, m: Mods) -> None:
    kind = m.kind()
    if m.take("shared::cluster") is None or kind != "u4":
        raise e.unsupported("mapa of a generic address")
    address, rank = (e.use(s, "u4") for s in i.operands[1:])
    e.define(i.operands[0], f"({address} & c_offset) | ({rank} << c24)", kind)


@op("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", unit="mufu")
def _approximation(e: Emitter, i: Instr, m: Mods) -> None:
    """MUFU results are the fp32-rounded exact values: at most 2 ulp from the hardware's."""
    kind = m.kind()
    if kind != "f4":
        raise e.unsupported("approximation of anything but .f32")
    m.need("approx", "rn")
    ftz = m.take("ftz")
    a = e.use(i.operands[1], "f4")
    if ftz:
        a = f"flush({a})"
    names = {"ex2": "np.exp2", "lg2": "np.log2", "rcp": "reciprocal", "rsqrt": "rsqrt", "sqrt": "np.sqrt"}
    text = f"{names.get(i.opcode, f'np.{i.opcode}')}({a})"
    e.define(i.operands[0], f"flush({text})" if ftz else text, "f4")


@op("cvt", unit="convert")
def _convert(e: Emitter, i: Instr, m: Mods) -> None:
    source_type, target_type = m.rest.pop(), m.rest.pop()
    rounding = m.take("rn", "rz", "rni", "rzi", "rmi", "rpi", "rm", "rp")
    saturate = m.take("satfinite", "sat")
    relu = m.take("relu")
    ftz = m.take("ftz")
    if relu:
        raise e.unsupported("relu")
    key = (target_type, source_type)
    if source_type == "f32" and target_type in ("bf16x2", "f16x2", "e4m3x2", "e5m2x2"):
        if rounding != "rn" or ftz or bool(saturate) != target_type.startswith("e"):
            raise e.unsupported("rounding of a packed conversion")
        high, low = (e.use(s, "f4") for s in i.operands[1:])
        e.define(i.operands[0], f"{target_type}({low}, {high})", "u4" if target_type.endswith("16x2") else "u2")
        return
    if target_type in ("e4m3x2", "e5m2x2") and source_type == "f16x2":
        if rounding != "rn" or not saturate:
            raise e.unsupported("rounding of a packed conversion")
        e.define(i.operands[0], f"{target_type}(*halves({e.use(i.operands[1], 'u4')}, 'f16'))", "u2")
        return
    if target_type == "f16x2" and source_type in ("e4m3x2", "e5m2x2"):
        e.define(i.operands[0], f"f16x2_of_fp8({e.use(i.operands[1], 'u2')}, {source_type[:4]!r})", "u4")
        return
    if saturate:
        raise e.unsupported("saturation")
    e.define(*_convert_scalar(e, i, key, rounding, bool(ftz)))


def _convert_scalar(e: Emitter, i: Instr, key: tuple[str, str], rounding: str | None, ftz: bool) -> tuple:
    target_type, source_type = key
    target = i.operands[0]
    if key == ("f32", "bf16"):
        return target, f"f4_of_bf16({e.use(i.operands[1], 'u2')})", "f4"
    if key == ("bf16", "f32") and rounding == "rn":
        return target, f"bf16({e.use(i.operands[1], 'f4')})", "u2"
    if "bf16" in key or target_type.startswith("e") or source_type.startswith("e"):
        raise e.unsupported("conversion")
    to, of = kind_of(i, target_type), kind_of(i, source_type)
    value = e.use(i.operands[1], of)
    if of[0] == "f" and to[0] != "f":
        if rounding not in ("rni", "rzi", "rmi", "rpi"):
            raise e.unsupported("conversion without an integer rounding")
        function = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[rounding]
        return target, f"to_integer(np.{function}({value}), D.{to})", to
    if of[0] == "f" and to == of:
        if rounding not in ("rni", "rzi", "rmi", "rpi"):
            raise e.unsupported("conversion to the same type")
        return target, f"np.{ {'rni': 'rint', 'rzi': 'trunc', 'rmi': 'floor', 'rpi': 'ceil'}[rounding] }({value})", to
    if to[0] == "f" and rounding not in (None, "rn"):
        raise e.unsupported(f"rounding .{rounding}")
    text = f"{value}.astype(D.{to})"
    return target, f"flush({text})" if ftz else text, to
