"""Are gradients right? What :mod:`fa4gen.accuracy` is to the forward: inputs, a float64 reference, a limit on rounding.

The reference is the function that a backward kernel computes, of the O and LSE that it is given:

    P = exp(scale q k - lse),  delta = dO . O,  dS = P * (dO . v - delta),
    dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO.

The limit, derived. A right kernel rounds P and dS once each, and each gradient once. The rounding errors have mean zero
and do not know what they are multiplied with, so they add up as a random walk. With u and s as in the module named
above, a row of a gradient G = sum_j w_j x_j (a query's dQ: w = scale dS, x = K; a key's dV: w = P, x = dO; its dK:
w = scale dS, x = Q) has

    ||e||^2  ~  (u + s)^2 / 3 * (sum_j w_j^2 ||x_j||^2 + ||G||^2) + (eta / 2)^2 / 3 * sum_j ||x_j||^2,

eta being the dtype's smallest subnormal, which fp16 needs: P of a row of 16 k keys is as small as its normal numbers.
The limit is ``margin`` times the root of that without the thirds. In dS two large numbers may cancel, and what fp32
leaves of them knows the row: ``CANCEL`` times ||dO|| (||v|| + ||O||), carried through P to dQ and dK, is added in full.
A P below fp32's normal numbers may come out as 0 (ex2.approx.ftz) or a little wrong (a polynomial): ``FLUSHED`` is
added to P there, and is what eta / 2 is at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fa4gen.accuracy import (
    TOLERANCES,
    TORCH_DTYPES,
    AccuracyReport,
    boxes,
    by_row,
    expect,
    largest,
    make_inputs,
    masked_rows,
    sample_rows,
)
from fa4gen.problem import AttentionProblem

__all__ = [
    "ExpectedGradients",
    "Gradients",
    "check_gradients",
    "expect_gradients",
    "make_gradient_inputs",
    "poisoned_gradients",
    "reference_gradients",
    "sample_keys",
]

# fp32 roundings of a dot product of up to 256 terms, of the difference and of delta, of the product of norms.
CANCEL = 2.0**-20
FLUSHED = torch.finfo(torch.float32).tiny

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class ExpectedGradients:
    """What a kernel should return, float64 throughout: dQ (b, n, h, d) of the query rows ``rows`` (n,), dK
    (b, m, hk, d) and dV (b, m, hk, dv) of the key rows ``keys`` (m,).

    ``limits``: for each the largest 2-norm of a row's error, (b, n, h) and twice (b, m, hk).
    """

    problem: AttentionProblem
    rows: Tensor
    keys: Tensor
    gradients: Gradients
    limits: Gradients


def make_gradient_inputs(
    problem: AttentionProblem, kind: str = "normal", seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """Q, K, V, O, dO and LSE of a backward. Q, K and V: :func:`fa4gen.accuracy.make_inputs` of ``kind``; O and LSE: its
    reference, rounded to the dtype and to fp32; dO is unit normal and like O but for

    - "large_v": divided by 32, so that no gradient overflows fp16;
    - "strided": a slice of a wider, head-major tensor;
    - "expanded": stride 0 over the heads.

    Raises:
        UsageError: unknown kind.
    """
    p, dtype = problem, TORCH_DTYPES[problem.dtype]
    q, k, v = make_inputs(problem, kind, seed, device)
    forward = expect(q, k, v, problem, p.head_dim**-0.5)
    generator = torch.Generator(device).manual_seed(seed + 1_000_003)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    if kind == "strided":
        do = normal(p.batch, p.heads, p.seqlen_q, p.head_dim_v + 8).transpose(1, 2)[..., : p.head_dim_v]
    elif kind == "expanded":
        do = normal(p.batch, p.seqlen_q, 1, p.head_dim_v).expand(-1, -1, p.heads, -1)
    else:
        do = normal(p.batch, p.seqlen_q, p.heads, p.head_dim_v)
        if kind == "large_v":
            do /= 32
    return q, k, v, forward.out.to(dtype), do, forward.lse.float()


def poisoned_gradients(problem: AttentionProblem, device: torch.device | str = "cpu") -> Gradients:
    """dQ (b, sq, h, d), dK (b, sk, hk, d) and dV (b, sk, hk, dv), contiguous and filled with NaN."""
    p = problem
    full = partial(torch.full, fill_value=math.nan, dtype=TORCH_DTYPES[p.dtype], device=device)
    return (
        full((p.batch, p.seqlen_q, p.heads, p.head_dim)),
        full((p.batch, p.seqlen_k, p.heads_kv, p.head_dim)),
        full((p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v)),
    )


def sample_keys(problem: AttentionProblem, seed: int = 0, max_scores: int = 1 << 26) -> Tensor:
    """Sorted key rows worth checking, as :func:`fa4gen.accuracy.sample_rows` has it for queries."""
    p = problem
    return sample_rows(replace(p, seqlen_q=p.seqlen_k, seqlen_k=p.seqlen_q, causal=False), seed, max_scores)


def reference_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, problem: AttentionProblem, softmax_scale: float
) -> Gradients:
    """dQ, dK and dV of attention itself, in float64: O and LSE are not rounded."""
    forward = expect(q, k, v, problem, softmax_scale)
    return expect_gradients(q, k, v, forward.out, do, forward.lse, problem, softmax_scale).gradients


def expect_gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, problem: AttentionProblem,
    softmax_scale: float, rows: Tensor | None = None, keys: Tensor | None = None,
) -> ExpectedGradients:  # fmt: skip
    """The reference with its limits for ``rows`` and ``keys`` (default: all), on the device of the inputs."""
    p = problem
    rows = (torch.arange(p.seqlen_q) if rows is None else rows).to(q.device)
    keys = (torch.arange(p.seqlen_k) if keys is None else keys).to(q.device)
    inputs = (q, k, v, o, do, lse)
    dq, dq_limit = _of_queries(inputs, p, softmax_scale, rows)
    dk, dv, dk_limit, dv_limit = _of_keys(inputs, p, softmax_scale, keys)
    return ExpectedGradients(p, rows, keys, (dq, dk, dv), (dq_limit, dk_limit, dv_limit))


def _of_queries(inputs: tuple[Tensor, ...], p: AttentionProblem, scale: float, rows: Tensor) -> tuple[Tensor, Tensor]:
    """dQ and its limits."""
    q, k, v, o, do, lse = inputs
    group = p.gqa_ratio
    columns = torch.arange(p.seqlen_k, device=q.device)
    dq = torch.empty(p.batch, len(rows), p.heads, p.head_dim, dtype=torch.float64, device=q.device)
    limit = torch.empty(p.batch, len(rows), p.heads, dtype=torch.float64, device=q.device)
    for bs, ks, rs in boxes(p, len(rows), p.seqlen_k, group):
        hs = slice(ks.start * group, ks.stop * group)
        qb, ob, dob = (_by_head(t[bs, rows[rs], hs], group) for t in (q, o, do))
        kb, vb = (t[bs, :, ks].double().transpose(1, 2) for t in (k, v))
        lse_b = lse[bs, hs, rows[rs]].double().unflatten(1, (-1, group)).flatten(2, 3)
        hidden = (columns > rows[rs, None] + (p.seqlen_k - p.seqlen_q)).repeat(group, 1) if p.causal else None
        weights, ds = _scores(qb, kb, vb, ob, dob, lse_b, scale, hidden)
        box = scale * (ds @ kb)
        v_norm, k_norm = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (vb, kb))
        o_norm, do_norm = (torch.linalg.vector_norm(t, dim=-1) for t in (ob, dob))
        inexact = weights + FLUSHED / CANCEL
        leftover = do_norm * ((inexact @ (v_norm * k_norm)).squeeze(-1) + o_norm * (inexact @ k_norm).squeeze(-1))
        seen = k_norm.square().sum((-2, -1)).unsqueeze(-1)
        spread = (ds.square_() @ k_norm.square()).squeeze(-1) * scale**2
        box_limit = _limit(p, spread, box, scale**2 * seen, p.head_dim) + scale * CANCEL * leftover
        dq[bs, rs, hs] = by_row(box, group)
        limit[bs, rs, hs] = by_row(box_limit.unsqueeze(-1), group).squeeze(-1)
    return dq, limit


def _of_keys(inputs: tuple[Tensor, ...], p: AttentionProblem, scale: float, keys: Tensor) -> tuple[Tensor, ...]:
    """dK, dV, and the limits of both."""
    q, k, v, o, do, lse = inputs
    group = p.gqa_ratio
    empty = partial(torch.empty, dtype=torch.float64, device=q.device)
    dk, dv = (empty(p.batch, len(keys), p.heads_kv, dim) for dim in (p.head_dim, p.head_dim_v))
    dk_limit, dv_limit = (empty(p.batch, len(keys), p.heads_kv) for _ in range(2))
    rows = torch.arange(p.seqlen_q, device=q.device)
    for bs, ks, ns in boxes(p, len(keys), p.seqlen_q * group, 1):
        hs = slice(ks.start * group, ks.stop * group)
        qb, ob, dob = (_by_head(t[bs, :, hs], group) for t in (q, o, do))
        kb, vb = (t[bs, keys[ns], ks].double().transpose(1, 2) for t in (k, v))
        lse_b = lse[bs, hs].double().unflatten(1, (-1, group)).flatten(2, 3)
        hidden = (keys[ns] > rows[:, None] + (p.seqlen_k - p.seqlen_q)).repeat(group, 1) if p.causal else None
        weights, ds = _scores(qb, kb, vb, ob, dob, lse_b, scale, hidden)
        q_norm, do_norm, o_norm = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (qb, dob, ob))
        v_norm = torch.linalg.vector_norm(vb, dim=-1)
        across = do_norm * q_norm
        inexact = weights.mT + FLUSHED / CANCEL
        leftover = v_norm * (inexact @ across).squeeze(-1) + (inexact @ (across * o_norm)).squeeze(-1)
        box_dk, box_dv = scale * (ds.mT @ qb), weights.mT @ dob
        for x_norm, w, box, factor, out, limit in (
            (q_norm, ds, box_dk, scale**2, dk, dk_limit),
            (do_norm, weights, box_dv, 1.0, dv, dv_limit),
        ):
            seen = x_norm.square().sum((-2, -1)).unsqueeze(-1)
            spread = (w.square_().mT @ x_norm.square()).squeeze(-1)
            out[bs, ns, ks] = box.transpose(1, 2)
            limit[bs, ns, ks] = _limit(p, factor * spread, box, factor * seen, box.shape[-1]).transpose(1, 2)
        dk_limit[bs, ns, ks] += scale * CANCEL * leftover.transpose(1, 2)
    return dk, dv, dk_limit, dv_limit


def _scores(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, scale: float, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """P and dS, (b, hk, queries of the group, keys)."""
    scores = (q @ k.mT).mul_(scale)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    weights = scores.sub_(lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
    delta = (do * o).sum(-1, keepdim=True)
    return weights, (do @ v.mT).sub_(delta).mul_(weights)


def _limit(p: AttentionProblem, spread: Tensor, row: Tensor, seen: Tensor, dim: int) -> Tensor:
    """The limit without cancellation: ``spread`` is sum_j w_j^2 ||x_j||^2, ``seen`` sum_j ||x_j||^2."""
    tolerance, dtype = TOLERANCES[p.dtype], torch.finfo(TORCH_DTYPES[p.dtype])
    eta = max(dtype.tiny * dtype.eps, 2 * FLUSHED)
    relative = (tolerance.unit + tolerance.slack) ** 2 * (spread + row.square().sum(-1))
    return tolerance.margin * (relative + (eta / 2) ** 2 * seen).sqrt() + eta * math.sqrt(dim)


def _by_head(t: Tensor, group: int) -> Tensor:
    """(b, n, hk * group, d) to float64 (b, hk, group * n, d)."""
    return t.double().unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def check_gradients(dq: Tensor, dk: Tensor, dv: Tensor, expected: ExpectedGradients) -> AccuracyReport:
    """Compares a kernel's gradients with ``expected``: errors in the expected rows; that a value is finite, or exactly
    0 for a query that sees no key, in all. ``worst_lse`` of the report is 0, ``relative_error`` the largest of three.
    """
    p = expected.problem
    masked = masked_rows(p)
    worst, relative, faults = 0.0, 0.0, []
    which = (("dQ", dq, expected.rows), ("dK", dk, expected.keys), ("dV", dv, expected.keys))
    for (name, got, rows), want, limit in zip(which, expected.gradients, expected.limits, strict=True):
        error = torch.linalg.vector_norm(got[:, rows].double() - want, dim=-1)
        ratio, at = largest(error / limit)
        fault = _fault(name, got, masked if name == "dQ" else 0)
        if fault:
            ratio = math.inf
        elif ratio > 1:
            batch, row, head = at
            fault = (
                f"{name} is wrong at batch {batch}, head {head}, row {int(rows[row])}: "
                f"its error is {float(error[at]):.2e}, the limit {float(limit[at]):.2e}"
            )
        faults += [fault] * bool(fault)
        worst = max(worst, ratio)
        norm = float(torch.linalg.vector_norm(want))
        relative = max(relative, float(torch.linalg.vector_norm(error)) / norm if norm else 0.0)
    queries, keys = len(expected.rows), len(expected.keys)
    right = f"right in {queries} query and {keys} key rows of every head, at {worst:.2f} of the limit"
    return AccuracyReport(not faults, "; ".join(faults) or right, worst, 0.0, relative, queries + keys)


def _fault(name: str, got: Tensor, masked: int) -> str:
    finite = got.isfinite()
    if not bool(finite.all()):
        return f"{name} has {int((~finite).sum())} values that are not finite (unwritten or overflowed)"
    if bool((got[:, :masked] != 0).any()):
        return f"{name} is not 0 in the first {masked} rows, which see no key"
    return ""
