"""What falls to the first process of a container is buried; what it started itself it is still told about."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import HANG_S

PROGRAM = """
import asyncio, ctypes, subprocess, sys
from pathlib import Path
from services.process.children import bury_orphans
from tests.patience import HANG_S

async def main():
    ctypes.CDLL(None).prctl(36, 1)  # orphans fall to us, as to the first process of a container
    burying = asyncio.create_task(bury_orphans(0.02))
    script = "sh -c 'exit 0' & echo $!; sh -c 'exit 0' & echo $!"
    orphans = subprocess.run(["sh", "-c", script], check=True, capture_output=True).stdout.decode().split()
    assert len(orphans) == 2
    own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    print(await asyncio.to_thread(own.wait), flush=True)
    async with asyncio.timeout(HANG_S):
        while any(Path("/proc", pid).exists() for pid in orphans):
            await asyncio.sleep(0.01)
    burying.cancel()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets orphans fall to a process of one's choice")
def test_orphans_that_have_ended_are_buried() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
