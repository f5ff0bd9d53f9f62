"""Runs held-out episodes: dispatches, measures, and tags them with the versions that sampled them; never trains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gspo_core.codec import NEWEST_SCHEMA
from gspo_core.evaluation.intervals import score
from gspo_core.log.sequences import group_metrics
from gspo_core.spec import JobSpec
from gspo_core.types import Group, Split
from services.process.telemetry import get_logger
from services.state.client import OutOfMemory
from services.state.queue import Bus
from services.state.queue_records import GroupEnd
from services.state.store import Claim, Store
from services.trainer.groups.admission import RETRY_S, reserved_bytes
from services.trainer.groups.intake import Intake
from services.trainer.groups.tasks import evaluation_group, evaluation_tasks
from services.trainer.telling.failure import AlertKind

# How long the last round waits for room: others free some meanwhile. What fills Redis may be groups of the job itself
# that no step takes any more, and those stay until it is over.
LAST_ROUND_WAITS_S = 600.0


class Evaluator:
    """Plays the same held-out tasks every round; does nothing if the job asks for no evaluation."""

    def __init__(
        self,
        claim: Claim,
        spec: JobSpec,
        bus: Bus,
        store: Store,
        intake: Intake,
        num_tasks: list[int],
        report: Callable[[int, Mapping[str, float]], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._claim = claim
        self._spec = spec
        self._settings = spec.evaluation
        self._bus = bus
        self._store = store
        self._intake = intake
        self._report = report
        self._clock = clock
        self.tasks = evaluation_tasks(num_tasks, spec.evaluation.tasks) if spec.evaluation else []
        self._round = 0
        self._pending: set[asyncio.Task[None]] = set()

    async def play(self, step: int, version: int) -> None:
        """Run one round and wait for its result."""
        groups = await self._begin(step)
        if groups:
            await self._collect(groups, step, version)

    async def play_last(self, step: int, version: int) -> None:
        """Run the round of the last weights, for which it waits until there is room: it holds up no training."""
        groups = await self._begin(step, waits_s=LAST_ROUND_WAITS_S)
        if groups:
            await self._collect(groups, step, version)

    async def start(self, step: int, version: int) -> bool:
        """Start one round alongside training and report its result once complete; return whether one was started."""
        groups = await self._begin(step)
        if groups:
            self._pending.add(asyncio.create_task(self._collect(groups, step, version)))
        return bool(groups)

    async def finish(self) -> None:
        """Wait for all running rounds and raise their errors."""
        await asyncio.gather(*self._pending)

    def cancel(self) -> None:
        """Abandon all running rounds."""
        for task in self._pending:
            task.cancel()

    async def _begin(self, step: int, waits_s: float = 0.0) -> list[int]:
        """Return the groups of a new round; none where Redis has no room for all of them for ``waits_s``. Training
        frees memory, and a round that waited for room before it would hold it up for ever."""
        until, is_told = self._clock() + waits_s, False
        while True:
            try:
                groups = await self._dispatch(step)
            except OutOfMemory as error:
                is_left_out = self._clock() >= until
                if is_left_out or not is_told:
                    what = "is left out" if is_left_out else "waits for some"
                    message = f"Redis has no room for the evaluation of step {step}: it {what} ({error})"
                    await self._alert(step, "redis_full", message)
                if is_left_out:
                    return []
                is_told = True
                await asyncio.sleep(RETRY_S)
            else:
                if is_told:
                    await self._alert(step, "redis_has_room", f"the evaluation of step {step} was started")
                return groups

    async def _dispatch(self, step: int) -> list[int]:
        """Return the groups of a new round. Where there is no room for all of them, none of them stays."""
        if self._settings is None or not self.tasks:
            return []
        epoch, count = self._claim.epoch, len(self.tasks)
        groups = [evaluation_group(epoch, self._round, count, position) for position in range(count)]
        self._round += 1
        for position, task in enumerate(self.tasks):
            try:
                await self._bus.dispatch(
                    self._claim.job_id,
                    self._claim.token,
                    groups[position],
                    size=self._settings.episodes_per_task,
                    split=Split.EVAL,
                    task_index=task.index,
                    environment=task.environment,
                    bytes_per_episode=reserved_bytes(self._spec, task.environment),
                    reads=NEWEST_SCHEMA,
                )
            except OutOfMemory:
                begun = groups[:position]
                await self._bus.commit(self._claim.job_id, self._claim.token, step, begun, reason="dropped_redis_full")
                self._intake.forget(begun)
                raise
        return groups

    async def _collect(self, numbers: list[int], step: int, version: int) -> None:
        groups = await self._played(numbers, step)
        played = [group.group for group in groups]
        lost = sorted(set(numbers) - set(played))
        left: tuple[tuple[list[int], GroupEnd], ...] = ((played, "evaluated"), (lost, "dropped_unreadable"))
        for some, reason in left:
            if some:
                await self._bus.commit(self._claim.job_id, self._claim.token, step, some, reason=reason)
        self._intake.forget(numbers)
        metrics = group_metrics(groups) | held_out_metrics(groups)
        record = {"step": step, "version": version, **version_range(groups), **metrics}
        await self._report(step, metrics)
        await self._store.events.add(self._claim.job_id, "evaluation", record, token=self._claim.token)
        get_logger().info("evaluation", **record)

    async def _played(self, numbers: list[int], step: int) -> list[Group]:
        """Wait for all groups to end; return those without a refused segment, e.g. one from another release."""
        while True:
            num_segments = self._intake.num_segments
            groups = await self._intake.complete(Split.EVAL, among=numbers)
            if len(groups) == len(numbers):
                return groups
            lost = await self._intake.unreadable(among=numbers)
            if len(groups) + len(lost) == len(numbers):
                await self._tell_of(lost, step)
                return groups
            await self._intake.progress(num_segments)

    async def _tell_of(self, lost: list[int], step: int) -> None:
        message = f"{len(lost)} of the held-out groups cannot be read: {'; '.join(self._intake.refusals.values())}"
        await self._alert(step, "segment_refused", message)

    async def _alert(self, step: int, kind: AlertKind, message: str) -> None:
        data = {"step": step, "kind": kind, "message": message}
        await self._store.events.add(self._claim.job_id, "alert", data, token=self._claim.token)


def held_out_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The reward with its interval, by the statistics of ``gspo eval``; nothing where no episode has one."""
    rewards = [[reward for reward in group.rewards if reward is not None] for group in groups]
    found = score(rewards)
    failed = {"episodes/failed": float(sum(len(group.trajectories) for group in groups) - sum(map(len, rewards)))}
    if found is None:
        return failed
    bounds = {"reward/low": found.low, "reward/high": found.high}
    return failed | {"reward/mean": found.mean} | {name: value for name, value in bounds.items() if value is not None}


def version_range(groups: list[Group]) -> dict[str, int]:
    versions = {version for group in groups for trajectory in group for version in trajectory.versions}
    return {"version_min": min(versions), "version_max": max(versions)} if versions else {}
