"""What is seen of the engines' load and weights, and how many requests an engine gets at once by what was seen.

Rule: one process looks for all, the others read what it saw. An engine is asked for its load once a second and for its
weights every other second, however many processes wait to hear of it, and at once when a connection to it is lost. What
its trainer reports in between is newer and needs no look. A process that cannot use what it is told (nobody looks, it
is old, or the engine does not answer the one who looks) asks that engine itself, once a second at most.
An engine gets as many requests as it runs at once, learned from its reports of its queue. One that would only wait in
an engine waits here, where it can still go to another engine, keeps no prefix out of the cache, and is not recomputed
after a weight update. A load that runs while nothing waits is known to fit. A limit that is reached while nothing waits
grows: it doubles until the engine was full for the first time, then grows by an eighth. A queue of up to a quarter
keeps the engine full. A longer one in two reports in a row is too much (in one it may be a burst or a pause), and the
limit falls to the running requests and an eighth more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.engines.protocol import Engine, EngineError, EngineInfo, EngineKeyRefused
from services.process.cancelling import cancel_all
from services.process.telemetry import get_logger
from services.state.client import Away
from services.state.engine_sightings import WATCH_LEASE_S, EngineSightings, Sighting
from services.state.fleet_records import EngineReport
from services.state.retry import Retrier

# The limit of requests in flight, at the start.
_START = 64
_CROWDED_REPORTS = 2
# As parts of the limit: one fourth, one eighth.
_SLACK = 4
_GROWTH = 8
# A tick is a look at the load; every other one is a look at the weights, too.
TICK_S = 1.0
_TICKS_PER_INFO = 2
_ANSWER_S = 2.0
# Until an engine answers again it is asked as often as this, by one process.
RETURN_S = 0.1
# Engines are looked at together, and told of together.
_GATHER_S = 0.02
# What was told before this is old. Longer than it takes until another process looks at the engines.
STALE_S = 3 * WATCH_LEASE_S
_LEAVE_S = 1.0


class InFlightLimit:
    """For one engine and the requests of this process."""

    def __init__(self, start: int = _START) -> None:
        self.value = start
        self._is_reached = False
        """Since the last report."""
        self._was_ever_crowded = False
        self._num_crowded = 0
        """Reports in a row."""

    def reached(self) -> None:
        """Reports that a request waits for this engine."""
        self._is_reached = True

    def report(self, *, num_ours: int, num_running: int, num_waiting: int) -> None:
        """Takes the engine's report on all requests; ``num_ours`` of them are from this process."""
        if not num_running and num_waiting:
            return  # paused
        if num_waiting > max(1, self.value // _SLACK):
            self._num_crowded += 1
            if self._num_crowded >= _CROWDED_REPORTS:
                self._was_ever_crowded = True
                running = num_ours * num_running / (num_running + num_waiting)
                self.value = max(1, math.ceil(running * (1 + 1 / _GROWTH)))
        else:
            self._num_crowded = 0
            if not num_waiting:
                self._grow(num_ours)
        self._is_reached = False

    def _grow(self, num_ours: int) -> None:
        self.value = max(self.value, num_ours)
        if self._is_reached:
            self.value += max(1, self.value // _GROWTH) if self._was_ever_crowded else self.value


class Watched(Protocol):
    """An engine of the process's table."""

    @property
    def url(self) -> str: ...

    @property
    def client(self) -> Engine: ...

    @property
    def reported(self) -> str: ...


@dataclass(slots=True)
class Hearsay:
    """What this process was told of one engine."""

    sighting: Sighting | None = None
    _told_at: float = -math.inf
    _asked_at: float = -math.inf

    def hear(self, sighting: Sighting | None, now: float) -> None:
        if sighting is not None and (self.sighting is None or sighting.number != self.sighting.number):
            self._told_at = now
            if not sighting.answered and (self.sighting is None or self.sighting.answered):
                self._asked_at = -math.inf  # it may answer here
        self.sighting = sighting

    def label(self, report: EngineReport | None, now: float) -> str | None:
        """The newest that was told of its weights, or None: only the engine itself can say."""
        seen, reported = self.sighting, report.label if report else ""
        if reported and (seen is None or seen.reported != reported):
            return reported
        return None if seen is None or not seen.answered or now - self._told_at > STALE_S else seen.label

    def may_ask(self, now: float) -> bool:
        """Whether to ask the engine now. Counts as asking."""
        if now - self._asked_at < TICK_S:
            return False
        self._asked_at = now
        return True


class EngineWatch:
    """``run`` in every process; one of them looks."""

    def __init__(
        self,
        sightings: EngineSightings,
        engines: Callable[[], Collection[Watched]],
        retrier: Retrier,
        clock: Callable[[], float],
    ) -> None:
        self._sightings = sightings
        self._engines = engines
        self._retrier = retrier
        self._clock = clock
        self._seen: dict[str, Sighting] = {}
        self._untold: set[str] = set()
        self._has_untold = asyncio.Event()
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._warned: set[str] = set()
        """Engines that refuse our key."""
        # Whoever looks next begins elsewhere, so that its numbers are new to all.
        self._number = random.getrandbits(40)

    async def run(self) -> None:
        """Until cancelled."""
        is_holder = False
        try:
            while True:
                is_holder = bool(await self._retrier.try_once(self._sightings.hold))
                if is_holder:
                    get_logger().info("looking at the engines for all processes")
                    await self._look_until_lost()
                await asyncio.sleep(WATCH_LEASE_S / 4)
        finally:
            await cancel_all(list(self._looking.values()))
            if is_holder:
                with contextlib.suppress(Away, TimeoutError):
                    async with asyncio.timeout(_LEAVE_S):
                        await self._sightings.leave()

    async def _look_until_lost(self) -> None:
        try:
            while True:
                gone = self._follow_table()
                told, self._untold = self._untold, set()
                self._has_untold.clear()
                seen = {url: self._seen[url] for url in told if url in self._seen}
                is_ours = await self._retrier.try_once(self._sightings.write, seen, gone)
                if is_ours is False:
                    return
                if is_ours is None:
                    self._untold |= told
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_LEASE_S / 4):
                        await self._has_untold.wait()
                await asyncio.sleep(_GATHER_S)
        finally:
            await cancel_all(list(self._looking.values()))
            self._looking.clear()

    def _follow_table(self) -> set[str]:
        """Looks at the engines that are there now; returns those that no longer are."""
        engines = {engine.url: engine for engine in self._engines()}
        gone = self._looking.keys() - engines.keys()
        for url in gone:
            self._looking.pop(url).cancel()
            self._seen.pop(url, None)
        for url in engines.keys() - self._looking.keys():
            self._looking[url] = asyncio.create_task(self._look_at(engines[url]), name=f"looking at {url}")
        return gone

    async def _look_at(self, engine: Watched) -> None:
        lost = asyncio.Event()
        line = asyncio.create_task(_tell_when_lost(engine.client, lost))
        try:
            for tick in range(2**62):
                before = self._seen.get(engine.url)
                if lost.is_set() or tick % _TICKS_PER_INFO == 0 or before is None or not before.answered:
                    lost.clear()
                    before = await self._look_at_weights(engine)
                await self._look_at_load(engine, before)
                # All at the same instants: what is seen of all is told at once.
                is_away = not before.answered and engine.url not in self._warned
                wait_s = RETURN_S if is_away else TICK_S - self._clock() % TICK_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await lost.wait()
        finally:
            line.cancel()

    async def _look_at_weights(self, engine: Watched) -> Sighting:
        reported = engine.reported
        info = await self._info(engine)
        before = self._seen.get(engine.url)
        if info is None and before is not None and not before.answered:
            return before  # nothing new
        before = before or Sighting(number=0)
        return self._see(
            engine.url,
            msgspec.structs.replace(
                before, label=info.label if info else "", answered=info is not None, reported=reported
            ),
        )

    async def _info(self, engine: Watched) -> EngineInfo | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await engine.client.info()
        except EngineKeyRefused as error:
            if engine.url not in self._warned:
                self._warned.add(engine.url)
                get_logger().warning(str(error))
        except (EngineError, TimeoutError):
            pass
        return None

    async def _look_at_load(self, engine: Watched, before: Sighting) -> None:
        if not before.label:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                load = await engine.client.load()
        except (EngineError, TimeoutError):
            return
        self._see(
            engine.url,
            msgspec.structs.replace(
                self._seen[engine.url],
                load_number=self._number,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                load_age_s=load.age_s,
            ),
        )

    def _see(self, url: str, sighting: Sighting) -> Sighting:
        self._number += 1
        self._seen[url] = seen = msgspec.structs.replace(sighting, number=self._number)
        self._untold.add(url)
        self._has_untold.set()
        return seen


async def _tell_when_lost(engine: Engine, lost: asyncio.Event) -> None:
    """Holds an idle connection, whose end tells of the engine's end before any question would."""
    while True:
        await engine.until_lost()
        lost.set()
        await asyncio.sleep(TICK_S)
