"""The processes of a run and all that lies between them: Redis, lines, engines, API, trainers, rollout workers, and
where agents play a gateway and their service.

The rule kept here: every process reaches Redis and engines over a line of its own or of the engine, so that each can be
cut alone; and it is started with the settings of an installation, nothing of it is patched.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gspo_core.chat import load_tokenizer
from services.process.ports import free_port
from services.state.server import RedisServer, RedisUnsuitable
from tests.chaos.absences import REDIS, Absences
from tests.chaos.clock import Clock
from tests.chaos.lines import Line, to_port, to_unix
from tests.chaos.model import PLAIN
from tests.chaos.processes import Nursery, Process
from tests.chaos.streams import Sampling, Streams

AGENT_PYTHON = Path(os.environ.get("GSPO_TEST_AGENTS", ".make/agents")).absolute() / "openai" / "bin" / "python"
"""Of agents. Where it is not installed (`make test-agents`), none plays and the run says so."""
LEASE_S = 2.0
REDIS_START_S = 60.0
LEAVING_S = {
    **{"rollout": 90.0, "gateway": 90.0, "agents": 10.0, "environments": 60.0},
    **{"trainer": 60.0, "api": 30.0, "engine": 30.0, "embedded": 30.0},
}
"""In this order."""
# Agents ask each other for nothing, but all of them the gateway, and at an address of this machine.
HERE = "127.0.0.0/8"


@dataclass(frozen=True)
class Size:
    """How many of each."""

    jobs: int = 2
    apis: int = 2
    trainers: int = 3
    workers: int = 2
    engines: int = 2
    lease_s: float = LEASE_S
    drain_s: float = 2.0
    """Of a worker."""
    has_real_engines: bool = False
    """The embedded engine with a model, in place of the scripted one."""
    has_agents: bool = False
    """A gateway, and agents behind a URL."""
    has_environments_apart: bool = False
    """In a service of their own, as in containers; else beside the workers."""
    tick_ms: float = 1.0
    """Of scripted engines, for a token."""


class Stack:
    def __init__(self, work: Path, data: Path, size: Size, clock: Clock) -> None:
        self.work, self.data, self.size = work, data, size
        self.clock = clock
        self.redis_dir = work / "redis"
        self.lines: dict[str, Line] = {}
        """To Redis, by the name of the process."""
        self.engine_lines: dict[str, Line] = {}
        self.agent_line: Line | None = None
        """From agents to the gateway."""
        self.streams = Streams(work / "streams.jsonl")
        """On that line."""
        self.sampling: dict[str, Sampling] = {}
        """By engine."""
        self.agent_port = free_port()
        """Where agents are started."""
        self.api_urls: list[str] = []
        self.num_redis_starts = 0
        self._redis: RedisServer | None = None
        self._redis_changing = asyncio.Lock()
        home = work / "home"
        home.mkdir(parents=True, exist_ok=True)
        self.mark = f"HOME={home}"
        """What the environment of every process of this run holds."""
        self.absences = Absences()
        self.nursery = Nursery(
            work / "logs",
            {"HOME": str(home), "TMPDIR": str(home), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            self.absences,
        )

    @property
    def redis_url(self) -> str:
        assert self._redis is not None
        return self._redis.url

    async def open(self) -> None:
        await self._start_redis()
        await self.nursery.open()
        engine_urls, decode = [], load_tokenizer(self.work / PLAIN).decode
        for number in range(self.size.engines):
            name, port = f"engine-{number}", free_port()
            self.engine_lines[name] = await Line(to_port(port)).open()
            self.engine_lines[name].mark = b"POST /"
            self.sampling[name] = Sampling(decode)
            self.engine_lines[name].tap = self.sampling[name].tap
            engine_urls.append(f"http://127.0.0.1:{self.engine_lines[name].port}")
            argv = ["--model", str(self.work / PLAIN), "--port", str(port)]
            if self.size.has_real_engines:
                await self.nursery.start(name, "embedded", argv, {"GSPO_LOG_FORMAT": "json"})
            else:
                argv += ["--loads", str(self.work / "loads.jsonl"), "--data", str(self.data.absolute())]
                argv += ["--tick-ms", f"{self.size.tick_ms:g}"]
                await self.nursery.start(name, "engine", argv, {})
        common = {
            "GSPO_DATA_DIR": str(self.data),
            "GSPO_ENGINE_URLS": ",".join(engine_urls),
            "GSPO_LEASE_S": str(self.size.lease_s),
            "GSPO_MAX_ATTEMPTS": "100000",
            "GSPO_LOG_FORMAT": "json",
            "GSPO_API_KEYS": "",
            "GSPO_OUTBOUND_NETWORKS": HERE,
            "GSPO_ENV_READABLE": str(AGENT_PYTHON.parents[1]),  # agents take `openai` from there
            "GSPO_ENV_WRITABLE": str(self.work.absolute()),  # worlds and agents keep ledgers there
        }
        for number in range(self.size.apis):
            port = free_port()
            self.api_urls.append(f"http://127.0.0.1:{port}")
            api = {"GSPO_API_HOST": "127.0.0.1", "GSPO_API_PORT": str(port)}
            await self._start(f"api-{number}", "api", [], common | api)
        for number in range(self.size.trainers):
            await self._start(f"trainer-{number}", "trainer", [], common)
        rollout = common | (await self._open_environments() if self.size.has_environments_apart else {})
        argv = ["--max-episodes", "16", "--drain-s", str(self.size.drain_s)]
        for number in range(self.size.workers):
            await self._start(f"worker-{number}", "rollout", argv, rollout)
        if self.size.has_agents:
            await self._open_agents(argv, common)

    async def _open_agents(self, argv: list[str], common: dict[str, str]) -> None:
        port, journal = free_port(), self.work / "agents.jsonl"
        line = self.agent_line = await Line(to_port(port)).open()
        line.mark = b"POST /v1/chat"
        line.tap = self.streams.tap
        settings = {"GSPO_GATEWAY_BIND": f"127.0.0.1:{port}", "GSPO_GATEWAY_URL": f"http://127.0.0.1:{line.port}"}
        await self._start("gateway-0", "gateway", argv, common | settings)
        service = ["-m", "tests.chaos.agent_service", "--port", str(self.agent_port), "--journal", str(journal)]
        await self.nursery.start("agents-0", "agents", [str(AGENT_PYTHON), *service], {})

    async def _open_environments(self) -> dict[str, str]:
        """Returns what tells workers of them."""
        token, port = secrets.token_urlsafe(), free_port()
        settings = {
            "GSPO_ENV_TOKEN_SHA256": hashlib.sha256(token.encode()).hexdigest(),
            "GSPO_DATA_DIR": str(self.work / "environments"),
            "GSPO_ENV_WRITABLE": str(self.work.absolute()),
            "GSPO_LOG_FORMAT": "json",
        }
        await self.nursery.start("environments", "environments", ["--port", str(port)], settings)
        return {"GSPO_ENV_HOSTS": f"127.0.0.1:{port}", "GSPO_ENV_TOKEN": token}

    async def _start(self, name: str, service: str, argv: list[str], env: dict[str, str]) -> None:
        line = self.lines[name] = await Line(to_unix(self.redis_url.removeprefix("unix://"))).open()
        line.mark = b"FCALL"
        await self.nursery.start(name, service, argv, env | {"GSPO_REDIS_URL": f"redis://127.0.0.1:{line.port}"})

    @property
    def all_lines(self) -> list[Line]:
        of_agents = [self.agent_line] if self.agent_line is not None else []
        return [*self.lines.values(), *self.engine_lines.values(), *of_agents]

    def of(self, service: str) -> list[Process]:
        """Those that live and run."""
        return [one for one in self.nursery.processes.values() if one.service == service and one.pid]

    # Redis

    async def _start_redis(self) -> None:
        deadline = time.monotonic() + REDIS_START_S
        while True:
            try:
                with self.clock.around_a_start():
                    self._redis = await asyncio.to_thread(RedisServer.spawn, self.redis_dir)
                self.num_redis_starts += 1
                return
            except RedisUnsuitable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def kill_redis(self) -> None:
        """With SIGKILL; it is back when this returns."""
        async with self._redis_changing:
            assert self._redis is not None
            assert self._redis.pid is not None
            with self.absences.of(REDIS):
                os.kill(self._redis.pid, signal.SIGKILL)
                await self._start_redis_again()

    async def restart_redis(self) -> None:
        """Asked to end; it is back when this returns."""
        async with self._redis_changing:
            with self.absences.of(REDIS):
                await self._start_redis_again()

    async def _start_redis_again(self) -> None:
        assert self._redis is not None
        await asyncio.to_thread(self._redis.close)
        await self._start_redis()

    async def stop_redis(self, seconds: float) -> None:
        async with self._redis_changing:
            with self._stopped_redis(), self.absences.of(REDIS):
                await asyncio.sleep(seconds)

    async def stall_redis(self, name: str, seconds: float) -> None:
        """For the process of this name alone."""
        with self.absences.of(name):
            await self.lines[name].stall(seconds)

    @contextlib.contextmanager
    def _stopped_redis(self) -> Iterator[None]:
        assert self._redis is not None
        assert self._redis.pid is not None
        os.kill(self._redis.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._redis.pid, signal.SIGCONT)

    # The end

    async def leave(self) -> None:
        """Everything is asked to end, the users of others first."""
        for service, timeout_s in LEAVING_S.items():
            leaving = [one for one in self.nursery.processes.values() if one.service == service]
            await asyncio.gather(*(self.nursery.leave(one, timeout_s) for one in leaving))

    async def close(self) -> None:
        await self.nursery.close()
        for line in self.all_lines:
            await line.close()
        if self._redis is not None:
            await asyncio.to_thread(self._redis.close)
