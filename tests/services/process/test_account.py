"""A service that is root says so, in its log and to the doctor; any other says nothing."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
from structlog.testing import capture_logs

from gspo_core.cli.finding import Verdict
from services.launch import checks, machine_checks
from services.process import lifecycle
from tests.patience import HANG_S

DEADLINE_S = HANG_S


@pytest.mark.parametrize(("user", "is_told"), [(0, True), (10_001, False)])
def test_root_is_told_of_once(user: int, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    lifecycle.tell_of_root.cache_clear()
    with capture_logs() as lines:
        lifecycle.tell_of_root()
        lifecycle.tell_of_root()
    lifecycle.tell_of_root.cache_clear()
    told = [line for line in lines if line["event"] == "this service runs as root"]
    assert [line["log_level"] for line in told] == ["warning"] * is_told
    assert all("an account of its own" in line["advice"] for line in told)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, of whom it speaks")
async def test_a_service_says_so_once_it_listens() -> None:
    program = (
        "import asyncio; from services.process.http_server import serve_http\n"
        "async def app(scope, receive, send): pass\n"
        "asyncio.run(serve_http(app, '127.0.0.1', 0, asyncio.Event(), grace_s=1, settings='it', lifespan=False))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            first, second = [(await process.stdout.readline()).decode() for _ in range(2)]
    finally:
        process.kill()
        await process.wait()
    assert "listening" in first
    assert "this service runs as root" in second


@pytest.mark.parametrize(("user", "verdict"), [(0, Verdict.NOTE), (10_001, Verdict.OK)])
def test_the_doctor_says_whether_it_is_root(user: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = machine_checks.account()
    assert found.verdict is verdict
    assert ("root" in found.text) == (user == 0)
    assert machine_checks.account in checks.CHECKS
