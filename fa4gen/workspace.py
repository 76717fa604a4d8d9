"""Scratch memory that kernels take. Host arithmetic alone, shared by dispatch, measuring, emulator and tests."""

from __future__ import annotations

from fa4gen.config import Config
from fa4gen.feasibility import padded_bwd
from fa4gen.problem import AttentionProblem

__all__ = ["workspace_elements"]


def workspace_elements(problem: AttentionProblem, config: Config) -> int:
    """Length of the 1-D fp32 workspace that a kernel takes, uninitialised and 128-byte aligned; 0 if it takes none.

    A forward kernel with dynamic tiles counts them there. A backward keeps, for every (batch, query head, block of
    ``tile_m`` queries): the fp32 accumulator of dQ, head dim padded; LSE in log2 units and Δ; and, if deterministic, a
    semaphore for each of two warpgroups, with a ticket counter behind all.
    """
    if problem.op == "fwd":
        return int(getattr(config, "dynamic_tiles", False))
    blocks = problem.batch * problem.heads * -(-problem.seqlen_q // config.tile_m)
    semaphores = 2 if problem.deterministic else 0
    each = config.tile_m * (padded_bwd(problem.head_dim) + 2) + semaphores
    return blocks * each + (1 if problem.deterministic else 0)
