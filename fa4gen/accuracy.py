"""Is a result right? Inputs that provoke bugs, a float64 reference, and a limit on what rounding may do.

The limit, derived. A *row* is one query of one head, w_j its softmax weights, u the unit roundoff of the dtype. A
right kernel rounds P and O once each, so its row is off by

    e = sum_j w_j d_j v_j + d' * O,    |d_j|, |d'| <= u + s,

where s holds what fp32 does before: scores, accumulation, exp2 (the polynomial of degree 3 is off by 8.8e-5). The d_j
have mean zero and do not know v, so their terms add up as a random walk: ||e||^2 is (u + s)^2 / 3 times
sum_j w_j^2 ||v_j||^2 + ||O||^2, both known to the reference. The limit on ||e|| is ``margin`` times the root of that
without the third: no sum of up to four coherent terms can reach it, and long rows stay a factor of two below. It
scales with V, follows peaked and flat rows alike, and is about 1 % of a bf16 row: a key too many is seen in rows of up
to 8000 keys, a lost tile of 64 keys in rows of up to half a million (normal inputs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fa4gen.errors import UsageError
from fa4gen.problem import AttentionProblem

__all__ = [
    "KINDS",
    "TOLERANCES",
    "TORCH_DTYPES",
    "AccuracyReport",
    "Expected",
    "Tolerance",
    "boxes",
    "by_row",
    "check",
    "default_scale",
    "expect",
    "largest",
    "make_inputs",
    "masked_rows",
    "poisoned_outputs",
    "reference",
    "sample_rows",
]

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("normal", "peaked", "constant", "large_v", "strided", "expanded")

_BOX_SCORES = 1 << 25  # scores held at a time: 256 MB in float64, and three temporaries of that size
_BLOCK = 64  # rows of one MMA warpgroup: the smallest piece of O that a kernel can lose


@dataclass(frozen=True)
class Tolerance:
    """What a right kernel may be off by.

    ``unit`` is the unit roundoff of the dtype, ``slack`` the share of everything done in fp32, ``margin`` the factor
    on the root of the module's docstring. LSE never leaves fp32: its limit is ``lse_atol`` (three times the error of
    the degree 3 polynomial) plus ``lse_rtol`` (16 fp32 roundings of the score that dominates it) times its size.
    """

    unit: float
    slack: float = 2.0**-12
    margin: float = 2.0
    lse_atol: float = 3e-4
    lse_rtol: float = 2.0**-20


TOLERANCES = {"bf16": Tolerance(2.0**-8), "fp16": Tolerance(2.0**-11)}


@dataclass(frozen=True)
class Expected:
    """What a kernel should return for the query rows ``rows`` (n,), float64 throughout.

    ``out`` (b, n, h, dv); ``lse`` (b, h, n); ``limit`` (b, n, h): the largest 2-norm of a row's error.
    """

    problem: AttentionProblem
    rows: Tensor
    out: Tensor
    lse: Tensor
    limit: Tensor


@dataclass(frozen=True)
class AccuracyReport:
    """Outcome of :func:`check`. ``message`` is a sentence.

    ``worst`` and ``worst_lse`` are the largest error over its limit (above 1 is wrong; infinite for a value that
    should be finite and is not), ``relative_error`` is ||out - ref|| / ||ref|| over the ``rows`` checked.
    """

    ok: bool
    message: str
    worst: float
    worst_lse: float
    relative_error: float
    rows: int


def default_scale(problem: AttentionProblem) -> float:
    """1 / sqrt(head_dim)."""
    return problem.head_dim**-0.5


def make_inputs(
    problem: AttentionProblem, kind: str = "normal", seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Q (b, sq, h, d), K (b, sk, hk, d) and V (b, sk, hk, dv), unit normal and in the problem's dtype but for:

    - "peaked": Q times 30, so that few keys own a row and its maximum keeps moving;
    - "constant": every score is the same negative number. Padding read as zeros would outweigh all real keys;
    - "large_v": V times 1024;
    - "strided": slices of a wider packed QKV tensor; of a head-major Q and a packed KV where lengths differ;
    - "expanded": stride 0 over the heads of K and V, and over the batch of Q.

    Raises:
        UsageError: unknown kind.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown kind of inputs {kind!r}; known: {', '.join(KINDS)}")
    p, dtype = problem, TORCH_DTYPES[problem.dtype]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    if kind == "strided":
        width = max(p.head_dim, p.head_dim_v) + 8
        if p.seqlen_q == p.seqlen_k:
            packed = normal(p.batch, p.seqlen_q, p.heads + 2 * p.heads_kv, width)
            q, k, v = packed.split((p.heads, p.heads_kv, p.heads_kv), dim=2)
        else:
            q = normal(p.batch, p.heads, p.seqlen_q, width).transpose(1, 2)
            k, v = normal(p.batch, p.seqlen_k, 2 * p.heads_kv, width).chunk(2, dim=2)
        return q[..., : p.head_dim], k[..., : p.head_dim], v[..., : p.head_dim_v]
    if kind == "expanded":
        return (
            normal(1, p.seqlen_q, p.heads, p.head_dim).expand(p.batch, -1, -1, -1),
            normal(p.batch, p.seqlen_k, 1, p.head_dim).expand(-1, -1, p.heads_kv, -1),
            normal(p.batch, p.seqlen_k, 1, p.head_dim_v).expand(-1, -1, p.heads_kv, -1),
        )
    q = normal(p.batch, p.seqlen_q, p.heads, p.head_dim)
    k = normal(p.batch, p.seqlen_k, p.heads_kv, p.head_dim)
    v = normal(p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v)
    if kind == "peaked":
        q *= 30
    elif kind == "constant":
        q.fill_(1.0), k.fill_(-1.0)
    elif kind == "large_v":
        v *= 1024
    return q, k, v


def poisoned_outputs(problem: AttentionProblem, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
    """O (b, sq, h, dv) and LSE (b, h, sq) in fp32, or None if the problem asks for none, filled with NaN."""
    p = problem
    out = torch.full((p.batch, p.seqlen_q, p.heads, p.head_dim_v), math.nan, dtype=TORCH_DTYPES[p.dtype], device=device)
    if not p.return_lse:
        return out, None
    return out, torch.full((p.batch, p.heads, p.seqlen_q), math.nan, dtype=torch.float32, device=device)


def sample_rows(problem: AttentionProblem, seed: int = 0, max_scores: int = 1 << 26) -> Tensor:
    """Sorted query rows worth checking, the same in every batch and head.

    All of them up to ``max_scores`` scores; then one at random in every 64 (no warpgroup of no tile escapes), the
    first and last 16, and 16 around the first row that sees a key. A problem of 16 k tokens then takes milliseconds.
    """
    p = problem
    if p.batch * p.heads * p.seqlen_q * p.seqlen_k <= max_scores:
        return torch.arange(p.seqlen_q)
    starts = torch.arange(0, p.seqlen_q, _BLOCK)
    offsets = torch.randint(0, _BLOCK, starts.shape, generator=torch.Generator().manual_seed(seed))
    edge = masked_rows(p)
    windows = [torch.arange(first, first + 16) for first in (0, edge - 8, p.seqlen_q - 16)]
    return torch.cat([starts + offsets, *windows]).clamp(0, p.seqlen_q - 1).unique()


def reference(
    q: Tensor, k: Tensor, v: Tensor, problem: AttentionProblem, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """O (b, sq, h, dv) and LSE (b, h, sq) in float64. A row that sees no key has O = 0 and LSE = -inf."""
    expected = expect(q, k, v, problem, softmax_scale)
    return expected.out, expected.lse


def expect(
    q: Tensor, k: Tensor, v: Tensor, problem: AttentionProblem, softmax_scale: float, rows: Tensor | None = None
) -> Expected:
    """The reference with its limits, for ``rows`` (default: all), on the device of the inputs."""
    p, group = problem, problem.gqa_ratio
    rows = (torch.arange(p.seqlen_q) if rows is None else rows).to(q.device)
    columns = torch.arange(p.seqlen_k, device=q.device)
    empty = partial(torch.empty, dtype=torch.float64, device=q.device)
    out = empty(p.batch, len(rows), p.heads, p.head_dim_v)
    lse = empty(p.batch, p.heads, len(rows))
    spread = empty(p.batch, len(rows), p.heads)  # sum_j w_j^2 ||v_j||^2
    for bs, ks, rs in boxes(p, len(rows), p.seqlen_k, group):
        hs = slice(ks.start * group, ks.stop * group)
        # Query heads of one K/V head and rows become one dimension: b hk (g n) d against b hk sk d.
        qb = q[bs, rows[rs], hs].double().unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        kb, vb = (t[bs, :, ks].double().transpose(1, 2) for t in (k, v))
        scores = (qb @ kb.mT).mul_(softmax_scale)
        if p.causal:
            hidden = columns > rows[rs, None] + (p.seqlen_k - p.seqlen_q)
            scores.unflatten(2, (group, -1)).masked_fill_(hidden, -math.inf)
        box_lse = scores.logsumexp(-1)
        weights = scores.sub_(box_lse.masked_fill(box_lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
        lse[bs, hs, rs] = box_lse.unflatten(2, (group, -1)).flatten(1, 2)
        out[bs, rs, hs] = by_row(weights @ vb, group)
        spread[bs, rs, hs] = by_row(weights.square_() @ vb.square().sum(-1, keepdim=True), group).squeeze(-1)
    tolerance, dtype = TOLERANCES[p.dtype], torch.finfo(TORCH_DTYPES[p.dtype])
    limit = tolerance.margin * (tolerance.unit + tolerance.slack) * (spread + out.square().sum(-1)).sqrt()
    subnormal = dtype.tiny * dtype.eps * math.sqrt(p.head_dim_v)  # the least that O can be off by
    return Expected(p, rows, out, lse, limit + subnormal)


def check(out: Tensor, lse: Tensor | None, expected: Expected) -> AccuracyReport:
    """Compares O (b, sq, h, dv) and LSE (b, h, sq; None: not asked for) of a kernel with ``expected``.

    Errors are measured in the expected rows; that a value is finite, or exactly what a row without keys has, in all.
    """
    p, rows = expected.problem, expected.rows
    masked = masked_rows(p)
    error = torch.linalg.vector_norm(out[:, rows].double() - expected.out, dim=-1)
    worst, at = largest(error / expected.limit)
    faults = []
    if not math.isfinite(worst) or not bool(out.isfinite().all()):
        worst = math.inf
        faults.append(f"O has {int((~out.isfinite()).sum())} values that are not finite (unwritten or overflowed)")
    elif bool((out[:, :masked] != 0).any()):
        worst = math.inf
        faults.append(f"O is not 0 in the first {masked} rows, which see no key")
    elif worst > 1:
        batch, row, head = at
        faults.append(
            f"O is wrong at batch {batch}, head {head}, row {int(rows[row])}: "
            f"its error is {float(error[at]):.2e}, the limit {float(expected.limit[at]):.2e}"
        )
    worst_lse = 0.0
    if lse is not None:
        worst_lse, fault = _check_lse(lse, expected, masked)
        faults += [fault] * (worst_lse > 1)
    norm = float(torch.linalg.vector_norm(expected.out))
    relative = float(torch.linalg.vector_norm(error)) / norm if norm else 0.0
    message = "; ".join(faults) or f"right in {len(rows)} rows of every head, at {worst:.2f} of the limit"
    return AccuracyReport(not faults, message, worst, worst_lse, relative, len(rows))


def _check_lse(lse: Tensor, expected: Expected, masked: int) -> tuple[float, str]:
    """Largest error over its limit, and the sentence for when that is above 1."""
    tolerance, rows = TOLERANCES[expected.problem.dtype], expected.rows
    if bool((lse[..., :masked] != -math.inf).any()):
        return math.inf, f"LSE is not -inf in the first {masked} rows, which see no key"
    if not bool(lse[..., masked:].isfinite().all()):
        count = int((~lse[..., masked:].isfinite()).sum())
        return math.inf, f"LSE has {count} values that are not finite (unwritten or overflowed)"
    visible = rows >= masked
    want = expected.lse[..., visible]
    error = (lse[..., rows[visible]].double() - want).abs()
    limit = tolerance.lse_atol + tolerance.lse_rtol * want.abs()
    worst, at = largest(error / limit)
    if worst <= 1:
        return worst, ""
    row = int(rows[visible][at[2]])
    return worst, (
        f"LSE is wrong at batch {at[0]}, head {at[1]}, row {row}: "
        f"it is off by {float(error[at]):.2e}, the limit is {float(limit[at]):.2e}"
    )


def largest(ratios: Tensor) -> tuple[float, tuple[int, ...]]:
    """The largest value of a three-dimensional tensor and where it is. NaN counts as largest; 0 for an empty one."""
    if not ratios.numel():
        return 0.0, (0,) * ratios.ndim
    flat = int(ratios.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), ratios.shape))
    return float(ratios[at]), at


def masked_rows(problem: AttentionProblem) -> int:
    """How many rows, from the first on, see no key."""
    if not problem.seqlen_k:
        return problem.seqlen_q
    return max(0, problem.seqlen_q - problem.seqlen_k) if problem.causal else 0


def by_row(x: Tensor, group: int) -> Tensor:
    """(b, hk, group * n, d) to (b, n, hk * group, d)."""
    return x.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def boxes(problem: AttentionProblem, rows: int, columns: int, group: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices over batches, K/V heads and rows, which tile all scores: ``group`` times ``rows`` by ``columns`` a head.
    None of scores and operands of a box has more than about ``_BOX_SCORES`` elements."""
    p = problem
    row_step = max(1, min(rows, _BOX_SCORES // max(1, columns * group)))
    head_size = max(1, columns) * max(group * row_step, p.head_dim, p.head_dim_v)
    head_step = max(1, min(p.heads_kv, _BOX_SCORES // head_size))
    batch_step = max(1, min(p.batch, _BOX_SCORES // (head_size * head_step)))
    for batch in range(0, p.batch, batch_step):
        for head in range(0, p.heads_kv, head_step):
            for row in range(0, rows, row_step):
                yield slice(batch, batch + batch_step), slice(head, head + head_step), slice(row, row + row_step)
