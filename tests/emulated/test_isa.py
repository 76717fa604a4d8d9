"""Instructions one at a time, against numpy or the PTX ISA's own words."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import per_thread, run_ptx, tensor_map

from fa4gen.emulator import UnsupportedInstruction

LANE = np.arange(32, dtype=np.uint32)


def loads(*kinds: str) -> str:
    """One element a thread of every input array: into %r10 and up (b32), %rd10 and up (b64) or %h10 and up (b16)."""
    text = []
    for i, kind in enumerate(kinds):
        register = {"b32": f"%r{10 + i}", "b64": f"%rd{10 + i}", "b16": f"%h{10 + i}"}[kind]
        address = f"mul.wide.u32 %rd2, %r0, {int(kind[1:]) // 8}; add.s64 %rd2, %rd{41 + i}, %rd2;"
        text.append(f"{address} ld.global.{kind} {register}, [%rd2];")
    return "\n".join(text)


rng = np.random.default_rng(0)
A = rng.integers(-(2**31), 2**31, 32).astype(np.int32)
B = rng.integers(-100, 100, 32).astype(np.int32)
B[B == 0] = 7
X = rng.normal(size=32).astype(np.float32)
Y = (rng.normal(size=32) * 1e3).astype(np.float32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add.s32 %r20, %r10, %r11;", lambda a, b: a + b),
        ("mul.lo.s32 %r20, %r10, %r11;", lambda a, b: a * b),
        ("mul.hi.s32 %r20, %r10, %r11;", lambda a, b: (a.astype(np.int64) * b >> 32).astype(np.int32)),
        ("mad.lo.s32 %r20, %r10, %r11, 5;", lambda a, b: a * b + 5),
        ("div.s32 %r20, %r10, %r11;", lambda a, b: np.trunc(a / b.astype(float)).astype(np.int32)),
        ("rem.s32 %r20, %r10, %r11;", lambda a, b: np.fmod(a, b)),
        ("min.relu.s32 %r20, %r10, %r11;", lambda a, b: np.maximum(np.minimum(a, b), 0)),
        ("shr.s32 %r20, %r10, 40;", lambda a, b: a >> 31),
        ("shl.b32 %r20, %r10, 32;", lambda a, b: a * 0),
        ("shr.u32 %r20, %r10, 3;", lambda a, b: (a.view(np.uint32) >> 3).view(np.int32)),
        ("lop3.b32 %r20, %r10, %r11, 7, 0xE8;", lambda a, b: (a & b) | (a & 7) | (b & 7)),
        ("prmt.b32 %r20, %r10, %r11, 0x5410;", lambda a, b: a & 0xFFFF | b << 16),
        ("bfe.u32 %r20, %r10, 4, 8;", lambda a, b: (a.view(np.uint32) >> 4 & 255).view(np.int32)),
        ("setp.lt.s32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;", lambda a, b: (a < b).astype(np.int32)),
        ("setp.lo.u32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;",
         lambda a, b: (a.view(np.uint32) < b.view(np.uint32)).astype(np.int32)),
        ("mov.b32 %r20, 3; setp.gt.s32 %p1, %r10, 0; @%p1 mov.b32 %r20, %r11;", lambda a, b: np.where(a > 0, b, 3)),
        ("mov.b64 %rd3, {%r10, %r11}; shr.u64 %rd3, %rd3, 16; mov.b64 {%r20, _}, %rd3;",
         lambda a, b: (a.view(np.uint32) >> 16 | b.view(np.uint32) << 16).view(np.int32)),
    ],
)  # fmt: skip
def test_integers(text, expected):
    got = per_thread(loads("b32", "b32") + text, "%r20", A, B, dtype=np.int32)
    with np.errstate(over="ignore"):
        assert np.array_equal(got, expected(A, B))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mul.f32 %r20, %r10, %r11;", lambda x, y: x * y),
        ("fma.rn.f32 %r20, %r10, %r11, %r10;", lambda x, y: (x.astype(float) * y + x).astype(np.float32)),
        ("max.f32 %r20, %r10, %r11;", np.maximum),
        ("ex2.approx.ftz.f32 %r20, %r10;", lambda x, y: np.exp2(x.astype(float)).astype(np.float32)),
        ("abs.f32 %r12, %r11; lg2.approx.f32 %r20, %r12;", lambda x, y: np.log2(np.abs(y))),
        ("rcp.approx.ftz.f32 %r20, %r11;", lambda x, y: (1 / y.astype(float)).astype(np.float32)),
        ("cvt.rni.f32.f32 %r20, %r11;", lambda x, y: np.rint(y)),
        ("cvt.rn.bf16x2.f32 %r12, %r10, %r11; shl.b32 %r20, %r12, 16;",
         lambda x, y: np.round(y.view(np.uint32) / 65536.0).astype(np.uint32).__lshift__(16).view(np.float32)),
        ("cvt.rn.f16x2.f32 %r12, %r10, %r11; mov.b32 {%h1, %h2}, %r12; cvt.f32.f16 %r20, %h2;",
         lambda x, y: x.astype(np.float16).astype(np.float32)),
    ],
)  # fmt: skip
def test_floats(text, expected):
    got = per_thread(loads("b32", "b32") + text, "%r20", X, Y, dtype=np.float32)
    assert np.allclose(got, expected(X, Y), rtol=2e-7, atol=0)


@pytest.mark.parametrize(("mode", "step"), [("rm", -1), ("rp", 1)])
def test_directed_rounding_sees_what_fp64_would_lose(mode, step):
    base = np.float32(12582912.0)
    tiny = np.full(32, 1e-30 * step, np.float32)
    got = per_thread(loads("b32") + f"add.{mode}.ftz.f32 %r20, %r10, 0f4B400000;", "%r20", tiny, dtype=np.float32)
    assert (got == np.nextafter(base, np.float32(np.inf * step))).all()


def test_nan_loses_against_numbers_unless_asked():
    values = np.where(LANE % 2, np.nan, 1.0).astype(np.float32)
    ones = np.full(32, 2.0, np.float32)
    assert not np.isnan(
        per_thread(loads("b32", "b32") + "min.f32 %r20, %r10, %r11;", "%r20", values, ones, dtype=np.float32)
    ).any()
    nan = per_thread(loads("b32", "b32") + "min.NaN.f32 %r20, %r10, %r11;", "%r20", values, ones, dtype=np.float32)
    assert np.array_equal(np.isnan(nan), np.isnan(values))


def test_packed_f32x2():
    pairs = rng.normal(size=(32, 2)).astype(np.float32)
    packed = pairs.view(np.uint64).ravel()
    body = loads("b64") + "fma.rn.f32x2 %rd20, %rd10, %rd10, %rd10;"
    got = per_thread(body, "%rd20", packed, dtype=np.uint64).view(np.float32).reshape(32, 2)
    wide = pairs.astype(float)
    assert np.array_equal(got, (wide * wide + wide).astype(np.float32))


def once(x, y, z):
    """x · y + z, rounded once."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mul.f32 %r12, %r10, %r11; add.f32 %r20, %r12, %r10;", lambda x, y: once(x, y, x)),
        ("mul.f32 %r12, %r10, %r11; sub.f32 %r20, %r12, %r10;", lambda x, y: once(x, y, -x)),
        ("mul.f32 %r12, %r10, %r11; sub.f32 %r20, %r10, %r12;", lambda x, y: once(-x, y, x)),
        # Of two products the first; one that has another use is computed by itself.
        ("mul.f32 %r12, %r10, %r11; mul.f32 %r13, %r10, %r10; sub.f32 %r20, %r12, %r13;",
         lambda x, y: once(x, y, -(x * x))),
        ("mul.f32 %r12, %r10, %r11; mul.f32 %r13, %r10, %r10; add.f32 %r20, %r12, %r13; xor.b32 %r14, %r12, %r12;",
         lambda x, y: once(x, x, x * y)),
        # Not with a rounding modifier, nor over the end of a block, nor where a factor has changed.
        ("mul.rn.f32 %r12, %r10, %r11; add.f32 %r20, %r12, %r10;", lambda x, y: x * y + x),
        ("mul.f32 %r12, %r10, %r11; add.rn.f32 %r20, %r12, %r10;", lambda x, y: x * y + x),
        ("mul.f32 %r12, %r10, %r11; next: add.f32 %r20, %r12, %r10;", lambda x, y: x * y + x),
        ("mul.f32 %r12, %r10, %r11; mov.b32 %r11, 0; add.f32 %r20, %r12, %r10;", lambda x, y: x * y + x),
    ],
)  # fmt: skip
def test_contraction(text, expected):
    got = per_thread(loads("b32", "b32") + text, "%r20", X, X[::-1].copy(), dtype=np.float32)
    assert np.array_equal(got, expected(X, X[::-1]))
    assert not np.array_equal(once(X, X[::-1], X), X * X[::-1] + X)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_conversion_rounds_to_the_nearest_value(name):
    torch = pytest.importorskip("torch")
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    x = np.concatenate([X[:16], Y[:12], np.float32([0.0, -0.0, 1e-9, 2.0**-9])])
    limit = {"e4m3": 448.0, "e5m2": 57344.0}[name]
    body = loads("b32") + f"cvt.rn.satfinite.{name}x2.f32 %h1, %r10, %r10; cvt.u32.u16 %r20, %h1;"
    got = per_thread(body, "%r20", x) & 255
    expected = torch.from_numpy(np.clip(x, -limit, limit)).to(dtype).view(torch.uint8).numpy()
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("shfl.sync.bfly.b32 %r20, %r0, 5, 31, -1;", LANE ^ 5),
        ("shfl.sync.idx.b32 %r20, %r0, 3, 31, -1;", LANE * 0 + 3),
        ("shfl.sync.idx.b32 %r20, %r0, 1, 0x1c1f, -1;", LANE // 4 * 4 + 1),
        ("shfl.sync.down.b32 %r20, %r0, 2, 31, -1;", np.where(LANE < 30, LANE + 2, LANE)),
        ("shfl.sync.up.b32 %r20, %r0, 1, 0, -1;", np.where(LANE > 0, LANE - 1, 0)),
        ("shfl.sync.idx.b32 %r20, %r0, %r0, 31, -1;", LANE),
    ],
)
def test_shuffles(text, source):
    assert np.array_equal(per_thread(text, "%r20"), source)


def test_votes_and_election_follow_the_active_lanes():
    body = """
    setp.lt.u32 %p1, %r0, 12;
    mov.b32 %r20, 0;
    @!%p1 bra done;
    setp.gt.u32 %p2, %r0, 3;
    vote.sync.ballot.b32 %r20, %p2, 0xfff;
    elect.sync %r21|%p3, 0xfff;
    selp.b32 %r22, 0x10000, 0, %p3;
    or.b32 %r20, %r20, %r22;
    done:
    """
    got = per_thread(body, "%r20")
    assert np.array_equal(got[:12], np.where(LANE[:12] == 0, 0x10FF0, 0xFF0))
    assert not got[12:].any()


def test_loops_whose_lanes_leave_one_after_another():
    body = """
    mov.b32 %r20, 0; mov.b32 %r21, 0;
    again:
    add.s32 %r20, %r20, %r21;
    add.s32 %r21, %r21, 1;
    setp.le.u32 %p1, %r21, %r0;
    @%p1 bra again;
    """
    assert np.array_equal(per_thread(body, "%r20"), LANE * (LANE + 1) // 2)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_and_ldmatrix_are_inverse(trans):
    body = f"""
    and.b32 %r2, %r0, 31; shl.b32 %r3, %r2, 4; add.s32 %r3, %r3, %r1;
    shl.b32 %r4, %r0, 8;
    add.s32 %r10, %r4, 0x10001; add.s32 %r11, %r4, 0x20002; add.s32 %r12, %r4, 0x30003; add.s32 %r13, %r4, 0x40004;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r3], {{%r10, %r11, %r12, %r13}};
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r3];
    sub.s32 %r20, %r20, %r10; sub.s32 %r21, %r21, %r11; sub.s32 %r22, %r22, %r12; sub.s32 %r23, %r23, %r13;
    or.b32 %r20, %r20, %r21; or.b32 %r20, %r20, %r22; or.b32 %r20, %r20, %r23;
    """
    assert not per_thread(body, "%r20").any()


def test_stmatrix_layout():
    # Row r of the matrix holds registers of lanes 4r … 4r+3; transposed, its columns do.
    rows = {}
    for trans in ("", ".trans"):
        body = f"""
        shl.b32 %r3, %r0, 4; add.s32 %r3, %r3, %r1;
        shl.b32 %r10, %r0, 17; or.b32 %r10, %r10, 0x10000; shl.b32 %r11, %r0, 1; or.b32 %r10, %r10, %r11;
        stmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 [%r3], {{%r10}};
        shl.b32 %r4, %r0, 2; add.s32 %r4, %r4, %r1;
        ld.shared.b32 %r20, [%r4];
        """
        rows[trans] = per_thread(body, "%r20").view(np.uint16).reshape(8, 8)
    assert np.array_equal(rows[""].ravel(), np.arange(64))
    assert np.array_equal(rows[".trans"], rows[""].T)


def test_vector_loads_and_stores_move_whole_tuples():
    data = rng.integers(0, 2**32, 128, dtype=np.uint32)
    out = np.zeros_like(data)
    body = """
    mul.wide.u32 %rd1, %r0, 16; add.s64 %rd2, %rd40, %rd1; add.s64 %rd3, %rd41, %rd1;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd2];
    shl.b32 %r3, %r0, 4; add.s32 %r3, %r3, %r1;
    st.shared.v2.b32 [%r3], {%r10, %r11};
    st.shared.v2.b32 [%r3+8], {%r12, %r13};
    ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r3];
    st.global.v4.b32 [%rd3], {%r20, %r21, %r22, %r23};
    """
    run_ptx(body, data, out)
    assert np.array_equal(out, data)


def test_atomics_and_reductions():
    counter = np.zeros(4, np.int32)
    body = """
    atom.global.add.u32 %r20, [%rd40], 1;
    red.global.max.s32 [%rd40+4], %r0;
    atom.global.cas.b32 %r21, [%rd40+8], 0, 9;
    atom.global.exch.b32 %r22, [%rd40+12], 5;
    """
    run_ptx(body, counter)
    assert counter.tolist() == [32, 31, 9, 5]


ARMED = """
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra armed;
    mbarrier.init.shared.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
    armed:
    bar.sync 0;
"""
WAIT = """
    again:
    mbarrier.try_wait.parity.shared.b64 %p9, [%r1], 0, 10000000;
    @!%p9 bra again;
"""
SUMS = "shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1; ld.shared.b32 %r20, [%r3+1024];"


def test_bulk_copies_there_and_back():
    data = rng.integers(0, 2**32, 32, dtype=np.uint32)
    out, total = np.zeros_like(data), np.ones_like(data)
    body = f"""{ARMED}
    add.s32 %r5, %r1, 1024;
    @%p1 bra loaded;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd40], 128, [%r1];
    loaded: {WAIT}
    @%p1 bra stored;
    cp.async.bulk.global.shared::cta.bulk_group [%rd41], [%r5], 128;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd42], [%r5], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    stored:
    """
    for schedule in ("eager", "lazy", "random"):
        out[:], total[:] = 0, 1
        run_ptx(body, data, out, total, outputs=(1,), schedule=schedule, races=True)
        assert np.array_equal(out, data)
        assert np.array_equal(total, data + 1)


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_tensor_copies_swizzle_clip_and_fill(swizzle):
    rows, columns = 11, 40
    inner = {0: 8, 1: 8, 2: 16, 3: 32}[swizzle]  # 16 … 128 bytes
    source = rng.integers(1, 2**31, (rows, columns)).astype(np.int32)
    target = np.zeros_like(source)
    smem_image = np.zeros(8 * inner, np.int32)
    body = f"""{ARMED}
    add.s32 %r5, %r1, 1024;
    @%p1 bra loaded;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {8 * inner * 4};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r5], [%rd40, {{24, 6}}], [%r1];
    loaded: {WAIT}
    @%p1 bra stored;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd41, {{24, 6}}], [%r5];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    stored:
    mov.b32 %r6, %r0;
    copy:
    setp.ge.u32 %p2, %r6, {8 * inner};
    @%p2 bra copied;
    shl.b32 %r7, %r6, 2; add.s32 %r8, %r5, %r7; ld.shared.b32 %r9, [%r8];
    cvt.u64.u32 %rd4, %r7; add.s64 %rd4, %rd42, %rd4; st.global.b32 [%rd4], %r9;
    add.s32 %r6, %r6, 32;
    bra copy;
    copied:
    """
    maps = [tensor_map(a, (inner, 8), swizzle) for a in (source, target)]
    # The arrays themselves follow as arguments, so that they are memory.
    run_ptx(body, *maps, smem_image, source, target, smem=4096, outputs=(2,), races=True)
    expected = np.zeros((8, inner), np.int32)
    part = source[6:, 24:]
    width = min(inner, part.shape[1])
    expected[: part.shape[0], :width] = part[:, :width]
    chunk = np.arange(8 * inner // 4)
    mask = (0, 1, 3, 7)[swizzle]
    place = chunk ^ ((chunk >> 3) & mask)
    assert np.array_equal(smem_image.reshape(-1, 4)[place].ravel(), expected.ravel())
    assert np.array_equal(target[6:, 24 : 24 + width], part[:, :width])
    assert not target[:6].any() and not target[:, :24].any()


def test_cluster_stores_signal_the_peer():
    body = f"""{ARMED}
    mov.u32 %r10, %cluster_ctarank;
    xor.b32 %r11, %r10, 1;
    @%p1 bra expecting;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
    expecting:
    barrier.cluster.arrive; barrier.cluster.wait;
    shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1; add.s32 %r3, %r3, 1024;
    mapa.shared::cluster.u32 %r4, %r3, %r11;
    mapa.shared::cluster.u32 %r5, %r1, %r11;
    mad.lo.s32 %r6, %r10, 100, %r0;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r4], %r6, [%r5];
    {WAIT}
    ld.shared.b32 %r20, [%r3];
    mov.u32 %r12, %ctaid.x;
    mad.lo.s32 %r13, %r12, 32, %r0; mul.wide.u32 %rd1, %r13, 4; add.s64 %rd1, %rd40, %rd1; st.global.b32 [%rd1], %r20;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    out = np.zeros(64, np.int32)
    for schedule in ("eager", "lazy", "random"):
        run_ptx(body, out, grid=2, cluster=2, schedule=schedule, races=True, outputs=(0,))
        assert np.array_equal(out, np.concatenate([LANE + 100, LANE]))


@pytest.mark.parametrize(
    "text",
    [
        "add.sat.s32 %r20, %r0, %r0;",
        "frobnicate.b32 %r20, %r0;",
        "shfl.sync.bfly.b16 %h1, %r0, 1, 31, -1;",
        "mbarrier.arrive_drop.shared.b64 _, [%r1];",
        "ld.local.b32 %r20, [%r1];",
        "mov.u32 %r20, %clock;",
        "cvt.rz.bf16x2.f32 %r20, %r0, %r0;",
        "atom.global.gpu.xor.f32 %r20, [%rd40], %r0;",
    ],
)
def test_what_is_not_implemented_is_refused_with_its_line(text):
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+: " + text.split()[0].replace(".", r"\.")):
        run_ptx(text, np.zeros(4, np.int32))
