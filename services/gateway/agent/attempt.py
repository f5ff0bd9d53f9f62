"""One attempt of an episode that an agent plays: begun, waited for, and given its outcome.

Rule: the agent's end ends the episode, also where a limit was met before; then the limit is the stop reason. An agent
without a reward has none, never 0. This module never decides to try again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

from gspo_core.environment_contract import NO_REWARD, AgentSession, EnvironmentFailed, Llm, Session, Witness
from gspo_core.evidence import MAX_WHY_CHARS, TASK, both, gathered
from gspo_core.types import NOTHING, Evidence, Outcome, Repeated, Segment, StopReason
from services.episodes.metering import Meter, Timings
from services.episodes.policy import Drained
from services.episodes.snapshots import TreeSnapshot
from services.episodes.tree import LedgerConflict, TokenTree
from services.gateway.agent.door import EpisodeRouter
from services.gateway.agent.episode import AgentEpisode
from services.gateway.agent.judging import JudgedAgent, Judges
from services.gateway.agent.played import PlayedSession
from services.gateway.agent.pulled import LoanBoard, PulledAgent, has_agent
from services.gateway.agent.rewards import EndedEpisode
from services.hosts.session import SessionLost
from services.process.telemetry import get_logger
from services.state.client import RedisFault
from services.workers.ending import cost_of_length, in_order, measures, outcome_of, with_length, without_asking
from services.workers.setting import (
    AwaitsReward,
    EpisodeSetting,
    EpisodeSpec,
    GoOn,
    ResumeState,
    Rewind,
    StartOver,
)

# How often an agent's time is looked at while something is sampled for it, which may be waiting for an engine.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class AgentDriver:
    """``base_url``: of the OpenAI dialects, as agents reach the gateways."""

    door: EpisodeRouter
    base_url: str
    now: Callable[[], float]
    """Unix seconds."""
    board: LoanBoard
    """For agents that fetch their episodes."""
    judges: Judges
    """For jobs whose rewards come from a model."""
    own_base_url: str = ""
    """For agents that are started here and end with this gateway; empty: ``base_url`` too."""

    def url_for(self, order: EpisodeSpec) -> str:
        return self.base_url if order.agent_lives_elsewhere else self.own_base_url or self.base_url

    def begin(
        self,
        setting: EpisodeSetting,
        order: EpisodeSpec,
        attempt: int,
        session: Session,
        past: ResumeState,
        timings: Timings,
    ) -> AgentAttempt:
        return AgentAttempt(self, setting, order, attempt, cast(AgentSession, session), past, timings)

    async def resume(
        self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int, record: Sequence[Segment]
    ) -> GoOn | Rewind | StartOver:
        """An agent that lives elsewhere goes on. One that ran here is gone: it begins again, if that is harmless."""
        is_gone = order.agent_pulls and not await has_agent(self.board, setting, order.key, attempt)
        if is_gone or not may_go_on(order):
            return StartOver("episodes/restarted")
        kept, tree = await setting.kept(order.key, attempt), None
        if kept is None:
            tree = None if record else TreeSnapshot([], [])  # it was started, or will be, and has asked for nothing
        else:
            tree = TreeSnapshot.together([kept.data, *kept.parts])
        if tree is None or not tree.covers(record):
            return StartOver("episodes/restarted")
        return GoOn(tree.encode())

    async def has_kept(self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int) -> bool:
        """A reward, or the agent's end, may have been told before any turn."""
        return await setting.kept(order.key, attempt) is not None


def may_go_on(order: EpisodeSpec) -> bool:
    """Whether another gateway can go on with the same attempt."""
    return order.agent_lives_elsewhere or order.environment.replayable


class AgentAttempt:
    def __init__(
        self,
        driver: AgentDriver,
        setting: EpisodeSetting,
        order: EpisodeSpec,
        attempt: int,
        session: AgentSession,
        past: ResumeState,
        timings: Timings,
    ) -> None:
        self._driver = driver
        self._setting = setting
        self._order = order
        self._past = past
        self._meter = Meter(timings, setting.counters, setting.clock)
        self._tree = TokenTree(order.key, attempt, order.temperature)
        self._episode = AgentEpisode(setting, order, self._tree, self._meter, driver.now)
        self._session: PlayedSession = session
        if order.judge is not None:
            name = f"{order.key}/{self._episode.named}/judge"
            self._session = JudgedAgent(session, setting, order.judge, driver.judges, self._last_turn, name)
        if order.agent_pulls:
            self._session = PulledAgent(
                self._session, setting, driver.board, self._episode, self._meter, order.rewards_from
            )
        self._witness = self._session if isinstance(self._session, Witness) else None

    @property
    def recorded(self) -> TokenTree:
        return self._tree

    async def play(self) -> Outcome | AwaitsReward:
        """Raises ``Drained``, ``EnvironmentFailed``, ``LedgerConflict``, and the errors of storing segments."""
        order, session, episode = self._order, self._session, self._episode
        self._restore()
        task = await order.environment.task(order.lease.split, order.lease.task_index)
        try:
            with self._driver.door.open(episode, self._order.reward_deadline_s or 0.0) as key:
                name = f"{order.key}/{self._episode.named}"
                paying = self._driver.door.paying(key)
                session.offer(Llm(self._driver.url_for(order), key, episode=name, reward_key=paying))
                self._meter.begin()
                await session.start(task, order.seed)
                stop = await self._until_over()
                await episode.seal()
            return await self._conclude(stop)
        finally:
            await episode.abandon()

    def _restore(self) -> None:
        past = self._past
        tree = None if past.snapshot is None else TreeSnapshot.decode(past.snapshot)
        if tree is not None:
            self._episode.restore(past.record, tree, begins_again=not self._order.agent_lives_elsewhere)
        elif past.record:
            raise LedgerConflict(f"{self._order.key}: segments without the turns that they belong to")

    async def _until_over(self) -> StopReason:
        episode, leaving = self._episode, self._setting.leaving
        ended = asyncio.create_task(self._session.ended())
        tasks = [ended, _set(episode.finished), _set(leaving)]
        try:
            while not ended.done() and not episode.finished.is_set():
                await self._next_event([*tasks, episode.failure])
                if episode.failure.done():
                    raise episode.failure.result()
                if leaving.is_set() and tasks[-1].done():
                    if may_go_on(self._order) or not self._tree.num_sampled:
                        raise Drained(str(self._order.key))
                    tasks.pop()  # it may still end in the time that is left
                if self._is_out_of_time():
                    return StopReason.EPISODE_TIMEOUT
            if ended.done():
                self._look_at_end(ended)
            return episode.stopped or StopReason.COMPLETED
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _next_event(self, events: Collection[asyncio.Future[None] | asyncio.Future[Exception]]) -> None:
        left_s = self._order.limits.episode_timeout_s - self._meter.billed_s
        wait_s = max(left_s, LOOK_S) if self._meter.is_sampling else max(left_s, 0.0)
        await asyncio.wait(events, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)

    def _is_out_of_time(self) -> bool:
        """What is being sampled may have waited for an engine, which does not count."""
        return not self._meter.is_sampling and self._meter.billed_s >= self._order.limits.episode_timeout_s

    def _look_at_end(self, ended: asyncio.Task[None]) -> None:
        """An agent that fails because it was refused a turn beyond its limits is not at fault."""
        error = ended.exception()
        refused = self._episode.stopped is not None and not isinstance(error, SessionLost)
        if not self._episode.history.entries:
            self._setting.counters.add("agents/asked_nothing")
        if error is not None and not (refused and isinstance(error, EnvironmentFailed)):
            raise error

    async def _conclude(self, stop: StopReason) -> Outcome | AwaitsReward:
        self._name_untrained()
        reward = without_asking(self._order, stop)
        parts: dict[str, float] = {}
        if reward is None:
            try:
                reward, parts = with_length(self._order, *await self._reward(), self._tree.num_sampled)
            except EnvironmentFailed as error:
                if error.reason != NO_REWARD or self._order.reward_deadline_s is None:
                    raise
                return self._awaiting(stop, self._order.reward_deadline_s, await self._evidence())
        outcome = outcome_of(stop, reward, parts, self._metrics(), await self._evidence())
        await self._remember_rewards()
        return outcome

    async def _remember_rewards(self) -> None:
        """So that one that is sent again is known: the episode is as good where it is not, as under permissions of an
        earlier release."""
        tree, late = self._tree, self._driver.door.late
        if late is not None:
            try:
                await late.remember(tree.key, tree.attempt, self._setting.token, self._episode.rewards.posted)
            except RedisFault as error:
                get_logger().warning("rewards that are sent again will not be known", error=str(error))

    def _awaiting(self, stop: StopReason, deadline_s: float, evidence: Evidence) -> AwaitsReward:
        turns = sorted(self._episode.history.entries)
        cost = cost_of_length(self._order, self._tree.num_sampled)
        entries = self._episode.history.entries
        untrained = {number: entries[number].parent for number in self._tree.untrained_turns}
        ended = EndedEpisode(stop, cost, turns, self._episode.payer, untrained)
        outcome = Outcome(StopReason.NO_REWARD, metrics=self._metrics(), evidence=evidence)
        return AwaitsReward(stop, outcome, ended.encode(), self._driver.now() + deadline_s)

    def _name_untrained(self) -> None:
        """What was sampled for a client that never had it is no action of the episode, nor what the agent had but went
        on from another sample of."""
        tree, had, counters = self._tree, self._had(), self._setting.counters
        lost = [turn for number, turn in sorted(tree.turns.items()) if turn.sampled and number not in had]
        if not self._order.trains_rejected:
            numbers = self._episode.history.rejected(had, self._episode.rewards.by_turn())
            rejected = [tree.turns[number] for number in sorted(numbers) if tree.turns[number].sampled]
            counters.add("turns/rejected", len(rejected))
            counters.add("tokens/rejected", sum(len(turn.sampled) for turn in rejected))
            lost = sorted([*lost, *rejected], key=lambda turn: turn.number)
        tree.untrained_turns = tuple(turn.number for turn in lost)
        entries = sorted(self._episode.history.entries.items())
        tree.repeated = tuple(Repeated(number, one.num_repeats) for number, one in entries if one.num_repeats)
        counters.add("turns/untrained", len(lost))
        counters.add("tokens/untrained", sum(len(turn.sampled) for turn in lost))

    async def _reward(self) -> tuple[float, dict[str, float]]:
        rewards = self._episode.rewards
        final, by_turn, parts = rewards.final, rewards.by_turn(), dict[str, float]()
        if final is None:
            try:
                if self._witness is not None:
                    self._witness.keep_evidence(self._order.evidence_bytes)
                final, parts = await self._session.score()
            except EnvironmentFailed as error:
                if not by_turn or error.reason != NO_REWARD:
                    self._setting.counters.add("rewards/missing", error.reason == NO_REWARD)
                    raise
                final = 0.0  # it was paid by the turn
        self._tree.turn_rewards = in_order(by_turn)
        of_turns = {f"turn/{number}": value for number, value in by_turn.items()}
        if same := sorted(parts.keys() & of_turns):
            why = f"a part of the reward is called {same[0]}, as what was posted for that turn"
            raise EnvironmentFailed("score", why)
        parts = {**parts, **of_turns}
        try:
            return self._episode.payer.total([final, *by_turn.values()]), parts
        except ValueError as error:
            raise EnvironmentFailed("score", str(error)) from None

    async def _evidence(self) -> Evidence:
        """What the session tells, and the task in any case: another reward may ask for it."""
        most_bytes = self._order.evidence_bytes
        found = NOTHING if self._witness is None else self._witness.evidence
        if not most_bytes:
            return found
        if TASK not in found.told:
            found = await self._with_task(found, most_bytes)
        return self._order.told_of(found)

    async def _with_task(self, found: Evidence, most_bytes: int) -> Evidence:
        try:
            task = json.loads(await self._session.handed_out())
        except EnvironmentFailed as error:
            return Evidence(found.told, {**found.left_out, TASK: str(error)[:MAX_WHY_CHARS]})
        return both(found, gathered([(TASK, task)], most_bytes), most_bytes)

    def _last_turn(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """That the agent had and that is trained: the ids that it answers, and those to read it of."""
        had = self._had().difference(self._tree.untrained_turns)
        return (self._tree.turns[max(had)].prompt, self._episode.told(max(had))) if had else None

    def _had(self) -> set[int]:
        return self._episode.history.had(paid=self._episode.rewards.by_turn())

    def _metrics(self) -> dict[str, float]:
        entries = self._episode.history.entries.values()
        return measures(
            self._tree,
            self._meter.timings,
            self._session.metrics,
            turns=len(entries),
            tool_calls=self._episode.num_calls,
            parse_errors=sum(entry.has_parse_error for entry in entries),
            forks=sum(bool(entry.reason) for entry in entries),
            untrained_turns=len(self._tree.untrained_turns),
            rewards_refused=self._episode.num_rewards_refused,
        )


def _set(event: asyncio.Event) -> asyncio.Task[None]:
    async def wait() -> None:
        await event.wait()

    return asyncio.create_task(wait())
