"""From the cycles of a tile to those of a launch: which SM runs which tiles, in the kernel's own order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from fa4gen.bound import steps_per_tile
from fa4gen.config import Config, FlashFwdSm90Config
from fa4gen.problem import DTYPE_BYTES, AttentionProblem

__all__ = ["cluster_size", "is_persistent", "is_static", "makespan", "tile_steps", "turns"]

# blocks/scheduler.py: K and V of the heads that longest-first walks together.
_L2_SECTION_BYTES = 16 << 20


def cluster_size(config: Config) -> int:
    """CTAs of a cluster: those that share loads, or a pair's MMAs."""
    return getattr(config, "cluster_m", 1) * getattr(config, "ctas", 1)


def is_persistent(config: Config) -> bool:
    """Whether a CTA runs several tiles."""
    return getattr(config, "persistent", getattr(config, "scheduler", "single") != "single")


def is_static(config: Config) -> bool:
    """Whether a persistent CTA's tiles are known beforehand: dealt out in turn."""
    return is_persistent(config) and not getattr(config, "dynamic_tiles", getattr(config, "scheduler", "") == "clc")


def tile_steps(problem: AttentionProblem, config: Config) -> list[float]:
    """K/V steps of every tile in the order of its index: at least one a tile.

    "linear": M blocks innermost; a static persistent kernel of sm_90 starts one further in each head. "longest_first":
    sections of heads, in each the M blocks from the last to the first. "paired": of each head the last M block and the
    first, the last but one and the second, and so on.
    """
    blocks = [max(steps, 1) for steps in steps_per_tile(problem, config)]
    cluster = cluster_size(config)
    blocks += [blocks[-1]] * (-len(blocks) % cluster)
    rows = problem.batch * (problem.heads_kv if getattr(config, "pack_gqa", False) else problem.heads)
    if config.tile_order == "linear":
        rotated = isinstance(config, FlashFwdSm90Config) and is_static(config)
        starts = range(rows) if rotated else [0] * rows
        return [blocks[(start + i) % len(blocks)] for start in starts for i in range(len(blocks))]
    if config.tile_order == "paired":
        return [block for pair in _pairs(blocks) for block in pair] * rows
    head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype]
    section = max(_L2_SECTION_BYTES // head_bytes, 1) * (1 if getattr(config, "pack_gqa", False) else problem.gqa_ratio)
    steps: list[float] = []
    for first in range(0, rows, section):
        heads = min(section, rows - first)
        steps += [block for block in reversed(blocks) for _ in range(heads)]
    return steps


def turns(problem: AttentionProblem, config: Config) -> list[list[float]]:
    """K/V steps of the tiles that a CTA takes at a time: one, or a pair. A cluster's CTAs take theirs together, and all
    need as long as the longest."""
    steps = tile_steps(problem, config)
    if config.tile_order == "paired":
        blocks = len(steps_per_tile(problem, config))
        return [pair for first in range(0, len(steps), blocks) for pair in _grouped(steps[first : first + blocks])]
    cluster = cluster_size(config)
    return [[max(steps[at : at + cluster])] for at in range(0, len(steps), cluster)]


def _pairs(blocks: Sequence[float]) -> list[list[float]]:
    """The last with the first, the last but one with the second, …; the middle one of an odd number alone."""
    half = len(blocks) // 2
    pairs = [[blocks[-1 - i], blocks[i]] for i in range(half)]
    return pairs + ([[blocks[half]]] if len(blocks) % 2 else [])


def _grouped(steps: Sequence[float]) -> list[list[float]]:
    return [list(steps[at : at + 2]) for at in range(0, len(steps), 2)]


def makespan(costs: Sequence[float], units: int, static: bool) -> float:
    """When the last of ``units`` is done with ``costs``: dealt out in turn if ``static``, else to whoever is free."""
    if static:
        return max(math.fsum(costs[unit::units]) for unit in range(min(units, len(costs))))
    free = [0.0] * units
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)
