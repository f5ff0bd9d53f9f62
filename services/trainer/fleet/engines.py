"""Finds and binds the engines that sample for a job, keeps them at the newest version, and gives them back.

Rule: a binding fenced by the job's claim holds an engine; the job reports the engine's state under it, and other
processes route by that. Nothing is asked of an engine whose binding was lost, and none is given away in the middle of a
switch. The job takes every free engine that fits its model and gives back what another job lacks. A draining engine
gets no further version and goes back once idle. A version is staged (checked on disk while the engines run) before any
engine pauses for it, and at most half of the engines pause at a time, unless one sending reaches all. Else each engine
switches by itself, and one that is slow, or does not answer, holds up no other.
`engine_switch` switches one engine; `weight_transport` moves the tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gspo_core.versions import WeightsManifest
from services.engines import quantization
from services.engines.keys import warning
from services.engines.probe import problem_of
from services.engines.protocol import (
    Capabilities,
    Connect,
    Engine,
    EngineError,
    EngineInfo,
    EngineKeyRefused,
    EngineUnavailable,
    NoSuchKind,
)
from services.files.weights import WeightStore
from services.process.cancelling import cancel_all, first_to_end
from services.process.telemetry import get_logger
from services.state.fleet_records import EngineRecord, EngineReport, EngineState
from services.state.heard_engines import HeardEngines
from services.state.jobs import WaitCode
from services.state.leases import BeatWatch
from services.state.refusals import Missing
from services.state.store import Store
from services.trainer.fleet.engine_fairness import EngineFairness
from services.trainer.fleet.engine_switch import (
    BoundEngine,
    Deadlines,
    SwitchCosts,
    WeightSync,
    listen,
    still_holds,
    switch,
)
from services.trainer.fleet.staging import Staging
from services.trainer.fleet.weight_transport import FromDisk, WeightTransport

RETRY_S = 1.0
# How often to look for engines, check that they still hold their weights, and share with other jobs.
WATCH_S = 2.0
_ANSWER_S = 5.0
# Deadline for the self-test of a new engine: a few tokens, on an engine that may be busy.
PROBE_S = 20.0
# How often to repeat which engines a job waits for.
EXPLAIN_S = 3.0

Explain = Callable[[WaitCode, str], Awaitable[None]]
"""Takes the code and the text of a reason."""


@dataclass(frozen=True)
class _Switching:
    version: int
    task: asyncio.Task[None]


class EnginePool:
    """The engines of one job. ``run`` maintains them; the step loop publishes, waits and queries."""

    def __init__(
        self,
        store: Store,
        job: str,
        token: str,
        weights: WeightStore,
        urls: Sequence[str],
        connect: Connect,
        *,
        num_wanted: int = 1,
        sync: WeightSync = "retract",
        transport: WeightTransport | None = None,
        deadlines: Deadlines | None = None,
        lease_s: float = 30.0,
        heard: HeardEngines | None = None,
    ) -> None:
        """With ``heard``, engines that another process looks at are not asked what they hold."""
        self._store = store
        self._job = job
        self._token = token
        self._weights = weights
        self._staging = Staging(weights)
        self._static_urls = tuple(urls)
        self._connect = connect
        self._num_wanted = num_wanted
        self._sync = sync
        self._transport = transport or FromDisk()
        self._deadlines = deadlines or Deadlines()
        self._heard = heard
        self._lease_s = lease_s
        self._presence = BeatWatch(lease_s, time.monotonic)
        self._fairness = EngineFairness(store, job, num_wanted)
        self._bound: dict[str, BoundEngine] = {}
        self._costs_of_those_gone = SwitchCosts()
        self._unfit: dict[str, str] = {}
        """Engine -> why it cannot serve this model."""
        self._warned: set[str] = set()
        """Engines that others can control."""
        self._target: WeightsManifest | None = None
        self._draining: set[str] = set()
        """Engines asked to drain."""
        self._absent: dict[str, str] = {}
        """Engine -> why it does not serve the job, or no longer does."""
        self._taken: dict[str, str] = {}
        """Engine -> the other job that has it."""
        self._changed = asyncio.Condition()
        self._told: dict[str, EngineReport] = {}
        self._switches: dict[BoundEngine, _Switching] = {}
        """Those that are under way, wait for their turn, or are tried again soon."""
        self._turns: set[str] = set()
        """Engines in a switch of which at most half of all may be at a time."""
        self._in_switch: set[str] = set()
        """Engines that are being paused, loaded or resumed now: they stay here until that is over."""

    async def publish(self, manifest: WeightsManifest) -> None:
        """Let the engines move to ``manifest`` as soon as they can."""
        async with self._changed:
            self._target = manifest
            self._changed.notify_all()

    async def wait_for(
        self, manifest: WeightsManifest, *, num_engines: int = 1, explain: Explain | None = None
    ) -> None:
        """Wait until every serving engine, and at least ``num_engines``, hold ``manifest`` or something newer.

        Calls ``explain`` repeatedly with the reason for the wait.
        """
        while True:
            if explain is not None:
                await explain("no_engine_for_model", self._what_is_missing(num_engines))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXPLAIN_S if explain else None), self._changed:
                    await self._changed.wait_for(
                        lambda: len(self.ready()) >= num_engines and min(self._versions()) >= manifest.version
                    )
                return

    def _what_is_missing(self, num_engines: int) -> str:
        text = f"{len(self.ready())} of {num_engines} engine(s) hold the weights of this job"
        return "; ".join((text, *self._shortcomings()))

    def _shortcomings(self) -> list[str]:
        """Why engines do not serve, one sentence each."""
        bound = [engine for engine in self._bound.values() if engine.reason]
        states = [f"{engine.url} is {engine.state}: {engine.reason}" for engine in bound]
        states += [f"{url} is draining" for url in sorted(self._draining)]
        absent = [f"{url} {why}" for url, why in sorted(self._absent.items()) if url not in self._unfit]
        elsewhere = sorted((url, job) for url, job in self._taken.items() if url not in self._absent)
        taken = [f"another job, {job}, has {url}" for url, job in elsewhere]
        unfit = [f"{url} cannot serve this job: {problem}" for url, problem in sorted(self._unfit.items())]
        return [*states, *absent, *taken, *unfit]

    def absence(self) -> str | None:
        """The engines that served last and what became of them; None while one serves, even between two versions."""
        if any(engine.label for engine in self._serving()):
            return None
        return "; ".join(self._shortcomings())

    def lag(self) -> str:
        """Which version each engine holds, if none that serves holds the newest; empty otherwise."""
        target, serving = self._target, [engine for engine in self.ready() if engine.label]
        if target is None or any(engine.version >= target.version for engine in serving):
            return ""
        held = [f"{engine.url} holds version {engine.version}" for engine in serving]
        return "; ".join([*held, f"the newest is {target.version}"]) if held else ""

    def ready(self) -> list[BoundEngine]:
        return [engine for engine in self._serving() if engine.state is EngineState.READY]

    def _serving(self) -> list[BoundEngine]:
        """Bound engines that are not draining."""
        return [engine for engine in self._bound.values() if engine.url not in self._draining]

    def bound(self) -> list[str]:
        """Addresses of all engines the job holds, in any state."""
        return list(self._bound)

    def versions_in_use(self) -> set[int]:
        """Versions that an engine holds or is loading."""
        newest = () if self._target is None else (self._target.version,)
        on_the_way = (one.version for one in self._switches.values())
        return {*(engine.version for engine in self._bound.values() if engine.label), *on_the_way, *newest}

    def unfit(self) -> Mapping[str, str]:
        """Engine -> why it cannot serve the job's model."""
        return dict(self._unfit)

    def last_switch_s(self) -> float:
        """The longest pause of the latest switch."""
        return max((engine.costs.last_paused_s for engine in self._bound.values()), default=0.0)

    def metrics(self) -> dict[str, float]:
        """Costs are those of all engines that the job has held since this trainer took it."""
        costs = sum((engine.costs for engine in self._bound.values()), self._costs_of_those_gone)
        return {
            "engine/bound": float(len(self._bound)),
            "engine/paused_s": costs.paused_s,
            "engine/tokens_prefilled_again": float(costs.tokens_prefilled_again),
            "engine/tokens_lost": float(costs.tokens_lost),
        }

    def _versions(self) -> list[int]:
        """One version per serving engine."""
        return [engine.version for engine in self.ready()]

    async def distrust(self, url: str, reason: str) -> None:
        """Reload an engine whose log-probs do not match its label before it serves again."""
        if engine := self._bound.get(url):
            engine.distrust(EngineState.DIRTY, reason)
            await self._tell(engine)
            await self._notify()

    async def run(self) -> None:
        """Maintain the engines until cancelled."""
        failure = asyncio.get_running_loop().create_future()
        try:
            await first_to_end(self._keep_up(failure), self._watch(), failure)
        finally:
            await cancel_all([one.task for one in self._switches.values()])

    async def _keep_up(self, failure: asyncio.Future[None]) -> None:
        while True:
            target = await self._next_target()
            path = await self._staging.stage(target)
            behind = self._outdated(target)
            for engine in behind:
                if not engine.label:  # new, or no longer trusted: any group it was in is void
                    await self._transport.forget(engine.client)
            await self._transport.prepare([engine.client for engine in behind], path, target.label)
            started = [self._start(engine, target, path, failure) for engine in behind]
            if self._transport.sends_to_all and started:
                await asyncio.wait(started)

    def _start(
        self, engine: BoundEngine, target: WeightsManifest, path: Path, failure: asyncio.Future[None]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._try_switch(engine, target, path), name=f"switch of {engine.url}")
        self._switches[engine] = _Switching(target.version, task)

        def end(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # perhaps before it began
                self._switches.pop(engine, None)
            elif (error := task.exception()) and not failure.done():
                failure.set_exception(error)

        task.add_done_callback(end)
        return task

    async def _try_switch(self, engine: BoundEngine, target: WeightsManifest, path: Path) -> None:
        try:
            if not await self._switch(engine, target, path):
                await asyncio.sleep(RETRY_S)
        finally:
            self._switches.pop(engine, None)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def release(self) -> None:
        """Give the engines back for other jobs."""
        for url in list(self._bound):
            await self._give_back(url, "was given back")

    async def _switch(self, engine: BoundEngine, target: WeightsManifest, path: Path) -> bool:
        """False: try again."""
        if not await self._wait_for_turn(engine, target):
            self._transport.withdraw(engine.client)
            return True
        try:
            if not await self._tell(engine, switching=True):
                return False  # the binding was lost
            if not engine.label and not self._transport.sends_to_all:
                await self._transport.forget(engine.client)  # distrusted while it waited for its turn
            done = await switch(engine, path, target.label, self._sync, self._deadlines, self._transport)
        finally:
            self._in_switch.discard(engine.url)
            self._turns.discard(engine.url)
            self._transport.withdraw(engine.client)
        await self._notify()
        if self._bound.get(engine.url) is not engine:
            return True
        if engine.state is EngineState.GONE:
            await self._give_back(engine.url, f"is gone: {engine.reason}")
        else:
            await self._tell(engine)
        return done

    async def _wait_for_turn(self, engine: BoundEngine, target: WeightsManifest) -> bool:
        """Begin the switch as soon as enough others serve; False: it went to another job or drains by then, or there is
        a newer version."""

        def needs_none() -> bool:
            return self._transport.sends_to_all or not engine.state.may_be_asked

        def may_begin() -> bool:
            return needs_none() or len(self._turns) < max(1, math.ceil(len(self._bound) / 2))

        async with self._changed:
            await self._changed.wait_for(lambda: may_begin() or self._target is not target)
        if engine not in self._serving() or not may_begin():
            return False
        self._in_switch.add(engine.url)
        if not needs_none():
            self._turns.add(engine.url)
        return True

    def _outdated(self, target: WeightsManifest) -> list[BoundEngine]:
        """Those to switch now, the oldest first."""
        behind = [
            engine
            for engine in self._serving()
            if engine.label != target.label and engine not in self._switches and engine.silent_since is None
        ]
        return sorted(behind, key=lambda engine: engine.version if engine.label else -1)

    async def _next_target(self) -> WeightsManifest:
        """Wait for a version that some engine does not hold yet and is not being given."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._target is not None and bool(self._outdated(self._target)))
            assert self._target is not None
            return self._target

    async def _watch(self) -> None:
        while True:
            if self._target is not None:  # until then there is nothing to load
                await self._look()
            await asyncio.sleep(WATCH_S if self._bound else min(WATCH_S, RETRY_S))

    async def _look(self) -> None:
        """One round: drop lost engines, share, find new ones."""
        ready = [engine for engine in self.ready() if engine.url not in self._in_switch]
        held, _ = await asyncio.gather(
            asyncio.gather(*(still_holds(engine, self._deadlines, self._heard) for engine in ready)),
            asyncio.gather(*(self._listen(engine) for engine in self._bound.values() if engine.silent_since)),
        )
        for engine, is_fine in zip(ready, held, strict=True):
            if engine.url in self._in_switch or self._bound.get(engine.url) is not engine:
                continue  # its switch will tell
            if engine.state is EngineState.GONE:
                await self._give_back(engine.url, f"is gone: {engine.reason}")
            elif not is_fine:
                await self._tell(engine)
        records = await self._store.fleet.engines()
        await self._keep_bound(records)
        await self._drain({record.id for record in records if record.draining})
        records = [record for record in records if record.id not in self._draining]
        await self._share(records)
        await asyncio.gather(*(self._take(url) for url in await self._free(records)))
        await self._give_back_inherited(records)
        await self._notify()

    async def _listen(self, engine: BoundEngine) -> None:
        await listen(engine, within_s=min(_ANSWER_S, self._deadlines.answer_s), give_up_after_s=self._lease_s)
        if engine.state is EngineState.GONE and self._bound.get(engine.url) is engine:
            await self._give_back(engine.url, f"is gone: {engine.reason}")

    async def _share(self, records: Sequence[EngineRecord]) -> None:
        """Give away what other jobs lack. An engine in the middle of a switch stays: its next job would be
        overwritten there."""
        serving = [engine.url for engine in self._serving()]
        for url in await self._fairness.surplus(records, serving, staying=self._in_switch):
            if url not in self._in_switch:
                get_logger().info("engine handed over to a job that has too few", engine=url)
                await self._give_back(url, "was handed over to a job that has too few")

    async def _keep_bound(self, records: Iterable[EngineRecord]) -> None:
        """An engine that was taken off the list lost its binding: it is bound again if it is listed and free, else left
        to its new owner."""
        jobs = {record.id: record.job for record in records}
        for url, engine in list(self._bound.items()):
            is_told = url in self._told  # else the latest report was refused
            if self._bound.get(url) is not engine or (jobs.get(url) == self._job and is_told):
                continue
            self._told.pop(url, None)
            if url not in jobs:
                await self._let_go(url, "was taken off the list")
            elif jobs[url] not in (None, self._job) or not await self._bind(url):
                await self._let_go(url, "was taken off the list, and another job has it now")
            else:
                get_logger().info("engine bound again", engine=url, job=self._job)
                await self._tell(engine)

    async def _bind(self, url: str) -> bool:
        try:
            return await self._store.fleet.bind(self._job, self._token, url)
        except Missing:  # taken off the list this instant
            return False

    async def _give_back_inherited(self, records: Iterable[EngineRecord]) -> None:
        """What an earlier owner of the job held and this one leaves to others, or cannot use, is free for them."""
        for record in records:
            if record.job == self._job and record.id not in self._bound:
                await self._store.fleet.unbind_inherited(self._job, self._token, record.id)

    async def _drain(self, draining: set[str]) -> None:
        """Give back idle engines that were already draining a round ago, so every process knows."""
        for url in draining & self._draining & self._bound.keys():
            engine = self._bound.get(url)  # a switch may have found it gone meanwhile
            if engine and await _is_idle(engine.client) and url not in self._in_switch:
                get_logger().info("engine drained", engine=url)
                await self._give_back(url, "was drained")
        changed, self._draining = draining ^ self._draining, draining
        for url in changed & self._bound.keys():
            if engine := self._bound.get(url):
                await self._tell(engine)

    async def _free(self, records: Iterable[EngineRecord]) -> list[str]:
        """Live, unbound engines, in an order that differs between jobs."""
        known = {record.id: record for record in records if record.url}
        urls = {*self._static_urls, *(url for url, record in known.items() if self._lives(url, record))}
        urls -= self._draining
        others = await self._fairness.others_lack(known.values())
        self._taken = {url: record.job for url, record in known.items() if record.job and record.job != self._job}
        free = sorted(urls - self._bound.keys() - self._taken.keys())
        return free[: max(0, len(free) - others)] if len(self._bound) >= self._num_wanted else free

    def _lives(self, url: str, record: EngineRecord) -> bool:
        return not self._presence.stands_still(url, record.beats)

    async def _take(self, url: str) -> None:
        try:
            client = self._connect(url)
            async with asyncio.timeout(_ANSWER_S):
                info, capabilities = await client.info(), await client.capabilities()
        except (NoSuchKind, EngineKeyRefused) as error:
            return self._refuse(url, str(error))
        except (EngineError, TimeoutError):
            self._absent.setdefault(url, "does not answer")
            return
        if problem := await self._problem_of(client, info, capabilities):
            return self._refuse(url, problem)
        self._unfit.pop(url, None)
        await self._store.fleet.register_engine(EngineRecord.of(url, info))
        if await self._bind(url):
            self._bound[url] = engine = BoundEngine(client, capabilities.context_tokens)
            self._absent.pop(url, None)
            limit = capabilities.context_tokens or None
            get_logger().info("engine bound", engine=url, job=self._job, context_tokens=limit)
            if capabilities.is_unguarded and url not in self._warned:
                self._warned.add(url)
                get_logger().warning(warning(url))
            await self._tell(engine)

    def _refuse(self, url: str, problem: str) -> None:
        if self._unfit.get(url) != problem:
            get_logger().warning("engine cannot serve this job", engine=url, reason=problem)
        self._unfit[url] = problem

    async def _problem_of(self, client: Engine, info: EngineInfo, capabilities: Capabilities) -> str | None:
        """Why this engine cannot serve the job."""
        assert self._target is not None
        if not capabilities.names_versions:
            advice = f" ({capabilities.advice})" if capabilities.advice else ""
            return f"it is {capabilities.software}, which does not report which weights sampled a token{advice}"
        if capabilities.quantization:
            return quantization.problem(capabilities.quantization)
        if problem := self._transport.unfit(capabilities):
            return problem
        if problem := await self._staging.unfit(self._target, info):
            return problem
        if not await client.is_ready():
            return None  # paused by its previous holder, who tested it
        try:
            async with asyncio.timeout(PROBE_S):
                return await problem_of(client)
        except TimeoutError:
            return f"it did not answer the requests of the self-test within {PROBE_S:g} s"
        except EngineError as error:
            return f"it fails the self-test: {error}"

    async def _let_go(self, url: str, why: str) -> None:
        """Hold the engine no more, and ask nothing of it."""
        get_logger().warning("engine lost", engine=url, reason=why)
        engine = self._bound.get(url)  # None: it was given back this instant
        switching = self._switches.get(engine) if engine else None
        await self._forget(url, why)
        if switching:
            await cancel_all([switching.task])

    async def _forget(self, url: str, why: str) -> None:
        if engine := self._bound.pop(url, None):
            self._costs_of_those_gone += engine.costs
            self._absent[url] = why
            await self._transport.forget(engine.client)
        self._told.pop(url, None)

    async def _give_back(self, url: str, why: str) -> None:
        await self._forget(url, why)
        await self._store.fleet.unbind(self._job, self._token, url)

    async def _tell(self, engine: BoundEngine, *, switching: bool = False) -> bool:
        """Publish the engine's state if it changed; False: the job does not hold it."""
        is_draining = engine.url in self._draining
        state = EngineState.SWITCHING if switching else EngineState.DRAINING if is_draining else engine.state
        costs = asdict(engine.costs)
        said = EngineReport(state, engine.label, engine.reason, context_tokens=engine.context_tokens, **costs)
        if self._told.get(engine.url) != said:
            self._told[engine.url] = said
            if not await self._store.fleet.mark(self._job, self._token, engine.url, said):
                self._told.pop(engine.url, None)
        return engine.url in self._told


async def _is_idle(client: Engine) -> bool:
    """A lost engine counts as idle; one that does not report its load does not."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            load = await client.load()
    except EngineUnavailable:
        return True
    except (EngineError, TimeoutError):
        return False
    return load.num_running + load.num_waiting == 0
