"""The probe of the images, in bash, says of the same process what ``services.process.health`` says."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from services.process.health import Health, born, examine, since_boot
from tests.patience import HANG_S

PROBE = Path(__file__).parents[3] / "services" / "process" / "probe.sh"


def probe(*words: str) -> tuple[int, str]:
    done = subprocess.run(["bash", PROBE, *words], capture_output=True, text=True, timeout=HANG_S, check=False)
    return done.returncode, done.stderr


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_is_asked() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        port = str(server.server_port)
        assert probe("http", port, "/healthz") == (0, "")
        assert probe("http", port, "/readyz") == (1, "/readyz answers 503\n")
        server.shutdown()
    assert probe("http", port, "/healthz")[0] != 0


async def test_a_living_process_is_alive_and_ready_when_it_says_so(tmp_path: Path) -> None:
    stop, file = asyncio.Event(), tmp_path / "health"
    async with Health(file, stop) as health:
        while not file.exists():
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(probe, "file", str(file)) == (0, "")
        assert await asyncio.to_thread(probe, "file", str(file), "--ready") == (1, "not ready\n")
        health.is_ready = True
        stop.set()
        while json.loads(file.read_text())["ready"]:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(probe, "file", str(file)) == (0, "")
    assert (await asyncio.to_thread(probe, "file", str(file)))[0] != 0


async def _ask_a_living_process(folder: Path) -> tuple[int, str]:
    stop, file = asyncio.Event(), folder / "health"
    async with Health(file, stop):
        while not file.exists():
            await asyncio.sleep(0.01)
        return await asyncio.to_thread(probe, "file", str(file))


def test_a_machine_that_slept_makes_no_process_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's monotonic clock stands still meanwhile, and /proc/uptime goes on."""
    awake = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: awake() - 600)
    assert asyncio.run(_ask_a_living_process(tmp_path)) == (0, "")


def test_a_container_whose_uptime_is_its_own_is_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In gVisor and with lxcfs /proc/uptime is not what the clock of the kernel says."""
    of_kernel = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: of_kernel(clock) - 600)
    assert asyncio.run(_ask_a_living_process(tmp_path)) == (0, "")


def test_where_no_clock_goes_on_while_the_machine_sleeps_another_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.process.health.UPTIME", Path("/nowhere"))
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert before <= since_boot() <= time.clock_gettime(time.CLOCK_MONOTONIC)


@pytest.mark.parametrize(
    ("changes", "written_s", "is_alive"),
    [
        ({}, 0, True),
        ({"born": "1"}, 0, False),
        ({"pid": 2**22 + 1}, 0, False),
        ({}, -600, False),
        ({}, 600, False),
        ({"ready": False}, 0, False),
    ],
)
def test_both_probes_agree(changes: Mapping[str, object], written_s: float, is_alive: bool, tmp_path: Path) -> None:
    """``written_s``: when, from now."""
    pid = os.getpid()
    file = tmp_path / "health"
    at = since_boot() + written_s
    file.write_text(json.dumps({"at": at, "ready": True, "pid": pid, "born": born(pid)} | {**changes}))
    assert (examine(file, ready=True, now=since_boot()) is None) is is_alive
    assert (probe("file", str(file), "--ready")[0] == 0) is is_alive
