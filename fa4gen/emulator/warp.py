"""Exchange between the lanes of a warp."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4gen.emulator.errors import KernelFault
from fa4gen.emulator.fiber import Fiber, full

__all__ = ["FUNCTIONS", "elect", "reduce_lanes", "shuffle", "vote"]

_LANE = np.arange(32)
_BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)


def _members(f: Fiber, members: Any, mask: Any) -> np.ndarray:
    """Participating lanes, (warps, 32). A member that is not active would hang or corrupt the warp.

    Raises:
        KernelFault: a lane takes part that its own member mask leaves out.
    """
    active = f.active if mask is None else mask
    if np.ndim(members) == 0 and int(members) == 0xFFFFFFFF:
        return active
    named = (full(members, f.shape) & _BIT) != 0
    if (active & ~named).any():
        raise KernelFault("a lane executes a warp-wide instruction whose member mask leaves it out")
    return active


def shuffle(f: Fiber, mode: str, value: Any, lane: Any, clamp: Any, members: Any, mask: Any) -> tuple[Any, Any]:
    """shfl.sync: (value, whether the source lane was in range). ``clamp`` holds segment mask (12:8) and bound (4:0)."""
    _members(f, members, mask)
    if np.ndim(value) == 0 and mode == "idx":
        return value, np.bool_(True)
    value = full(value, f.shape)
    if np.ndim(lane) == 0 and np.ndim(clamp) == 0:
        source, valid = _source(mode, int(lane), int(clamp), _LANE)
        return value[:, source], np.broadcast_to(valid, f.shape)
    source, valid = _source(mode, full(lane, f.shape).astype(np.int64), full(clamp, f.shape).astype(np.int64), _LANE)
    return np.take_along_axis(value, source, axis=1), valid


def _source(mode: str, lane: Any, clamp: Any, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    segment = (clamp >> 8) & 31
    bound = clamp & 31
    lane = lane & 31
    low = own & segment
    high = low | (bound & ~segment)
    if mode == "up":
        source = own - lane
        valid = source >= high  # for .up the bound is the lowest lane
    elif mode == "down":
        source = own + lane
        valid = source <= high
    elif mode == "bfly":
        source = own ^ lane
        valid = source <= high
    else:
        source = low | (lane & ~segment)
        valid = source <= high
    return np.where(valid, source, own), valid


def vote(f: Fiber, mode: str, predicate: Any, members: Any, mask: Any) -> Any:
    """vote.sync over the active lanes."""
    active = _members(f, members, mask)
    predicate = full(predicate, f.shape)
    if mode == "ballot":
        bits = np.where(predicate & active, _BIT, np.uint32(0)).sum(axis=1, dtype=np.uint32)
        return np.repeat(bits[:, None], 32, axis=1)
    some, every = (predicate & active).any(axis=1), (predicate | ~active).all(axis=1)
    result = {"any": some, "all": every, "uni": every | ~some}[mode]
    return np.repeat(result[:, None], 32, axis=1)


def reduce_lanes(f: Fiber, function: str, value: Any, members: Any, mask: Any) -> Any:
    """redux.sync over the active lanes."""
    active = _members(f, members, mask)
    value = full(value, f.shape)
    ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor}[function]  # fmt: skip
    result = np.empty(f.shape, value.dtype)
    for row in range(len(f.warps)):
        result[row] = ufunc.reduce(value[row][active[row]])
    return result


def elect(f: Fiber, members: Any, mask: Any) -> tuple[Any, Any]:
    """elect.sync: (elected lane, whether a lane is it). The lowest active member is."""
    active = _members(f, members, mask)
    lane = active.argmax(axis=1).astype(np.uint32)[:, None]
    return np.broadcast_to(lane, f.shape), (lane == _LANE) & active


# What generated code sees by name.
FUNCTIONS = {function.__name__: function for function in (elect, reduce_lanes, shuffle, vote)}
