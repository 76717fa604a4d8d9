"""Gradients through autograd and torch.compile, with fake kernels on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_fakes import kernel, use_fake_family
from torch import Tensor

import fa4gen
from fa4gen import accuracy, autograd, dispatch, interface
from fa4gen.arch import get_device
from fa4gen.dispatch import Dispatcher
from fa4gen.errors import UnsupportedProblem
from fa4gen.gradients import reference_gradients
from fa4gen.problem import AttentionProblem
from fa4gen.tuned_table import TunedTable, TunedTables
from fa4gen.variant import Variant

torch.set_num_threads(1)
H200 = get_device("h200")


class FakeKernels:
    """Stands for compile and load."""

    def __init__(self) -> None:
        self.built: list[Variant] = []
        self.launches: list[str] = []  # ops

    def build(self, variant: Variant, at_call_time: bool) -> Callable[..., None]:
        self.built.append(variant)
        compute = kernel(variant.static.causal) if variant.static.op == "bwd" else forward(variant)

        def launch(*arguments: Any) -> None:
            self.launches.append(variant.static.op)
            compute(*arguments)

        return launch


def forward(variant: Variant) -> Callable[..., None]:
    def launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, *rest: Any) -> None:
        *lse, scale, _ = rest
        p = AttentionProblem(*q.shape[::2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], v.shape[3],
                             causal=variant.static.causal)  # fmt: skip
        out, sums = accuracy.reference(q, k, v, p, scale)
        o.copy_(out)
        for t in lse:
            t.copy_(sums)

    return launch


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeKernels]:
    kernels = FakeKernels()
    use_fake_family(monkeypatch)
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(interface, "DEVICE_TYPE", "cpu")
    dispatch._dispatchers[-1] = Dispatcher(H200, TunedTables(H200.key, ((TunedTable(H200.key), None),)), kernels.build)
    yield kernels
    interface._plans.clear()
    autograd._plans.clear()
    dispatch._dispatchers.clear()
    dispatch._pending.clear()


def tensors(b=2, sq=33, sk=47, h=4, hk=2, d=64, dv=64, grad="qkv") -> tuple[Tensor, ...]:
    q, k, v = accuracy.make_inputs(AttentionProblem(b, h, hk, sq, sk, d, dv))
    return tuple(t.requires_grad_(name in grad) for name, t in zip("qkv", (q, k, v), strict=True))


def check(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool = False, scale: float | None = None) -> None:
    """Compares q.grad, k.grad and v.grad with float64, where there are any."""
    p = AttentionProblem(*q.shape[::2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], v.shape[3], causal=causal)
    expected = reference_gradients(q.detach(), k.detach(), v.detach(), do, p, scale or accuracy.default_scale(p))
    for t, want in zip((q, k, v), expected, strict=True):
        if t.requires_grad:
            assert t.grad is not None and t.grad.dtype == t.dtype
            assert torch.linalg.vector_norm(t.grad.double() - want) < 0.01 * torch.linalg.vector_norm(want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("hk", "dv", "sq"), [(4, 64, 33), (2, 128, 60), (1, 64, 1)])
def test_gradients(fake: FakeKernels, causal: bool, hk: int, dv: int, sq: int) -> None:
    q, k, v = tensors(hk=hk, dv=dv, sq=sq)
    o = fa4gen.attention(q, k, v, causal=causal, softmax_scale=0.2)
    assert o.requires_grad
    do = torch.randn_like(o)
    o.backward(do)
    check(q, k, v, do, causal, 0.2)
    (static,) = (v.static for v in fake.built if v.static.op == "bwd")
    assert static.causal == causal and static.gqa_ratio == 4 // hk and not static.deterministic
    assert fake.launches == ["fwd", "bwd"]


def test_forward_without_gradient_saves_nothing(fake: FakeKernels) -> None:
    with torch.no_grad():
        assert not fa4gen.attention(*tensors()).requires_grad
    assert not fa4gen.attention(*tensors(grad="")).requires_grad
    assert [v.static.return_lse for v in fake.built] == [False]


@pytest.mark.parametrize("grad", ["q", "k", "v", "kv"])
def test_inputs_without_gradient(fake: FakeKernels, grad: str) -> None:
    q, k, v = tensors(grad=grad)
    o = fa4gen.attention(q, k, v)
    do = torch.randn_like(o)
    o.backward(do)
    check(q, k, v, do)
    assert [t.grad is not None for t in (q, k, v)] == [name in grad for name in "qkv"]


def test_through_other_operations_and_two_calls(fake: FakeKernels) -> None:
    q, k, v = tensors()
    (2 * fa4gen.attention(q, k, v)).sum().backward()  # dO has stride 0 everywhere
    (2 * fa4gen.attention(q, k, v)).sum().backward()
    check(q, k, v, torch.full((2, 33, 4, 64), 4.0))
    assert len([v for v in fake.built if v.static.op == "bwd"]) == 1 and len(autograd._plans) == 1


def strided(do: Tensor) -> Tensor:
    return torch.stack([do.transpose(1, 2)] * 2, dim=-2)[..., 0, :].transpose(1, 2)


def unaligned_rows(do: Tensor) -> Tensor:
    return torch.cat([do, do[..., :3]], dim=-1)[..., : do.shape[-1]]


def unaligned_start(do: Tensor) -> Tensor:
    return torch.cat([do.new_zeros(1), do.flatten()])[1:].view(do.shape)


def transposed(do: Tensor) -> Tensor:
    return do.mT.contiguous().mT


@pytest.mark.parametrize(
    ("lay_out", "copied"), [(strided, False), (unaligned_rows, True), (unaligned_start, True), (transposed, True)]
)
def test_any_layout_of_the_incoming_gradient(fake: FakeKernels, lay_out: Any, copied: bool) -> None:
    q, k, v = tensors()
    o = fa4gen.attention(q, k, v)
    do = torch.randn_like(o)
    laid_out = lay_out(do)
    assert torch.equal(do, laid_out) and (not laid_out.is_contiguous() or laid_out.data_ptr() % 16)
    assert (autograd._suitable(laid_out).data_ptr() != laid_out.data_ptr()) == copied
    o.backward(laid_out)
    check(q, k, v, do)


@pytest.mark.parametrize(("b", "sq", "sk"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_problems_launch_nothing(fake: FakeKernels, b: int, sq: int, sk: int) -> None:
    q, k, v = tensors(b=b, sq=sq, sk=sk)
    o = fa4gen.attention(q, k, v)
    o.backward(torch.ones_like(o))
    assert not fake.built
    assert all(t.grad is not None and not t.grad.any() for t in (q, k, v))


def test_deterministic_by_argument_or_by_torchs_setting(fake: FakeKernels) -> None:
    def backward(**flags: Any) -> None:
        fa4gen.attention(*tensors(), **flags).sum().backward()

    backward(deterministic=True)
    backward()
    torch.use_deterministic_algorithms(True)
    try:
        backward(deterministic=False)
        backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [v.static.deterministic for v in fake.built if v.static.op == "bwd"] == [True, False]
    assert [key[-1] for key in autograd._plans] == [True, False]
    with pytest.raises(UnsupportedProblem, match="deterministic must be a bool or None, got 1"):
        backward(deterministic=1)


def test_lse_comes_along_but_has_no_gradient(fake: FakeKernels) -> None:
    q, k, v = tensors()
    o, lse = fa4gen.attention(q, k, v, return_lse=True)
    (o.sum() + lse.detach().sum()).backward()
    check(q, k, v, torch.ones_like(o))
    o, lse = fa4gen.attention(q, k, v, return_lse=True)
    with pytest.raises(UnsupportedProblem, match=r"LSE of attention has no gradient.*lse\.detach"):
        (o.sum() + lse.sum()).backward()


def test_second_derivative_is_a_clear_error(fake: FakeKernels) -> None:
    q, k, v = tensors()
    (dq,) = torch.autograd.grad(fa4gen.attention(q, k, v).sum(), q, create_graph=True)
    (dq_alone,) = torch.autograd.grad(fa4gen.attention(q, k, v).sum(), q)
    assert torch.equal(dq, dq_alone)
    with pytest.raises(UnsupportedProblem, match="attention has no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("given", ["out", "lse"])
def test_given_outputs_are_refused(fake: FakeKernels, given: str) -> None:
    q, k, v = tensors()
    shapes = {"out": torch.empty(2, 33, 4, 64, dtype=q.dtype), "lse": torch.empty(2, 4, 33)}
    with pytest.raises(UnsupportedProblem, match="autograd cannot record writing to out= or lse="):
        fa4gen.attention(q, k, v, return_lse=True, **{given: shapes[given]})


def test_bad_input_that_requires_grad_is_one_clear_error(fake: FakeKernels) -> None:
    q, k, v = tensors()
    with pytest.raises(UnsupportedProblem, match="q and v must have one dtype"):
        fa4gen.attention(q, k, v.half())
    with pytest.raises(UnsupportedProblem, match="q must be a torch tensor, got list"):
        fa4gen.attention([1.0], k, v)


def test_misses_are_counted(fake: FakeKernels) -> None:
    for _ in range(3):
        fa4gen.attention(*tensors()).sum().backward()
    (miss,) = (m for m in dispatch._pending.values() if m.problem.op == "bwd")
    assert miss.calls == 3 and str(miss.problem) == "b=2 h=4 hk=2 sq=33 sk=47 d=64 op=bwd"


def test_plans_are_bounded(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "MAX_PLANS", 3)
    for s in range(1, 8):
        fa4gen.attention(*tensors(sk=s)).sum().backward()
        assert len(autograd._plans) <= 3


def test_warmup_of_tensors_that_require_grad(fake: FakeKernels) -> None:
    q, k, v = tensors()
    fa4gen.warmup(q, k, v, causal=True, deterministic=True)
    assert [(v.static.op, v.static.return_lse, v.static.deterministic) for v in fake.built] == [
        ("fwd", True, False),
        ("bwd", False, True),
    ]
    assert fake.launches == ["fwd", "bwd"]
    fa4gen.attention(q, k, v, causal=True, deterministic=True).sum().backward()
    assert len(fake.built) == 2


def test_warmup_of_a_backward_problem(fake: FakeKernels) -> None:
    fa4gen.warmup("b=2 h=4 hk=2 sq=33 sk=47 d=64 dv=128 op=bwd", device=-1)
    assert fake.launches == ["bwd"]


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("return_lse", [False, True])
def test_torch_compile(fake: FakeKernels, return_lse: bool) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        result = fa4gen.attention(q * 2, k, v, causal=True, return_lse=return_lse)
        return (result[0] + 1, result[1]) if return_lse else (result + 1, None)

    q, k, v = tensors(dv=128)
    o, lse = torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v)
    do = torch.randn_like(o)
    o.backward(do)
    got = [t.grad for t in (q, k, v)]
    q, k, v = tensors(dv=128)
    eager, eager_lse = model(q, k, v)
    eager.backward(do)
    assert torch.equal(o, eager) and all(torch.equal(g, t.grad) for g, t in zip(got, (q, k, v), strict=True))
    if return_lse:
        assert torch.equal(lse, eager_lse) and not lse.requires_grad


def test_torch_compile_without_gradient_saves_nothing(fake: FakeKernels) -> None:
    torch.compile(lambda *qkv: fa4gen.attention(*qkv), backend="aot_eager", fullgraph=True)(*tensors(grad=""))
    assert [v.static.return_lse for v in fake.built] == [False]


def test_operators_pass_torchs_own_checks(fake: FakeKernels) -> None:
    q, k, v = tensors(dv=128)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for inputs in ((q, k, v), (q.detach(), k, v)):
        torch.library.opcheck(
            torch.ops.fa4gen.attention_forward.default, (*inputs, True, None, True, False), test_utils=checks
        )
    plain = [t.detach() for t in (q, k, v)]
    o, lse = fa4gen.attention(*plain, return_lse=True)
    torch.library.opcheck(
        torch.ops.fa4gen.attention_backward.default,
        (*plain, o, torch.ones_like(o), lse, True, None, True),
        test_utils=checks,
    )


def test_operator_without_lse_has_no_gradient(fake: FakeKernels) -> None:
    o, _ = torch.ops.fa4gen.attention_forward(*tensors(), False, None, False, False)
    with pytest.raises(UnsupportedProblem, match="only with return_lse=True"):
        o.sum().backward()
