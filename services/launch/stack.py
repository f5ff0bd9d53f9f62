"""The whole system as child processes of this one; ``topology`` lists them.

Rule: however this process ends, no child outlives it. It sends each child SIGTERM in reverse start order, then kills
it. It restarts nothing by itself (``supervisor`` does), and reports a dead child with the end of its log.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

import httpx

from services.engines.kinds import engine_is_ready
from services.files.data_dir import DataDir
from services.launch import topology
from services.launch.topology import Process, Site
from services.process.children import die_with_parent
from services.process.ports import free_port, kept_port
from services.process.settings import SettingsError
from services.state.server import RedisServer, RedisUnsuitable

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
REDIS = topology.REDIS.name
LOOPBACK = "127.0.0.1"


class StackError(RuntimeError):
    """The stack cannot start or continue; the message says why and what to do."""


@dataclass(frozen=True)
class StackConfig:
    data_dir: Path
    model_dir: Path
    host: str = LOOPBACK
    port: int = 8000
    """The port of the API; 0 takes a free one."""
    rollout_workers: int = 1
    engine_urls: tuple[str, ...] = ()
    """Engines that already run, such as SGLang servers; if empty, the stack starts an embedded one."""
    threads: int | None = None
    """For each process that computes with torch (engine and trainer); unset divides the cores between the two."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra GSPO_* settings for every process."""


class Child:
    """One process with its log file."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.name = name
        self.argv = argv
        self.environment = environment
        self.log_path = log_path
        self._log: IO[bytes] = log_path.open("ab")
        self.process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    def last_words(self, num_lines: int = 15) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-num_lines:]) or "    (nothing was logged)"

    def stop(self, deadline: float) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


class Stack:
    """``with Stack(config) as stack``: every process runs and answers inside the block and has stopped after it."""

    def __init__(self, config: StackConfig) -> None:
        self.config = config
        self.log_dir = DataDir(config.data_dir).logs
        self._children: list[Child] = []
        self._redis: RedisServer | None = None
        self._api_port = 0
        self._engine_port = 0
        self._gateway_port = 0
        self.api_url = ""
        self.engine_url = ""
        self.gateway_url = ""
        self.redis_url = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        config = self.config
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._api_port = claim_port(config.host, config.port)
        self.api_url = f"http://{config.host}:{self._api_port}"
        if not config.engine_urls:
            self._engine_port = kept_port(DataDir(config.data_dir).engine_port, but=self._api_port)
        self.engine_url = ",".join(config.engine_urls) or f"http://{LOOPBACK}:{self._engine_port}"
        self._gateway_port = kept_port(DataDir(config.data_dir).gateway_port, but=self._api_port)
        self.gateway_url = f"http://{LOOPBACK}:{self._gateway_port}"
        for process in self.processes():
            if process is topology.REDIS:
                self._start_redis()
            elif process is topology.ROLLOUT:
                for number in range(config.rollout_workers):
                    self._spawn(process.name, [], self._environment(process), name=f"{process.name}-{number}")
            else:
                self._spawn(process.name, [], self._environment(process))
        self._wait_until_answering(f"{self.api_url}{topology.API_HEALTH.live}", topology.API.name)
        self._wait_until_answering(f"{self.gateway_url}{topology.GATEWAY_HEALTH.live}", topology.GATEWAY.name)
        for url in self.engine_url.split(","):
            self._wait_until_ready(url)

    def processes(self) -> tuple[Process, ...]:
        """The kinds of process that this stack starts, in order."""
        return topology.processes(Site.LAPTOP, has_engines=bool(self.config.engine_urls))

    def _start_redis(self) -> None:
        try:
            self._redis = RedisServer.start(DataDir(self.config.data_dir).redis)
        except (RedisUnsuitable, SettingsError) as error:
            raise StackError(str(error)) from error
        self.redis_url = self._redis.url

    def _environment(self, process: Process) -> dict[str, str]:
        settings = {
            "redis_url": self.redis_url,
            "data_dir": str(self.config.data_dir),
            "engine_urls": self.engine_url,
            "api_host": self.config.host,
            "api_port": str(self._api_port),
            "gateway_bind": f"{LOOPBACK}:{self._gateway_port}",
        }
        return {
            **os.environ,
            "OMP_NUM_THREADS": self._threads() if process.on_device else "1",
            "TOKENIZERS_PARALLELISM": "false",
            **process.settings(settings),
            **self.config.environment,
        }

    def _threads(self) -> str:
        return str(self.config.threads or default_threads())

    def _spawn(
        self, service: str, arguments: Sequence[str], environment: Mapping[str, str], name: str | None = None
    ) -> None:
        """Start the topology's process ``service`` with extra arguments."""
        places = {
            "model": str(self.config.model_dir),
            "host": LOOPBACK,
            "port": str(self._engine_port),
            "threads": self._threads(),
        }
        python, *command = topology.find(service).command(sys.executable, Site.LAPTOP, places, *arguments)
        name = name or service
        # -P keeps the caller's folder off the path: a user's own `environments` must not shadow ours.
        self._children.append(Child(name, [python, "-P", *command], environment, self.log_dir / f"{name}.log"))

    def _wait_until_answering(self, url: str, name: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check()
            try:
                if httpx.get(url, timeout=2.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
        raise StackError(f"{name} did not answer at {url} within {START_TIMEOUT_S:.0f} s; see {self.log_dir}")

    def _wait_until_ready(self, address: str) -> None:
        """Wait for an engine of any kind."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check()
            if engine_is_ready(address):
                return
            time.sleep(POLL_S)
        raise StackError(f"the engine {address} was not ready within {START_TIMEOUT_S:.0f} s; see {self.log_dir}")

    def check(self) -> None:
        """Raise StackError with the end of the log if a process has died."""
        for name in self.ended():
            if name == REDIS:
                raise StackError(f"the Redis server ended; see {DataDir(self.config.data_dir).redis_log}")
            child = self._children[self._position(name)]
            raise StackError(
                f"{name} ended with code {child.process.returncode}. The end of {child.log_path}:\n{child.last_words()}"
            )

    def ended(self) -> dict[str, int | None]:
        """Ended processes, each with its exit code if known."""
        codes: dict[str, int | None] = {
            child.name: code for child in self._children if (code := child.process.poll()) is not None
        }
        return ({REDIS: None} if self._redis is not None and self._redis.has_ended else {}) | codes

    def restart(self, name: str) -> None:
        """Restart a process at the same address, stopping it first if it still runs."""
        if name == REDIS and self._redis is not None:
            self._redis.close()
            self._start_redis()  # its address depends only on its directory
            return
        position = self._position(name)
        old = self._children[position]
        old.stop(time.monotonic() + STOP_TIMEOUT_S)
        self._children[position] = Child(name, old.argv, old.environment, old.log_path)

    def _position(self, name: str) -> int:
        return [child.name for child in self._children].index(name)

    def pids(self) -> dict[str, int]:
        pids = {child.name: child.process.pid for child in self._children}
        own = self._redis.pid if self._redis is not None else None
        return pids if own is None else {REDIS: own} | pids

    def close(self) -> None:
        """Stop processes one by one in reverse start order, so each can still reach what it needs for a clean exit."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in reversed(self._children):
            child.stop(deadline)
        self._children.clear()
        if self._redis is not None:
            self._redis.close()
            self._redis = None


def default_threads() -> int:
    """Half the cores each for engine and trainer."""
    return max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else 1


def check_place(config: StackConfig) -> None:
    """Check early that the port is free and the data directory is writable."""
    claim_port(config.host, config.port)
    try:
        config.data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.data_dir):
            pass
    except OSError as error:
        raise StackError(
            f"cannot write to {config.data_dir} ({error.strerror}): choose another directory with --data-dir"
        ) from error


def claim_port(host: str, port: int) -> int:
    """Return ``port`` if it can be bound, or a free one for 0. Raises a StackError that says what to do."""
    try:
        if port == 0:
            return free_port(host)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise StackError(
            f"cannot listen on {host}:{port} ({error.strerror}): another program, perhaps another stack, is using it. "
            f"Stop it, or choose another port with --port (0 picks a free one)."
        ) from error
    return port


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind the stack exactly as Ctrl-C does."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
