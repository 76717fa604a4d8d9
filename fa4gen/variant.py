"""A variant: family + target + compile-time part of a problem + config. One rendered source, one digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from fa4gen.config import Config, Family, get_family
from fa4gen.problem import AttentionProblem, StaticProblem

__all__ = ["Variant"]


@dataclass(frozen=True)
class Variant:
    """What one compiled kernel is made from. ``arch`` is the target, for instance "sm_90a"."""

    arch: str
    static: StaticProblem
    config: Config

    @classmethod
    def of(cls, arch: str, problem: AttentionProblem, config: Config) -> Variant:
        """The variant that runs ``problem`` with ``config`` on ``arch``."""
        return cls(arch, problem.static, config)

    @property
    def family(self) -> Family:
        """Its kernel family.

        Raises:
            UsageError: no family runs this op on this arch.
        """
        return get_family(self.static.op, self.arch)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits over family, target, problem part and config: equal variants, equal digests."""
        static = asdict(self.static)
        if self.static.op == "fwd":  # where it is no choice; and digests are recorded
            del static["deterministic"]
        data = {
            "family": self.family.name,
            "arch": self.arch,
            "static": static,
            "config": asdict(self.config),
        }
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def name(self) -> str:
        """A readable identifier, valid in Python and C, unique through its digest."""
        static, config = self.static, self.config
        dims = f"d{static.head_dim}" + (f"v{static.head_dim_v}" if static.head_dim_v != static.head_dim else "")
        words = [self.family.name, static.dtype, dims]
        if static.gqa_ratio > 1:
            words.append(f"g{static.gqa_ratio}")
        words += ["causal"] * static.causal + ["lse"] * static.return_lse + ["det"] * static.deterministic
        shape = (getattr(config, knob, None) for knob in ("tile_m", "tile_n", "kv_stages"))
        words.append("x".join(str(size) for size in shape if size is not None))
        return "_".join([*words, self.digest[:8]])
