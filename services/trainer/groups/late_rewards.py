"""Groups that wait for nothing but rewards: ended when their deadline is over, left out of pacing while they wait.

Rule: up to a bound, such a group takes no place from those being played, and nothing waits for it; what it holds counts
in the queue's budget. When its rewards are there it is a group like any other, with tokens as old as they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from gspo_core.spec import JobSpec
from services.state.queue import Bus
from services.state.queue_records import Waiting
from services.state.store import Claim

LOOK_S = 1.0


class LateRewardWatch:
    """``waiting`` is as of the last look; ``run`` looks again and again, for as long as the job may have any."""

    def __init__(
        self, bus: Bus, claim: Claim, spec: Callable[[], JobSpec], now: Callable[[], float] = time.time
    ) -> None:
        """``now``: Unix seconds, of a clock like that of the gateways."""
        self._bus, self._claim, self._spec, self._now = bus, claim, spec, now
        self._seen = Waiting()
        self._reported = None if claim.attempt > 1 else Waiting()

    async def run(self) -> None:
        """Until cancelled."""
        while self.is_on:
            await self._bus.expire_rewards(self._claim.job_id, self._claim.token, now=self._now())
            await self.look()
            await asyncio.sleep(LOOK_S)
        await asyncio.Event().wait()

    @property
    def is_on(self) -> bool:
        return self._spec().rewards.deadline_s is not None

    async def look(self) -> None:
        if self.is_on:
            self._seen = await self._bus.waiting(self._claim.job_id)
            self._reported = self._reported or self._seen

    def waiting(self, owed: Collection[int]) -> set[int]:
        return set(self._seen.groups).intersection(owed)

    def num_excused(self, owed: Collection[int]) -> int:
        """Groups that take no place of those that are played."""
        return min(len(self.waiting(owed)), self._spec().max_waiting_groups)

    @property
    def excuse(self) -> str:
        """Why nothing is played, if as many groups wait as may; empty otherwise."""
        num_waiting = len(self._seen.groups)
        is_full = self.is_on and num_waiting >= self._spec().max_waiting_groups
        return f"{num_waiting} groups wait for rewards" if is_full else ""

    def metrics(self, num_late: int) -> dict[str, float]:
        """``num_late``: groups of the batch that had waited."""
        if not self.is_on:
            return {}
        seen, before = self._seen, self._reported or self._seen
        self._reported = seen
        return {
            "rewards/waiting_episodes": seen.num_episodes,
            "rewards/waiting_groups": len(seen.groups),
            "rewards/late": max(0, seen.num_late - before.num_late),
            "rewards/missed": max(0, seen.num_missed - before.num_missed),
            "rewards/late_groups": num_late,
        }
