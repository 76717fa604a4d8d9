"""Atomics, reducing and multicast copies, matrix loads and stores, 8-bit floats: forms that a next kernel may use."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import cute_layout, per_thread, run_ptx, tensor_map
from test_isa import ARMED, WAIT
from test_tensor import descriptor, fp8, k_major, registers

rng = np.random.default_rng(2)
LANE = np.arange(32, dtype=np.uint32)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("opcode", ["atom", "red"])
@pytest.mark.parametrize(
    ("form", "value", "start", "expected"),
    [
        ("add.s32", "%r0", np.int32(5), 5 + 31 * 16),
        ("add.u64", "%rd9", np.uint64(1 << 40), (1 << 40) + 31 * 16),
        ("min.s64", "%rd9", np.int64(7), 0),
        ("max.u32", "%r0", np.uint32(3), 31),
        ("and.b32", "%r9", np.uint32(0xFF), 0),
        ("or.b64", "%rd9", np.uint64(1 << 50), (1 << 50) + 31),
        ("xor.b32", "%r0", np.uint32(0xF0), 0xF0),
        ("inc.u32", "6", np.uint32(0), 32 % 7),
        ("dec.u32", "6", np.uint32(3), (3 - 32) % 7),
        ("add.f32", "0f3F000000", np.float32(1), 17.0),
        ("add.f64", "0d3FE0000000000000", np.float64(1), 17.0),
    ],
)
def test_atomic_functions(opcode, form, value, start, expected):
    place = np.array([start, start])
    prepare = "cvt.u64.u32 %rd9, %r0; shl.b32 %r9, 1, %r0;"
    function, kind = form.split(".")
    result = {"32": "%r20", "64": "%rd20"}[kind[1:]] + ", " if opcode == "atom" else ""
    run_ptx(f"{prepare} {opcode}.relaxed.gpu.global.{function}.{kind} {result}[%rd40], {value};", place)
    assert place[0] == expected and place[1] == start


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_atomics_on_16_bit_floats(name):
    one = {"f16": 0x3C00, "bf16": 0x3F80}[name]
    place = np.zeros(4, np.uint32)
    run_ptx(f"mov.b32 %r2, {one << 16 | one:#x}; red.global.add.noftz.{name}x2 [%rd40], %r2; "
            f"mov.b16 %h1, {one:#x}; red.global.add.noftz.{name} [%rd40+4], %h1;", place)  # fmt: skip
    thirty_two = {"f16": 0x5000, "bf16": 0x4200}[name]
    assert place.tolist() == [thirty_two << 16 | thirty_two, thirty_two, 0, 0]


def test_vector_atomics_return_what_was_there():
    place = np.zeros(4, np.float32)
    body = """mov.b32 %f1, 0f3F800000; mov.b32 %f2, 0f40000000;
    atom.global.add.v2.f32 {%r20, %r21}, [%rd40], {%f1, %f2};
    red.global.add.v4.f32 [%rd40], {%f1, %f1, %f1, %f1};"""
    out = np.zeros(32, np.float32)
    run_ptx(body + "mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd1, %rd41; st.global.b32 [%rd1], %r21;", place, out)
    assert place.tolist() == [64, 96, 32, 32]
    assert np.array_equal(np.sort(out), 2.0 * np.arange(32))


BULK = f"""{ARMED}
    @%p1 bra loaded;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd40], 128, [%r1];
    loaded: {WAIT}
    @%p1 bra stored;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.FORM [%rd41], [%r1+1024], 128;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    stored:
"""
INTEGERS = rng.integers(0, 100, 32)


@pytest.mark.parametrize(
    ("form", "dtype", "function"),
    [
        ("add.u32", np.uint32, np.add),
        ("add.s32", np.int32, np.add),
        ("add.u64", np.uint64, np.add),
        ("add.f32", np.float32, np.add),
        ("add.f64", np.float64, np.add),
        ("add.noftz.f16", np.float16, np.add),
        ("min.s32", np.int32, np.minimum),
        ("max.u64", np.uint64, np.maximum),
        ("min.s64", np.int64, np.minimum),
        ("max.f16", np.float16, np.maximum),
        ("inc.u32", np.uint32, lambda a, b: np.where(a >= b, 0, a + 1)),
        ("dec.u32", np.uint32, lambda a, b: np.where((a == 0) | (a > b), b, a - 1)),
        ("and.b32", np.uint32, np.bitwise_and),
        ("or.b64", np.uint64, np.bitwise_or),
        ("xor.b32", np.uint32, np.bitwise_xor),
    ],
)
def test_bulk_reductions_to_global_memory(form, dtype, function):
    count = 128 // np.dtype(dtype).itemsize
    old, new = (rng.integers(0, 100, count).astype(dtype) for _ in range(2))
    target = old.copy()
    run_ptx(BULK.replace("FORM", form), new, target, races=True)
    assert np.array_equal(target, function(old, new))


@pytest.mark.parametrize(("form", "function"), [("add.noftz.bf16", np.add), ("min.bf16", np.minimum)])
def test_bulk_reductions_on_bf16(form, function):
    values = [rng.integers(0, 100, 64).astype(np.float32) for _ in range(2)]
    old, new = (bf16_bits(v) for v in values)
    run_ptx(BULK.replace("FORM", form), new, old, races=True)
    assert np.array_equal(old, bf16_bits(function(*values)))


# Both CTAs reduce into the first one's memory, which starts at 100.
TO_CLUSTER = f"""{ARMED}
    mov.u32 %r10, %cluster_ctarank; mov.b32 %r11, 0;
    shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1; mov.b32 %r12, 100;
    st.shared.b32 [%r3+1024], %r12; add.s32 %r13, %r0, %r10; st.shared.b32 [%r3+2048], %r13;
    fence.proxy.async.shared::cta;
    or.b32 %r14, %r0, %r10; setp.ne.u32 %p5, %r14, 0;
    @%p5 bra expecting;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
    expecting:
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r4, %r1, %r11; mapa.shared::cluster.u32 %r5, %r3, %r11;
    BODY
    setp.ne.u32 %p6, %r10, 0;
    @%p6 bra told;
    {WAIT}
    ld.shared.b32 %r20, [%r3+1024];
    mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd40, %rd1; st.global.b32 [%rd1], %r20;
    told: barrier.cluster.arrive; barrier.cluster.wait;
"""


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("add.u32", 100 + LANE + LANE + 1),
        ("max.s32", np.full(32, 100)),
        ("min.u32", LANE),
        ("xor.b32", 100 ^ LANE ^ (LANE + 1)),
    ],
)
def test_reductions_into_a_cluster(form, expected, schedule):
    bulk = f"""@%p1 bra sent;
    add.s32 %r6, %r4, 1024;
    cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{form} [%r6], [%r1+2048], 128, [%r4];
    sent:"""
    element = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes." + form
    element += " [%r5+1024], %r13, [%r4];"
    for body in (bulk, element):
        out = np.zeros(32, np.uint32)
        # A thread hands its own lanes' data to the asynchronous proxy after the cluster barrier.
        run_ptx(TO_CLUSTER.replace("BODY", body), out, grid=2, cluster=2, schedule=schedule, races=True, outputs=(0,))
        assert np.array_equal(out, expected), body


@pytest.mark.parametrize(("function", "ufunc"), [("add", np.add), ("min", np.minimum), ("xor", np.bitwise_xor)])
def test_tensor_reductions(function, ufunc):
    source, target = (rng.integers(0, 1000, (8, 8)).astype(np.int32) for _ in range(2))
    before = target.copy()
    body = f"""{ARMED}
    @%p1 bra loaded;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1+1024], [%rd40, {{0, 0}}], [%r1];
    loaded: {WAIT}
    @%p1 bra stored;
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.{function}.tile.bulk_group [%rd41, {{0, 2}}], [%r1+1024];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    stored:"""
    run_ptx(body, *(tensor_map(a, (8, 8)) for a in (source, target)), source, target, races=True)
    assert np.array_equal(target[2:], ufunc(before[2:], source[:6])) and np.array_equal(target[:2], before[:2])


# Each CTA of four loads its own quarter into all CTAs of the mask.
MULTICAST = f"""{ARMED}
    mov.u32 %r10, %cluster_ctarank;
    @%p1 bra expecting;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], BYTES;
    expecting: barrier.cluster.arrive; barrier.cluster.wait;
    setp.eq.u32 %p3, %r10, 3; or.pred %p3, %p3, %p1;
    @%p3 bra loaded;
    shl.b32 %r5, %r10, 7; add.s32 %r6, %r1, %r5; cvt.u64.u32 %rd3, %r5; add.s64 %rd3, %rd3, %rd40;
    mov.b16 %h1, 11;
    LOAD
    loaded:
    setp.eq.u32 %p4, %r10, 2; @%p4 bra got;
    {WAIT}
    shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1;
    mad.lo.s32 %r4, %r10, 96, %r0; mul.wide.u32 %rd1, %r4, 4; add.s64 %rd1, %rd41, %rd1;
    ld.shared.b32 %r20, [%r3+1024]; st.global.b32 [%rd1], %r20;
    ld.shared.b32 %r20, [%r3+1152]; st.global.b32 [%rd1+128], %r20;
    ld.shared.b32 %r20, [%r3+1280]; st.global.b32 [%rd1+256], %r20;
    got: barrier.cluster.arrive; barrier.cluster.wait;
"""


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("tensor", [False, True])
def test_multicast_loads_reach_the_masked_ctas(tensor, schedule):
    data = rng.integers(0, 2**31, (3, 32)).astype(np.int32)
    out = np.zeros((4, 96), np.int32)
    bulk = """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r6+1024], [%rd3], 128, [%r1], %h1;"""
    box = """cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
    [%r6+1024], [%rd42, {0, %r10}], [%r1], %h1;"""
    body = MULTICAST.replace("LOAD", box if tensor else bulk).replace("BYTES", "384")
    # CTA 2 is not in the mask: it expects nothing that comes.
    body = body.replace("@%p1 bra expecting;", "setp.eq.u32 %p5, %r10, 2; or.pred %p5, %p5, %p1; @%p5 bra expecting;")
    run_ptx(body, data, out, tensor_map(data, (32, 1)), grid=4, cluster=4, schedule=schedule, races=True)
    assert np.array_equal(out[[0, 1, 3]], np.tile(data.ravel(), (3, 1))) and not out[2].any()


# Where CuTe's copy traits place (thread, byte) of 8-bit matrices: row · 16 + column.
LOAD_B8 = "((4,8),(1,4,2,2)):((64,1),(1,16,8,256))"
STORE_B8 = "((4,8),(1,2,2,4)):((32,1),(1,16,8,128))"
FILL = """
    shl.b32 %r3, %r0, 4; add.s32 %r3, %r3, %r1;
    mul.wide.u32 %rd1, %r0, 16; add.s64 %rd1, %rd41, %rd1;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd1]; st.shared.v4.b32 [%r3], {%r10, %r11, %r12, %r13};
    bar.warp.sync -1;
"""


@pytest.mark.parametrize(("count", "repeat"), [(2, "x1"), (4, "x2")])
def test_matrix_loads_of_bytes(count, repeat):
    data = rng.integers(0, 256, (32, 16), dtype=np.uint8)
    expected = data.ravel()[cute_layout(LOAD_B8)].reshape(32, 4, 4)[:, :count]
    items = "{" + ", ".join(f"%r{20 + k}" for k in range(count)) + "}"
    for k in range(count):
        load = f"ldmatrix.sync.aligned.m16n16.{repeat}.trans.shared.b8 {items}, [%r3];"
        got = per_thread(FILL + load, f"%r{20 + k}", data, target="sm_100a", races=True)
        assert np.array_equal(got.view(np.uint8).reshape(32, 4), expected[:, k])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_stores_of_bytes(count):
    data = rng.integers(0, 256, (32, 16), dtype=np.uint8)
    items = "{" + ", ".join(f"%r{10 + k}" for k in range(count)) + "}"
    store = f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r3], {items}; bar.warp.sync -1;"
    back = "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r3];"
    image = np.stack(
        [per_thread(FILL + store + back, f"%r{20 + k}", data, target="sm_100a", races=True) for k in range(4)], axis=1
    ).view(np.uint8)
    expected = data.copy()
    place = cute_layout(STORE_B8)[:, : 4 * count]
    expected.ravel()[place] = data[:, : 4 * count]
    assert np.array_equal(image.ravel()[: 128 * count], expected.ravel()[: 128 * count])


@pytest.mark.parametrize(("count", "repeat"), [(1, "x1"), (2, "x2")])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrix_loads_need_addresses_of_their_rows_only(count, repeat, trans):
    data = rng.integers(0, 2**16, (32, 8), dtype=np.uint16)
    items = "{" + ", ".join(f"%r{20 + k}" for k in range(count)) + "}"
    lost = f"setp.ge.u32 %p1, %r0, {8 * count}; @%p1 mov.b32 %r3, 0;"
    load = f"ldmatrix.sync.aligned.m8n8.{repeat}{trans}.shared.b16 {items}, [%r3];"
    for k in range(count):
        got = per_thread(FILL + lost + load, f"%r{20 + k}", data).view(np.uint16).reshape(8, 8)
        matrix = data[8 * k : 8 * k + 8]
        assert np.array_equal(got, matrix.T if trans else matrix)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_conversions_of_halves(name):
    bits, values = fp8(32, 2, name)
    out = per_thread(
        f"mul.wide.u32 %rd2, %r0, 2; add.s64 %rd2, %rd2, %rd41; ld.global.b16 %h1, [%rd2]; "
        f"cvt.rn.f16x2.{name}x2 %r20, %h1;", "%r20", bits,
    )  # fmt: skip
    assert np.array_equal(out.view(np.float16).reshape(32, 2), values.astype(np.float16))
    body = f"cvt.rn.f16x2.{name}x2 %r21, %h1; cvt.rn.satfinite.{name}x2.f16x2 %h2, %r21; cvt.u32.u16 %r20, %h2;"
    load = "mul.wide.u32 %rd2, %r0, 2; add.s64 %rd2, %rd2, %rd41; ld.global.b16 %h1, [%rd2]; "
    assert np.array_equal(per_thread(load + body, "%r20", bits).astype(np.uint16), bits.view(np.uint16).ravel())


@pytest.mark.parametrize(("a_type", "b_type"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("in_registers", [False, True])
def test_fp8_wgmma(a_type, b_type, in_registers):
    (a, a_values), (b, b_values) = fp8(64, 32, a_type), fp8(16, 32, b_type)
    data = np.concatenate([k_major(a), k_major(b)])
    # Register h + 2 · k of lane 4 · r + q in warp w: row 16 · w + 8 · h + r, bytes from 16 · k + 4 · q.
    words = a.view(np.uint32).reshape(4, 2, 8, 2, 4).transpose(0, 2, 4, 3, 1).reshape(128, 4).copy()
    a_operand = registers(4, 60) if in_registers else "%rd2"
    out = np.zeros((128, 8), np.float32)
    stores = "".join(f"st.global.b32 [%rd6+{4 * k}], %r{100 + k};" for k in range(8))
    body = f"""{ARMED}
    @%p1 bra loaded;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {data.size};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd41], {data.size}, [%r1];
    loaded: {WAIT}
    mul.wide.u32 %rd5, %r0, 16; add.s64 %rd5, %rd5, %rd42; ld.global.v4.b32 {registers(4, 60)}, [%rd5];
    mov.b64 %rd2, {descriptor(0x800, 64) & ~(1 << 46)}; mov.b64 %rd3, {descriptor(0x800 + 2048, 16) & ~(1 << 46)};
    setp.ne.u32 %p3, %r0, %r0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n16k32.f32.{a_type}.{b_type} {registers(8)}, {a_operand}, %rd3, %p3, 1, 1;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    mul.wide.u32 %rd6, %r0, 32; add.s64 %rd6, %rd6, %rd40; {stores}"""
    run_ptx(body, out, data, words, threads=128, races=True, outputs=(0,))
    got = out.reshape(4, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, 16)  # w r q j h c
    assert np.allclose(got, a_values @ b_values.T, rtol=1e-5, atol=1e-5)
