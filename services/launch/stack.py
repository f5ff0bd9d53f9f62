"""The whole system as child processes of this one; ``topology`` lists their kinds and ``placement`` how many and where.

Rule: however this process ends, no child outlives it. It sends each child SIGTERM in reverse start order, then kills
it. It restarts nothing by itself (``supervisor`` does), and reports a dead child with the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

import httpx
from pydantic import SecretStr

from services.engines.acquaintance import acquaint
from services.engines.keys import EngineKeys, NoKeyForEngine
from services.engines.kinds import engine_is_ready
from services.files.data_dir import DataDir
from services.launch import engine_command, topology
from services.launch.engine_command import EngineCommand
from services.launch.first_secrets import ENGINE_CONFIG, write_engine_config
from services.launch.gpus import VISIBLE
from services.launch.placement import Gpu, Member, PlacementRequest, place
from services.launch.topology import Process, Site
from services.process.children import die_with_parent
from services.process.listening import listen
from services.process.ports import free_port, kept_port
from services.process.settings import SettingsError, load_settings
from services.state.server import RedisServer, RedisUnsuitable

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
# For killed processes to be gone.
GROUP_S = 5.0
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
    """Engines that already run, such as SGLang servers; if empty, the stack starts its own."""
    engine_keys: tuple[SecretStr, ...] = ()
    """For engines that are started here by a command; the embedded one reads the setting itself."""
    trainers: int = 1
    engines: int | None = None
    devices: tuple[str, ...] = ()
    """GPUs of this machine as ``CUDA_VISIBLE_DEVICES`` names them; ``placement`` divides them."""
    gpus: Mapping[str, tuple[Gpu, ...]] = field(default_factory=dict)
    engine: EngineCommand | None = None
    """How an engine is started; unset starts the embedded one."""
    threads: int | None = None
    """For each process that computes with torch (engines and trainers); unset divides the cores among them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra GSPO_* settings for every process."""

    @property
    def wanted(self) -> PlacementRequest:
        return PlacementRequest(
            gpus_per_node=len(self.devices),
            trainers=self.trainers,
            engines=self.engines,
            rollout_workers=self.rollout_workers,
            gpus=self.gpus,
            has_engines=bool(self.engine_urls),
            may_share=True,
        )

    def members(self) -> tuple[Member, ...]:
        """Raises PlacementError."""
        return place(self.wanted, Site.LAPTOP)


class Child:
    """One process with its log file."""

    def __init__(
        self, name: str, argv: Sequence[str], environment: Mapping[str, str], log_path: Path, fds: Sequence[int] = ()
    ) -> None:
        """``fds``: what it inherits."""
        self.name = name
        self.argv = argv
        self.environment = environment
        self.log_path = log_path
        self.fds = fds
        self._log: IO[bytes] = log_path.open("ab")
        try:
            self.process = subprocess.Popen(
                argv,
                env=dict(environment),
                stdout=self._log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent(),
                pass_fds=fds,
            )
        except OSError as error:
            self._log.close()
            raise StackError(f"{name} cannot be started: {error}") from error

    def last_words(self, num_lines: int = 15) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-num_lines:]) or "    (nothing was logged)"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._end_group()
        self._log.close()

    def stop(self, deadline: float) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._end_group()
        self._log.close()

    def _end_group(self) -> None:
        """Workers of an engine may outlive it for a moment; they are of its group."""
        deadline = time.monotonic() + GROUP_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, signal.SIGKILL)
                time.sleep(POLL_S / 10)


class Stack:
    """``with Stack(config) as stack``: every process runs and answers inside the block and has stopped after it."""

    def __init__(self, config: StackConfig) -> None:
        self.config = config
        self.log_dir = DataDir(config.data_dir).logs
        self._children: list[Child] = []
        self._redis: RedisServer | None = None
        self._api_port = 0
        self._engine_ports: list[int] = []
        self._doors: dict[str, socket.socket] = {}
        """Where a process listens, also while it starts again: who comes then waits, and is not refused."""
        self._binds: dict[str, str] = {}
        """The settings that say so."""
        self._taken: set[int] = set()
        """Ports of what is started here."""
        self.api_url = ""
        self.engine_url = ""
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
        redis, *members = config.members()
        assert redis.process is topology.REDIS
        # Its lock is the directory's: the ports, also those that are kept, are another stack's while that one runs.
        self._start_redis()
        self._api_port = claim_port(config.host, config.port)
        self.api_url = f"http://{config.host}:{self._api_port}"
        self._taken.add(self._api_port)
        binds = {one.bind: one for one in self.processes() if one.bind is not None}
        for setting, process in binds.items():
            port = self._own_port(process)
            self._doors[process.name] = listen(LOOPBACK, port, f"GSPO_DATA_DIR/{process.name}.port")
            self._binds[setting] = f"{LOOPBACK}:{port}"
        self.engine_url = ",".join(config.engine_urls or self._own_engines(members))
        for member in members:
            self._start_member(member)
        self._wait_until_answering(f"{self.api_url}{topology.API_HEALTH.live}", topology.API.name)
        for setting, process in binds.items():
            assert isinstance(process.health, topology.HttpHealth)
            self._wait_until_answering(f"http://{self._binds[setting]}{process.health.live}", process.name)
        for url in self.engine_url.split(","):
            self._wait_until_ready(url)

    @property
    def gateway_url(self) -> str:
        return f"http://{self._binds['gateway_bind']}"

    def _own_port(self, process: Process, index: int = 0) -> int:
        """The same at each start, where nothing else has it."""
        port = kept_port(DataDir(self.config.data_dir).port_of(process.name, index), but=self._taken)
        self._taken.add(port)
        return port

    def _own_engines(self, members: Sequence[Member]) -> list[str]:
        """Take a port for each engine that is started here; their addresses."""
        for member in members:
            if member.process is topology.ENGINE:
                self._engine_ports.append(self._own_port(member.process, member.index))
        scheme = "http" if self.config.engine is None else self.config.engine.scheme
        return [f"{scheme}://{LOOPBACK}:{port}" for port in self._engine_ports]

    def _start_member(self, member: Member) -> None:
        environment = self._environment(member.process) | self._visible(member)
        if member.process is topology.ENGINE:
            self._start_engine(member, environment)
        elif member.ranks > 1:
            self._start_ranks(member, environment)
        elif (door := self._doors.get(member.process.name)) is not None:
            fd = door.fileno()
            self._spawn(member.process.name, ["--fd", str(fd)], environment, name=member.name, fds=[fd])
        else:
            self._spawn(member.process.name, [], environment, name=member.name)

    def _visible(self, member: Member) -> dict[str, str]:
        """The devices that a process may see; without a plan for GPUs what is visible stays so."""
        named = [self.config.devices[device] for device in member.devices]
        return {VISIBLE: ",".join(named)} if named else {}

    def _start_engine(self, member: Member, environment: Mapping[str, str]) -> None:
        port = self._engine_ports[member.index]
        if self.config.engine is None:
            device = ["--device", "cuda"] if member.devices else []
            self._spawn(member.process.name, device, environment, name=member.name, port=port)
            return
        values = {"model": str(self.config.model_dir), "host": LOOPBACK, "port": str(port)}
        values["gpus"] = str(max(1, len(member.devices)))
        values["config"] = str(self._engine_config(member, port))
        argv = self.config.engine.filled(values)
        environment = {**environment, **self.config.engine.environment}
        self._children.append(Child(member.name, argv, environment, self.log_dir / f"{member.name}.log"))

    def _engine_config(self, member: Member, port: int) -> Path:
        """The file of its keys, if there are any: arguments can be read by every process of the machine."""
        path = DataDir(self.config.data_dir).secrets.secret(member.name, ENGINE_CONFIG)
        if self.config.engine_keys:
            try:
                keys = EngineKeys.read(self.config.engine_keys).of_engine([LOOPBACK, "localhost"], port)
            except NoKeyForEngine as error:
                raise StackError(str(error)) from error
            write_engine_config(path, keys)
        return path

    def _start_ranks(self, member: Member, environment: Mapping[str, str]) -> None:
        """When a rank is lost, torchrun starts all of them again."""
        argv = topology.ranks_command(sys.executable, Site.LAPTOP, member.ranks, address=LOOPBACK, port=free_port())
        self._children.append(Child(member.name, argv, environment, self.log_dir / f"{member.name}.log"))

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
            **self._binds,
        }
        return {
            **os.environ,
            "OMP_NUM_THREADS": self._threads() if process.on_device else "1",
            "TOKENIZERS_PARALLELISM": "false",
            **process.settings(settings),
            **self.config.environment,
        }

    def _threads(self) -> str:
        if self.config.threads is not None:
            return str(self.config.threads)
        num_engines = len(self._engine_ports) or 1  # one elsewhere may be of this machine, too
        return str(default_threads(num_engines + self.config.trainers))

    def _spawn(
        self,
        service: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        name: str | None = None,
        port: int = 0,
        fds: Sequence[int] = (),
    ) -> None:
        """Start the topology's process ``service`` with extra arguments."""
        places = {
            "model": str(self.config.model_dir),
            "host": LOOPBACK,
            "port": str(port),
            "threads": self._threads(),
        }
        python, *command = topology.find(service).command(sys.executable, Site.LAPTOP, places, *arguments)
        name = name or service
        # -P keeps the caller's folder off the path: a user's own `environments` must not shadow ours.
        self._children.append(Child(name, [python, "-P", *command], environment, self.log_dir / f"{name}.log", fds))

    def _wait_until_answering(self, url: str, name: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check()
            try:
                if httpx.get(url, timeout=2.0, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
        raise StackError(f"{name} did not answer at {url} within {START_TIMEOUT_S:.0f} s; see {self.log_dir}")

    def _wait_until_ready(self, address: str) -> None:
        """Wait for an engine of any kind."""
        start_s = START_TIMEOUT_S if self.config.engine is None else engine_command.START_S
        deadline = time.monotonic() + start_s
        while time.monotonic() < deadline:
            self.check()
            if engine_is_ready(address):
                return
            time.sleep(POLL_S)
        if not self.config.engine_urls:
            raise StackError(f"the engine {address} was not ready within {start_s:.0f} s; see {self.log_dir}")
        (known,) = asyncio.run(acquaint([address], load_settings().engine_keys))
        raise StackError(f"the engine {address} was not ready within {start_s:.0f} s: {known.text}")

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
        self._children[position] = Child(name, old.argv, old.environment, old.log_path, old.fds)

    def _position(self, name: str) -> int:
        return [child.name for child in self._children].index(name)

    def pids(self) -> dict[str, int]:
        pids = {child.name: child.process.pid for child in self._children}
        own = self._redis.pid if self._redis is not None else None
        return pids if own is None else {REDIS: own} | pids

    def close(self) -> None:
        """Stop processes one by one in reverse start order, so each can still reach what it needs for a clean exit.

        Interrupted meanwhile (Ctrl-C again), it kills what is left, Redis last.
        """
        try:
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for child in reversed(self._children):
                child.stop(deadline)
        except KeyboardInterrupt:
            with without_interrupts():
                for child in reversed(self._children):
                    child.kill()
            raise
        finally:
            self._children.clear()
            while self._doors:
                self._doors.popitem()[1].close()
            if self._redis is not None:
                with without_interrupts():
                    self._redis.close()
                self._redis = None


def default_threads(processes: int = 2) -> int:
    """An equal part of the cores for each process that computes, such as one engine and one trainer."""
    return max(1, len(os.sched_getaffinity(0)) // processes) if hasattr(os, "sched_getaffinity") else 1


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


def check_port(port: int) -> None:
    """Raises StackError."""
    if not 0 <= port < 2**16:
        raise StackError(f"--port {port}: a port is a number from 0 (a free one) to 65535")


def claim_port(host: str, port: int) -> int:
    """Return ``port`` if it can be bound, or a free one for 0. Raises a StackError that says what to do."""
    check_port(port)
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
def without_interrupts() -> Iterator[None]:
    """For a short while that must not end half-way. Other threads are not interrupted anyway."""
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    previous = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)


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
