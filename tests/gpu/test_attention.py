"""``fa4gen.attention`` on a GPU: results, streams, graphs, threads, and the errors that only a real kernel gives."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fa4gen
from fa4gen import accuracy, dispatch, interface
from fa4gen.artifact_cache import ArtifactCache
from fa4gen.compile import compile_variant, load_kernel
from fa4gen.config import FlashFwdSm90Config
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() not in {(9, 0)}:
    pytest.skip("no kernel family runs on this device yet", allow_module_level=True)

SMALL = AttentionProblem.parse("b=2 h=4 hk=2 s=256 d=64 causal lse")


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the module: nothing is written to the user's, and a variant compiles once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA4GEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
        dispatch.clear_misses()


@pytest.fixture
def cold() -> None:
    """No plan and no loaded kernel, as in a new process."""
    interface._plans.clear()
    dispatch._dispatchers.clear()


def run(problem: AttentionProblem, tensors: tuple[torch.Tensor, ...], **more: object) -> tuple[torch.Tensor, ...]:
    result = fa4gen.attention(*tensors, causal=problem.causal, return_lse=problem.return_lse, **more)  # type: ignore[arg-type]
    return result if problem.return_lse else (result, None)  # type: ignore[return-value]


def assert_right(
    problem: AttentionProblem, tensors: tuple[torch.Tensor, ...], result: tuple[torch.Tensor, ...]
) -> None:
    expected = accuracy.expect(*tensors, problem, accuracy.default_scale(problem))
    report = accuracy.check(*result, expected)
    assert report.ok, report.message


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", accuracy.KINDS)
@pytest.mark.parametrize("text", ["b=2 h=4 hk=2 s=333 d=64 lse", "b=2 h=4 sq=77 sk=200 d=128 causal lse"])
def test_right_for_every_kind_of_input(text: str, kind: str) -> None:
    problem = AttentionProblem.parse(text)
    tensors = accuracy.make_inputs(problem, kind, device="cuda")
    assert_right(problem, tensors, run(problem, tensors))


@pytest.mark.parametrize(
    "text", ["b=1 h=1 s=1 d=64", "b=3 h=8 hk=1 sq=1 sk=1000 d=128", "b=1 h=2 sq=64 sk=7 d=64 causal lse"]
)
def test_right_at_the_edges(text: str) -> None:
    problem = AttentionProblem.parse(text)
    tensors = accuracy.make_inputs(problem, device="cuda")
    assert_right(problem, tensors, run(problem, tensors))


def test_given_outputs_are_written_and_nothing_beside_them() -> None:
    tensors = accuracy.make_inputs(SMALL, device="cuda")
    packed = torch.full((2, 256, 3, 4, 64), math.nan, dtype=torch.bfloat16, device="cuda")
    out, lse = packed[:, :, 1], torch.full((2, 4, 256), math.nan, device="cuda")
    result = run(SMALL, tensors, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    assert_right(SMALL, tensors, result)
    assert packed[:, :, ::2].isnan().all()


def test_softmax_scale_is_used() -> None:
    q, k, v = accuracy.make_inputs(SMALL, device="cuda")
    halved = run(SMALL, (q, k, v), softmax_scale=0.5 * accuracy.default_scale(SMALL))
    assert_right(SMALL, (q * 0.5, k, v), halved)


def test_meaningless_strides_of_extent_one() -> None:
    row = torch.randn(771, device="cuda").bfloat16()
    q, k, v = (row.as_strided((1, 1, 4, 64), (771, 771, 64, 1), i * 256) for i in range(3))
    assert torch.equal(fa4gen.attention(q, k, v), v)


@pytest.mark.parametrize(("b", "sq", "sk"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_problems(b: int, sq: int, sk: int) -> None:
    q, k, v = (torch.randn(b, s, 4, 64, device="cuda").bfloat16() for s in (sq, sk, sk))
    o, lse = fa4gen.attention(q, k, v, return_lse=True)
    assert o.shape == q.shape and not o.any()
    assert lse.shape == (b, 4, sq) and (lse == -math.inf).all()


def test_torch_compile() -> None:
    tensors = accuracy.make_inputs(SMALL, device="cuda")
    compiled = torch.compile(lambda *t: run(SMALL, t), backend="aot_eager", fullgraph=True)
    assert_right(SMALL, tensors, compiled(*tensors))


# --- streams, graphs, threads, devices --------------------------------------------------------------------------------


def test_runs_on_the_current_stream() -> None:
    """Inputs are written late on a side stream: a launch on any other would read what was there before."""
    tensors = accuracy.make_inputs(SMALL, device="cuda")
    run(SMALL, tensors)
    stale = tuple(torch.zeros_like(t) for t in tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for old, new in zip(stale, tensors, strict=True):
            old.copy_(new)
        result = run(SMALL, stale)
    stream.synchronize()
    assert_right(SMALL, tensors, result)


def test_graph_capture_after_warmup(cold: None) -> None:
    tensors = accuracy.make_inputs(SMALL, device="cuda")
    fa4gen.warmup(*tensors, causal=True, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(SMALL, tensors)
    for seed in (1, 2):
        for old, new in zip(tensors, accuracy.make_inputs(SMALL, seed=seed, device="cuda"), strict=True):
            old.copy_(new)
        for output in result:
            output.fill_(math.nan)
        graph.replay()
        assert_right(SMALL, tensors, result)


def test_graph_capture_of_another_length_needs_no_second_warmup(cold: None) -> None:
    fa4gen.warmup(str(SMALL))
    longer = AttentionProblem.parse("b=1 h=4 hk=2 s=300 d=64 causal lse")
    tensors = accuracy.make_inputs(longer, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(longer, tensors)
    graph.replay()
    assert_right(longer, tensors, result)


def test_capture_without_warmup_is_a_clear_error(cold: None) -> None:
    tensors = accuracy.make_inputs(SMALL, device="cuda")
    with pytest.raises(fa4gen.UsageError, match=r"call fa4gen\.warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(SMALL, tensors)
    torch.cuda.synchronize()
    assert_right(SMALL, tensors, run(SMALL, tensors))


def test_warm_call_neither_syncs_nor_warns(cold: None, caplog: pytest.LogCaptureFixture) -> None:
    tensors = accuracy.make_inputs(SMALL, device="cuda")
    fa4gen.warmup(*tensors, causal=True, return_lse=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with caplog.at_level(logging.WARNING, logger="fa4gen"):
            result = run(SMALL, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not caplog.records
    assert_right(SMALL, tensors, result)


def test_threads_with_their_own_streams(cold: None) -> None:
    problems = [AttentionProblem.parse(f"b=1 h=4 hk=2 s={200 + 8 * i} d=64 causal lse") for i in range(8)]

    def work(problem: AttentionProblem) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            tensors = accuracy.make_inputs(problem, device="cuda")
            for _ in range(20):
                result = run(problem, tensors)
            torch.cuda.current_stream().synchronize()
            assert_right(problem, tensors, result)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, problems))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_another_device_than_the_current() -> None:
    tensors = accuracy.make_inputs(SMALL, device="cuda:1")
    with torch.cuda.device(0):
        result = run(SMALL, tensors)
        assert torch.cuda.current_device() == 0
    assert result[0].device == torch.device("cuda:1")
    assert_right(SMALL, tensors, result)


# --- errors -----------------------------------------------------------------------------------------------------------

Bad = Callable[[torch.Tensor], torch.Tensor]
BAD: dict[str, tuple[Bad, str]] = {
    "cpu": (lambda k: k.cpu(), "k must be on a CUDA device, got cpu"),
    "dtype": (lambda k: k.half(), "q and k must have one dtype"),
    "address": (lambda k: k.new_zeros(k.numel() + 1)[1:].view(k.shape), "k's address must be a multiple of 16"),
    "stride": (lambda k: k.new_zeros(2, 256, 2 * 64 + 4)[..., :128].unflatten(2, (2, 64)), "k's strides must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_compiled_function_refuses_is_explained(name: str) -> None:
    """The plan is warm, so the kernel's own checks find the fault; the message must be the interface's."""
    make, message = BAD[name]
    q, k, v = accuracy.make_inputs(SMALL, device="cuda")
    run(SMALL, (q, k, v))
    with pytest.raises(fa4gen.UnsupportedProblem, match=message):
        run(SMALL, (q, make(k), v))
    assert_right(SMALL, (q, k, v), run(SMALL, (q, k, v)))


# --- host cost --------------------------------------------------------------------------------------------------------


def test_host_cost_is_at_most_half_of_sdpa() -> None:
    """Host time of a call on a tiny problem, interleaved with torch's own; the GPU never catches up with the queue."""
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda").bfloat16() for _ in range(3))
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    calls: dict[str, Callable[[], object]] = {
        "fa4gen": lambda: fa4gen.attention(q, k, v),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first),
    }
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(30):
            for name, call in calls.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(100):
                    call()
                rounds[name].append((time.perf_counter() - started) * 1e4)
    ours, torchs = (statistics.median(rounds[name]) for name in ("fa4gen", "sdpa"))
    assert ours <= torchs / 2, f"fa4gen.attention {ours:.1f} us a call, torch SDPA {torchs:.1f} us"


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_nan_in_one_key_reaches_every_query(fraction: float, tmp_path: Path) -> None:
    """A NaN score must not vanish in the polynomial's clamp or in a maximum."""
    problem = AttentionProblem.parse("b=1 h=2 s=256 d=64")
    variant = Variant.of("sm_90a", problem, FlashFwdSm90Config(tile_n=64, exp2_poly_fraction=fraction))
    kernel = load_kernel(compile_variant(variant, ArtifactCache(tmp_path)))
    for key in range(100, 108):  # polynomial and MUFU columns
        q, k, v = (torch.randn(1, 256, 2, 64, device="cuda").bfloat16() for _ in range(3))
        k[:, key] = torch.nan
        o = torch.zeros_like(q)
        kernel(q, k, v, o, 0.125, torch.cuda.get_device_properties(0).multi_processor_count)
        assert not o.isfinite().any()
