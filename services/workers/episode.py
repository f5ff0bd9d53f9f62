"""The life of one episode under this worker: attempts until one has an outcome, and that outcome made durable.

Rule: failure is data. A failure of the environment costs this episode an attempt and, once they are used up, gives it
an outcome without reward; it never leaves this module. A failure without a culprit loses no token that can be resumed
from. These do leave: ``Drained`` (the worker is leaving), ``Interrupted`` (others have waited long enough), ``Fenced``
(the lease is lost), ``Gap`` (Redis was rolled back), and cancellation. `attempt` plays an attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from gspo_core.codec import SegmentRejected, decode
from gspo_core.environment_contract import EnvironmentFailed, Session
from gspo_core.types import Outcome, Segment, StopReason, TimeSplit
from services.engines.protocol import EngineRejected
from services.episodes.metering import Timings
from services.episodes.outbox import to_append
from services.episodes.policy import Drained, Interrupted
from services.episodes.tree import Ledger, LedgerConflict
from services.hosts.session import HostedSession, SessionLost
from services.process.telemetry import get_logger
from services.state.refusals import Conflict, Refused
from services.workers.setting import (
    AwaitsReward,
    EpisodeSetting,
    EpisodeSpec,
    GoOn,
    Playing,
    RecordedTokens,
    ResumeState,
    Rewind,
)

# How often an episode may lose its environment without a culprit before that counts as a failure too.
MAX_UNCHARGED = 8
# How often it resumes in an environment that fails for every episode: its own state may be the reason.
MAX_IN_VAIN = 4


class Episode:
    """Leased once, played to its end or handed back."""

    def __init__(self, setting: EpisodeSetting, order: EpisodeSpec) -> None:
        self._setting = setting
        self._order = order
        self._attempt = order.lease.attempt
        self._num_failures = 0
        self._num_uncharged = 0
        self._num_in_vain = 0
        self._timings = Timings()
        self._is_suspect = False
        """It may have taken its last session down."""

    async def run(self) -> StopReason:
        """The stop reason, once the outcome is durable. Raises ``Drained``, ``Interrupted``, ``Fenced`` or ``Gap``."""
        past = await self._resume() if self._order.lease.num_segments or await self._has_kept() else ResumeState()
        while True:
            attempt, session = self._begin(past)
            recorded = attempt.recorded
            try:
                async with self._order.quarantine.entry(self._setting.leaving):
                    with self._setting.spans.trace("episode", str(self._order.key), **self._described()):
                        ending, spent = await self._play(attempt, session)
                stop = await self._store_end(recorded, ending, spent)
            except (EnvironmentFailed, LedgerConflict, Conflict, SegmentRejected) as failure:
                if not self._is_charged(failure, past) and isinstance(failure, EnvironmentFailed):
                    past = await self._go_on_after(failure, recorded, past)
                else:
                    past = await self._restart(max(recorded.num_sampled, _num_sampled(past.record)))
                    if self._num_failures > self._order.limits.retries:
                        return await self._give_up()
                await self._setting.retrier.pause(self._num_failures)
            else:
                self._count_finished(stop, recorded)
                return stop

    async def _store_end(
        self, recorded: RecordedTokens, ending: Outcome | AwaitsReward, spent: TimeSplit
    ) -> StopReason:
        setting = self._setting
        if isinstance(ending, Outcome):
            await setting.outbox.append([recorded.close(ending, spent=spent)])
            return ending.stop_reason
        end = to_append(recorded.close(ending.outcome, spent=spent), self._timings.last_note)
        given = (setting.token, end, ending.kept, ending.deadline)
        await setting.retrier.keep_trying(setting.records.await_reward, *given)
        setting.counters.add("rewards/awaited")
        return ending.stop

    @property
    def _log(self) -> FilteringBoundLogger:
        """Made when there is something to say, which is seldom."""
        return get_logger().bind(episode=str(self._order.key))

    def _begin(self, past: ResumeState) -> tuple[Playing, Session]:
        order, setting = self._order, self._setting
        self._timings = Timings.from_note(past.note)
        session = order.environment.session(limits=order.limits, episode_id=str(order.key))
        attempt = setting.driver.begin(setting, order, self._attempt, session, past, self._timings)
        return attempt, session

    def _count_finished(self, stop: StopReason, recorded: RecordedTokens) -> None:
        self._setting.counters.episode_finished(stop, recorded.num_sampled, len(recorded.versions))

    def _described(self) -> dict[str, str | int]:
        lease = self._order.lease
        task: dict[str, str | int] = {"gspo.split": str(lease.split), "gspo.task_index": lease.task_index}
        return task | {"gspo.episode": str(lease.key), "gspo.job": lease.key.job, "gspo.attempt": self._attempt}

    def _is_charged(self, failure: Exception, past: ResumeState) -> bool:
        """Whether it uses up one of the episode's retries; then it is counted as such."""
        phase = failure.phase if isinstance(failure, EnvironmentFailed) else type(failure).__name__
        is_charged = True
        if isinstance(failure, SessionLost) and self._num_uncharged < MAX_UNCHARGED:
            self._num_uncharged += 1
            is_charged = False
        elif isinstance(failure, EnvironmentFailed) and self._order.quarantine.is_on:
            is_charged = False  # it fails for every episode
        elif isinstance(failure, LedgerConflict) and past.record and not self._order.environment.replayable:
            is_charged = False  # the first observation may differ next time
        self._num_failures += is_charged
        self._setting.counters.add(f"attempts/{phase}_failed")
        self._log.warning("attempt failed", number=self._num_failures, phase=phase, error=str(failure))
        return is_charged

    async def _play(self, attempt: Playing, session: Session) -> tuple[Outcome | AwaitsReward, TimeSplit]:
        """How it ended, and the time since its last tokens."""
        setting, timings = self._setting, self._timings
        try:
            if isinstance(session, HostedSession):
                if self._is_suspect:
                    session.watch()
                asked = setting.clock()
                await session.admit()  # waiting for a place does not count against the episode
                setting.counters.add_s("time/queue_s", waited_s := setting.clock() - asked)
                timings.queue_s += waited_s
            return await attempt.play(), timings.take()
        except (Drained, Interrupted, Refused, LedgerConflict, SegmentRejected, EnvironmentFailed):
            raise
        except asyncio.CancelledError:
            raise
        except EngineRejected as error:
            raise EnvironmentFailed("engine", str(error)) from error
        except Exception as error:
            # The wall between episodes: a defect met by one of them must not end the others.
            self._log.exception("unexpected failure")
            raise EnvironmentFailed("unexpected", f"{type(error).__name__}: {error}") from error
        finally:
            await session.close()
            if session.close_failure is not None:
                setting.counters.add("env/close_failed")
                self._log.warning("environment not closed", error=session.close_failure)

    async def _go_on_after(
        self, failure: EnvironmentFailed, recorded: RecordedTokens, past: ResumeState
    ) -> ResumeState:
        """No charge: the durable segments are kept, as if another worker resumed."""
        is_here = not self._order.agent_lives_elsewhere  # else nothing of it was in the process that died
        self._is_suspect = is_here and isinstance(failure, SessionLost) and failure.is_suspect
        self._num_in_vain += not isinstance(failure, SessionLost)
        has_begun = recorded.num_segments or past.record or self._order.agent_lives_elsewhere
        if self._num_in_vain > MAX_IN_VAIN or not (has_begun or await self._has_kept()):
            return await self._restart(max(recorded.num_sampled, _num_sampled(past.record)))
        return await self._resume()

    async def _has_kept(self) -> bool:
        return await self._setting.driver.has_kept(self._setting, self._order, self._attempt)

    async def _resume(self) -> ResumeState:
        """The durable segments of this attempt if it can be resumed from them, else a new attempt."""
        setting = self._setting
        payloads = await setting.retrier.keep_trying(setting.records.read_episode, self._order.key)
        try:
            record = [decode(payload) for payload in payloads]
        except SegmentRejected as error:
            self._log.warning("cannot be resumed", error=str(error))
            return await self._restart(0)
        way = await setting.driver.resume(setting, self._order, self._attempt, record)
        if isinstance(way, GoOn):
            return self._gone_on_from(record, way.snapshot)
        if isinstance(way, Rewind):
            return await self._rewind(record, way)
        if way.counted_as:
            setting.counters.add(way.counted_as)
        return await self._restart(_num_sampled(record))

    def _gone_on_from(self, record: Sequence[Segment], snapshot: bytes | None) -> ResumeState:
        counters = self._setting.counters
        counters.add("episodes/resumed")
        counters.add("episodes/resumed_from_a_world", snapshot is not None)
        counters.add("tokens/resumed", _num_sampled(record))
        return ResumeState(record, snapshot, self._timings.last_note or self._order.lease.note)

    async def _rewind(self, record: Sequence[Segment], way: Rewind) -> ResumeState:
        self._setting.counters.add("episodes/rewound")
        kept = [replace(segment, attempt=self._attempt + 1) for segment in record[: way.num_kept]]
        await self._restart(_num_sampled(record[way.num_kept :]), kept)
        return self._gone_on_from(kept, way.snapshot)

    async def _restart(self, num_sampled: int, kept: Sequence[Segment] = ()) -> ResumeState:
        """A new attempt, which begins with ``kept``; ``num_sampled`` tokens of the old one will be sampled again."""
        self._attempt += 1
        setting, key = self._setting, self._order.key
        setting.counters.add("tokens/thrown_away", num_sampled)
        note = self._timings.last_note or self._order.lease.note
        again = [to_append(segment, note) for segment in kept]
        await setting.retrier.keep_trying(setting.records.restart, key, setting.token, self._attempt, again)
        return ResumeState()

    async def _give_up(self) -> StopReason:
        """Ends the episode without reward: it is never trained, and its group need not wait for it."""
        outcome = Outcome(StopReason.ENV_ERROR, metrics={"attempts": self._attempt + 1})
        ledger = Ledger(self._order.key, self._attempt, self._order.temperature)
        await self._setting.outbox.append([ledger.close(outcome)])
        self._count_finished(outcome.stop_reason, ledger)
        return outcome.stop_reason


def _num_sampled(record: Sequence[Segment]) -> int:
    return sum(segment.num_actions for segment in record)
