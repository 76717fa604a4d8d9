"""What is asked: an attention problem. Tuning never changes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from fa4gen.errors import UnsupportedProblem

__all__ = ["AttentionProblem", "StaticProblem", "attended_pairs"]

DTYPE_BYTES = {"bf16": 2, "fp16": 2}
OPS = ("fwd", "bwd")
FLAGS = {"causal": "causal", "lse": "return_lse", "deterministic": "deterministic"}  # word in a text -> field


@dataclass(frozen=True)
class StaticProblem:
    """The compile-time part of a problem: with a config it selects one kernel, which then serves every length.

    ``gqa_ratio`` is query heads per K/V head. ``deterministic`` is False in every forward problem.
    """

    op: str
    dtype: str
    head_dim: int
    head_dim_v: int
    gqa_ratio: int
    causal: bool
    return_lse: bool
    deterministic: bool = False


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call by shape.

    Tensors are (batch, seqlen, heads, head_dim) with a contiguous last dimension: Q has ``heads`` heads of
    ``head_dim``, K and V have ``heads_kv`` heads of ``head_dim`` and ``head_dim_v``. ``causal`` aligns the mask to
    the bottom right corner: query i sees keys j <= i + seqlen_k - seqlen_q. ``return_lse`` asks for the natural-log
    sum of exponentials, (batch, heads, seqlen_q) in fp32, beside O; it belongs to op "fwd".

    Op "bwd" is the gradient of the same call: from Q, K, V, O, LSE and dO, which is like O, it computes dQ, dK and dV.
    ``deterministic``, which belongs to it, asks for the same bits at every launch.

    Raises:
        UnsupportedProblem: a value breaks the rules above; the message names it.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bf16"
    causal: bool = False
    return_lse: bool = False
    op: str = "fwd"
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise UnsupportedProblem(f"op must be one of {', '.join(OPS)}, got {self.op!r}")
        if self.dtype not in DTYPE_BYTES:
            raise UnsupportedProblem(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        for name in ("batch", "seqlen_q", "seqlen_k"):
            if getattr(self, name) < 0:
                raise UnsupportedProblem(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("heads", "heads_kv", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise UnsupportedProblem(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.heads_kv:
            raise UnsupportedProblem(
                f"heads must be a multiple of heads_kv, got heads={self.heads}, heads_kv={self.heads_kv}"
            )
        if self.deterministic and self.op != "bwd":
            raise UnsupportedProblem("deterministic belongs to op=bwd: the forward has no other order to choose")
        if self.return_lse and self.op != "fwd":
            raise UnsupportedProblem("lse belongs to op=fwd: the backward reads LSE and returns none")

    @property
    def gqa_ratio(self) -> int:
        """Query heads per K/V head."""
        return self.heads // self.heads_kv

    @property
    def static(self) -> StaticProblem:
        """The compile-time part."""
        return StaticProblem(**{f.name: getattr(self, f.name) for f in fields(StaticProblem)})

    @property
    def flops(self) -> float:
        """Useful floating-point operations for every attended (query, key) pair of every head.

        Forward: 2·(d + d_v), of QKᵀ and PV. Backward: 2·(3·d + 2·d_v), of QKᵀ, dO·Vᵀ, PᵀdO, dSᵀQ and dS·K: 2.5 times
        the forward where d = d_v, which the FlashAttention papers take throughout.

        For a square causal mask this is half of the full figure up to the diagonal, the convention of the
        FlashAttention papers (which count exactly half).
        """
        pairs: float = self.seqlen_q * self.seqlen_k
        if self.causal:
            pairs = pairs / 2 if self.seqlen_q == self.seqlen_k else attended_pairs(self.seqlen_q, self.seqlen_k)
        dims = 3 * self.head_dim + 2 * self.head_dim_v if self.op == "bwd" else self.head_dim + self.head_dim_v
        return 2.0 * dims * pairs * self.heads * self.batch

    @property
    def hbm_bytes(self) -> int:
        """Compulsory traffic in bytes. Forward: Q, K and V read once, O (and LSE) written once. Backward: those and dO
        read once, dQ, dK and dV written once; what a kernel keeps in a workspace is not compulsory."""
        size = DTYPE_BYTES[self.dtype]
        q_o = self.heads * self.seqlen_q * (self.head_dim + self.head_dim_v) * size
        k_v = self.heads_kv * self.seqlen_k * (self.head_dim + self.head_dim_v) * size
        lse = self.heads * self.seqlen_q * 4
        if self.op == "bwd":
            return self.batch * (2 * (q_o + k_v) + lse)
        return self.batch * (q_o + k_v + lse * self.return_lse)

    @classmethod
    def parse(cls, text: str) -> AttentionProblem:
        """Reads "b=2 h=16 s=4096 d=128 causal".

        Keys: b, h, hk (default h), s or sq and sk, d, dv (default d), dtype (default bf16), op (default fwd); flags:
        causal, lse, deterministic.

        Raises:
            UnsupportedProblem: an unknown, missing or malformed word.
        """
        numbers: dict[str, int] = {}
        other: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            key, sep, value = word.partition("=")
            if not sep and key in FLAGS:
                other[FLAGS[key]] = True
            elif word == "full":  # not causal
                continue
            elif sep and key in ("b", "h", "hk", "s", "sq", "sk", "d", "dv"):
                try:
                    numbers[key] = int(value)
                except ValueError:
                    raise UnsupportedProblem(f"{word!r} in problem {text!r}: {value!r} is not an integer") from None
            elif sep and key in ("dtype", "op"):
                other[key] = value
            else:
                raise UnsupportedProblem(
                    f"unknown word {word!r} in problem {text!r}; "
                    "write for example: b=2 h=16 hk=2 s=4096 d=128 dv=128 dtype=bf16 causal lse, or op=bwd causal"
                )
        seqlen = numbers.get("s")
        values = {
            "batch": numbers.get("b", 1),
            "heads": numbers.get("h"),
            "heads_kv": numbers.get("hk", numbers.get("h")),
            "seqlen_q": numbers.get("sq", seqlen),
            "seqlen_k": numbers.get("sk", seqlen),
            "head_dim": numbers.get("d"),
            "head_dim_v": numbers.get("dv", numbers.get("d")),
        }
        missing = [name for name, value in values.items() if value is None]
        if missing:
            raise UnsupportedProblem(f"problem {text!r} lacks {', '.join(missing)} (keys h, s or sq and sk, d)")
        return cls(**values, **other)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The canonical text; :meth:`parse` reads it back."""
        words = [f"b={self.batch} h={self.heads}"]
        if self.heads_kv != self.heads:
            words.append(f"hk={self.heads_kv}")
        if self.seqlen_q == self.seqlen_k:
            words.append(f"s={self.seqlen_q}")
        else:
            words.append(f"sq={self.seqlen_q} sk={self.seqlen_k}")
        words.append(f"d={self.head_dim}")
        if self.head_dim_v != self.head_dim:
            words.append(f"dv={self.head_dim_v}")
        if self.dtype != "bf16":
            words.append(f"dtype={self.dtype}")
        if self.op != "fwd":
            words.append(f"op={self.op}")
        words += [word for word, field in FLAGS.items() if getattr(self, field)]
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``AttentionProblem(**d)`` reads it back."""
        return asdict(self)


def attended_pairs(seqlen_q: int, seqlen_k: int) -> int:
    """(query, key) pairs that a bottom-right causal mask keeps: sum over i of clamp(i + 1 + sk - sq, 0, sk)."""
    visible = min(seqlen_q, seqlen_k)  # rows that see at least one key end at the last row, which sees all sk
    first = seqlen_k - visible + 1
    return visible * (first + seqlen_k) // 2
