"""Which unit bounds a kernel: cycles of MMA, MUFU, FMA, shared memory and HBM for a problem and a config.

A model of throughput alone: latency, issue conflicts and throttling come on top, so no kernel beats its bound at the
device's maximum clock. Rates come from :mod:`fa4gen.arch`, formulas from FlashAttention-4 (arXiv 2603.05451), with
Hopper's operand traffic in place of Blackwell's where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fa4gen.arch import Arch, Device
from fa4gen.config import Config, FlashBwdSm90Config, FlashBwdSm100Config, FlashFwdSm90Config, FlashFwdSm100Config
from fa4gen.feasibility import padded
from fa4gen.problem import AttentionProblem

__all__ = [
    "Bound",
    "TileCycles",
    "backward_tile_cycles",
    "bound",
    "steps_per_key_tile",
    "steps_per_tile",
    "tile_cycles",
]


class TileCycles(NamedTuple):
    """Cycles that one (tile_m, tile_n) step keeps each unit of an SM busy."""

    mma: float
    mufu: float
    fma: float
    smem: float


@dataclass(frozen=True)
class Bound:
    """Cycles that the whole problem keeps each unit busy, on the SM with most work; HBM is the whole device's."""

    mma: float
    mufu: float
    fma: float
    smem: float
    hbm: float
    clock_mhz: float

    @property
    def units(self) -> dict[str, float]:
        """Unit name -> cycles."""
        return {name: getattr(self, name) for name in ("mma", "mufu", "fma", "smem", "hbm")}

    @property
    def unit(self) -> str:
        """The unit that is busy longest."""
        return max(self.units, key=self.units.__getitem__)

    @property
    def cycles(self) -> float:
        """Cycles of :attr:`unit`."""
        return max(self.units.values())

    @property
    def microseconds(self) -> float:
        """Time of :attr:`unit` at ``clock_mhz``: no kernel with this config takes less."""
        return self.cycles / self.clock_mhz


def tile_cycles(arch: Arch, config: Config, head_dim: int, head_dim_v: int) -> TileCycles:
    """Cycles of one (tile_m, tile_n) step of a forward: S = QKᵀ, softmax, O += PV, in a 16-bit dtype.

    ``mma``: 2·M·N·(d + d_v) FLOPs, head dims padded as tiles hold them.
    ``mufu``: one exp2 an element, less the polynomial's share; the one a row for the rescale factor is left out.
    ``fma``: see :func:`_softmax_slots`; and a multiply an element of O, unless a threshold makes the rescale rare.
    ``smem``: bytes that the MMAs read, and P's way through shared memory where it does not stay in registers or TMEM.
    """
    assert isinstance(config, FlashFwdSm90Config | FlashFwdSm100Config)
    m, n, fraction = config.tile_m, config.tile_n, config.exp2_poly_fraction
    d, d_v = padded(head_dim), padded(head_dim_v)
    packed = 0.5 if arch.tmem_columns else 1.0  # sm_100 has packed f32x2 arithmetic
    slots = m * n * _softmax_slots(packed, fraction, config.exp2_poly_degree)
    if config.rescale_threshold is None:
        slots += m * d_v * packed
    return TileCycles(
        mma=2 * m * n * (d + d_v) / arch.mma_flops,
        mufu=m * n * (1 - fraction) / arch.mufu_ops,
        fma=slots / arch.fma_ops,
        smem=_smem_bytes(arch, config, d, d_v) / arch.smem_bytes_per_clock,
    )


def _softmax_slots(packed: float, fraction: float, degree: int) -> float:
    """Lane slots of the FP32 and integer pipes an element of S takes. ``packed``: slots of one f32 add or multiply-add.

    Always: the row maximum, scale and subtract, the row sum, and half of a two-element conversion to 16 bit. A
    polynomial exp2 adds three f32 adds (magic number in, out, fraction), ``degree`` multiply-adds, and a clamp, a shift
    and an integer add that have no packed form: nine slots at degree 3 on sm_90, six on sm_100.
    """
    return (1 + 2 * packed + 0.5) + _exp2_slots(packed, fraction, degree)


def _exp2_slots(packed: float, fraction: float, degree: int) -> float:
    return fraction * ((3 + degree) * packed + 3)


def _smem_bytes(arch: Arch, config: Config, head_dim: int, head_dim_v: int) -> int:
    """Bytes of shared memory that a step reads: every MMA reads its own Q rows, and all of K and V.

    sm_90: a warpgroup's WGMMA has 64 rows and up to 256 columns. sm_100: tcgen05 has 128 of each, P lies in TMEM; of a
    pair of CTAs each holds, and reads, half of K and V.
    """
    m, n = config.tile_m, config.tile_n
    ctas = getattr(config, "ctas", 1)
    elements = _operands(arch, m, n, head_dim, ctas) + _operands(arch, m, head_dim_v, n, ctas, a_in_smem=False)
    if isinstance(config, FlashFwdSm90Config) and not config.mma_pv_is_rs:
        elements += 2 * m * n  # P, written and read
    return elements * 2


def _operands(arch: Arch, m: int, n: int, k: int, ctas: int = 1, *, a_in_smem: bool = True) -> int:
    """Elements that a CTA reads from its shared memory for its (m, n, k) of an MMA of ``ctas`` CTAs: its share of B for
    every instruction's rows, A for its columns."""
    rows, columns = (128, 128) if arch.tmem_columns else (64, 256)
    return math.ceil(m / rows) * (n * k // ctas + (math.ceil(n / columns) * rows * k if a_in_smem else 0))


def backward_tile_cycles(
    arch: Arch, tile_m: int, tile_n: int, head_dim: int, head_dim_v: int | None = None, fraction: float = 0.0,
    degree: int = 3, ctas: int = 1,
) -> TileCycles:  # fmt: skip
    """Cycles of one step of the backward pass: tile_m rows of Q against tile_n of K and V of each of ``ctas`` CTAs.

    ``mma``: Sᵀ = KQᵀ, dPᵀ = VdOᵀ, dV += PᵀdO, dK += dSᵀQ, dQ = dS K. ``mufu``: P again from S, less the share
    ``fraction`` of a polynomial of ``degree``.
    ``fma``: an element of P and dS takes three f32 operations (scale and subtract LSE; dP - Δ; times P) and two halves
    of a conversion to 16 bit; the polynomial as in :func:`_softmax_slots`.
    ``smem``: what the MMAs read (Pᵀ and dSᵀ lie in TMEM, or in registers), dS written once more for dQ, and dQ in fp32
    written and read by the reduction. A CTA of a pair reads half of B, and sums dQ of half of the rows over the keys of
    both; half of its dS it sends, which is written, read, and written again in the other CTA.
    """
    m, n, d = tile_m, tile_n, padded(head_dim)
    dv = d if head_dim_v is None else padded(head_dim_v)
    packed = 0.5 if arch.tmem_columns else 1.0
    elements = _operands(arch, n, m, d, ctas) + _operands(arch, n, m, dv, ctas) + _operands(arch, m, d, n)
    elements += _operands(arch, n, d, m, ctas, a_in_smem=False) + _operands(arch, n, dv, m, ctas, a_in_smem=False)
    ds = m * n * ctas
    return TileCycles(
        mma=2 * m * n * (3 * d + 2 * dv) / arch.mma_flops,
        mufu=m * n * (1 - fraction) / arch.mufu_ops,
        fma=m * n * (3 * packed + 1 + _exp2_slots(packed, fraction, degree)) / arch.fma_ops,
        smem=((elements + ds) * 2 + 2 * m // ctas * d * 4) / arch.smem_bytes_per_clock,
    )


def steps_per_key_tile(problem: AttentionProblem, config: Config) -> list[int]:
    """Steps of each key tile of one (batch, K/V head) in a backward: blocks of queries that see one of its keys, of
    every query head of the group. A CTA pair walks those of both its tiles."""
    blocks = math.ceil(problem.seqlen_q / config.tile_m)
    ctas = getattr(config, "ctas", 1)
    steps = []
    for start in range(0, problem.seqlen_k, config.tile_n * ctas):
        first = max(0, start - (problem.seqlen_k - problem.seqlen_q)) if problem.causal else 0
        steps += [(blocks - first // config.tile_m) * problem.gqa_ratio] * ctas
    return steps


def steps_per_tile(problem: AttentionProblem, config: Config) -> list[float]:
    """K/V steps of each M block of one (batch, head): masked tiles are skipped, those on the diagonal count in full.

    With ``pack_gqa`` the rows of an M block are (query, head of the group) pairs, query-major. A CTA pair walks the
    keys of both its M blocks. Blackwell's Q tiles each skip what they do not see: their mean.
    """
    assert isinstance(config, FlashFwdSm90Config | FlashFwdSm100Config)
    ctas, q_tiles = getattr(config, "ctas", 1), getattr(config, "q_stages", 1)
    q_rows = config.tile_m * ctas // q_tiles
    ratio = problem.gqa_ratio if config.pack_gqa else 1
    rows = problem.seqlen_q * ratio
    steps: list[float] = []
    for start in range(0, rows, config.tile_m * ctas):
        total = 0
        for end in range(start + q_rows, start + q_tiles * q_rows + 1, q_rows):
            keys = problem.seqlen_k
            if problem.causal:
                last_query = (min(end, rows) - 1) // ratio
                keys = min(keys, max(0, last_query + 1 + problem.seqlen_k - problem.seqlen_q))
            total += math.ceil(keys / config.tile_n)
        steps += [total / q_tiles] * ctas
    return steps


def bound(problem: AttentionProblem, config: Config, device: Device) -> Bound:
    """The throughput bound of ``problem`` run with ``config`` on ``device``.

    The SM with most work has at least the mean number of steps, the longest tile, and as many of the shortest tiles as
    the fullest SM must take.
    """
    steps: Sequence[float]
    if isinstance(config, FlashBwdSm90Config | FlashBwdSm100Config):
        tile = backward_tile_cycles(
            device.arch, config.tile_m, config.tile_n, problem.head_dim, problem.head_dim_v,
            config.exp2_poly_fraction, config.exp2_poly_degree, getattr(config, "ctas", 1),
        )  # fmt: skip
        steps = steps_per_key_tile(problem, config)
        groups = problem.batch * problem.heads_kv
    else:
        tile = tile_cycles(device.arch, config, problem.head_dim, problem.head_dim_v)
        steps = steps_per_tile(problem, config)
        groups = problem.batch * (problem.heads_kv if config.pack_gqa else problem.heads)
    busiest = 0.0
    if steps and groups:
        mean = groups * sum(steps) / device.sm_count
        rounds = math.ceil(groups * len(steps) / device.sm_count)
        busiest = max(mean, max(steps), rounds * min(steps))
    clock_hz = device.clock_mhz * 1e6
    return Bound(
        mma=tile.mma * busiest,
        mufu=tile.mufu * busiest,
        fma=tile.fma * busiest,
        smem=tile.smem * busiest,
        hbm=problem.hbm_bytes / device.hbm_bytes_per_s * clock_hz,
        clock_mhz=device.clock_mhz,
    )
