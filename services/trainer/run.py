"""One job from its first version to its last step.

The rule it keeps: a batch is written to the batch log before it is committed, and committed before it is trained, so
what was taken from the queue can always be found again. Everything that this process says to Redis carries the token
of its claim; who lost the claim is answered ``Fenced`` and stops.

    wait for groups -> batch log -> commit -> update -> again
                                                   `-> publish weights -> admit new groups -> report
                                                   `-> (checkpoint)

A trainer that takes a job over goes on from the newest checkpoint and trains what was logged after it again, so that
nothing is sampled twice. Only steps whose logs are lost are sampled anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gspo_core.learner import Copy, Learner
from gspo_core.objective import Alarm
from gspo_core.spec import JobSpec
from gspo_core.staleness import Position, groups_admissible, token_staleness
from gspo_core.types import Group, Split, StepReport, WeightsManifest
from services.batch_log import BatchLog, retained
from services.bus import Bus, Full
from services.store import CancelManner, Claim, StatusReason, Store
from services.trainer.behind import Behind
from services.trainer.census import Census
from services.trainer.checkpoints import CheckpointStore
from services.trainer.disk import PatientDisk
from services.trainer.engines import Engines
from services.trainer.environments import DescribedEnvironments
from services.trainer.evaluation import Evaluator
from services.trainer.intake import Intake
from services.trainer.lineage import Lineage
from services.trainer.parity import Held, ParityGate
from services.trainer.race import first_to_end
from services.trainer.recovery import recover
from services.trainer.reports import Listener, Reports, disk_metrics
from services.trainer.selection import Selection, nothing_to_train, refusal
from services.trainer.sequences import group_metrics, staleness_metrics, train_sequences
from services.trainer.status import JobStatusBoard
from services.trainer.stopping import StopConditions
from services.trainer.tasks import TaskSchedule
from services.trainer.tuning import Tuning
from services.trainer.watchdog import Watchdog
from services.weights import WeightStore

# So many batches' worth of groups dropped one after the other: what comes next would be no better.
MAX_BATCHES_DROPPED_IN_A_ROW = 8


@dataclass(frozen=True)
class Services:
    """What a run needs from outside."""

    bus: Bus
    store: Store
    status: JobStatusBoard
    engines: Engines
    intake: Intake
    weights: WeightStore
    batch_log: BatchLog
    checkpoints: CheckpointStore
    metrics_path: Path
    budget_bytes: int | None = None
    """What the job may hold in Redis."""
    clock: Callable[[], float] = time.monotonic
    listeners: Sequence[Listener] = ()
    """Who is told every number, besides the store and the files of the job."""


# Of an encoded segment: id, log-prob and mask of a token, and its share of the header.
BYTES_PER_TOKEN = 10


class WoundUp(Exception):
    """A cancelled job has nothing more to train."""


class JobRun:
    """The step loop of one claimed job."""

    ending: StatusReason | None = None
    """Why it was over, once ``run`` has returned."""
    cancelled: CancelManner | None = None
    """How it winds up, since its user has cancelled it."""
    _is_stepping = False
    """In the loop of steps, where it can end in order."""
    _is_held = False
    """Its user has paused it."""

    def __init__(self, claim: Claim, spec: JobSpec, services: Services, make_learner: Callable[[], Learner]) -> None:
        self._claim = claim
        self._tuning = Tuning(spec)
        self._services = services
        self._make_learner = make_learner
        self._lineage = Lineage()
        self._positions: dict[int, Position] = {}
        """Of every version that may have sampled a token."""
        self._forks: dict[int, Position] = {}
        self._newest: WeightsManifest
        self._held: Held
        """What the learner's weights are, or will be, published as."""
        self._num_unpublished = 0
        """Groups inside the learner's weights and in none that are published."""
        self._disk = PatientDisk(self._alert)
        self._publishing, self._saving = Behind(), Behind()
        self._admitting = asyncio.Lock()
        self._dispatched_steps: dict[int, int] = {}
        """Of open groups: the step whose weights were published when it was dispatched by this process."""
        self._census = Census(services.intake, claim.job_id)
        self._dropped_in_a_row: Counter[str] = Counter()
        self._dropped_since: dict[str, list[int]] = {}
        """Groups by reason, since the last batch."""
        self._num_dropped: dict[str, float] = {}
        """The same in numbers, as the last batch was logged."""
        self._reports = Reports(services.store, claim, services.metrics_path, services.listeners)
        self._gate = ParityGate(services.engines, spec.rollout.max_engine_k3)
        self._stopping = StopConditions(services.store, claim.job_id)
        self._saved_step = -1
        """Of the newest checkpoint that this process has written."""

    @property
    def _job(self) -> str:
        return self._claim.job_id

    @property
    def _spec(self) -> JobSpec:
        """With the live settings that hold now."""
        return self._tuning.spec

    async def run(self) -> None:
        """Returns when the job is at its end, with the reason in ``ending``: the last weights are published and
        evaluated, or it was cancelled and has wound up."""
        try:
            engines, intake = self._services.engines, self._services.intake
            watchdog = Watchdog(self._signs, lambda: self._spec.watchdog, self._warn, self._excuse)
            await first_to_end(self._train(), engines.run(), intake.run(), self._gate.run(), watchdog.run())
        finally:
            await self._services.engines.release()

    def wind_up(self, manner: CancelManner) -> bool:
        """Ask a cancelled job to end in order. False: there is nothing to keep, it may be ended where it is."""
        if manner is CancelManner.NOW or not self._is_stepping:
            return False
        self.cancelled = manner
        return True

    def _signs(self) -> Hashable | None:
        """What changes while the job moves; None while it is not meant to."""
        return (
            (self._lineage.step, self._services.intake.num_segments)
            if self._is_stepping and not self._is_held
            else None
        )

    async def _excuse(self) -> str:
        """Why nobody else could go on either."""
        if not await self._services.store.workers():
            return "no rollout worker is there"
        return "" if self._services.engines.ready() else "no engine is ready"

    async def _warn(self, message: str) -> None:
        await self._reports.stands_still(self._lineage.step, message)

    async def _alert(self, kind: str, message: str) -> None:
        data = {"step": self._lineage.step, "kind": kind, "message": message}
        await self._services.store.add_event(self._job, "alert", data, token=self._claim.token)

    async def _train(self) -> None:
        services, spec, status = self._services, self._spec, self._services.status
        await status.begin()
        await status.explain("loading_model", f"loading {spec.model}")
        learner = await asyncio.to_thread(self._make_learner)
        await self._resume(learner)
        await self._recall_versions()
        await self._hold(learner)
        await self._publish(await asyncio.to_thread(learner.copy_weights), self._held.version, self._lineage.step)
        num_tasks = await DescribedEnvironments(services.store, self._job, status).num_tasks(len(spec.environments))
        schedule = TaskSchedule(spec.seed, num_tasks[Split.TRAIN], [one.weight for one in spec.environments])
        evaluator = Evaluator(
            self._claim,
            spec,
            services.bus,
            services.store,
            services.intake,
            num_tasks[Split.EVAL],
            self._report_evaluation,
        )
        try:
            await self._loop(learner, schedule, evaluator)
        finally:
            evaluator.cancel()
            for behind in (self._publishing, self._saving):
                await behind.end()

    async def _loop(self, learner: Learner, schedule: TaskSchedule, evaluator: Evaluator) -> None:
        services, status = self._services, self._services.status
        num_engines = self._spec.resources.num_engines
        await services.engines.wait_for(self._newest, num_engines=num_engines, explain=status.explain)
        await status.started()
        if not await self._is_over(learner):
            await evaluator.play(self._lineage.step, self._newest.version)
        await self._commit_again()
        await self._dispatch_again(schedule)
        await self._admit(schedule)
        self._is_stepping = True
        with contextlib.suppress(WoundUp):
            await self._take_steps(learner, schedule, evaluator)
        self._is_stepping = False
        await self._publishing.finish()
        if self._saved_step < self._lineage.step and (self.cancelled is None or self.cancelled.saves):
            await self._checkpoint(learner)
        await self._saving.finish()
        if self.cancelled is not None:
            return
        await services.engines.wait_for(self._newest)
        await evaluator.finish()
        await evaluator.play(self._lineage.step, self._newest.version)

    async def _take_steps(self, learner: Learner, schedule: TaskSchedule, evaluator: Evaluator) -> None:
        while not await self._is_over(learner):
            self._is_held = True
            was_held = await self._services.status.obey_pause()
            self._is_held = False
            if was_held:
                continue
            await self._step(learner, schedule)
            await self._after_step(learner, evaluator)

    async def _is_over(self, learner: Learner) -> bool:
        """At a step boundary: what the user has changed holds from here on, and may end the job. Raises WoundUp."""
        job = await self._services.store.get_job(self._job)
        if self._tuning.version != job.settings_version:
            await self._publishing.finish()  # a condition that is new looks at what has been reported
        if self._tuning.version != job.settings_version and self._tuning.apply(
            learner, job.settings_version, job.settings
        ):
            data = {"step": self._lineage.step + 1, **self._tuning.logged()}
            await self._services.store.add_event(self._job, "settings.applied", data, token=self._claim.token)
        self._leave_if_wound_up()
        if self.cancelled is not None:
            await self._services.status.winds_up()
        self.ending = await self._stopping.reached(job, self._spec, self._lineage.step)
        return self.ending is not None

    def _leave_if_wound_up(self) -> None:
        if self.cancelled is None:
            return
        num_open = sum(1 for _ in self._lineage.owed())
        if not self.cancelled.drains or num_open < self._spec.groups_per_step:
            raise WoundUp

    async def discard_queue(self) -> None:
        """At the end of a job: what nobody will train any more leaves Redis."""
        bus = self._services.bus
        left = await bus.open_groups(self._job)
        if left:
            await bus.commit(self._job, self._claim.token, self._lineage.step, left, reason="dropped_job_over")

    async def _resume(self, learner: Learner) -> None:
        """Go on where the epochs before have come, and record where this one forks off."""
        services, epoch = self._services, self._claim.epoch
        every = self._spec.checkpoint_every
        found = await asyncio.to_thread(
            recover,
            learner,
            services.checkpoints,
            services.batch_log,
            epoch,
            self._tuning,
            checkpoint_every=every,
        )
        self._lineage, self._saved_step = found.lineage, found.saved.step or -1
        await self._disk.write("the record of this attempt", services.checkpoints.begin_epoch, epoch, found.reached)
        for store in (services.batch_log, services.weights):
            await asyncio.to_thread(store.remove_unfinished)
        self._forks = await asyncio.to_thread(services.checkpoints.forks)
        for remark in found.remarks:
            await self._alert(remark.kind, remark.message)
        if found.reached != found.saved:
            # Else whoever is lost after us would train all of it once more, and the last step would never be saved.
            await self._checkpoint(learner)

    async def _recall_versions(self) -> None:
        manifests = await self._services.store.versions(self._job)
        self._positions = {one.version: Position(one.epoch, one.step) for one in manifests}

    async def _commit_again(self) -> None:
        """What was logged leaves the queue: the trainer before may have died between the log and the commit."""
        left = [group for group in await self._services.bus.open_groups(self._job) if self._lineage.is_settled(group)]
        if left:
            await self._services.bus.commit(self._job, self._claim.token, self._lineage.step, left)
            self._services.intake.forget(left)

    async def _dispatch_again(self, schedule: TaskSchedule) -> None:
        """Groups that the lineage owes; those that are still in the queue stay as they are."""
        for group in list(self._lineage.owed()):
            await self._dispatch(schedule, group)

    async def _step(self, learner: Learner, schedule: TaskSchedule) -> None:
        clock = self._services.clock
        started = clock()
        groups = await self._take_groups(learner, schedule)
        taken = clock()
        sequences, metrics = train_sequences(groups, self._staleness_of, self._spec.objective.advantage)
        metrics |= group_metrics(groups) | staleness_metrics(sequences, self._spec.rollout.staleness_cap)
        metrics |= self._census.take_metrics()
        metrics |= await asyncio.to_thread(learner.step, sequences)
        trained = clock()
        self._lineage.step += 1
        self._num_unpublished += len(groups)
        await self._hold(learner)
        weights = await asyncio.to_thread(learner.copy_weights)
        copied = clock()
        await self._publishing.finish()
        ended = clock()
        metrics |= {
            "time/wait_s": taken - started,
            "time/train_s": trained - taken,
            "time/copy_s": copied - trained,
            "time/behind_s": ended - copied,
            "time/step_s": ended - started,
            **self._num_dropped,
            "settings/version": float(self._tuning.version),
            "throughput/tokens_per_s": metrics["tokens/trained"] / (ended - started),
        }
        self._stopping.note(self._lineage.step, metrics)
        report = StepReport(self._lineage.step, self._held.version, self._claim.epoch, metrics)
        await self._publishing.start(self._publish_step(weights, report, len(groups), learner.alarms, schedule))

    async def _publish_step(
        self, weights: Copy, report: StepReport, num_groups: int, alarms: Sequence[Alarm], schedule: TaskSchedule
    ) -> None:
        """What becomes of a step that was trained; the next one is trained meanwhile."""
        services, started = self._services, self._services.clock()
        await self._publish(weights, report.version, report.step)
        self._lineage.num_published += num_groups
        self._num_unpublished -= num_groups
        await self._admit(schedule)
        metrics = {
            **report.metrics,
            "time/publish_s": services.clock() - started,
            "time/engine_paused_s": services.engines.last_switch_s(),
            **services.engines.metrics(),
            **self._gate.metrics(),
            **await asyncio.to_thread(disk_metrics, services.metrics_path.parent, self._newest),
        }
        report = replace(report, metrics=metrics)
        await self._disk.wait_for_room(f"the metrics of step {report.step}", lambda: self._reports.step(report, alarms))

    async def _report_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {f"eval/{name}": value for name, value in metrics.items()}
        self._stopping.note(step, values)
        await self._reports.evaluation(step, values)

    async def _after_step(self, learner: Learner, evaluator: Evaluator) -> None:
        step, spec = self._lineage.step, self._spec
        if spec.evaluation and step % spec.evaluation.every == 0 and step < spec.steps:
            await self._publishing.finish()
            await evaluator.start(step, self._newest.version)
        if step % spec.checkpoint_every == 0:
            await self._checkpoint(learner)

    async def _checkpoint(self, learner: Learner) -> None:
        """Save what the learner holds now, while it goes on."""
        position, lineage = Position(self._claim.epoch, self._lineage.step), self._lineage
        # Whoever goes on from it publishes these weights first.
        lineage = replace(
            lineage, settled=set(lineage.settled), num_published=lineage.num_published + self._num_unpublished
        )
        self._saved_step = position.step
        state = await asyncio.to_thread(learner.copy_state)
        await self._saving.start(self._save(position, lineage, state))

    async def _save(self, position: Position, lineage: Lineage, state: Copy) -> None:
        checkpoints = self._services.checkpoints
        await self._disk.write(
            f"the checkpoint of step {position.step}", checkpoints.write, position, lineage, state.write
        )
        await asyncio.to_thread(checkpoints.collect, self._spec.checkpoints.keep)
        await asyncio.to_thread(self._collect_batches)
        data = {"step": position.step, "epoch": position.epoch}
        await self._services.store.add_event(self._job, "checkpoint", data, token=self._claim.token)

    def _collect_batches(self) -> None:
        log, oldest = self._services.batch_log, self._services.checkpoints.newest_first()[-1].position
        log.collect(retained(log.steps(), oldest, self._spec.checkpoints.keep_batches))

    async def _take_groups(self, learner: Learner, schedule: TaskSchedule) -> list[Group]:
        """The groups that are to be trained next, logged and committed.

        They pass the parity gate before they are logged: what is in a log is trained without asking again.
        """
        services, spec, lineage = self._services, self._spec, self._lineage
        selection = Selection(spec, services.intake, services.status, services.clock, self._dispatched_steps)
        while True:
            self._leave_if_wound_up()
            self._publishing.check()
            self._saving.check()
            num_segments = services.intake.num_segments
            ready = await self._trainable(schedule)
            choice = selection.choose(list(lineage.owed()), ready, lineage.step, self._staleness_of)
            for group in choice.drop:
                await self._drop(group, "dropped_stale")
            if choice.train:
                chosen = [ready[group] for group in sorted(choice.train)]
                await self._gate.check(learner, chosen, self._held)
                if not any(self._gate.refusal(group) for group in chosen):
                    break
                continue  # an engine was found wrong meanwhile
            if choice.drop:
                await self._admit(schedule)
            closing = selection.to_close(list(lineage.owed()), ready)
            if sum([await services.bus.cancel(self._job, self._claim.token, group) for group in closing]):
                continue
            await selection.explain(choice, lineage.step)
            await services.intake.progress(num_segments)
        await selection.is_over()
        numbers = [group.group for group in chosen]
        step = lineage.step + 1
        extra = {
            "version": self._held.version,
            "num_dispatched": lineage.num_dispatched,
            "dropped": self._dropped_since,
            "staleness": self._ages_of(chosen),
            "settings": self._tuning.logged(),
        }
        epoch = self._claim.epoch
        await self._disk.write(f"the batch of step {step}", services.batch_log.write, epoch, step, chosen, extra)
        self._num_dropped = {
            f"dropped/{name.removeprefix('dropped_')}": len(of) for name, of in self._dropped_since.items()
        }
        self._dropped_since = {}
        await services.bus.commit(self._job, self._claim.token, step, numbers)
        self._forget(numbers, are_trained=True)
        self._dropped_in_a_row.clear()
        return chosen

    async def _trainable(self, schedule: TaskSchedule) -> dict[int, Group]:
        """Complete groups; those that will never be trained are dropped, and others started in their place."""
        intake, owed = self._services.intake, set(self._lineage.owed())
        complete = await intake.complete(Split.TRAIN, among=owed)
        refused = [(number, "dropped_unreadable") for number in await intake.unreadable(among=owed)]
        while intake.refusals:
            await self._alert("segment_refused", ": ".join(intake.refusals.popitem()))
        refused += [
            (group.group, reason)
            for group in complete
            if (reason := refusal(group, self._spec) or self._gate.refusal(group))
        ]
        for number, reason in refused:
            await self._drop(number, reason)
        if refused:
            await self._admit(schedule)
        gone = {number for number, _ in refused}
        return {group.group: group for group in complete if group.group not in gone}

    async def _drop(self, group: int, reason: str) -> None:
        await self._services.bus.commit(self._job, self._claim.token, self._lineage.step + 1, [group], reason=reason)
        self._forget([group], are_trained=False)
        self._lineage.num_dropped += 1
        self._dropped_in_a_row[reason] += 1
        self._dropped_since.setdefault(reason, []).append(group)
        if self._dropped_in_a_row.total() >= MAX_BATCHES_DROPPED_IN_A_ROW * self._spec.groups_per_step:
            raise nothing_to_train(self._dropped_in_a_row)

    def _forget(self, groups: list[int], *, are_trained: bool) -> None:
        for group in groups:
            self._census.settle(group, self._spec.rollout.group_size, is_trained=are_trained)
        self._services.intake.forget(groups)
        self._lineage.settle(groups)
        for group in groups:
            self._dispatched_steps.pop(group, None)

    def _staleness_of(self, versions: NDArray[np.int32]) -> NDArray[np.int32]:
        current = Position(self._claim.epoch, self._lineage.step)
        return token_staleness(versions, self._positions, current, self._forks)

    def _ages_of(self, groups: list[Group]) -> dict[str, int]:
        """Of the versions in a batch, for whoever reads its log without our tables."""
        versions = sorted({one.version for group in groups for episode in group for one in episode.segments})
        ages = self._staleness_of(np.array(versions, dtype=np.int32))
        return {str(version): int(age) for version, age in zip(versions, ages, strict=True)}

    async def _admit(self, schedule: TaskSchedule) -> None:
        """Start as many groups as pacing allows, and no more than the job will train."""
        async with self._admitting:
            await self._admit_now(schedule)

    async def _admit_now(self, schedule: TaskSchedule) -> None:
        spec, lineage = self._spec, self._lineage
        allowed = groups_admissible(
            max_staleness=spec.rollout.max_staleness,
            groups_per_step=spec.groups_per_step,
            num_dispatched=lineage.num_dispatched,
            num_dropped=lineage.num_dropped,
            num_published=lineage.num_published,
        )
        if self.cancelled is not None:
            return
        still_needed = spec.steps * spec.groups_per_step + lineage.num_dropped - lineage.num_dispatched
        if not spec.rollout.max_staleness:
            await self._services.engines.wait_for(self._newest)
        for _ in range(min(allowed, still_needed)):
            try:
                await self._dispatch(schedule, lineage.num_dispatched, self._budget_bytes())
            except Full:
                break
            lineage.num_dispatched += 1

    def _budget_bytes(self) -> int | None:
        """A step's worth of groups is always admitted: with less the job would wait for ever."""
        num_open = sum(1 for _ in self._lineage.owed())
        return None if num_open < self._spec.groups_per_step else self._services.budget_bytes

    async def _dispatch(self, schedule: TaskSchedule, group: int, budget_bytes: int | None = None) -> None:
        task = schedule.task(group)
        limits = self._spec.episode_limits(task.environment)
        await self._services.bus.dispatch(
            self._job,
            self._claim.token,
            group,
            size=self._spec.rollout.group_size,
            split=Split.TRAIN,
            task_index=task.index,
            environment=task.environment,
            bytes_per_episode=limits.max_context_tokens * BYTES_PER_TOKEN,
            budget_bytes=budget_bytes,
        )
        self._dispatched_steps[group] = self._lineage.step

    async def _hold(self, learner: Learner) -> None:
        """Name what the learner holds now."""
        version = await self._services.store.next_version(self._job, self._claim.token)
        self._held = Held(version, f"{self._job}/{self._claim.epoch}/{version}")
        await self._gate.remember(learner, self._held)

    async def _publish(self, weights: Copy, version: int, step: int) -> None:
        services, claim = self._services, self._claim
        what = f"version {version}"
        manifest = await self._disk.write(what, services.weights.write, version, claim.epoch, step, weights.write)
        # Known here before anyone can sample from it.
        self._positions[version] = Position(claim.epoch, step)
        self._newest = manifest
        await self._disk.wait_for_room(what, lambda: services.store.publish_version(self._job, claim.token, manifest))
        await services.store.update_progress(self._job, claim.token, step, version)
        await services.engines.publish(manifest)
        newest = sorted(self._positions)[-self._spec.checkpoints.keep_versions :]
        await asyncio.to_thread(services.weights.collect, {*newest, *services.engines.versions_in_use()})
