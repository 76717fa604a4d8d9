"""The accuracy check passes a right kernel, closely enough to trust, and catches planted bugs."""

from __future__ import annotations

import math

import pytest
import torch

from fa4gen.accuracy import (
    KINDS,
    TORCH_DTYPES,
    check,
    default_scale,
    expect,
    make_inputs,
    poisoned_outputs,
    reference,
    sample_rows,
)
from fa4gen.errors import UsageError
from fa4gen.problem import AttentionProblem

TILE_N = 64
torch.set_num_threads(1)  # the tensors are small: threads would only fight over a busy machine's cores


def tiled_attention(q, k, v, problem, *, threshold=None, bug=None, poly_error=0.0):
    """A kernel in torch: online softmax over K/V tiles in fp32, P and O rounded to the dtype. ``bug`` plants one."""
    dtype = TORCH_DTYPES[problem.dtype]
    scale_log2 = default_scale(problem) / math.log(2)
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    k, v = (t.repeat_interleave(problem.gqa_ratio, 1) for t in (k, v))
    rows = torch.arange(problem.seqlen_q).unsqueeze(-1)
    maximum = torch.full((*q.shape[:3], 1), -math.inf)
    total, out = torch.zeros_like(maximum), torch.zeros(*q.shape[:3], problem.head_dim_v)
    for start in range(0, problem.seqlen_k, TILE_N):
        if bug == "dropped tile" and start == TILE_N:
            continue
        columns = torch.arange(start, min(start + TILE_N, problem.seqlen_k))
        scores = q @ k[:, :, columns].mT
        if bug == "padding unmasked" and len(columns) < TILE_N:
            total = total + (TILE_N - len(columns)) * torch.exp2(-maximum * scale_log2)
        if problem.causal:
            last = rows + problem.seqlen_k - problem.seqlen_q + (bug == "mask off by one")
            scores = scores.masked_fill(columns > last, -math.inf)
        raised = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        if threshold is not None:
            grown = (raised - maximum) * scale_log2 > threshold
            raised = torch.where(grown | maximum.isinf(), raised, maximum)
        shift = raised.masked_fill(raised.isinf(), 0.0) * scale_log2
        alpha = torch.exp2(maximum * scale_log2 - shift)
        p = torch.exp2(scores * scale_log2 - shift) * (1 + poly_error * torch.sin(977 * scores.nan_to_num(neginf=0.0)))
        total = total * alpha + p.sum(-1, keepdim=True)
        if bug != "missing rescale":
            out = out * alpha
        out = out + p.to(dtype).float() @ v[:, :, columns]
        maximum = raised
    visible = total > 0
    lse = torch.where(visible, maximum * default_scale(problem) + total.log(), -math.inf).squeeze(-1)
    out = torch.where(visible, out / total, 0.0).to(dtype).transpose(1, 2).contiguous()
    if bug == "one wrong row":
        out[-1, 77, -1] = out[-1, 78, -1]
    if bug == "one wrong element":
        out[-1, 77, -1, 3] *= -1
    if bug == "unwritten row":
        out[0, problem.seqlen_q - 1, 0] = math.nan
    if bug == "lse in log2":
        lse = lse / math.log(2)
    return out, lse


def problem_of(text: str) -> AttentionProblem:
    return AttentionProblem.parse(text)


SHAPES = [
    "b=2 h=4 hk=2 s=333 d=64 causal lse",
    "b=1 h=2 sq=200 sk=517 d=64 dv=128 lse",
    "b=1 h=2 sq=300 sk=211 d=40 dv=8 causal lse",
    "b=2 h=4 hk=1 sq=1 sk=257 d=128 causal lse",
    "b=1 h=1 sq=130 sk=1 d=16 lse",
    "b=1 h=1 sq=64 sk=2048 d=128 lse",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_right_kernel_passes_below_the_limit(shape, dtype, kind):
    problem = problem_of(f"{shape} dtype={dtype}")
    q, k, v = make_inputs(problem, kind, seed=1)
    expected = expect(q, k, v, problem, default_scale(problem))
    for options in ({}, {"threshold": 8.0}, {"poly_error": 8.8e-5}):
        report = check(*tiled_attention(q, k, v, problem, **options), expected)
        assert report.ok, report.message
        assert report.worst < 0.9 and report.worst_lse < 0.5, (report, options)


BUGS = {
    "dropped tile": "O is wrong",
    "mask off by one": "O is wrong",
    "missing rescale": "O is wrong",
    "one wrong row": "head 3, row 77",
    "one wrong element": "head 3, row 77",
    "unwritten row": "64 values that are not finite",
    "lse in log2": "LSE is wrong",
}


@pytest.mark.parametrize("kind", ["normal", "peaked", "large_v", "strided"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug, dtype, kind):
    problem = problem_of(f"b=2 h=4 hk=2 s=333 d=64 causal lse dtype={dtype}")
    q, k, v = make_inputs(problem, kind, seed=2)
    report = check(*tiled_attention(q, k, v, problem, bug=bug), expect(q, k, v, problem, default_scale(problem)))
    assert not report.ok
    assert BUGS[bug] in report.message


def test_unmasked_padding_is_found_by_constant_scores():
    problem = problem_of("b=1 h=1 sq=64 sk=1000 d=64 lse")
    q, k, v = make_inputs(problem, "constant", seed=3)
    report = check(
        *tiled_attention(q, k, v, problem, bug="padding unmasked"), expect(q, k, v, problem, default_scale(problem))
    )
    assert report.worst > 50 and report.worst_lse > 1000


def test_dropped_tile_is_found_in_a_long_row():
    problem = problem_of("b=1 h=1 sq=4 sk=65536 d=64 lse")
    q, k, v = make_inputs(problem, seed=4)
    expected = expect(q, k, v, problem, default_scale(problem))
    assert check(*tiled_attention(q, k, v, problem), expected).ok
    report = check(*tiled_attention(q, k, v, problem, bug="dropped tile"), expected)
    assert not report.ok and "O is wrong" in report.message


def test_poison_left_in_place_fails():
    problem = problem_of("b=1 h=2 s=64 d=64 lse")
    q, k, v = make_inputs(problem)
    report = check(*poisoned_outputs(problem), expect(q, k, v, problem, default_scale(problem)))
    assert not report.ok and report.worst == math.inf and report.worst_lse == math.inf


def test_masked_rows_must_be_exact():
    problem = problem_of("b=1 h=1 sq=100 sk=40 d=64 causal lse")
    q, k, v = make_inputs(problem)
    expected = expect(q, k, v, problem, default_scale(problem))
    assert (expected.out[:, :60] == 0).all() and (expected.lse[..., :60] == -math.inf).all()
    out, lse = tiled_attention(q, k, v, problem)
    assert check(out, lse, expected).ok
    out[0, 10, 0, 0] = 1e-6
    lse[0, 0, 10] = -1e30
    report = check(out, lse, expected)
    assert "O is not 0" in report.message and "LSE is not -inf" in report.message


def test_reference_agrees_with_torch():
    problem = problem_of("b=2 h=6 hk=3 s=97 d=24 dv=40 causal")
    q, k, v = make_inputs(problem, seed=5)
    out, lse = reference(q, k, v, problem, 0.3)
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, want.transpose(1, 2))
    assert lse.shape == (2, 6, 97)


def test_boxes_do_not_change_the_reference(monkeypatch):
    problem = problem_of("b=3 h=4 hk=2 sq=50 sk=70 d=16 causal")
    q, k, v = make_inputs(problem, seed=6)
    whole = reference(q, k, v, problem, 0.25)
    for budget in (1, 70 * 2 * 7, 70 * 2 * 50, 70 * 4 * 50, 70 * 8 * 50):
        monkeypatch.setattr("fa4gen.accuracy._BOX_SCORES", budget)
        torch.testing.assert_close(reference(q, k, v, problem, 0.25), whole)


def test_no_keys_at_all():
    problem = problem_of("b=1 h=2 sq=5 sk=0 d=16 lse")
    out, lse = reference(*make_inputs(problem), problem, 1.0)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_sampled_rows_cover_every_block_and_both_ends():
    problem = problem_of("b=2 h=16 s=16333 d=128")
    rows = sample_rows(problem)
    assert len(rows) < 400
    assert set(range(16)) | set(range(16333 - 16, 16333)) <= set(rows.tolist())
    assert set((rows // 64).tolist()) == set(range(-(-16333 // 64)))
    assert len(sample_rows(problem_of("b=1 h=1 s=500 d=64"))) == 500


def test_sampled_check_finds_a_lost_block():
    problem = problem_of("b=1 h=2 sq=1000 sk=300 d=64 causal")
    q, k, v = make_inputs(problem, seed=7)
    rows = sample_rows(problem, max_scores=0)
    assert len(rows) < 100
    expected = expect(q, k, v, problem, default_scale(problem), rows)
    out, _ = tiled_attention(q, k, v, problem)
    assert check(out, None, expected).ok
    out[0, 832:896, 1] = out[0, 768:832, 1]
    assert "head 1, row 8" in check(out, None, expected).message


def test_strided_and_expanded_inputs_are_what_they_say():
    problem = problem_of("b=2 h=4 hk=2 s=32 d=64 dv=40")
    for tensor in make_inputs(problem, "strided"):
        assert not tensor.is_contiguous() and tensor.stride(-1) == 1
        assert all(stride * 2 % 16 == 0 for stride in tensor.stride()[:-1])
    q, k, v = make_inputs(problem, "expanded")
    assert q.stride(0) == 0 and k.stride(2) == 0 and v.stride(2) == 0


def test_inputs_follow_the_seed_and_unknown_kind_is_refused():
    problem = problem_of("b=1 h=1 s=8 d=8")
    assert torch.equal(make_inputs(problem, seed=3)[0], make_inputs(problem, seed=3)[0])
    assert not torch.equal(make_inputs(problem, seed=3)[0], make_inputs(problem, seed=4)[0])
    with pytest.raises(UsageError, match="unknown kind of inputs 'odd'; known: normal"):
        make_inputs(problem, "odd")
