"""Other attention kernels to measure beside: one small adapter each, imported only when it runs.

A backward is timed through autograd: its forward runs once, outside, and keeps its graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from fa4gen.errors import UsageError
from fa4gen.problem import AttentionProblem

__all__ = ["PEERS", "Attend", "Call", "Peer", "PeerAbsent", "differentiated", "get_peers"]

# (q, k, v) in fa4gen's layout (b, s, h, d) to O (b, sq, h, dv), at the default softmax scale.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# A launch on tensors that are bound to it. Returns O, (O, LSE), or (dQ, dK, dV).
Call = Callable[[], Any]


class PeerAbsent(Exception):
    """The peer is not installed or does not do the problem; the message says which."""


@dataclass(frozen=True)
class Peer:
    """``bind(problem)`` gives a function that makes a call from the inputs of a :class:`fa4gen.case.Case`, or raises
    :class:`PeerAbsent`, as may that function."""

    name: str
    title: str
    distribution: str
    bind: Callable[[AttentionProblem], Callable[..., Call]]

    @property
    def version(self) -> str:
        """Version of the installed distribution; "" if there is none."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return ""


def get_peers(names: str) -> list[Peer]:
    """The peers in "cudnn,fa3"; "all" is every one, "none" the empty list.

    Raises:
        UsageError: unknown name.
    """
    if names in ("all", "none"):
        return list(PEERS.values()) if names == "all" else []
    wanted = [name.strip() for name in names.split(",")]
    unknown = next((name for name in wanted if name not in PEERS), None)
    if unknown is not None:
        raise UsageError(f"unknown peer {unknown!r}; known: {', '.join(PEERS)}, or all, or none")
    return [PEERS[name] for name in wanted]


def differentiated(attend: Attend) -> Callable[..., Call]:
    """Makes a call from Q, K, V, O, dO, LSE that runs the backward of ``attend`` alone."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor) -> Call:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            out = attend(*leaves)
        if not out.requires_grad:
            raise PeerAbsent("has no backward")
        return partial(torch.autograd.grad, out, leaves, do, retain_graph=True)

    return prepare


def _binder(choose: Callable[[AttentionProblem], Attend]) -> Callable[[AttentionProblem], Callable[..., Call]]:
    """A peer's ``bind`` from its forward function."""

    def bind(problem: AttentionProblem) -> Callable[..., Call]:
        attend = choose(problem)
        return differentiated(attend) if problem.op == "bwd" else partial(partial, attend)

    return bind


def _sdpa(backend: str) -> Callable[[AttentionProblem], Attend]:
    def choose(problem: AttentionProblem) -> Attend:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if problem.deterministic:
            raise PeerAbsent("has no deterministic backward to ask for")
        if problem.causal and problem.seqlen_q != problem.seqlen_k:
            raise PeerAbsent("aligns a causal mask to the top left, which is another problem where sq differs from sk")

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2),
                    k.transpose(1, 2),
                    v.transpose(1, 2),
                    is_causal=problem.causal,
                    enable_gqa=problem.gqa_ratio > 1,
                )
            return out.transpose(1, 2)

        return attend

    return choose


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerAbsent(f"not installed: {error}") from None


def _fa3(problem: AttentionProblem) -> Attend:
    if problem.op == "bwd":  # of no wheel on PyPI: built from flash-attention's folder hopper
        function = partial(_import("flash_attn_interface").flash_attn_func, deterministic=problem.deterministic)
    elif problem.dtype != "bf16":
        raise PeerAbsent("the wheel is built without fp16")
    else:
        function = _import("fa3_fwd_interface").flash_attn_func
    return lambda q, k, v: _first(function(q, k, v, causal=problem.causal))


def _fa4(problem: AttentionProblem) -> Attend:
    function = partial(_import("flash_attn.cute").flash_attn_func, deterministic=problem.deterministic)
    return lambda q, k, v: _first(function(q, k, v, causal=problem.causal))


def _first(result: Any) -> Tensor:
    """O, where some versions return LSE beside it."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


PEERS = {
    peer.name: peer
    for peer in (
        Peer("cudnn", "torch SDPA, cuDNN", "torch", _binder(_sdpa("CUDNN_ATTENTION"))),
        Peer("fa2", "torch SDPA, flash", "torch", _binder(_sdpa("FLASH_ATTENTION"))),
        Peer("fa3", "FlashAttention-3", "fa3-fwd", _binder(_fa3)),
        Peer("fa4", "FlashAttention-4", "flash-attn-4", _binder(_fa4)),
    )
}
