"""What a cubin holds: registers, stack, shared memory, spills and the instruction mix, through NVIDIA's own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fa4gen.errors import Fa4genError

__all__ = ["SassReport", "disassemble", "inspect"]

# Their first modifier says what they do (MUFU.EX2, WARPGROUP.DEPBAR, SYNCS.PHASECHK, BAR.SYNC); others count by name.
_NAMED_WITH_MODIFIER = frozenset({"BAR", "MUFU", "SYNCS", "USETMAXREG", "WARPGROUP"})
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)", re.MULTILINE)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class SassReport:
    """Static facts of a cubin: counts are instructions in the text, not executions.

    ``registers`` and ``stack_bytes`` are per thread; ``smem_bytes`` is static shared memory per CTA, 1024 B of which
    sm_90 and later reserve (the dynamic part is chosen at launch and not in the cubin). Each is the largest over the
    cubin's kernels. ``spill_loads`` and ``spill_stores`` count LDL and STL, so indexed local arrays as well. ``mix``
    maps an opcode to its count over all kernels, most frequent first.
    """

    registers: int
    stack_bytes: int
    smem_bytes: int
    spill_loads: int
    spill_stores: int
    mix: dict[str, int]


def inspect(cubin: Path) -> SassReport:
    """Disassembles ``cubin``.

    Raises:
        Fa4genError: a tool is missing, or refuses the file.
    """
    usage = _RESOURCES.findall(_run("cuobjdump", "-res-usage", str(cubin)))
    mix = count_opcodes(disassemble(cubin))
    if not usage or not mix:
        raise Fa4genError(f"{cubin} holds no kernel")
    registers, stack, smem = (max(map(int, column)) for column in zip(*usage, strict=True))
    return SassReport(registers, stack, smem, mix.get("LDL", 0), mix.get("STL", 0), mix)


def disassemble(cubin: Path, encodings: bool = False) -> str:
    """The SASS text; with ``encodings``, each instruction's two words beside it. Raises like :func:`inspect`."""
    return _run("nvdisasm", "-c", *(["-hex"] if encodings else []), str(cubin))


def count_opcodes(sass: str) -> dict[str, int]:
    """Opcode → count in ``nvdisasm -c`` text, without predicates, with a modifier only where it names the operation."""
    counts: Counter[str] = Counter()
    for opcode, modifiers in _INSTRUCTION.findall(sass):
        counts[opcode + "." + modifiers.split(".")[1] if opcode in _NAMED_WITH_MODIFIER and modifiers else opcode] += 1
    return dict(counts.most_common())


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_find(tool), *arguments], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise Fa4genError(f"{tool} cannot read {arguments[-1]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _find(tool: str) -> str:
    """Path of ``tool``: from its pip package, else from PATH."""
    package = f"nvidia-cuda-{tool}"
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == tool:
            return str(file.locate())
    on_path = shutil.which(tool)
    if on_path is None:
        raise Fa4genError(f"{tool} is neither installed with pip nor on PATH: pip install {package}")
    return on_path
