"""The policies that keys talk to without an episode: for each job that is talked to, its codec and engines.

Rule: a job is loaded when it is first asked for and left when it is over or gone; nothing of its environments is
started. Its turns wait for the same engines as its episodes do, in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from gspo_core.chat import ChatCodec
from gspo_core.spec import JobSpec
from services.engines.protocol import Connect
from services.episodes.metering import Counters
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.process.cancelling import cancel_all
from services.process.telemetry import get_logger
from services.state.engine_sightings import EngineSightings
from services.state.jobs import JobNotFound
from services.state.retry import Retrier
from services.state.store import Store
from services.workers.engines import EngineTable, JobEngines
from services.workers.loading import JobNotServable, read_model, read_spec


@dataclass(frozen=True, slots=True)
class TalkJob:
    id: str
    spec: JobSpec
    codec: ChatCodec
    context_tokens: int
    policy: JobEngines
    leaving: asyncio.Event


class TalkJobs:
    def __init__(
        self, store: Store, urls: Collection[str], connect: Connect, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self.counters = Counters()
        self.clock = clock
        self.retrier = Retrier(self.counters, rng)
        self._store = store
        self._table = EngineTable(
            store.fleet, urls, connect, clock, self.retrier, sightings=EngineSightings(store.functions, clock)
        )
        self._jobs: dict[str, TalkJob] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loading = asyncio.Lock()

    async def get(self, job: str) -> TalkJob:
        """Raises ``Refusal``."""
        try:
            record = await self._store.jobs.get(job)
        except JobNotFound:
            await self._leave(job)
            raise Refusal(RefusalKind.UNKNOWN_KEY, "the job of this key does not exist") from None
        if record.status.is_terminal:
            await self._leave(job)
            raise Refusal(RefusalKind.ENDED, "the job of this key is over: nobody serves its weights here")
        async with self._loading:
            if job not in self._jobs:
                self._jobs[job] = await self._load(job, record.spec)
            return self._jobs[job]

    async def leave_ended(self) -> None:
        """Also those that nobody asks for any more. Raises ``Away`` and ``RedisFault``."""
        for job in list(self._jobs):
            if await self._is_over(job):
                await self._leave(job)

    async def _is_over(self, job: str) -> bool:
        try:
            return (await self._store.jobs.get(job)).status.is_terminal
        except JobNotFound:
            return True

    async def close(self) -> None:
        for one in self._jobs.values():
            one.leaving.set()
        await cancel_all(list(self._tasks.values()))

    async def _load(self, job: str, spec_text: str) -> TalkJob:
        try:
            spec = read_spec(spec_text)
            codec, context_tokens, vocab_size = await asyncio.to_thread(read_model, Path(spec.model), spec.chat)
        except JobNotServable as error:
            get_logger().warning("a job cannot be talked to", job=job, error=str(error))
            raise Refusal(RefusalKind.AWAY, "the model of this key cannot be read at this gateway") from None
        leaving = asyncio.Event()
        policy = JobEngines(
            self._table,
            self._store.versions,
            job,
            max_staleness=spec.rollout.max_staleness,
            vocab_size=vocab_size,
            retrier=self.retrier,
            counters=self.counters,
            clock=self.clock,
            leaving=leaving,
            in_place=spec.rollout.weight_sync == "in_place",
        )
        if not self._tasks:
            self._tasks[""] = asyncio.create_task(self._table.watch(), name="engines of talks")
        self._tasks[job] = asyncio.create_task(policy.watch(), name=f"talks of {job}")
        return TalkJob(job, spec, codec, context_tokens, policy, leaving)

    async def _leave(self, job: str) -> None:
        found = self._jobs.pop(job, None)
        if found is not None:
            found.leaving.set()
            await cancel_all([self._tasks.pop(job)])
