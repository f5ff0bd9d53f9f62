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
from typing import Any, NoReturn

import services.api.__main__ as api
import services.engine.__main__ as embedded
import services.gateway.__main__ as gateway
import services.rollout.__main__ as rollout
import services.trainer.__main__ as trainer
import services.trainer.attempt  # noqa: F401  for the processes of attempts: torch above all
from services.hosts import service
from services.process.children import die_with_parent
from services.trainer import attempt_main
from tests.chaos import engine


class Attempt:
    """The process of an attempt, forked from its trainer: what is imported in the nursery is there."""

    def __init__(self, stdin: int, stdout: int, stderr: int) -> None:
        die_with_trainer = die_with_parent()
        self.pid = os.fork()
        if self.pid == 0:
            assert die_with_trainer is not None
            _become(die_with_trainer, (stdin, stdout, stderr), attempt_main.main)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def become_agents() -> NoReturn:
    """Agents have a Python of their own, and nothing of ours is in it."""
    os.execv(sys.argv[1], sys.argv[1:])


SERVICES: dict[str, Callable[[], int]] = {
    "agents": become_agents,
    "api": api.main,
    "engine": engine.main,
    "embedded": embedded.main,
    "environments": service.main,
    "gateway": gateway.main,
    "rollout": rollout.main,
    "trainer": lambda: trainer.run(start=Attempt),
}


def give_birth(order: dict[str, Any]) -> int:
    die_with_us = die_with_parent()
    pid = os.fork()
    if pid == 0:
        assert die_with_us is not None
        os.environ.update(order["env"])
        sys.argv = [f"services.{order['service']}", *order["argv"]]
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(f"{order['log']}-{os.getpid()}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _become(die_with_us, (nothing, log, log), SERVICES[order["service"]])
    return pid


def _become(die_with_parent: Callable[[], None], streams: tuple[int, int, int], entry: Callable[[], int]) -> NoReturn:
    """What was forked is a process of its own that runs ``entry``."""
    status = 70
    try:
        gc.freeze()  # what is collected later would close files by numbers that are others' by then
        os.setsid()
        die_with_parent()
        _hand_over(streams)
        random.seed()
        status = entry()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _hand_over(streams: tuple[int, int, int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
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
