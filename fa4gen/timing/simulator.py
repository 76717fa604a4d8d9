"""One SM, cycle by cycle: warps issue their instructions on four sub-partitions and meet at barriers and tensor cores.

A sub-partition issues one instruction a cycle, of the warp whose last issue is longest ago. A warp can issue when its
stall count has run out, its scoreboards are released and the pipe is free. Tensor cores take MMAs in order of issue: a
warpgroup's when its last warp has issued it (sm_90), or one thread's (sm_100). Pipes are slower while wgmma uses the
register file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np

from fa4gen.arch import Arch
from fa4gen.errors import Fa4genError
from fa4gen.timing.constants import Constants, Pipe, operation
from fa4gen.timing.path import Step
from fa4gen.timing.sass_decode import NO_BARRIER, SassKernel
from fa4gen.timing.trace import Trace

__all__ = ["Record", "SmProgram", "SmResult", "Stuck", "kinds_of", "prepare", "simulate"]

_KINDS = (
    "", "wait", "arrive", "load", "store", "commit", "bar_sync", "bar_arrive", "mma", "mma_wait", "umma", "umma_commit",
    "next_tile",
)  # fmt: skip
(
    _WAIT, _ARRIVE, _LOAD, _STORE, _COMMIT, _BAR_SYNC, _BAR_ARRIVE, _MMA, _MMA_WAIT, _UMMA, _UMMA_COMMIT, _NEXT_TILE,
) = range(1, len(_KINDS))  # fmt: skip
# Columns of the table of instructions, and of the table of tokens.
_PIPE, _HOLD, _STALL, _WRITE, _READ, _MASK, _STORES, _COMMITS = range(8)
_KIND, _V0, _V1, _V2, _V3, _V4 = range(6)
_VALUES = 5
_MUFU = Pipe.MUFU
_RING, _ENDS = 64, 4096  # of a warpgroup's MMAs: how many starts and ends are kept
_FLIGHTS = 512
FOREVER = np.int64(1) << 60


@dataclass(frozen=True)
class SmProgram:
    """What one CTA's warps execute. Warp w runs ``index[first[w]:first[w + 1]]``, instructions of ``kernel``.

    ``token``: row in ``tokens`` that the instruction at the same place emits, or -1; ``tokens``: (kind, five values);
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
    """``cycles``: until the last warp has ended. ``tensor`` and ``smem``: cycles that tensor cores multiplied, and that
    shared memory needs for their operands; ``issued``: warp instructions; ``pipes``: busy cycles of each pipe, mean of
    the sub-partitions."""

    cycles: int
    tensor: int
    smem: float
    issued: int
    pipes: tuple[float, ...]


@dataclass(frozen=True)
class Record:
    """What happened when, in cycles. ``issue``: of the instruction at the same place of the program's ``index``.
    ``mma`` and ``loads``: (n, 2) start and end of each MMA (a warpgroup's or a thread's) and copy to shared memory."""

    issue: np.ndarray
    mma: np.ndarray
    loads: np.ndarray


class Stuck(Fa4genError):
    """No warp can ever issue: path and trace do not belong together."""


def prepare(kernel: SassKernel, trace: Trace, paths: Sequence[Sequence[Step]], copies: int = 1) -> SmProgram:
    """Tables for :func:`simulate`. ``paths``: one a warp of ``trace``, which says what their tokens mean. ``copies``:
    CTAs that share the SM, each with barriers of its own."""
    numbers = {offset: number for number, offset in enumerate(trace.mbarriers)}
    tokens: dict[tuple[int, ...], int] = {}
    index: list[int] = []
    token: list[int] = []
    for copy in range(copies):
        for warp, path in zip(trace.warps, paths, strict=True):
            for step in path:
                index.append(step.index)
                row = -1
                if step.token >= 0 and warp[step.token].kind in _KINDS:
                    kind, _, values = warp[step.token]
                    if kind in ("wait", "arrive", "load", "umma_commit", "next_tile"):
                        values = (numbers[values[0]] + copy * len(numbers), *values[1:])
                    elif kind in ("bar_sync", "bar_arrive"):
                        values = (values[0] + 16 * copy, *values[1:])
                    row = tokens.setdefault((_KINDS.index(kind), *values, *(0,) * (_VALUES - len(values))), len(tokens))
                token.append(row)
    first = np.concatenate([[0], np.cumsum([len(path) for _ in range(copies) for path in paths])])
    table = np.array([*tokens, (0,) * (1 + _VALUES)], np.int64)
    arrivals = np.array([*trace.mbarriers.values()] * copies + [0], np.int64)
    return SmProgram(kernel, np.array(index, np.int32), np.array(token, np.int32), table, first, arrivals)


def kinds_of(program: SmProgram) -> np.ndarray:
    """The kind of token that the instruction at each place emits, "" for none."""
    return np.array(_KINDS)[program.tokens[program.token, _KIND]]  # -1 is the last, empty, row


@lru_cache(maxsize=256)
def _tables(
    arch: Arch, kernel: SassKernel, mufu_latency: float, shuffle_latency: float, tmem_latency: float, fence: float
) -> tuple[np.ndarray, np.ndarray]:
    """(instructions, 8) of what the instructions need, and the latency of each one's scoreboard."""
    static = np.zeros((len(kernel.instructions), 8), np.int64)
    latency = np.zeros(len(kernel.instructions), np.int64)
    latencies = {"MUFU": mufu_latency, "SHFL": shuffle_latency, "LDTM": tmem_latency, "STTM": tmem_latency}
    for number, i in enumerate(kernel.instructions):
        pipe, hold, wait = operation(arch, i.opcode, latencies)
        latency[number] = round(wait)
        write, read = (-1 if b == NO_BARRIER else b for b in (i.write_barrier, i.read_barrier))
        stores, commits = i.opcode.startswith("DEPBAR"), "gsb" in i.operands
        fences = i.opcode.startswith("FENCE.VIEW.ASYNC") and not i.opcode.endswith(".T")
        stall = max(i.stall, round(fence) if fences else 1)
        static[number] = (pipe, hold, stall, write, read, i.wait_mask, stores, commits)
    return static, latency


def simulate(arch: Arch, constants: Constants, program: SmProgram, recorded: list[Record] | None = None) -> SmResult:
    """Runs the CTA, or the CTAs that share the SM. What happened when is appended to ``recorded``.

    Raises:
        Stuck: the warps wait for each other for ever.
    """
    c, p = constants, program
    chip = _Chip(
        c.mbarrier, c.mbarrier_test, c.named_barrier, c.mma_start, c.mma_drain, c.mma_queue, c.smem_factor,
        c.contention, c.mufu_contention, c.issue_cost, c.l2_bytes, c.load_latency, c.fresh_latency, c.store_latency,
        c.umma_start, c.umma_commit, c.next_tile_latency, float(arch.mma_flops), float(arch.smem_bytes_per_clock),
    )  # fmt: skip
    static, latency = _tables(arch, p.kernel, c.mufu_latency, c.shuffle_latency, c.tmem_latency, c.fence)
    kinds = np.bincount(p.tokens[p.token, _KIND], minlength=len(_KINDS))
    mmas, loads = int(kinds[_MMA] + kinds[_UMMA]), int(kinds[_LOAD])
    record = _Record(np.zeros(len(p.index), np.int64), np.zeros((mmas, 2)), np.zeros((loads, 2)), np.zeros(2, np.int64))
    sm = _state(p)
    cycles = _run(static, latency, _Code(p.index, p.token, p.tokens, p.first), chip, sm, record)
    if cycles < 0:
        raise Stuck("no warp of the simulated CTA can run")
    if recorded is not None:
        recorded.append(Record(record.issue, record.mma[: record.counts[0]], record.loads[: record.counts[1]]))
    unit, busy = sm.unit, tuple((sm.busy / 4).tolist())
    return SmResult(int(cycles), int(unit[_TENSOR_BUSY]), float(unit[_SMEM_BUSY]), len(p.index), busy)


class _Chip(NamedTuple):
    """Constants, in cycles unless their names say otherwise: see :class:`Constants`."""

    mbarrier: float
    mbarrier_test: float
    named_barrier: float
    mma_start: float
    mma_drain: float
    mma_queue: float
    smem_factor: float
    contention: float
    mufu_contention: float
    issue_cost: float
    l2_bytes: float
    load_latency: float
    fresh_latency: float
    store_latency: float
    umma_start: float
    umma_commit: float
    next_tile_latency: float
    mma_flops: float
    smem_bytes: float


class _Code(NamedTuple):
    rows: np.ndarray
    token: np.ndarray
    tokens: np.ndarray
    first: np.ndarray


# Places in _Sm.unit: since when and until when the tensor cores have something to do, until when L2 has.
_TENSOR_FROM, _TENSOR_FREE, _TENSOR_BUSY, _SMEM_BUSY, _L2_FREE = range(5)


class _Sm(NamedTuple):
    """The state, an array each. First a warp's: ``earliest`` it can issue as far as known, what it waits for;
    ``issued`` and ``committed`` MMAs of its warpgroup. Then mbarriers; named barriers; a warpgroup's MMAs begun, that
    is issued by all four warps; what is on its way to a mbarrier; a sub-partition's issue slot and pipes."""

    position: np.ndarray
    ready: np.ndarray
    earliest: np.ndarray
    last_issue: np.ndarray
    boards: np.ndarray
    waiting_on: np.ndarray
    parity: np.ndarray
    at_barrier: np.ndarray
    stores_read: np.ndarray
    issued: np.ndarray
    committed: np.ndarray
    commit_at: np.ndarray
    phase: np.ndarray
    pending: np.ndarray
    pending_bytes: np.ndarray
    arrivals: np.ndarray
    arrived: np.ndarray
    begun: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    flight_time: np.ndarray
    flight_what: np.ndarray
    next_landing: np.ndarray
    issue_free: np.ndarray
    pipe_free: np.ndarray
    busy: np.ndarray
    unit: np.ndarray


class _Record(NamedTuple):
    issue: np.ndarray
    mma: np.ndarray
    loads: np.ndarray
    counts: np.ndarray


def _state(p: SmProgram) -> _Sm:
    warps, barriers = len(p.first) - 1, len(p.arrivals)
    groups = (warps + 3) // 4

    def integers(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int64)

    return _Sm(
        position=p.first[:-1].copy(), ready=integers(warps), earliest=integers(warps), last_issue=integers(warps),
        boards=integers(warps, 6), waiting_on=np.full(warps, -1, np.int64), parity=integers(warps),
        at_barrier=np.full(warps, -1, np.int64), stores_read=integers(warps), issued=integers(warps),
        committed=integers(warps), commit_at=integers(warps, _RING), phase=integers(barriers),
        pending=p.arrivals.copy(), pending_bytes=integers(barriers), arrivals=p.arrivals, arrived=integers(64),
        begun=integers(groups), starts=integers(groups, _RING), ends=integers(groups, _ENDS),
        flight_time=np.full(_FLIGHTS, FOREVER, np.int64), flight_what=integers(_FLIGHTS, 3),
        next_landing=np.full(1, FOREVER, np.int64),
        issue_free=np.zeros(4), pipe_free=np.zeros((4, Pipe.COUNT)), busy=np.zeros(Pipe.COUNT), unit=np.zeros(5),
    )  # fmt: skip


@numba.njit(cache=True)
def _settle(sm, b, now, chip):  # type: ignore[no-untyped-def]
    """Ends a mbarrier's phase if nothing is pending, and wakes who waits for it."""
    if sm.pending[b] != 0 or sm.pending_bytes[b] != 0:
        return
    sm.phase[b] += 1
    sm.pending[b] = sm.arrivals[b]
    for w in range(len(sm.ready)):
        if sm.waiting_on[w] == b and (sm.phase[b] & 1) != sm.parity[w]:
            sm.waiting_on[w] = -1
            sm.ready[w] = now + np.int64(chip.mbarrier)


@numba.njit(cache=True)
def _send(sm, when, barrier, size, arrivals):  # type: ignore[no-untyped-def]
    """Something is on its way to a mbarrier."""
    for k in range(_FLIGHTS):
        if sm.flight_time[k] == FOREVER:
            sm.flight_time[k] = np.int64(when)
            sm.flight_what[k, 0], sm.flight_what[k, 1], sm.flight_what[k, 2] = barrier, size, arrivals
            sm.next_landing[0] = min(sm.next_landing[0], np.int64(when))
            return


@numba.njit(cache=True)
def _land(sm, now, chip):  # type: ignore[no-untyped-def]
    """Delivers what has landed; returns when the next does."""
    following = FOREVER
    for k in range(_FLIGHTS):
        if sm.flight_time[k] <= now:
            b = sm.flight_what[k, 0]
            sm.pending_bytes[b] -= sm.flight_what[k, 1]
            sm.pending[b] -= sm.flight_what[k, 2]
            sm.flight_time[k] = FOREVER
            _settle(sm, b, now, chip)
        elif sm.flight_time[k] < following:
            following = sm.flight_time[k]
    sm.next_landing[0] = following
    return following


@numba.njit(cache=True)
def _mma_turn(sm, w, waits, left, chip):  # type: ignore[no-untyped-def]
    """When a warp's next wgmma finds room in its warpgroup's queue, or its wait for all but ``left`` groups ends;
    FOREVER until another warp has issued it."""
    g = w // 4
    if waits:
        number = sm.commit_at[w, (sm.committed[w] - left - 1) % _RING] if sm.committed[w] > left else -1
        ring, delay, times = _ENDS, np.int64(chip.mma_drain), sm.ends
    else:
        number, ring, delay, times = sm.issued[w] - np.int64(chip.mma_queue), _RING, 0, sm.starts
    if number < 0:
        return np.int64(0)
    return FOREVER if number >= sm.begun[g] else times[g, number % ring] + delay


@numba.njit(cache=True)
def _multiply(sm, earliest, flops, read, chip, record):  # type: ignore[no-untyped-def]
    """The tensor cores take an MMA that reads so many bytes of shared memory. Returns its start and end."""
    unit = sm.unit
    multiply = 2.0 * flops / chip.mma_flops
    work = max(multiply, chip.smem_factor * read / chip.smem_bytes)
    start = max(float(earliest), unit[_TENSOR_FREE])
    if start > unit[_TENSOR_FREE]:
        unit[_TENSOR_FROM] = start
    unit[_TENSOR_FREE] = start + np.floor(work + 0.5)
    unit[_TENSOR_BUSY] += np.floor(multiply)
    unit[_SMEM_BUSY] += read / chip.smem_bytes
    record.mma[record.counts[0], 0], record.mma[record.counts[0], 1] = start, unit[_TENSOR_FREE]
    record.counts[0] += 1
    return np.int64(start), np.int64(unit[_TENSOR_FREE])


@numba.njit(cache=True)
def _issue_mma(sm, w, commits, tokens, t, now, chip, record):  # type: ignore[no-untyped-def]
    """wgmma: it goes to the tensor cores with the warpgroup's fourth warp."""
    g, number = w // 4, sm.issued[w]
    sm.issued[w] += 1
    if commits:
        sm.commit_at[w, sm.committed[w] % _RING] = number
        sm.committed[w] += 1
    if min(sm.issued[4 * g : 4 * g + 4]) > sm.begun[g]:
        columns, depth = tokens[t, _V0], tokens[t, _V1]
        read = columns * depth * 2.0
        if tokens[t, _V2] == 0:
            read += 64.0 * depth * 2
        start, end = _multiply(sm, now + np.int64(chip.mma_start), 64.0 * columns * depth, read, chip, record)
        sm.starts[g, sm.begun[g] % _RING] = start
        sm.ends[g, sm.begun[g] % _ENDS] = end
        sm.begun[g] += 1


@numba.njit(cache=True)
def _emit(sm, w, commits, tokens, t, now, chip, record):  # type: ignore[no-untyped-def]
    """What a token does."""
    kind, unit = tokens[t, _KIND], sm.unit
    if kind == _WAIT:
        b = tokens[t, _V0]
        if (sm.phase[b] & 1) != tokens[t, _V1]:
            sm.ready[w] = now + np.int64(chip.mbarrier_test)
        else:
            sm.waiting_on[w] = b
            sm.parity[w] = tokens[t, _V1]
    elif kind == _ARRIVE:
        b = tokens[t, _V0]
        sm.pending[b] -= tokens[t, _V1]
        sm.pending_bytes[b] += tokens[t, _V2]
        _settle(sm, b, now, chip)
    elif kind == _LOAD:
        unit[_L2_FREE] = max(unit[_L2_FREE], float(now)) + tokens[t, _V1] / chip.l2_bytes
        landed = unit[_L2_FREE] + chip.load_latency + chip.fresh_latency * tokens[t, _V3]
        _send(sm, landed, tokens[t, _V0], tokens[t, _V2], 0)
        record.loads[record.counts[1], 0], record.loads[record.counts[1], 1] = now, landed
        record.counts[1] += 1
    elif kind == _STORE:
        unit[_L2_FREE] = max(unit[_L2_FREE], float(now)) + tokens[t, _V0] / chip.l2_bytes
        sm.stores_read[w] = np.int64(unit[_L2_FREE] + chip.store_latency)
    elif kind in (_BAR_SYNC, _BAR_ARRIVE):
        b = tokens[t, _V0]
        sm.arrived[b] += 32
        if kind == _BAR_SYNC:
            sm.at_barrier[w] = b
        if sm.arrived[b] >= tokens[t, _V1]:
            sm.arrived[b] = 0
            for v in range(len(sm.ready)):
                if sm.at_barrier[v] == b:
                    sm.at_barrier[v] = -1
                    sm.ready[v] = max(sm.ready[v], now + np.int64(chip.named_barrier))
    elif kind == _MMA:
        _issue_mma(sm, w, commits, tokens, t, now, chip, record)
    elif kind == _UMMA:
        rows, columns, held, depth = tokens[t, _V0], tokens[t, _V1], tokens[t, _V2], tokens[t, _V3]
        read = 2.0 * depth * (held + (0 if tokens[t, _V4] else rows))
        _multiply(sm, now + np.int64(chip.umma_start), float(rows) * columns * depth, read, chip, record)
    elif kind == _UMMA_COMMIT:
        _send(sm, max(float(now), unit[_TENSOR_FREE]) + chip.umma_commit, tokens[t, _V0], 0, 1)
    elif kind == _NEXT_TILE:
        _send(sm, now + chip.next_tile_latency, tokens[t, _V0], tokens[t, _V1], 0)


@numba.njit(cache=True)
def _run(static, latency, code, chip, sm, record):  # type: ignore[no-untyped-def]
    """Cycles until the last warp has ended, -1 if they never all do. One function, and arrays as variables: a call for
    every warp and cycle takes several times as long."""
    index, tokens_at, tokens, first = code.rows, code.token, code.tokens, code.first
    position, ready, earliest, last_issue = sm.position, sm.ready, sm.earliest, sm.last_issue
    boards, waiting_on, at_barrier, stores_read = sm.boards, sm.waiting_on, sm.at_barrier, sm.stores_read
    issue_free, pipe_free, busy, unit, issued_at = sm.issue_free, sm.pipe_free, sm.busy, sm.unit, record.issue
    warps = active = len(ready)
    now, end, landing = np.int64(0), np.int64(0), FOREVER
    while active:
        if landing <= now:
            landing = _land(sm, now, chip)
        upcoming = landing
        for sub in range(4):
            if issue_free[sub] >= now + 1:
                upcoming = min(upcoming, now + 1)
                continue
            best = -1
            for w in range(sub, warps, 4):
                place = position[w]
                if place >= first[w + 1] or waiting_on[w] >= 0 or at_barrier[w] >= 0:
                    continue
                if earliest[w] > now:
                    upcoming = min(upcoming, earliest[w])
                    continue
                row = index[place]
                when = ready[w]
                mask = static[row, _MASK]
                if mask:
                    for s in range(6):
                        if mask >> s & 1:
                            when = max(when, boards[w, s])
                when = max(when, np.int64(pipe_free[sub, static[row, _PIPE]]))
                if tokens_at[place] >= 0:
                    kind = tokens[tokens_at[place], _KIND]
                    if kind in (_MMA, _MMA_WAIT):
                        left = tokens[tokens_at[place], _V0]
                        when = max(when, _mma_turn(sm, w, kind == _MMA_WAIT, left, chip))
                if static[row, _STORES]:
                    when = max(when, stores_read[w])
                if when > now:
                    upcoming = min(upcoming, when)
                    if when < FOREVER:
                        earliest[w] = when  # what it waits for does not come sooner
                elif best < 0 or last_issue[w] < last_issue[best]:
                    best = w
            if best < 0:
                continue
            place = position[best]
            row = index[place]
            position[best] += 1
            issued_at[place] = last_issue[best] = now
            ready[best] = now + static[row, _STALL]
            pipe = static[row, _PIPE]
            hold, slot = float(static[row, _HOLD]), 1.0
            if unit[_TENSOR_FROM] <= now < unit[_TENSOR_FREE]:
                hold *= chip.mufu_contention if pipe == _MUFU else chip.contention
                slot = chip.issue_cost
            issue_free[sub] = max(issue_free[sub], float(now)) + slot
            pipe_free[sub, pipe] = max(pipe_free[sub, pipe], float(now)) + hold
            busy[pipe] += static[row, _HOLD]
            for column in (_WRITE, _READ):
                board = static[row, column]
                if board >= 0:
                    boards[best, board] = max(boards[best, board], now + latency[row])
            if tokens_at[place] >= 0:
                _emit(sm, best, static[row, _COMMITS], tokens, tokens_at[place], now, chip, record)
                landing = min(landing, sm.next_landing[0])
            if position[best] == first[best + 1]:
                active -= 1
                end = max(end, now)
            upcoming = now + 1
        if upcoming == FOREVER and active:
            return np.int64(-1)
        now = max(now + 1, upcoming)
    return end
