"""tcgen05 beyond what the kernels here use: data shapes, copies, MMA forms; and cluster launch control."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx import cute_layout, run_ptx

from fa4gen.emulator import KernelFault, UnsupportedInstruction

rng = np.random.default_rng(1)

# Thread 0 of warp 0 is the one of %p1 false; TMEM's address is in %r3, the warp's own quadrant in %r4.
SETUP = """
    setp.ne.u32 %p1, %r0, 0; shr.u32 %r2, %r0, 5; setp.ne.u32 %p2, %r2, 0;
    @%p2 bra allocated;
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r1+16], 128;
    allocated:
    @%p1 bra armed;
    mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.init.shared.b64 [%r1+8], 1;
    fence.mbarrier_init.release.cluster;
    armed:
    barrier.cluster.arrive; barrier.cluster.wait;
    ld.shared.b32 %r3, [%r1+16];
    shl.b32 %r4, %r2, 21; add.s32 %r4, %r4, %r3;
    mov.u32 %r5, %cluster_ctarank;
"""
# One thread loads a CTA's part of the first argument to 0x800, all wait for it.
FETCH = """
    mul.wide.u32 %rd1, %r5, {size}; add.s64 %rd1, %rd1, %rd41;
    @%p1 bra fetched;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {size};
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd1], {size}, [%r1];
    fetched:
    again: mbarrier.try_wait.parity.shared.b64 %p9, [%r1], 0, 10000000; @!%p9 bra again;
    barrier.cluster.arrive; barrier.cluster.wait;
"""
COMMITTED = """
    waiting: mbarrier.try_wait.parity.shared.b64 %p9, [%r1+8], 0, 10000000; @!%p9 bra waiting;
    tcgen05.fence::after_thread_sync;
"""
FINISH = """
    bar.sync 0;
    @%p2 bra freed;
    tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r3, 128;
    freed:
    barrier.cluster.arrive; barrier.cluster.wait;
"""


def registers(count: int, first: int = 100) -> str:
    return "{" + ", ".join(f"%r{first + k}" for k in range(count)) + "}"


def run_tensor(body: str, count: int, *arguments: Any, group: int = 1, **options: Any) -> np.ndarray:
    """What %r100 and the next hold at the end: (CTAs, 128, ``count``). Arguments are %rd41 and up."""
    out = np.zeros((group, 128, count), np.uint32)
    stores = "".join(f"st.global.b32 [%rd30+{4 * k}], %r{100 + k};" for k in range(count))
    place = f"mad.lo.s32 %r6, %r5, 128, %r0; mul.wide.u32 %rd30, %r6, {4 * count}; add.s64 %rd30, %rd30, %rd40;"
    text = SETUP.format(group=group) + body + place + stores + FINISH.format(group=group)
    run_ptx(text, out, *arguments, threads=128, grid=group, cluster=group, smem=40000, target="sm_100a", races=True,
            outputs=(0,), **options)  # fmt: skip
    return out


def filled(columns: int) -> str:
    """Every lane's column c holds lane << 16 | c, where lanes are counted over all quadrants."""
    values = "".join(f"shl.b32 %r{200 + c}, %r0, 16; or.b32 %r{200 + c}, %r{200 + c}, {c};" for c in range(columns))
    store = f"tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r4], {registers(columns, 200)};"
    return f"{values} {store} tcgen05.wait::st.sync.aligned;"


WAIT_LOAD = "tcgen05.wait::ld.sync.aligned;"
# Repetitions, and where CuTe's copy traits place (thread, value): lane · columns + column.
SHAPES = {
    "32x32b.x2": "(32,2):(2,1)",
    "16x64b.x1": "((2,2,8),1):((16,1,2),1)",
    "16x64b.x2": "((2,2,8),(1,2)):((32,1,4),(1,2))",
    "16x128b.x1": "((4,8),(1,2)):((1,4),(1,32))",
    "16x128b.x2": "((4,8),(1,2,2)):((1,8),(1,64,4))",
    "16x256b.x1": "((4,8),(2,2)):((2,8),(1,64))",
    "16x256b.x2": "((4,8),(2,2,2)):((2,16),(1,128,8))",
}


def cells(shape: str) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) of every (thread, register)."""
    index = cute_layout(SHAPES[shape])
    lanes = 32 if shape.startswith("32") else 16
    return np.divmod(index, index.size // lanes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [0, 16])
def test_load_shapes(shape, half):
    lane, column = cells(shape)
    count = lane.shape[1]
    if shape.startswith("32") and half:
        with pytest.raises(KernelFault, match="outside its quadrant"):
            run_tensor(f"{filled(2)} tcgen05.ld.sync.aligned.{shape}.b32 {registers(2)}, [%r4+0x100000];", 2)
        return
    load = f"tcgen05.ld.sync.aligned.{shape}.b32 {registers(count)}, [%r4+{half << 16}];"
    got = run_tensor(filled(16) + load + WAIT_LOAD, count)[0]
    warp = np.arange(4)[:, None, None] * 32
    assert np.array_equal(got, ((lane + half + warp) << 16 | column).reshape(128, count))


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.startswith("16")])
def test_store_shapes(shape):
    lane, column = cells(shape)
    count = lane.shape[1]
    values = "".join(f"shl.b32 %r{200 + k}, %r0, 16; or.b32 %r{200 + k}, %r{200 + k}, {k};" for k in range(count))
    body = f"""{filled(16)} {values}
    tcgen05.st.sync.aligned.{shape}.b32 [%r4], {registers(count, 200)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {registers(16)}, [%r4]; {WAIT_LOAD}"""
    got = run_tensor(body, 16)[0].reshape(4, 32, 16)
    thread = np.arange(128).reshape(4, 32, 1)
    expected = thread << 16 | np.arange(16)
    expected[:, lane, column] = thread << 16 | np.arange(count)
    assert np.array_equal(got, expected)


def test_two_halves_of_16x32bx2_lie_apart():
    load = f"tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {registers(2)}, [%r4], 8;"
    got = run_tensor(filled(16) + load + WAIT_LOAD, 2)[0].reshape(4, 2, 16, 2)
    warp, half, lane, register = np.ix_(range(4), range(2), range(16), range(2))
    assert np.array_equal(got, (lane + 32 * warp) << 16 | (register + 8 * half))


def test_packed_loads_take_the_low_halves_of_two_columns():
    load = f"tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {registers(2)}, [%r4];"
    got = run_tensor(filled(4) + load + WAIT_LOAD, 2)[0]
    assert (got == [1 << 16, 3 << 16 | 2]).all()
    _, column = cells("16x128b.x1")
    load = f"tcgen05.ld.sync.aligned.16x128b.x1.pack::16b.b32 {registers(2)}, [%r4];"
    got = run_tensor(filled(8) + load + WAIT_LOAD, 2)[0].reshape(4, 32, 2)
    assert (got == (2 * column + 1) << 16 | 2 * column).all()


def test_unpacked_stores_are_the_inverse():
    body = f"""mov.b32 %r200, 0x00020001; mov.b32 %r201, 0x00040003;
    tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r4], {registers(2, 200)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {registers(4)}, [%r4]; {WAIT_LOAD}"""
    assert (run_tensor(body, 4)[0] == [1, 2, 3, 4]).all()


@pytest.mark.parametrize(
    ("form", "expected"),
    [("min", -3.0), ("max", 2.0), ("max.abs", 3.0), ("min.abs", 1.0), ("max.NaN", np.nan), ("max.abs.NaN", np.nan)],
)
def test_loads_that_reduce(form, expected):
    values = [1.0, -3.0, 2.0, np.nan if "NaN" in form else 1.5]
    constants = "".join(f"mov.b32 %r{200 + k}, 0x{np.float32(v).view(np.uint32):08x};" for k, v in enumerate(values))
    body = f"""{constants} tcgen05.st.sync.aligned.32x32b.x4.b32 [%r4], {registers(4, 200)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.red.sync.aligned.32x32b.x4.{form}.f32 {registers(4)}, %r104, [%r4]; {WAIT_LOAD}"""
    got = run_tensor(body, 5)[0].view(np.float32)
    assert np.array_equal(got[:, :4], np.tile(np.float32(values), (128, 1)), equal_nan=True)
    assert np.array_equal(got[:, 4], np.full(128, expected, np.float32), equal_nan=True)


def k_major(matrix: np.ndarray) -> np.ndarray:
    """Bytes of an operand without swizzle: 8 rows of 16 bytes at a time, down the rows, then along K."""
    raw = np.ascontiguousarray(matrix).view(np.uint8)
    rows, size = raw.shape
    return raw.reshape(rows // 8, 8, size // 16, 16).transpose(2, 0, 1, 3).copy().ravel()


def descriptor(address: int, rows: int) -> int:
    """Of an operand as :func:`k_major` lays it out."""
    return address >> 4 | (16 * rows >> 4) << 16 | (128 >> 4) << 32 | 1 << 46


@pytest.mark.parametrize(
    ("form", "rows", "size", "source"),
    [
        ("128x256b", 128, 32, np.arange(128)),
        ("128x128b", 128, 16, np.arange(128)),
        ("64x128b.warpx2::02_13", 64, 16, np.arange(128) % 64),
        ("64x128b.warpx2::01_23", 64, 16, np.arange(128) // 64 * 32 + np.arange(128) % 32),
        ("32x128b.warpx4", 32, 16, np.arange(128) % 32),
    ],
)
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_copies_from_shared_memory(form, rows, size, source, schedule):
    data = rng.integers(0, 2**32, (rows, size // 4), dtype=np.uint32)
    count = size // 4
    body = f"""{FETCH.format(size=rows * size)}
    @%p1 bra copied;
    mov.b64 %rd2, {descriptor(0x800, rows)};
    tcgen05.cp.cta_group::1.{form} [%r3], %rd2;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+8];
    copied: {COMMITTED}
    tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {registers(count)}, [%r4]; {WAIT_LOAD}"""
    got = run_tensor(body, count, k_major(data), schedule=schedule)[0]
    assert np.array_equal(got, data[source])


def test_shift_moves_all_lanes_but_the_last():
    body = f"""{filled(16)} tcgen05.fence::before_thread_sync; bar.sync 0;
    @%p1 bra shifted;
    add.s32 %r7, %r3, 0x200004;
    tcgen05.shift.cta_group::1.down [%r7];
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+8];
    shifted: {COMMITTED}
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {registers(16)}, [%r4]; {WAIT_LOAD}"""
    got = run_tensor(body, 16)[0]
    expected = np.arange(128)[:, None] << 16 | np.arange(16)
    expected[33:64, 4:12] = expected[32:63, 4:12].copy()
    assert np.array_equal(got, expected)


def fp8(rows: int, columns: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Random 8-bit floats as bytes, and their values."""
    torch = pytest.importorskip("torch")
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    x = torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32)).to(dtype)
    return x.view(torch.uint8).numpy(), x.float().numpy()


def operand(rows: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """32 bytes a row, and their values."""
    if name in ("e4m3", "e5m2"):
        return fp8(rows, 32, name)
    values = rng.normal(size=(rows, 16)).astype(np.float16)
    if name == "bf16":
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32)
    return values, values.astype(np.float32)


CODES = {"f16": 0, "bf16": 1, "e4m3": 0, "e5m2": 1}
COLUMNS = 32


@pytest.mark.parametrize(("rows", "group"), [(64, 1), (128, 1), (128, 2), (256, 2)])
@pytest.mark.parametrize(("a_type", "b_type"), [("bf16", "bf16"), ("f16", "f16"), ("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_mma(rows, group, a_type, b_type):
    """D = A·Bᵀ and once more on top: rows over the CTAs, half of B in each."""
    (a, a_values), (b, b_values) = operand(rows, a_type), operand(COLUMNS, b_type)
    parts = [(np.array_split(x, group)[cta]) for cta in range(group) for x in (a, b)]
    data = np.concatenate([k_major(part) for part in parts])
    a_rows, b_rows = rows // group, COLUMNS // group
    kind = "f8f6f4" if a_type[0] == "e" else "f16"
    form = 1 << 4 | CODES[a_type] << 7 | CODES[b_type] << 10 | COLUMNS // 8 << 17 | rows // 16 << 24
    multicast = ".multicast::cluster" if group == 2 else ""
    load, count = ("16x256b.x4", 16) if rows == 64 else ("32x32b.x32", 32) if a_rows == 128 else ("32x32b.x16", 16)
    body = f"""{FETCH.format(size=(a_rows + b_rows) * 32)}
    setp.ne.u32 %p3, %r5, 0; or.pred %p3, %p3, %p1;
    @%p3 bra issued;
    mov.b64 %rd2, {descriptor(0x800, a_rows)}; mov.b64 %rd3, {descriptor(0x800 + 32 * a_rows, b_rows)};
    mov.b32 %r7, {form}; setp.ne.u32 %p4, %r7, %r7; setp.eq.u32 %p5, %r7, %r7;
    tcgen05.mma.cta_group::{group}.kind::{kind} [%r3], %rd2, %rd3, %r7, %p4;
    tcgen05.mma.cta_group::{group}.kind::{kind} [%r3], %rd2, %rd3, %r7, %p5;
    mov.b16 %h1, 3;
    tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%r1+8]
    {", %h1" if group == 2 else ""};
    issued: {COMMITTED}
    tcgen05.ld.sync.aligned.{load}.b32 {registers(count)}, [%r4]; {WAIT_LOAD}"""
    got = run_tensor(body, count, data, group=group).view(np.float32)
    expected = 2 * (a_values @ b_values.T)
    if rows == 64:  # 16 rows a quadrant
        lane, column = np.divmod(cute_layout("((4,8),(2,2,4)):((2,32),(1,256,8))"), 32)
        warp = np.arange(4)[:, None, None]
        assert np.allclose(got.reshape(4, 32, 16), expected[16 * warp + lane, column], rtol=1e-5, atol=1e-5)
        return
    if a_rows == 64:  # the second half of the columns in the upper lanes
        expected = expected.reshape(2, 64, 2, 16).transpose(0, 2, 1, 3)
    assert np.allclose(got, expected.reshape(got.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.cp.cta_group::1.4x256b [%r3], %rd2;",
        "tcgen05.mma.cta_group::1.kind::mxf4.block_scale [%r3], %rd2, %rd2, %r7, [%r3], [%r3], %p1;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r3], %rd2, %rd2, [%r3], %r7, %p1;",
        "tcgen05.ld.red.sync.aligned.16x32bx2.x2.max.f32 {%r10, %r11}, %r12, [%r3], 8;",
    ],
)
def test_what_stays_refused(text):
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+: tcgen05"):
        run_tensor(text, 0)


# Each CTA counts its own work item, then takes over clusters until there are none.
TAKE_OVER = """
    setp.ne.u32 %p1, %r0, 0; mov.u32 %r5, %ctaid.x; mov.u32 %r9, %cluster_ctarank; mov.b32 %r6, 0;
    @%p1 bra armed;
    red.global.add.u32 [%rd41], 1;
    mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
    armed: barrier.cluster.arrive; barrier.cluster.wait;
    next:
    mul.wide.u32 %rd1, %r5, 4; add.s64 %rd1, %rd1, %rd40;
    @!%p1 red.global.add.u32 [%rd1], 1;
    @%p1 bra asked;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
    asked: barrier.cluster.arrive; barrier.cluster.wait;
    or.b32 %r10, %r0, {who}; setp.ne.u32 %p2, %r10, 0;
    @%p2 bra answered;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{form}.b128 [%r1+32], [%r1];
    answered: again: mbarrier.try_wait.parity.shared.b64 %p9, [%r1], %r6, 10000000; @!%p9 bra again;
    {read}
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1;
    @%p3 clusterlaunchcontrol.query_cancel.{query}, %q1;
    add.s32 %r5, %r5, %r9;
    xor.b32 %r6, %r6, 1;
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p3 bra next;
"""


@pytest.mark.parametrize(
    ("cluster", "form", "who", "read", "query"),
    [
        (1, "", "0", "ld.shared.b128 %q1, [%r1+32];", "get_first_ctaid.v4.b32.b128 {%r5, %r20, %r21, _}"),
        (2, ".multicast::cluster::all", "%r9", "ld.shared.v2.b64 {%rd2, %rd3}, [%r1+32]; mov.b128 %q1, {%rd2, %rd3};",
         "get_first_ctaid::x.b32.b128 %r5"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_running_clusters_take_over_the_rest(cluster, form, who, read, query, schedule):
    text = TAKE_OVER.format(form=form, who=who, read=read, query=query)
    done, started = np.zeros(26, np.uint32), np.zeros(4, np.uint32)
    run_ptx(text, done, started, grid=26, cluster=cluster, schedule=schedule, races=True, target="sm_100a")
    assert (done == 1).all()
    # Eight CTAs run at a time. Others start only after a refusal, which a random schedule may make up.
    assert started[0] == 8 or (schedule == "random" and 8 < started[0] <= 26)
