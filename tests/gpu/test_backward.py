"""Gradients of ``fa4gen.attention`` on a GPU: against float64, differences, torch; layouts, sizes, repeatability."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fa4gen
from fa4gen import accuracy, autograd, dispatch, interface
from fa4gen.bench import bench
from fa4gen.gradients import (
    Gradients,
    check_gradients,
    expect_gradients,
    make_gradient_inputs,
    reference_gradients,
    sample_keys,
)
from fa4gen.measure.peers import get_peers
from fa4gen.problem import AttentionProblem

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() not in {(9, 0)}:
    pytest.skip("no backward family was run on this device yet", allow_module_level=True)

SMALL = AttentionProblem.parse("b=2 h=4 hk=2 s=256 d=64 op=bwd causal")


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
    autograd._plans.clear()
    dispatch._dispatchers.clear()


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def run(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Gradients, Tensor, Tensor]:
    """Gradients by autograd, and the O and LSE of the forward before it."""
    q, k, v = leaves(q, k, v)
    o, lse = fa4gen.attention(q, k, v, causal=problem.causal, return_lse=True, deterministic=problem.deterministic)
    return torch.autograd.grad(o, (q, k, v), do), o.detach(), lse.detach()


def assert_right(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Gradients:
    """Of the O and LSE that the forward gave, the backward made the right gradients."""
    got, o, lse = run(problem, q, k, v, do)
    scale = accuracy.default_scale(problem)
    rows, keys = accuracy.sample_rows(problem), sample_keys(problem)
    report = check_gradients(*got, expect_gradients(q, k, v, o, do, lse, problem, scale, rows, keys))
    assert report.ok, report.message
    return got


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", accuracy.KINDS)
@pytest.mark.parametrize(
    "text",
    [
        "b=2 h=4 hk=2 s=333 d=64",
        "b=2 h=4 sq=77 sk=200 d=128 causal deterministic",
        "h=8 hk=1 sq=300 sk=201 d=128 dtype=fp16 causal",
    ],
)
def test_right_for_every_kind_of_input(text: str, kind: str) -> None:
    problem = AttentionProblem.parse(f"{text} op=bwd")
    q, k, v, _, do, _ = make_gradient_inputs(problem, kind, device="cuda")
    assert_right(problem, q, k, v, do)


@pytest.mark.parametrize("deterministic", ["", " deterministic"])
@pytest.mark.parametrize(
    "text",
    [
        "b=1 h=1 s=1 d=64",
        "b=3 h=8 hk=1 sq=1 sk=1000 d=128",
        "h=2 sq=1000 sk=1 d=64",
        "b=2 h=16 hk=2 s=1025 d=128 causal",
        "h=2 s=4097 d=64 causal",
        "h=4 sq=511 sk=1024 d=64 causal",
    ],
)
def test_right_at_the_edges(text: str, deterministic: str) -> None:
    problem = AttentionProblem.parse(f"{text} op=bwd{deterministic}")
    q, k, v, _, do, _ = make_gradient_inputs(problem, device="cuda")
    assert_right(problem, q, k, v, do)


@pytest.mark.parametrize("sk", [1, 64, 200])
def test_queries_that_see_no_key_have_no_gradient(sk: int) -> None:
    problem = AttentionProblem.parse(f"b=2 h=2 sq=333 sk={sk} d=64 op=bwd causal")
    q, k, v, _, do, _ = make_gradient_inputs(problem, device="cuda")
    dq, _, _ = assert_right(problem, q, k, v, do)
    assert not dq[:, : 333 - sk].any() and dq[:, 333 - sk + 1 :].any() == (sk > 1)


@pytest.mark.parametrize("text", ["b=2 h=2 sq=65 sk=130 d=64", "h=4 hk=2 s=150 d=128 causal"])
def test_gradients_are_slopes(text: str) -> None:
    """<gradient, direction> is what the float64 forward gains along it, whatever formula gave the gradient."""
    problem = AttentionProblem.parse(f"{text} op=bwd")
    scale = accuracy.default_scale(problem)
    inputs = make_gradient_inputs(problem, device="cuda")
    do = inputs[4]
    tensors = [t.double() for t in inputs[:3]]
    got, _, _ = run(problem, *inputs[:3], do)

    def loss(at: int, step: Tensor) -> Tensor:
        moved = [t + step if i == at else t for i, t in enumerate(tensors)]
        return (accuracy.reference(*moved, problem, scale)[0] * do.double()).sum()

    for at, gradient in enumerate(got):
        direction = gradient.double() / torch.linalg.vector_norm(gradient.double())
        slope = (loss(at, 1e-4 * direction) - loss(at, -1e-4 * direction)) / 2e-4
        torch.testing.assert_close((gradient.double() * direction).sum(), slope, rtol=5e-3, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dtype"), [(64, "bf16"), (128, "bf16"), (128, "fp16")])
def test_as_accurate_as_torch(d: int, dtype: str, causal: bool) -> None:
    """Errors against float64 of O and LSE not rounded, beside torch's flash backward."""
    problem = AttentionProblem(2, 4, 4, 1000, 1000, d, d, dtype, causal, op="bwd")
    q, k, v, _, do, _ = make_gradient_inputs(problem, device="cuda")
    expected = reference_gradients(q, k, v, do, problem, accuracy.default_scale(problem))
    ours, _, _ = run(problem, q, k, v, do)
    inputs = leaves(q, k, v)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in inputs), is_causal=causal)
    theirs = torch.autograd.grad(out, inputs, do.transpose(1, 2))
    for mine, other, want in zip(ours, theirs, expected, strict=True):
        my_error, other_error = (torch.linalg.vector_norm(t.double() - want) for t in (mine, other))
        assert my_error < 1.2 * other_error
        assert my_error < (8e-3 if dtype == "bf16" else 1e-3) * torch.linalg.vector_norm(want)


def test_softmax_scale_is_used() -> None:
    q, k, v, _, do, _ = make_gradient_inputs(SMALL, device="cuda")
    q, k, v = leaves(q, k, v)
    o = fa4gen.attention(q, k, v, causal=True, softmax_scale=0.5)
    expected = reference_gradients(q.detach(), k.detach(), v.detach(), do, SMALL, 0.5)
    for got, want in zip(torch.autograd.grad(o, (q, k, v), do), expected, strict=True):
        assert torch.linalg.vector_norm(got - want) < 0.01 * torch.linalg.vector_norm(want)


# --- layouts and sizes ------------------------------------------------------------------------------------------------


def heads_first(do: Tensor) -> Tensor:
    return do.transpose(1, 2).contiguous().transpose(1, 2)


def padded_rows(do: Tensor) -> Tensor:
    return torch.cat([do, do.new_full((*do.shape[:3], 8), torch.nan)], dim=-1)[..., : do.shape[-1]]


def unaligned(do: Tensor) -> Tensor:
    return torch.cat([do.new_zeros(1), do.flatten()])[1:].view(do.shape)


@pytest.mark.parametrize("lay_out", [heads_first, padded_rows, unaligned])
def test_layout_of_the_incoming_gradient_does_not_matter(lay_out) -> None:
    problem = AttentionProblem.parse(f"{SMALL} deterministic")
    q, k, v, _, do, _ = make_gradient_inputs(problem, device="cuda")
    want, _, _ = run(problem, q, k, v, do)
    got, _, _ = run(problem, q, k, v, lay_out(do))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_gradient_of_a_sum() -> None:
    """Its dO is one number, of stride 0 in all dimensions."""
    q, k, v, _, do, _ = make_gradient_inputs(SMALL, device="cuda")
    do.fill_(1.0)
    q, k, v = leaves(q, k, v)
    fa4gen.attention(q, k, v, causal=True).sum().backward()
    expected = reference_gradients(q.detach(), k.detach(), v.detach(), do, SMALL, accuracy.default_scale(SMALL))
    assert torch.linalg.vector_norm(v.grad - expected[2]) < 0.01 * torch.linalg.vector_norm(expected[2])


@pytest.mark.parametrize("text", ["h=128 hk=16 sq=140000 sk=200 d=128", "h=128 sq=100 sk=140000 d=128"])
def test_offsets_beyond_two_to_the_31(text: str) -> None:
    problem = AttentionProblem.parse(f"b=1 {text} op=bwd")
    if torch.cuda.mem_get_info()[0] < 80 << 30:
        pytest.skip("needs 80 GB of free device memory")
    p = problem
    q, k, v, do = (
        torch.randn(1, s, h, 128, dtype=torch.bfloat16, device="cuda")
        for s, h in ((p.seqlen_q, p.heads), (p.seqlen_k, p.heads_kv), (p.seqlen_k, p.heads_kv), (p.seqlen_q, p.heads))
    )
    assert max(q.numel(), k.numel()) > 1 << 31
    got, o, lse = run(problem, q, k, v, do)
    rows, keys = (torch.tensor([0, 1, n // 2, n - 2, n - 1]) for n in (p.seqlen_q, p.seqlen_k))
    expected = expect_gradients(q, k, v, o, do, lse, problem, accuracy.default_scale(problem), rows, keys)
    report = check_gradients(*got, expected)
    torch.cuda.empty_cache()
    assert report.ok, report.message


@pytest.mark.parametrize(("b", "sq", "sk"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_problems(b: int, sq: int, sk: int) -> None:
    q, k, v = leaves(*(torch.randn(b, s, 4, 64, device="cuda").bfloat16() for s in (sq, sk, sk)))
    fa4gen.attention(q, k, v).sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in (q, k, v))


# --- repeatability, streams, graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["b=2 h=16 hk=2 s=2048 d=128 causal", "b=4 h=8 s=1500 d=64", "h=8 hk=2 sq=1111 sk=2049 d=128 causal"]
)
def test_deterministic_over_20_runs(text: str) -> None:
    problem = AttentionProblem.parse(f"{text} op=bwd deterministic")
    q, k, v, _, do, _ = make_gradient_inputs(problem, device="cuda")
    first, _, _ = run(problem, q, k, v, do)
    for _ in range(19):
        again, _, _ = run(problem, q, k, v, do)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_runs_on_the_forwards_stream() -> None:
    """Inputs are written late on a side stream: a launch on any other would read what was there before."""
    q, k, v, _, do, _ = make_gradient_inputs(SMALL, device="cuda")
    run(SMALL, q, k, v, do)
    stale = [torch.zeros_like(t) for t in (q, k, v, do)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for old, new in zip(stale, (q, k, v, do), strict=True):
            old.copy_(new)
        got, o, lse = run(SMALL, *stale)
    stream.synchronize()
    report = check_gradients(*got, expect_gradients(q, k, v, o, do, lse, SMALL, accuracy.default_scale(SMALL)))
    assert report.ok, report.message


def test_graph_capture_after_warmup(cold: None) -> None:
    q, k, v, _, do, _ = make_gradient_inputs(SMALL, device="cuda")
    q, k, v = leaves(q, k, v)
    fa4gen.warmup(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = fa4gen.attention(q, k, v, causal=True, return_lse=True)
        gradients = torch.autograd.grad(o, (q, k, v), do)
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    inputs = (q.detach(), k.detach(), v.detach(), o.detach(), do, lse.detach())
    report = check_gradients(*gradients, expect_gradients(*inputs, SMALL, accuracy.default_scale(SMALL)))
    assert report.ok, report.message


def test_torch_compile() -> None:
    problem = AttentionProblem.parse(f"{SMALL} deterministic")
    q, k, v, _, do, _ = make_gradient_inputs(problem, device="cuda")
    want, _, _ = run(problem, q, k, v, do)
    q, k, v = leaves(q, k, v)
    model = torch.compile(
        lambda *t: fa4gen.attention(*t, causal=True, deterministic=True), backend="aot_eager", fullgraph=True
    )
    got = torch.autograd.grad(model(q, k, v), (q, k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_bench_times_the_backward_beside_torch() -> None:
    result = bench(AttentionProblem.parse("b=2 h=8 s=1024 d=128 op=bwd"), get_peers("cudnn,fa2"), rounds=5)
    for entry in result.entries:
        assert entry.median_us is not None and not entry.note, entry
