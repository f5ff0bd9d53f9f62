"""The life of one episode under this worker: attempts until one has an outcome, and that outcome made durable.

Rule: failure is data. What an environment does wrong costs this episode an attempt and, when they are used up, gives it
an outcome without reward; it never leaves this module. What does: the worker leaves (``Drained``), the lease is lost
(``Fenced``), Redis was rolled back (``Gap``), cancellation. How an attempt is played is the business of `attempt`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gspo_core.codec import SegmentRejected, decode
from gspo_core.env import EnvironmentFailed
from gspo_core.types import Outcome, Segment, StopReason
from services.hosted import HostedSession, SessionLost
from services.refusals import Conflict, Refused
from services.rollout.attempt import Attempt
from services.rollout.ledger import Ledger, LedgerConflict
from services.rollout.policy import Drained
from services.rollout.setting import Order, Setting
from services.telemetry import get_logger

# How often an episode may lose its environment through nobody's fault before that counts as a failure too.
MAX_UNCHARGED = 8


class Episode:
    """Leased once, played to its end or handed back."""

    def __init__(self, setting: Setting, order: Order) -> None:
        self._setting = setting
        self._order = order
        self._attempt = order.lease.attempt
        self._num_failures = 0
        self._num_uncharged = 0
        self._log = get_logger().bind(episode=str(order.key))

    async def run(self) -> StopReason:
        """The stop reason, once the outcome is durable. Raises ``Drained``, ``Fenced`` or ``Gap``."""
        record = await self._resume() if self._order.lease.num_segments else []
        while True:
            ledger = Ledger(self._order.key, self._attempt, self._order.temperature)
            try:
                outcome = await self._play(ledger, record)
                await self._setting.outbox.append([ledger.close(outcome)])
            except (EnvironmentFailed, LedgerConflict, Conflict, SegmentRejected) as failure:
                record = await self._restart()
                if self._is_hopeless(failure):
                    return await self._give_up()
                await self._setting.patience.pause(self._num_failures)
            else:
                self._setting.counters.episode_finished(outcome.stop_reason, ledger)
                return outcome.stop_reason

    def _is_hopeless(self, failure: Exception) -> bool:
        if isinstance(failure, SessionLost) and self._num_uncharged < MAX_UNCHARGED:
            self._num_uncharged += 1
        else:
            self._num_failures += 1
        phase = failure.phase if isinstance(failure, EnvironmentFailed) else type(failure).__name__
        self._setting.counters.add(f"attempts/{phase}_failed")
        self._log.warning("attempt failed", number=self._num_failures, phase=phase, error=str(failure))
        return self._num_failures > self._order.limits.retries

    async def _play(self, ledger: Ledger, record: Sequence[Segment]) -> Outcome:
        order = self._order
        session = order.environment.session(limits=order.limits, episode_id=str(order.key))
        try:
            if isinstance(session, HostedSession):
                await session.admit()  # waiting for a place is no time of the episode
            return await Attempt(self._setting, order, session, ledger, record).play()
        except (Drained, Refused, LedgerConflict, SegmentRejected, EnvironmentFailed, asyncio.CancelledError):
            raise
        except Exception as error:
            # The wall between episodes: a defect that one of them meets must not end the others.
            self._log.exception("unexpected failure")
            raise EnvironmentFailed("unexpected", f"{type(error).__name__}: {error}") from error
        finally:
            await session.close()
            if session.close_failure is not None:
                self._setting.counters.add("env/close_failed")
                self._log.warning("environment not closed", error=session.close_failure)

    async def _resume(self) -> list[Segment]:
        """The durable segments of this attempt if they can be gone on from, else none and a new attempt."""
        payloads = await self._setting.patience.keep_trying(self._setting.records.read_episode, self._order.key)
        try:
            record = [decode(payload) for payload in payloads]
        except SegmentRejected as error:
            self._log.warning("cannot be resumed", error=str(error))
            record = []
        num_sampled = sum(segment.num_actions for segment in record)
        if not self._order.environment.replayable or len(record) < len(payloads):
            self._setting.counters.add("episodes/restarted")
            self._setting.counters.add("tokens/thrown_away", num_sampled)
            return await self._restart()
        self._setting.counters.add("episodes/resumed")
        self._setting.counters.add("tokens/resumed", num_sampled)
        return record

    async def _restart(self) -> list[Segment]:
        self._attempt += 1
        await self._setting.patience.keep_trying(
            self._setting.records.restart, self._order.key, self._setting.token, self._attempt
        )
        return []

    async def _give_up(self) -> StopReason:
        """Ends the episode without reward: it is never trained, and its group need not wait for it."""
        outcome = Outcome(StopReason.ENV_ERROR, metrics={"attempts": self._attempt + 1})
        ledger = Ledger(self._order.key, self._attempt, self._order.temperature)
        await self._setting.outbox.append([ledger.close(outcome)])
        self._setting.counters.episode_finished(outcome.stop_reason, ledger)
        return outcome.stop_reason
