"""The allocator setting: fewer page faults for buffers that come and go."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from moe_trainer.moe.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for i in range(60):
    if i == 40:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.full((2**24,), 1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_blocks_are_reused_without_page_faults() -> None:
    faults = {}
    for mode in ("default", "keep"):
        command = [sys.executable, "-c", CODE, mode]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        faults[mode] = int(done.stdout)
    assert faults["keep"] < 20 < faults["default"]
