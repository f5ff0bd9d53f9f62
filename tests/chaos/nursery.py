"""``python -m tests.chaos.nursery``: a warm interpreter that gives birth to the processes of a run.

Starting Python with torch takes seconds of a core; forked from here a trainer stands after a tenth of a second, so that
hundreds can be killed in minutes. What is forked is a process of its own that runs the very entry of its service; only
the imports are shared. Orders come as lines of JSON on standard input, births and deaths leave as lines on standard
output.

The rule kept here: nothing but imports happens before a birth (no event loop, no thread, no random number).
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

import services.api.__main__ as api
import services.rollout.__main__ as rollout
import services.trainer.__main__ as trainer
from services import host_service
from services.children import die_with_parent
from tests.chaos import engine

SERVICES: dict[str, Callable[[], int]] = {
    "api": api.main,
    "engine": engine.main,
    "environments": host_service.main,
    "rollout": rollout.main,
    "trainer": trainer.run,
}


def give_birth(order: dict[str, Any]) -> int:
    die_with_us = die_with_parent()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        assert die_with_us is not None
        die_with_us()
        _hand_over(order["log"])
        os.environ.update(order["env"])
        sys.argv = [f"services.{order['service']}", *order["argv"]]
        random.seed()
        status = SERVICES[order["service"]]()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _hand_over(log: str) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for target in (1, 2):
        os.dup2(file, target)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for one in os.listdir("/proc/self/fd"):
        if int(one) > 2:
            try:
                os.close(int(one))
            except OSError:
                continue


def main() -> None:
    gc.freeze()
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tell({"ready": os.getpid()})
    rest = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        bury()
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *orders, rest = (rest + data).split(b"\n")
        for line in orders:
            order = json.loads(line)
            tell({"born": order["id"], "pid": give_birth(order)})


def bury() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        tell({"died": pid, "status": os.waitstatus_to_exitcode(status)})


def tell(record: dict[str, Any]) -> None:
    os.write(1, json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    main()
