"""The stack as ``gspo up`` starts it, the jobs that are played in it, and a server beside it for agents.

The server is the service that jobs with a ``url`` start, and takes what functions and programs tell of what they did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gspo_core.api_answers import EpisodeLease
from gspo_core.client import Client
from gspo_core.spec import JobSpec
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.launch.stack import Stack, StackConfig
from services.process.ports import free_port
from services.state.jobs import JobStatus
from tests.play.real.run import NO_KEYS, server_of
from tests.play.requirements import speaker
from tests.play.requirements.figures import ROOT

LOOK_S = 0.2
WAIT_S = 120.0
SETTINGS = {
    **NO_KEYS,
    "GSPO_LOG_LEVEL": "debug",
    "GSPO_TRAFFIC_REDACTOR": "tests.play.requirements.redactor:redact",
}
LIMITS = {
    "max_turns": 2000,
    "max_tool_calls": 20_000,
    "max_episode_tokens": 2_000_000,
    "max_context_tokens": speaker.CONTEXT_TOKENS,
    "episode_timeout_s": 3600.0,
    "retries": 0,
}
TASKS = "tests.play.requirements.agents:Tasks"

Report = Mapping[str, Any]
Service = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Plays an episode with what the start of a service brings; what it answers."""


class TooLate(Exception):
    """Something that was waited for did not come."""


class Beside:
    """Serves agents, in a thread of its own."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.starts: list[str] = []
        """The key by which each start of a service may be repeated."""
        self.service: Service = lambda given: {"reward": 0.0}
        self._port = free_port()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), name="beside")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Beside:
        self._thread.start()
        self._ready.result()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _start(self, request: HttpRequest) -> Response:
        self.starts.append(request.headers["idempotency-key"])
        return JSONResponse(await run_in_threadpool(self.service, await request.json()))

    async def _report(self, request: HttpRequest) -> Response:
        self.reports.append(await request.json())
        return JSONResponse({})

    async def _serve(self) -> None:
        routes = [Route("/play", self._start, methods=["POST"]), Route("/report", self._report, methods=["POST"])]
        server = server_of(Starlette(routes=routes), self._port)
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        self._ready.set_result(None)
        await self._stop.wait()
        server.should_exit = server.force_exit = True
        await serving


@dataclass
class Place:
    """What requirements are played in."""

    up: Stack
    client: Client
    beside: Beside
    model: Path
    seed: int
    keys: set[str] = field(default_factory=set)
    """All that were given out: none may stand in any log or file."""

    @property
    def data(self) -> DataDir:
        return DataDir(self.up.config.data_dir)

    def job_dir(self, job: str) -> JobDir:
        return self.data.jobs.job(job)

    @contextlib.contextmanager
    def job(self, name: str, environments: Sequence[Mapping[str, Any]], **changes: Any) -> Iterator[str]:
        """A job that runs; whatever is left of it is cancelled."""
        spec = {**self._common(name), "environments": list(environments), **changes}
        job = self.client.create_job(JobSpec.model_validate(spec))["id"]
        try:
            yield job
        finally:
            if not JobStatus(self.client.job(job)["status"]).is_terminal:
                self.client.cancel(job)
            self.until(lambda: JobStatus(self.client.job(job)["status"]).is_terminal, f"{name} is cancelled")

    def _common(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": str(self.model),
            "objective": {"name": "gspo", "clip": [5.0e-2, 8.0e-2]},
            "rollout": {"group_size": 2, "max_staleness": 2},
            "chat": {"format": "hermes"},
            "sampling": {"max_new_tokens": 48},
            "limits": LIMITS,
            "optimizer": {"lr": 1.0e-6},
            "steps": 1000,
            "groups_per_step": 2,
            "checkpoint_every": 10_000,
            "checkpoints": {"keep_versions": 3, "keep_batches": 10_000},
            "seed": self.seed % 2**31,
        }

    def lease(self, job: str, **given: Any) -> EpisodeLease:
        """Of a job whose episodes are fetched; waits for one."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if (found := self.lease_once(job, **given)) is not None:
                return found
        raise TooLate(f"no episode of {job} was to be had")

    def lease_once(self, job: str, **given: Any) -> EpisodeLease | None:
        self.up.check()
        if (found := self.client.lease_episode(job, **given)) is not None:
            self.keys |= {found["api_key"], found["reward_key"]}
        return found

    def until(self, holds: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + wait_s
        while not holds():
            if time.monotonic() > deadline:
                raise TooLate(f"not in {wait_s:g} s: {what}")
            self.up.check()
            time.sleep(LOOK_S)


def fetched(what: str, num_tasks: int = 50, **agent: Any) -> dict[str, Any]:
    """An entry whose episodes are fetched."""
    return {"ref": TASKS, "config": {"what": what, "number": num_tasks}, "agent": {"pull": True, **agent}}


@contextlib.contextmanager
def set_up(folder: Path, seed: int) -> Iterator[Place]:
    model = folder / "model"
    speaker.make(model)
    os.environ["GSPO_OUTBOUND_NETWORKS"] = "127.0.0.0/8"
    found = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    config = StackConfig(folder / "data", model, port=0, environment={**SETTINGS, "PYTHONPATH": found})
    with Beside() as beside, Stack(config) as up, Client(up.api_url) as client:
        yield Place(up, client, beside, model, seed)
