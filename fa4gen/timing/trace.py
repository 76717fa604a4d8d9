"""What the warps of one CTA synchronise on, in order: the emulator runs the variant and a watching machine takes notes.

Only control flow is asked for, so MMA results are left out and read as NaN: no row maximum grows, and conditional
rescales are skipped, as they are on ordinary inputs after the first steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa4gen.config import Config
from fa4gen.emulator import execute
from fa4gen.emulator.cluster_launch import RESPONSE_BYTES
from fa4gen.emulator.executor import load
from fa4gen.emulator.fiber import Fiber, at
from fa4gen.emulator.program import Block
from fa4gen.emulator.scheduler import Machine
from fa4gen.emulator.state import SLOT_BITS
from fa4gen.emulator.tcgen05 import InstructionDescriptor
from fa4gen.emulator.verify import launch_arguments
from fa4gen.problem import AttentionProblem

__all__ = ["Token", "Trace", "trace"]

_OFFSET = (1 << SLOT_BITS) - 1
_NAN = np.uint32(0x7FC00000)


class Token(NamedTuple):
    """One synchronising or asynchronous instruction that a warp executed.

    ``site``: its place in the PTX, (block, position among the block's tokens). ``values`` by ``kind``:
    "wait" (mbarrier, parity); "arrive" (mbarrier, arrivals, bytes expected); "load" (mbarrier, bytes read, bytes
    delivered to this CTA, whether no other CTA reads them); "store" (bytes); "commit" (); "bar_sync" and "bar_arrive"
    (number, threads); "cluster_arrive" and "cluster_wait" (); "mma", of a warpgroup (columns, depth, A in registers);
    "mma_wait" (groups left); "umma", of a thread (rows and columns this CTA holds of the product and of B, depth, A in
    TMEM); "umma_commit" (mbarrier); "next_tile", the request for one (mbarrier, bytes).

    An mbarrier is its offset in this CTA's shared memory. CTAs of a cluster do the same at the same time: arrivals and
    bytes that its barriers get from peers are added to what this CTA does to them, or to a peer's in their place.
    """

    kind: str
    site: tuple[int, int]
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Tokens of the CTA with grid coordinates 0: one list a warp; ``mbarriers``: offset → arrivals a phase."""

    warps: tuple[tuple[Token, ...], ...]
    mbarriers: dict[int, int]


class _Watcher(Machine):
    """A machine that notes the tokens of its first CTA and computes no MMA. Of all CTAs it counts what they signal."""

    notes: Trace | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.log: list[list[Token]] = [[] for _ in range(self.warps_per_cta)]
        self.counts_of: dict[int, int] = {}
        # (warp in CTA, what, from another CTA, to another CTA's, mbarrier offset) → sum; only signals to or from CTA 0
        self.signals: Counter[tuple[int, str, bool, bool, int]] = Counter()
        self.position = 0

    def run(self) -> None:
        super().run()
        if (0, 0, 0) in self.ctas:
            warps = ([self._with_peers(warp, token) for token in tokens] for warp, tokens in enumerate(self.log))
            type(self).notes = Trace(tuple(map(tuple, warps)), self.counts_of)

    def _signal(self, f: Fiber, row: int, what: str, flat: int, amount: int) -> int:
        """Counts a signal to the mbarrier at ``flat``, and returns what tokens call it: negative if a peer owns it."""
        source, target, offset = int(f.slots[row]), flat >> SLOT_BITS, flat & _OFFSET
        if source < self.cluster_size and 0 in (source, target):
            self.signals[int(f.warps[row]) % self.warps_per_cta, what, source > 0, target > 0, offset] += amount
        return offset if target == source else ~offset

    def _with_peers(self, warp: int, token: Token) -> Token:
        """A token of CTA 0 with what the same warp of its peers adds to the same barrier."""
        if token.kind == "arrive":
            barrier, arrivals, expected = token.values
            arrivals *= self._times(warp, "arrivals", barrier)
            values = [arrivals, expected * self._times(warp, "expected", barrier)]
        elif token.kind == "load":
            barrier, read, delivered, fresh = token.values
            values = [read, delivered * self._times(warp, "delivered", barrier), fresh]
        else:
            return token
        return token._replace(values=(barrier if barrier >= 0 else ~barrier, *values))

    def _times(self, warp: int, what: str, barrier: int) -> int:
        offset, ways = barrier if barrier >= 0 else ~barrier, ((False, False), (False, True), (True, False))
        own, out, got = (self.signals[warp, what, a, b, offset] for a, b in ways)
        if own:
            return 1 + got // own if barrier >= 0 else 0
        return got // out if out else 1

    def _note(self, f: Fiber, kind: str, row: int, *values: int) -> None:
        warp = int(f.warps[row])
        if warp < self.warps_per_cta:
            self.log[warp].append(Token(kind, (f.block, self.position), values))

    def _note_all(self, f: Fiber, kind: str, *values: int) -> None:
        self.position += 1
        for row in range(len(f.warps)):
            self._note(f, kind, row, *values)

    def _active_rows(self, f: Fiber, mask: Any) -> list[tuple[int, int]]:
        """(row, first active lane) of every warp with one."""
        active = f.active if mask is None else mask
        return [(row, int(lanes.argmax())) for row, lanes in enumerate(active) if lanes.any()]

    def _execute(self, f: Fiber, block: Block) -> Any:
        self.position = 0
        return super()._execute(f, block)

    # Barriers ----------------------------------------------------------------------------------------------------
    def _guarded(self, f: Fiber, block: Block, step: str) -> None:
        super()._guarded(f, block, step)
        if step == "leave" and block.end == "mbarrier.wait":
            assert f.tokens is not None
            self.position = 1000  # a wait ends its block
            for row, entries in enumerate(f.tokens):
                barrier, phase, _, _ = entries[0]
                self._note(f, "wait", row, barrier.flat & _OFFSET, phase & 1)
        elif step == "arrive" and block.end == "barrier.cluster.wait":
            self._note_all(f, "cluster_wait")

    def mbarrier_init(self, f: Fiber, address: Any, count: Any, mask: Any) -> None:
        super().mbarrier_init(f, address, count, mask)
        self.counts_of = {flat & _OFFSET: b.count for flat, b in self.mbarriers.items() if flat >> SLOT_BITS == 0}

    def mbarrier_arrive(self, f: Fiber, address: Any, count: Any, tx: Any, relaxed: bool, mask: Any) -> Any:
        self.position += 1
        sums: dict[tuple[int, int], list[int]] = {}  # (row, mbarrier) → arrivals and expected bytes of the warp's lanes
        flats = self.shared_flat(f, address, 8, mask).tolist()
        for (row, lane), flat in zip(self.lanes(f, mask).tolist(), flats, strict=True):
            arrivals = 0 if count is None else int(at(count, row, lane))
            expected = 0 if tx is None else int(at(tx, row, lane))
            self._signal(f, row, "expected", flat, expected)
            of_warp = sums.setdefault((row, self._signal(f, row, "arrivals", flat, arrivals)), [0, 0])
            of_warp[0] += arrivals
            of_warp[1] += expected
        for row in dict.fromkeys(row for row, _ in sums):  # one instruction is one token: for its own CTA, if it can be
            barrier = max(barrier for r, barrier in sums if r == row)
            self._note(f, "arrive", row, barrier, *sums[row, barrier])
        return super().mbarrier_arrive(f, address, count, tx, relaxed, mask)

    def barrier_arrive(self, f: Fiber, number: Any, threads: Any, mask: Any) -> Any:
        self.position += 1
        kind = "bar_arrive" if f.parked is None else "bar_sync"
        for row, lane in self._active_rows(f, mask):
            count = 32 * self.warps_per_cta if threads is None else int(at(threads, row, lane))
            self._note(f, kind, row, int(at(number, row, lane)), count)
        return super().barrier_arrive(f, number, threads, mask)

    def cluster_arrive(self, f: Fiber, relaxed: bool, mask: Any) -> None:
        self._note_all(f, "cluster_arrive")
        super().cluster_arrive(f, relaxed, mask)

    # Copies ------------------------------------------------------------------------------------------------------
    def tensor_load(
        self, f: Fiber, target: Any, descriptor: Any, coords: tuple, barrier: Any, ctas: Any, pair: bool, mask: Any
    ) -> None:
        self.position += 1
        for row, lane in self._active_rows(f, mask):
            tensor, slot = self.tensor_map(int(at(descriptor, row, lane))), int(f.slots[row])
            fresh = self.memory.find(tensor.address, 1).name == "q"
            signal = self.one_flat(slot, int(at(barrier, row, lane)), 8, 8)
            signals = self.targets(slot, signal, None if ctas is None else int(at(ctas, row, lane)))
            if pair:
                signals = [signal] * len(signals)
            named = [self._signal(f, row, "delivered", flat, tensor.box_bytes) for flat in signals]
            own = [name for name in named if name >= 0] or named[:1]
            self._note(f, "load", row, own[0], tensor.box_bytes, tensor.box_bytes * len(own), int(fresh))
        super().tensor_load(f, target, descriptor, coords, barrier, ctas, pair, mask)

    def tensor_store(
        self, f: Fiber, descriptor: Any, coords: tuple, source: Any, reduce: str | None, mask: Any
    ) -> None:
        self.position += 1
        for row, lane in self._active_rows(f, mask):
            self._note(f, "store", row, self.tensor_map(int(at(descriptor, row, lane))).box_bytes)
        super().tensor_store(f, descriptor, coords, source, reduce, mask)

    def bulk_commit(self, f: Fiber, mask: Any) -> None:
        self.position += 1
        for row, _ in self._active_rows(f, mask):
            self._note(f, "commit", row)
        super().bulk_commit(f, mask)

    # Tensor cores ------------------------------------------------------------------------------------------------
    def wgmma_issue(self, f: Fiber, form: tuple, a: Any, b: Any, scale: Any) -> None:
        columns, element, in_registers = form[0], form[1], bool(form[-1])
        self._note_all(f, "mma", columns, 16 if element.endswith("16") else 32, int(in_registers))
        super().wgmma_issue(f, form, a, b, scale)

    def wgmma_wait(self, f: Fiber, count: int) -> None:
        self._note_all(f, "mma_wait", count)
        super().wgmma_wait(f, count)

    def _compute(self, f: Fiber, group: Any) -> None:
        """No arithmetic."""

    def tensor_mma(
        self, f: Fiber, group: int, kind: str, target: Any, a: Any, in_tmem: bool, b: Any, descriptor: Any,
        disabled: tuple, accumulate: Any, mask: Any,
    ) -> None:  # fmt: skip
        self.position += 1
        for row, lane in self._active_rows(f, mask):
            form = InstructionDescriptor.decode(int(at(descriptor, row, lane)), kind)
            depth = 16 if form.a.endswith("16") else 32
            shape = form.rows // group, form.columns, form.columns // group, depth
            self._note(f, "umma", row, *shape, int(in_tmem))
        super().tensor_mma(f, group, kind, target, a, in_tmem, b, descriptor, disabled, accumulate, mask)

    def _multiply_tensors(self, mma: Any) -> None:
        """No arithmetic: the accumulator is NaN."""
        first, columns = mma.target & 0xFFFF, mma.form.columns
        for slot in mma.slots:
            self.check_columns(np.array([slot]), np.array([first]), columns)
            self.tmem[slot, :, first : first + columns] = _NAN
            self.tmem_written[slot, :, first : first + columns] = True

    def tensor_commit(self, f: Fiber, address: Any, ctas: Any, mask: Any) -> None:
        self.position += 1
        for row, lane in self._active_rows(f, mask):
            self._note(f, "umma_commit", row, int(at(address, row, lane)) & 0xFFFFFF)
        super().tensor_commit(f, address, ctas, mask)

    # Cluster launch control --------------------------------------------------------------------------------------
    def try_cancel(self, f: Fiber, address: Any, barrier: Any, everywhere: bool, mask: Any) -> None:
        self.position += 1
        for row, lane in self._active_rows(f, mask):
            self._note(f, "next_tile", row, int(at(barrier, row, lane)) & 0xFFFFFF, RESPONSE_BYTES)
        super().try_cancel(f, address, barrier, everywhere, mask)


def trace(artifact: Any, problem: AttentionProblem, num_sms: int, config: Config | None = None) -> Trace:
    """Runs ``problem`` in the emulator. ``artifact``: a compiled variant, ``config`` its config, which some need for a
    workspace; ``num_sms``: CTAs that run at a time.

    Raises:
        EmulatorError: the kernel does something wrong, or something the emulator does not implement.
    """
    from fa4gen.case import Case

    watcher: type[_Watcher] = type("Watcher", (_Watcher,), {})
    arguments = launch_arguments(Case.make(problem), config, num_sms)
    compiled = load(artifact.object_path, artifact.ptx_path, artifact.variant_name)
    with np.errstate(all="ignore"):
        execute(compiled, arguments, machine_type=watcher, resident=num_sms)
    assert watcher.notes is not None
    return watcher.notes
