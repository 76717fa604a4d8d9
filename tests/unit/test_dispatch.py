"""Dispatch and interface with a fake kernel on CPU tensors: everything but the launch."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fa4gen
from fa4gen import accuracy, dispatch, interface
from fa4gen.arch import get_device
from fa4gen.config import FlashFwdSm90Config, FlashFwdSm100Config
from fa4gen.dispatch import Dispatcher
from fa4gen.errors import CompileError, TableError, UnsupportedProblem, UsageError
from fa4gen.measure.base import Source
from fa4gen.problem import AttentionProblem
from fa4gen.tuned_table import Provenance, Row, TunedTable, TunedTables
from fa4gen.variant import Variant

H200 = get_device("h200")
BF16 = torch.bfloat16


class FakeKernels:
    """Stands for compile and load. A kernel checks its arguments as the compiled host function does, then computes."""

    def __init__(self) -> None:
        self.built: list[Variant] = []
        self.ahead: list[Variant] = []
        self.launches = 0
        self.seconds = 0.0
        self.num_sms: set[int] = set()

    def build(self, variant: Variant, at_call_time: bool) -> Callable[..., None]:
        self.built.append(variant)
        if not at_call_time:
            self.ahead.append(variant)
        time.sleep(self.seconds)

        def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, *rest: Any) -> None:
            static = variant.static
            *lse, scale, num_sms = rest
            assert len(lse) == static.return_lse
            assert q.shape[2] == k.shape[2] * static.gqa_ratio
            assert (q.shape[3], v.shape[3]) == (static.head_dim, static.head_dim_v)
            for t in (q, k, v, o):
                if t.dtype != interface.TORCH_DTYPES[static.dtype] or t.device != q.device:
                    raise TypeError(f"Mismatched Tensor dtype or device: {t.dtype}, {t.device}")
                if (
                    t.data_ptr() % 16
                    or t.stride(3) != 1
                    or any(s % 8 for n, s in zip(t.shape[:3], t.stride()[:3], strict=True) if n > 1)
                ):
                    raise ValueError("Misaligned Tensor data")
            if any(t.dtype != torch.float32 for t in lse):
                raise TypeError("Mismatched Tensor dtype")
            self.launches += 1
            self.num_sms.add(num_sms)
            reference(q, k, v, o, lse[0] if lse else None, scale, static.causal)

        return launch


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> None:
    problem = AttentionProblem(
        q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], v.shape[3], causal=causal
    )
    out, sums = accuracy.reference(q, k, v, problem, scale)
    o.copy_(out)
    if lse is not None:
        lse.copy_(sums)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeKernels]:
    kernels = FakeKernels()
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(interface, "DEVICE_TYPE", "cpu")
    use_rows(kernels)
    yield kernels
    interface._plans.clear()
    dispatch._dispatchers.clear()
    dispatch._pending.clear()
    dispatch._predicted.clear()


def use_rows(kernels: FakeKernels, *rows: Row) -> None:
    tables = TunedTables(H200.key, ((TunedTable(H200.key, rows), None),))
    interface._plans.clear()
    dispatch._dispatchers[-1] = Dispatcher(H200, tables, kernels.build)


def tuned(problem: str, **knobs: Any) -> Row:
    return Row(
        problem=problem,
        family="flash_fwd_sm90",
        config=FlashFwdSm90Config(**knobs),
        median_us=10.0,
        interval_us=(9.0, 11.0),
        source="measured",
        provenance=Provenance.now(measurer="cuda", device=H200.name, samples=20),
    )


def tensors(
    b: int = 2, sq: int = 16, sk: int = 16, h: int = 4, hk: int = 4, d: int = 64, dv: int = 64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(b + sq + sk)
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))
    return [torch.randn(shape, generator=generator).to(BF16) for shape in shapes]


# --- what is predicted ------------------------------------------------------------------------------------------------

B200 = get_device("b200")


def predicted(problem: str, **knobs: Any) -> Row:
    data = tuned(problem).model_dump() | {
        "problem": problem,
        "family": "flash_fwd_sm100",
        "config": FlashFwdSm100Config(**knobs),
        "source": "predicted",
        "provenance": Provenance.now(measurer="model", device=B200.name, samples=1),
    }
    return Row.model_validate(data)


def on_b200(*rows: Row) -> Dispatcher:
    return Dispatcher(B200, TunedTables(B200.key, ((TunedTable(B200.key, rows), None),)), FakeKernels().build)


def test_a_predicted_row_serves_and_is_named_once(fake: FakeKernels, caplog: pytest.LogCaptureFixture) -> None:
    rows = predicted("b=2 h=4 s=16 d=64", tile_n=96), predicted("b=2 h=4 s=16 d=128", tile_n=112)
    for dispatcher in (on_b200(*rows), on_b200(*rows)):
        for row in rows:
            assert dispatcher.variant(row.problem) == Variant.of("sm_100a", row.problem, row.config)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "on NVIDIA B200 configs are predicted, not measured" in record.message


def test_a_measured_row_ends_it(fake: FakeKernels, caplog: pytest.LogCaptureFixture) -> None:
    guess = predicted("b=2 h=4 s=16 d=64", tile_n=96)
    known = guess.model_copy(update={"source": Source.MEASURED, "config": FlashFwdSm100Config(tile_n=80)})
    table = TunedTable(B200.key, (guess,)).merge([known])
    assert on_b200(*table.rows).resolve(guess.problem).config == known.config
    assert on_b200(*table.merge([guess]).rows).resolve(guess.problem).config == known.config
    assert not caplog.records


def test_a_call_on_a_predicted_row_is_a_miss(fake: FakeKernels) -> None:
    row = tuned("b=2 h=4 s=16 d=64", tile_n=96).model_copy(update={"source": Source.PREDICTED})
    use_rows(fake, row)
    fa4gen.attention(*tensors())
    assert fake.built[0].config == row.config
    assert [miss.calls for miss in dispatch._pending.values()] == [1]


# --- the call ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hk", [4, 2, 1])
@pytest.mark.parametrize("dv", [64, 128])
def test_result_and_lse(fake: FakeKernels, causal: bool, hk: int, dv: int) -> None:
    q, k, v = tensors(sq=9, sk=7, hk=hk, dv=dv)
    o, lse = fa4gen.attention(q, k, v, causal=causal, return_lse=True, softmax_scale=0.3)
    expected = torch.empty_like(o), torch.empty_like(lse)
    reference(q, k, v, *expected, 0.3, causal)
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
    assert o.shape == (2, 9, 4, dv) and o.is_contiguous() and o.dtype == BF16
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32
    assert fake.num_sms == {H200.sm_count}
    assert torch.equal(fa4gen.attention(q, k, v, causal=causal, softmax_scale=0.3), o)


def test_default_scale_is_one_over_root_head_dim(fake: FakeKernels) -> None:
    q, k, v = tensors()
    assert torch.equal(fa4gen.attention(q, k, v), fa4gen.attention(q, k, v, softmax_scale=64**-0.5))


def test_outputs_given_are_the_ones_returned(fake: FakeKernels) -> None:
    q, k, v = tensors()
    expected = fa4gen.attention(q, k, v, return_lse=True)
    packed = torch.full((2, 16, 3, 4, 64), math.nan, dtype=BF16)
    out, lse = packed[:, :, 1], torch.empty(2, 4, 16)
    got = fa4gen.attention(q, k, v, return_lse=True, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert packed[:, :, ::2].isnan().all()


def test_strided_and_expanded_inputs(fake: FakeKernels) -> None:
    qkv = torch.randn(2, 16, 3, 4, 64).to(BF16)
    q, k, v = qkv.unbind(2)
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(fa4gen.attention(q, k, v), fa4gen.attention(*transposed))
    one = k[:, :, :1].expand(2, 16, 4, 64)
    assert torch.equal(fa4gen.attention(q, one, one), fa4gen.attention(q, one.contiguous(), one.contiguous()))


def test_strides_of_extent_one_mean_nothing(fake: FakeKernels) -> None:
    row = torch.randn(771).to(BF16)
    q, k, v = (row.as_strided((1, 1, 4, 64), (771, 771, 64, 1), i * 256) for i in range(3))
    assert q.contiguous().stride(1) % 8, "a caller cannot mend them with contiguous()"
    assert torch.equal(fa4gen.attention(q, k, v), v)


def test_bad_strides_are_refused_on_a_warm_shape(fake: FakeKernels) -> None:
    q, k, v = tensors(b=2, sq=4, sk=4)
    fa4gen.attention(q, k, v)
    wide = torch.zeros(2, 4, 4 * 64 + 4, dtype=BF16)[..., :256].unflatten(2, (4, 64))
    with pytest.raises(UnsupportedProblem, match="k's strides must be multiples of 8"):
        fa4gen.attention(q, wide, v)


@pytest.mark.parametrize(("b", "sq", "sk"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (0, 0, 0)])
def test_empty_problems_launch_nothing(fake: FakeKernels, b: int, sq: int, sk: int) -> None:
    q, k, v = tensors(b=b, sq=sq, sk=sk)
    o, lse = fa4gen.attention(q, k, v, return_lse=True)
    assert o.shape == q.shape and not o.any()
    assert lse.shape == (b, 4, sq) and (lse == -math.inf).all()
    assert not fa4gen.attention(q, k, v).any()
    assert fake.built == [] and fake.launches == 0


def test_warm_call_reuses_plan_and_kernel(fake: FakeKernels) -> None:
    for s in (16, 16, 32, 48):
        fa4gen.attention(*tensors(sq=s, sk=s))
    assert len(fake.built) == 1 and fake.launches == 4
    assert len(interface._plans) == 3


def test_plans_are_bounded(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "MAX_PLANS", 4)
    for s in range(1, 12):
        fa4gen.attention(*tensors(sq=1, sk=s))
        assert len(interface._plans) <= 4
    assert len(fake.built) == 1


# --- bad input --------------------------------------------------------------------------------------------------------


def misaligned(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(math.prod(shape) + 8, dtype=BF16)[1 : 1 + math.prod(shape)].view(shape)


Q = (2, 16, 4, 64)
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "list": (lambda: {"q": [1.0]}, "q must be a torch tensor, got list"),
    "numpy": (lambda: {"k": tensors()[1].float().numpy()}, "k must be a torch tensor, got ndarray"),
    "dtype": (lambda: {"q": tensors()[0].float()}, "q must be bfloat16 or float16, got torch.float32: cast it"),
    "mixed dtype": (lambda: {"v": tensors()[2].half()}, "q and v must have one dtype.*cast v"),
    "ndim": (lambda: {"k": tensors()[1][0]}, r"k must be \(batch, seqlen, heads, head_dim\), got 3 dimensions"),
    "device": (lambda: {"v": tensors()[2].to("meta")}, "v must be on a CUDA device, got meta"),
    "batch": (lambda: {"k": tensors(b=1)[1]}, "one batch, got 2, 1 and 2"),
    "head dim of k": (lambda: {"k": tensors(d=72)[1]}, "q and k must have one head dim, got 64 and 72"),
    "head dim 60": (lambda: dict(zip("qkv", tensors(d=60), strict=True)), "multiple of 8 from 8 to 256, got 60"),
    "head dim 264": (lambda: dict(zip("qkv", tensors(dv=264), strict=True)), "v's head dim must be .*got 264"),
    "seqlen": (lambda: {"v": tensors(sk=8)[2]}, "k and v must agree in seqlen and heads"),
    "heads": (lambda: dict(zip("qkv", tensors(hk=3), strict=True)), "multiple of k's, got 4 and 3"),
    "no heads": (lambda: {"k": tensors(hk=0)[1], "v": tensors(hk=0)[2]}, "multiple of k's, got 4 and 0"),
    "last dim": (lambda: {"q": torch.zeros(2, 16, 64, 4, dtype=BF16).mT}, r"last dimension must be contiguous.*q\."),
    "stride": (lambda: {"k": torch.zeros(2, 16, 4 * 64 + 4, dtype=BF16)[..., :256].unflatten(2, (4, 64))},
               r"k's strides must be multiples of 8.*k\.contiguous"),
    "address": (lambda: {"v": misaligned(Q)}, r"v's address must be a multiple of 16 bytes, got 0x.*v\.clone"),
    "scale 0": (lambda: {"softmax_scale": 0.0}, "softmax_scale must be positive and finite, got 0.0"),
    "scale nan": (lambda: {"softmax_scale": math.nan}, "softmax_scale must be positive and finite, got nan"),
    "scale tensor": (lambda: {"softmax_scale": torch.tensor(0.1)}, "softmax_scale must be a Python number"),
    "causal": (lambda: {"causal": [True]}, r"causal must be a bool, got \[True\]"),
    "lse alone": (lambda: {"lse": torch.empty(2, 4, 16)}, "without return_lse=True"),
    "out shape": (lambda: {"out": torch.empty(2, 16, 4, 32, dtype=BF16)}, r"out must be a \(2, 16, 4, 64\)"),
    "out dtype": (lambda: {"out": torch.empty(Q, dtype=torch.float16)}, "out must be .*bfloat16 tensor.*float16"),
    "out expanded": (lambda: {"out": torch.empty(1, 16, 4, 64, dtype=BF16).expand(Q)}, "out must not be an expanded"),
    "out address": (lambda: {"out": misaligned(Q)}, "out's address"),
    "out grad": (lambda: {"out": torch.empty(Q, dtype=BF16, requires_grad=True)}, "out requires grad"),
    "lse shape": (lambda: {"return_lse": True, "lse": torch.empty(2, 16, 4)}, r"lse must be a \(2, 4, 16\)"),
    "lse dtype": (lambda: {"return_lse": True, "lse": torch.empty(2, 4, 16).double()}, "lse must be .*float32"),
    "lse strides": (lambda: {"return_lse": True, "lse": torch.empty(2, 16, 4).mT}, "lse must be contiguous"),
}  # fmt: skip


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(fake: FakeKernels, name: str, warm: bool) -> None:
    make, message = BAD[name]
    arguments: dict[str, Any] = dict(zip("qkv", tensors(), strict=True))
    if warm:  # the same shapes are in the plans: the compiled function's checks must lead to the same message
        fa4gen.attention(**arguments)
        fa4gen.attention(**arguments, return_lse=True)
    launches = fake.launches
    with pytest.raises(UnsupportedProblem, match=message):
        fa4gen.attention(**(arguments | make()))
    assert fake.launches == launches


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match=r"q must be on a CUDA device, got cpu: move it with \.cuda"):
        fa4gen.attention(*tensors())


def test_grad_inputs_are_fine_under_no_grad(fake: FakeKernels) -> None:
    q, k, v = tensors()
    expected = fa4gen.attention(q, k, v)
    q.requires_grad_()
    with torch.no_grad():
        o = fa4gen.attention(q, k, v)
    assert torch.equal(o, expected) and not o.requires_grad


def test_a_kernels_own_error_is_not_hidden(fake: FakeKernels) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    dispatch._dispatchers[-1]._build = lambda variant, at_call_time: broken
    with pytest.raises(RuntimeError, match="CUDA error"):
        fa4gen.attention(*tensors())


# --- tables, warm-up, compiling ---------------------------------------------------------------------------------------


def test_tuned_row_is_what_runs(fake: FakeKernels) -> None:
    use_rows(fake, tuned("b=2 h=4 s=1024 d=64", tile_n=96), tuned("b=2 h=4 s=1024 d=64 causal", tile_n=80))
    fa4gen.attention(*tensors(sq=1024, sk=1024))
    fa4gen.attention(*tensors(sq=1024, sk=1024), causal=True)
    assert [v.config.tile_n for v in fake.built] == [96, 80]
    assert fa4gen.misses() == []


def test_corrupt_user_table_is_one_clear_error(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tuned" / f"{H200.key}.json"
    path.parent.mkdir()
    path.write_text('{"schema_version": 1,')
    monkeypatch.setenv("FA4GEN_TUNED_DIR", str(path.parent))
    monkeypatch.setattr("fa4gen.measure.cuda.current_device", lambda index: H200)
    dispatch._dispatchers.clear()
    for _ in range(2):
        with pytest.raises(TableError, match=f"{path.name} is not valid JSON"):
            fa4gen.attention(*tensors())
    path.unlink()
    monkeypatch.setattr(dispatch.Dispatcher.__init__, "__defaults__", (fake.build,))
    assert fa4gen.attention(*tensors()).shape == (2, 16, 4, 64), "once the file is gone the next call works"


def test_warmup_with_tensors_then_calls_only_launch(fake: FakeKernels) -> None:
    q, k, v = tensors(hk=2)
    fa4gen.warmup(q, k, v, causal=True, return_lse=True)
    assert len(fake.built) == 1 and fake.ahead == fake.built
    assert fake.launches == 1, "a fresh kernel is launched once so that its code is on the device"
    fa4gen.attention(q, k, v, causal=True, return_lse=True)
    fa4gen.warmup(q, k, v, causal=True, return_lse=True)
    assert len(fake.built) == 1 and fake.launches == 2


def test_warmup_with_problems(fake: FakeKernels) -> None:
    texts = ["b=2 h=4 s=16 d=64", "b=1 h=4 s=99 d=64", "b=2 h=4 hk=1 s=16 d=64 lse", "b=0 h=4 s=16 d=64"]
    fa4gen.warmup(*texts[:2], AttentionProblem.parse(texts[2]), texts[3], device=-1)
    assert len(fake.built) == 2, "two lengths share a kernel, an empty problem needs none"
    with pytest.raises(UnsupportedProblem, match="unknown word"):
        fa4gen.warmup("b=2 heads=4", device=-1)
    with pytest.raises(UsageError, match="got 2 arguments"):
        fa4gen.warmup(*tensors()[:2])


def test_eight_threads_build_once(fake: FakeKernels) -> None:
    fake.seconds = 0.2
    start = threading.Barrier(8)
    inputs = tensors()
    expected = torch.empty_like(inputs[0])
    reference(*inputs, expected, None, 0.125, False)

    def call(_: int) -> torch.Tensor:
        start.wait()
        return fa4gen.attention(*inputs)  # type: ignore[return-value]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(8)))
    assert all(torch.equal(o, expected) for o in results)
    assert len(fake.built) == 1 and fake.launches == 8


def test_warm_call_does_not_wait_for_a_compile(fake: FakeKernels) -> None:
    q, k, v = tensors()
    fa4gen.attention(q, k, v)
    started = threading.Event()
    release = threading.Event()

    def slow(variant: Variant, at_call_time: bool) -> Callable[..., None]:
        started.set()
        assert release.wait(10)
        return fake.build(variant, at_call_time)

    dispatch._dispatchers[-1]._build = slow
    with ThreadPoolExecutor(1) as pool:
        cold = pool.submit(fa4gen.attention, q, k, v, causal=True)
        assert started.wait(10)
        fa4gen.attention(q, k, v)
        assert not cold.done()
        release.set()
        cold.result(10)


def test_failed_build_is_not_remembered(fake: FakeKernels) -> None:
    chosen = dispatch._dispatchers[-1]

    def refuse(variant: Variant, at_call_time: bool) -> Callable[..., None]:
        raise CompileError("no")

    chosen._build = refuse
    with pytest.raises(CompileError):
        fa4gen.attention(*tensors())
    chosen._build = fake.build
    fa4gen.attention(*tensors())
    assert fake.launches == 1


class FakeCache:
    def __init__(self, artifact: str | None) -> None:
        self.artifact = artifact

    def get(self, variant: Variant) -> str | None:
        return self.artifact


@pytest.mark.parametrize(("cached", "at_call_time"), [(True, True), (False, True), (False, False)])
def test_compile_at_call_time_is_never_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cached: bool, at_call_time: bool
) -> None:
    problem = AttentionProblem.parse("b=1 h=1 s=1 d=64")
    variant = Variant.of("sm_90a", problem, FlashFwdSm90Config.default(problem))
    monkeypatch.setattr("fa4gen.artifact_cache.ArtifactCache", lambda: FakeCache("hit" if cached else None))
    monkeypatch.setattr("fa4gen.compile.compile_variant", lambda variant, cache: "compiled")
    monkeypatch.setattr("fa4gen.compile.load_kernel", lambda artifact: artifact)
    with caplog.at_level(logging.INFO, logger="fa4gen"):
        assert dispatch.build_kernel(variant, at_call_time) == ("hit" if cached else "compiled")
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == (at_call_time and not cached)
    assert all(variant.name in text and " s;" in text for text in warnings)


def test_loading_under_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    problem = AttentionProblem.parse("b=1 h=1 s=1 d=64")
    with pytest.raises(UsageError, match=r"fa4gen\.warmup"):
        dispatch.build_kernel(Variant.of("sm_90a", problem, FlashFwdSm90Config.default(problem)), True)


# --- misses -----------------------------------------------------------------------------------------------------------


def test_misses_are_counted_by_bucket_and_sorted(fake: FakeKernels) -> None:
    use_rows(fake, tuned("b=2 h=4 s=1024 d=64"))
    for s, calls in ((1024, 1), (16, 3), (17, 2)):
        for _ in range(calls):
            fa4gen.attention(*tensors(sq=s, sk=s))
    fa4gen.attention(*tensors(d=128), causal=True)
    found = fa4gen.misses()
    assert [(str(m.problem), m.calls) for m in found] == [
        ("b=2 h=4 s=16 d=64", 5),
        ("b=2 h=4 s=16 d=128 dv=64 causal", 1),
    ]
    assert {m.device for m in found} == {H200.key}


def test_misses_persist_add_up_and_disappear_once_tuned(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FA4GEN_TUNED_DIR", str(tmp_path / "tuned"))
    monkeypatch.setattr("fa4gen.tuned_table.resource_dir", lambda name: tmp_path / "shipped")
    q, k, v = tensors()
    fa4gen.attention(q, k, v)
    dispatch.flush_misses()
    dispatch.flush_misses()
    fa4gen.attention(q, k, v)
    assert [m.calls for m in fa4gen.misses()] == [2]
    assert sum(json.loads(line)["calls"] for line in dispatch.miss_file().read_text().splitlines()) == 2
    TunedTable.update(tmp_path / "tuned" / f"{H200.key}.json", H200.key, [tuned("b=2 h=4 s=16 d=64")])
    assert fa4gen.misses() == []
    dispatch.clear_misses()
    assert not dispatch.miss_file().exists()


def test_damaged_miss_line_is_skipped_with_a_warning(fake: FakeKernels, caplog: pytest.LogCaptureFixture) -> None:
    fa4gen.attention(*tensors())
    dispatch.flush_misses()
    with dispatch.miss_file().open("a") as file:
        file.write('{"device": "sm_90a-13')
    assert [m.calls for m in fa4gen.misses()] == [1]
    assert "misses.jsonl:2 is damaged" in caplog.text


def test_full_disk_keeps_the_counts(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fa4gen.attention(*tensors())
    with monkeypatch.context() as patch:

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "write", full)
        dispatch.flush_misses()
    assert "No space left" in caplog.text
    assert [m.calls for m in fa4gen.misses()] == [1]


def test_misses_are_written_at_exit(tmp_path: Path) -> None:
    code = (
        "from fa4gen import dispatch; from fa4gen.arch import get_device; from fa4gen.problem import AttentionProblem;"
        "dispatch.record_miss(get_device('h200'), AttentionProblem.parse('b=1 h=2 s=8 d=64')).calls += 3"
    )
    environment = os.environ | {"FA4GEN_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert json.loads((tmp_path / "misses.jsonl").read_text()) == {
        "device": H200.key,
        "problem": "b=1 h=2 s=8 d=64",
        "calls": 3,
    }


# --- fork, torch.compile, imports -------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_forked_child_starts_clean(fake: FakeKernels) -> None:
    """The child must neither wait for a lock that another thread held, nor reuse handles or counts."""
    fa4gen.attention(*tensors())
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with dispatch._lock:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    child = os.fork()
    if child == 0:
        clean = not interface._plans and not dispatch._dispatchers and not dispatch._pending
        use_rows(fake)
        dispatch._dispatchers[-1].kernel(fake.built[0])
        os._exit(0 if clean and len(fake.built) == 2 else 1)
    deadline = time.monotonic() + 10
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    release.set()
    thread.join()
    if status == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status[0] == child and os.waitstatus_to_exitcode(status[1]) == 0
    assert interface._plans, "the parent keeps its own"


@pytest.mark.parametrize("return_lse", [False, True])
def test_torch_compile_sees_one_operator(fake: FakeKernels, return_lse: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        result = fa4gen.attention(q * 2, k, v, causal=True, return_lse=return_lse)
        return (result[0] + 1, result[1]) if return_lse else result + 1

    inputs = tensors(hk=2, dv=128)
    compiled = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    eager = model(*inputs)
    for one, other in zip(compiled, eager, strict=True) if return_lse else [(compiled, eager)]:
        assert torch.equal(one, other)
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("attention_forward" in target for target in targets) == 1


def test_operator_passes_torchs_own_checks(fake: FakeKernels) -> None:
    q, k, v = tensors(hk=2, dv=128)
    for return_lse in (False, True):
        torch.library.opcheck(
            torch.ops.fa4gen.attention_forward.default,
            (q, k, v, True, None, return_lse, False),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
        )


def test_public_names() -> None:
    assert set(fa4gen.__all__) >= {"attention", "warmup", "misses", "__version__", "Fa4genError"}
    for name in fa4gen.__all__:
        assert getattr(fa4gen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fa4gen.nothing
