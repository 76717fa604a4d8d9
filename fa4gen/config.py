"""What is chosen: one frozen config type per kernel family, and the registry of families."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from fa4gen.errors import UsageError
from fa4gen.problem import AttentionProblem

__all__ = [
    "FAMILIES",
    "Config",
    "Family",
    "FlashBwdSm90Config",
    "FlashBwdSm100Config",
    "FlashFwdSm90Config",
    "FlashFwdSm100Config",
    "config_from_dict",
    "config_to_dict",
    "get_family",
]


@dataclass(frozen=True)
class FlashFwdSm90Config:
    """Knobs of ``flash_fwd_sm90``: a TMA producer warp and ``tile_m`` / 64 MMA warpgroups on WGMMA.

    Attributes:
        tile_m: Q rows a CTA; each MMA warpgroup owns 64. More rows read K and V less often, fewer fill small grids.
        tile_n: K/V rows a step. Larger amortises barriers and softmax reductions against registers (tile_n / 2 a
            thread for S) and shared memory.
        kv_stages: depth of the K/V ring. Latency hiding against shared memory.
        schedule: "pingpong" lets the warpgroups issue WGMMA in turn, so one's softmax (MUFU, FMA) runs under
            another's MMA; "cooperative" leaves the order to the hardware and saves two named barriers a step.
        intra_wg_overlap: QKᵀ of the next step is issued before PV of this one, so that softmax runs under PV.
            Tensor-core idle time against registers (P is live beside S).
        mma_pv_is_rs: P goes to the PV WGMMA from registers; else through shared memory (stmatrix), which frees
            tile_n / 4 registers and costs shared-memory bandwidth and space.
        mma_qk_is_rs: Q goes to the QKᵀ WGMMA from registers, loaded once a tile; else every step reads it from shared
            memory. Shared-memory bandwidth and power against head_dim / 4 registers.
        exp2_poly_fraction: share of the exponentials computed by a polynomial on the FMA units, not by MUFU.
        exp2_poly_degree: degree of that polynomial: accuracy against FMA issue slots.
        rescale_threshold: None rescales O at every step. A number (log2 units) keeps the old row maximum until the
            new one exceeds it by more, and skips the O pass while no row of the warp needs it: FMA work against a
            vote and a branch.
        pack_gqa: the query heads of one K/V head share a tile, so short sequences fill it and K/V is read once.
        persistent: one CTA an SM walks over tiles, overlapping a tile's epilogue with the next one's loads.
        ctas_per_sm: CTAs that share an SM, one's prologue and epilogue under the other's loop: occupancy against
            registers and shared memory for each, and K/V loaded by both.
        dynamic_tiles: a persistent CTA takes its next tile from a counter in global memory, when its loads get there;
            else its tiles are fixed beforehand. Balance of unequal tiles against an atomic a tile and the launch that
            zeroes the counter.
        epilogue: of a persistent kernel: "tma_over_q" stages O where Q lies, which delays the next tile's Q; "tma" in
            shared memory of its own, so that Q is loaded ahead.
        tile_order: "linear" walks M blocks, heads, batches; "longest_first" takes the M blocks with most keys
            first, heads in sections whose K and V fit the L2; "paired" gives a persistent CTA the M block with most
            keys of a head and the one with fewest in turn, so that a causal mask leaves all with equal work.
        cluster_m: CTAs of a cluster that share each K/V load by multicast: L2 traffic against lock-step.
        producer_regs: registers a thread of the producer warpgroup after setmaxnreg; the MMA warpgroups get the rest.
    """

    tile_m: int = 128
    tile_n: int = 128
    kv_stages: int = 2
    schedule: str = "pingpong"
    intra_wg_overlap: bool = True
    mma_pv_is_rs: bool = True
    mma_qk_is_rs: bool = False
    exp2_poly_fraction: float = 0.0
    exp2_poly_degree: int = 3
    rescale_threshold: float | None = 8.0
    pack_gqa: bool = False
    ctas_per_sm: int = 1
    persistent: bool = False
    dynamic_tiles: bool = False
    epilogue: str = "tma_over_q"
    tile_order: str = "linear"
    cluster_m: int = 1
    producer_regs: int = 24

    @classmethod
    def default(cls, problem: AttentionProblem) -> FlashFwdSm90Config:
        """The config a problem gets before anything was measured for it. Always feasible where any config is.

        Shapes and structure are those that led on an H200 over the paper's grid. A causal mask makes tiles unequal:
        persistent CTAs then take them in pairs, or where few large ones make those too coarse, the hardware schedules
        them, longest first.
        """
        persistent: dict[str, Any] = {"persistent": True, "epilogue": "tma"}
        paired = persistent | {"tile_order": "paired"}
        longest_first: dict[str, Any] = {"tile_order": "longest_first"}
        if max(problem.head_dim, problem.head_dim_v) <= 64:
            return cls(tile_m=256, tile_n=64, **paired) if problem.causal else cls(tile_m=192, **persistent)
        if max(problem.head_dim, problem.head_dim_v) <= 128:
            return cls(tile_m=192, tile_n=80, **(longest_first if problem.causal else persistent))
        if problem.head_dim <= 192 and problem.head_dim_v <= 128:
            return cls(tile_n=96, **paired) if problem.causal else cls(tile_n=112, **persistent)
        return cls(tile_n=64, **(longest_first if problem.causal else {"persistent": True}))


@dataclass(frozen=True)
class FlashFwdSm100Config:
    """Knobs of ``flash_fwd_sm100``: TMA, MMA and store warps, a softmax warpgroup for each Q tile, a correction one.

    Attributes:
        tile_n: K/V rows a step. Larger amortises barriers against TMEM (tile_n columns a slot of S), shared memory and
            a softmax thread's registers (it holds a row of S).
        q_stages: Q tiles of 128 rows in flight, one's softmax under the other's MMA. Two share every K/V load; one
            leaves TMEM and shared memory to large head dims and fills small grids.
        s_stages: slots of S for each Q tile. With two, QKᵀ of the next step runs before PV of this one, under the
            softmax; with one, P's slot must first be read by PV. Overlap against TMEM columns.
        kv_stages: depth of the ring that K and V tiles share. Latency hiding against shared memory.
        mma_order: with one slot of S, "interleaved" issues PV and the next QKᵀ of a Q tile together, so that its
            softmax starts early; "grouped" issues the PVs of both Q tiles, then both QKᵀ, each reading one K/V tile.
        exp2_poly_fraction: share of the exponentials computed by a polynomial on the FMA units (packed f32x2), not by
            MUFU.
        exp2_poly_degree: degree of that polynomial: accuracy against FMA issue slots.
        exp2_poly_start: share of the row that is left to MUFU before the first polynomial, so that P's first part is
            ready sooner.
        p_store_split: share of P that is stored and signalled first, so that PV starts on it; 1 stores P in one go.
        rescale_threshold: None rescales O at every step. A number (log2 units) keeps the old row maximum until the
            new one exceeds it by more, and skips the O pass while no row of the warp needs it: TMEM traffic against a
            vote and a branch.
        reload_scores: the softmax reads S from TMEM twice, for the maximum and for the exponentials, a chunk at a time:
            TMEM reads against holding tile_n registers.
        use_2cta: a pair of CTAs issues each MMA for 256 rows, 128 of a Q tile in either; each holds half of every K
            and V tile. Shared-memory space and traffic against lock-step, and twice the rows to fill.
        softmax_regs: registers a thread of a softmax warpgroup after setmaxnreg.
        correction_regs: registers a thread of the correction warpgroup; the warps that issue TMA and MMA get the rest.
        pack_gqa: the query heads of one K/V head share a tile, so short sequences fill it and K/V is read once.
        scheduler: "single" launches a CTA a tile; "persistent" one an SM that walks over tiles, overlapping a tile's
            epilogue with the next one's loads and MMA; "clc" overlaps them too, but each CTA asks the hardware for its
            next tile (cluster launch control), which balances unequal ones.
        tile_order: "linear" walks M blocks, heads, batches; "longest_first" takes the M blocks with most keys
            first, heads in sections whose K and V fit the L2.
        epilogue: "tma" stages O in shared memory of its own for a TMA store, "tma_over_q" where Q lies, which delays
            the next tile's Q; "registers" writes each row from registers and needs no shared memory.
    """

    tile_n: int = 128
    q_stages: int = 2
    s_stages: int = 1
    kv_stages: int = 3
    mma_order: str = "interleaved"
    exp2_poly_fraction: float = 0.125
    exp2_poly_degree: int = 3
    exp2_poly_start: float = 0.25
    p_store_split: float = 0.75
    rescale_threshold: float | None = 8.0
    reload_scores: bool = False
    use_2cta: bool = False
    softmax_regs: int = 192
    correction_regs: int = 80
    pack_gqa: bool = False
    scheduler: str = "persistent"
    tile_order: str = "linear"
    epilogue: str = "tma"

    @property
    def tile_m(self) -> int:
        """Q rows a CTA."""
        return 128 * self.q_stages

    @property
    def ctas(self) -> int:
        """CTAs that work on one tile of ``ctas`` x ``tile_m`` rows."""
        return 2 if self.use_2cta else 1

    @classmethod
    def default(cls, problem: AttentionProblem) -> FlashFwdSm100Config:
        """The config a problem gets before anything was measured for it. Always feasible where any config is.

        Nothing here was measured: two Q tiles while TMEM and shared memory hold them, a ring as deep as fits, and the
        share of the polynomial that balances MUFU against FMA, less what the MMA hides (see :mod:`fa4gen.bound`). A
        pair of CTAs where its 512 rows are there and see the same keys, and head dims make shared memory short.
        """
        structure: dict[str, Any] = (
            {"scheduler": "single", "tile_order": "longest_first"}
            if problem.causal
            else {"scheduler": "persistent", "tile_order": "linear"}
        )
        widest = max(problem.head_dim, problem.head_dim_v)
        pair = problem.seqlen_q > 256 and not problem.causal
        if widest <= 64:
            # A quarter would balance MUFU and FMA, but fill nine of ten issue slots.
            return cls(kv_stages=6, exp2_poly_fraction=0.1875, **structure)
        if widest <= 128:
            return cls(use_2cta=pair, kv_stages=6 if pair else 3, exp2_poly_fraction=0.09375, **structure)
        if problem.head_dim <= 192 and problem.head_dim_v <= 128:
            structure |= {"use_2cta": pair, "kv_stages": 5 if pair else 2}
            return cls(epilogue="tma_over_q", exp2_poly_fraction=0.0625, **structure)
        one_tile: dict[str, Any] = {"q_stages": 1, "s_stages": 2, "softmax_regs": 208, "correction_regs": 112}
        return cls(tile_n=96, kv_stages=3, epilogue="tma_over_q", exp2_poly_fraction=0.0, **one_tile, **structure)


@dataclass(frozen=True)
class FlashBwdSm90Config:
    """Knobs of ``flash_bwd_sm90``: a CTA holds ``tile_n`` keys and walks over the queries that see them.

    Attributes:
        warpgroup_split: what an MMA warpgroup of the two owns. "keys": 64 keys, so P goes from registers to dV.
            "columns": half the queries of S, half the columns of dK and dV, for head dims whose dK and dV would not
            fit a warpgroup's registers; P and dS are exchanged through shared memory.
        tile_m: queries a step. More re-read K and V from shared memory less often, against registers: Sᵀ and dPᵀ take
            tile_m / 2 a thread each, beside dK and dV.
        tile_n: keys a CTA: 128, or 64 with "columns". More read Q and dO, and reduce dQ, less often.
        q_stages: depth of the ring of Q and LSE. Latency hiding against shared memory.
        do_stages: the same of dO and Δ.
        ds_stages: slots of dS, and of P where that is in shared memory. With two, a warpgroup may write its part while
            another still reads the last one.
        ds_from_rounded_p: dS takes P as rounded for dV, not in fp32: tile_m / 2 registers against a conversion and an
            error of dS that grows by half of what its own rounding is.
        mma_dk_is_rs: dS goes to the dK WGMMA from registers; else from shared memory, where dQ needs it anyway, which
            frees tile_m / 4 registers and costs shared-memory bandwidth.
        dq_swap_ab: dQᵀ = Kᵀ dSᵀ in place of dQ = dS K, which a tile_m that is no multiple of 64 needs.
        dq_store: how dQ is added to its sum: "bulk" stages it in shared memory for a bulk reduction; "registers" issues
            vector reductions, no shared memory but 4 instructions for 16 registers.
        step_order: "s_ahead" issues S of the next step before dQ of this one is done, which costs tile_m / 2 registers;
            "drained" ends a step with all its MMAs done, dQ stored under dK: room for a larger tile_m or mma_dk_is_rs.
        query_order: in which order a CTA takes its blocks of queries. "rotated": the CTAs of a head begin at different
            ones, so that they do not all add to the same part of dQ at the same time, nor find the same Q in L2.
        exp2_poly_fraction: share of the exponentials computed by a polynomial on the FMA units, not by MUFU.
        exp2_poly_degree: degree of that polynomial: accuracy against FMA issue slots.
        tile_order: "linear" walks key blocks, heads, batches; "longest_first" takes the key blocks that most queries
            see first, heads in sections whose Q and dO fit the L2.
        producer_regs: registers a thread of the warpgroup that loads and reduces; the MMA warpgroups get the rest.
    """

    warpgroup_split: str = "keys"
    tile_m: int = 64
    tile_n: int = 128
    q_stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    ds_from_rounded_p: bool = False
    mma_dk_is_rs: bool = False
    dq_swap_ab: bool = False
    dq_store: str = "bulk"
    step_order: str = "s_ahead"
    query_order: str = "ascending"
    exp2_poly_fraction: float = 0.0
    exp2_poly_degree: int = 3
    tile_order: str = "linear"
    producer_regs: int = 24

    @classmethod
    def default(cls, problem: AttentionProblem) -> FlashBwdSm90Config:
        """The config a problem gets before anything was measured for it. Always feasible where any config is."""
        if max(problem.head_dim, problem.head_dim_v) <= 64:
            # Measured on an H200 at 1 k to 16 k tokens: 2 % better under a causal mask, 3 % worse without.
            return cls(tile_m=128, ds_from_rounded_p=True, dq_store="registers" if problem.causal else "bulk")
        if max(problem.head_dim, problem.head_dim_v) <= 128:
            return cls(tile_m=64, ds_stages=1)  # measured: warpgroups in step, 2 to 9 % faster than with two slots
        return cls(warpgroup_split="columns", tile_n=64, ds_stages=1, dq_store="registers")


@dataclass(frozen=True)
class FlashBwdSm100Config:
    """Knobs of ``flash_bwd_sm100``: a CTA holds 128 keys and walks over the queries that see them, 128 a step.

    Attributes:
        use_2cta: a pair of CTAs issues each MMA for its 256 keys; each holds half of a tile of Q and dO. The dS of half
            of the queries goes to the other CTA, and each sums dQ of 64 queries over 256 keys. Half of the reductions
            and less shared-memory traffic against lock-step, and copies of K, Q and dO by columns beside those by rows.
        q_stages: depth of the rings of Q and LSE. On one CTA Sᵀ of a step comes before dK of the one before, so at
            least 2; a pair holds Q by rows and by columns, which are done at their own times.
        do_stages: the same of dO and Δ. Latency hiding against shared memory.
        dq_stages: stages of 32 columns of dQ on their way to global memory, at most; the most that divide its columns
            are used. Depth of the reductions in flight against shared memory.
        dq_at_once: a reduce thread takes its whole row of dQ into registers, which frees its place in TMEM early; else
            a stage's columns at a time.
        dq_own_columns: dQ has TMEM columns of its own; else it lies where dP does (a pair's: where half of Sᵀ does),
            and what comes there next waits until dQ was read.
        exp2_poly_fraction: share of the exponentials computed by a polynomial on the FMA units (packed f32x2), not by
            MUFU.
        exp2_poly_degree: degree of that polynomial: accuracy against FMA issue slots.
        exp2_poly_start: share of the row that is left to MUFU before the first polynomial.
        compute_regs: registers a thread of the two compute warpgroups after setmaxnreg.
        reduce_regs: registers a thread of the warpgroup that reduces dQ; the warps that issue TMA and MMA get the rest.
        tile_order: "linear" walks key blocks, heads, batches; "longest_first" takes the key blocks that most queries
            see first, "shortest_first" last, heads in sections whose Q, dO and dQ fit the L2.
    """

    use_2cta: bool = False
    q_stages: int = 2
    do_stages: int = 1
    dq_stages: int = 2
    dq_at_once: bool = False
    dq_own_columns: bool = False
    exp2_poly_fraction: float = 0.0
    exp2_poly_degree: int = 3
    exp2_poly_start: float = 0.0
    compute_regs: int = 136
    reduce_regs: int = 128
    tile_order: str = "linear"

    @property
    def ctas(self) -> int:
        """CTAs that work on ``ctas`` x ``tile_n`` keys in lock-step."""
        return 2 if self.use_2cta else 1

    @property
    def tile_m(self) -> int:
        """Queries a step."""
        return 128

    @property
    def tile_n(self) -> int:
        """Keys a CTA."""
        return 128

    @classmethod
    def default(cls, problem: AttentionProblem) -> FlashBwdSm100Config:
        """The config a problem gets before anything was measured for it. Always feasible where any config is.

        Nothing here was measured. Beyond a head dim of 64 shared memory bounds one CTA and no longer a pair (see
        :mod:`fa4gen.bound`), given keys for more than one CTA; under a causal mask a pair computes more of the
        diagonal.
        """
        # In a fixed order the CTA that comes first to a block of queries should be the first to add to its dQ.
        order = "shortest_first" if problem.deterministic else "longest_first"
        structure: dict[str, Any] = {"tile_order": order if problem.causal else "linear"}
        widest = max(problem.head_dim, problem.head_dim_v)
        if widest <= 64:
            return cls(q_stages=3, do_stages=2, dq_own_columns=True, dq_at_once=True, **structure)
        if widest <= 128 and problem.seqlen_k > (1024 if problem.causal else 128):
            return cls(use_2cta=True, q_stages=1, do_stages=1, dq_stages=1, dq_at_once=True, **structure)
        return cls(dq_at_once=True, reduce_regs=152, **structure)


# Any family's config. All have tile_m, tile_n, exp2_poly_fraction and exp2_poly_degree, those of forward families
# kv_stages, rescale_threshold and pack_gqa, too, and a classmethod default(problem).
Config = FlashFwdSm90Config | FlashFwdSm100Config | FlashBwdSm90Config | FlashBwdSm100Config


@dataclass(frozen=True)
class Family:
    """One template with its config type and search space."""

    name: str
    op: str
    archs: tuple[str, ...]
    config_type: type[Config]

    @property
    def template(self) -> str:
        """File name in ``templates/``."""
        return f"{self.name}.py.jinja"

    @property
    def search_space(self) -> str:
        """File name in ``search_spaces/``."""
        return f"{self.name}.yaml"


FAMILIES = {
    family.name: family
    for family in (
        Family("flash_fwd_sm90", "fwd", ("sm_90a",), FlashFwdSm90Config),
        Family("flash_fwd_sm100", "fwd", ("sm_100a", "sm_103a"), FlashFwdSm100Config),
        Family("flash_bwd_sm90", "bwd", ("sm_90a",), FlashBwdSm90Config),
        Family("flash_bwd_sm100", "bwd", ("sm_100a", "sm_103a"), FlashBwdSm100Config),
    )
}


def get_family(op: str, arch: str) -> Family:
    """The family that runs ``op`` on ``arch``.

    Raises:
        UsageError: there is none.
    """
    for family in FAMILIES.values():
        if family.op == op and arch in family.archs:
            return family
    raise UsageError(f"no kernel family runs op {op!r} on {arch}; families: {', '.join(FAMILIES)}")


def config_from_dict(family: str, values: dict[str, Any]) -> Config:
    """A config of ``family`` from plain data; absent knobs take the field's default.

    Raises:
        UsageError: unknown family or knob.
    """
    if family not in FAMILIES:
        raise UsageError(f"unknown kernel family {family!r}; known: {', '.join(FAMILIES)}")
    config_type = FAMILIES[family].config_type
    known = {f.name for f in fields(config_type)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"unknown knob {unknown[0]!r} for {family}; knobs: {', '.join(sorted(known))}")
    return config_type(**values)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain data, every knob in field order."""
    return asdict(config)
