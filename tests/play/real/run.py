"""The whole stack as ``gspo up`` starts it, and the one job in it that harnesses play in turn.

Around it in this process: what starts the harnesses, where they ask (it reads along and passes on to the gateway), and
where the gateway asks (it reads along and passes on to the engine, a process of its own).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gspo_core.client import Client
from gspo_core.env import Llm
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey
from services.files.batch_log import BatchLog
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.launch.stack import Child, Stack, StackConfig
from services.process.ports import free_port
from services.state.jobs import JobStatus
from tests.play.babble import Babbler
from tests.play.observed import observed
from tests.play.real.agent import Players, players, task_of
from tests.play.real.passage import Passage, Samples
from tests.play.run import qwen_codec
from tests.play.stage import Mishaps, Part

GROUP_SIZE = 2
START_S = 120.0
LOOK_S = 0.5
# An episode in which the policy asked for so many turns is paid most.
BEST_TURNS = 4
NO_KEYS = {"GSPO_API_KEYS": ""}


@dataclass
class Played:
    """An attempt at an episode, as its harness had it."""

    name: str
    key: EpisodeKey
    attempt: int
    part: Part
    began_s: float
    ended_s: float = 0.0

    @property
    def ends(self) -> list[str]:
        """How it ended, where not as it should."""
        return [*(self.part.report or {}).get("ends", ())]


@dataclass
class Agent:
    """What a start of an episode reaches: each is played once, so many side by side."""

    players: Players
    by_key: dict[str, Part]
    seed: int
    places: asyncio.Semaphore
    played: dict[str, Played] = field(default_factory=dict)
    _ends: dict[str, asyncio.Task[float]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    async def start(self, request: HttpRequest) -> Response:
        given, name = await request.json(), request.headers["idempotency-key"]
        if name not in self._ends:
            self._ends[name] = asyncio.ensure_future(self._play(name, given))
        try:
            return JSONResponse({"reward": await asyncio.shield(self._ends[name])})
        except asyncio.CancelledError:
            return Response(status_code=503)

    async def leave(self) -> None:
        """What is still played ends here, and so do its harnesses."""
        for end in self._ends.values():
            end.cancel()
        await asyncio.gather(*self._ends.values(), return_exceptions=True)

    async def _play(self, name: str, given: Mapping[str, Any]) -> float:
        async with self.places:
            task, harness = given["task"], given["task"]["harness"]
            # The members of a group do not do the same, and players tell episodes apart by number.
            drawn = task_of(harness, self.seed + 1, int(task["number"])) | {"number": next(self._numbers)}
            drawn["seed"] = random.Random(f"{self.seed} {name}").getrandbits(48)
            part = Part(drawn, Babbler(qwen_codec(), random.Random(0)))
            self.by_key[given["api_key"]] = part
            llm = Llm(given["base_url"], given["api_key"], episode=given["episode"])
            job, group, member, _, attempt = name.rsplit("/", 4)
            key = EpisodeKey(job, int(group), int(member))
            played = self.played[name] = Played(harness, key, int(attempt), part, time.monotonic())
            part.report = await self.players.play(harness, drawn, llm)
            played.ended_s = time.monotonic()
            turns = len(observed(part.requests))
            print(
                f"{harness}: {turns} turns in {played.ended_s - played.began_s:.0f} s",
                *(one[-150:].replace("\n", " ") for one in played.ends),
                flush=True,
            )
            return max(0.0, 1.0 - abs(turns - BEST_TURNS) / BEST_TURNS)


class _Over(Exception):
    """Whoever still plays is not waited for."""


class Side:
    """Servers in a thread of their own."""

    def __init__(self, names: list[str], folder: Path, seed: int, at_once: int, engine_port: int) -> None:
        self.samples = Samples()
        self.by_key: dict[str, Part] = {}
        self.agent: Agent | None = None
        self.gateway_url = ""
        self.ports = {name: free_port() for name in ("agent", "gateway", "engine")}
        self._engine_url = f"http://127.0.0.1:{engine_port}"
        self._given = names, folder, seed, at_once
        self._ready: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="side")

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def __enter__(self) -> Side:
        self._thread.start()
        self._ready.result()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except _Over:
            pass
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        names, folder, seed, at_once = self._given
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client,
            players(names, folder, at_once) as playing,
        ):
            self.agent = Agent(playing, self.by_key, seed, asyncio.Semaphore(at_once))
            apps: dict[str, ASGIApp] = {
                "agent": Starlette(routes=[Route("/", self.agent.start, methods=["POST"])]),
                "gateway": Mishaps(Passage(client, lambda: self.gateway_url), self.by_key),
                "engine": Passage(client, lambda: self._engine_url, self.samples.read),
            }
            servers = [server_of(app, self.ports[name]) for name, app in apps.items()]
            serving: list[Awaitable[Any]] = [asyncio.ensure_future(one.serve()) for one in servers]
            while not all(one.started for one in servers):
                await asyncio.sleep(0.01)
            self._ready.set_result(None)
            await self._stop.wait()
            await self.agent.leave()
            for server in servers:
                server.should_exit = server.force_exit = True
            await asyncio.gather(*serving)
            raise _Over


def server_of(app: ASGIApp, port: int) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=port,
            log_level="critical",  # whoever is told to end breaks connections
            access_log=False,
            lifespan="off",
            http="httptools",
            timeout_keep_alive=300,
            timeout_graceful_shutdown=1,
        )
    )


@dataclass(frozen=True)
class Plan:
    """What is played, and how."""

    each: Mapping[str, int]
    """Tasks of each harness, of ``GROUP_SIZE`` episodes."""
    seed: int
    at_once: int
    groups_per_step: int
    """Few: weights change often, behind which an engine reads every prompt anew."""
    most_s: float


def job_of(model: Path, plan: Plan, agent_url: str) -> JobSpec:
    steps = math.ceil(sum(plan.each.values()) / plan.groups_per_step)
    return JobSpec.model_validate(
        {
            "name": "harnesses",
            "model": str(model),
            "environments": [
                {"ref": "tests.play.real.world:Rota", "config": {"each": dict(plan.each)}, "agent": {"url": agent_url}}
            ],
            "objective": {"name": "gspo", "clip": [5.0e-2, 8.0e-2]},
            "rollout": {"group_size": GROUP_SIZE, "max_staleness": 2},
            "chat": {"format": "hermes"},
            "sampling": {"max_new_tokens": 160},
            "limits": {
                "max_turns": 60,
                "max_tool_calls": 400,
                "max_context_tokens": 40_960,
                "max_episode_tokens": 20_000,
                "episode_timeout_s": 3600.0,
                "retries": 0,
            },
            "optimizer": {"lr": 1.0e-4},
            "steps": steps,
            "groups_per_step": plan.groups_per_step,
            "checkpoint_every": 10_000,
            "checkpoints": {"keep_versions": 10_000, "keep_batches": 100_000},
            "seed": plan.seed,
        }
    )


@dataclass(frozen=True)
class Run:
    """What is left of a run."""

    job: JobDir
    status: str
    seconds: float
    samples: Samples
    played: list[Played]
    cpu: Mapping[str, float]

    def num_steps(self) -> int:
        return len(BatchLog(self.job).steps())


def run(model: Path, plan: Plan, folder: Path) -> Run:
    """Until the job is over, or so many seconds have gone by; then it is cancelled."""
    data, engine_port = folder / "data", free_port()
    logs = folder / "logs"
    logs.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        side = stack.enter_context(Side(list(plan.each), folder / "homes", plan.seed, plan.at_once, engine_port))
        os.environ["GSPO_GATEWAY_URL"] = side.url("gateway")
        os.environ["GSPO_OUTBOUND_NETWORKS"] = "127.0.0.0/8"
        engine = _engine(model, engine_port, logs)
        stack.callback(engine.kill)
        config = StackConfig(data, model, port=0, environment=NO_KEYS, engine_urls=(side.url("engine"),))
        up = stack.enter_context(Stack(config))
        side.gateway_url = up.gateway_url
        began = time.monotonic()
        with Client(up.api_url) as client:
            job = client.create_job(job_of(model, plan, side.url("agent") + "/"))["id"]
            status = _until_over(client, job, up, began + plan.most_s)
        seconds = time.monotonic() - began
        cpu = {name: _cpu_s(pid) for name, pid in {**up.pids(), "engine": engine.process.pid}.items()}
        # Those that have ended are coding agents and what they started.
        cpu |= {"coding agents": _used(resource.RUSAGE_CHILDREN), "this process": _used(resource.RUSAGE_SELF)}
    assert side.agent is not None
    return Run(DataDir(data).jobs.job(job), str(status), seconds, side.samples, [*side.agent.played.values()], cpu)


def _engine(model: Path, port: int, logs: Path) -> Child:
    command = [sys.executable, "-P", "-m", "services.engine", "--model", str(model), "--port", str(port)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = Child("engine", command, env, logs / "engine.log")
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                return child
        time.sleep(LOOK_S)
    child.kill()
    raise RuntimeError(f"the engine did not start:\n{child.last_words()}")


def _until_over(client: Client, job: str, up: Stack, deadline: float) -> JobStatus:
    is_cancelled = False
    while not (status := JobStatus(client.job(job)["status"])).is_terminal:
        up.check()
        if not is_cancelled and time.monotonic() > deadline:
            client.cancel(job)
            is_cancelled = True
        time.sleep(LOOK_S)
    return status


def _used(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(one) for one in fields[11:15]) / os.sysconf("SC_CLK_TCK")
