"""What an H200 computed for the sampled variants, and how the emulator's outputs compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sampling import Case, make_inputs

from fa4gen.artifact_cache import Artifact
from fa4gen.blocks.exp2_coefficients import EXP2_COEFFICIENTS
from fa4gen.config import FlashFwdSm90Config, config_from_dict, config_to_dict, get_family
from fa4gen.problem import AttentionProblem
from fa4gen.variant import Variant

__all__ = ["RECORDED", "Record", "difference", "inputs_digest", "load", "lse_limit", "record", "save", "take_rows"]

RECORDED = Path(__file__).parents[1] / "data" / "hardware_h200.npz"
ROW_BYTES = 16384  # of O a case: all together stay under a megabyte
# Runs a case's artifact on Q, K, V with a number of SMs: O and, if the problem asks for it, LSE, on the CPU.
Run = Callable[[Artifact, Case, tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Record:
    """Some rows of a case's outputs. ``o``: their bits, (rows, head_dim_v); ``lse``: (rows,) or empty."""

    case: Case
    inputs: str
    o: np.ndarray
    lse: np.ndarray


def inputs_digest(inputs: Iterable[torch.Tensor]) -> str:
    """Tells whether two machines made the same inputs."""
    digest = hashlib.sha256()
    for tensor in inputs:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def take_rows(case: Case, o: torch.Tensor, lse: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """A random choice of rows, the same for the same case: (bits of O, LSE)."""
    bits = o.contiguous().view(torch.int16).numpy().reshape(-1, case.problem.head_dim_v)
    count = min(len(bits), ROW_BYTES // (2 * case.problem.head_dim_v))
    rows = np.sort(np.random.default_rng(case.seed).choice(len(bits), count, replace=False))
    if lse is None:
        return bits[rows], np.empty(0, np.float32)
    return bits[rows], lse.transpose(1, 2).contiguous().numpy().ravel()[rows]


def record(case: Case, artifact: Artifact, run: Run) -> Record:
    """Runs a case."""
    inputs = make_inputs(case.problem, case.kind, case.seed)
    return Record(case, inputs_digest(inputs), *take_rows(case, *run(artifact, case, inputs)))


def save(path: Path, records: list[Record], about: dict[str, Any]) -> None:
    """Writes one file. ``about``: device and versions."""
    cases = [
        {
            "problem": str(r.case.problem), "arch": r.case.variant.arch, "kind": r.case.kind, "seed": r.case.seed,
            "config": config_to_dict(r.case.variant.config), "inputs": r.inputs,
        }
        for r in records
    ]  # fmt: skip
    arrays = {f"{name}_{i}": getattr(r, name) for i, r in enumerate(records) for name in ("o", "lse")}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, cases=json.dumps({"about": about, "cases": cases}), **arrays)


def load(path: Path) -> list[Record]:
    """What :func:`save` wrote."""
    with np.load(path) as data:
        entries = json.loads(str(data["cases"]))["cases"]
        return [_entry(entry, data[f"o_{i}"], data[f"lse_{i}"]) for i, entry in enumerate(entries)]


def _entry(entry: dict[str, Any], o: np.ndarray, lse: np.ndarray) -> Record:
    problem = AttentionProblem.parse(entry["problem"])
    config = config_from_dict(get_family(problem.op, entry["arch"]).name, entry["config"])
    variant = Variant.of(entry["arch"], problem, config)
    return Record(Case(problem, variant, entry["kind"], entry["seed"]), entry["inputs"], o, lse)


def difference(expected: np.ndarray, got: np.ndarray, dtype: str) -> np.ndarray:
    """|got - expected| in units in the last place of bf16, from the bits of O, (rows, head_dim_v).

    An element far below its row's root mean square, by cancellation, counts in units of an eighth of that: there the
    last bits of P decide, which in turn hang on how the tensor core adds up S.
    """
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    a, b = (torch.from_numpy(bits).view(kind).double().numpy() for bits in (expected, got))
    size = np.maximum(np.abs(a), np.sqrt(np.mean(a**2, axis=1, keepdims=True)) / 8)
    return np.abs(a - b) / np.exp2(np.floor(np.log2(np.maximum(size, 2.0**-126))) - 7)


def lse_limit(config: FlashFwdSm90Config, lse: np.ndarray) -> np.ndarray:
    """How far the emulator's LSE may be from the hardware's, elementwise.

    1e-5, more beside large scores (as peaked inputs have them), where fp32 itself is coarser. The polynomial 2^x is not
    continuous at integers, 2^floor(x) * p(0) against 2^(floor(x) - 1) * p(1): scores that differ in the last bit, as
    the tensor core's sum may, can fall on either side. A row's maximum always lies there.
    """
    limit = 1e-5 * np.maximum(1, np.abs(lse) / 8)
    if config.exp2_poly_fraction:
        limit += abs(sum(EXP2_COEFFICIENTS[config.exp2_poly_degree]) / 2 - 1)
    return limit
