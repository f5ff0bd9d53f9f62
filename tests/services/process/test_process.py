"""How a service process runs, logs and leaves."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import structlog

from services.process.telemetry import configure_logging, get_logger
from tests.patience import HANG_S

PROGRAM = """
import asyncio, sys
from services.process.lifecycle import run_until_signalled
from services.process.telemetry import configure_logging

configure_logging("test")

async def main(stop):
    print("up", flush=True)
    {body}

sys.exit(run_until_signalled(main, grace_s={grace_s}))
"""


# However busy the machine is.
ENDED_S = HANG_S
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Runs a program whose service has this body, and waits until it is up."""
    with contextlib.ExitStack() as children:

        def start(body: str, grace_s: float = 20.0) -> subprocess.Popen[str]:
            code = PROGRAM.format(body=body, grace_s=grace_s)
            child = children.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
            children.callback(child.kill)
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            return child

        yield start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_and_an_orderly_end_has_status_0(start: Start, number: signal.Signals) -> None:
    child = start("await stop.wait(); print('drained')")
    child.send_signal(number)
    out, _ = child.communicate(timeout=ENDED_S)
    assert (child.returncode, out) == (0, "drained\n")


def test_a_service_that_ends_by_itself_has_status_0(start: Start) -> None:
    child = start("return")
    child.communicate(timeout=ENDED_S)
    assert child.returncode == 0


def test_who_does_not_leave_in_time_is_cancelled_and_has_status_1(start: Start) -> None:
    body = "\n    try: await asyncio.Event().wait()\n    finally: print('cleaned up')"
    child = start(body, grace_s=0.1)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=ENDED_S)
    assert (child.returncode, out) == (1, "cleaned up\n")
    assert "did not drain" in err


def test_a_service_that_swallows_a_cancellation_still_ends(start: Start) -> None:
    body = "\n    try: await asyncio.Event().wait()\n    except BaseException: pass\n    await asyncio.Event().wait()"
    child = start(body, grace_s=0.1)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=ENDED_S)
    assert child.returncode == 1


def test_a_second_signal_hurries(start: Start) -> None:
    child = start("await stop.wait(); print('asked', flush=True); await asyncio.Event().wait()", grace_s=600)
    child.send_signal(signal.SIGTERM)
    assert child.stdout is not None
    assert child.stdout.readline() == "asked\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=ENDED_S)
    assert child.returncode == 1


def test_an_error_of_the_service_is_not_swallowed(start: Start) -> None:
    child = start("raise LookupError('no such thing')")
    _, err = child.communicate(timeout=ENDED_S)
    assert child.returncode == 1
    assert "LookupError: no such thing" in err


def test_every_line_says_which_process_wrote_it_and_is_json_where_nobody_looks() -> None:
    stream = io.StringIO()
    try:
        configure_logging("rollout", stream=stream, worker="w-1")
        get_logger().bind(job="j").info("hello", count=3)
        get_logger().debug("not shown")
    finally:
        structlog.reset_defaults()
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    del record["timestamp"]
    assert record == {
        "service": "rollout",
        "worker": "w-1",
        "job": "j",
        "event": "hello",
        "count": 3,
        "level": "info",
    }
