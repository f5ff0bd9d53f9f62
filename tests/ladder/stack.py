"""The stack of the ladder: that of ``gspo up``, with as many engines and trainers as jobs run at once.

Beside it runs an OpenEnv server, which the world of that name connects to.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.engines.kinds import engine_is_ready
from services.launch.stack import STOP_TIMEOUT_S, Child, Stack, StackConfig, StackError
from services.launch.topology import ENGINE, TRAINER, Site
from services.process.ports import free_port
from tests.ladder.worlds import SERVED

START_S = 180.0
# Reached over loopback only, where the OpenEnv server is too; an environment's packages are installed into the data
# directory of the run.
SETTINGS = {"GSPO_API_KEYS": "", "GSPO_ENV_INSTALL": "true", "GSPO_OUTBOUND_NETWORKS": "127.0.0.0/8"}
CALM = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Running:
    api_url: str
    redis_url: str
    pids: Mapping[str, int]
    stack: Stack
    others: tuple[Child, ...]

    def check(self) -> None:
        """Raises StackError when a process has ended."""
        self.stack.check()
        for child in self.others:
            if child.process.poll() is not None:
                raise StackError(f"{child.name} ended with {child.process.returncode}:\n{child.last_words()}")


@contextmanager
def openenv_server(log_dir: Path) -> Iterator[str]:
    """Its address."""
    log_dir.mkdir(parents=True, exist_ok=True)
    port = free_port()
    gspo = str(Path(sys.executable).with_name("gspo"))
    argv = [gspo, "env", "serve", SERVED, "--port", str(port), "--capacity", "64"]
    with _child("openenv", argv, {}, log_dir) as child:
        _wait_for(child, lambda: _listens(port))
        yield f"ws://127.0.0.1:{port}/ws"


@contextmanager
def running(data_dir: Path, model_dir: Path, num_jobs: int, threads: int = 1) -> Iterator[Running]:
    log_dir = data_dir / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as open_:
        urls, others = [], []
        for number in range(num_jobs):
            port = free_port()
            places = {"model": str(model_dir), "host": "127.0.0.1", "port": str(port), "threads": str(threads)}
            argv = ENGINE.command(sys.executable, Site.LAPTOP, places)
            others.append(open_.enter_context(_child(f"engine-{number}", argv, {}, log_dir)))
            urls.append(f"http://127.0.0.1:{port}")
        for child, url in zip(others, urls, strict=True):
            _wait_for(child, partial(engine_is_ready, url))
        config = StackConfig(
            data_dir, model_dir, port=0, engine_urls=tuple(urls), threads=threads, environment=SETTINGS
        )
        stack = open_.enter_context(Stack(config))
        settings = {"redis_url": stack.redis_url, "data_dir": str(data_dir), "engine_urls": stack.engine_url}
        for number in range(1, num_jobs):
            argv = TRAINER.command(sys.executable, Site.LAPTOP)
            given = {**TRAINER.settings(settings), "OMP_NUM_THREADS": str(threads)}
            others.append(open_.enter_context(_child(f"trainer-{number}", argv, given, log_dir)))
        pids = stack.pids() | {child.name: child.process.pid for child in others}
        yield Running(stack.api_url, stack.redis_url, pids, stack, tuple(others))


@contextmanager
def _child(name: str, argv: list[str], settings: Mapping[str, str], log_dir: Path) -> Iterator[Child]:
    child = Child(name, argv, {**CALM, **SETTINGS, **settings}, log_dir / f"{name}.log")
    try:
        yield child
    finally:
        child.stop(time.monotonic() + STOP_TIMEOUT_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(child: Child, answers: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not answers():
        if child.process.poll() is not None or time.monotonic() > deadline:
            raise StackError(f"{child.name} does not serve:\n{child.last_words()}")
        time.sleep(0.1)
