"""How an instruction becomes Python source: the registry of opcodes, modifier parsing, and the emitter.

A basic block turns into one Python function over numpy arrays of shape (warps, 32), one element a lane. Values that
are the same in every lane may be numpy scalars: arithmetic broadcasts, helpers broadcast for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4gen.emulator.errors import UnsupportedInstruction
from fa4gen.emulator.isa.values import D
from fa4gen.emulator.parser import Imm, Instr, Kernel, Mem, Operand, Pair, Reg, Special, Sym, Vec

__all__ = ["OPCODES", "SUSPENSIONS", "Emitter", "Mods", "Opcode", "kind_of", "op", "suspension"]

# PTX type → numpy kind. Untyped bits are unsigned.
KINDS = {
    "pred": "b1",
    **{f"{letter}{bits}": f"u{bits // 8}" for letter in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"f{bits}": f"f{bits // 8}" for bits in (16, 32, 64)},
    # G is the width 16 as a single character, which sorts behind the digits.
    "b128": "qG",
}
DTYPES = {kind: getattr(D, kind) for kind in sorted(set(KINDS.values()))}


@dataclass(frozen=True)
class Opcode:
    """What is known about an opcode: its emitter and the unit its instructions are counted under."""

    emit: Callable[[Emitter, Instr, Mods], None]
    unit: str


OPCODES: dict[str, Opcode] = {}
# Instructions a warp may have to wait at: name → emitter of the tuple of operand values that the wait needs.
SUSPENSIONS: dict[str, Callable[[Emitter, Instr, Mods], str]] = {}


def op(*names: str, unit: str) -> Callable[[Any], Any]:
    """Registers the emitter of one or more opcodes."""

    def register(emit: Callable[[Emitter, Instr, Mods], None]) -> Callable[[Emitter, Instr, Mods], None]:
        for name in names:
            OPCODES[name] = Opcode(emit, unit)
        return emit

    return register


def suspension(name: str) -> Callable[[Any], Any]:
    """Registers the emitter of a waiting instruction's operands."""

    def register(emit: Callable[[Emitter, Instr, Mods], str]) -> Callable[[Emitter, Instr, Mods], str]:
        SUSPENSIONS[name] = emit
        return emit

    return register


def kind_of(instr: Instr, ptx_type: str) -> str:
    """numpy kind of a PTX type.

    Raises:
        UnsupportedInstruction: the type is not implemented.
    """
    try:
        return KINDS[ptx_type]
    except KeyError:
        raise UnsupportedInstruction(f"type .{ptx_type}", str(instr)) from None


class Mods:
    """The modifiers of one instruction. Each is taken once; :meth:`end` refuses what nobody took."""

    def __init__(self, instr: Instr) -> None:
        self.instr = instr
        self.rest = list(instr.mods)

    def take(self, *names: str) -> str | None:
        """The first of ``names`` that is present, removed; else None."""
        for name in names:
            if name in self.rest:
                self.rest.remove(name)
                return name
        return None

    def need(self, *names: str) -> str:
        """Like :meth:`take`; absence is unsupported."""
        found = self.take(*names)
        if found is None:
            raise UnsupportedInstruction(f"needs one of .{', .'.join(names)}", str(self.instr))
        return found

    def kind(self) -> str:
        """numpy kind of the last modifier, a type, removed."""
        if not self.rest:
            raise UnsupportedInstruction("has no type", str(self.instr))
        return kind_of(self.instr, self.rest.pop())

    def end(self) -> None:
        """Refuses what is left."""
        if self.rest:
            raise UnsupportedInstruction(f"modifier .{'.'.join(self.rest)} is not implemented", str(self.instr))


class Emitter:
    """Writes the source of one basic block.

    Registers are numpy arrays in local variables, one a register and kind: reading a register as another kind of the
    same width is a view, made once. ``lines`` and ``origins`` are the source and the instruction of every line.
    """

    def __init__(
        self, kernel: Kernel, numbers: dict[str, int], constants: dict[str, Any], tmem_loaded: frozenset[str]
    ) -> None:
        self.kernel = kernel
        self.numbers = numbers
        self.constants = constants
        self.lines: list[str] = []
        self.origins: list[Instr | None] = []
        self.views: dict[str, dict[str, str]] = {}
        self.exposed: set[str] = set()
        self.defined: set[str] = set()
        self.instr: Instr | None = None
        self.guard: str | None = None
        self.serial = 0
        # Registers that tcgen05.ld fills: whoever reads one has waited for it.
        self.tmem_loaded = tmem_loaded
        self.tmem_consumed = False

    # Lines and names -------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        """Appends a line of source."""
        self.lines.append(text)
        self.origins.append(self.instr)

    def temp(self) -> str:
        """A fresh local name."""
        self.serial += 1
        return f"t{self.serial}"

    def constant(self, value: Any, name: str = "") -> str:
        """A name for a Python object that the generated code may use."""
        name = name or f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def unsupported(self, why: str) -> UnsupportedInstruction:
        """The error for the current instruction."""
        return UnsupportedInstruction(why, str(self.instr))

    # Reading ---------------------------------------------------------------------------------------------------
    def use(self, operand: Operand, kind: str) -> str:
        """An expression for ``operand`` as ``kind``."""
        if isinstance(operand, Reg):
            name = self._register(operand.name, kind)
            return f"(~{name})" if operand.negated else name
        if isinstance(operand, Imm):
            return self._literal(operand, kind)
        if isinstance(operand, Special):
            return self._special(operand.name, kind)
        if isinstance(operand, Sym):
            return self._symbol(operand, kind)
        raise self.unsupported(f"operand {operand}")

    def _register(self, name: str, kind: str) -> str:
        views = self.views.get(name)
        number = self.numbers[name]
        if name in self.tmem_loaded and not self.tmem_consumed:
            self.tmem_consumed = True
            self.line("M.tmem_wait(F, 'ld')")
        if views is None:
            views = self.views[name] = {"raw": f"r{number}"}
            self.exposed.add(name)
            self.line(f"r{number} = R[{number}]")
        if kind not in views:
            source = next(iter(views.values()))
            width = KINDS[self.kernel.registers[name]][1]
            if width < kind[1]:
                raise self.unsupported(f"register {name} is narrower than its use")
            if width != kind[1]:
                # Only narrower integers come from wider registers, in ld/st/cvt of 8 and 16 bits.
                source = f"{self._register(name, 'u' + width)}.astype(D.{kind})"
            elif kind != "b1":
                source = f"{source}.view(D.{kind})"
            if source == f"r{number}":
                return source
            views[kind] = f"r{number}_{kind}"
            self.line(f"{views[kind]} = {source}")
        return views[kind]

    def _literal(self, imm: Imm, kind: str) -> str:
        if kind == "b1":
            value: Any = np.bool_(imm.value)
        elif imm.width:
            bits = np.uint32(imm.value) if imm.width == 32 else np.uint64(imm.value)
            value = bits.view(np.float32 if imm.width == 32 else np.float64)
            if kind[0] == "f":
                value = DTYPES[kind](value)
            else:
                value = bits.view(DTYPES[kind])
        elif kind[0] == "f":
            value = DTYPES[kind](imm.value)
        else:
            width = int(kind[1])
            value = np.uint64(int(imm.value) % 2**64).astype(f"u{width}").view(DTYPES[kind])
        return self.constant(value, f"c_{kind}_{value.tobytes().hex()}")

    def _special(self, name: str, kind: str) -> str:
        if name in ("clock", "clock64", "globaltimer", "smid"):
            raise self.unsupported(f"special register %{name}: its value is not defined without hardware")
        return f"F.special({name!r}).astype(D.{kind})"

    def _symbol(self, sym: Sym, kind: str) -> str:
        if sym.name in self.kernel.params:
            offset = self.kernel.params[sym.name].offset + sym.offset
            return self.constant(DTYPES[kind](offset))
        if sym.name in self.kernel.shared:
            return f"M.shared_symbol(F, {sym.name!r}, {sym.offset}).astype(D.{kind})"
        raise self.unsupported(f"address of {sym.name!r}")

    def address(self, mem: Operand, wide: bool) -> str:
        """Byte address of a memory operand: 64 bits if ``wide`` (global, generic, param), else 32 (shared)."""
        if not isinstance(mem, Mem):
            raise self.unsupported("expects an address")
        kind = "u8" if wide else "u4"
        base = mem.base
        if isinstance(base, Sym):
            return self.use(Sym(base.name, base.offset + mem.offset), kind)
        if isinstance(base, Reg):
            width = int(KINDS[self.kernel.registers[base.name]][1])
            text = self.use(base, f"u{width}")
            if width != int(kind[1]):
                text = f"{text}.astype(D.{kind})"
        else:
            text = self.use(base, kind)
        return f"({text} + {self._literal(Imm(mem.offset), kind)})" if mem.offset else text

    def vector(self, operand: Operand) -> tuple[Operand, ...]:
        """Items of a vector operand, or the operand alone."""
        return operand.items if isinstance(operand, Vec) else (operand,)

    @property
    def mask(self) -> str:
        """Expression for the lanes that execute: None is all of them."""
        return f"both(m, {self.guard})" if self.guard else "m"

    # Writing ---------------------------------------------------------------------------------------------------
    def define(self, target: Operand, expression: str, kind: str) -> None:
        """Assigns ``expression`` (of ``kind``) to a register; under a predicate only where it holds."""
        if target is None:
            self.line(expression)
            return
        if not isinstance(target, Reg):
            raise self.unsupported(f"destination {target}")
        name = target.name
        width = KINDS[self.kernel.registers[name]][1]
        if kind != "b1" and width != kind[1]:
            # A narrow value fills a wider register by its signedness (ld.u8 into .b16, cvt.u16.u32 into .b32).
            wide = kind[0] + width
            expression = f"({expression}).astype(D.{wide})"
            kind = wide
        if self.guard:
            expression = f"np.where({self.guard}, {expression}, {self._register(name, kind)})"
        local = f"r{self.numbers[name]}_{kind}"
        self.line(f"{local} = {expression}")
        self.views[name] = {kind: local}
        self.defined.add(name)

    def emit(self, instr: Instr) -> None:
        """Emits one instruction that never waits."""
        self.instr = instr
        self.guard = self.use(instr.pred, "b1") if instr.pred else None
        opcode = OPCODES.get(instr.opcode)
        if opcode is None:
            raise self.unsupported(f"opcode {instr.opcode} is not implemented")
        mods = Mods(instr)
        opcode.emit(self, instr, mods)
        mods.end()
        self.guard = None

    def pair(self, operand: Operand) -> tuple[Reg | None, Reg | None]:
        """Both destinations of ``d|p``; a single destination has no second."""
        if isinstance(operand, Pair):
            return operand.first, operand.second
        assert operand is None or isinstance(operand, Reg)
        return operand, None

    def flush(self, names: set[str]) -> None:
        """Writes locally defined registers back to R, for a helper that reads or replaces them there."""
        for name in sorted(names & self.defined, key=self.numbers.__getitem__):
            self.line(f"R[{self.numbers[name]}] = {next(iter(self.views[name].values()))}")
        self.exposed |= names - self.defined
        self.defined -= names
        self.reload(names)

    def reload(self, names: set[str] | None = None) -> None:
        """Forgets cached copies of registers that a helper may have replaced in R: of all that are not dirty."""
        drop = set(self.views) - self.defined if names is None else names
        self.views = {name: views for name, views in self.views.items() if name not in drop}

    def source(self, name: str, live_out: set[str]) -> tuple[str, list[Instr | None]]:
        """The block as a function ``name(M, F, R, m)``, and the instruction behind each of its lines.

        It returns the operands of the block's terminator.
        """
        stores = sorted(self.defined & live_out, key=self.numbers.__getitem__)
        body, result = self.lines, "return None"
        if body and body[-1].startswith("return "):
            *body, result = body
        if stores:
            items = ", ".join(f"{self.numbers[n]}: {next(iter(self.views[n].values()))}" for n in stores)
            body = [*body, f"if m is None: R.update({{{items}}})", f"else: F.merge(m, {{{items}}})"]
        lines = [f"def {name}(M, F, R, m):", *(f"    {line}" for line in body), f"    {result}"]
        origins = [None, *self.origins[: len(self.lines)]]
        origins += [self.instr] * (len(lines) - len(origins))
        return "\n".join(lines) + "\n", origins
