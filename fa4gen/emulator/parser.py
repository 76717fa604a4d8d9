"""PTX text to instructions: scopes resolved, registers and labels unique, operands typed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fa4gen.emulator.errors import UnsupportedInstruction

__all__ = ["Imm", "Instr", "Kernel", "Mem", "Operand", "Pair", "Param", "Reg", "Special", "Sym", "Vec", "parse"]


@dataclass(frozen=True)
class Reg:
    """A register by its unique name. ``negated`` is the ``!`` of a predicate operand."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Special:
    """A special register without its percent sign, for instance ``tid.x``."""

    name: str


@dataclass(frozen=True)
class Imm:
    """A literal. ``width`` is 32 or 64 for the bit patterns ``0f…`` and ``0d…``; 0 for an ordinary number."""

    value: int | float
    width: int = 0


@dataclass(frozen=True)
class Sym:
    """Address of a parameter or shared variable plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Mem:
    """``[base + offset]``, or ``[base, {coordinates}]`` of a tensor copy."""

    base: Reg | Sym | Imm
    offset: int = 0
    coords: Vec | None = None


@dataclass(frozen=True)
class Vec:
    """``{a, b, …}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``d|p``: two destinations."""

    first: Reg | None
    second: Reg | None


# None is the sink ``_``.
Operand = Reg | Special | Imm | Sym | Mem | Vec | Pair | None


@dataclass(frozen=True)
class Instr:
    """One instruction. ``mods``: the dotted parts after ``opcode``; ``source``: (file number, line) of ``.loc``."""

    line: int
    text: str
    pred: Reg | None
    opcode: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    source: tuple[int, int] | None = None

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 160 else self.text[:157] + "..."
        return f"PTX line {self.line}: {text}"


@dataclass(frozen=True)
class Param:
    """A kernel parameter: byte offset in the parameter space and size."""

    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """An entry function. ``labels`` maps a unique label to the index of the instruction that follows it.

    ``registers``: unique name → PTX type. ``shared``: static variable → (alignment, bytes); bytes is 0 for the
    dynamic one. ``threads``: ``.reqntid`` or None.
    """

    name: str
    target: str
    params: dict[str, Param] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    instrs: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    threads: tuple[int, int, int] | None = None
    files: dict[int, str] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        """Size of the parameter space."""
        return max((p.offset + p.size for p in self.params.values()), default=0)


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([bsuf])(\d+)\s+(?:\.ptr[\s.\w]*\s)?([\w$]+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[bsuf](\d+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
_STATEMENT = re.compile(r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$%]+)\s*:(?!:)|(?P<text>[^;]*?);)", re.S)
_TOKEN = re.compile(r"[%$\w.]+|[\[\]{},|!+\-]")


def parse(text: str) -> dict[str, Kernel]:
    """Kernels of a PTX module by name.

    Raises:
        UnsupportedInstruction: a directive or an operand form that is not implemented, with its line.
    """
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*\.loc\s+(\d+)\s+(\d+)[^\n]*", r".loc \1 \2;", text, flags=re.M)
    target = re.search(r"\.target\s+(\w+)", text)
    files = {int(n): name for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    kernels = {}
    for entry in _ENTRY.finditer(text):
        kernel = Kernel(entry.group(1), target.group(1) if target else "", files=files)
        _parse_params(kernel, entry.group(2))
        threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", entry.group(3))
        if threads:
            x, y, z = (int(n or 1) for n in threads.groups())
            kernel.threads = (x, y, z)
        for align, bits, name, count in _SHARED.findall(text[: entry.start()]):
            kernel.shared[name] = (int(align or 1), int(bits) // 8 * int(count or 0))
        _Body(kernel, text, entry.end() - 1).parse()
        kernels[kernel.name] = kernel
    return kernels


def _parse_params(kernel: Kernel, text: str) -> None:
    offset = 0
    for align, _, bits, name, count in _PARAM.findall(text):
        element = int(bits) // 8
        size = element * int(count or 1)
        alignment = int(align or element)
        offset = -(-offset // alignment) * alignment
        kernel.params[name] = Param(name, offset, size)
        offset += size


class _Body:
    """One kernel body: a walk over statements with a stack of scopes, then branch targets are resolved."""

    def __init__(self, kernel: Kernel, text: str, start: int) -> None:
        self.kernel = kernel
        self.text = text
        self.position = start
        self.line = text.count("\n", 0, start) + 1
        self.scopes: list[dict[str, str]] = []
        self.serial = 0
        self.source: tuple[int, int] | None = None

    def parse(self) -> None:
        while True:
            match = _STATEMENT.match(self.text, self.position)
            if match is None:
                raise UnsupportedInstruction(f"PTX line {self.line}: cannot parse {self._snippet()!r}")
            # Not before the group: a statement starts on the line of its first character.
            skipped = len(match.group()) - len(match.group().lstrip())
            line = self.line + self.text.count("\n", match.start(), match.start() + skipped)
            self.line += match.group().count("\n")
            self.position = match.end()
            if match.group("open"):
                self._open_scope()
            elif match.group("close"):
                self.scopes.pop()
                if not self.scopes:
                    return
            elif match.group("label"):
                self.kernel.labels[self.scopes[-1][match.group("label")]] = len(self.kernel.instrs)
            else:
                self._statement(match.group("text").strip(), line)

    def _snippet(self) -> str:
        return self.text[self.position : self.position + 60].strip()

    def _open_scope(self) -> None:
        """Labels may be used before they stand: collect those of the new scope, not of scopes inside it."""
        self.serial += 1
        scope: dict[str, str] = {}
        depth, position = 1, self.position
        while depth:
            match = _STATEMENT.match(self.text, position)
            if match is None:
                break
            position = match.end()
            depth += bool(match.group("open")) - bool(match.group("close"))
            if match.group("label") and depth == 1:
                scope[match.group("label")] = f"{match.group('label')}#{self.serial}"
        self.scopes.append(scope)

    def _statement(self, text: str, line: int) -> None:
        if not text:
            return
        if text.startswith(".loc"):
            _, file, source_line = text.split()
            self.source = (int(file), int(source_line))
        elif text.startswith(".reg"):
            self._declare_registers(text)
        elif text.startswith(".shared"):
            for align, bits, name, count in _SHARED.findall(text + ";"):
                self.kernel.shared[name] = (int(align or 1), int(bits) // 8 * int(count or 1))
        elif text.startswith(".pragma"):
            return
        elif text.startswith("."):
            raise UnsupportedInstruction(f"PTX line {line}: directive {text!r}")
        else:
            self.kernel.instrs.append(self._instruction(text, line))

    def _declare_registers(self, text: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups()  # type: ignore[union-attr]
        outermost = len(self.scopes) == 1
        for name in names.split(","):
            stem, _, count = name.strip().partition("<")
            members = [f"{stem}{i}" for i in range(int(count[:-1]))] if count else [stem]
            for member in members:
                unique = member if outermost else f"{member}#{self.serial}"
                self.scopes[-1][member] = unique
                self.kernel.registers[unique] = kind

    def _instruction(self, text: str, line: int) -> Instr:
        text = " ".join(text.split())
        pred = None
        rest = text
        if rest.startswith("@"):
            guard, rest = rest[1:].split(None, 1)
            operand = self._name(guard.lstrip("!"), line)
            assert isinstance(operand, Reg)
            pred = Reg(operand.name, guard.startswith("!"))
        head, _, tail = rest.partition(" ")
        opcode, *mods = head.split(".")
        tokens = _TOKEN.findall(tail)
        operands = []
        while tokens:
            operands.append(self._operand(tokens, line))
            if tokens and tokens.pop(0) != ",":
                raise UnsupportedInstruction(f"PTX line {line}: cannot parse the operands of {text!r}")
        return Instr(line, text, pred, opcode, tuple(mods), tuple(operands), self.source)

    def _operand(self, tokens: list[str], line: int) -> Operand:
        token = tokens.pop(0)
        if token == "{":
            return self._vector(tokens, line)
        if token == "[":
            return self._memory(tokens, line)
        if token == "!":
            operand = self._name(tokens.pop(0), line)
            assert isinstance(operand, Reg)
            return Reg(operand.name, True)
        if token == "-":
            value = _number(tokens.pop(0))
            assert value is not None
            return Imm(-value.value)
        value = _number(token)
        operand = value if value is not None else self._name(token, line)
        if tokens and tokens[0] == "|":
            tokens.pop(0)
            second = self._name(tokens.pop(0), line)
            assert operand is None or isinstance(operand, Reg)
            assert second is None or isinstance(second, Reg)
            return Pair(operand, second)
        if isinstance(operand, Sym) and tokens and tokens[0] == "+":
            tokens.pop(0)
            return Sym(operand.name, int(tokens.pop(0), 0))
        return operand

    def _vector(self, tokens: list[str], line: int) -> Vec:
        items = []
        while True:
            items.append(self._operand(tokens, line))
            if tokens.pop(0) == "}":
                return Vec(tuple(items))

    def _memory(self, tokens: list[str], line: int) -> Mem:
        value = _number(tokens[0])
        base = value if value is not None else self._name(tokens[0], line)
        tokens.pop(0)
        assert isinstance(base, (Reg, Sym, Imm))
        offset, coords = 0, None
        while (token := tokens.pop(0)) != "]":
            if token in "+-":
                sign = -1 if token == "-" else 1
                if tokens[0] == "-":
                    sign = -sign
                    tokens.pop(0)
                offset += sign * int(tokens.pop(0), 0)
            elif token == "," and tokens[0] == "{":
                tokens.pop(0)
                coords = self._vector(tokens, line)
            else:
                raise UnsupportedInstruction(f"PTX line {line}: address form with {token!r}")
        return Mem(base, offset, coords)

    def _name(self, token: str, line: int) -> Operand:
        if token == "_":
            return None
        for scope in reversed(self.scopes):
            if token in scope:
                unique = scope[token]
                return Reg(unique) if unique in self.kernel.registers else Sym(unique)
        if token in self.kernel.params or token in self.kernel.shared:
            return Sym(token)
        if token.startswith("%"):
            return Special(token[1:])
        raise UnsupportedInstruction(f"PTX line {line}: unknown name {token!r}")


def _number(token: str) -> Imm | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", token):
        return Imm(int(token[2:], 16), 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", token):
        return Imm(int(token[2:], 16), 64)
    if re.fullmatch(r"0[xX][0-9a-fA-F]+U?|\d+U?", token):
        return Imm(int(token.rstrip("U"), 0))
    if re.fullmatch(r"\d+\.\d*(?:[eE]\d+)?", token):
        return Imm(float(token))
    return None
