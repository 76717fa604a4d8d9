"""The gradient of attention: what a backward pass launches, for eager autograd and as a torch.compile operator.

O and LSE are saved by the forward; the kernel computes P and dP again. A call of the backward costs one dictionary
look-up, the allocation of three gradients and a workspace, and the launch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4gen import dispatch
from fa4gen.accuracy import TORCH_DTYPES
from fa4gen.errors import UnsupportedProblem
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant
from fa4gen.workspace import workspace_elements

if TYPE_CHECKING:
    from fa4gen.dispatch import Kernel, Miss

__all__ = ["Attention", "backward_of_operator", "launch_gradients", "launch_once", "problem_of", "save_for_operator"]

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
ALIGN_BYTES = 16  # of a TMA descriptor: addresses and strides
MAX_PLANS = 4096  # lengths of a training run may never repeat: then the plans are dropped and rebuilt

NO_LSE_GRADIENT = "LSE of attention has no gradient and the loss depends on it: use lse.detach()"
NO_SECOND_DERIVATIVE = "attention has no second derivative: its gradient cannot be differentiated again"

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a backward with given shapes and flags does. ``workspace``: fp32 elements."""

    launch: Kernel
    num_sms: int
    workspace: int
    miss: Miss | None


_plans: dict[Any, _Plan] = {}
os.register_at_fork(after_in_child=_plans.clear)


def launch_gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor,
    causal: bool, softmax_scale: float | None, deterministic: bool,
) -> Gradients:  # fmt: skip
    """dQ, dK and dV, contiguous and typed like Q, K and V, on the current stream.

    Args:
        q, k, v: what :func:`fa4gen.attention` took.
        o, lse: what it returned, contiguous.
        do: the gradient of O, of any strides; copied where they or its address do not suit a TMA descriptor.

    Raises:
        UnsupportedProblem: no config can run it.
        CompileError, NoDeviceError, TableError: see :func:`fa4gen.attention`.
    """
    key = q.shape, k.shape, v.shape, q.dtype, q.get_device(), causal, deterministic
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(
            problem_of(q, k, v, causal, op="bwd", deterministic=deterministic), q.get_device()
        )
    if plan.miss is not None:
        plan.miss.calls += 1
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    workspace = torch.empty(plan.workspace, dtype=torch.float32, device=q.device)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    plan.launch(q, k, v, o, _suitable(do), lse, dq, dk, dv, workspace, scale, plan.num_sms)
    return dq, dk, dv


def launch_once(kernel: Kernel, variant: Variant, inputs: tuple[Tensor, ...], num_sms: int) -> None:
    """Launches the backward ``kernel`` on ``inputs`` (Q, K, V, O, dO, LSE) for its side effects."""
    q, k, v = inputs[:3]
    problem = problem_of(q, k, v, variant.static.causal, op="bwd", deterministic=variant.static.deterministic)
    workspace = torch.empty(workspace_elements(problem, variant.config), dtype=torch.float32, device=q.device)
    kernel(*inputs, *map(torch.empty_like, (q, k, v)), workspace, 1.0, num_sms)


def problem_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, **flags: Any) -> AttentionProblem:
    """The problem of these tensors, which keep the rules of :func:`fa4gen.attention`. ``flags``: its other fields."""
    return AttentionProblem(
        batch=q.shape[0],
        heads=q.shape[2],
        heads_kv=k.shape[2],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=DTYPES[q.dtype],
        causal=causal,
        **flags,
    )


def _make_plan(problem: AttentionProblem, index: int) -> _Plan:
    if not (problem.batch and problem.seqlen_q and problem.seqlen_k):
        return _Plan(_fill, 0, 0, None)
    chosen = dispatch.dispatcher(index)
    resolution = chosen.resolve(problem)
    return _Plan(
        launch=chosen.kernel(Variant.of(chosen.device.arch.name, problem, resolution.config)),
        num_sms=chosen.device.sm_count,
        workspace=workspace_elements(problem, resolution.config),
        miss=None if resolution.covered else dispatch.record_miss(chosen.device, problem),
    )


def _fill(*arguments: Any) -> None:
    """The kernel of an empty problem: nothing depends on anything."""
    for gradient in arguments[6:9]:
        gradient.zero_()


def _suitable(do: Tensor) -> Tensor:
    """``do``, or a copy of it that a TMA descriptor can describe."""
    if do.data_ptr() % ALIGN_BYTES:
        return do.clone(memory_format=torch.contiguous_format)
    unit = ALIGN_BYTES // do.element_size()
    if do.is_contiguous() or (
        do.stride(3) == 1 and not any(s % unit for n, s in zip(do.shape[:3], do.stride()[:3], strict=True) if n > 1)
    ):
        return do
    return do.contiguous()


# --- eager ------------------------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """O, or (O, LSE), with a gradient. ``attend`` is :func:`fa4gen.attention`, which runs without one here."""

    @staticmethod
    def forward(
        ctx: Any, attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor,
        causal: bool, softmax_scale: float | None, return_lse: bool, deterministic: bool,
    ) -> Any:  # fmt: skip
        o, lse = attend(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.flags = causal, softmax_scale, deterministic
        ctx.set_materialize_grads(False)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> Any:
        # The operator raises when its result is differentiated; it costs some microseconds more.
        compute = backward_operator if torch.is_grad_enabled() else launch_gradients
        return None, *_of_outputs(ctx, do, dlse, compute), None, None, None, None


def _of_outputs(
    ctx: Any, do: Tensor | None, dlse: Tensor | None, compute: Callable[..., Gradients]
) -> tuple[Tensor | None, ...]:
    if dlse is not None:
        raise UnsupportedProblem(NO_LSE_GRADIENT)
    if do is None:
        return None, None, None
    q, k, v, o, lse = ctx.saved_tensors
    return compute(q, k, v, o, do, lse, *ctx.flags)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "fa4gen::attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor o, Tensor do, Tensor lse, bool causal, float? softmax_scale, "
    "bool deterministic) -> (Tensor, Tensor, Tensor)",
)
def backward_operator(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor,
    causal: bool, softmax_scale: float | None, deterministic: bool,
) -> Gradients:  # fmt: skip
    """:func:`launch_gradients` as an operator."""
    return launch_gradients(q, k, v, o, do, lse, causal, softmax_scale, deterministic)


@backward_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Gradients:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv


def _no_second_derivative(ctx: Any, *_gradients: Any) -> Any:
    raise UnsupportedProblem(NO_SECOND_DERIVATIVE)


backward_operator.register_autograd(_no_second_derivative)


def save_for_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """The ``setup_context`` of ``fa4gen::attention_forward``."""
    q, k, v, causal, softmax_scale, return_lse, deterministic = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.flags = causal, softmax_scale, deterministic
    ctx.has_lse = return_lse
    ctx.set_materialize_grads(False)


def backward_of_operator(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """The backward of ``fa4gen::attention_forward``."""
    if not ctx.has_lse:
        raise UnsupportedProblem("the operator saves what its gradient needs only with return_lse=True")
    return *_of_outputs(ctx, do, dlse, backward_operator), None, None, None, None
