"""The stage: a real gateway before a real queue, whose episodes are sampled by random policies and played by others.

Whoever plays an episode may ask, with its key, for a mishap of its next request and for what the policy says next:
``POST /play {"mishap": "unavailable" | "broken" | "lost" | "torn", "cues": ["calls:3"]}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from redis.asyncio import Redis
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gspo_core.chat import HermesCodec
from gspo_core.codec import decode
from gspo_core.env import EnvironmentFailed, Llm, Start
from gspo_core.types import EpisodeKey, Segment, Split
from services.episodes.keys import Keys
from services.episodes.metering import Counters
from services.episodes.outbox import Outbox
from services.gateway.agent.attempt import AgentDriver
from services.gateway.agent.door import EpisodeRouter
from services.gateway.agent.pulled import LoanBoard
from services.gateway.http.app import build_app
from services.process.http_server import serve_http
from services.process.ports import free_port
from services.state.functions import Functions
from services.state.keys import job_key
from services.state.loans import Loans
from services.state.queue import Bus, LeasedEpisode
from services.workers.episode import Episode
from services.workers.setting import EpisodeSpec
from tests.play.babble import Babbler
from tests.play.wire import Request, overheard
from tests.services.gateway.agent_kit import SECRET, AgentWorld, Doors, no_judges
from tests.services.rollout.rollout_kit import JOB, TRAINER, Table, make_setting, spec

# An episode is played to its end, however busy the machine is.
LEASE_S = 3600.0
TURN_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
TURN_VERBS = (":generateContent", ":streamGenerateContent")
LIMITS = {"max_turns": 500, "max_tool_calls": 5000, "max_episode_tokens": 500_000, "max_context_tokens": 65_536}
# They are played at once, and number their groups alike.
JOBS = (JOB, "job_beside")

Report = Mapping[str, Any]
Player = Callable[[Mapping[str, Any], Llm], Awaitable[Report]]
"""Plays the task with this key; tells what it did."""


@dataclass
class Part:
    """What the stage keeps of one episode."""

    task: Mapping[str, Any]
    policy: Babbler
    requests: list[Request] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    mishaps: list[str] = field(default_factory=list)
    num_mishaps: int = 0
    report: Report | None = None
    failure: str = ""
    stop: str = ""
    record: list[Segment] = field(default_factory=list)

    def num_requests(self) -> float:
        """Those that the gateway has understood."""
        counted = self.counters.snapshot()
        return counted.get("turns/asked", 0) + counted.get("turns/repeated", 0)

    @property
    def num_turns(self) -> int:
        outcome = self.record[-1].outcome if self.record else None
        return 0 if outcome is None else int(outcome.metrics.get("turns", 0))


def is_turn(path: str) -> bool:
    return path in TURN_PATHS or path.endswith(TURN_VERBS)


class Mishaps:
    """Between the network and the gateway: what goes wrong there, when it is asked for."""

    def __init__(self, app: ASGIApp, parts: Mapping[str, Part]) -> None:
        self._app = app
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        part = self._part(scope)
        if part is not None and scope["path"] == "/play":
            await self._direct(part, scope, receive, send)
        elif part is not None and part.mishaps and is_turn(scope["path"]):
            part.num_mishaps += 1
            await getattr(self, f"_{part.mishaps.pop(0)}")(scope, receive, send)
        else:
            await self._reach(scope, receive, send)

    async def _reach(self, scope: Scope, receive: Receive, send: Send) -> None:
        part = self._part(scope)
        if part is None or not is_turn(scope["path"]):
            await self._app(scope, receive, send)
            return
        request = Request()
        part.requests.append(request)
        await overheard(self._app, request, scope, receive, send)

    def _part(self, scope: Scope) -> Part | None:
        headers = {name: value.decode() for name, value in scope.get("headers", ())}
        names = (b"x-api-key", b"x-goog-api-key")
        keys = [headers.get(b"authorization", "").removeprefix("Bearer "), *(headers.get(name, "") for name in names)]
        return self._parts.get(next(filter(None, keys), ""))

    async def _direct(self, part: Part, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = json.loads((await receive())["body"])
        part.mishaps += [wanted["mishap"]] if wanted.get("mishap") else []
        part.policy.cues += wanted.get("cues", ())
        await JSONResponse({})(scope, receive, send)

    async def _unavailable(self, scope: Scope, receive: Receive, send: Send) -> None:
        """It does not reach the gateway."""
        body = {"error": {"message": "a proxy is overloaded", "type": "overloaded_error"}}
        await JSONResponse(body, 503, {"retry-after-ms": "5", "retry-after": "0.005"})(scope, receive, send)

    async def _torn(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The connection breaks in the middle of a stream."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await self._broken(scope, receive, send)

    async def _broken(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The connection breaks once the gateway has the request, which is sampled for until it comes again."""
        part = self._part(scope)
        assert part is not None
        part.policy.requests = part.num_requests
        body = bytearray()
        while True:
            message = await receive()
            body += message["body"]
            if not message.get("more_body"):
                break
        given: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_then_gone() -> Message:
            return given.pop() if given else {"type": "http.disconnect"}

        async def send_nothing(message: Message) -> None:
            await asyncio.sleep(0)

        await self._reach(scope, receive_then_gone, send_nothing)
        await _cut(send)

    async def _lost(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gateway has sent all of it, to a proxy that then breaks."""

        async def send_nothing(message: Message) -> None:
            await asyncio.sleep(0)

        await self._reach(scope, receive, send_nothing)
        await _cut(send)


async def _cut(send: Send) -> None:
    """Closes the connection under the answer, as a proxy does that breaks."""
    cycle: Any = getattr(send, "__self__")  # noqa: B009 - of the server
    cycle.transport.abort()
    while not cycle.disconnected:
        await asyncio.sleep(0)


class Session:
    """An episode that somebody outside plays."""

    close_failure: str | None = None
    is_stuck = False
    metrics: Mapping[str, float] = {}

    def __init__(self, stage: Stage, key: EpisodeKey) -> None:
        self._stage = stage
        self._part = stage.parts[key]
        self._playing: asyncio.Task[Report] | None = None

    def offer(self, llm: Llm) -> None:
        self._llm = llm
        self._stage.by_key[llm.api_key] = self._part

    async def start(self, task: Mapping[str, Any], seed: int) -> Start:
        self._playing = asyncio.ensure_future(self._stage.player(self._part.task, self._llm))
        return Start((), ())

    async def ended(self) -> None:
        assert self._playing is not None
        try:
            self._part.report = await asyncio.shield(self._playing)
        except Exception as error:
            self._part.failure = f"{type(error).__name__}: {error}"
            raise EnvironmentFailed("agent", self._part.failure) from error

    async def score(self) -> tuple[float, dict[str, float]]:
        return 1.0, {}

    async def close(self) -> None:
        if self._playing is not None:
            self._playing.cancel()


@dataclass
class World(AgentWorld):
    stage: Any = None

    def session(self, *, limits: Any = None, episode_id: str = "") -> Any:
        job, group, member = episode_id.rsplit("/", 2)
        return Session(self.stage, EpisodeKey(job, int(group), int(member)))


@dataclass
class Stage:
    table: Table
    codec: HermesCodec
    seed: int
    url: str
    door: EpisodeRouter
    player: Player
    speaker: type[Babbler] = Babbler
    parts: dict[EpisodeKey, Part] = field(default_factory=dict)
    by_key: dict[str, Part] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: count(1))

    async def play(self, tasks: list[dict[str, Any]], at_once: int) -> list[Part]:
        """Each task is an episode of its own."""
        places = asyncio.Semaphore(at_once)

        async def one(number: int, task: dict[str, Any]) -> Part:
            async with places:
                return await self._play(number, task)

        first = len(self.parts)
        parts = await asyncio.gather(*(one(first + number, task) for number, task in enumerate(tasks)))
        records: dict[EpisodeKey, list[Segment]] = {}
        for job in JOBS:
            entries = await self.table.redis.xrange(job_key(job, "segments"))
            for segment in (decode(fields[b"d"]) for _, fields in entries):
                records.setdefault(segment.key, []).append(segment)
        for key, part in self.parts.items():
            part.record = records.get(key, [])
        return parts

    async def _play(self, number: int, task: dict[str, Any]) -> Part:
        table, rng = self.table, random.Random(f"{self.seed} {task['number']}")
        job = JOBS[number % len(JOBS)]
        await table.bus.dispatch(job, TRAINER, number // len(JOBS), size=1, split=Split.TRAIN, task_index=1)
        (lease,) = await table.bus.lease(job, table.worker, table.token, 1)
        hints = {name: task[name] for name in ("wild", "huge", "ends") if name in task}
        policy = self.speaker(self.codec, rng, self.numbers, **hints)
        part = self.parts[lease.key] = Part(task, policy)
        board = LoanBoard(Loans(Functions(table.redis)))
        driver = AgentDriver(self.door, f"{self.url}/v1", time.time, board, no_judges())
        setting = make_setting(table, self.codec, policy)
        outbox = Outbox(table.bus, job, table.token, setting.retrier)
        setting = replace(setting, driver=driver, counters=part.counters, outbox=outbox)
        part.stop = str(await Episode(setting, self._order(lease, rng.choice((4, 16, 64, 1024)))).run())
        return part

    def _order(self, lease: LeasedEpisode, chunk: int) -> EpisodeSpec:
        job = spec(
            environments=[{"ref": "tests:play", "agent": {}}],
            limits={**LIMITS, "retries": 0, "episode_timeout_s": 1800.0},
            rollout={"group_size": 2, "chunk_tokens": chunk},
            sampling={"max_new_tokens": 512},
        )
        world = World(None, Doors(self.door), stage=self)  # type: ignore[arg-type]
        return EpisodeSpec.from_spec(job, world, lease, model_context_tokens=65_536)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def set_up(
    redis: Redis, codec: HermesCodec, seed: int, player: Player, speaker: type[Babbler] = Babbler
) -> AsyncIterator[Stage]:
    bus = Bus(redis, lease_s=LEASE_S)
    await bus.load_functions()
    for job in JOBS:
        await redis.hset(job_key(job, "trainer"), "token", TRAINER)
    table = Table(redis, bus, await bus.join("worker-0"), "worker-0")
    stop, port = asyncio.Event(), free_port()
    door = EpisodeRouter(Keys(SECRET), now=time.time)
    stage = Stage(table, codec, seed, f"http://127.0.0.1:{port}", door, player, speaker)
    app = Mishaps(build_app(door, is_ready=lambda: True, stopping=stop), stage.by_key)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_http(app, "127.0.0.1", port, stop, grace_s=1, settings="none", lifespan=False))
        try:
            yield stage
        finally:
            stop.set()
