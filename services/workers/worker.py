"""A process that holds episodes: one lease, one beat, and the episodes of every job that runs.

Rule: a job that cannot be served is reported and tried again later; it costs the other jobs nothing. A job of the
other kind (of agents, of environments) is left to those who hold such. Losing the lease
ends all episodes at once, because another worker has them now; then the worker joins anew. Two of one name end each
other's leases for ever, so who loses its lease again soon after it joined goes on under another name.
Its places are divided by priority, and no wanted place stays empty: places that one job does not need go to the others.
Every job that wants any gets at least one, while there are enough; else the most important ones that have anything to
play do, and equals take turns. Nothing is taken back from a job that holds too many.
It builds nothing itself: it is given its parts that talk to Redis, engines and files (`__main__` builds them).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gspo_core.spec import JobSpec
from services.engines.protocol import Connect
from services.episodes.metering import Counters
from services.episodes.outbox import Outbox
from services.process.cancelling import cancel_all, unless_set
from services.process.lifecycle import tell_of_root
from services.process.telemetry import get_logger
from services.process.tracing import NoSpans, Spans
from services.state.engine_sightings import EngineSightings
from services.state.fleet_records import WorkerKind, WorkerRecord
from services.state.jobs import JobNotFound
from services.state.queue import Bus, Fenced
from services.state.refusals import Damaged, Refused
from services.state.retry import Retrier
from services.state.store import Store
from services.workers.engines import SILENCE_S, EngineTable, JobEngines
from services.workers.job import JobEpisodes
from services.workers.loading import JobNotServable, LoadedJob, read_spec
from services.workers.setting import Driver, EpisodeSetting

JOBS_POLL_S = 0.5
# A beat is a fifth of the lease, so that four may be lost.
BEATS_PER_LEASE = 5
REPORT_S = 2.0
LOG_S = 30.0
# A job with nothing waiting keeps one place in so many free for what comes next; the others may have the rest.
SPARE_SHARE = 8
# How long a job keeps its places where there are more jobs than places.
TURN_S = 60.0
# How long to leave a job alone that cannot be loaded: a person has to change something first.
RELOAD_S = 10.0
ENDS_LOADING_S = 10.0
NUM_CONTROL_CONNECTIONS = 8
# Leases in a row that end before they could run out. A server that was wiped ends one.
MAX_CUT_SHORT = 2


@dataclass(frozen=True, slots=True)
class Want:
    priority: float
    num_places: int
    """The most that it can use now."""
    is_idle: bool = False
    """It wants them for what may come."""


def divide(num_places: int, wants: Mapping[str, Want], turn: int = 0) -> dict[str, int]:
    """Places for each job; together no more than ``num_places``, and no more than it wants. ``turn``: whose it is."""
    hungry = [job for job, want in wants.items() if want.num_places > 0]
    given = dict.fromkeys(wants, 0)
    if num_places < len(hungry):
        ranked = sorted((job for job in _in_turn(wants, turn) if job in hungry), key=lambda job: wants[job].is_idle)
        return given | dict.fromkeys(ranked[:num_places], 1)
    left, weight = num_places, sum(wants[job].priority for job in hungry)
    # A job that is owed less than one place gets one, before the rest is divided.
    for job in sorted(hungry, key=lambda job: (wants[job].priority, job)):
        if left > 0 and left * wants[job].priority < weight:
            given[job] = 1
            left -= 1
    # The job that needs least for its priority comes first, so that the others divide what it leaves.
    for job in sorted(hungry, key=lambda job: ((wants[job].num_places - given[job]) / wants[job].priority, job)):
        more = min(wants[job].num_places - given[job], round(left * wants[job].priority / weight), left)
        given[job] += more
        left, weight = left - more, weight - wants[job].priority
    return given


def _in_turn(wants: Mapping[str, Want], turn: int) -> list[str]:
    """The most important first, equals in an order that the turns move on, whoever wants any at the moment."""
    equals: dict[float, list[str]] = {}
    for job in sorted(wants):
        equals.setdefault(wants[job].priority, []).append(job)
    groups = (equals[priority] for priority in sorted(equals, reverse=True))
    return [job for group in groups for job in group[turn % len(group) :] + group[: turn % len(group)]]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    name: str
    max_episodes: int = 64
    """Places, which the jobs share. Together they hold more for a while when another one comes."""
    lease_s: float = 30.0
    drain_s: float = 8.0
    """After the signal to leave: how long episodes may take to reach their next boundary."""
    engine_urls: Collection[str] = ()
    engine_silence_s: float = SILENCE_S
    kind: WorkerKind = "rollout"
    address: str = ""
    """Where its neighbours reach it, if it is a gateway."""
    place: str = ""
    """Where it stands, if that is known: this process alone stands there as long as it lives, and the next one that
    does has its episodes at once (``services.process.place``)."""

    def serves(self, spec: JobSpec) -> bool:
        """A gateway holds episodes of agents, a rollout worker those of environments."""
        return spec.recorded is None and spec.is_of_agents == (self.kind == "gateway")

    @property
    def max_connections(self) -> int:
        """To one engine. An engine serves one job, and no job holds more episodes than there are places."""
        return self.max_episodes + NUM_CONTROL_CONNECTIONS


async def nothing_to_do() -> None:
    pass


async def with_name_of_its_own(
    work: Callable[[WorkerConfig, asyncio.Event], Awaitable[None]], config: WorkerConfig, stop: asyncio.Event
) -> None:
    """Repeats ``work``, each time under another name, as long as it returns before ``stop``."""
    given = config.name
    await work(config, stop)
    while not stop.is_set():
        config = replace(config, name=f"{given}-{os.urandom(3).hex()}")
        get_logger().error(
            "another process has this worker's name as well: going on under another one",
            worker=given,
            name=config.name,
            cause="same hostname and process id, as of containers on the network of their host",
        )
        await work(config, stop)


class EpisodeWorker:
    """``run`` until told to stop."""

    def __init__(
        self,
        config: WorkerConfig,
        bus: Bus,
        store: Store,
        connect: Connect,
        load: Callable[[str, Callable[[str], None]], Coroutine[Any, Any, LoadedJob]],
        driver: Driver,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        spans: Spans | None = None,
        joined: Callable[[], Awaitable[None]] = nothing_to_do,
    ) -> None:
        """``joined``: called each time that this worker is a member again, before it serves any job."""
        self._config = config
        self._joined = joined
        self._spans = spans or NoSpans()
        self._bus = bus
        self._store = store
        self._load = load
        self._driver = driver
        self._clock = clock
        self.counters = Counters()
        self._retrier = Retrier(self.counters, rng)
        self._table = EngineTable(
            store.fleet,
            config.engine_urls,
            connect,
            clock,
            self._retrier,
            silence_s=config.engine_silence_s,
            sightings=EngineSightings(store.functions, clock),
        )
        self._jobs: dict[str, JobEpisodes] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        """Every job that is being served, also while it is loading."""
        self._not_servable: set[str] = set()
        """Jobs that could not be loaded when that was tried last."""
        self._is_draining = False
        self._place, self._generation = config.place, 0

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when ``stop`` is set and every episode is finished or handed back; before ``stop`` where another
        process has this worker's name as well (``with_name_of_its_own``)."""
        num_cut_short = 0
        while not stop.is_set() and num_cut_short < MAX_CUT_SHORT:
            token = await unless_set(stop, self._join())
            if token is None:
                break
            get_logger().info("joined", worker=self._config.name)
            tell_of_root()
            joined_at = self._clock()
            try:
                await self._work(token, stop)
            except* Fenced:
                is_cut_short = self._clock() - joined_at < self._config.lease_s
                num_cut_short = num_cut_short + 1 if is_cut_short else 0
                self.counters.add("worker/fenced")
                get_logger().warning("lease lost: joining again", worker=self._config.name)
            else:
                with contextlib.suppress(Fenced):
                    await self._retrier.keep_trying(self._bus.leave, self._config.name, token)
        get_logger().info("left", worker=self._config.name, **self.counters.snapshot())

    async def _join(self) -> str:
        token = await self._begin_lease()
        await self._retrier.keep_trying(self._joined)
        return token

    async def _begin_lease(self) -> str:
        if not self._place:
            return await self._retrier.keep_trying(self._bus.join, self._config.name)
        join = self._bus.join_in_place
        joined = await self._retrier.keep_trying(join, self._config.name, self._place, self._generation)
        self._generation = joined.generation
        if not joined.generation:  # two that take it from each other in turn would play nothing
            get_logger().error("another process stands in this place: going on without it", place=self._place)
            self._place = ""
        return joined.token

    async def _work(self, token: str, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as background:
            tasks = [
                background.create_task(self._beat(token), name="beat"),
                background.create_task(self._table.watch(), name="engines"),
                background.create_task(self._reap(), name="reap"),
                background.create_task(self._report(), name="report"),
            ]
            try:
                await self._serve_jobs(token, stop)
                await self._report_once()
            finally:
                for task in tasks:
                    task.cancel()

    async def _beat(self, token: str) -> None:
        while True:
            await self._retrier.keep_trying(self._bus.beat, self._config.name, token)
            await asyncio.sleep(self._config.lease_s / BEATS_PER_LEASE)

    async def _reap(self) -> None:
        """Finds workers that died: any worker of a job does it for all."""
        while True:
            for job in list(self._jobs):
                await self._reap_of(job)
            await asyncio.sleep(self._config.lease_s / BEATS_PER_LEASE)

    async def _reap_of(self, job: str) -> None:
        try:
            num_requeued = await self._retrier.keep_trying(self._bus.reap, job)
        except Damaged as error:  # its trainer empties the queue; the other jobs are not affected
            self.counters.add("jobs/damaged")
            get_logger().warning("the queue is damaged", job=job, error=str(error))
            return
        if num_requeued:
            self.counters.add("episodes/requeued_from_the_dead", num_requeued)
            get_logger().warning("requeued episodes of dead workers", job=job, num_episodes=num_requeued)

    async def _serve_jobs(self, token: str, stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        try:
            async with asyncio.TaskGroup() as serving:
                while not stop.is_set():
                    served = await unless_set(stop, self._served())
                    if served is None:
                        break
                    running = set(served)
                    for job in running - self._leaving.keys():
                        self._leaving[job] = asyncio.Event()
                        serving.create_task(self._serve(job, token, self._leaving[job]), name=job)
                    for job in self._leaving.keys() - running:
                        self._leaving[job].set()
                    await asyncio.wait({stopping}, timeout=JOBS_POLL_S)
                self._is_draining = True
                self._leave_all()
                await self._report_once()
        finally:
            self._leave_all()
            stopping.cancel()

    async def _served(self) -> list[str]:
        return await self._retrier.keep_trying(self._store.jobs.served)

    def _leave_all(self) -> None:
        for leaving in self._leaving.values():
            leaving.set()

    async def _serve(self, job: str, token: str, leaving: asyncio.Event) -> None:
        log = get_logger().bind(job=job)
        try:
            while not leaving.is_set():
                try:
                    await self._serve_once(job, token, leaving)
                except JobNotServable as error:
                    log.error("cannot be served", error=str(error))
                    self._not_servable.add(job)
                    await self._report_unservable(job, str(error), leaving)
                except Exception as error:
                    # The wall between jobs: a defect met by one of them must not end the others.
                    log.exception("serving failed")
                    await self._report_unservable(job, f"{type(error).__name__}: {error}", leaving)
        finally:
            self._leaving.pop(job, None)
            self._not_servable.discard(job)
            log.info("no longer serving")

    async def _serve_once(self, job: str, token: str, leaving: asyncio.Event) -> None:
        record = await self._retrier.keep_trying(self._store.jobs.get, job)
        if not self._config.serves(read_spec(record.spec)):
            await leaving.wait()
            return
        await self._reap_of(job)  # those of the worker whose name or place this one has wait for nobody's lease
        loaded = await self._unless_left(self._load(record.spec, self.counters.add), leaving)
        if loaded is None:
            return
        try:
            await self._describe(job, loaded)
            self._jobs[job] = self._rollout(job, loaded, token, leaving)
            names = [environment.name for environment in loaded.environments]
            get_logger().info("serving", job=job, environments=names, capacity=loaded.capacity)
            if job in self._not_servable:
                self._not_servable.discard(job)
                await self._tell_health(job, {"healthy": True, "error": ""})
            await self._jobs[job].run()
        finally:
            self._jobs.pop(job, None)  # a job that is not served wants no places
            await loaded.close()

    async def _unless_left(self, load: Coroutine[Any, Any, LoadedJob], leaving: asyncio.Event) -> LoadedJob | None:
        """An environment may take minutes to start: whoever is asked to leave does not wait for it."""
        loading, left = asyncio.create_task(load), asyncio.create_task(leaving.wait())
        is_wanted = False
        try:
            await asyncio.wait({loading, left}, return_when=asyncio.FIRST_COMPLETED)
            is_wanted = loading.done()
            # Not again while it ends the processes that it has started.
            await cancel_all([loading, left], again_after_s=ENDS_LOADING_S)
        except asyncio.CancelledError:
            is_wanted = False  # also when loading had just ended: nobody gets what it loaded
            await cancel_all([loading, left], again_after_s=ENDS_LOADING_S)
            raise
        finally:
            if not is_wanted and not loading.cancelled() and loading.exception() is None:
                await loading.result().close()
        return loading.result() if is_wanted else None

    async def _report_unservable(self, job: str, error: str, leaving: asyncio.Event) -> None:
        """Tells the job's owner, and leaves the job alone for a while."""
        self.counters.add("jobs/not_servable")
        await self._tell_health(job, {"healthy": False, "error": error})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELOAD_S):
                await leaving.wait()

    async def _describe(self, job: str, loaded: LoadedJob) -> None:
        for index, environment in enumerate(loaded.environments):
            mine = environment.describe()
            held = await self._retrier.keep_trying(self._store.environments.describe, job, index, mine)
            if held != mine:
                get_logger().warning("another worker described it differently", job=job, index=index, held=held)

    def _rollout(self, job: str, loaded: LoadedJob, token: str, leaving: asyncio.Event) -> JobEpisodes:
        engines = JobEngines(
            self._table,
            self._store.versions,
            job,
            max_staleness=loaded.spec.rollout.max_staleness,
            vocab_size=loaded.vocab_size,
            retrier=self._retrier,
            counters=self.counters,
            clock=self._clock,
            leaving=leaving,
            in_place=loaded.spec.rollout.weight_sync == "in_place",
        )
        setting = EpisodeSetting(
            driver=self._driver,
            codec=loaded.codec,
            policy=engines,
            outbox=Outbox(self._bus, job, token, self._retrier),
            records=self._bus,
            token=token,
            retrier=self._retrier,
            counters=self.counters,
            clock=self._clock,
            leaving=leaving,
            spans=self._spans,
        )
        return JobEpisodes(
            job,
            loaded,
            setting,
            engines,
            self._bus,
            worker=self._config.name,
            limit=lambda: self._share(job),
            drain_s=self._config.drain_s,
            tell=lambda health: self._tell_health(job, health),
        )

    def _share(self, job: str) -> int:
        places = self._config.max_episodes
        spare = max(1, places // SPARE_SHARE)
        wants = {name: Want(one.priority, one.num_wanted(spare), one.is_idle) for name, one in self._jobs.items()}
        given = divide(places, wants, turn=int(self._clock() / TURN_S)).get(job, 0)
        if places >= len(wants) or job not in self._jobs:
            return given
        # Else each turn would give a further job a place, while those before it still play.
        num_free = max(0, places - self._num_episodes())
        return min(given, self._jobs[job].num_episodes + num_free)

    async def _tell_health(self, job: str, health: Mapping[str, str | bool]) -> None:
        with contextlib.suppress(JobNotFound, Refused):  # the job itself is gone
            told = {"worker": self._config.name, **health}
            await self._retrier.keep_trying(self._store.events.add, job, "env.health", told)
        await self._report_once()

    async def _report(self) -> None:
        logged = self._clock()
        said: Mapping[str, float] = {"num_episodes": 0}
        while True:
            await self._report_once()
            progress = {"num_episodes": self._num_episodes(), **self.counters.snapshot()}
            if self._clock() - logged >= LOG_S and progress != said:
                logged, said = self._clock(), progress
                get_logger().info("progress", **progress)
            await asyncio.sleep(REPORT_S)

    async def _report_once(self) -> None:
        await self._retrier.keep_trying(self._store.fleet.register_worker, self._record())

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self._config.name,
            kind=self._config.kind,
            host=socket.gethostname(),
            address=self._config.address,
            pid=os.getpid(),
            draining=self._is_draining,
            jobs=tuple(sorted(self._jobs)),
            num_episodes=self._num_episodes(),
            max_episodes=self._config.max_episodes,
            environment_capacity={job: rollout.capacity for job, rollout in self._jobs.items()},
            engine_requests=self._table.num_requests(),
            ill_environments={job: ill for job, one in self._jobs.items() if (ill := one.ill_environments)},
            counters=dict(self.counters.snapshot()),
        )

    def _num_episodes(self) -> int:
        return sum(rollout.num_episodes for rollout in self._jobs.values())
