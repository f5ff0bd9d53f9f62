"""Who starts a host may be killed while the environment is being imported: no temporary directory stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WORLD = """
import os
import time
from pathlib import Path

Path(os.environ["HOME"], "importing").write_text(str(os.getpid()))
time.sleep(300)
"""
STARTS_A_HOST = """
import asyncio, sys
from services.hosts.server import RunningHost, HostOrder

asyncio.run(RunningHost.boot(HostOrder(sys.argv[1], {}, {})))
"""


def test_a_worker_that_is_killed_while_a_host_comes_up_leaves_no_directory(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(WORLD)
    environment = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    reference, told = f"{tmp_path / 'slow.py'}:World", tmp_path / "importing"
    worker = subprocess.Popen([sys.executable, "-c", STARTS_A_HOST, reference], env=environment)
    try:
        wait_until(lambda: told.exists() and bool(told.read_text()))
    finally:
        worker.kill()
        worker.wait()
    host = Path("/proc", told.read_text())
    wait_until(lambda: not host.exists() or "Z" in (host / "stat").read_text().rpartition(")")[2].split()[0])
    assert list(tmp_path.glob("gspo-env-*")) == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
