from __future__ import annotations

import pytest

from fa4gen.errors import Fa4genError
from fa4gen.timing.path import NoPath, PathFinder, token_kind
from fa4gen.timing.sass_decode import NO_BARRIER, SassKernel, parse
from fa4gen.timing.trace import Token

PLAIN = 0x000FE20000000000  # stall 1, no switch, no barriers


def text_of(*lines: str | tuple[str, int]) -> str:
    """``nvdisasm -c -hex`` text of one kernel; a line may come with the upper word of its encoding."""
    out = ['\t.section\t.text.kernel,"ax",@progbits', "kernel:"]
    address = 0
    for line in lines:
        text, high = (line, PLAIN) if isinstance(line, str) else line
        if text.endswith(":"):
            out.append(text)
            continue
        out.append(f"        /*{address:04x}*/  {text} ;   /* 0x0000000000000001 */")
        out.append(f"                           /* 0x{high:016x} */")
        address += 16
    return "\n".join(out)


def kernel_of(*lines: str | tuple[str, int]) -> SassKernel:
    (kernel,) = parse(text_of(*lines))
    return kernel


def test_control_bits() -> None:
    # An S2R of a real kernel: 0x000e6e… is stall 7, no switch, write barrier 1, no read barrier, waits for nothing.
    (load, *_, use) = kernel_of(
        ("S2R R0, SR_TID.X", 0x000E6E0000002100), ("SHF.R.U32.HI R2, RZ, 0x5, R0", 0x002FC40000011600)
    ).instructions
    assert (load.stall, load.may_yield, load.write_barrier, load.read_barrier, load.wait_mask) == (7, False, 1, 7, 0)
    assert (use.stall, use.may_yield, use.write_barrier, use.read_barrier, use.wait_mask) == (2, True, 7, 7, 0b10)
    assert load.reuse == 0 and NO_BARRIER == 7
    assert load.opcode == "S2R" and load.operands == "R0, SR_TID.X" and use.base == "SHF"


def test_reuse_bits() -> None:
    (multiply,) = kernel_of(("FMUL R1, R2.reuse, R3", PLAIN | 1 << 58)).instructions
    assert multiply.reuse == 1


def test_successors() -> None:
    kernel = kernel_of("@P0 BRA `(.L_x_1)", "BRA.U !UP0, `(.L_x_1)", "@P1 EXIT", "BRA `(.L_x_0)", ".L_x_1:", "EXIT",
                       ".L_x_0:", "BRA `(.L_x_0)")  # fmt: skip
    assert kernel.successors == ((1, 4), (2, 4), (3,), (5,), (), (5,))


def test_several_kernels() -> None:
    names = [k.name for k in parse(text_of("EXIT") + "\n" + text_of("NOP", "EXIT").replace("kernel", "other"))]
    assert names == ["kernel", "other"]


@pytest.mark.parametrize("line", ["CALL.REL.NOINC `(.L_x_0)", "BRX R2", "BRA `(.L_x_9)"])
def test_unknown_control_flow_is_refused(line: str) -> None:
    with pytest.raises(Fa4genError):
        parse(text_of(line, ".L_x_0:", "EXIT"))


def test_an_indirect_branch_goes_where_its_table_says() -> None:
    branch = 'BRX R2 -0x890 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)'
    kernel = kernel_of(branch, ".L_x_0:", "NOP", "EXIT", ".L_x_1:", "EXIT")
    assert kernel.successors == ((1, 3), (2,), (), ())


def test_a_call_that_traps_leads_nowhere() -> None:
    (kernel,) = parse(text_of("CALL.REL.NOINC `($__internal_0_$__cuda_sm10x_tcgen05_guardrail_trap_x)", "EXIT"))
    assert kernel.successors == ((), ())


WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0"
ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"


def tokens_of(*words: str) -> list[Token]:
    """ "Of "wait:3": a wait that stands in PTX block 3."""
    return [Token(kind, (int(block), 1)) for kind, block in (word.split(":") for word in words)]


def executed(kernel: SassKernel, words: list[Token]) -> list[int]:
    return [step.index for step in PathFinder(kernel).find(words)]


def test_a_path_goes_round_a_loop_as_often_as_its_tokens_say() -> None:
    kernel = kernel_of("NOP", ".L_x_0:", WAIT, "FADD R1, R1, R2", ARRIVE, "@P0 BRA `(.L_x_0)", "EXIT")
    path = PathFinder(kernel).find(tokens_of("wait:1", "arrive:1") * 3)
    assert [step.index for step in path] == [0, *[1, 2, 3, 4] * 3, 5]
    assert [step.token for step in path if step.token >= 0] == list(range(6))


def test_loops_that_synchronise_alike_are_told_apart_by_their_ptx() -> None:
    loop = [WAIT, ARRIVE]
    kernel = kernel_of(".L_x_0:", *loop, "@P0 BRA `(.L_x_0)", ".L_x_1:", *loop, "FADD R1, R1, R2",
                       "@P0 BRA `(.L_x_1)", "EXIT")  # fmt: skip
    masked, plain = tokens_of("wait:1", "arrive:1"), tokens_of("wait:2", "arrive:2")
    path = executed(kernel, masked * 2 + plain * 3)
    assert (path.count(0), path.count(3)) == (2, 3)


def test_a_wait_that_succeeds_does_not_retry_and_a_predicated_arrive_may_do_nothing() -> None:
    kernel = kernel_of(WAIT, "@!P0 BRA `(.L_x_0)", ".L_x_1:", "@P1 " + ARRIVE, "EXIT", ".L_x_0:", WAIT,
                       "@!P0 BRA `(.L_x_0)", "BRA `(.L_x_1)")  # fmt: skip
    assert executed(kernel, tokens_of("wait:1")) == [0, 1, 2, 3]
    assert executed(kernel, tokens_of("wait:1", "arrive:2")) == [0, 1, 2, 3]


def test_what_the_code_cannot_emit_is_named() -> None:
    kernel = kernel_of(WAIT, "EXIT")
    with pytest.raises(NoPath, match=r"token 1, .*arrive"):
        PathFinder(kernel).find(tokens_of("wait:1", "arrive:1"))
    with pytest.raises(NoPath, match="the exit"):
        PathFinder(kernel_of(WAIT, ".L_x_0:", "BRA `(.L_x_0)")).find(tokens_of("wait:1"))


def test_a_dead_end_is_left_again() -> None:
    # Both sides begin with a wait; only the longer one goes on to an arrive.
    kernel = kernel_of("@P0 BRA `(.L_x_0)", WAIT, "EXIT", ".L_x_0:", "NOP", WAIT, ARRIVE, "EXIT")
    assert executed(kernel, tokens_of("wait:1", "arrive:1")) == [0, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("HGMMA.64x80x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT", "mma"),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "mma_wait"),
        ("WARPGROUP.ARRIVE", None),
        ("BAR.SYNC.DEFER_BLOCKING R2, 0x100", "bar_sync"),
        ("UTMALDG.4D [UR32], [UR16], desc[URZ]", "load"),
        ("SYNCS.EXCH.64 URZ, [UR25], UR6", None),
        ("FADD R1, R1, R2", None),
    ],
)
def test_token_kinds(line: str, kind: str | None) -> None:
    assert token_kind(kernel_of(line, "EXIT").instructions[0]) == kind
