"""The float64 gradients, and the line between rounding and bugs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from backward_fakes import emulate
from torch import Tensor

from fa4gen import accuracy
from fa4gen.accuracy import KINDS, TORCH_DTYPES, default_scale, make_inputs
from fa4gen.gradients import (
    check_gradients,
    expect_gradients,
    make_gradient_inputs,
    poisoned_gradients,
    reference_gradients,
    sample_keys,
)
from fa4gen.problem import AttentionProblem

torch.set_num_threads(1)


def problem_of(text: str) -> AttentionProblem:
    return AttentionProblem.parse(f"{text} op=bwd")


@pytest.mark.parametrize(
    "text",
    ["b=2 h=2 s=33 d=32", "h=4 hk=2 sq=20 sk=41 d=16 dv=24 causal", "h=2 sq=41 sk=20 d=16 causal", "h=2 sq=1 sk=1 d=8"],
)
def test_reference_is_what_autograd_gives(text: str) -> None:
    problem = problem_of(text)
    q, k, v = (t.double().requires_grad_() for t in make_inputs(problem))
    do = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64)
    group, scale = problem.gqa_ratio, 0.3
    kh, vh = (t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    scores = scale * q.transpose(1, 2) @ kh.mT
    if problem.causal:
        shift = problem.seqlen_k - problem.seqlen_q
        hidden = torch.arange(problem.seqlen_k) > torch.arange(problem.seqlen_q)[:, None] + shift
        scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # a row that sees no key
    ((weights @ vh).transpose(1, 2) * do).sum().backward()
    got = reference_gradients(q.detach(), k.detach(), v.detach(), do, problem, scale)
    for gradient, t in zip(got, (q, k, v), strict=True):
        torch.testing.assert_close(gradient, t.grad.nan_to_num(0.0), rtol=1e-9, atol=1e-9)


RAGGED = "b=2 h=4 hk=2 sq=157 sk=203 d=64"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", [RAGGED, f"{RAGGED} causal", "h=8 hk=1 sq=203 sk=157 d=128 dv=64 causal", "h=2 s=1500 d=40"]
)
def test_rounding_is_right(text: str, kind: str, dtype: str) -> None:
    problem = problem_of(f"{text} dtype={dtype}")
    inputs = make_gradient_inputs(problem, kind)
    scale = default_scale(problem)
    report = check_gradients(*emulate(*inputs, scale, problem.causal), expect_gradients(*inputs, problem, scale))
    assert report.ok, report.message
    assert report.worst < 0.9
    assert report.relative_error < (0.01 if dtype == "bf16" else 0.002) or kind in ("constant", "peaked")


def lose_tile(step: dict[str, Tensor]) -> None:
    step["p"][0, 1, :, 128:192] = 0


def lose_queries(step: dict[str, Tensor]) -> None:
    step["p"][0, 1, 64:128] = 0


def shift_mask(step: dict[str, Tensor]) -> None:
    step["p"][0, 0, 100, 147] = step["p"][0, 0, 100, 146]  # the first hidden key of row 100


def hide_diagonal(step: dict[str, Tensor]) -> None:
    step["p"][0, 0, 100, 146] = 0


def lose_delta(step: dict[str, Tensor]) -> None:
    step["delta"][0, 1, 64:128] = 0


def lose_scale(step: dict[str, Tensor]) -> None:
    step["scale"].fill_(1.0)


def scale_in_log2(step: dict[str, Tensor]) -> None:
    step["scale"] *= math.log2(math.e)


def wrong_lse(step: dict[str, Tensor]) -> None:
    step["p"][0, 0, 100] = step["p"][0, 0, 100] * math.exp(0.05)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lose_tile, "dQ"),
        (lose_tile, "dK"),
        (lose_queries, "dV"),
        (shift_mask, "dQ is wrong at batch 0, head 0, row 100"),
        (shift_mask, "dK is wrong at batch 0, head 0, row 147"),
        (hide_diagonal, "dQ is wrong at batch 0, head 0, row 100"),
        (lose_delta, "dQ is wrong at batch 0, head 1"),
        (lose_delta, "dK"),
        (lose_scale, "dQ"),
        (scale_in_log2, "dK"),
        (wrong_lse, "dQ is wrong at batch 0, head 0, row 100"),
    ],
)
def test_bugs_are_seen(spoil: Callable[[dict[str, Tensor]], None], name: str, dtype: str) -> None:
    problem = problem_of(f"b=2 h=2 sq=157 sk=203 d=64 dtype={dtype} causal")
    inputs = make_gradient_inputs(problem)
    scale = default_scale(problem)
    expected = expect_gradients(*inputs, problem, scale)
    report = check_gradients(*emulate(*inputs, scale, True, spoil), expected)
    assert not report.ok and name in report.message and report.worst > 1.5


def test_a_lost_tile_of_a_long_row_is_seen() -> None:
    problem = problem_of("h=1 sq=64 sk=16384 d=64")
    inputs = make_gradient_inputs(problem)
    scale = default_scale(problem)
    keys = torch.arange(6000, 6300)
    expected = expect_gradients(*inputs, problem, scale, keys=keys)

    def spoil(step: dict[str, Tensor]) -> None:
        step["p"][..., 6144:6208] = 0

    assert check_gradients(*emulate(*inputs, scale, False), expected).ok
    report = check_gradients(*emulate(*inputs, scale, False, spoil), expected)
    assert all(f"{name} is wrong" in report.message for name in ("dQ", "dK", "dV"))


def test_unwritten_and_unmasked_values_are_faults() -> None:
    problem = problem_of("h=1 sq=40 sk=24 d=32 causal")
    inputs = make_gradient_inputs(problem)
    assert bool((inputs[5][..., :16] == -math.inf).all()) and bool((inputs[3][:, :16] == 0).all())
    expected = expect_gradients(*inputs, problem, 0.2)
    right = emulate(*inputs, 0.2, True)
    assert check_gradients(*right, expected).ok
    report = check_gradients(*poisoned_gradients(problem), expected)
    assert report.worst == math.inf and "dQ has 1280 values that are not finite" in report.message
    right[0][0, 15, 0, 3] = 1e-30
    assert "dQ is not 0 in the first 16 rows" in check_gradients(*right, expected).message


def test_sampled_rows_agree_with_all() -> None:
    problem = problem_of("b=2 h=4 hk=2 sq=300 sk=170 d=16 causal")
    inputs = make_gradient_inputs(problem)
    rows, keys = torch.tensor([0, 131, 299]), torch.tensor([5, 169])
    whole, part = (expect_gradients(*inputs, problem, 0.2, *which) for which in ((), (rows, keys)))
    for all_, some, picked in zip(
        (*whole.gradients, *whole.limits), (*part.gradients, *part.limits), (rows, keys, keys) * 2, strict=True
    ):
        torch.testing.assert_close(all_[:, picked], some)


def test_boxes_do_not_change_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("b=2 h=4 hk=2 sq=50 sk=70 d=16 causal")
    inputs = make_gradient_inputs(problem)
    whole = expect_gradients(*inputs, problem, 0.2)
    monkeypatch.setattr(accuracy, "_BOX_SCORES", 2000)
    parts = expect_gradients(*inputs, problem, 0.2)
    for one, other in zip((*whole.gradients, *whole.limits), (*parts.gradients, *parts.limits), strict=True):
        torch.testing.assert_close(one, other)


def test_keys_are_sampled_like_rows() -> None:
    keys = sample_keys(problem_of("b=8 h=16 sq=4096 sk=8192 d=128 causal"))
    assert keys[0] == 0 and keys[-1] == 8191 and len(keys) < 200
    assert set((keys // 64).tolist()) == set(range(128))
    assert len(sample_keys(problem_of("h=1 sq=100 sk=300 d=64"))) == 300


@pytest.mark.parametrize("kind", KINDS)
def test_inputs(kind: str) -> None:
    problem = problem_of("b=2 h=4 hk=2 sq=20 sk=30 d=16 dv=24 dtype=fp16")
    q, k, v, o, do, lse = make_gradient_inputs(problem, kind)
    again = make_gradient_inputs(problem, kind)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, o, do, lse), again, strict=True))
    assert q.shape == (2, 20, 4, 16) and o.shape == do.shape == (2, 20, 4, 24) and lse.shape == (2, 4, 20)
    assert o.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32 and do.stride(3) == 1
    assert do.dtype == o.dtype == TORCH_DTYPES["fp16"]
    assert do.is_contiguous() == (kind not in ("strided", "expanded"))
    assert (do.stride(2) == 0) == (kind == "expanded")
