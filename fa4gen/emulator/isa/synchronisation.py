"""Barriers, fences, waits, register reallocation and grid dependencies."""

from __future__ import annotations

from fa4gen.emulator.isa.base import Emitter, Mods, op, suspension
from fa4gen.emulator.parser import Imm, Instr, Mem, Operand

__all__ = ["suspension_of"]


def suspension_of(instr: Instr) -> str | None:
    """Name of the wait that ``instr`` is, or None if it never waits."""
    mods = instr.mods
    if instr.opcode == "mbarrier" and mods[0] in ("try_wait", "test_wait"):
        return "mbarrier.wait"
    if instr.opcode in ("bar", "barrier"):
        if "cluster" in mods:
            return "barrier.cluster.wait" if "wait" in mods else None
        return "barrier.sync" if "sync" in mods and "warp" not in mods else None
    if instr.opcode == "cp" and mods[:3] == ("async", "bulk", "wait_group"):
        return "bulk.wait_group"
    if instr.opcode == "setmaxnreg" and "inc" in mods:
        return "setmaxnreg.inc"
    if instr.opcode == "tcgen05" and mods[0] == "alloc":
        return "tcgen05.alloc"
    if instr.opcode == "converge":
        return "converge"
    return None


def shared_address(e: Emitter, m: Mods, operand: Operand) -> str:
    """Address of an mbarrier: shared memory, or generic (64 bits) if no space is named."""
    if m.take("shared", "shared::cta", "shared::cluster"):
        return e.address(operand, False)
    return f"M.shared_of_generic({e.address(operand, True)})"


@suspension("converge")
def _converge(e: Emitter, i: Instr, m: Mods) -> str:
    """Pseudo-instruction in front of warpgroup-wide ones: waits for all four warps."""
    return "()"


@suspension("mbarrier.wait")
def _mbarrier_wait(e: Emitter, i: Instr, m: Mods) -> str:
    blocking = m.need("try_wait", "test_wait") == "try_wait"
    parity = bool(m.take("parity"))
    m.need("b64")
    m.take("acquire")
    relaxed = bool(m.take("relaxed"))
    m.take("cta", "cluster")
    address = shared_address(e, m, i.operands[1])
    phase = e.use(i.operands[2], "u4" if parity else "u8")
    hinted = blocking and len(i.operands) > 3
    return f"({address}, {phase}, {parity}, {hinted}, {relaxed})"


@suspension("barrier.sync")
def _barrier_sync(e: Emitter, i: Instr, m: Mods) -> str:
    m.need("sync")
    m.take("cta")
    m.take("aligned")
    return f"({_barrier_operands(e, i)})"


@suspension("barrier.cluster.wait")
def _cluster_wait(e: Emitter, i: Instr, m: Mods) -> str:
    m.need("cluster")
    m.need("wait")
    m.take("acquire")
    m.take("aligned")
    return "()"


@suspension("bulk.wait_group")
def _bulk_wait(e: Emitter, i: Instr, m: Mods) -> str:
    m.rest[:3] = []
    reads_only = bool(m.take("read"))
    count = i.operands[0]
    assert isinstance(count, Imm)
    return f"({int(count.value)}, {reads_only})"


@suspension("setmaxnreg.inc")
def _more_registers(e: Emitter, i: Instr, m: Mods) -> str:
    return f"({_register_count(i, m)},)"


def _register_count(i: Instr, m: Mods) -> int:
    m.need("inc", "dec")
    m.need("sync")
    m.need("aligned")
    m.need("u32")
    count = i.operands[0]
    assert isinstance(count, Imm)
    return int(count.value)


def _barrier_operands(e: Emitter, i: Instr) -> str:
    number = e.use(i.operands[0], "u4")
    threads = e.use(i.operands[1], "u4") if len(i.operands) > 1 else "None"
    return f"{number}, {threads}"


@op("bar", "barrier", unit="barrier")
def _barrier(e: Emitter, i: Instr, m: Mods) -> None:
    if m.take("cluster"):
        m.need("arrive")
        m.take("release")
        m.take("aligned")
        e.line(f"M.cluster_arrive(F, {bool(m.take('relaxed'))}, {e.mask})")
    elif m.take("warp"):
        m.need("sync")
        e.line(f"M.warp_sync(F, {e.use(i.operands[0], 'u4')}, {e.mask})")
    else:
        m.need("arrive")
        m.take("cta")
        m.take("aligned")
        e.line(f"M.barrier_arrive(F, {_barrier_operands(e, i)}, {e.mask})")


@op("mbarrier", unit="barrier")
def _mbarrier(e: Emitter, i: Instr, m: Mods) -> None:
    action = m.need("init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx")
    if action == "arrive_drop" or action == "complete_tx":
        raise e.unsupported(f"mbarrier.{action}")
    expect = action == "expect_tx" or bool(m.take("expect_tx"))
    if m.take("noComplete"):
        raise e.unsupported("mbarrier.arrive.noComplete")
    m.need("b64")
    m.take("release")
    relaxed = bool(m.take("relaxed"))
    m.take("cta", "cluster")
    operands = list(i.operands)
    state = None if isinstance(operands[0], Mem) else operands.pop(0)
    address = shared_address(e, m, operands[0])
    value = e.use(operands[1], "u4") if len(operands) > 1 else "None"
    if action == "init":
        e.line(f"M.mbarrier_init(F, {address}, {value}, {e.mask})")
    elif action == "inval":
        e.line(f"M.mbarrier_inval(F, {address}, {e.mask})")
    else:
        count, tx = ("c_u4_one", value) if expect else (value if value != "None" else "c_u4_one", "None")
        count = "None" if action == "expect_tx" else count
        call = f"M.mbarrier_arrive(F, {address}, {count}, {tx}, {relaxed}, {e.mask})"
        e.define(state, call, "u8")


@op("fence", "membar", unit="barrier")
def _fence(e: Emitter, i: Instr, m: Mods) -> None:
    if m.take("proxy"):
        kind = m.need("async", "async::generic", "tensormap::generic", "alias")
        if kind in ("tensormap::generic", "alias"):
            raise e.unsupported(f"fence.proxy.{kind}")
        m.take("acquire", "release")
        m.take("sync_restrict::shared::cluster", "sync_restrict::shared::cta")
        m.take("cluster", "cta")
        space = m.take("global", "shared::cta", "shared::cluster") or "all"
        e.line(f"M.fence_proxy_async(F, {space!r}, {e.mask})")
    elif m.take("mbarrier_init"):
        m.need("release")
        m.need("cluster")
        e.line(f"M.fence_mbarrier_init(F, {e.mask})")
    else:
        m.take("sc", "acq_rel", "acquire", "release")
        m.take("sync_restrict::shared::cluster", "sync_restrict::shared::cta")
        m.take("cta", "cluster", "gpu", "sys", "gl")
        e.line(f"M.fence(F, {e.mask})")


@op("setmaxnreg", unit="barrier")
def _fewer_registers(e: Emitter, i: Instr, m: Mods) -> None:
    e.line(f"M.set_registers(F, {_register_count(i, m)})")


@op("griddepcontrol", unit="barrier")
def _grid_dependency(e: Emitter, i: Instr, m: Mods) -> None:
    """Kernels of one host call run one after another: the wait is over before it starts."""
    m.need("wait", "launch_dependents")


@op("nanosleep", unit="barrier")
def _sleep(e: Emitter, i: Instr, m: Mods) -> None:
    m.kind()
