"""Ranks of a trainer belong to what started them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.process.ports import free_port
from services.state.server import RedisServer
from tests.apparatus.processes import is_running

RANK_WITHOUT_OTHERS = """
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-m", "services.trainer"], env={**os.environ, "RANK": "0", "LOCAL_RANK": "0"})
print(rank.pid, flush=True)
rank.wait()
"""


def test_a_rank_does_not_outlive_what_started_it(redis_server: RedisServer, tmp_path: Path) -> None:
    """A torchrun that is killed takes its ranks with it; they would wait for each other and for Redis for ever."""
    port = free_port()
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings = {"GSPO_REDIS_URL": redis_server.url, "GSPO_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-c", RANK_WITHOUT_OTHERS]
    with subprocess.Popen(command, env=os.environ | meeting | settings, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        until(lambda: listens(port))
        parent.kill()
    try:
        until(lambda: not is_running(rank))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
