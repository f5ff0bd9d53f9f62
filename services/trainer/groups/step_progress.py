"""Says how far the next batch has come, while it is waited for.

Rule: it speaks only where nothing else has something to say: the reason of a running job is replaced while it is the
usual one, or the last word of this. A step that comes soon is not talked about. The job's reason is always the newest;
events, which are also files, become rarer the longer a step takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

from gspo_core.bounds import reaches
from services.state.jobs import JobStatus, default_reason
from services.trainer.groups.run_context import RunContext

QUIET_S = 10.0
RETELL_S = 15.0
# The first two events are RETELL_S apart, each further one twice as long, but for this bound.
EVENTS_APART_S = 600.0
# A turn that takes less is not worth a word.
LATE_S = 1.0


class StepProgress:
    """Follows one job; call ``begin`` when the wait for a batch begins."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._intake, self._clock = context.services.intake, context.services.clock
        self._began = self._next = self._clock()
        self._turns_before = 0
        self._told = ""
        self._next_event, self._events_apart_s = self._began, RETELL_S

    def begin(self) -> None:
        self._began = self._clock()
        self._next = self._next_event = self._began + QUIET_S
        self._events_apart_s = RETELL_S
        self._turns_before = self._intake.num_turns

    async def look(self, owed: Collection[int], ready: Collection[int]) -> None:
        """``owed``: groups under way; ``ready``: those of them that could be trained now."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + RETELL_S
        message = self._message(owed, ready, await self._waits(owed))
        if message != self._told and await self._is_usual():
            self._told = message
            await self._tell(message)

    async def _tell(self, message: str) -> None:
        now, status = self._clock(), self._context.services.status
        if now < self._next_event:
            await status.still_waits(message)
            return
        self._next_event = now + self._events_apart_s
        self._events_apart_s = min(2 * self._events_apart_s, EVENTS_APART_S)
        await status.waits(message)

    async def end(self) -> None:
        """The batch is there."""
        if self._told and await self._is_usual():
            await self._context.services.status.goes_on()
        self._told = ""

    async def _is_usual(self) -> bool:
        job = await self._context.services.store.jobs.get(self._context.job)
        usual = default_reason(JobStatus.RUNNING)
        shown = job.status_reason or usual
        return job.status is JobStatus.RUNNING and (
            (shown.code, shown.message) == (usual.code, usual.message) or shown.message == self._told
        )

    async def _waits(self, owed: Collection[int]) -> str:
        """For whom episodes wait that nothing here can hasten: agents that fetch them, and those who reward them."""
        context, found = self._context, ""
        if self._are_fetched:
            num_offered = await context.services.bus.num_offered(context.job)
            if num_offered:
                found += f"; {num_offered} episodes wait to be fetched (POST /v1/jobs/{context.job}/episodes:lease)"
        deadline_s, num_waiting = context.spec.rewards.deadline_s, len(context.late.waiting(owed))
        if deadline_s is not None and num_waiting:
            found += f"; {num_waiting} groups wait for rewards (up to {deadline_s:g} s)"
        return found

    def _message(self, owed: Collection[int], ready: Collection[int], waits: str) -> str:
        spec = self._context.spec
        size, count = spec.rollout.group_size, spec.groups_per_step
        ended = sorted((size if group in ready else self._intake.num_ended(group) for group in owed), reverse=True)
        num_turns = self._intake.num_turns - self._turns_before
        pace = 60 * num_turns / max(self._clock() - self._began, 1e-9)
        return (
            f"step {self._context.lineage.step + 1}: {sum(ended[:count])} of {size * count} episodes and "
            f"{min(len(ready), count)} of {count} groups have ended{waits}; "
            f"{pace:.0f} turns a minute{self._slow_part(waits)}"
        )

    @property
    def _are_fetched(self) -> bool:
        """Some episodes, by agents that come for them."""
        return any(one.agent is not None and one.agent.pull for one in self._context.spec.environments)

    def _longest_start_s(self) -> float:
        spec = self._context.spec
        return max(spec.episode_limits(place).reset_timeout_s for place in range(len(spec.environments)))

    def _slow_part(self, waits: str) -> str:
        """What the newest turns spent most of their time with."""
        turns = self._intake.newest_turns
        if not turns:
            return "" if waits else f"; no turn has ended yet (a start may take {self._longest_start_s():.0f} s)"
        waiting = "waiting to be fetched or for a place" if self._are_fetched else "waiting for a place"
        parts = {
            "the model": statistics.median(one.engine_s for one in turns),
            "the environment": statistics.median(one.env_s for one in turns),
            waiting: statistics.median(one.queue_s for one in turns),
        }
        slowest = max(parts, key=parts.__getitem__)
        if not reaches(parts[slowest], LATE_S, "the time of a turn"):
            return ""
        return f", most of each for {slowest} ({parts[slowest]:.1f} s)"
