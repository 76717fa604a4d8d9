"""What a kernel may not do is an error that says where: one small kernel for each."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import per_thread, run_ptx
from test_isa import ARMED, WAIT

from fa4gen.emulator import Deadlock, KernelFault, LaunchError, RaceError

STORE_SHARED = "shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1; st.shared.b32 [%r3+1024], %r0;"
LOAD_OTHER = "xor.b32 %r4, %r0, 32; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r1; ld.shared.b32 %r20, [%r4+1024];"
COPY_IN = f"""{ARMED}
    @%p1 bra loaded;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd40], 128, [%r1];
    loaded: {WAIT}
"""
COPY_OUT = """
    @%p1 bra stored;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1+1024], 128;
    cp.async.bulk.commit_group;
"""


def buffer() -> np.ndarray:
    return np.arange(32, dtype=np.int32)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r20, [%rd40+4096];", "outside every tensor; argument 0 ends"),
        ("ld.global.b32 %r20, [%rd40+2];", "misaligned"),
        ("st.global.v4.b32 [%rd40+8], {%r0, %r0, %r0, %r0};", "misaligned"),
        ("ld.shared.b32 %r20, [%r1+8192];", "outside the CTA's 0x400"),
        ("st.shared.b64 [%r1+4], %rd40;", "not aligned to 8 bytes"),
        ("ld.shared.b32 %r20, [%r1+64];", "reads shared memory of CTA .* which nothing wrote"),
        ("mov.b32 %r2, 5; mapa.shared::cluster.u32 %r3, %r1, %r2; ld.shared::cluster.b32 %r20, [%r3];", "names CTA 5"),
        ("mbarrier.arrive.shared.b64 _, [%r1], 1;", "mbarrier at 0x400 .* nothing initialised"),
        ("mbarrier.init.shared.b64 [%r1], 0;", "count of 0"),
        ("setp.lt.u32 %p1, %r0, 3; @!%p1 bra e; vote.sync.any.pred %p2, %p1, 0x3; e:", "member mask leaves it out"),
        ("mov.b32 %r2, 48; bar.sync 1, %r2;", "48 threads, not a multiple"),
        ("barrier.cluster.wait;", "without an arrive"),
        ("wgmma.fence.sync.aligned;", None),
    ],
)
def test_faults_name_the_line(body, message):
    if message is None:  # a single warp never makes a warpgroup
        with pytest.raises(Deadlock, match=r"other warps of its warpgroup\s+at PTX line"):
            run_ptx(body, buffer())
        return
    with pytest.raises(KernelFault, match=message) as caught:
        run_ptx(body, buffer())
    assert "PTX line" in caught.value.where and "CTA (0, 0, 0) warps 0" in caught.value.where


def test_registers_are_poison_until_written():
    bits = per_thread("mul.f32 %r20, %r250, 0f3F800000;", "%r20", dtype=np.float32)
    assert np.isnan(bits).all()
    partly = per_thread("setp.lt.u32 %p1, %r0, 4; @%p1 mov.b32 %r20, 1;", "%r20")
    assert (partly[:4] == 1).all() and (partly[4:] != 1).all()


def test_outputs_are_poison_until_written():
    with pytest.raises(KernelFault, match="argument 0 at byte 0, which nothing wrote"):
        run_ptx("ld.global.b32 %r20, [%rd40];", buffer(), outputs=(0,))


def test_arrivals_beyond_the_count():
    with pytest.raises(KernelFault, match="more arrivals than its 1"):
        run_ptx(f"{ARMED} mbarrier.arrive.shared.b64 _, [%r1], 3;", buffer())


def test_deadlock_on_an_mbarrier_reports_its_state():
    expect = "@!%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;"
    with pytest.raises(
        Deadlock, match=r"parity 0 of mbarrier at 0x400 .phase 0, 0 of 1 arrivals and 64 bytes pending"
    ) as e:
        run_ptx(ARMED + expect + WAIT)
    assert "mbarrier.try_wait" in str(e.value)


def test_deadlock_of_a_poll_without_time_hint():
    poll = "again: mbarrier.try_wait.parity.shared.b64 %p9, [%r1], 0; @!%p9 bra again;"
    with pytest.raises(Deadlock, match="parity 0 of mbarrier at 0x400"):
        run_ptx(ARMED + poll)


def test_deadlock_of_a_flag_that_nobody_sets():
    spin = "again: ld.acquire.gpu.global.b32 %r4, [%rd40]; setp.eq.s32 %p3, %r4, 0; @%p3 bra again;"
    with pytest.raises(Deadlock, match="something it polls"):
        run_ptx(spin, np.zeros(4, np.int32))


def test_setmaxnreg_past_the_pool_hangs_and_says_so():
    # 256 threads get 248 registers at launch with one CTA an SM: nothing was given away.
    with pytest.raises(Deadlock, match=r"256 registers a thread: the CTA has 0 x 32 free, this warp needs 8 more"):
        run_ptx("setmaxnreg.inc.sync.aligned.u32 256;", threads=256)
    run_ptx(
        """setp.lt.u32 %p1, %r0, 128;
        @%p1 bra less;
        setmaxnreg.inc.sync.aligned.u32 256;
        bra end;
        less: setmaxnreg.dec.sync.aligned.u32 240;
        end:""",
        threads=256,
    )


def test_shared_memory_owed_to_a_store_at_exit():
    out = np.zeros(32, np.int32)
    run_ptx(COPY_IN + COPY_OUT + "cp.async.bulk.wait_group.read 0; stored:", out)
    with pytest.raises(
        KernelFault, match=r"may still read its shared memory: no cp\.async\.bulk\.wait_group covers it"
    ):
        run_ptx(COPY_IN + COPY_OUT + "stored:", out)


def test_too_much_shared_memory_is_refused_at_launch():
    with pytest.raises(LaunchError, match="needs 240000 bytes of shared memory, the device has 232448"):
        run_ptx("", smem=240000)


def test_bar_sync_orders_shared_memory():
    run_ptx(STORE_SHARED + "bar.sync 0;" + LOAD_OTHER, threads=64, races=True)
    apart = "shr.u32 %r30, %r0, 5; add.s32 %r30, %r30, 1; bar.sync %r30, 32;"
    with pytest.raises(
        RaceError, match=r"byte 0x8.. of the shared memory .* accessed by warp . .*but was written by warp"
    ):
        run_ptx(STORE_SHARED + apart + LOAD_OTHER, threads=64, races=True)


def test_reading_before_a_write_is_a_race_too():
    write_other = LOAD_OTHER.replace("ld.shared.b32 %r20, [%r4+1024]", "st.shared.b32 [%r4+1024], %r0")
    own = STORE_SHARED + "ld.shared.b32 %r21, [%r3+1024];"
    with pytest.raises(RaceError):
        run_ptx(own + write_other, threads=64, races=True)
    run_ptx(own + "bar.sync 0;" + write_other, threads=64, races=True)


FILL_AND_STORE = """
    setp.ne.u32 %p1, %r0, 0;
    shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1; st.shared.b32 [%r3+1024], %r0;
    {fence}
    {meet}
    @%p1 bra stored;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40], [%r1+1024], 128;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    stored:
"""


@pytest.mark.parametrize("meet", ["bar.sync 0;", "bar.warp.sync -1;"])
def test_bulk_stores_need_the_proxy_fence_and_the_meeting(meet):
    fence = "fence.proxy.async.shared::cta;"
    run_ptx(FILL_AND_STORE.format(fence=fence, meet=meet), buffer(), races=True)
    for part in ({"fence": "", "meet": meet}, {"fence": fence, "meet": ""}):
        with pytest.raises(RaceError, match="a bulk store of warp 0"):
            run_ptx(FILL_AND_STORE.format(**part), buffer(), races=True)


def test_loads_need_the_wait_and_the_init_fence():
    data = buffer()
    use = "shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1; ld.shared.b32 %r20, [%r3+1024];"
    run_ptx(COPY_IN + use, data, races=True)
    with pytest.raises(RaceError, match="was written by a load on the mbarrier at 0x400"):
        run_ptx(COPY_IN.replace(WAIT, "") + use, data, races=True)
    with pytest.raises(RaceError, match="with no fence since"):
        run_ptx(COPY_IN.replace("fence.mbarrier_init.release.cluster;", "") + use, data, races=True)


TWO_PHASES = """
    and.b32 %r3, %r0, 31; setp.ne.u32 %p1, %r3, 0; shr.u32 %r4, %r0, 5; setp.ne.u32 %p2, %r4, 0;
    setp.ne.u32 %p3, %r0, 0;
    @%p3 bra armed;
    mbarrier.init.shared.b64 [%r1], {count}; fence.mbarrier_init.release.cluster;
    armed: bar.sync 0;
    {body}
"""
WAIT_PHASE = """{label}:
    mbarrier.try_wait.parity.shared.b64 %p9, [%r1], {phase}, 10000000; @!%p9 bra {label};
"""


def test_an_arrival_must_know_the_phase_before():
    arrive = "@!%p1 mbarrier.arrive.shared.b64 _, [%r1];"
    first = WAIT_PHASE.format(label="first", phase=0)
    run_ptx(TWO_PHASES.format(count=2, body=arrive + first + arrive), threads=64, races=True)
    with pytest.raises(RaceError, match="may do so a phase too early: nothing tells it that warp"):
        run_ptx(TWO_PHASES.format(count=2, body=arrive + arrive), threads=64, races=True)


def test_a_wait_must_know_the_phase_before():
    """Warp 1 waits for the second phase, whose parity is also that of a barrier that nobody has arrived at."""
    first, second = (WAIT_PHASE.format(label=f"phase{phase}", phase=phase) for phase in (0, 1))
    arrive, meet = "@!%p1 mbarrier.arrive.shared.b64 _, [%r1];", "bar.sync 1, 64;"
    body = "@%p2 bra waits; {arrive}{meet}{arrive}{told} bra end; waits: {waits} end:"
    good = body.format(arrive=arrive, meet=meet, told="", waits=first + meet + second)
    run_ptx(TWO_PHASES.format(count=1, body=good), threads=64, races=True)
    # Relaxed, a flag tells of no more than itself.
    told = "st.relaxed.gpu.global.b32 [%rd40], 1;"
    hears = "hears: ld.relaxed.gpu.global.b32 %r5, [%rd40]; setp.eq.s32 %p4, %r5, 0; @%p4 bra hears;"
    bad = body.format(arrive=arrive, meet="", told=told, waits=hears + second)
    with pytest.raises(RaceError, match="may take an older phase for it: nothing tells it that warp 0"):
        run_ptx(TWO_PHASES.format(count=1, body=bad), np.zeros(4, np.int32), threads=64, races=True)


def test_two_ctas_writing_one_place_race_in_global_memory():
    body = "mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd40, %rd1; st.global.b32 [%rd1], %r0;"
    for grid in (2, 16):  # 16 do not run together
        with pytest.raises(RaceError, match="of argument 0"):
            run_ptx(body, buffer(), grid=grid, outputs=(0,), races=True)
    run_ptx("mov.u32 %r2, %ctaid.x; shl.b32 %r2, %r2, 5; add.s32 %r0, %r0, %r2;" + body, np.zeros(512, np.int32),
            grid=16, outputs=(0,), races=True)  # fmt: skip


def test_a_flag_orders_ctas():
    """Release and acquire at a global flag, across CTAs."""
    flagged = """
    mov.u32 %r2, %ctaid.x;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra second;
    st.global.b32 [%rd40], 7;
    {release}
    bra done;
    second:
    wait: ld.acquire.gpu.global.b32 %r4, [%rd41];
    setp.eq.s32 %p3, %r4, 0; @%p3 bra wait;
    ld.global.b32 %r20, [%rd40];
    done:
    """
    one = "setp.ne.u32 %p1, %r0, 0; @%p1 bra end;"
    good = "st.release.gpu.global.b32 [%rd41], 1;"
    run_ptx(
        one + flagged.format(release=good) + "end:", buffer(), np.zeros(4, np.int32), grid=2, outputs=(0,), races=True
    )
    with pytest.raises(RaceError):
        run_ptx(one + flagged.format(release="st.relaxed.gpu.global.b32 [%rd41], 1;") + "end:", buffer(),
                np.zeros(4, np.int32), grid=2, outputs=(0,), races=True)  # fmt: skip


def test_a_cta_may_not_leave_while_its_peer_uses_its_memory():
    body = """
    mov.u32 %r10, %cluster_ctarank; xor.b32 %r11, %r10, 1;
    mapa.shared::cluster.u32 %r4, %r1, %r11; mad.lo.s32 %r4, %r0, 4, %r4;
    barrier.cluster.arrive; barrier.cluster.wait;
    st.shared::cluster.b32 [%r4+1024], %r0;
    """
    run_ptx(body + "barrier.cluster.arrive; barrier.cluster.wait;", grid=2, cluster=2, races=True)
    with pytest.raises((RaceError, KernelFault), match="exit"):
        run_ptx(body, grid=2, cluster=2, races=True)
