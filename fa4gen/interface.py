"""Attention on torch tensors: validation, allocation, the torch.compile operator. Gradients: :mod:`fa4gen.autograd`.

A call costs one dictionary look-up, the outputs' allocation and the launch. The key holds shapes, q's dtype and device
and the flags. Strides, addresses, dtypes and devices are checked by the compiled function itself at every call (but the
strides of extent 1, which mean nothing); only when it refuses is the reason looked for.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fa4gen import autograd, dispatch
from fa4gen.accuracy import TORCH_DTYPES
from fa4gen.autograd import ALIGN_BYTES, DTYPES
from fa4gen.errors import UnsupportedProblem, UsageError
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant
from fa4gen.workspace import workspace_elements

if TYPE_CHECKING:
    from fa4gen.dispatch import Kernel, Miss

__all__ = ["attention", "warmup"]

MAX_HEAD_DIM = 256
ALIGN = ALIGN_BYTES // 2  # the same in elements of a 16-bit dtype

DEVICE_TYPE = "cuda"  # tests replace it, to run everything but the kernel on CPU tensors

# Shapes of a serving process may never repeat (seqlen_k grows by one a step): then the plans are dropped and rebuilt.
MAX_PLANS = 4096
_NO_OUTPUTS = (
    "an input requires grad and autograd cannot record writing to out= or lse=: leave them out, or use no_grad()"
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a call with given shapes and flags does."""

    launch: Kernel
    scale: float
    num_sms: int
    o_shape: tuple[int, ...]
    new_o: Callable[[], torch.Tensor]
    new_o_device: int | None
    lse_shape: tuple[int, ...]
    miss: Miss | None


_plans: dict[Any, _Plan] = {}

# Bound once: every attribute look-up counts in a call of a few microseconds.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # a build for CPUs has none

os.register_at_fork(after_in_child=_plans.clear)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    deterministic: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """softmax(softmax_scale · q kᵀ) v on the current stream, with a gradient for q, k and v where autograd records.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16, on a CUDA device.
        k: (batch, seqlen_k, heads_kv, head_dim); ``heads`` is a multiple of ``heads_kv``.
        v: (batch, seqlen_k, heads_kv, head_dim_v). Head dims are multiples of 8 up to 256. The last dimension of
            every tensor is contiguous, its other strides are multiples of 8 elements and its address of 16 bytes.
        causal: query i sees keys j <= i + seqlen_k - seqlen_q.
        softmax_scale: a positive number, 1/√head_dim by default.
        return_lse: also return log Σ exp (natural), (batch, heads, seqlen_q) fp32.
        out: where to write O, (batch, seqlen_q, heads, head_dim_v); by default a new contiguous tensor.
        lse: where to write LSE; needs ``return_lse``.
        deterministic: the gradients have the same bits every time; by default what
            ``torch.use_deterministic_algorithms`` says at the call. O and LSE always have.

    Returns:
        O, or (O, LSE). A query that sees no key has O = 0 and LSE = -inf, and a gradient of 0.

    LSE has no gradient: a loss that depends on it raises in the backward pass (under torch.compile it is detached).
    Neither have the gradients: there is no second derivative.

    The first call of a kind may compile (logged as a warning) or load a kernel; :func:`warmup` does both ahead and
    makes the call safe under CUDA graph capture.

    Raises:
        UnsupportedProblem: the tensors break a rule above, or ``out`` or ``lse`` is given where autograd records.
        CompileError: the kernel does not compile.
        NoDeviceError: no kernel family runs on the device.
        TableError: a tuned table cannot be read.
    """
    if _is_compiling():
        return _traced(q, k, v, causal, softmax_scale, return_lse, out, lse, deterministic)
    plan: _Plan | None
    try:
        if _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            plan = None
        else:
            plan = _plans[q.shape, k.shape, v.shape, q.dtype, q.get_device(), causal, softmax_scale, return_lse]
    except (KeyError, AttributeError, TypeError):  # a new shape; no tensors, or a flag that cannot be a key
        plan = _make_plan(q, k, v, causal, softmax_scale, return_lse)
    if plan is None:
        return _with_gradient(q, k, v, causal, softmax_scale, return_lse, out, lse, deterministic)
    if plan.miss is not None:
        plan.miss.calls += 1
    if out is None:
        out = plan.new_o() if _current_device() == plan.new_o_device else q.new_empty(plan.o_shape)
    elif out.shape != plan.o_shape or not out.is_contiguous() or out.requires_grad:
        _check_output("out", out, plan.o_shape, q)
    if return_lse:
        if lse is None:
            lse = q.new_empty(plan.lse_shape, dtype=torch.float32)
        elif lse.shape != plan.lse_shape or not lse.is_contiguous() or lse.requires_grad:
            _check_output("lse", lse, plan.lse_shape, q)
    elif lse is not None:
        raise UnsupportedProblem("lse= was given without return_lse=True: set it, or leave lse out")
    try:
        if lse is None:
            plan.launch(q, k, v, out, plan.scale, plan.num_sms)
            return out
        plan.launch(q, k, v, out, lse, plan.scale, plan.num_sms)
        return out, lse
    except (TypeError, ValueError, RuntimeError):
        # Raises the reason if it is the caller's.
        _validate(q, k, v, causal, softmax_scale, return_lse)
        _check_output("out", out, plan.o_shape, q)
        if lse is not None:
            _check_output("lse", lse, plan.lse_shape, q)
        raise


def warmup(
    *what: AttentionProblem | str | torch.Tensor,
    causal: bool = False,
    return_lse: bool = False,
    deterministic: bool | None = None,
    device: int | None = None,
) -> None:
    """Compiles and loads what later calls need, so that they only launch, also under CUDA graph capture.

    Args:
        what: problems, as objects or text ("b=2 h=16 s=4096 d=128 causal", "... op=bwd"), or exactly q, k and v; where
            one of these requires grad, its backward is warmed up as well.
        causal: as in :func:`attention`, with q, k and v.
        return_lse: likewise.
        deterministic: likewise.
        device: CUDA device index for problems; the current one by default.

    A kernel loaded here is launched once, on one token and the current stream: only then is its code on the device.

    Raises:
        Fa4genError: what :func:`attention` would raise.
    """
    if what and isinstance(what[0], torch.Tensor):
        if len(what) != 3:
            raise UsageError(f"warmup takes problems, or the three tensors q, k and v; got {len(what)} arguments")
        problems = [_validate(*what, causal, None, return_lse)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in what if isinstance(t, torch.Tensor)):
            problems = [
                replace(problems[0], return_lse=True),
                replace(problems[0], op="bwd", return_lse=False, deterministic=_resolved(deterministic)),
            ]
        index = what[0].get_device()
    else:
        problems = [p if isinstance(p, AttentionProblem) else AttentionProblem.parse(str(p)) for p in what]
        index = torch.cuda.current_device() if device is None else device
    chosen = dispatch.dispatcher(index)
    for problem in problems:
        if not _is_empty(problem):
            variant = chosen.variant(problem)
            if not chosen.loaded(variant):
                kernel = chosen.kernel(variant, at_call_time=False)
                if problem.op == "fwd":
                    kernel = _with_workspace(kernel, workspace_elements(problem, variant.config))
                _launch_once(kernel, variant, chosen.device.sm_count, index)


def _launch_once(kernel: Kernel, variant: Variant, num_sms: int, index: int) -> None:
    device = torch.device(DEVICE_TYPE, index) if index >= 0 else torch.device(DEVICE_TYPE)
    static = variant.static
    dtype = TORCH_DTYPES[static.dtype]
    q, o = (
        torch.zeros(1, 1, static.gqa_ratio, dim, dtype=dtype, device=device)
        for dim in (static.head_dim, static.head_dim_v)
    )
    k, v = q[:, :, :1].contiguous(), o[:, :, :1].contiguous()
    lse = torch.zeros(1, static.gqa_ratio, 1, device=device)
    if static.op == "bwd":
        autograd.launch_once(kernel, variant, (q, k, v, o, o, lse), num_sms)
    else:
        kernel(q, k, v, o, *[lse] * static.return_lse, 1.0, num_sms)


# --- the slow path ----------------------------------------------------------------------------------------------------


def _resolved(deterministic: bool | None) -> bool:
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(deterministic, bool):
        raise UnsupportedProblem(f"deterministic must be a bool or None, got {deterministic!r}")
    return deterministic


def _with_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None, return_lse: bool,
    out: torch.Tensor | None, lse: torch.Tensor | None, deterministic: bool | None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
    """:func:`attention` where autograd records."""
    if out is not None or lse is not None:
        raise UnsupportedProblem(_NO_OUTPUTS)
    arguments = (q, k, v, causal, softmax_scale, return_lse, _resolved(deterministic))
    result: torch.Tensor | tuple[torch.Tensor, ...] = autograd.Attention.apply(attention, *arguments)
    return result


def _make_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None, return_lse: bool
) -> _Plan:
    problem = _validate(q, k, v, causal, softmax_scale, return_lse)
    o_shape = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v)
    lse_shape = (problem.batch, problem.heads, problem.seqlen_q)
    launch: Kernel = _fill
    miss = None
    num_sms = 0
    if not _is_empty(problem):
        chosen = dispatch.dispatcher(q.get_device())
        resolution = chosen.resolve(problem)
        launch = _with_workspace(
            chosen.kernel(Variant.of(chosen.device.arch.name, problem, resolution.config)),
            workspace_elements(problem, resolution.config),
        )
        num_sms = chosen.device.sm_count
        miss = None if resolution.covered else dispatch.record_miss(chosen.device, problem)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    key = (q.shape, k.shape, v.shape, q.dtype, q.get_device(), causal, softmax_scale, return_lse)
    plan = _plans[key] = _Plan(
        launch=launch,
        scale=float(softmax_scale) if softmax_scale is not None else 1 / math.sqrt(problem.head_dim),
        num_sms=num_sms,
        o_shape=o_shape,
        new_o=_allocation(o_shape, q.dtype),
        new_o_device=q.get_device(),
        lse_shape=lse_shape,
        miss=miss,
    )
    return plan


def _with_workspace(kernel: Kernel, elements: int) -> Kernel:
    """``kernel`` as a function without the workspace, third from the end of its arguments, if it takes one."""
    if elements == 0:
        return kernel

    def launch(*arguments: Any) -> None:
        workspace = arguments[0].new_empty(elements, dtype=torch.float32)
        kernel(*arguments[:-2], workspace, *arguments[-2:])

    return launch


def _allocation(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Makes contiguous tensors on the current device. What torch.compile's code calls is no public function, but takes
    half the time of torch.empty_like."""
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{DEVICE_TYPE}", None)
    if allocate is None:
        return partial(torch.empty, shape, dtype=dtype, device=DEVICE_TYPE)
    return partial(allocate, shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), dtype)


def _is_empty(problem: AttentionProblem) -> bool:
    return problem.batch == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0


def _fill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, *rest: Any) -> None:
    """The kernel of an empty problem: no query sees a key."""
    o.zero_()
    if len(rest) == 3:
        rest[0].fill_(-math.inf)


def _validate(q: Any, k: Any, v: Any, causal: Any, softmax_scale: Any, return_lse: Any) -> AttentionProblem:
    """The problem that the arguments describe.

    Raises:
        UnsupportedProblem: they break a rule; the message names it, the value, and what to do.
    """
    for fault in _faults(q, k, v, causal, softmax_scale, return_lse):
        raise UnsupportedProblem(fault)
    return autograd.problem_of(q, k, v, causal, return_lse=return_lse)


def _faults(q: Any, k: Any, v: Any, causal: Any, softmax_scale: Any, return_lse: Any) -> Iterator[str]:
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            yield f"{name} must be a bool, got {flag!r}"
    if softmax_scale is not None and not isinstance(softmax_scale, numbers.Real):
        yield f"softmax_scale must be a Python number, got {type(softmax_scale).__name__}: convert it with float()"
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        yield f"softmax_scale must be positive and finite, got {softmax_scale}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        yield from _tensor_faults(name, t)
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            yield f"q and {name} must have one dtype, got {q.dtype} and {t.dtype}: cast {name}"
        if t.device != q.device:
            yield f"q and {name} must be on one device, got {q.device} and {t.device}: move {name}"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        yield f"q, k and v must have one batch, got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}"
    if q.shape[3] != k.shape[3]:
        yield f"q and k must have one head dim, got {q.shape[3]} and {k.shape[3]}"
    if k.shape[1:3] != v.shape[1:3]:
        yield f"k and v must agree in seqlen and heads, got {tuple(k.shape)} and {tuple(v.shape)}"
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2]:
        yield f"q's heads must be a multiple of k's, got {q.shape[2]} and {k.shape[2]}"


def _tensor_faults(name: str, t: Any) -> Iterator[str]:
    if not isinstance(t, torch.Tensor):
        yield f"{name} must be a torch tensor, got {type(t).__name__}"
    if t.device.type != DEVICE_TYPE:
        yield f"{name} must be on a CUDA device, got {t.device}: move it with .cuda()"
    if t.dtype not in DTYPES:
        yield f"{name} must be bfloat16 or float16, got {t.dtype}: cast it"
    if t.ndim != 4:
        yield f"{name} must be (batch, seqlen, heads, head_dim), got {t.ndim} dimensions: {tuple(t.shape)}"
    head_dim = t.shape[3]
    if head_dim % ALIGN or not ALIGN <= head_dim <= MAX_HEAD_DIM:
        yield f"{name}'s head dim must be a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {head_dim}: pad with zeros"
    if t.numel() == 0:
        return
    if t.stride(3) != 1:
        yield f"{name}'s last dimension must be contiguous, got stride {t.stride(3)}: call {name}.contiguous()"
    if any(s % ALIGN for n, s in zip(t.shape[:3], t.stride()[:3], strict=True) if n > 1):
        yield f"{name}'s strides must be multiples of 8 elements (16 bytes), got {t.stride()}: call {name}.contiguous()"
    if t.data_ptr() % ALIGN_BYTES:
        yield f"{name}'s address must be a multiple of 16 bytes, got {t.data_ptr():#x}: copy it with {name}.clone()"


def _check_output(name: str, t: Any, shape: tuple[int, ...], q: torch.Tensor) -> None:
    dtype = q.dtype if name == "out" else torch.float32
    if not isinstance(t, torch.Tensor) or t.shape != shape or t.dtype != dtype or t.device != q.device:
        got = f"{tuple(t.shape)} {t.dtype} on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise UnsupportedProblem(f"{name} must be a {tuple(shape)} {dtype} tensor on {q.device}, got {got}")
    if t.requires_grad:
        raise UnsupportedProblem(f"{name} requires grad and autograd cannot record writing to it: give a plain tensor")
    if name == "lse" and not t.is_contiguous():
        raise UnsupportedProblem(f"lse must be contiguous, got strides {t.stride()}")
    if name == "out" and any(n > 1 and s == 0 for n, s in zip(shape, t.stride(), strict=True)):
        raise UnsupportedProblem(f"out must not be an expanded tensor, got strides {t.stride()}")
    if name == "out":
        for fault in _tensor_faults(name, t):
            raise UnsupportedProblem(fault)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "fa4gen::attention_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, bool return_lse, bool deterministic) "
    "-> (Tensor, Tensor)",
)
def _attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    causal: bool, softmax_scale: float | None, return_lse: bool, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """O and LSE, which is empty without ``return_lse``. The gradient needs ``return_lse``, heeds ``deterministic``."""
    result: Any = attention(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=return_lse)
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


@_attention_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    causal: bool, softmax_scale: float | None, return_lse: bool, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, seqlen_q, heads, _ = q.shape
    lse_shape = (batch, heads, seqlen_q) if return_lse else (0,)
    return q.new_empty(batch, seqlen_q, heads, v.shape[3]), q.new_empty(lse_shape, dtype=torch.float32)


_attention_forward.register_autograd(autograd.backward_of_operator, setup_context=autograd.save_for_operator)


def _traced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None, return_lse: bool,
    out: torch.Tensor | None, lse: torch.Tensor | None, deterministic: bool | None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if recorded and (out is not None or lse is not None):
        raise UnsupportedProblem(_NO_OUTPUTS)
    o, sums = torch.ops.fa4gen.attention_forward(
        q, k, v, causal, softmax_scale, return_lse or recorded, _resolved(deterministic)
    )
    if recorded:  # the compiled backward takes a gradient for every output that has one, used or not
        sums = sums.detach()
    o = o if out is None else out.copy_(o)
    sums = sums if lse is None else lse.copy_(sums)
    return (o, sums) if return_lse else o
