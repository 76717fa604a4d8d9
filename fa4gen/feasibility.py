"""The one predicate on what can run: search, dispatch, command line and tests all ask here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fa4gen.arch import Arch
from fa4gen.config import (
    FAMILIES,
    Config,
    Family,
    FlashBwdSm90Config,
    FlashBwdSm100Config,
    FlashFwdSm90Config,
    FlashFwdSm100Config,
)
from fa4gen.problem import DTYPE_BYTES, AttentionProblem, StaticProblem

__all__ = [
    "Rejection",
    "can_implement",
    "kv_stage_bytes",
    "launch_registers",
    "mma_registers",
    "other_registers",
    "p_split",
    "padded",
    "padded_bwd",
    "padded_v",
    "smem_bytes",
    "tmem_columns",
]

ForwardConfig = FlashFwdSm90Config | FlashFwdSm100Config

# log2 of the largest finite P: 2^rescale_threshold must leave room below it.
MAX_EXPONENT = {"bf16": 127, "fp16": 15}
# Registers of a MMA thread beside S, O and P: pipeline states, descriptors, row statistics, addresses. Measured:
# ptxas spills or serialises WGMMA in nearly every config that leaves fewer.
WORKING_REGISTERS = 28
# Registers that ptxas wants beside the accumulator of a single wgmma, out of what the launch gives a thread (C7602).
WGMMA_REGISTERS = 26
RESERVED_SMEM = 1024  # of every CTA, by the system
MIN_SETMAXNREG, MAX_SETMAXNREG = 24, 240


@dataclass(frozen=True)
class Rejection:
    """Why a config cannot run. ``rule`` is a stable identifier, ``message`` a sentence, ``numbers`` those compared."""

    rule: str
    message: str
    numbers: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def can_implement(problem: AttentionProblem, config: Config, arch: Arch) -> Rejection | None:
    """None if ``config`` compiles and launches for ``problem`` on ``arch``, else the first rule it breaks."""
    family = next(family for family in FAMILIES.values() if family.config_type is type(config))
    return next(_rejections(family, problem, config, arch), None)


def _rejections(family: Family, problem: AttentionProblem, config: Any, arch: Arch) -> Iterator[Rejection]:
    if arch.name not in family.archs:
        yield Rejection("arch", f"{family.name} runs on {' and '.join(family.archs)}, not on {arch.name}")
    if problem.op != family.op:
        yield Rejection("op", f"{family.name} computes {family.op}, not {problem.op}")
    yield from _RULES[family.name](problem, config, arch)


def padded(head_dim: int) -> int:
    """Head dim as tiles hold it: rounded up to the MMA's K of 16, the rest read as zeros."""
    return -(-head_dim // 16) * 16


def padded_v(head_dim_v: int, config: Config) -> int:
    """Columns of V and O as tiles hold them: :func:`padded`, and with 2-CTA MMA two halves that are."""
    step = 16 * getattr(config, "ctas", 1)
    return -(-head_dim_v // step) * step


def padded_bwd(head_dim: int) -> int:
    """Head dim as the backward's tiles hold it: two halves, one a warpgroup, that are multiples of 16."""
    return -(-head_dim // 32) * 32


def launch_registers(threads: int, arch: Arch) -> int:
    """Registers a thread at launch with ``threads`` an SM: setmaxnreg redistributes these and no more."""
    return min(arch.registers_per_sm // threads, 256) // 8 * 8


def mma_registers(config: FlashFwdSm90Config | FlashBwdSm90Config, arch: Arch) -> int:
    """Registers a thread of an MMA warpgroup once the producer warpgroup has given its own away.

    Roles' registers x warpgroups must stay within launch registers x warpgroups: a kernel that asks for more hangs.
    """
    warpgroups = 2 if isinstance(config, FlashBwdSm90Config) else config.tile_m // 64
    ctas = getattr(config, "ctas_per_sm", 1)
    budget = launch_registers(128 * (warpgroups + 1) * ctas, arch) * (warpgroups + 1)
    return min((budget - config.producer_regs) // warpgroups // 8 * 8, MAX_SETMAXNREG)


def smem_bytes(static: StaticProblem, config: Config) -> int:
    """Dynamic shared memory of a CTA, bytes: barriers and row statistics, then operand tiles, each 1 KB aligned."""
    return sum(_kilobytes(part) for part in _SMEM_PARTS[type(config)](static, config))


def _kilobytes(size: int) -> int:
    return -(-size // 1024) * 1024


def _smem_sm90(static: StaticProblem, config: FlashFwdSm90Config) -> Iterator[int]:
    """Barriers; Q slabs (reused for O) or slabs of both; K and V rings; P."""
    size = DTYPE_BYTES[static.dtype]
    head_dim, head_dim_v = padded(static.head_dim), padded(static.head_dim_v)
    yield (2 * (config.tile_m // 64) + 4 * config.kv_stages + 5 * config.dynamic_tiles) * 8
    yield config.tile_m * (head_dim if config.epilogue == "tma" else max(head_dim, head_dim_v)) * size
    yield config.tile_m * head_dim_v * size if config.epilogue == "tma" else 0
    yield config.kv_stages * config.tile_n * head_dim * size
    yield config.kv_stages * config.tile_n * head_dim_v * size
    yield 0 if config.mma_pv_is_rs else config.tile_m * config.tile_n * size


# --- flash_fwd_sm90 ---------------------------------------------------------------------------------------------------


def _one_of(config: Config, name: str, *choices: Any) -> Iterator[Rejection]:
    value = getattr(config, name)
    if value not in choices:
        *most, last = map(str, choices)
        yield Rejection(name, f"{name} must be {', '.join(most)} or {last}, got {value!r}")


def _each_head_dim(problem: AttentionProblem) -> Iterator[Rejection]:
    for name in ("head_dim", "head_dim_v"):
        value = getattr(problem, name)
        if value % 8 or not 8 <= value <= 256:
            yield Rejection(name, f"{name} must be a multiple of 8 from 8 to 256, got {value}", {name: value})


def _flash_fwd_sm90(problem: AttentionProblem, config: FlashFwdSm90Config, arch: Arch) -> Iterator[Rejection]:
    yield from _each_head_dim(problem)
    yield from _knob_ranges(config, problem)
    yield from _registers(config, problem, arch)
    yield from _shared_memory(problem, config, arch, f"the tiles and a {config.kv_stages}-stage K/V ring")
    yield from _pack_gqa(problem, config, 64)
    if config.tile_order == "paired" and not config.persistent:
        yield Rejection("tile_order", "pairs of tiles are a persistent CTA's: tile_order paired needs persistent")
    if config.dynamic_tiles and (not config.persistent or config.tile_order == "paired" or config.cluster_m > 1):
        yield Rejection(
            "dynamic_tiles",
            "dynamic_tiles hands single tiles to persistent CTAs: it needs persistent, no paired order, no cluster",
        )
    occupied = config.ctas_per_sm * (smem_bytes(problem.static, config) + RESERVED_SMEM)
    if occupied > arch.smem_per_sm:
        yield Rejection(
            "ctas_per_sm",
            f"{config.ctas_per_sm} CTAs an SM need {occupied} B of shared memory, {arch.name} has {arch.smem_per_sm}",
            {"needed": occupied, "available": arch.smem_per_sm},
        )
    if config.cluster_m > 1 and (problem.causal or config.tile_order != "linear"):
        yield Rejection(
            "cluster",
            "the CTAs of a cluster share K/V loads, so they must walk the same keys: no causal mask, linear tile order",
        )


def _knob_ranges(config: FlashFwdSm90Config, problem: AttentionProblem) -> Iterator[Rejection]:
    if config.tile_m not in (64, 128, 192, 256):
        yield Rejection("tile_m", f"tile_m must be 64, 128, 192 or 256 (64 a warpgroup), got {config.tile_m}")
    if config.tile_n % 16 or not 16 <= config.tile_n <= 256:
        yield Rejection("tile_n", f"tile_n must be a multiple of 16 from 16 to 256, got {config.tile_n}")
    if not 1 <= config.kv_stages <= 8:
        yield Rejection("kv_stages", f"kv_stages must be 1 to 8, got {config.kv_stages}")
    yield from _one_of(config, "schedule", "cooperative", "pingpong")
    if config.schedule == "pingpong" and config.tile_m < 128:
        yield Rejection("schedule", f"pingpong needs two warpgroups, so tile_m >= 128, got {config.tile_m}")
    yield from _one_of(config, "cluster_m", 1, 2, 4)
    yield from _one_of(config, "ctas_per_sm", 1, 2)
    yield from _one_of(config, "epilogue", "tma", "tma_over_q")
    yield from _common_knobs(config, problem)


def _common_knobs(config: ForwardConfig, problem: AttentionProblem) -> Iterator[Rejection]:
    orders = ("linear", "longest_first", *["paired"] * isinstance(config, FlashFwdSm90Config))
    if config.tile_order not in orders:
        yield Rejection("tile_order", f"tile_order must be one of {', '.join(orders)}, got {config.tile_order!r}")
    yield from _exp2_knobs(config)
    threshold = config.rescale_threshold
    # Half of the exponent range is left to the row sums of P that are rounded to its type.
    if threshold is not None and not 0.0 <= threshold <= MAX_EXPONENT[problem.dtype] / 1.5:
        yield Rejection(
            "rescale_threshold",
            f"rescale_threshold must be None or 0 to {MAX_EXPONENT[problem.dtype] / 1.5:g}: P reaches 2^threshold "
            f"and must stay inside {problem.dtype}, got {threshold}",
        )


def _exp2_knobs(config: Config) -> Iterator[Rejection]:
    if not 0.0 <= config.exp2_poly_fraction <= 1.0:
        yield Rejection("exp2_poly_fraction", f"exp2_poly_fraction must be 0 to 1, got {config.exp2_poly_fraction}")
    yield from _one_of(config, "exp2_poly_degree", 3, 4, 5)


def _exp2_start(config: FlashFwdSm100Config | FlashBwdSm100Config) -> Iterator[Rejection]:
    if not 0.0 <= config.exp2_poly_start <= 1.0 - config.exp2_poly_fraction:
        yield Rejection(
            "exp2_poly_start",
            f"exp2_poly_start must leave room for the polynomial's share, 0 to {1 - config.exp2_poly_fraction:g}, "
            f"got {config.exp2_poly_start}",
        )


def _producer_registers(config: FlashFwdSm90Config | FlashBwdSm90Config) -> Iterator[Rejection]:
    if config.producer_regs % 8 or not MIN_SETMAXNREG <= config.producer_regs <= 128:
        yield Rejection(
            "producer_regs", f"producer_regs must be a multiple of 8 from 24 to 128, got {config.producer_regs}"
        )


def _shared_memory(problem: AttentionProblem, config: Config, arch: Arch, what: str) -> Iterator[Rejection]:
    needed = smem_bytes(problem.static, config)
    if needed > arch.smem_per_cta:
        yield Rejection(
            "smem",
            f"{what} need {needed} B of shared memory, {arch.name} has {arch.smem_per_cta}",
            {"needed": needed, "available": arch.smem_per_cta},
        )


def _pack_gqa(problem: AttentionProblem, config: ForwardConfig, most: int) -> Iterator[Rejection]:
    """``most``: rows of Q that one TMA box loads, which must hold whole groups of heads."""
    if config.pack_gqa and (problem.gqa_ratio == 1 or most % problem.gqa_ratio):
        yield Rejection(
            "pack_gqa",
            f"pack_gqa needs a power of two from 2 to {most} query heads per K/V head, got {problem.gqa_ratio}",
            {"gqa_ratio": problem.gqa_ratio},
        )


def _registers(config: FlashFwdSm90Config, problem: AttentionProblem, arch: Arch) -> Iterator[Rejection]:
    yield from _producer_registers(config)
    available = mma_registers(config, arch)
    scores = config.tile_n // 2
    # P, half as wide, lives beside S unless it goes out through shared memory. The polynomial's temporaries then keep
    # it in registers for a while all the same.
    probabilities = config.tile_n // 4 if config.mma_pv_is_rs else 0
    if config.exp2_poly_fraction > 0 and not config.mma_pv_is_rs:
        probabilities = config.tile_n // 4 + 8
    output = padded(problem.head_dim_v) // 2
    queries = padded(problem.head_dim) // 4 if config.mma_qk_is_rs else 0
    needed = scores + probabilities + output + queries + WORKING_REGISTERS
    if needed > available:
        yield Rejection(
            "registers",
            f"S, P, O{', Q' if queries else ''} and {WORKING_REGISTERS} working registers need {needed} a thread, "
            f"an MMA warpgroup of this split has {available}",
            {"needed": needed, "available": available},
        )
    at_launch = launch_registers(128 * (config.tile_m // 64 + 1) * config.ctas_per_sm, arch)
    one_wgmma = max(scores, output) + WGMMA_REGISTERS
    if one_wgmma > at_launch:
        yield Rejection(
            "wgmma_registers",
            f"one WGMMA needs {one_wgmma} registers a thread; a launch of {config.tile_m // 64 + 1} warpgroups "
            f"has {at_launch}",
            {"needed": one_wgmma, "available": at_launch},
        )


# --- flash_fwd_sm100 --------------------------------------------------------------------------------------------------

# Measured, like WORKING_REGISTERS: what ptxas needs to spill nothing. Of a softmax thread beside its row of S: sums,
# packed P on its way to TMEM, statistics, addresses.
SOFTMAX_WORKING_REGISTERS = 48
# With the polynomial and more columns than this in registers, ptxas spills whatever it is given.
MAX_POLYNOMIAL_COLUMNS = 128
# Coefficients of the polynomial, one for each half of a pair, and its temporaries, by degree.
POLYNOMIAL_REGISTERS = {3: 16, 4: 28, 5: 32}
# A row that is read a chunk at a time: ptxas starts so many loads at once that they hold up to this many columns, and
# beside the polynomial the whole row where it is given registers for more.
RELOADED_COLUMNS = 160
# Of the warps that load, issue MMAs and store, with head dims above 128: more MMAs, boxes and addresses.
MIN_OTHER_REGISTERS_WIDE = 48
# Of the correction warpgroup: a chunk of O, addresses of shared memory.
MIN_CORRECTION_REGISTERS = 64


def p_split(config: FlashFwdSm100Config) -> int:
    """Columns of P, whole K steps of the MMA, that are stored and signalled first."""
    return max(round(config.tile_n * config.p_store_split / 16), 1) * 16


def kv_stage_bytes(static: StaticProblem, config: FlashFwdSm100Config) -> int:
    """A stage of the ring that K and V share, with the alignment that the widest swizzle wants.

    A CTA of a pair holds half of K's rows, or of V's columns.
    """
    widest = max(padded(static.head_dim), padded_v(static.head_dim_v, config))
    return _kilobytes(config.tile_n * widest // config.ctas * DTYPE_BYTES[static.dtype])


def tmem_columns(static: StaticProblem, config: FlashFwdSm100Config) -> int:
    """TMEM columns in use: every slot of S, in which P lies too, and O of every Q tile."""
    return config.q_stages * (config.s_stages * config.tile_n + padded_v(static.head_dim_v, config))


def other_registers(config: FlashFwdSm100Config, arch: Arch) -> int:
    """Registers a thread of the load, MMA and store warps: what the softmax and correction warpgroups leave.

    Roles' registers x warpgroups must stay within launch registers x warpgroups, see :func:`mma_registers`.
    """
    warpgroups = config.q_stages + 2
    launch = launch_registers(128 * warpgroups, arch)
    left = launch * warpgroups - config.q_stages * config.softmax_regs - config.correction_regs
    return min(left // 8 * 8, launch)


def _smem_sm100(static: StaticProblem, config: FlashFwdSm100Config) -> Iterator[int]:
    """Barriers, the next tile, TMEM address and row statistics; Q; the K/V ring; O if it is staged beside Q."""
    size = DTYPE_BYTES[static.dtype]
    head_dim, head_dim_v = padded(static.head_dim), padded_v(static.head_dim_v, config)
    slots = config.q_stages * config.s_stages
    a_slot = 3 + (p_split(config) < config.tile_n)
    a_q_tile = 3 + (config.s_stages == 2) + (config.epilogue != "registers")
    if config.scheduler != "single":
        a_q_tile += 2 + (config.epilogue == "tma")
    barriers = slots * a_slot + config.q_stages * a_q_tile + 2 * config.kv_stages
    start = barriers * 8
    if config.scheduler == "clc":
        start = -(-(start + 2 * 8) // 16) * 16 + 16
    yield start + 4 + (slots + config.q_stages) * 128 * 4
    yield config.tile_m * (max(head_dim, head_dim_v) if config.epilogue == "tma_over_q" else head_dim) * size
    yield config.kv_stages * kv_stage_bytes(static, config)
    yield config.tile_m * head_dim_v * size if config.epilogue == "tma" else 0


def _flash_fwd_sm100(problem: AttentionProblem, config: FlashFwdSm100Config, arch: Arch) -> Iterator[Rejection]:
    d, dv = problem.head_dim, problem.head_dim_v
    if d % 8 or dv % 8 or not 8 <= d <= 256 or not 8 <= dv <= 256:
        yield Rejection("head_dim", f"head dims must be multiples of 8 from 8 to 256, got {d} and {dv}")
    for name, choices in (
        ("q_stages", (1, 2)),
        ("s_stages", (1, 2)),
        ("mma_order", ("interleaved", "grouped")),
        ("scheduler", ("single", "persistent", "clc")),
        ("epilogue", ("tma", "tma_over_q", "registers")),
    ):
        value = getattr(config, name)
        if value not in choices:
            yield Rejection(name, f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
    if config.tile_n % 16 or not 32 <= config.tile_n <= 256:
        yield Rejection("tile_n", f"tile_n must be a multiple of 16 from 32 to 256, got {config.tile_n}")
    # N of a M = 256 MMA is a multiple of 32: 16 rows of K in either CTA.
    if config.use_2cta and config.tile_n % 32:
        yield Rejection("use_2cta", f"use_2cta halves tile_n, which must be a multiple of 32, got {config.tile_n}")
    # A step holds a K and a V tile at once.
    if not 2 <= config.kv_stages <= 16:
        yield Rejection("kv_stages", f"kv_stages must be 2 to 16, got {config.kv_stages}")
    if not 0.0 < config.p_store_split <= 1.0:
        yield Rejection("p_store_split", f"p_store_split must be above 0, at most 1, got {config.p_store_split}")
    yield from _exp2_start(config)
    yield from _common_knobs(config, problem)
    yield from _register_split(problem, config, arch)
    columns = tmem_columns(problem.static, config)
    if columns > arch.tmem_columns:
        yield Rejection(
            "tmem",
            f"S and O of {config.q_stages} Q tiles need {columns} TMEM columns, {arch.name} has {arch.tmem_columns}",
            {"needed": columns, "available": arch.tmem_columns},
        )
    yield from _shared_memory(problem, config, arch, f"the tiles and a {config.kv_stages}-stage K/V ring")
    yield from _pack_gqa(problem, config, 128)


def _register_split(problem: AttentionProblem, config: FlashFwdSm100Config, arch: Arch) -> Iterator[Rejection]:
    launch = launch_registers(128 * (config.q_stages + 2), arch)
    # setmaxnreg.inc may not ask for less than a thread has.
    for name, least in (("softmax_regs", launch), ("correction_regs", MIN_CORRECTION_REGISTERS)):
        value = getattr(config, name)
        if value % 8 or not least <= value <= MAX_SETMAXNREG:
            yield Rejection(
                name, f"{name} must be a multiple of 8 from {least} to {MAX_SETMAXNREG}, got {value}", {name: value}
            )
    left = other_registers(config, arch)
    least = MIN_SETMAXNREG if max(problem.head_dim, problem.head_dim_v) <= 128 else MIN_OTHER_REGISTERS_WIDE
    if left < least:
        yield Rejection(
            "registers",
            f"softmax and correction leave {left} registers a thread to the other warps, which need {least}",
            {"needed": least, "available": left},
        )
    needed = softmax_registers(config)
    if needed > config.softmax_regs:
        yield Rejection(
            "registers",
            f"a row of S and what works on it need {needed} registers a softmax thread, "
            f"softmax_regs is {config.softmax_regs}",
            {"needed": needed, "available": config.softmax_regs},
        )
    if config.exp2_poly_fraction and not config.reload_scores and config.tile_n > MAX_POLYNOMIAL_COLUMNS:
        yield Rejection(
            "registers",
            f"with a polynomial exp2, tile_n above {MAX_POLYNOMIAL_COLUMNS} needs reload_scores, got {config.tile_n}",
            {"tile_n": config.tile_n},
        )


def softmax_registers(config: FlashFwdSm100Config) -> int:
    """Registers that a softmax thread needs."""
    if config.reload_scores:
        few = config.softmax_regs <= RELOADED_COLUMNS + SOFTMAX_WORKING_REGISTERS
        held = RELOADED_COLUMNS if few or not config.exp2_poly_fraction else config.tile_n
        return min(config.tile_n, held) + SOFTMAX_WORKING_REGISTERS
    polynomial = POLYNOMIAL_REGISTERS.get(config.exp2_poly_degree, 0) if config.exp2_poly_fraction else 0
    return config.tile_n + SOFTMAX_WORKING_REGISTERS + polynomial


# --- flash_bwd_sm90 ---------------------------------------------------------------------------------------------------

# Measured, like WORKING_REGISTERS: what ptxas needs beside accumulators and operands in registers.
BWD_WORKING_REGISTERS = 28


def _smem_bwd_sm90(static: StaticProblem, config: FlashBwdSm90Config) -> Iterator[int]:
    """Barriers, LSE and Δ; K; V; the rings of Q and dO; slots of dS, and of P if exchanged; dQ in fp32 if staged."""
    size = DTYPE_BYTES[static.dtype]
    head_dim, head_dim_v = padded_bwd(static.head_dim), padded_bwd(static.head_dim_v)
    stages = config.q_stages + config.do_stages
    exchanged = 2 if config.warpgroup_split == "columns" else 1
    yield (2 + 2 * stages + 2 * exchanged * config.ds_stages) * 8 + 120 + stages * config.tile_m * 4
    yield config.tile_n * head_dim * size
    yield config.tile_n * head_dim_v * size
    yield config.q_stages * config.tile_m * head_dim * size
    yield config.do_stages * config.tile_m * head_dim_v * size
    yield exchanged * config.ds_stages * config.tile_m * config.tile_n * size
    yield config.tile_m * head_dim * 4 if config.dq_store == "bulk" else 0


def backward_registers(static: StaticProblem, config: FlashBwdSm90Config) -> int:
    """Registers that a MMA thread needs: dK and dV beside what is live or in flight at the worse of two moments.

    P is computed: S, dP and rounded P, which takes the place of S if that is not used again. Or dQ and, unless drained,
    the next S are in flight, while dK still reads dS in registers.
    """
    halves = 2 if config.warpgroup_split == "columns" else 1
    scores, operand = config.tile_m // 2 // halves, config.tile_m // 4 // halves
    dq = config.tile_m * padded_bwd(static.head_dim) // 256
    softmax = 2 * scores + (0 if config.ds_from_rounded_p else operand)
    in_flight = dq + (scores if config.step_order == "s_ahead" else 0)
    in_flight += 2 * operand if config.mma_dk_is_rs else 0  # measured: ptxas keeps dS twice
    accumulators = (padded_bwd(static.head_dim) + padded_bwd(static.head_dim_v)) // 2 // halves
    return accumulators + max(softmax, in_flight) + BWD_WORKING_REGISTERS


def _flash_bwd_sm90(problem: AttentionProblem, config: FlashBwdSm90Config, arch: Arch) -> Iterator[Rejection]:
    yield from _each_head_dim(problem)
    yield from _one_of(config, "warpgroup_split", "keys", "columns")
    yield from _one_of(config, "dq_store", "bulk", "registers")
    yield from _one_of(config, "step_order", "s_ahead", "drained")
    yield from _one_of(config, "query_order", "ascending", "rotated")
    if config.query_order == "rotated" and problem.deterministic:
        yield Rejection("query_order", "a deterministic backward adds to dQ in the order of keys: it needs ascending")
    by_columns = config.warpgroup_split == "columns"
    if config.tile_n != (64 if by_columns else 128):
        yield Rejection("tile_n", f"tile_n must be 128, or 64 if warpgroups split columns, got {config.tile_n}")
    if by_columns and (config.mma_dk_is_rs or config.dq_swap_ab):
        yield Rejection("warpgroup_split", "warpgroups that split columns exchange dS: no mma_dk_is_rs, no dq_swap_ab")
    swappable = config.tile_m % 16 == 0 and 16 <= config.tile_m <= 256 and padded_bwd(problem.head_dim) == 128
    if not (swappable if config.dq_swap_ab else config.tile_m in (64, 128)):
        yield Rejection(
            "tile_m",
            "tile_m must be 64 or 128, or with dq_swap_ab, which needs a head dim of 97 to 128, a multiple of 16, "
            f"got {config.tile_m}",
        )
    # S of the next step is issued before dK of this one has read Q, unless drained.
    for name, least in (("q_stages", 2 if config.step_order == "s_ahead" else 1), ("do_stages", 1), ("ds_stages", 1)):
        value = getattr(config, name)
        if not least <= value <= 4:
            yield Rejection(name, f"{name} must be {least} to 4, got {value}")
    yield from _one_of(config, "tile_order", "linear", "longest_first")
    yield from _exp2_knobs(config)
    yield from _producer_registers(config)
    needed, available = backward_registers(problem.static, config), mma_registers(config, arch)
    if needed > available:
        yield Rejection(
            "registers",
            f"accumulators, operands and {BWD_WORKING_REGISTERS} working registers need {needed} a thread, "
            f"an MMA warpgroup has {available}",
            {"needed": needed, "available": available},
        )
    yield from _shared_memory(problem, config, arch, "K, V, the rings of Q, dO and dS, and dQ")


# --- flash_bwd_sm100 --------------------------------------------------------------------------------------------------

# Two compute warpgroups, a reduce warpgroup, and one of which two warps load and issue MMAs.
BWD_THREADS = 512
# Measured, like WORKING_REGISTERS: of a compute thread beside P, half a row of Sᵀ; of a reduce thread, and of one of
# the load and MMA warps, by CTAs.
COMPUTE_WORKING_REGISTERS = 64
BWD_POLYNOMIAL_REGISTERS = 16
# Of a reduce thread beside a whole row of dQ.
DQ_WORKING_REGISTERS = 24
MIN_REDUCE_REGISTERS = {1: 128, 2: 112}
MIN_ISSUE_REGISTERS = {1: 88, 2: 112}


def dq_chunk(static: StaticProblem, config: FlashBwdSm100Config) -> int:
    """Columns of dQ that one reduction adds: 128 bytes of fp32, or 64. A thread has dQ's columns, or half of them."""
    return 16 if padded_v(static.head_dim, config) // config.ctas % 32 else 32


def dq_stages_used(static: StaticProblem, config: FlashBwdSm100Config) -> int:
    """Stages of dQ that a step fills a whole number of times."""
    chunks = padded_v(static.head_dim, config) // config.ctas // dq_chunk(static, config)
    return max(n for n in range(1, min(config.dq_stages, chunks) + 1) if chunks % n == 0)


def bwd_tmem_columns(static: StaticProblem, config: FlashBwdSm100Config) -> int:
    """TMEM columns in use: Sᵀ, which P overwrites, dPᵀ, which dS overwrites, dV, dK, and of dQ what has no place in
    dPᵀ's or, with ``use_2cta``, in half of Sᵀ's."""
    d, dv = padded_v(static.head_dim, config), padded_v(static.head_dim_v, config)
    shared = 0 if config.dq_own_columns else config.tile_m // config.ctas
    return 2 * config.tile_m + dv + d + max(d // config.ctas - shared, 0)


def bwd_other_registers(config: FlashBwdSm100Config, arch: Arch) -> int:
    """Registers a thread of the load and MMA warps: what the compute and reduce warpgroups leave."""
    launch = launch_registers(BWD_THREADS, arch)
    return min((4 * launch - 2 * config.compute_regs - config.reduce_regs) // 8 * 8, launch)


def _smem_bwd_sm100(static: StaticProblem, config: FlashBwdSm100Config) -> Iterator[int]:
    """Barriers, TMEM address, LSE and Δ; K; V; the rings of Q and dO; dS; stages of dQ in fp32.

    A CTA of a pair: half of Q and dO by rows and half by columns, K by columns too, and the dS that it sends.
    """
    size, m, n = DTYPE_BYTES[static.dtype], config.tile_m, config.tile_n
    d, dv = padded_v(static.head_dim, config), padded_v(static.head_dim_v, config)
    stages = config.q_stages + config.do_stages
    barriers = (13 + 6 * stages) if config.use_2cta else (10 + 4 * stages)
    yield -(-(barriers * 8 + 4) // 128) * 128 + stages * m * 4
    yield n * d * size
    yield n * dv * size
    for columns, depth in ((d, config.q_stages), (dv, config.do_stages)):
        for _ in range(config.ctas):
            yield depth * m * columns // config.ctas * size
    yield m * n * size
    if config.use_2cta:
        yield n * d * size
        yield m * n // 2 * size
    yield dq_stages_used(static, config) * m * dq_chunk(static, config) * 4


def _flash_bwd_sm100(problem: AttentionProblem, config: FlashBwdSm100Config, arch: Arch) -> Iterator[Rejection]:
    d, dv = problem.head_dim, problem.head_dim_v
    if d % 8 or dv % 8 or not 8 <= d <= 256 or not 8 <= dv <= 256:
        yield Rejection("head_dim", f"head dims must be multiples of 8 from 8 to 256, got {d} and {dv}")
    for name, least, most in (("q_stages", 3 - config.ctas, 4), ("do_stages", 1, 4), ("dq_stages", 1, 4)):
        value = getattr(config, name)
        if not least <= value <= most:
            yield Rejection(name, f"{name} must be {least} to {most}, got {value}")
    yield from _one_of(config, "tile_order", "linear", "longest_first", "shortest_first")
    yield from _exp2_knobs(config)
    yield from _exp2_start(config)
    columns = bwd_tmem_columns(problem.static, config)
    if columns > arch.tmem_columns:
        yield Rejection(
            "tmem",
            f"Sᵀ, dPᵀ, dV, dK and dQ need {columns} TMEM columns, {arch.name} has {arch.tmem_columns}",
            {"needed": columns, "available": arch.tmem_columns},
        )
    yield from _shared_memory(problem, config, arch, "K, V, the rings of Q and dO, dS and dQ")
    yield from _bwd_register_split(problem, config, arch)


def _bwd_register_split(problem: AttentionProblem, config: FlashBwdSm100Config, arch: Arch) -> Iterator[Rejection]:
    polynomial = BWD_POLYNOMIAL_REGISTERS if config.exp2_poly_fraction else 0
    compute = config.tile_m // 2 + COMPUTE_WORKING_REGISTERS + polynomial
    reduce = MIN_REDUCE_REGISTERS[config.ctas]
    if config.dq_at_once:
        reduce = max(reduce, padded_v(problem.head_dim, config) // config.ctas + DQ_WORKING_REGISTERS)
    for name, least in (("compute_regs", compute), ("reduce_regs", reduce)):
        value = getattr(config, name)
        if value % 8 or not least <= value <= MAX_SETMAXNREG:
            yield Rejection(
                name,
                f"{name} must be a multiple of 8 from {least} to {MAX_SETMAXNREG}, got {value}",
                {"needed": least, "available": value},
            )
    left, least = bwd_other_registers(config, arch), MIN_ISSUE_REGISTERS[config.ctas]
    if left < least:
        yield Rejection(
            "registers",
            f"compute and reduce leave {left} registers a thread to the other warps, which need {least}",
            {"needed": least, "available": left},
        )


_SMEM_PARTS: dict[type[Config], Callable[[StaticProblem, Any], Iterator[int]]] = {
    FlashFwdSm90Config: _smem_sm90,
    FlashFwdSm100Config: _smem_sm100,
    FlashBwdSm90Config: _smem_bwd_sm90,
    FlashBwdSm100Config: _smem_bwd_sm100,
}

_RULES: dict[str, Callable[[AttentionProblem, Any, Arch], Iterator[Rejection]]] = {
    "flash_fwd_sm90": _flash_fwd_sm90,
    "flash_fwd_sm100": _flash_fwd_sm100,
    "flash_bwd_sm90": _flash_bwd_sm90,
    "flash_bwd_sm100": _flash_bwd_sm100,
}
