from __future__ import annotations

from dataclasses import replace

import pytest
from test_timing_sass import ARRIVE, WAIT, kernel_of

from fa4gen.arch import get_arch
from fa4gen.timing.constants import H200, Pipe, operation
from fa4gen.timing.path import PathFinder, Step
from fa4gen.timing.simulator import SmResult, Stuck, prepare, simulate
from fa4gen.timing.trace import Token, Trace

SM90 = get_arch("sm_90a")
LOAD = "UTMALDG.4D [UR32], [UR16], desc[URZ]"
MMA = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
UMMA = "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT"
COMMIT = "UTCBAR [UR4], URZ"
LATENCIES = {"MUFU": 20.0, "SHFL": 24.0, "LDTM": 20.0, "STTM": 20.0}


def run(
    lines: list,
    warps: list[list[Token]],
    mbarriers: dict[int, int] | None = None,
    arch: str = "sm_90a",
    ctas: int = 1,
    **constants: float,
) -> SmResult:
    """One kernel's ``lines`` run by CTAs whose warps emit these tokens."""
    kernel = kernel_of(*lines, "EXIT")
    finder = PathFinder(kernel)
    trace = Trace(tuple(map(tuple, warps)), mbarriers or {})
    program = prepare(kernel, trace, [finder.find(tokens) for tokens in warps], ctas)
    return simulate(get_arch(arch), replace(H200, **constants), program)


def token(kind: str, *values: int, block: int = 0) -> Token:
    return Token(kind, (block, 0), values)


def test_mufu_takes_eight_cycles_a_warp_instruction_on_each_sub_partition() -> None:
    lines = ["MUFU.EX2 R1, R1"] * 50
    alone = run(lines, [[]])
    assert alone.cycles == pytest.approx(8 * 50, abs=10)
    assert run(lines, [[]] * 4).cycles == alone.cycles, "four sub-partitions"
    assert run(lines, [[]] * 8).cycles == pytest.approx(2 * 8 * 50, abs=10)
    assert alone.pipes[Pipe.MUFU] == 8 * 50 / 4 and alone.issued == 51


def test_a_stall_count_holds_the_warp_and_leaves_the_slot_to_another() -> None:
    stalled = [("FADD R1, R1, R2", 0x000FC80000000000)] * 50  # 4 cycles
    alone = run(stalled, [[]])
    assert alone.cycles == pytest.approx(4 * 50, abs=5)
    assert run(stalled, [[]] * 16).cycles == pytest.approx(alone.cycles, abs=5), "four warps fit a sub-partition"
    assert run(stalled, [[]] * 32).cycles == pytest.approx(2 * alone.cycles, abs=10)


def test_a_scoreboard_delays_who_waits_for_it() -> None:
    write, wait = 0x000E220000000000, 0x001FE20000000000  # sets barrier 0; waits for it
    load, use = ("MUFU.EX2 R1, R1", write), ("FADD R2, R1, R1", wait)
    fast, slow = (run([load, use] * 20, [[]], mufu_latency=latency) for latency in (20, 60))
    assert slow.cycles - fast.cycles == pytest.approx(20 * 40, abs=5)


def test_mmas_of_two_warpgroups_queue_for_one_tensor_core() -> None:
    lines = [*[MMA] * 10, "WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    group = [[*[token("mma", 128, 16, 1)] * 10, token("mma_wait", 0)]] * 4
    one, two = run(lines, group), run(lines, group * 2)
    assert one.tensor == 10 * 64 and two.tensor == 20 * 64
    assert 640 < one.cycles < 640 + H200.mma_start + H200.mma_drain + 20
    assert two.cycles - one.cycles == pytest.approx(640, abs=30)


def test_pipes_are_slower_while_tensor_cores_run() -> None:
    lines = [*[MMA] * 10, *["FMNMX R1, R1, R2, !PT"] * 150]
    group = [[token("mma", 128, 16, 1)] * 10] * 4
    free, contended = (run(lines, group, contention=c, mma_queue=64) for c in (1.0, 2.0))
    assert contended.cycles > free.cycles * 1.4


def test_a_load_takes_its_latency_and_its_share_of_l2() -> None:
    lines = [ARRIVE, LOAD, WAIT]
    tokens = [token("arrive", 64, 1, 6400), token("load", 64, 6400, 6400, 0), token("wait", 64, 0)]
    fixed = {"l2_bytes": 64.0, "load_latency": 500.0, "mbarrier": 100.0}
    assert run(lines, [tokens], {64: 1}, **fixed).cycles == pytest.approx(100 + 500 + 100, abs=10)
    fresh = [tokens[0], token("load", 64, 6400, 6400, 1), tokens[2]]
    assert run(lines, [fresh], {64: 1}, fresh_latency=300.0, **fixed).cycles == pytest.approx(1000, abs=10)


def test_a_named_barrier_waits_for_the_last() -> None:
    sync = "BAR.SYNC.DEFER_BLOCKING 0x1, 0x40"
    lines = ["@P0 BRA `(.L_x_0)", *["MUFU.EX2 R1, R1"] * 40, sync, "EXIT", ".L_x_0:", sync]
    late, early = token("bar_sync", 1, 64, block=1), token("bar_sync", 1, 64, block=2)
    kernel = kernel_of(*lines, "EXIT")
    trace = Trace(((late,), (early,)), {})
    end = len(kernel.instructions) - 1
    paths = [[*map(Step, range(41)), Step(41, 0), Step(42)], [Step(0), Step(end - 1, 0), Step(end)]]
    assert simulate(SM90, H200, prepare(kernel, trace, paths)).cycles == pytest.approx(320 + H200.named_barrier, abs=15)


@pytest.mark.parametrize(("in_tmem", "held", "cycles"), [(0, 128, 64), (1, 128, 64), (0, 64, 64), (0, 256, 96)])
def test_tcgen05_multiplies_as_fast_as_its_operands_arrive(in_tmem: int, held: int, cycles: int) -> None:
    """128 x 128 x 16 takes 64 cycles; A and B of 4 KB each as long, a B of 8 KB longer."""
    tokens = [[*[token("umma", 128, 128, held, 16, in_tmem)] * 10, token("umma_commit", 64), token("wait", 64, 0)]]
    result = run([*[UMMA] * 10, COMMIT, WAIT], tokens, {64: 1}, "sm_100a", smem_factor=1, mbarrier=100)
    assert result.tensor == 10 * 64
    assert result.smem == 10 * (held + (0 if in_tmem else 128)) * 32 / 128
    expected = 10 * cycles + H200.umma_start + H200.umma_commit + 100
    assert result.cycles == pytest.approx(expected, abs=20)


def test_tmem_gives_a_warp_a_column_a_cycle() -> None:
    assert run(["LDTM.x32 R4, tmem[UR4]"] * 10, [[]], arch="sm_100a").cycles == pytest.approx(320, abs=40)


def test_two_ctas_of_an_sm_share_its_units_but_no_barrier() -> None:
    sync = [token("bar_sync", 1, 64)]
    lines = ["MUFU.EX2 R1, R1"] * 50 + ["BAR.SYNC.DEFER_BLOCKING 0x1, 0x40"]
    one, two = (run(lines, [sync] * 2, ctas=n) for n in (1, 2))
    assert two.issued == 2 * one.issued and one.cycles == two.cycles, "four warps on four sub-partitions"


def test_a_request_for_a_tile_is_answered_later() -> None:
    tokens = [[token("arrive", 64, 1, 16), token("next_tile", 64, 16), token("wait", 64, 0)]]
    lines = [ARRIVE, "UGETNEXTWORKID.BROADCAST [UR4], [UR6]", WAIT]
    result = run(lines, tokens, {64: 1}, "sm_100a", next_tile_latency=700, mbarrier=100)
    assert result.cycles == pytest.approx(800, abs=10)


def test_warps_that_wait_for_nothing_are_stuck() -> None:
    with pytest.raises(Stuck):
        run([WAIT], [[token("wait", 64, 0)]], {64: 1})


@pytest.mark.parametrize(
    ("opcode", "pipe", "cycles"),
    [("MUFU.EX2", Pipe.MUFU, 8), ("FFMA", Pipe.FMA, 1), ("IMAD.MOV.U32", Pipe.FMA, 2), ("FMNMX", Pipe.ALU, 2),
     ("F2FP.BF16.F32.PACK_AB", Pipe.ALU, 2), ("UIADD3", Pipe.UNIFORM, 2), ("STSM.16.M88.4", Pipe.LSU, 16),
     ("LDS.64", Pipe.LSU, 8), ("LDS", Pipe.LSU, 4),
     ("FFMA2", Pipe.FMA, 2), ("LDTM.x16", Pipe.TMEM, 16), ("STTM.16dp256bit.x4", Pipe.TMEM, 16)],
)  # fmt: skip
def test_operations(opcode: str, pipe: int, cycles: int) -> None:
    assert operation(SM90, opcode, LATENCIES)[:2] == (pipe, cycles)
    if opcode == "MUFU.EX2":
        assert operation(get_arch("sm_103a"), opcode, LATENCIES)[1] == 4
