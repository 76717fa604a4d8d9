"""A problem with its tensors, forward or backward: what a kernel is given, in order, and the verdict on its outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4gen.accuracy import (
    AccuracyReport,
    Expected,
    check,
    default_scale,
    expect,
    make_inputs,
    poisoned_outputs,
    sample_rows,
)
from fa4gen.config import Config
from fa4gen.errors import UsageError
from fa4gen.gradients import (
    ExpectedGradients,
    check_gradients,
    expect_gradients,
    make_gradient_inputs,
    poisoned_gradients,
    sample_keys,
)
from fa4gen.problem import AttentionProblem

__all__ = ["Case"]

INPUTS = {"fwd": ("q", "k", "v"), "bwd": ("q", "k", "v", "o", "do", "lse")}


@dataclass(frozen=True)
class Case:
    """``inputs`` and ``outputs`` by name, in the order of a kernel's arguments. ``scale``: the softmax scale."""

    problem: AttentionProblem
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    scale: float

    @classmethod
    def make(
        cls, problem: AttentionProblem, kind: str = "normal", seed: int = 0, device: torch.device | str = "cpu"
    ) -> Case:
        """On inputs of ``kind``: see :func:`fa4gen.accuracy.make_inputs` and
        :func:`fa4gen.gradients.make_gradient_inputs`, which raise UsageError for an unknown one."""
        make = make_gradient_inputs if problem.op == "bwd" else make_inputs
        return cls.of(problem, make(problem, kind, seed, device))

    @classmethod
    def of(cls, problem: AttentionProblem, inputs: Sequence[Tensor]) -> Case:
        """On Q, K, V or, for a backward, Q, K, V, O, dO, LSE. The outputs are poisoned with NaN.

        Raises:
            UsageError: another number of inputs.
        """
        names = INPUTS[problem.op]
        if len(inputs) != len(names):
            raise UsageError(f"op {problem.op} takes {', '.join(names)}; got {len(inputs)} tensors")
        device = inputs[0].device
        if problem.op == "bwd":
            outputs = dict(zip(("dq", "dk", "dv"), poisoned_gradients(problem, device), strict=True))
        else:
            o, lse = poisoned_outputs(problem, device)
            outputs = {"o": o} if lse is None else {"o": o, "lse": lse}
        return cls(problem, dict(zip(names, inputs, strict=True)), outputs, default_scale(problem))

    def workspace(self, config: Config | None) -> Tensor | None:
        """Poisoned scratch memory for a kernel with ``config``, or None if it takes none, as a forward by default.

        Raises:
            UsageError: a backward without a config.
        """
        if config is None:
            if self.problem.op == "fwd":
                return None
            raise UsageError(f"a backward's workspace depends on its config: give one for {self.problem}")
        from fa4gen.workspace import workspace_elements

        size = workspace_elements(self.problem, config)
        if size == 0:
            return None
        return torch.full((size,), math.nan, dtype=torch.float32, device=self.inputs["q"].device)

    def arguments(self, config: Config | None, num_sms: int) -> list[Any]:
        """What a launch of a kernel with ``config`` takes, a new workspace included; ``config`` as there."""
        workspace = self.workspace(config)
        scratch = [] if workspace is None else [workspace]
        return [*self.inputs.values(), *self.outputs.values(), *scratch, self.scale, num_sms]

    def poison(self) -> None:
        """Fills the outputs with NaN again."""
        for output in self.outputs.values():
            output.fill_(math.nan)

    def expect(self, seed: int | None = None) -> Expected | ExpectedGradients:
        """The reference: for all rows, or for those that ``seed`` samples from a large problem."""
        p = self.problem
        rows = None if seed is None else sample_rows(p, seed)
        if p.op == "fwd":
            q, k, v = self.inputs.values()
            return expect(q, k, v, p, self.scale, rows)
        keys = None if seed is None else sample_keys(p, seed)
        q, k, v, o, do, lse = self.inputs.values()
        return expect_gradients(q, k, v, o, do, lse, p, self.scale, rows, keys)

    def check(self, expected: Expected | ExpectedGradients, outputs: Sequence[Tensor] | None = None) -> AccuracyReport:
        """Compares ``outputs`` (default: the case's own; LSE may be left out) with what :meth:`expect` gave."""
        outputs = tuple(self.outputs.values()) if outputs is None else outputs
        if isinstance(expected, ExpectedGradients):
            dq, dk, dv = outputs
            return check_gradients(dq, dk, dv, expected)
        o, *lse = outputs
        return check(o, lse[0] if lse else None, expected)
