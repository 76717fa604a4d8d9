"""Variant to source text. Same variant, same bytes."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import jinja2
import yaml

from fa4gen.arch import Arch, get_arch
from fa4gen.config import FlashBwdSm90Config, FlashBwdSm100Config, FlashFwdSm90Config, FlashFwdSm100Config
from fa4gen.feasibility import (
    BWD_THREADS,
    bwd_other_registers,
    bwd_tmem_columns,
    dq_chunk,
    dq_stages_used,
    kv_stage_bytes,
    launch_registers,
    mma_registers,
    other_registers,
    p_split,
    padded,
    padded_bwd,
    padded_v,
    tmem_columns,
)
from fa4gen.problem import DTYPE_BYTES, StaticProblem
from fa4gen.resources import resource_dir
from fa4gen.variant import Variant

__all__ = ["diff", "render"]

ELEMENT_TYPES = {"bf16": "BFloat16", "fp16": "Float16"}


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource_dir("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )


def render(variant: Variant) -> str:
    """The variant's kernel as a Python module: reads like hand-written code, needs ``fa4gen.blocks`` and CuTe DSL.

    The module defines ``NAME``, ``entry`` (the host function for ``cute.compile``) and ``fake_arguments()``.
    """
    static, config, family = variant.static, variant.config, variant.family
    packed = getattr(config, "pack_gqa", False) and static.gqa_ratio > 1
    template = _environment().get_template(family.template)
    return template.render(
        asdict(static) | asdict(config) | _CONTEXTS[family.name](static, config, get_arch(variant.arch)),
        name=variant.name,
        digest=variant.digest,
        arch=variant.arch,
        config_yaml=yaml.safe_dump(asdict(config), sort_keys=False).rstrip(),
        element_type=ELEMENT_TYPES[static.dtype],
        head_dim_padded=padded(static.head_dim),
        head_dim_v_padded=padded_v(static.head_dim_v, config),
        # Index expressions that only some variants need.
        kv_head="" if packed or static.gqa_ratio == 1 else " // GQA_RATIO",
        query_of_row=" // GQA_RATIO" if packed else "",
    )


class _Line(str):
    """A line whose indentation does not count: a loop around a body is no change of the body."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Line) and self.strip() == other.strip()

    def __hash__(self) -> int:
        return hash(self.strip())


def diff(old: Variant, new: Variant) -> str:
    """From one variant's source to another's as a unified diff, empty where they agree.

    Indentation does not count, and names and digests stand at its head alone.
    """
    renamed = render(new).replace(new.name, old.name).replace(new.digest, old.digest)
    before, after = ([_Line(line) for line in source.splitlines()] for source in (render(old), renamed))
    return "".join(f"{line}\n" for line in difflib.unified_diff(before, after, old.name, new.name, lineterm=""))


def _tmem_allocation(columns: int) -> int:
    """TMEM is allocated in powers of two from 32."""
    return max(32, 1 << (columns - 1).bit_length())


def _flash_fwd_sm90(static: StaticProblem, config: FlashFwdSm90Config, arch: Arch) -> dict[str, Any]:
    return {"mma_regs": mma_registers(config, arch)}


def _flash_bwd_sm90(static: StaticProblem, config: FlashBwdSm90Config, arch: Arch) -> dict[str, Any]:
    return {
        "mma_regs": mma_registers(config, arch),
        "d_padded": padded_bwd(static.head_dim),
        "dv_padded": padded_bwd(static.head_dim_v),
    }


def _flash_fwd_sm100(static: StaticProblem, config: FlashFwdSm100Config, arch: Arch) -> dict[str, Any]:
    at_launch = launch_registers(128 * (config.q_stages + 2), arch)
    return {
        "kv_stage_elements": kv_stage_bytes(static, config) // DTYPE_BYTES[static.dtype],
        "p_split": p_split(config),
        "tmem_columns": _tmem_allocation(tmem_columns(static, config)),
        "other_regs": other_registers(config, arch),
        "correction_setmaxnreg": "increase" if config.correction_regs > at_launch else "decrease",
    }


def _flash_bwd_sm100(static: StaticProblem, config: FlashBwdSm100Config, arch: Arch) -> dict[str, Any]:
    at_launch = launch_registers(BWD_THREADS, arch)
    return {
        "d_padded": padded_v(static.head_dim, config),
        "dv_padded": padded_v(static.head_dim_v, config),
        "dq_chunk": dq_chunk(static, config),
        "dq_stages_used": dq_stages_used(static, config),
        "tmem_columns": _tmem_allocation(bwd_tmem_columns(static, config)),
        "other_regs": bwd_other_registers(config, arch),
        "compute_setmaxnreg": "increase" if config.compute_regs > at_launch else "decrease",
        "reduce_setmaxnreg": "increase" if config.reduce_regs > at_launch else "decrease",
    }


# Family -> what its template needs beside the knobs, the problem and the names above.
_CONTEXTS: dict[str, Callable[[StaticProblem, Any, Arch], dict[str, Any]]] = {
    "flash_fwd_sm90": _flash_fwd_sm90,
    "flash_fwd_sm100": _flash_fwd_sm100,
    "flash_bwd_sm90": _flash_bwd_sm90,
    "flash_bwd_sm100": _flash_bwd_sm100,
}
