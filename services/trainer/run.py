"""One job from its first version to its last step.

The rule it keeps: a batch is written to the batch log before it is committed, and committed before it is trained, so
what was taken from the queue can always be found again. Everything that this process says to Redis carries the token
of its claim; who lost the claim is answered ``Fenced`` and stops.

    wait for groups -> batch log -> commit -> update -> publish weights -> admit new groups -> (evaluate) -> again
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gspo_core.learner import Learner
from gspo_core.spec import JobSpec
from gspo_core.types import Group, Split, StepReport, WeightsManifest
from services.batch_log import BatchLog
from services.bus import Bus
from services.store import Claim, Store
from services.telemetry import get_logger
from services.trainer.engines import Engines
from services.trainer.evaluation import Evaluator
from services.trainer.intake import Intake
from services.trainer.sequences import group_metrics, staleness_metrics, train_sequences
from services.trainer.tasks import TaskSchedule
from services.weights import WeightStore

ENVIRONMENT_POLL_S = 0.2


@dataclass(frozen=True)
class Services:
    """What a run needs from outside."""

    bus: Bus
    store: Store
    engines: Engines
    intake: Intake
    weights: WeightStore
    batch_log: BatchLog
    metrics_path: Path
    clock: Callable[[], float] = time.monotonic


class JobRun:
    """The step loop of one claimed job."""

    def __init__(self, claim: Claim, spec: JobSpec, services: Services, make_learner: Callable[[], Learner]) -> None:
        self._claim = claim
        self._spec = spec
        self._services = services
        self._make_learner = make_learner
        self._staleness = StalenessTable()
        self._num_dispatched = 0
        self._num_dropped = 0
        self._published: WeightsManifest | None = None

    @property
    def _job(self) -> str:
        return self._claim.job_id

    async def run(self) -> None:
        """Returns when the last step is trained, published and evaluated."""
        services, spec = self._services, self._spec
        await self._reason("loading_model", f"loading {spec.model}")
        learner = await asyncio.to_thread(self._make_learner)
        manifest = await self._publish(learner, step=0)
        await self._reason("waiting_for_workers", "no rollout worker has described the environments yet")
        num_tasks = await self._num_tasks()
        schedule = TaskSchedule(spec.seed, num_tasks[Split.TRAIN], [one.weight for one in spec.environments])
        evaluator = Evaluator(self._claim, spec, services.bus, services.store, services.intake, num_tasks[Split.EVAL])
        await self._reason("no_engine", "no engine holds the weights of this job yet")
        await services.engines.wait_for(manifest)
        await services.store.set_status(self._job, "running", token=self._claim.token)
        await evaluator.play(0, manifest.version)
        await self._admit(schedule, published_step=0)
        for step in range(1, spec.steps + 1):
            await self._step(learner, schedule, step)
            if spec.evaluation and step % spec.evaluation.every == 0 and step < spec.steps:
                await evaluator.start(step, self._newest.version)
        await self._finish(evaluator)

    async def _finish(self, evaluator: Evaluator) -> None:
        await self._services.engines.wait_for(self._newest)
        await evaluator.play(self._spec.steps, self._newest.version)
        await evaluator.finish()

    @property
    def _newest(self) -> WeightsManifest:
        assert self._published is not None
        return self._published

    async def _step(self, learner: Learner, schedule: TaskSchedule, step: int) -> None:
        services, clock = self._services, self._services.clock
        started = clock()
        groups = await self._take_groups(schedule, step)
        taken = clock()
        sequences = train_sequences(
            groups, lambda versions: self._staleness.of(versions, step - 1), self._spec.objective.advantage
        )
        metrics = group_metrics(groups) | staleness_metrics(sequences)
        metrics |= await asyncio.to_thread(learner.step, sequences)
        trained = clock()
        await self._publish(learner, step)
        await self._admit(schedule, published_step=step)
        ended = clock()
        metrics |= {
            "time/wait_s": taken - started,
            "time/train_s": trained - taken,
            "time/publish_s": ended - trained,
            "time/step_s": ended - started,
            "time/engine_paused_s": services.engines.last_switch_s(),
            "throughput/tokens_per_s": metrics["tokens/trained"] / (ended - started),
        }
        await self._report(StepReport(step, self._newest.version, self._claim.epoch, metrics))

    async def _take_groups(self, schedule: TaskSchedule, step: int) -> list[Group]:
        """The oldest ready groups that may be trained, logged and committed."""
        services, spec = self._services, self._spec
        chosen: list[Group] = []
        while len(chosen) < spec.groups_per_step:
            missing = spec.groups_per_step - len(chosen)
            for group in await services.intake.wait_for(Split.TRAIN, missing):
                if self._is_trainable(group, step):
                    chosen.append(group)
                else:
                    await self._drop(group, step)
            await self._admit(schedule, published_step=step - 1)
        numbers = [group.group for group in chosen]
        extra = {"version": self._newest.version, "lr": spec.optimizer.lr}
        await asyncio.to_thread(services.batch_log.write, self._claim.epoch, step, chosen, extra)
        await services.bus.commit(self._job, self._claim.token, step, numbers)
        services.intake.forget(numbers)
        return chosen

    def _is_trainable(self, group: Group, step: int) -> bool:
        rollout, rewards = self._spec.rollout, [reward for reward in group.rewards if reward is not None]
        if len(rewards) < rollout.min_group_size and rollout.on_partial_group != "all":
            return False
        if rollout.on_stale != "drop":
            return True
        versions = [version for trajectory in group for version in trajectory.versions]
        oldest = self._staleness.of(np.array(versions, dtype=np.int32), step - 1).max(initial=0)
        return bool(oldest <= rollout.staleness_cap)

    async def _drop(self, group: Group, step: int) -> None:
        reason = "dropped_partial" if None in group.rewards else "dropped_stale"
        await self._services.bus.commit(self._job, self._claim.token, step, [group.group], reason=reason)
        self._services.intake.forget([group.group])
        self._num_dropped += 1

    async def _admit(self, schedule: TaskSchedule, published_step: int) -> None:
        """Start as many groups as pacing allows: a slot is free again when its group's step is published."""
        spec = self._spec
        settled = published_step * spec.groups_per_step + self._num_dropped
        limit = min(
            settled + (spec.rollout.max_staleness + 1) * spec.groups_per_step,
            spec.steps * spec.groups_per_step + self._num_dropped,
        )
        if spec.rollout.max_staleness == 0:
            await self._services.engines.wait_for(self._newest)
        for group in range(self._num_dispatched, limit):
            task = schedule.task(group)
            await self._services.bus.dispatch(
                self._job,
                self._claim.token,
                group,
                size=spec.rollout.group_size,
                split=Split.TRAIN,
                task_index=task.index,
                environment=task.environment,
            )
        self._num_dispatched = max(self._num_dispatched, limit)

    async def _publish(self, learner: Learner, step: int) -> WeightsManifest:
        services, claim = self._services, self._claim
        version = await services.store.next_version(self._job, claim.token)
        manifest = await asyncio.to_thread(services.weights.write, version, claim.epoch, step, learner.save_weights)
        await services.store.publish_version(self._job, claim.token, manifest)
        await services.store.update_progress(self._job, claim.token, step, version)
        self._staleness.add(version, step)
        self._published = manifest
        await services.engines.publish(manifest)
        keep = set(self._staleness.newest(self._spec.checkpoints.keep_versions)) | services.engines.loaded_versions()
        await asyncio.to_thread(services.weights.collect, keep)
        return manifest

    async def _num_tasks(self) -> dict[Split, list[int]]:
        """How many tasks each environment has, as rollout workers describe them: no environment code runs here."""
        descriptions = []
        for index in range(len(self._spec.environments)):
            while (found := await self._services.store.environment_description(self._job, index)) is None:
                await asyncio.sleep(ENVIRONMENT_POLL_S)
            descriptions.append(found["num_tasks"])
        return {split: [int(counts[split.value]) for counts in descriptions] for split in Split}

    async def _reason(self, code: str, message: str) -> None:
        await self._services.store.set_reason(self._job, code, message, token=self._claim.token)

    async def _report(self, report: StepReport) -> None:
        record = {"step": report.step, "version": report.version, "epoch": report.epoch, **report.metrics}
        with self._services.metrics_path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
        await self._services.store.add_metrics(self._job, report.step, report.metrics)
        await self._services.store.add_event(self._job, "step", record)
        get_logger().info("step", step=report.step, reward=report.metrics.get("reward/mean"))


class StalenessTable:
    """Which step each version of this run holds."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def add(self, version: int, step: int) -> None:
        self._steps[version] = step

    def newest(self, count: int) -> list[int]:
        return sorted(self._steps)[-count:]

    def of(self, versions: NDArray[np.int32], trainer_step: int) -> NDArray[np.int32]:
        known, positions = np.unique(versions, return_inverse=True)
        ages = np.array([trainer_step - self._steps[int(version)] for version in known], dtype=np.int32)
        return ages[positions] if ages.size else ages
