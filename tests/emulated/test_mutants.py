"""A sample of mutants of the forward kernels: what synchronises is missed when it is gone."""

from __future__ import annotations

import mutation
import pytest
from test_flash_fwd_sm90 import CASES

from fa4gen.emulator.executor import load

# Kinds whose every mutant of these kernels must be noticed. Not among them: the turn of pingpong warpgroups (their
# order is for speed), a second wgmma.fence with no register access since the first, the last release of a stage.
ALWAYS_CAUGHT = {
    "mbarrier.init", "mbarrier.arrive.expect_tx", "fence.mbarrier_init", "fence.proxy", "wgmma.commit_group",
    "wgmma.wait_group", "cp.commit_group", "cp.wait_group", "bar.warp.sync", "barrier.cluster.arrive",
}  # fmt: skip


@pytest.mark.parametrize(("case", "sms", "every"), [("pingpong", 3, 4), ("p_in_smem", 3, 4), ("multicast", 4, 5)])
def test_most_mutants_are_caught(build, case, sms, every):
    artifact, problem = build(*CASES[case])
    compiled = load(artifact.object_path, artifact.ptx_path, artifact.variant_name)
    assert mutation.judge(compiled, problem, sms) == ("", "")
    outcomes = [o for o in mutation.survey(compiled, problem, sms, every) if o.how != "not run"]
    survivors = [o for o in outcomes if not o.how]
    assert not [o for o in survivors if o.kind in ALWAYS_CAUGHT]
    assert len(outcomes) > 8 and len(survivors) <= len(outcomes) // 4, survivors
