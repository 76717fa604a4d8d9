"""One SM, cycle by cycle: warps issue their instructions on four sub-partitions and meet at barriers and tensor cores.

A sub-partition issues one instruction a cycle, of the warp whose last issue is longest ago. A warp can issue when its
stall count has run out, its scoreboards are released and the pipe is free. Pipes are slower while tensor cores use the
register file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numba
import numpy as np

from fa4gen.arch import Arch
from fa4gen.errors import Fa4genError
from fa4gen.timing.constants import Constants, Pipe, operation
from fa4gen.timing.path import Step
from fa4gen.timing.sass_decode import NO_BARRIER, SassKernel
from fa4gen.timing.trace import Trace

__all__ = ["SmProgram", "SmResult", "prepare", "simulate"]

_KINDS = ("", "wait", "arrive", "load", "store", "commit", "bar_sync", "bar_arrive", "mma", "mma_wait")
_WAIT, _ARRIVE, _LOAD, _STORE, _COMMIT, _BAR_SYNC, _BAR_ARRIVE, _MMA, _MMA_WAIT = range(1, 10)
# Columns of the table of instructions, and of the table of tokens.
_PIPE, _HOLD, _STALL, _WRITE, _READ, _MASK, _STORES, _COMMITS = range(8)
_KIND, _V0, _V1, _V2, _V3 = range(5)
_MUFU = Pipe.MUFU
FOREVER = np.int64(1) << 60


@dataclass(frozen=True)
class SmProgram:
    """What one CTA's warps execute. Warp w runs ``index[first[w]:first[w + 1]]``, instructions of ``kernel``.

    ``token``: row in ``tokens`` that the instruction at the same place emits, or -1; ``tokens``: (kind, four values);
    ``arrivals``: of each mbarrier's phase.
    """

    kernel: SassKernel
    index: np.ndarray
    token: np.ndarray
    tokens: np.ndarray
    first: np.ndarray
    arrivals: np.ndarray


@dataclass(frozen=True)
class SmResult:
    """``cycles``: until the last warp has ended. ``tensor``: cycles the tensor cores were busy; ``issued``: warp
    instructions; ``pipes``: busy cycles of each pipe, mean of the sub-partitions."""

    cycles: int
    tensor: int
    issued: int
    pipes: tuple[float, ...]


class Stuck(Fa4genError):
    """No warp can ever issue: path and trace do not belong together."""


def prepare(kernel: SassKernel, trace: Trace, paths: Sequence[Sequence[Step]]) -> SmProgram:
    """Tables for :func:`simulate`. ``paths``: one a warp of ``trace``, which says what their tokens mean."""
    numbers = {offset: number for number, offset in enumerate(trace.mbarriers)}
    tokens: dict[tuple[int, ...], int] = {}
    index: list[int] = []
    token: list[int] = []
    for warp, path in zip(trace.warps, paths, strict=True):
        for step in path:
            index.append(step.index)
            row = -1
            if step.token >= 0 and warp[step.token].kind in _KINDS:
                kind, _, values = warp[step.token]
                if kind in ("wait", "arrive", "load"):
                    values = (numbers[values[0]], *values[1:])
                row = tokens.setdefault((_KINDS.index(kind), *values, *(0,) * (4 - len(values))), len(tokens))
            token.append(row)
    first = np.concatenate([[0], np.cumsum([len(path) for path in paths])])
    table = np.array([*tokens, (0,) * 5], np.int64)
    arrivals = np.array([*trace.mbarriers.values(), 0], np.int64)
    return SmProgram(kernel, np.array(index, np.int32), np.array(token, np.int32), table, first, arrivals)


@lru_cache(maxsize=256)
def _tables(
    arch: Arch, kernel: SassKernel, mufu_latency: float, shuffle_latency: float
) -> tuple[np.ndarray, np.ndarray]:
    """(instructions, 8) of what the instructions need, and the latency of each one's scoreboard."""
    static = np.zeros((len(kernel.instructions), 8), np.int64)
    latency = np.zeros(len(kernel.instructions), np.int64)
    for number, i in enumerate(kernel.instructions):
        pipe, hold, wait = operation(arch, i.opcode, mufu_latency, shuffle_latency)
        latency[number] = round(wait)
        write, read = (-1 if b == NO_BARRIER else b for b in (i.write_barrier, i.read_barrier))
        stores, commits = i.opcode.startswith("DEPBAR"), "gsb" in i.operands
        static[number] = (pipe, hold, max(i.stall, 1), write, read, i.wait_mask, stores, commits)
    return static, latency


def simulate(arch: Arch, constants: Constants, program: SmProgram) -> SmResult:
    """Runs the CTA alone on an SM.

    Raises:
        Stuck: the warps wait for each other for ever.
    """
    c = constants
    values = np.array([
        c.mbarrier, c.mbarrier_test, c.named_barrier, c.mma_start, c.mma_drain, c.mma_queue, c.smem_factor,
        c.contention, c.mufu_contention, c.issue_cost, c.l2_bytes, c.load_latency, c.fresh_latency, c.store_latency,
        arch.mma_flops, arch.smem_bytes_per_clock,
    ])  # fmt: skip
    busy = np.zeros(Pipe.COUNT)
    static, latency = _tables(arch, program.kernel, c.mufu_latency, c.shuffle_latency)
    p = program
    cycles, tensor = _run(static, latency, p.index, p.token, p.tokens, p.first, p.arrivals, values, busy)
    if cycles < 0:
        raise Stuck("no warp of the simulated CTA can run")
    return SmResult(int(cycles), int(tensor), len(p.index), tuple((busy / 4).tolist()))


@numba.njit(cache=True)
def _run(static, latency, index, token, tokens, first, arrivals, values, busy):  # type: ignore[no-untyped-def]
    (mbarrier, mbarrier_test, named_barrier, mma_start, mma_drain, mma_queue, smem_factor, contention, mufu_contention,
     issue_cost, l2_bytes, load_latency, fresh_latency, store_latency, mma_flops, smem_bytes) = values  # fmt: skip
    warps = len(first) - 1
    groups = (warps + 3) // 4
    position = first[:-1].copy()
    ready = np.zeros(warps, np.int64)
    boards = np.zeros((warps, 6), np.int64)
    last_issue = np.zeros(warps, np.int64)
    # mbarriers: phase, pending arrivals and bytes; loads on their way
    phase = np.zeros(len(arrivals), np.int64)
    pending = arrivals.copy()
    pending_bytes = np.zeros(len(arrivals), np.int64)
    flight_time = np.full(256, FOREVER, np.int64)
    flight_barrier = np.zeros(256, np.int64)
    flight_bytes = np.zeros(256, np.int64)
    waiting_on = np.full(warps, -1, np.int64)
    waiting_parity = np.zeros(warps, np.int64)
    # named barriers
    arrived = np.zeros(16, np.int64)
    at_barrier = np.full(warps, -1, np.int64)
    # tensor cores: per warpgroup the issued MMAs of each warp, and start and end of those that all four have issued
    issued = np.zeros(warps, np.int64)
    begun = np.zeros(groups, np.int64)
    ring = 64
    starts = np.zeros((groups, ring), np.int64)
    committed = np.zeros(warps, np.int64)
    commit_at = np.zeros((warps, ring), np.int64)
    ends = np.zeros((groups, 4096), np.int64)
    tensor_from = 0  # since when the tensor cores have had something to do
    tensor_free = 0
    tensor_busy = 0
    l2_free = 0.0
    stores_read = np.zeros(warps, np.int64)
    issue_free = np.zeros(4)
    pipe_free = np.zeros((4, busy.shape[0]))
    active = warps
    now = 0
    end = 0
    while active:
        upcoming = FOREVER
        # loads that have landed
        for k in range(256):
            if flight_time[k] <= now:
                b = flight_barrier[k]
                pending_bytes[b] -= flight_bytes[k]
                flight_time[k] = FOREVER
                if pending[b] == 0 and pending_bytes[b] == 0:
                    phase[b] += 1
                    pending[b] = arrivals[b]
                    for w in range(warps):
                        if waiting_on[w] == b and (phase[b] & 1) != waiting_parity[w]:
                            waiting_on[w] = -1
                            ready[w] = now + np.int64(mbarrier)
            elif flight_time[k] < upcoming:
                upcoming = flight_time[k]
        for sub in range(4):
            if issue_free[sub] >= now + 1:
                upcoming = min(upcoming, now + 1)
                continue
            best = -1
            for w in range(sub, warps, 4):
                if position[w] >= first[w + 1] or waiting_on[w] >= 0 or at_barrier[w] >= 0:
                    continue
                when = ready[w]
                row = index[position[w]]
                mask = static[row, _MASK]
                if mask:
                    for s in range(6):
                        if mask >> s & 1:
                            when = max(when, boards[w, s])
                when = max(when, np.int64(pipe_free[sub, static[row, _PIPE]]))
                t = token[position[w]]
                kind = tokens[t, _KIND]  # of the last, empty, row where t is -1
                g = w // 4
                if kind == _MMA:
                    oldest = issued[w] - np.int64(mma_queue)
                    if oldest >= 0:
                        if oldest >= begun[g]:
                            continue  # until another warp of the group has issued it
                        when = max(when, starts[g, oldest % ring])
                elif kind == _MMA_WAIT:
                    left = committed[w] - tokens[t, _V0]
                    if left > 0:
                        number = commit_at[w, (left - 1) % ring]
                        if number >= begun[g]:
                            continue
                        when = max(when, ends[g, number % 4096] + np.int64(mma_drain))
                elif static[row, _STORES]:
                    when = max(when, stores_read[w])
                if when > now:
                    upcoming = min(upcoming, when)
                elif best < 0 or last_issue[w] < last_issue[best]:
                    best = w
            if best < 0:
                continue
            # issue
            w = best
            row = index[position[w]]
            t = token[position[w]]
            position[w] += 1
            last_issue[w] = now
            ready[w] = now + static[row, _STALL]
            p = static[row, _PIPE]
            hold = float(static[row, _HOLD])
            slot = 1.0
            if tensor_from <= now < tensor_free:
                hold *= mufu_contention if p == _MUFU else contention
                slot = issue_cost
            issue_free[sub] = max(issue_free[sub], float(now)) + slot
            pipe_free[sub, p] = max(pipe_free[sub, p], float(now)) + hold
            busy[p] += static[row, _HOLD]
            done = now + latency[row]
            if static[row, _WRITE] >= 0:
                boards[w, static[row, _WRITE]] = max(boards[w, static[row, _WRITE]], done)
            if static[row, _READ] >= 0:
                boards[w, static[row, _READ]] = max(boards[w, static[row, _READ]], done)
            kind = tokens[t, _KIND]
            if kind == _WAIT:
                b = tokens[t, _V0]
                if (phase[b] & 1) != tokens[t, _V1]:
                    ready[w] = now + np.int64(mbarrier_test)
                else:
                    waiting_on[w] = b
                    waiting_parity[w] = tokens[t, _V1]
            elif kind == _ARRIVE:
                b = tokens[t, _V0]
                pending[b] -= tokens[t, _V1]
                pending_bytes[b] += tokens[t, _V2]
                if pending[b] == 0 and pending_bytes[b] == 0:
                    phase[b] += 1
                    pending[b] = arrivals[b]
                    for v in range(warps):
                        if waiting_on[v] == b and (phase[b] & 1) != waiting_parity[v]:
                            waiting_on[v] = -1
                            ready[v] = now + np.int64(mbarrier)
            elif kind == _LOAD:
                l2_free = max(l2_free, float(now)) + tokens[t, _V1] / l2_bytes
                for k in range(256):
                    if flight_time[k] == FOREVER:
                        flight_time[k] = np.int64(l2_free + load_latency + fresh_latency * tokens[t, _V3])
                        flight_barrier[k] = tokens[t, _V0]
                        flight_bytes[k] = tokens[t, _V2]
                        break
            elif kind == _STORE:
                l2_free = max(l2_free, float(now)) + tokens[t, _V0] / l2_bytes
                stores_read[w] = np.int64(l2_free + store_latency)
            elif kind in (_BAR_SYNC, _BAR_ARRIVE):
                b = tokens[t, _V0]
                arrived[b] += 32
                if kind == _BAR_SYNC:
                    at_barrier[w] = b
                if arrived[b] >= tokens[t, _V1]:
                    arrived[b] = 0
                    for v in range(warps):
                        if at_barrier[v] == b:
                            at_barrier[v] = -1
                            ready[v] = max(ready[v], now + np.int64(named_barrier))
            elif kind == _MMA:
                g = w // 4
                number = issued[w]
                issued[w] += 1
                if static[row, _COMMITS]:
                    commit_at[w, committed[w] % ring] = number
                    committed[w] += 1
                if min(issued[4 * g : 4 * g + 4]) > begun[g]:
                    columns, depth = tokens[t, _V0], tokens[t, _V1]
                    work = 2.0 * 64 * columns * depth / mma_flops
                    read = columns * depth * 2.0
                    if tokens[t, _V2] == 0:
                        read += 64.0 * depth * 2
                    work = max(work, smem_factor * read / smem_bytes)
                    start = max(now + np.int64(mma_start), tensor_free)
                    if start > tensor_free:
                        tensor_from = start
                    tensor_free = start + np.int64(work + 0.5)
                    tensor_busy += np.int64(2.0 * 64 * columns * depth / mma_flops)
                    starts[g, begun[g] % ring] = start
                    ends[g, begun[g] % 4096] = tensor_free
                    begun[g] += 1
            if position[w] == first[w + 1]:
                active -= 1
                end = max(end, now)
            upcoming = now + 1
        if upcoming == FOREVER:
            if active:
                return -1, 0
            break
        now = max(now + 1, upcoming)
    return end, tensor_busy
