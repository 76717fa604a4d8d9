"""A sample of mutants of the kernels: what synchronises is missed when it is gone."""

from __future__ import annotations

import mutation
import pytest

from fa4gen.emulator.executor import load

# Kinds whose every mutant of these kernels must be noticed. Not among them: a second wgmma.fence with no register
# access since the first, waits that others imply, bar.warp.sync where the warp has met (see docs/emulator.md).
ALWAYS_CAUGHT = {
    "mbarrier.init", "mbarrier.arrive.expect_tx", "fence.mbarrier_init", "fence.proxy", "wgmma.commit_group",
    "wgmma.wait_group", "barrier.cluster.arrive", "tcgen05.commit", "tcgen05.wait::st",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "every"), [("sm_90 pingpong", 4), ("sm_90 cooperative", 4), ("sm_90 cluster", 5), ("sm_100 one tile", 8)]
)
def test_most_mutants_are_caught(compiled, name, every):
    subject = mutation.SUBJECTS[name]
    artifact = compiled(subject.variant)
    program = load(artifact.object_path, artifact.ptx_path, artifact.variant_name)
    outcomes = list(mutation.survey(program, subject, every))
    survivors = [o for o in outcomes if not o.how]
    assert not [o for o in outcomes if o.how == "not run"], "the problems reach all of the kernel"
    assert not [o for o in survivors if o.kind in ALWAYS_CAUGHT]
    assert len(outcomes) > 8 and len(survivors) <= len(outcomes) // 3, survivors
