"""Predicts a compiled variant's time: simulates a few CTAs, scales them to the problem, and sets the clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fa4gen.arch import Arch, Device, get_arch
from fa4gen.artifact_cache import Artifact
from fa4gen.bound import steps_per_tile
from fa4gen.config import Config
from fa4gen.problem import AttentionProblem
from fa4gen.timing.constants import Constants
from fa4gen.timing.grid import makespan, tile_steps
from fa4gen.timing.path import PathFinder
from fa4gen.timing.sass_decode import decode
from fa4gen.timing.simulator import SmProgram, prepare, simulate
from fa4gen.timing.trace import trace

__all__ = ["Prediction", "Sample", "TracedVariant", "predict", "trace_variant"]

# K/V steps of the simulated CTAs: two lengths give the fixed cost and the slope, beyond the pipeline's start.
STEPS = (6, 14)


@dataclass(frozen=True)
class Sample:
    """One simulated CTA: ``tiles`` tiles of ``steps`` K/V steps each."""

    tiles: int
    steps: int
    program: SmProgram


@dataclass(frozen=True)
class TracedVariant:
    """What the model knows of a variant, whatever the constants."""

    arch: Arch
    config: Config
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Prediction:
    """``step``, ``tile`` and ``start``: cycles a K/V step, a tile beside its steps, and a CTA beside its tiles.

    ``tensor``: share of the time that the mean SM's tensor cores are busy; ``clock_ghz``: what the chip is taken to
    run at.
    """

    microseconds: float
    cycles: float
    step: float
    tile: float
    start: float
    tensor: float
    clock_ghz: float


def trace_variant(artifact: Artifact, problem: AttentionProblem, config: Config) -> TracedVariant:
    """Emulates a few CTAs of a compiled variant and finds their SASS. ``problem`` gives what was compiled in.

    Raises:
        EmulatorError: the emulator stops.
        Fa4genError: the SASS cannot be read, or its paths do not match the trace.
    """
    (kernel,) = decode(artifact.cubin_path)
    finder = PathFinder(kernel)
    persistent = bool(getattr(config, "persistent", False))
    cluster = getattr(config, "cluster_m", 1)
    samples = []
    for tiles, steps in [(1, STEPS[0]), (1, STEPS[1]), *([(2, STEPS[0])] if persistent else [])]:
        small = _small(problem, config, tiles, steps)
        traced = trace(artifact, small, cluster)
        paths: dict[tuple, list] = {}
        for tokens in traced.warps:
            key = tuple((t.kind, t.site) for t in tokens)
            if key not in paths:
                paths[key] = finder.find(tokens)
        program = prepare(kernel, traced, [paths[tuple((t.kind, t.site) for t in tokens)] for tokens in traced.warps])
        ratio = 1 if config.pack_gqa else problem.gqa_ratio
        samples.append(Sample(tiles * ratio if persistent else 1, max(steps_per_tile(small, config)), program))
    return TracedVariant(get_arch(artifact.arch), config, tuple(samples))


def _small(problem: AttentionProblem, config: Config, tiles: int, steps: int) -> AttentionProblem:
    """A problem of the same variant with ``tiles`` K/V heads of one (or one cluster of) M block and about ``steps``
    K/V steps; a causal mask ends at the last row."""
    ratio = problem.gqa_ratio
    rows = config.tile_m * getattr(config, "cluster_m", 1) // (ratio if config.pack_gqa else 1)
    return replace(
        problem, batch=1, heads=tiles * ratio, heads_kv=tiles, seqlen_q=max(rows, 1), seqlen_k=steps * config.tile_n
    )


def predict(traced: TracedVariant, problem: AttentionProblem, device: Device, constants: Constants) -> Prediction:
    """The time of ``problem`` on ``device``, an uncalibrated chip unless ``constants`` were fitted on it.

    Raises:
        Stuck: the simulated CTA deadlocks.
    """
    config = traced.config
    results = [simulate(traced.arch, constants, sample.program) for sample in traced.samples]
    short, long = traced.samples[:2]
    step = (results[1].cycles - results[0].cycles) / (long.tiles * (long.steps - short.steps))
    tensor = (results[1].tensor - results[0].tensor) / (long.tiles * (long.steps - short.steps))
    persistent = len(results) > 2
    if persistent:
        more = traced.samples[2].tiles - short.tiles
        tile = (results[2].cycles - results[0].cycles) / more - step * short.steps
        start = results[0].cycles - short.tiles * (tile + step * short.steps)
    else:
        tile, start = results[0].cycles - step * short.steps + constants.cta_launch, 0.0
    steps = tile_steps(problem, config)
    cluster = getattr(config, "cluster_m", 1)
    units = device.sm_count // cluster
    costs = [tile + step * max(steps[at : at + cluster]) for at in range(0, len(steps), cluster)]
    cycles = start + makespan(costs, units, persistent)
    utilisation = tensor * float(np.sum(steps)) / (device.sm_count * cycles)
    clock = min(device.clock_mhz / 1000, constants.clock_base - constants.clock_slope * utilisation)
    hbm_us = problem.hbm_bytes / device.hbm_bytes_per_s * 1e6
    microseconds = constants.launch_us + max(cycles / clock / 1000, hbm_us)
    return Prediction(microseconds, cycles, step, tile, start, utilisation, clock)
