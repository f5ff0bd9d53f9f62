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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gspo_core.learner import check_state
from gspo_core.log.lineage import Lineage
from gspo_core.objective import Alarm
from gspo_core.spec import JobSpec
from gspo_core.staleness import Position
from gspo_core.types import Split, StepReport, WeightsManifest
from services.files.batch_log import BatchLog, spent
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.files.trained_log import TrainedLog
from services.files.weights import WeightStore
from services.process.first_to_end import first_to_end
from services.state.queue import Bus
from services.state.store import CancelManner, Claim, StatusReason, Store
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.parity import Held, ParityGate
from services.trainer.groups.admission import Admission
from services.trainer.groups.batch_selection import BatchSelection
from services.trainer.groups.evaluation import Evaluator
from services.trainer.groups.intake import Intake
from services.trainer.groups.sequences import TrainBatch, group_metrics, staleness_metrics, train_batch
from services.trainer.groups.staleness import StalenessTable
from services.trainer.groups.step_settings import Tuning
from services.trainer.groups.tasks import TaskSchedule
from services.trainer.past.background_writer import BackgroundWriter
from services.trainer.past.recovery import recover
from services.trainer.ranks.learner import AnyLearner, Written
from services.trainer.stopping import StopConditions
from services.trainer.telling.disk_waits import DiskWaits
from services.trainer.telling.environments import DescribedEnvironments
from services.trainer.telling.reports import Listener, Reports, disk_metrics
from services.trainer.telling.status import JobStatusBoard
from services.trainer.telling.watchdog import Watchdog


@dataclass(frozen=True)
class Services:
    """What a run needs from outside."""

    bus: Bus
    store: Store
    status: JobStatusBoard
    engines: EnginePool
    intake: Intake
    weights: WeightStore
    batch_log: BatchLog
    checkpoints: CheckpointStore
    job_dir: JobDir
    budget_bytes: int | None = None
    """What the job may hold in Redis."""
    clock: Callable[[], float] = time.monotonic
    listeners: Sequence[Listener] = ()
    """Who is told every number, besides the store and the files of the job."""


class PauseWanted(Exception):
    """The job is to pause before a batch is there."""


class WoundUp(Exception):
    """A cancelled job has nothing more to train, or this trainer is to train no more of it."""


class JobRun:
    """The step loop of one claimed job."""

    ending: StatusReason | None = None
    """Why it was over, once ``run`` has returned."""
    cancelled: CancelManner | None = None
    """How it winds up, since its user has cancelled it."""
    is_leaving = False
    """Its trainer was asked to hand it over."""
    has_left = False
    """It was saved at a step boundary, for another trainer."""
    is_pause_wanted = False
    """As far as its worker has seen; while a batch is waited for the job pauses at once."""
    _is_stepping = False
    """In the loop of steps, where it can end in order."""
    _is_recovering = True
    """On the way to where the trainers before have come."""
    _is_held = False
    """Its user has paused it."""

    def __init__(self, claim: Claim, spec: JobSpec, services: Services, make_learner: Callable[[], AnyLearner]) -> None:
        self._claim = claim
        self._tuning = Tuning(spec)
        self._services = services
        self._make_learner = make_learner
        self._lineage = Lineage()
        self._ages = StalenessTable(claim.epoch, self._lineage)
        self._newest: WeightsManifest
        self._held: Held
        """What the learner's weights are, or will be, published as."""
        self._num_unpublished = 0
        """Groups inside the learner's weights and in none that are published."""
        self._disk = DiskWaits(self._alert)
        self._publishing, self._saving = BackgroundWriter(), BackgroundWriter()
        self._reports = Reports(services.store, claim, services.job_dir, services.listeners)
        self._gate = ParityGate(services.engines, spec.rollout.max_engine_k3)
        self._stopping = StopConditions(services.store, claim.job_id)
        self._saved_step = -1
        """Of the newest checkpoint that this process has written."""
        self._admission = Admission(
            services.bus,
            claim,
            self._tuning,
            self._lineage,
            budget_bytes=services.budget_bytes,
            is_over=lambda: self.cancelled is not None,
            engines_hold_newest=lambda: services.engines.wait_for(self._newest),
            alert=self._alert,
        )
        self._taking = BatchSelection(
            claim,
            self._tuning,
            self._lineage,
            self._ages,
            self._admission,
            self._gate,
            self._disk,
            bus=services.bus,
            intake=services.intake,
            batch_log=services.batch_log,
            status=services.status,
            clock=services.clock,
            look=self._look_around,
            alert=self._alert,
        )

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
        owes_a_checkpoint = manner.saves and self._is_recovering and self._claim.attempt > 1
        if manner is CancelManner.NOW or not (self._is_stepping or self.cancelled or owes_a_checkpoint):
            return False
        self.cancelled = manner
        return True

    def leave(self) -> bool:
        """Ask it to end after the step that it is in, saved, for another trainer. False: nothing is lost if it ends
        where it is."""
        self.is_leaving = self._is_stepping
        return self.is_leaving

    def _signs(self) -> Hashable | None:
        """What changes while the job moves; None while it is not meant to."""
        return (
            (self._lineage.step, self._services.intake.num_segments)
            if self._is_stepping and not self._is_held
            else None
        )

    async def _excuse(self) -> str:
        """Why nobody else could go on either."""
        if not await self._services.store.fleet.workers():
            return "no rollout worker is there"
        return "" if self._services.engines.ready() else "no engine is ready"

    async def _warn(self, message: str) -> None:
        await self._reports.stands_still(self._lineage.step, message)

    async def _alert(self, kind: str, message: str) -> None:
        data = {"step": self._lineage.step, "kind": kind, "message": message}
        await self._services.store.events.add(self._job, "alert", data, token=self._claim.token)

    async def _train(self) -> None:
        status = self._services.status
        await status.begin()
        await status.explain("loading_model", f"loading {self._spec.model}")
        learner = await asyncio.to_thread(self._make_learner)
        try:
            await self._train_with(learner)
        finally:
            learner.close()

    async def _train_with(self, learner: AnyLearner) -> None:
        services, spec, status = self._services, self._spec, self._services.status
        await self._resume(learner)
        self._is_recovering = False
        if self.cancelled is not None:  # what was trained is to be kept, and nothing else is wanted
            return
        self._ages.recall(await services.store.versions.all(self._job))
        await self._hold(learner)
        await self._publish(await asyncio.to_thread(learner.copy_weights), self._held.version, self._lineage.step)
        num_tasks = await DescribedEnvironments(services.store, self._job, status).num_tasks(len(spec.environments))
        weights = [one.weight for one in spec.environments]
        self._admission.schedule = TaskSchedule(spec.seed, num_tasks[Split.TRAIN], weights)
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
            await self._loop(learner, evaluator)
        finally:
            evaluator.cancel()
            for behind in (self._publishing, self._saving):
                await behind.end()

    async def _loop(self, learner: AnyLearner, evaluator: Evaluator) -> None:
        services, status = self._services, self._services.status
        num_engines = self._spec.resources.num_engines
        await self._taking.commit_again()
        await services.engines.wait_for(self._newest, num_engines=num_engines, explain=status.explain)
        await status.started()
        if not await self._is_over(learner):
            await evaluator.play(self._lineage.step, self._newest.version)
        await self._admission.dispatch_again()
        await self._admission.admit()
        self._is_stepping = True
        with contextlib.suppress(WoundUp):
            await self._take_steps(learner, evaluator)
        self._is_stepping = False
        await self._publishing.finish()
        if self._saved_step < self._lineage.step and (self.cancelled is None or self.has_left or self.cancelled.saves):
            await self._checkpoint(learner)
        await self._saving.finish()
        if self.cancelled is not None or self.has_left:
            return
        await services.engines.wait_for(self._newest)
        await evaluator.finish()
        await evaluator.play(self._lineage.step, self._newest.version)

    async def _take_steps(self, learner: AnyLearner, evaluator: Evaluator) -> None:
        while not await self._is_over(learner):
            self._is_held = True
            was_held = await self._services.status.obey_pause(lambda: self.is_leaving)
            self._is_held = False
            if was_held:
                continue
            with contextlib.suppress(PauseWanted):
                await self._step(learner)
                await self._after_step(learner, evaluator)

    async def _is_over(self, learner: AnyLearner) -> bool:
        """At a step boundary: what the user has changed holds from here on, and may end the job. Raises WoundUp."""
        job = await self._services.store.jobs.get(self._job)
        if self._tuning.version != job.settings_version:
            await self._publishing.finish()  # a condition that is new looks at what has been reported
        if self._tuning.version != job.settings_version and await asyncio.to_thread(
            self._tuning.apply, learner, job.settings_version, job.settings
        ):
            data = {"step": self._lineage.step + 1, **self._tuning.logged()}
            await self._services.store.events.add(self._job, "settings.applied", data, token=self._claim.token)
        self._leave_if_wound_up()
        if self.cancelled is not None:
            await self._services.status.winds_up()
        self.ending = await self._stopping.reached(job, self._spec, self._lineage.step)
        return self.ending is not None

    def _look_around(self) -> None:
        """While a batch is waited for."""
        self._leave_if_wound_up()
        self._publishing.check()
        self._saving.check()
        if self.is_pause_wanted and self.cancelled is None:
            raise PauseWanted

    def _leave_if_wound_up(self) -> None:
        if self.is_leaving:
            self.has_left = True
            raise WoundUp
        if self.cancelled is None:
            return
        num_open = sum(1 for _ in self._lineage.owed())
        if not self.cancelled.drains or num_open < self._spec.groups_per_step:
            raise WoundUp

    async def _resume(self, learner: AnyLearner) -> None:
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
        self._lineage.become(found.lineage)
        self._saved_step = found.saved.step or -1
        await self._disk.write("the record of this attempt", services.checkpoints.begin_epoch, epoch, found.reached)
        for store in (services.batch_log, services.weights):
            await asyncio.to_thread(store.remove_unfinished, epoch)
        self._ages.forks = await asyncio.to_thread(services.checkpoints.forks)
        for remark in found.remarks:
            await self._alert(remark.kind, remark.message)
        if found.reached != found.saved:
            # Else whoever is lost after us would train all of it once more, and the last step would never be saved.
            await self._checkpoint(learner)
            await self._saving.finish()

    async def _step(self, learner: AnyLearner) -> None:
        clock = self._services.clock
        started = clock()
        groups = await self._taking.batch(learner, self._held)
        taken = clock()
        batch = train_batch(groups, self._ages.of, self._spec.objective.advantage)
        metrics = batch.metrics | group_metrics(groups)
        metrics |= staleness_metrics(batch.sequences, self._spec.rollout.staleness_cap)
        metrics |= self._taking.take_metrics()
        metrics |= await asyncio.to_thread(learner.step, batch.sequences)
        trained = clock()
        self._lineage.step += 1
        self._num_unpublished += len(groups)
        await self._log_trained(batch, learner.trained_logprobs)
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
            "settings/version": float(self._tuning.version),
            "throughput/tokens_per_s": metrics["tokens/trained"] / (ended - started),
        }
        self._stopping.note(self._lineage.step, metrics)
        report = StepReport(self._lineage.step, self._held.version, self._claim.epoch, metrics)
        await self._publishing.start(self._publish_step(weights, report, len(groups), learner.alarms))

    async def _log_trained(self, batch: TrainBatch, logprobs: Sequence[NDArray[np.float32]]) -> None:
        step, found = self._lineage.step, batch.by_episode(logprobs)
        log = TrainedLog(self._services.job_dir)
        await self._disk.write(f"what was trained in step {step}", log.write, self._claim.epoch, step, found)

    async def _publish_step(
        self, weights: Written, report: StepReport, num_groups: int, alarms: Sequence[Alarm]
    ) -> None:
        """What becomes of a step that was trained; the next one is trained meanwhile."""
        services, started = self._services, self._services.clock()
        await self._publish(weights, report.version, report.step)
        self._lineage.num_published += num_groups
        self._num_unpublished -= num_groups
        await self._admission.admit()
        metrics = {
            **report.metrics,
            "time/publish_s": services.clock() - started,
            "time/engine_paused_s": services.engines.last_switch_s(),
            **services.engines.metrics(),
            **self._gate.metrics(),
            **await asyncio.to_thread(disk_metrics, services.job_dir.path, self._newest),
        }
        report = replace(report, metrics=metrics)
        await self._disk.wait_for_room(f"the metrics of step {report.step}", lambda: self._reports.step(report, alarms))

    async def _report_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {f"eval/{name}": value for name, value in metrics.items()}
        self._stopping.note(step, values)
        what = f"the evaluation of step {step}"
        await self._disk.wait_for_room(what, lambda: self._reports.evaluation(step, values))

    async def _after_step(self, learner: AnyLearner, evaluator: Evaluator) -> None:
        step, spec = self._lineage.step, self._spec
        if spec.evaluation and step % spec.evaluation.every == 0 and step < spec.steps:
            await self._publishing.finish()
            await evaluator.start(step, self._newest.version)
        if step % spec.checkpoint_every == 0:
            await self._checkpoint(learner)

    async def _checkpoint(self, learner: AnyLearner) -> None:
        """Save what the learner holds now, while it goes on."""
        position, lineage = Position(self._claim.epoch, self._lineage.step), self._lineage
        # Whoever goes on from it publishes these weights first.
        lineage = replace(
            lineage, settled=set(lineage.settled), num_published=lineage.num_published + self._num_unpublished
        )
        self._saved_step = position.step
        state = await asyncio.to_thread(learner.copy_state)
        await self._saving.start(self._save(position, lineage, state))

    async def _save(self, position: Position, lineage: Lineage, state: Written) -> None:
        checkpoints = self._services.checkpoints
        await self._disk.write(
            f"the checkpoint of step {position.step}", checkpoints.write, position, lineage, state.write
        )
        step = await asyncio.to_thread(checkpoints.collect, self._spec.checkpoints.keep, check_state)
        await asyncio.to_thread(self._collect_batches, step)
        data = {"step": position.step, "epoch": position.epoch}
        await self._services.store.events.add(self._job, "checkpoint", data, token=self._claim.token)

    def _collect_batches(self, after_step: int) -> None:
        log = self._services.batch_log
        # Listed once: the log of a step that is written meanwhile is not among them.
        gone = spent(log.steps(), after_step, self._spec.checkpoints.keep_batches)
        TrainedLog(self._services.job_dir).remove(gone)
        log.remove(gone)

    async def _hold(self, learner: AnyLearner) -> None:
        """Name what the learner holds now."""
        version = await self._services.store.versions.next(self._job, self._claim.token)
        self._held = Held(version, f"{self._job}/{self._claim.epoch}/{version}")
        await self._gate.remember(learner, self._held)

    async def _publish(self, weights: Written, version: int, step: int) -> None:
        services, claim = self._services, self._claim
        what = f"version {version}"
        manifest = await self._disk.write(what, services.weights.write, version, claim.epoch, step, weights.write)
        # Known here before anyone can sample from it.
        self._ages.add(version, step)
        self._newest = manifest
        await self._disk.wait_for_room(what, lambda: services.store.versions.publish(self._job, claim.token, manifest))
        await services.store.jobs.update_progress(self._job, claim.token, step, version)
        await services.engines.publish(manifest)
        newest = self._ages.newest(self._spec.checkpoints.keep_versions)
        await asyncio.to_thread(services.weights.collect, {*newest, *services.engines.versions_in_use()})
