"""Cluster launch control: a running CTA takes over a cluster of the grid that has not started."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4gen.emulator.copies import AsyncOp
from fa4gen.emulator.fiber import Fiber, at
from fa4gen.emulator.state import SLOT_BITS
from fa4gen.emulator.tcgen05 import TensorOps

__all__ = ["ClusterLaunchOps"]

# The response is opaque to programs: here the coordinates of the cluster's first CTA, and whether there is one.
RESPONSE_BYTES = 16


class ClusterLaunchOps(TensorOps):
    """clusterlaunchcontrol instructions: a part of the machine."""

    def try_cancel(self, f: Fiber, address: Any, barrier: Any, everywhere: bool, mask: Any) -> None:
        """Asks for a cluster. The answer comes to ``address``, in every CTA of the cluster if ``everywhere``.

        Clusters go out in launch order. A random schedule refuses at times although some are left: the hardware may
        just have started them, and here they start in a later wave.
        """
        for row, lane in self.issuers(f, mask, address, barrier):
            slot, warp = int(f.slots[row]), int(f.warps[row])
            flat = self.one_flat(slot, int(at(address, row, lane)), RESPONSE_BYTES, 16)
            signal = self.one_flat(slot, int(at(barrier, row, lane)), 8, 8)
            ctas = (1 << self.cluster_size) - 1 if everywhere else None
            targets, signals = self.targets(slot, flat, ctas), self.targets(slot, signal, ctas)
            clocks: list[Any] = [self.races and self.races.load_issued(warp, self.mbarrier_at(s)) for s in signals]

            def run(targets: list[int] = targets, signals: list[int] = signals, clocks: list[Any] = clocks) -> None:
                granted = bool(self.waiting) and not self.schedule.chance(0.2)
                first = self.waiting.popleft()[0] if granted else (0xFFFFFFFF,) * 3
                response = np.array([*first, granted], np.uint32)
                for target, signal, clock in zip(targets, signals, clocks, strict=True):
                    self.put_shared(target, response, slice(target >> 4, (target >> 4) + 1))
                    if self.races:
                        self.races.shared_async(clock, target, RESPONSE_BYTES, True)
                        self.races.load_finished(clock, self.mbarrier_at(signal))
                    self.complete_tx(signal, RESPONSE_BYTES)

            what = f"clusterlaunchcontrol response to {flat & ((1 << SLOT_BITS) - 1):#x}"
            self.submit(AsyncOp(what, slot, run))
