"""What the simulator takes for granted about a chip: unit rates, which pipe an opcode runs on, latencies."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fa4gen.arch import Arch

__all__ = ["CHIPS", "H200", "PRIOR", "Chip", "Constants", "Pipe", "operation"]


class Pipe:
    """Pipe numbers. Each sub-partition has its own of every one."""

    NONE, FMA, ALU, MUFU, LSU, UNIFORM, CONTROL, TMEM = range(8)
    COUNT = 8


@dataclass(frozen=True)
class Constants:
    """Fitted on one chip; cycles unless named otherwise. They are effective values and trade off against each other.

    ``mbarrier``: from a phase's completion to the waiting warp's next instruction. ``mbarrier_test``: a wait whose
    phase is complete. ``named_barrier``: like ``mbarrier``, of bar.sync. ``mma_start``: from issue to the tensor core's
    start on it; ``mma_drain``: from its end to the instruction behind the wait; ``mma_queue``: MMAs of a warpgroup in
    flight. ``smem_factor``: on the time that MMA operands take to read from shared memory. ``contention`` and
    ``mufu_contention``: how many times longer an instruction holds its pipe, or MUFU, while the tensor cores use the
    register file, and ``issue_cost`` the issue slots it takes then. ``l2_bytes``: bytes a cycle and SM from L2;
    ``load_latency`` and ``store_latency``: of a bulk copy; ``fresh_latency``: what a load takes longer whose data no
    other CTA has read. ``mufu_latency`` and ``shuffle_latency``: to the dependent instruction; ``fence``: between
    writes to shared memory and an MMA or a bulk copy that reads them. ``cta_launch``: from a CTA's exit to the next
    one's start.

    ``umma_start``: like ``mma_start``, of tcgen05.mma; ``umma_commit``: from the end of the MMAs before a commit to the
    mbarrier's arrival; ``tmem_latency``: of tcgen05.ld and st beside the transfer; ``next_tile_latency``: of a request
    for another CTA's tile.

    ``launch_us``: per kernel. ``clock_base`` and ``clock_slope``: GHz; the chip runs at base - slope · (tensor core
    utilisation), at most its maximum.
    """

    mbarrier: float = 85.0
    mbarrier_test: float = 20.0
    named_barrier: float = 12.0
    mma_start: float = 90.0
    mma_drain: float = 10.0
    mma_queue: float = 3.0
    smem_factor: float = 1.1
    contention: float = 2.2
    mufu_contention: float = 1.5
    issue_cost: float = 1.5
    l2_bytes: float = 60.0
    load_latency: float = 600.0
    fresh_latency: float = 1480.0
    store_latency: float = 560.0
    mufu_latency: float = 28.0
    shuffle_latency: float = 24.0
    fence: float = 100.0
    cta_launch: float = 204.0
    umma_start: float = 30.0
    umma_commit: float = 20.0
    tmem_latency: float = 20.0
    next_tile_latency: float = 600.0
    launch_us: float = 2.0
    clock_base: float = 2.003
    clock_slope: float = 0.4323

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits: equal constants, equal digests."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


# Where a fit starts: found by hand, with the counters of tests/data/counters_h200.json in view.
PRIOR = Constants()
# Fitted by scripts/calibrate_model.py: docs/model.md.
H200 = Constants(
    mbarrier=106.0, mma_start=57.6, contention=2.72, mufu_contention=1.875, issue_cost=1.2, l2_bytes=60.2,
    mufu_latency=20.4, fence=80.0,
)  # fmt: skip
# Nobody here has the chip: synchronisation and copies take what they take on the H200. Accumulators lie in TMEM, so
# nothing contends for the register file, and operands arrive at the rate of shared memory (arXiv 2603.05451). Clocks
# are assumed: 1755 MHz is what flash-attn-4's authors lock a B200 to (issue 2570 of their repository), 1920 MHz the
# maximum of a B300.
_BLACKWELL = dataclasses.replace(
    H200, smem_factor=1.0, contention=1.0, mufu_contention=1.0, issue_cost=1.0, clock_base=1.755, clock_slope=0.0
)


@dataclass(frozen=True)
class Chip:
    """Constants of an architecture. ``margin``: the relative difference below which predicted times order nothing."""

    constants: Constants
    calibrated: bool
    margin: float


CHIPS = {
    "sm_90a": Chip(H200, True, 0.05),
    "sm_100a": Chip(_BLACKWELL, False, 0.10),
    "sm_103a": Chip(dataclasses.replace(_BLACKWELL, clock_base=1.92), False, 0.10),
}

_FMA = frozenset({"FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2", "FFMA2", "FADD2", "FMUL2"})
_IMAD = frozenset({"IMAD", "IDP"})
_LSU = frozenset({"LDS", "STS", "STSM", "LDSM", "LDG", "STG", "LD", "ST", "LDL", "STL", "ATOMS", "RED", "ATOMG"})
_CONTROL = frozenset({"BRA", "EXIT", "BSSY", "BSYNC", "WARPSYNC", "NOP", "BAR", "YIELD", "NANOSLEEP", "BREAK"})
# Result latencies of instructions with a scoreboard that are not fitted; dependent-issue figures of public
# microbenchmarks on Hopper (arXiv 2402.13499), rounded.
_LATENCY = {"LDS": 30, "LDSM": 33, "LDG": 550, "LDC": 40, "LDCU": 40, "ULDC": 20, "S2R": 30, "S2UR": 30, "CS2R": 15,
            "R2UR": 15, "VOTEU": 15, "ELECT": 15, "STS": 15, "STSM": 20, "UTMALDG": 20, "UTMASTG": 20, "F2I": 20,
            "I2F": 20, "SYNCS": 25, "UTMACCTL": 20}  # fmt: skip


def operation(arch: Arch, opcode: str, latencies: Mapping[str, float]) -> tuple[int, int, float]:
    """(pipe, cycles a warp instruction holds it, latency of its scoreboard). ``latencies`` of MUFU, SHFL, LDTM, STTM.

    A warp reads or writes one column of its 32 TMEM lanes a cycle: 128 bytes, as shared memory gives the whole SM.
    That rate is assumed.
    """
    base = opcode.partition(".")[0]
    lanes = 4  # sub-partitions
    if base == "MUFU":
        return Pipe.MUFU, 32 * lanes // arch.mufu_ops, latencies[base]
    if base in ("LDTM", "STTM"):
        columns = _tmem_columns(opcode)
        return Pipe.TMEM, columns, latencies[base] + columns
    if base in _FMA:
        return Pipe.FMA, 1 if not base.endswith("2") or base[0] == "H" else 2, 6.0
    if base in _IMAD:
        return Pipe.FMA, 2, 6.0
    if base == "SHFL":
        return Pipe.LSU, 2, latencies[base]
    if base in _LSU:
        return Pipe.LSU, 4 * _registers(opcode), float(_LATENCY.get(base, 30))
    if base in _CONTROL or base.startswith(("WARPGROUP", "HGMMA", "DEPBAR", "FENCE", "MEMBAR", "ERRBAR", "CCTL")):
        return Pipe.CONTROL, 1, 20.0
    if base[0] == "U" or base in ("R2UR", "VOTEU", "ELECT", "S2UR", "SYNCS"):
        return Pipe.UNIFORM, 2, float(_LATENCY.get(base, 12))
    return Pipe.ALU, 2, float(_LATENCY.get(base, 15))


def _registers(opcode: str) -> int:
    """Registers a thread that a load or store moves: a warp's take 4 cycles each, a quarter of shared memory's rate."""
    if matrices := re.search(r"M88\.(\d)", opcode):
        return int(matrices[1])
    return 4 if ".128" in opcode else 2 if ".64" in opcode else 1


def _tmem_columns(opcode: str) -> int:
    """Registers a lane that LDTM or STTM moves: "LDTM.x16" 16, "LDTM.16dp256bit.x4" 16."""
    shape = re.search(r"(\d+)dp(\d+)bit", opcode)
    number = re.search(r"\.x(\d+)", opcode)
    return (int(shape[1]) * int(shape[2]) // 1024 if shape else 1) * (int(number[1]) if number else 1)
