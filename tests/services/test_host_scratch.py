"""Who starts a host may be killed while the environment is still being imported: no temporary directory stays behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tests.services.rollout_kit import until

WORLD = """
import os
import time
from pathlib import Path

Path(os.environ["HOME"], "importing").write_text(str(os.getpid()))
time.sleep(300)
"""
STARTS_A_HOST = """
import asyncio, sys
from services.host_server import ForkServer, HostOrder

asyncio.run(ForkServer.boot(HostOrder(sys.argv[1], {}, {})))
"""


async def test_a_worker_that_is_killed_while_a_host_comes_up_leaves_no_directory(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(WORLD)
    environment = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    worker = subprocess.Popen([sys.executable, "-c", STARTS_A_HOST, f"{tmp_path / 'slow.py'}:World"], env=environment)
    try:
        await until(lambda: (tmp_path / "importing").exists() and bool((tmp_path / "importing").read_text()), 60.0)
    finally:
        worker.kill()
        await asyncio.to_thread(worker.wait)
    host = Path("/proc", (tmp_path / "importing").read_text())
    await until(lambda: not host.exists() or "Z" in (host / "stat").read_text().rpartition(")")[2].split()[0])
    assert list(tmp_path.glob("gspo-env-*")) == []
