"""What the demo says of its memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from examples.demo.memory import PeakMemory, memory_of_tree

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")

MIB = 2**20
# Holds 64 MiB in a process two below this one until its input ends.
HOLDER = "held = b'x' * (64 << 20); print('held', flush=True); input()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDER!r}])"


def test_the_whole_tree_counts_and_what_has_ended_stays_in_the_peak() -> None:
    before = memory_of_tree(os.getpid())
    assert before is not None
    with PeakMemory() as peak:
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"held\n"
        held = memory_of_tree(os.getpid())
        assert held is not None
    parent.communicate(b"\n")
    assert held - before >= 64 * MIB
    assert peak.num_bytes is not None
    assert peak.num_bytes - before >= 60 * MIB
    after = memory_of_tree(os.getpid())
    assert after is not None
    assert after < held - 60 * MIB
