"""Finds the engines that sample for a job right now, and asks one of them.

Rule: the label on an engine's answer decides, not the label that this worker saw when it asked: every span must name
this job, and its version goes into the record. An answer that names anything else is discarded and counted.
An engine that its trainer calls dirty is never asked, whatever label it shows. Engines are bound and given new weights
elsewhere; here they are only watched and asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gspo_core.types import CacheMode
from gspo_core.versions import EngineLabel, NotALabel, WeightsManifest
from services.engines.protocol import (
    Connect,
    ContextFull,
    Engine,
    EngineError,
    EngineLoad,
    EngineRejected,
    Generation,
    NoSuchKind,
    info_within,
)
from services.episodes.metering import Counters
from services.episodes.policy import Drained, InvalidAnswer, Sampled
from services.process.cancelling import first_to_end
from services.process.telemetry import get_logger
from services.state.engine_sightings import EngineSightings, Sighting
from services.state.fleet_records import EngineRecord, EngineState
from services.state.retry import Retrier
from services.workers.engine_watch import EngineWatch, Hearsay, InFlightLimit

# How often the table of engines is read again. New weights come a second or more apart; meanwhile the spans are right.
REFRESH_S = 0.1
# Where another process looks at the engines: how long to wait for news of them, and for more of the same news.
NEWS_S = 1.0
MORE_NEWS_S = 0.01
# An engine that has not told its label for so long gets no new requests; those in flight go on.
LABEL_TIMEOUT_S = 2.0
# How often engines are asked how busy they are.
LOAD_S = 1.0
# An episode leaves the engine that knows its prefix when that has so many more requests than the idlest, relative to
# their limits; a quarter of its limit if that is less.
MAX_IMBALANCE = 8
# An engine that is silent for longer than the longest load of weights is given up, with its requests.
SILENCE_S = 120.0


@dataclass(eq=False, slots=True)
class WatchedEngine:
    """One engine as this worker sees it."""

    url: str
    client: Engine
    label: EngineLabel | None = None
    """Names its weights; None while it does not answer or serves no job."""
    record: EngineRecord | None = None
    """None for an engine that is not registered."""
    draining: bool = False
    """It gets no new requests; those in flight run to their end."""
    in_flight: set[asyncio.Task[Generation]] = field(default_factory=set)
    """Requests of this worker."""
    num_waiting: int = 0
    """Requests of all workers that were waiting in it when it was last asked."""
    limit: InFlightLimit = field(default_factory=InFlightLimit)
    num_promised: int = 0
    """Requests of this worker that may start here and have not yet."""
    num_wanted: int = 0
    """Requests that wait for this engine because it knows their prefix."""
    last_answer: float = 0.0
    """When it last told its label."""
    hearsay: Hearsay = field(default_factory=Hearsay)
    load_number: int = 0
    """Number of the last load that was told."""

    @property
    def reported(self) -> str:
        """The label in its trainer's report."""
        return self.record.label if self.record else ""

    @property
    def num_requests(self) -> int:
        return len(self.in_flight)

    @property
    def is_switching(self) -> bool:
        return self.record is not None and self.record.state is EngineState.SWITCHING

    @property
    def has_room(self) -> bool:
        return self.num_requests + self.num_promised < self.limit.value

    @property
    def num_claims(self) -> int:
        """Requests that it has or is about to get."""
        return self.num_requests + self.num_promised + self.num_wanted

    def serves(self, job: str) -> bool:
        if self.label is None or self.label.job != job or self.draining:
            return False
        if (record := self.record) is None:
            return True
        return record.job in (None, job) and (record.state is None or record.state.may_be_asked)

    def room(self, num_ids: int, wanted: int) -> int:
        """How many of so many tokens it can sample behind so many ids. Raises ContextFull."""
        limit = self.record.report.context_tokens if self.record and self.record.report else 0
        if limit and num_ids >= limit:
            raise ContextFull(f"{self.url}: {num_ids} ids, and it samples sequences of {limit} at most")
        return min(wanted, limit - num_ids) if limit else wanted

    def take_load(self, load: EngineLoad) -> None:
        """Good enough to give it no more requests than it runs. A pause teaches nothing."""
        self.num_waiting = load.num_waiting
        if not self.is_switching and load.age_s <= LOAD_S:
            self.limit.report(num_ours=self.num_requests, num_running=load.num_running, num_waiting=load.num_waiting)

    def abandon(self) -> None:
        """Sends its requests elsewhere: it left the table or fell silent."""
        abandoned, self.in_flight = self.in_flight, set()
        for answer in abandoned:
            answer.cancel()


class RegisteredEngines(Protocol):
    """The part of the fleet that is read here."""

    async def engines(self) -> list[EngineRecord]: ...


class PublishedVersions(Protocol):
    """What is read of the version table."""

    async def current(self, job: str) -> WeightsManifest | None: ...

    async def manifests(self, job: str, numbers: Collection[int]) -> list[WeightsManifest]: ...


class EngineTable:
    """All engines that this worker may reach, kept up to date by one task for all of its jobs."""

    def __init__(
        self,
        fleet: RegisteredEngines,
        urls: Collection[str],
        connect: Connect,
        clock: Callable[[], float],
        retrier: Retrier,
        *,
        silence_s: float = SILENCE_S,
        make_limit: Callable[[], InFlightLimit] = InFlightLimit,
        sightings: EngineSightings | None = None,
    ) -> None:
        """With ``sightings`` one process looks at the engines for all; without, this one does so for itself."""
        self._sightings = sightings
        self._fleet = fleet
        self._retrier = retrier
        self._make_limit = make_limit
        self._static_urls = tuple(urls)
        self._connect = connect
        self._clock = clock
        self._silence_s = silence_s
        self._engines: dict[str, WatchedEngine] = {}
        self._unknown: set[str] = set()
        """Addresses whose kind of engine this worker does not know."""
        self._asked_load_at = -LOAD_S

    def num_requests(self) -> dict[str, int]:
        """Requests of this worker, by engine."""
        return {url: engine.num_requests for url, engine in sorted(self._engines.items())}

    async def watch(self) -> None:
        """Until cancelled."""
        if self._sightings is None:
            await self._refresh_often()
        else:
            watch = EngineWatch(self._sightings, self._engines.values, self._retrier, self._clock)
            await first_to_end(self._refresh_at_news(self._sightings), watch.run())

    async def _refresh_often(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def _refresh_at_news(self, sightings: EngineSightings) -> None:
        while True:
            await self.refresh()
            read_at = self._clock()
            while self._clock() - read_at < NEWS_S:
                told = await self._retrier.try_once(sightings.news, NEWS_S)
                await asyncio.sleep(REFRESH_S if told is None else MORE_NEWS_S)
                if told is None or any(told):
                    break  # what is registered has changed, too
                await self._read_sightings(sightings)

    async def refresh(self) -> None:
        records = await self._retrier.try_once(self._fleet.engines)
        if records is not None:  # otherwise the last table stands
            self._update(records)
        if self._sightings is None:
            await self._ask_all()
        else:
            await self._read_sightings(self._sightings)

    async def _read_sightings(self, sightings: EngineSightings) -> None:
        seen = await self._retrier.try_once(sightings.all)
        if seen is not None:
            await asyncio.gather(*(self._hear_of(one, seen.get(one.url)) for one in self._engines.values()))

    async def _hear_of(self, engine: WatchedEngine, seen: Sighting | None) -> None:
        now = self._clock()
        engine.hearsay.hear(seen, now)
        label = engine.hearsay.label(engine.record.report if engine.record else None, now)
        if label is not None:
            self._note(engine, EngineLabel.parse_or_none(label))
        elif engine.hearsay.may_ask(now):
            await self._read_label(engine)
        if seen is not None and seen.load_number != engine.load_number:
            engine.load_number = seen.load_number
            engine.take_load(EngineLoad(seen.num_running, seen.num_waiting, 0, seen.load_age_s))

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._read_label(engine) for engine in self._engines.values()))
        if self._clock() - self._asked_load_at >= LOAD_S:
            self._asked_load_at = self._clock()
            await asyncio.gather(*(_read_load(engine) for engine in self._engines.values() if engine.label))

    async def _read_label(self, engine: WatchedEngine) -> None:
        info = await info_within(engine.client, LABEL_TIMEOUT_S)
        self._note(engine, EngineLabel.parse_or_none(info.label) if info else None)

    def _note(self, engine: WatchedEngine, label: EngineLabel | None) -> None:
        if label != engine.label:
            get_logger().info("engine", url=engine.url, label=str(label or ""), before=str(engine.label or ""))
        engine.label = label
        if label:
            engine.last_answer = self._clock()
        elif self._clock() - engine.last_answer > self._silence_s:
            engine.abandon()
            engine.last_answer = self._clock()

    def _update(self, records: Sequence[EngineRecord]) -> None:
        by_url = {record.url: record for record in records if record.url}
        urls = {*self._static_urls, *by_url}
        for url in self._engines.keys() - urls:
            self._engines.pop(url).abandon()
        for url in sorted(urls - self._engines.keys() - self._unknown):
            self._add(url)
        for url, engine in self._engines.items():
            record = by_url.get(url)
            engine.draining = record is not None and record.draining
            self._hear(engine, record)

    def _add(self, url: str) -> None:
        try:
            client = self._connect(url)
        except NoSuchKind as error:
            self._unknown.add(url)
            get_logger().warning("engine ignored: unknown kind", url=url, reason=str(error))
            return
        self._engines[url] = WatchedEngine(url, client, last_answer=self._clock(), limit=self._make_limit())

    def _hear(self, engine: WatchedEngine, record: EngineRecord | None) -> None:
        job = engine.label.job if engine.label else ""
        was_usable = engine.serves(job)
        engine.record = record
        if was_usable and not engine.serves(job) and self.serving(job):
            # Other engines serve the job. The only one keeps its requests: they may well survive its repair.
            engine.abandon()

    def serving(self, job: str) -> list[WatchedEngine]:
        return [engine for engine in self._engines.values() if engine.serves(job)]


async def _read_load(engine: WatchedEngine) -> None:
    try:
        async with asyncio.timeout(LABEL_TIMEOUT_S):
            load = await engine.client.load()
    except (EngineError, TimeoutError):
        return
    engine.take_load(load)


@dataclass(eq=False, slots=True)
class _EngineTicket:
    """A request waiting for an engine with room."""

    prefer_engine: str
    engine: asyncio.Future[WatchedEngine | None]
    """None: the worker is leaving."""


class JobEngines:
    """The ``Policy`` of one job: the engines that hold one of its versions, none of them too old."""

    def __init__(
        self,
        table: EngineTable,
        versions: PublishedVersions,
        job: str,
        *,
        max_staleness: int,
        vocab_size: int,
        retrier: Retrier,
        counters: Counters,
        clock: Callable[[], float],
        leaving: asyncio.Event,
        in_place: bool = False,
    ) -> None:
        self._table = table
        self._versions = versions
        self._job = job
        self._max_staleness = max_staleness
        self._vocab_size = vocab_size
        self._retrier = retrier
        self._counters = counters
        self._clock = clock
        self._leaving = leaving
        self._in_place = in_place
        self._steps: dict[int, int] = {}
        """Version -> step, for the published versions that were current at a look or that an engine named. The table
        has as many as the run has steps, so it is never read whole."""
        self._published: WeightsManifest | None = None
        self._avoided: set[WatchedEngine] = set()
        self._queue: deque[_EngineTicket] = deque()
        """In order of arrival."""

    async def watch(self) -> None:
        """Follows the published versions until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        current = await self._retrier.try_once(self._versions.current, self._job)
        if current is not None:
            self._learn([current])
            shown = {engine.label.version for engine in self._table.serving(self._job) if engine.label}
            if unknown := shown - self._steps.keys():
                self._learn(await self._retrier.try_once(self._versions.manifests, self._job, unknown) or [])
        self._avoided.clear()
        self._serve_queue()

    def usable(self) -> list[WatchedEngine]:
        """Engines within ``max_staleness`` steps of the published version, the least busy for its size first."""
        return sorted((one for one in self._table.serving(self._job) if self._is_fresh(one)), key=self._rank)

    def _rank(self, engine: WatchedEngine) -> tuple[bool, bool, float]:
        return engine in self._avoided, engine.is_switching, engine.num_claims / engine.limit.value

    def has_room(self) -> bool:
        """Whether an episode that starts now would be served at once, as far as is known.

        An engine's report of its queue can be old; one without requests of ours is always worth a try.
        """
        engines = [engine for engine in self.usable() if engine.has_room]
        return not self._queue and any(not (one.num_waiting and one.num_requests) for one in engines)

    def _is_fresh(self, engine: WatchedEngine) -> bool:
        published = self._published
        if published is None or engine.label is None:
            return False  # its age is not known before the first look at what is published
        if engine.label.version > published.version:
            return True  # published after the last look
        # A later step than the published one belongs to a lineage that a recovery gave up.
        step = self._steps.get(engine.label.version)
        return step is not None and 0 <= published.step - step <= self._max_staleness

    async def sample(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Collection[int],
        prefer_engine: str = "",
        sampling_seed: int | None = None,
    ) -> Sampled:
        started, num_failures = self._clock(), 0
        refused_by: set[str] = set()
        while True:
            engine = await self._choose(prefer_engine)
            asked = self._clock()
            try:
                try:
                    request = engine.client.generate(
                        input_ids,
                        max_new_tokens=engine.room(len(input_ids), max_new_tokens),
                        temperature=temperature,
                        stop_token_ids=sorted(stop_token_ids),
                        extra_key=(key := str(engine.label)),
                        sampling_seed=sampling_seed,
                        vocab_size=self._vocab_size,
                    )
                    generation = await _answer_of(engine, request)
                finally:
                    if self._queue:
                        self._serve_queue()
                if generation is not None and generation.output_ids:
                    return await self._checked(generation, engine, key, held_s=asked - started)
                self._counters.add("engine/no_answers")
            except EngineRejected as error:
                self._counters.add(f"engine/{type(error).__name__}")
                refused_by.add(engine.url)
                if all(one.url in refused_by for one in self.usable()):
                    raise  # every engine would refuse it: the episode handles that
            except (EngineError, InvalidAnswer) as error:
                self._counters.add(f"engine/{type(error).__name__}")
                get_logger().warning("engine failed", job=self._job, url=engine.url, error=str(error))
            self._avoided.add(engine)
            await self._retrier.pause(num_failures)
            num_failures += 1

    async def _choose(self, prefer_engine: str) -> WatchedEngine:
        """Waits for an engine with room, behind earlier requests."""
        if not self._queue and (free := self._free_engine(prefer_engine)):
            return free
        turn = _EngineTicket(prefer_engine, asyncio.get_running_loop().create_future())
        self._queue.append(turn)
        self._serve_queue()
        try:
            engine = await turn.engine
        except asyncio.CancelledError:
            if turn in self._queue:
                self._queue.remove(turn)
            elif not turn.engine.cancelled() and (promised := turn.engine.result()):
                promised.num_promised -= 1
            raise
        if engine is None:
            raise Drained(f"{self._job}: the worker left before an engine became available")
        engine.num_promised -= 1
        return engine

    def _free_engine(self, prefer_engine: str) -> WatchedEngine | None:
        """An engine for a request that need not wait."""
        engines = self.usable()
        for engine in engines:
            engine.num_wanted = 0
        return self._engine_for(prefer_engine, engines) if any(engine.has_room for engine in engines) else None

    def _serve_queue(self) -> None:
        """Gives the free room to the waiting requests, first come first served."""
        engines = self.usable()
        for engine in engines:
            engine.num_wanted = 0
        passed = []
        # Runs at every answer, so it stops looking at waiting requests once all engines are busy.
        while self._queue and any(engine.has_room for engine in engines):
            turn = self._queue.popleft()
            if turn.engine.done():
                continue  # cancelled
            if chosen := self._engine_for(turn.prefer_engine, engines):
                chosen.num_promised += 1
                turn.engine.set_result(chosen)
            else:
                passed.append(turn)
        self._queue.extendleft(reversed(passed))
        if self._queue and not engines and self._leaving.is_set():
            for turn in self._queue:
                if not turn.engine.done():
                    turn.engine.set_result(None)
            self._queue.clear()
        for full in [engine for engine in engines if self._queue and not engine.has_room]:
            full.limit.reached()

    def _engine_for(self, preferred_url: str, engines: Sequence[WatchedEngine]) -> WatchedEngine | None:
        """The preferred one, even if it has no room yet, unless it is far busier than the idlest; else the idlest."""
        idlest = min((engine for engine in engines if engine.has_room), key=self._rank)
        preferred = next((one for one in engines if one.url == preferred_url), None)
        if preferred is None or preferred in self._avoided or preferred.is_switching:
            return idlest
        excess = min(MAX_IMBALANCE, preferred.limit.value / 4)
        if (preferred.num_claims - excess) / preferred.limit.value > idlest.num_claims / idlest.limit.value:
            return idlest
        if preferred.has_room:
            return preferred
        preferred.num_wanted += 1
        return None

    async def _checked(self, generation: Generation, engine: WatchedEngine, key: str, held_s: float) -> Sampled:
        versions = [self._version_of(span.label, engine.url) for span in generation.spans]
        await self._require_published(versions, engine.url)
        # Updated in place, tokens of a later version rest on keys and values of an earlier one.
        is_stale = self._in_place and any(span.label != key for span in generation.spans)
        mode = CacheMode.STALE if is_stale else CacheMode.FRESH
        return Sampled.of(generation, versions, engine.url, cache_mode=mode, held_s=held_s)

    def _version_of(self, text: str, url: str) -> int:
        """Raises InvalidAnswer for the label of anything but this job's weights."""
        try:
            label = EngineLabel.parse(text)
        except NotALabel as error:
            raise InvalidAnswer(str(error)) from error
        if label.job != self._job:
            raise InvalidAnswer(f"{url} sampled with weights of {label} for job {self._job}")
        return label.version

    async def _require_published(self, versions: Collection[int], url: str) -> None:
        """Raises InvalidAnswer. A version is published before any engine is given it, so one that is in no table is not
        what sampled, and the trainer could give its tokens no age."""
        if missing := set(versions) - self._steps.keys():
            self._learn(await self._retrier.keep_trying(self._versions.manifests, self._job, missing))
        if unknown := sorted(set(versions) - self._steps.keys()):
            raise InvalidAnswer(
                f"{url} sampled with version {unknown[0]} of job {self._job}, which was never published"
            )

    def _learn(self, manifests: Sequence[WeightsManifest]) -> None:
        # A server that was wiped knows fewer for a while; what was published stays published.
        self._steps.update({manifest.version: manifest.step for manifest in manifests})
        known = [*manifests] if self._published is None else [*manifests, self._published]
        self._published = max(known, key=lambda manifest: manifest.version, default=None)


async def _answer_of(engine: WatchedEngine, request: Coroutine[None, None, Generation]) -> Generation | None:
    """The result of ``request``, or None when the engine was abandoned first."""
    answer = asyncio.create_task(request)
    engine.in_flight.add(answer)
    try:
        return await answer
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if answer in engine.in_flight or (task is not None and task.cancelling()):
            raise
        return None
    finally:
        engine.in_flight.discard(answer)
