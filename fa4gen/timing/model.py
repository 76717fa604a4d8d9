"""Predicts a compiled variant's time: simulates a few CTAs, scales them to the problem, and sets the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fa4gen.arch import Arch, Device, get_arch
from fa4gen.artifact_cache import Artifact
from fa4gen.bound import steps_per_tile
from fa4gen.config import Config
from fa4gen.problem import AttentionProblem
from fa4gen.timing.constants import Constants
from fa4gen.timing.grid import cluster_size, is_persistent, is_static, makespan, tile_steps, turns
from fa4gen.timing.path import PathFinder
from fa4gen.timing.sass_decode import decode
from fa4gen.timing.simulator import SmProgram, SmResult, prepare, simulate
from fa4gen.timing.trace import trace

__all__ = [
    "MEMBERS",
    "UNITS",
    "VERSION",
    "Prediction",
    "Sample",
    "TracedVariant",
    "ensemble",
    "predict",
    "trace_variant",
]

# K/V steps of the simulated CTAs: two lengths give the fixed cost and the slope, beyond the pipeline's start.
SHORT, LONG = 6, 14
# Of an ensemble: what its members' constants differ in, and by how much (standard deviation of the logarithm).
JITTERED = ("mbarrier", "named_barrier", "mma_start", "load_latency", "fresh_latency", "contention", "mufu_contention")
JITTER = 0.08
MEMBERS = 7
# Units of an SM whose busy cycles are counted: tensor cores, shared memory as their operands need it, issue slots and
# pipes of the sub-partitions.
UNITS = ("tensor", "smem", "issue", "fma", "alu", "mufu", "lsu", "uniform", "control", "tmem")
_CYCLES, _ISSUED = 0, 1
VERSION = 2  # of what is simulated; goes with the constants' digest into every prediction's provenance


@dataclass(frozen=True)
class Sample:
    """One simulated CTA: ``tiles`` tiles of ``steps`` K/V steps each."""

    tiles: int
    steps: float
    program: SmProgram


@dataclass(frozen=True)
class TracedVariant:
    """What the model knows of a variant, whatever the constants.

    ``samples``: CTAs of one tile, the first two with the same end of a causal mask. ``two_tiles``: of a persistent
    kernel, a CTA with the steps of the first sample in each of its tiles.
    """

    arch: Arch
    config: Config
    samples: tuple[Sample, ...]
    two_tiles: Sample | None


@dataclass(frozen=True)
class Prediction:
    """``step``, ``tile`` and ``start``: cycles a K/V step, a tile beside its steps, and a CTA beside its tiles.

    ``instructions``: warp instructions of the launch; ``busy``: the share of ``cycles`` that each unit of the mean SM
    is busy, and ``step_busy`` of ``step`` alone, by the names in :data:`UNITS`; ``active``: the share of ``cycles`` in
    which the mean SM has a CTA; ``clock_ghz``: what the chip is taken to run at.
    """

    microseconds: float
    cycles: float
    step: float
    tile: float
    start: float
    instructions: float
    busy: dict[str, float]
    step_busy: dict[str, float]
    active: float
    clock_ghz: float

    @property
    def unit(self) -> str:
        """The unit that is busiest in a step: what bounds the kernel once nothing waits."""
        return max(self.step_busy, key=self.step_busy.__getitem__)

    @property
    def waiting(self) -> float:
        """Share of a step in which :attr:`unit` is idle: lost to dependencies and to other units' queues."""
        return max(1 - self.step_busy[self.unit], 0.0)


def trace_variant(artifact: Artifact, problem: AttentionProblem, config: Config) -> TracedVariant:
    """Emulates a few CTAs of a compiled variant and finds their SASS. ``problem`` gives what was compiled in.

    Raises:
        EmulatorError: the emulator stops.
        Fa4genError: the SASS cannot be read, or its paths do not match the trace.
    """
    (kernel,) = decode(artifact.cubin_path)
    finder = PathFinder(kernel)
    persistent = is_persistent(config)

    def simulated(tiles: int, seqlen_k: int) -> Sample:
        small = _small(problem, config, tiles * (_ctas_per_sm(config) if persistent else 1), seqlen_k)
        traced = trace(artifact, small, cluster_size(config), config)
        keys = [tuple((t.kind, t.site) for t in tokens) for tokens in traced.warps]
        # Those that went through most of the code first: they tell loops apart for the others.
        roles = sorted(dict(zip(keys, traced.warps, strict=True)).items(), key=lambda role: -len(set(role[0])))
        paths = {key: finder.find(tokens) for key, tokens in roles}
        program = prepare(kernel, traced, [paths[key] for key in keys], _ctas_per_sm(config))
        each = 1 if getattr(config, "pack_gqa", False) or not persistent else problem.gqa_ratio
        return Sample(tiles * each if persistent else 1, max(steps_per_tile(small, config)), program)

    short, long = SHORT * config.tile_n, LONG * config.tile_n
    if problem.causal:
        # The last 64 rows end within a tile and begin before it: every warpgroup takes the masked steps as well.
        simulated(1, 4 * config.tile_n + 32)
        rows = config.tile_m * getattr(config, "ctas", 1)
        short = math.ceil(short / rows) * rows
        period = math.lcm(rows, config.tile_n)
        long = short + math.ceil((LONG - SHORT) * config.tile_n / period) * period
    samples = [simulated(1, short), simulated(1, long)]
    samples += [simulated(1, short + rows)] if problem.causal else []
    return TracedVariant(get_arch(artifact.arch), config, tuple(samples), simulated(2, short) if persistent else None)


def _ctas_per_sm(config: Config) -> int:
    return getattr(config, "ctas_per_sm", 1)


def _small(problem: AttentionProblem, config: Config, tiles: int, seqlen_k: int) -> AttentionProblem:
    """A problem of the same variant with ``tiles`` K/V heads of one M block (or a cluster of them), whose last row is a
    causal problem's last as well."""
    ratio = problem.gqa_ratio
    rows = config.tile_m * cluster_size(config) // (ratio if getattr(config, "pack_gqa", False) else 1)
    return replace(problem, batch=1, heads=tiles * ratio, heads_kv=tiles, seqlen_q=max(rows, 1), seqlen_k=seqlen_k)


def predict(traced: TracedVariant, problem: AttentionProblem, device: Device, constants: Constants) -> Prediction:
    """The time of ``problem`` on ``device``, an uncalibrated chip unless ``constants`` were fitted on it.

    Raises:
        Stuck: the simulated CTA deadlocks.
    """
    config = traced.config
    persistent = traced.two_tiles is not None
    of_step, of_tile, of_start = _shares(traced, constants)
    step, tile, start = (float(share[_CYCLES]) for share in (of_step, of_tile, of_start))
    if not persistent:
        tile += constants.cta_launch
    steps = tile_steps(problem, config)
    cluster = cluster_size(config)
    units = device.sm_count * _ctas_per_sm(config) // cluster
    costs = [sum(tile + step * length for length in turn) for turn in turns(problem, config)]
    cycles = start + makespan(costs, units, is_static(config))
    ctas = min(units, len(costs)) * cluster if persistent else len(steps)
    work = of_step * sum(steps) + of_tile * len(steps) + of_start * ctas
    instructions = float(work[_ISSUED])
    work /= _ctas_per_sm(config)  # of the simulated SM, which ran so many
    busy = _by_unit(work / device.sm_count, cycles)
    clock = min(device.clock_mhz / 1000, constants.clock_base - constants.clock_slope * busy["tensor"])
    hbm_us = problem.hbm_bytes / device.hbm_bytes_per_s * 1e6
    microseconds = constants.launch_us + max(cycles / clock / 1000, hbm_us)
    of_one = _by_unit(of_step, step)
    active = (sum(costs) / units + start) / cycles
    return Prediction(microseconds, cycles, step, tile, start, instructions, busy, of_one, active, clock)


def _shares(traced: TracedVariant, constants: Constants) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What simulated CTAs took, cycles, instructions and busy cycles alike: of a step, of a tile beside its steps, of a
    CTA beside its tiles (in a tile's share unless the kernel is persistent)."""
    taken = [_taken(simulate(traced.arch, constants, sample.program)) for sample in traced.samples]
    short, long = traced.samples[:2]
    step = (taken[1] - taken[0]) / (long.tiles * (long.steps - short.steps))
    alone = np.mean([t - s.tiles * s.steps * step for t, s in zip(taken, traced.samples, strict=True)], axis=0)
    if traced.two_tiles is None:
        return step, alone / short.tiles, np.zeros_like(step)
    both = _taken(simulate(traced.arch, constants, traced.two_tiles.program))
    tile = (both - taken[0]) / (traced.two_tiles.tiles - short.tiles) - step * short.steps
    return step, tile, alone - short.tiles * tile


def _taken(result: SmResult) -> np.ndarray:
    """In the order of :data:`_CYCLES`, :data:`_ISSUED` and :data:`UNITS`."""
    r = result
    return np.array([r.cycles, r.issued, r.tensor, r.smem, r.issued / 4, *r.pipes[1:]])


def _by_unit(taken: np.ndarray, cycles: float) -> dict[str, float]:
    return dict(zip(UNITS, (taken[2:] / cycles).tolist(), strict=True))


def ensemble(
    traced: TracedVariant, problem: AttentionProblem, device: Device, constants: Constants, members: int = MEMBERS
) -> list[Prediction]:
    """Predictions with constants a little off, the same for every variant; the first with ``constants`` themselves.

    Simulated warpgroups lock into phases that hardware drifts between: one run alone can be off by a step's width.
    """
    rng = np.random.default_rng(0)
    predictions = [predict(traced, problem, device, constants)]
    for _ in range(members - 1):
        factors = np.exp(JITTER * rng.standard_normal(len(JITTERED)))
        moved = {name: getattr(constants, name) * factor for name, factor in zip(JITTERED, factors, strict=True)}
        predictions.append(predict(traced, problem, device, replace(constants, **moved)))
    return predictions
