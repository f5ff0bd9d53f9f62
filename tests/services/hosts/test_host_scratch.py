"""Whoever is killed, a host or who started it, and when: no temporary directory stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.hosts.server import HostOrder, RunningHost
from services.hosts.walls import scratch

WORLD = """
import os
import time
from pathlib import Path

Path(os.environ["HOME"], "importing").write_text(str(os.getpid()))
time.sleep(300)
"""
QUICK = """
class World:
    tasks = [{}]

    def reset(self):
        return "begin"

    def get_reward(self):
        return 0.0
"""
STARTS_A_HOST = """
import asyncio, sys
from services.hosts.server import RunningHost, HostOrder

asyncio.run(RunningHost.boot(HostOrder(sys.argv[1], {}, {})))
"""
STARTS_AND_SAYS = """
import asyncio, sys
from services.hosts.server import RunningHost, HostOrder

async def start():
    host = await RunningHost.boot(HostOrder(sys.argv[1]))
    print(host.pid, flush=True)
    await asyncio.sleep(300)

asyncio.run(start())
"""
FOLDERS = f"{scratch.PREFIX}*"


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
    assert list(tmp_path.glob(FOLDERS)) == []


async def test_a_host_that_is_killed_leaves_no_directory_to_who_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "quick.py").write_text(QUICK)
    host = await RunningHost.boot(HostOrder(f"{tmp_path / 'quick.py'}:World"))

    def is_there() -> bool:
        return any(tmp_path.glob(FOLDERS))

    try:
        await asyncio.to_thread(wait_until, is_there)
        os.kill(host.pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not is_there())
    finally:
        await host.close()


async def test_the_next_host_removes_what_a_host_and_its_starter_left_when_both_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "quick.py").write_text(QUICK)
    order = HostOrder(f"{tmp_path / 'quick.py'}:World")
    living = await RunningHost.boot(order)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    program = [sys.executable, "-c", STARTS_AND_SAYS, order.ref]
    starter = await asyncio.create_subprocess_exec(*program, env=environment, stdout=subprocess.PIPE)
    try:
        assert starter.stdout is not None
        host = int(await starter.stdout.readline())
        await asyncio.to_thread(wait_until, lambda: len(folders(tmp_path)) == 2)
        starter.send_signal(signal.SIGSTOP)
        os.kill(host, signal.SIGKILL)
        starter.kill()
        await starter.wait()
        assert len(folders(tmp_path)) == 2
        following = await RunningHost.boot(order)
        try:
            await asyncio.to_thread(wait_until, lambda: folders(tmp_path) == {living.scratch, following.scratch})
        finally:
            await following.close()
        assert folders(tmp_path) == {living.scratch}
    finally:
        with contextlib.suppress(ProcessLookupError):
            starter.kill()
        await living.close()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(tmp_path: Path) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            scratch.sweep(tmp_path)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for number in range(200):
            path = tmp_path / f"{scratch.PREFIX}{number}"
            lock = scratch.make(str(path))
            assert path.is_dir()
            os.close(lock)
    finally:
        stop.set()
        sweeper.join()


def folders(parent: Path) -> set[str]:
    return {str(path) for path in parent.glob(FOLDERS)}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
