"""The CUDA engine with kernels that misbehave on purpose: an artifact's name says how."""

from __future__ import annotations

import torch

from fa4gen.accuracy import reference
from fa4gen.measure.cuda import CudaEngine
from fa4gen.problem import AttentionProblem


class StubEngine(CudaEngine):
    def _kernel(self, artifact):
        return getattr(self, artifact.variant_name)

    def works(self, q, k, v, o, scale, num_sms):
        problem = AttentionProblem(*q.shape[::2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        o.copy_(reference(q, k, v, problem, scale)[0])

    def hangs(self, *arguments):
        torch.cuda._sleep(1 << 50)

    def faults(self, q, *arguments):
        q.view(-1)[torch.full((1,), q.numel(), device=q.device)] += 1  # out of bounds: a device-side assertion

    def refuses(self, q, *arguments):
        raise ValueError("Mismatched type on argument #0")

    def writes_nothing(self, *arguments):
        pass


class SabotagedEngine(CudaEngine):
    """Real kernels, but those of ``tile_n`` 96 hang and those of 112 fault."""

    def _kernel(self, artifact):
        source = artifact.source_path.read_text()
        if "TILE_N = 96\n" in source:
            return lambda *arguments: torch.cuda._sleep(1 << 50)
        if "TILE_N = 112\n" in source:
            return lambda q, *rest: q.view(-1)[torch.full((1,), q.numel(), device=q.device)].add_(1)
        return super()._kernel(artifact)
