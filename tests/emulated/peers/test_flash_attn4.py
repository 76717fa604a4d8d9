"""Known-good kernels that nobody here wrote: flash-attn-4, right and free of reported races.

Needs flash-attn-4, quack-kernels, einops and triton on PYTHONPATH: ``make test-peers`` sees to it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not installed: run make test-peers"
)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_forward_and_backward(arch):
    script = Path(__file__).with_name("survey.py")
    done = subprocess.run(
        [sys.executable, str(script), arch], capture_output=True, text=True, timeout=1800, check=False
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(rows) == 36
    assert not [row for row in rows if not row["ok"]]
