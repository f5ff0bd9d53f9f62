"""Drives episodes by their environment: one attempt, from the first prompt to its outcome, perhaps begun elsewhere.

Rule: sample, make durable, act, observe, again: sampled tokens are durable before the environment acts on them, so
nothing that had an effect is ever lost, and the environment never acts twice on the same turn unless it declares that
harmless. An attempt begun elsewhere resumes from the world kept beside its segments. Without one it is replayed by the
same loop: recorded segments stand in for the engine until they are used up, and the environment's answers must lead to
the recorded tokens. This module never decides to try again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from gspo_core.environment_contract import Session, Witness
from gspo_core.episode_limits import TurnTally, limit_met
from gspo_core.types import NOTHING, Evidence, Outcome, Segment, StopReason
from services.engines.protocol import ContextFull
from services.episodes.history import Conversation, WorldSnapshot, WorldSnapshotNotKept, num_finished_turns
from services.episodes.metering import Timings
from services.episodes.policy import Drained, Interrupted
from services.episodes.tree import Ledger, LedgerConflict
from services.hosts.session import HostedSession
from services.state.queue import Snapshot
from services.workers.ending import in_order, measures, outcome_of, with_length, without_asking
from services.workers.setting import (
    EpisodeSetting,
    EpisodeSpec,
    GoOn,
    ResumeState,
    Rewind,
    StartOver,
)

T = TypeVar("T")


class EpisodeAttempt:
    """Plays ``ledger`` to its outcome; ``record`` holds the durable segments of this attempt, if there are any.

    ``world`` is one that stands at ``record``; without it the record is replayed.
    """

    def __init__(
        self,
        setting: EpisodeSetting,
        order: EpisodeSpec,
        session: Session,
        ledger: Ledger,
        record: Sequence[Segment] = (),
        *,
        world: WorldSnapshot | None = None,
        timings: Timings | None = None,
    ) -> None:
        self._setting = setting
        self._order = order
        self._session = session
        self._ledger = ledger
        self._history = Conversation(
            setting.codec, ledger, setting.counters, order.max_context_tokens, order.limits.max_observation_chars
        )
        self._record = deque(record)
        self._world = world
        self._tally = TurnTally() if world is None else world.tally
        self._num_acted = 0
        """Turns given to the environment."""
        self._kept_turn = -1
        """The turn before which the world was last kept."""
        self._timings = timings or Timings()
        self._leased_at = setting.clock()
        self._num_sampled_here = 0

    @property
    def recorded(self) -> Ledger:
        return self._ledger

    async def play(self) -> Outcome:
        """Raises ``Drained``, ``EnvironmentFailed``, ``LedgerConflict``, and the errors of storing segments."""
        self._leased_at = self._setting.clock()  # time spent waiting for a place does not count
        stop = await (self._begin() if self._world is None else self._go_on(self._world))
        while stop is None:
            stop = await self._sample_turn() or await self._act()
        if self._record:
            raise LedgerConflict(f"{self._order.key}: ended by {stop} before its recorded segments did")
        return await self._conclude(stop)

    async def _begin(self) -> StopReason | None:
        lease = self._order.lease
        again = bool(self._record)
        task = await self._in_environment(self._order.environment.task(lease.split, lease.task_index), again=again)
        start = await self._in_environment(self._session.start(task, self._order.seed), again=again)
        stop = self._history.begin(start)
        # Begun once more it might show something else, after which nothing that was sampled could be kept.
        if stop is None and not again and not self._order.environment.replayable:
            await self._keep_world()
        return stop

    async def _go_on(self, world: WorldSnapshot) -> None:
        lease = self._order.lease
        task = await self._in_environment(self._order.environment.task(lease.split, lease.task_index), again=True)
        await self._in_environment(self._session.restore(task, self._order.seed, world.state), again=True)
        self._history.go_on(world, self._record)
        self._record.clear()
        self._num_acted = self._kept_turn = world.turn

    async def _sample_turn(self) -> StopReason | None:
        """Samples in chunks until the policy ends its turn; returns the reason to stop if it cannot."""
        turn = self._ledger.open
        while not (turn.sampled and turn.sampled[-1] in self._setting.codec.stop_ids):
            if self._record:
                self._ledger.restore(self._record.popleft())
            elif (stop := self._exhausted()) is not None:
                return stop
            elif self._has_had_its_share and await self._setting.others_wait():
                raise Interrupted(str(self._order.key))
            else:
                try:
                    await self._sample_chunk()
                except ContextFull:
                    return StopReason.CONTEXT_OVERFLOW
        return None

    def _exhausted(self) -> StopReason | None:
        """Why nothing more may be sampled. This is also where an episode leaves a worker that is shutting down."""
        if self._setting.leaving.is_set() and self._can_go_on_elsewhere:
            raise Drained(str(self._order.key))
        order, ledger = self._order, self._ledger
        if self._timings.billed_s > order.limits.episode_timeout_s:
            return StopReason.EPISODE_TIMEOUT
        met = limit_met(order.limits, ledger.open.sampled, ledger.num_tokens, order.max_context_tokens)
        return met or (StopReason.MAX_TOKENS if self._remaining_tokens() <= 0 else None)

    @property
    def _can_go_on_elsewhere(self) -> bool:
        """Without acting twice, and without sampling anything again.

        A world that has not acted, and of which nothing could be kept, is believed to begin the same way twice.
        """
        is_kept = self._kept_turn == len(self._ledger.turns) - 1
        return self._order.environment.replayable or is_kept or not self._num_acted

    @property
    def _has_had_its_share(self) -> bool:
        order, num_sampled = self._order, self._num_sampled_here
        held_s = self._setting.clock() - self._leased_at
        by_tokens = order.lease_tokens is not None and num_sampled >= order.lease_tokens
        by_time = order.lease_s is not None and held_s >= order.lease_s
        return num_sampled > 0 and (by_tokens or by_time) and self._can_go_on_elsewhere

    def _remaining_tokens(self) -> int:
        """How many tokens the turn may still sample."""
        return min(
            self._order.max_turn_tokens - len(self._ledger.open.sampled),
            self._order.limits.max_episode_tokens - self._ledger.num_sampled,
            self._order.max_context_tokens - self._ledger.num_tokens,
        )

    async def _sample_chunk(self) -> None:
        started, turn = self._setting.clock(), len(self._ledger.turns) - 1
        with self._setting.spans.span("engine", **{"gspo.turn": turn, "gspo.context_tokens": self._ledger.num_tokens}):
            sampled = await self._setting.policy.sample(
                self._ledger.prompt(),
                max_new_tokens=min(self._remaining_tokens(), self._order.chunk_tokens),
                temperature=self._order.temperature,
                stop_token_ids=self._setting.codec.stop_ids,
                prefer_engine=self._ledger.last_engine,
            )
        clock, counters, timings = self._setting.clock, self._setting.counters, self._timings
        counters.add_s("time/engine_s", engine_s := max(0.0, (answered := clock()) - started - sampled.held_s))
        counters.add_s("time/queue_s", sampled.held_s)
        timings.engine_s += engine_s
        timings.queue_s += sampled.held_s
        num_sampled = len(sampled.ids)
        counters.add("tokens/sampled", num_sampled)
        self._num_sampled_here += num_sampled
        with self._setting.spans.span("store", **{"gspo.tokens": num_sampled}):
            await self._setting.outbox.append(self._ledger.record(sampled, timings.take()), self._note())
        counters.add_s("time/store_s", store_s := clock() - answered)
        timings.store_s += store_s

    def _note(self) -> str:
        ledger = self._ledger
        return self._timings.note(
            turn=len(ledger.turns) - 1, tool_calls=self._tally.num_calls, tokens_sampled=ledger.num_sampled
        )

    async def _act(self) -> StopReason | None:
        """Gives the finished turn to the environment and reads its answer."""
        parsed = self._history.parse()
        stop = self._tally.judge(parsed, self._order.limits)
        for call in parsed.calls if parsed.complete else ():
            self._setting.counters.add(f"calls/{call.status}")
        if stop is not None:
            return stop
        self._num_acted += 1
        observation = await self._in_environment(self._session.act(parsed), again=bool(self._record))
        if observation.reward is not None:
            self._tally.pay(self._history.num_turns - 1, observation.reward)
        if observation.done:
            return observation.stop_reason
        if self._history.num_turns >= self._order.limits.max_turns:
            return StopReason.MAX_TURNS
        stop = self._history.read(parsed, observation.messages)
        if stop is None and not self._record:
            await self._keep_world()
        return stop

    async def _keep_world(self) -> None:
        """Saves the world beside the segments, if the environment offers its state."""
        if not self._order.environment.has_snapshot:
            return
        state = await self._in_environment(self._session.snapshot())
        if state is None:
            return
        setting, ledger, history, key = self._setting, self._ledger, self._history, self._order.key
        turn = history.num_turns - 1
        try:
            data = WorldSnapshot(
                turn=turn,
                branch=ledger.num_forks,
                observed=list(ledger.open.observed),
                messages=[dict(message) for message in history.messages],
                tools=[dict(tool) for tool in history.tools],
                tally=self._tally,
                state=state,
            ).encode()
        except WorldSnapshotNotKept:
            setting.counters.add("worlds/not_kept")
            return
        snapshot = Snapshot(ledger.attempt, ledger.num_segments, data)
        await setting.retrier.keep_trying(setting.records.save_snapshot, key, setting.token, snapshot)
        self._kept_turn = turn

    async def _conclude(self, stop: StopReason) -> Outcome:
        reward, parts = await self._score(stop)
        return outcome_of(stop, reward, parts, self._metrics(), self._evidence)

    async def _score(self, stop: StopReason) -> tuple[float, Mapping[str, float]]:
        known = without_asking(self._order, stop)
        if known is not None:
            return known, {}
        if self._order.evidence_bytes and isinstance(self._session, Witness):
            self._session.keep_evidence(self._order.evidence_bytes)
        reward, parts = await self._in_environment(self._session.score())
        self._ledger.turn_rewards = in_order(self._tally.by_turn)
        return with_length(self._order, reward + self._tally.turn_rewards, parts, self._ledger.num_sampled)

    @property
    def _evidence(self) -> Evidence:
        return self._order.told_of(self._session.evidence if isinstance(self._session, Witness) else NOTHING)

    def _metrics(self) -> dict[str, float]:
        told = measures(
            self._ledger,
            self._timings,
            self._session.metrics,
            turns=self._history.num_turns,
            tool_calls=self._tally.num_calls,
            parse_errors=self._tally.num_parse_errors,
            forks=self._ledger.num_forks,
        )
        return told if self._ledger.turns else told | self._overflow()

    def _overflow(self) -> dict[str, float]:
        """Why nothing could be sampled: the trainer tells the job's owner."""
        order = self._order
        return {
            "prompt_tokens": self._history.num_prompt_tokens,
            "context_tokens": order.max_context_tokens,
            "model_context_tokens": order.model_context_tokens,
        }

    async def _in_environment(self, phase: Awaitable[T], *, again: bool = False) -> T:
        """``again``: the phase brings the world back to where it was, which does not count against the episode."""
        held_before = self._held_s
        started = self._setting.clock()
        try:
            with self._setting.spans.span("environment", **{"gspo.phase": getattr(phase, "__name__", "")}):
                return await phase
        finally:
            took_s = self._setting.clock() - started
            queue_s = took_s if again else min(took_s, self._held_s - held_before)
            self._timings.queue_s += queue_s
            self._timings.env_s += took_s - queue_s
            self._setting.counters.add_s("time/queue_s", queue_s)
            self._setting.counters.add_s("time/env_s", took_s - queue_s)

    @property
    def _held_s(self) -> float:
        return self._session.held_s if isinstance(self._session, HostedSession) else 0.0


class EnvironmentDriver:
    def begin(
        self,
        setting: EpisodeSetting,
        order: EpisodeSpec,
        attempt: int,
        session: Session,
        past: ResumeState,
        timings: Timings,
    ) -> EpisodeAttempt:
        ledger = Ledger(order.key, attempt, order.temperature)
        world = None if past.snapshot is None else WorldSnapshot.decode(past.snapshot)
        return EpisodeAttempt(setting, order, session, ledger, past.record, world=world, timings=timings)

    async def resume(
        self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int, record: Sequence[Segment]
    ) -> GoOn | Rewind | StartOver:
        environment, stop_ids = order.environment, setting.codec.stop_ids
        kept = await setting.kept(order.key, attempt) if environment.has_snapshot else None
        world = None if kept is None else WorldSnapshot.decode(kept.data)
        if kept is not None and world is not None:
            if world.stands_at(record, stop_ids):
                return GoOn(kept.data)
            setting.counters.add("worlds/too_old")
            if kept.num_segments and not environment.replayable:
                # Later turns may or may not have been acted on.
                stands = world.stands_at(record[: kept.num_segments], stop_ids)
                return Rewind(kept.num_segments, kept.data) if stands else StartOver()
        # Before the environment has acted, its start may be repeated: a new attempt would do the same.
        if num_finished_turns(record, stop_ids) and not environment.replayable:
            return StartOver("episodes/restarted")
        return GoOn()

    async def has_kept(self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int) -> bool:
        return False
