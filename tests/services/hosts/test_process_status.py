"""What the kernel says of a process is read from its own lines: the name that a process chooses stands there too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.hosts.inside.limits import shared_bytes
from services.hosts.server import _number_inside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

HELD_BYTES = 8 << 20
NAMED = f"""
import mmap, sys
held = mmap.mmap(-1, {HELD_BYTES})
held.write(b"x" * {HELD_BYTES})
with open("/proc/self/comm", "w") as name:
    name.write(sys.argv[1])
print("named", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["\vRssShmem: 0\v", "\rRssShmem: 0\r", "\fNSpid: 7", "\rNSpid: 7"])
def test_a_process_says_nothing_of_itself_by_its_name(name: str) -> None:
    command = [sys.executable, "-c", NAMED, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "named\n"
        assert shared_bytes(process.pid) >= HELD_BYTES
        assert _number_inside(process.pid) == process.pid
        assert process.stdin is not None
        process.stdin.close()
