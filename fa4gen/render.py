"""Variant to source text. Same variant, same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import jinja2
import yaml

from fa4gen.arch import get_arch
from fa4gen.feasibility import mma_registers, padded
from fa4gen.resources import resource_dir
from fa4gen.variant import Variant

__all__ = ["render"]

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
    packed = config.pack_gqa and static.gqa_ratio > 1
    template = _environment().get_template(family.template)
    return template.render(
        asdict(static) | asdict(config) | _CONTEXTS[family.name](variant),
        name=variant.name,
        digest=variant.digest,
        arch=variant.arch,
        config_yaml=yaml.safe_dump(asdict(config), sort_keys=False).rstrip(),
        element_type=ELEMENT_TYPES[static.dtype],
        head_dim_padded=padded(static.head_dim),
        head_dim_v_padded=padded(static.head_dim_v),
        # Index expressions that only some variants need.
        kv_head="" if packed or static.gqa_ratio == 1 else " // GQA_RATIO",
        query_of_row=" // GQA_RATIO" if packed else "",
    )


def _flash_fwd_sm90(variant: Variant) -> dict[str, Any]:
    return {"mma_regs": mma_registers(variant.config, get_arch(variant.arch))}


# Family -> what its template needs beside the knobs, the problem and the names above.
_CONTEXTS: dict[str, Callable[[Variant], dict[str, Any]]] = {"flash_fwd_sm90": _flash_fwd_sm90}
