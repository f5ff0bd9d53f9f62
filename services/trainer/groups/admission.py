"""Starts groups: as many as pacing allows, no more than the job will train, within its byte budget in the queue.

Rule: at most ``(max_staleness + 1) * groups_per_step`` unpublished groups are in flight, even after a crash; those that
wait for nothing but rewards do not count, up to a bound, until these are there (then there may be more, and none is
started until they are trained). Groups that the lineage still owes are restarted before any new one.
"""

from __future__ import annotations

import asyncio
import contextlib

from gspo_core.codec import NEWEST_SCHEMA
from gspo_core.spec import JobSpec
from gspo_core.staleness import groups_admissible
from gspo_core.types import Split
from services.state.client import OutOfMemory
from services.state.queue import Full
from services.trainer.groups.run_context import RunContext
from services.trainer.groups.tasks import TaskSchedule

RETRY_S = 2.0
# How soon a run that is to close notices that it waits for engines.
LOOK_S = 1.0
# Encoded size: id, log-prob and mask of a token, plus its share of the segment header.
BYTES_PER_TOKEN = 10


def reserved_bytes(spec: JobSpec, environment: int) -> int:
    """What an episode may need in the queue, trained or held out."""
    return spec.episode_limits(environment).max_context_tokens * BYTES_PER_TOKEN + spec.rewards.evidence_bytes


class Admission:
    """Admits the groups of one job. Set ``schedule``, which maps groups to tasks, once the environments are known."""

    schedule: TaskSchedule

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._lineage = context.lineage
        self._admitting = asyncio.Lock()
        self.dispatched_steps: dict[int, int] = {}
        """Open groups that this process dispatched, with the published step at that time."""
        self.num_excused = 0
        """Groups that wait for nothing but rewards, when groups were admitted last."""
        self.num_beyond = 0
        """Groups that the steps so far have taken beyond ``groups_per_step`` each: the parent of a fork may have taken
        more or fewer, and what a fork is fed may lack some."""

    async def admit(self) -> None:
        """Start as many groups as pacing allows, but no more than the job will train."""
        async with self._admitting:
            await self._admit()

    async def dispatch_again(self) -> None:
        """Restart the groups that the lineage owes, leaving those still in the queue as they are."""
        for group in list(self._lineage.owed()):
            await self._dispatch_when_there_is_room(group)

    def forget(self, groups: list[int]) -> None:
        """Drop the dispatch steps of settled groups."""
        for group in groups:
            self.dispatched_steps.pop(group, None)

    async def _admit(self) -> None:
        spec, lineage, services = self._context.spec, self._lineage, self._context.services
        await self._context.late.look()
        self.num_excused = self._context.late.num_excused(set(lineage.owed()))
        allowed = groups_admissible(
            max_staleness=spec.rollout.max_staleness,
            groups_per_step=spec.groups_per_step,
            num_dispatched=lineage.num_dispatched,
            num_dropped=lineage.num_dropped,
            num_published=lineage.num_published,
            num_excused=self.num_excused,
        )
        if self._context.phase.manner is not None:
            return
        num_trained = spec.steps * spec.groups_per_step + self.num_beyond
        still_needed = num_trained + lineage.num_dropped - lineage.num_dispatched
        still_needed += self.num_excused  # the last step waits for none of them
        if not spec.rollout.max_staleness and not await self._engines_follow():
            return
        for _ in range(min(allowed, still_needed)):
            try:
                # Always admit one step's worth of groups: with fewer, the job would wait forever.
                if self._context.fills_step:
                    await self._dispatch(lineage.num_dispatched, services.budget_bytes)
                else:
                    await self._dispatch_when_there_is_room(lineage.num_dispatched)
            except (Full, OutOfMemory):
                break
            lineage.num_dispatched += 1

    async def _engines_follow(self) -> bool:
        """Wait until the engines hold the newest weights; False if the run is to close before that."""
        while not self._context.phase.is_cut_short:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._context.services.engines.wait_for(self._context.newest)
                    return True
        return False

    async def _dispatch_when_there_is_room(self, group: int) -> None:
        """Dispatch ``group``, retrying while the Redis server is out of memory, which other jobs may have filled."""
        is_told = False
        while True:
            try:
                await self._dispatch(group)
            except OutOfMemory as error:
                if not is_told:
                    await self._context.alert(
                        "redis_full", f"Redis has no room for group {group}; the job continues once it has ({error})"
                    )
                is_told = True
                await asyncio.sleep(RETRY_S)
            else:
                if is_told:
                    await self._context.alert("redis_has_room", f"group {group} was started")
                return

    async def _dispatch(self, group: int, budget_bytes: int | None = None) -> None:
        spec, task, bus = self._context.spec, self.schedule.task(group), self._context.services.bus
        try:
            await bus.dispatch(
                self._context.job,
                self._context.token,
                group,
                size=spec.rollout.group_size,
                split=Split.TRAIN,
                task_index=task.index,
                environment=task.environment,
                bytes_per_episode=reserved_bytes(spec, task.environment),
                budget_bytes=budget_bytes,
                reads=NEWEST_SCHEMA,
            )
        except OutOfMemory:
            # A full server looks at no arguments. A group that is there already needs no room, and frees some.
            if group not in await bus.open_groups(self._context.job):
                raise
        self.dispatched_steps[group] = self._lineage.step
