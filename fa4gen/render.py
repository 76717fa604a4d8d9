"""Variant to source text. Same variant, same bytes."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache

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
    static, config = variant.static, variant.config
    packed = config.pack_gqa and static.gqa_ratio > 1
    template = _environment().get_template(variant.family.template)
    return template.render(
        asdict(static) | asdict(config),
        name=variant.name,
        digest=variant.digest,
        arch=variant.arch,
        config_yaml=yaml.safe_dump(asdict(config), sort_keys=False).rstrip(),
        element_type=ELEMENT_TYPES[static.dtype],
        head_dim_padded=padded(static.head_dim),
        head_dim_v_padded=padded(static.head_dim_v),
        mma_regs=mma_registers(config, get_arch(variant.arch)),
        # Index expressions that only some variants need.
        kv_head="" if packed or static.gqa_ratio == 1 else " // GQA_RATIO",
        query_of_row=" // GQA_RATIO" if packed else "",
    )
