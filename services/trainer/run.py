"""Trains one job, from its first version to its last step.

Rule: a batch goes into the batch log before its commit, and is committed before training, so groups taken from the
queue are always recoverable. Every write to Redis carries the claim token; after losing the claim, writes raise
``Fenced`` and the run stops. ``run_phase`` decides when and how a run ends.

    wait for groups -> batch log -> commit -> update -> again
                                                   `-> publish weights -> admit new groups -> report
                                                   `-> (checkpoint)

A trainer that takes over a job resumes from the newest checkpoint and replays the steps logged after it, so that
nothing is sampled twice. It resamples only steps whose logs are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from gspo_core.learner import check_state, computing
from gspo_core.live_settings import tuned
from gspo_core.log.batches import BatchExtra, LoggedBatch
from gspo_core.log.lineage import Lineage
from gspo_core.log.sequences import TrainBatch
from gspo_core.log.steps import logged_sequences, settle, train_on
from gspo_core.objective import Alarm
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from gspo_core.types import Split
from gspo_core.versions import StepReport
from services.files.batch_archive import LogHistory, archived
from services.files.batch_log import removable_batches
from services.files.trained_log import TrainedLog
from services.process.cancelling import first_to_end
from services.state.store import Claim, JobRecord, StatusReason
from services.trainer.fall_guard import FallGuard
from services.trainer.fleet.parity import LabelledWeights, ParityGate
from services.trainer.groups.admission import Admission
from services.trainer.groups.batch_selection import BatchSelection
from services.trainer.groups.evaluation import Evaluator
from services.trainer.groups.proven_environments import ProvenEnvironments
from services.trainer.groups.run_context import RunContext, Services
from services.trainer.groups.tasks import TaskSchedule
from services.trainer.past.background_writer import BackgroundWriter
from services.trainer.past.origin import fed_batches, seed
from services.trainer.past.recovery import Replayed, recover, version_of
from services.trainer.ranks.learner import AnyLearner, Written
from services.trainer.stopping import StopConditions
from services.trainer.telling.blockers import Blockers
from services.trainer.telling.environments import DescribedEnvironments
from services.trainer.telling.failure import JobFailure
from services.trainer.telling.players import kind_of
from services.trainer.telling.reports import Reports, disk_metrics
from services.trainer.telling.run_phase import Phase
from services.trainer.telling.unhealthy_environments import UnhealthyEnvironments
from services.trainer.telling.watchdog import Watchdog


class JobRun:
    """The step loop of one claimed job."""

    def __init__(self, claim: Claim, spec: JobSpec, services: Services, make_learner: Callable[[], AnyLearner]) -> None:
        self._context = context = RunContext(claim, spec, services)
        self.phase = context.phase
        self._services = services
        self._lineage, self._staleness, self._disk = context.lineage, context.ages, context.disk
        self._make_learner = make_learner
        self._num_unpublished = 0
        """Groups trained into the learner's weights but not yet published."""
        self._publishing, self._saving = BackgroundWriter(), BackgroundWriter()
        self._reports = Reports(services.store, claim, services.job_dir, services.listeners)
        self._gate = ParityGate(services.engines, spec.rollout.max_engine_k3)
        self._stopping = StopConditions(services.store, claim.job_id)
        self._ending: StatusReason | None = None
        """The stop condition that ended the run."""
        self._saved_step = -1
        """The step of the newest checkpoint written by this process."""
        self._guard = FallGuard(context)
        self._admission = Admission(context)
        self._batches = BatchSelection(context, self._admission, self._gate, self._stops_waiting)
        self._proven = ProvenEnvironments(services.intake)
        ill = UnhealthyEnvironments(spec, self._proven.found, lambda: self._lineage.step > 0)
        self._blockers = Blockers(services.store, claim, services.engines, ill, kind_of(spec))

    @property
    def _claim(self) -> Claim:
        return self._context.claim

    @property
    def _job(self) -> str:
        return self._context.job

    @property
    def _spec(self) -> JobSpec:
        """The specification with current live settings."""
        return self._context.spec

    async def run(self) -> None:
        """Run until ``phase`` records the end: the last weights are published and evaluated, or the run was cut short
        and closed cleanly."""
        try:
            engines, intake = self._services.engines, self._services.intake
            watchdog = Watchdog(self._signs, lambda: self._spec.watchdog, self._warn, self._excuse)
            of_episodes = (engines.run, intake.run, self._gate.run, self._blockers.run, self._context.late.run)
            beside = () if self._spec.recorded is not None else of_episodes  # it needs none of what they look after
            await first_to_end(self._train(), watchdog.run(), *(start() for start in beside))
            self.phase.finish(self._ending)
        finally:
            await self._services.engines.release()

    def _signs(self) -> Hashable | None:
        """Return a value that changes as the job progresses, or None while no progress is expected."""
        return (self._lineage.step, self._services.intake.num_segments) if self.phase.moves else None

    async def _excuse(self) -> str:
        """Return why no other trainer could make progress either, or an empty string."""
        return self._blockers.excuse or self._context.late.excuse

    async def _warn(self, message: str) -> None:
        await self._reports.stands_still(self._lineage.step, message)

    async def _train(self) -> None:
        services, status = self._services, self._services.status
        await status.begin()
        await status.explain("loading_model", f"loading {self._spec.model}")
        # Before the learner: steps that are trained again need the memory of another one.
        await self._disk.write("what it is forked from", seed, services.job_dir, self._spec, services.checkpoints)
        learner = await asyncio.to_thread(self._make_learner)
        try:
            await self._train_with(learner)
        finally:
            for behind in (self._publishing, self._saving):
                await behind.end()
            learner.close()

    async def _train_with(self, learner: AnyLearner) -> None:
        services, spec, status = self._services, self._spec, self._services.status
        await self._resume(learner)
        if self.phase.is_cut_short:  # only the trained state had to be saved
            return
        self.phase.enter(Phase.WAITING)
        self._staleness.recall(await services.store.versions.all(self._job))
        await self._publish(
            await asyncio.to_thread(learner.copy_weights), self._context.held.version, self._lineage.step
        )
        if spec.recorded is not None:
            await self._train_recorded(learner, spec)
            return
        if await self._is_fed(learner, spec):
            return
        described = DescribedEnvironments(services.store, self._job, status, kind=kind_of(spec))
        num_tasks = await described.num_tasks(len(spec.environments))
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
            services.clock,
        )
        self._proven.schedule, self._proven.held_out = self._admission.schedule, evaluator.tasks
        try:
            await self._loop(learner, evaluator)
        finally:
            evaluator.cancel()

    async def _is_fed(self, learner: AnyLearner, submitted: JobSpec) -> bool:
        """Train a fork on the batches that it was brought; return whether that was all that it had to do."""
        batches = fed_batches(self._services.job_dir, submitted, self._lineage.step)
        if (first := next(batches, None)) is None:
            return False
        if not await self._ends_on(learner, chain([first], batches)):
            await self._publishing.finish()  # admission counts what is published, and admits after each later step only
            self.phase.enter(Phase.WAITING)
            return False
        await self._close(learner)
        return True

    async def _train_recorded(self, learner: AnyLearner, submitted: JobSpec) -> None:
        """Take the steps of a job that is trained on recorded episodes and on nothing else."""
        await self._ends_on(learner, fed_batches(self._services.job_dir, submitted, self._lineage.step))
        await self._close(learner)

    async def _ends_on(self, learner: AnyLearner, batches: Iterator[LoggedBatch]) -> bool:
        """Train on the batches of another job; return whether the run is over before it needs any other."""
        await self._services.status.started()
        self.phase.enter(Phase.STEPPING)
        while not await self._is_over(learner, is_fed=True):
            if await self._hold():
                continue
            if (batch := await asyncio.to_thread(next, batches, None)) is None:
                return self.phase.is_cut_short
            await self._step_on(learner, batch)
            if self._spec.has_checkpoint(self._lineage.step):
                await self._checkpoint(learner)
        return True

    async def _step_on(self, learner: AnyLearner, logged: LoggedBatch) -> None:
        """Take a step on a batch of another job: logged as the job's own, with its own settings."""
        epoch, log, tuning, clock = (
            self._claim.epoch,
            self._services.batch_log,
            self._context.tuning,
            self._services.clock,
        )
        started = clock()
        made = await asyncio.to_thread(logged_sequences, logged, self._spec.objective.advantage)
        if not made.sequences:
            # Before it is logged: such a log could never be trained again.
            raise JobFailure(
                "all_rewards_equal",
                f"nothing of the batch that it is fed for step {logged.step} is trained: the rewards of each group are "
                "equal, and objective.advantage.zero_variance is drop",
            )
        extra: BatchExtra = {**logged.extra, "settings": tuning.logged(), "computed": computing(self._spec)}
        own = replace(logged, epoch=epoch, extra=extra)
        await self._disk.write(f"the batch of step {own.step}", log.write, epoch, own.step, own.groups, extra)
        batch, metrics = await asyncio.to_thread(train_on, learner, own, self._spec)
        settle(self._lineage, own)
        self._lineage.num_published -= len(logged.groups)  # counted when they are
        metrics |= {"time/train_s": clock() - started, "settings/version": float(tuning.version)}
        await self._hand_on(learner, batch, metrics, len(logged.groups))

    async def _hand_on(
        self, learner: AnyLearner, batch: TrainBatch, metrics: Mapping[str, float], num_groups: int
    ) -> None:
        """Publish and report the step just trained, while the next one is."""
        self._num_unpublished += num_groups
        await self._log_trained(batch, learner.trained_logprobs)
        await self._name_weights(learner)
        weights = await asyncio.to_thread(learner.copy_weights)
        await self._publishing.finish()
        self._stopping.note(self._lineage.step, metrics)
        report = StepReport(self._lineage.step, self._context.held.version, self._claim.epoch, metrics)
        await self._publishing.start(self._publish_step(weights, report, num_groups, learner.alarms, admits=False))

    async def _loop(self, learner: AnyLearner, evaluator: Evaluator) -> None:
        services, status = self._services, self._services.status
        num_engines = self._spec.resources.num_engines
        await self._batches.commit_again()
        await services.engines.wait_for(self._context.newest, num_engines=num_engines, explain=status.explain)
        await status.started()
        if not await self._is_over(learner):
            await evaluator.play(self._lineage.step, self._context.newest.version)
        num_trained = self._lineage.num_published + self._num_unpublished
        self._admission.num_beyond = num_trained - self._lineage.step * self._spec.groups_per_step
        await self._admission.dispatch_again()
        await self._admission.admit()
        self.phase.enter(Phase.STEPPING)
        await self._take_steps(learner, evaluator)
        await self._close(learner)
        if self.phase.is_cut_short:
            return
        await services.engines.wait_for(self._context.newest)
        await evaluator.finish()
        await evaluator.play_last(self._lineage.step, self._context.newest.version)

    async def _close(self, learner: AnyLearner) -> None:
        self.phase.enter(Phase.CLOSING)
        await self._publishing.finish()
        if self._saved_step < self._lineage.step and self.phase.saves:
            await self._checkpoint(learner)
        await self._saving.finish()

    async def _take_steps(self, learner: AnyLearner, evaluator: Evaluator) -> None:
        while not await self._is_over(learner):
            if not await self._hold() and await self._step(learner):
                await self._after_step(learner, evaluator)
            if self._guard.has_seen_a_fall:
                await self._publishing.finish()  # it starts groups, and says how far the job is
                await self._guard.act()

    async def _hold(self) -> bool:
        """Wait while the user keeps the job paused; return False if it was not paused."""
        self.phase.enter(Phase.HELD)
        was_held = await self._services.status.obey_pause(lambda: self.phase.is_leaving)
        self.phase.enter(Phase.STEPPING)
        return was_held

    async def _is_over(self, learner: AnyLearner, *, is_fed: bool = False) -> bool:
        """Apply the user's changes at a step boundary and return whether the job ends here. ``is_fed``: what its parent
        had under way is not, so no step is owed to it."""
        job = await self._services.store.jobs.get(self._job)
        await self._apply_settings(learner, job)
        if self.phase.has_enough(fills_step=self._context.fills_step and not is_fed):
            return True
        if self.phase.manner is not None:
            await self._services.status.winds_up()
        self._ending = await self._stopping.reached(job, self._spec, self._lineage.step)
        return self._ending is not None

    async def _apply_settings(self, learner: AnyLearner, job: JobRecord) -> None:
        tuning = self._context.tuning
        if tuning.version == job.settings_version:
            return
        await self._publishing.finish()  # a new stop condition reads reported metrics
        if await asyncio.to_thread(tuning.apply, learner, job.settings_version, job.settings):
            data = {"step": self._lineage.step + 1, **tuning.logged()}
            await self._services.store.events.add(self._job, "settings.applied", data, token=self._claim.token)

    def _stops_waiting(self) -> bool:
        """Return whether to stop waiting for a batch. Raises errors from background work."""
        self._publishing.check()
        self._saving.check()
        return self.phase.stops_waiting(fills_step=self._context.fills_step)

    async def _resume(self, learner: AnyLearner) -> None:
        """Resume where earlier epochs stopped, and record where this one forks off."""
        services, epoch = self._services, self._claim.epoch
        job = await services.store.jobs.get(self._job)
        if job.went_back is not None:
            await self._disk.write("where it goes back to", services.checkpoints.go_back, *job.went_back)
        saving = tuned(self._spec, job.settings)  # replay itself goes by the settings of each step
        loop = asyncio.get_running_loop()

        def tell(replayed: Replayed) -> None:
            asyncio.run_coroutine_threadsafe(self._report_missed(replayed), loop).result()

        found = await asyncio.to_thread(
            recover,
            learner,
            services.checkpoints,
            services.batch_log,
            epoch,
            self._context.tuning,
            checkpoint_every=saving.checkpoint_every,
            is_for_good=saving.checkpoints.is_for_good,
            before_saving=tell,
        )
        if self._spec.parent is not None and found.reached.step < self._spec.parent.step:
            raise JobFailure("data_damaged", "none of its checkpoints is intact, nor the one that it was forked with")
        self._lineage.become(found.lineage)
        await self._guard.recall()  # before a checkpoint is saved, for which older ones are removed
        self._saved_step = found.saved.step or -1
        await self._disk.write("the record of this attempt", services.checkpoints.begin_epoch, epoch, found.reached)
        for store in (services.batch_log, services.weights, TrainedLog(services.job_dir)):
            await asyncio.to_thread(store.remove_unfinished, epoch)
        self._staleness.forks = await asyncio.to_thread(services.checkpoints.forks)
        for remark in found.remarks:
            await self._context.alert(remark.kind, remark.message)
        await self._name_weights(learner)
        await self._report_missed(found.replayed, self._context.held.version)
        # Before the next step, for what is saved and published until then: they say how much is kept.
        await self._apply_settings(learner, await services.store.jobs.get(self._job))
        if found.reached != found.saved:
            # Otherwise the next trainer would replay all of it again, and the last step would never be saved.
            await self._checkpoint(learner)
            await self._saving.finish()

    async def _report_missed(self, replayed: Replayed, held: int | None = None) -> None:
        """A trainer that ends between a step and its report leaves a gap in the curve; the log of the step fills it.
        ``held``: the version of the weights after them."""
        if not replayed:
            return
        versions = await self._services.store.versions.all(self._job)
        newest = max((one.version for one in versions), default=0) if held is None else held
        reports = [StepReport(at.step, version_of(at, versions, newest), at.epoch, metrics) for at, metrics in replayed]
        await self._disk.wait_for_room("the metrics of earlier steps", lambda: self._reports.missed(reports))

    async def _step(self, learner: AnyLearner) -> bool:
        """Take one step; return False if something else came before a batch was ready."""
        clock = self._services.clock
        started = clock()
        logged = await self._batches.batch(learner, self._context.held)
        if logged is None:
            return False
        taken = clock()
        chosen = self._batches.take_metrics()
        batch, metrics = await asyncio.to_thread(train_on, learner, logged, self._spec)
        metrics |= chosen
        trained = clock()
        self._lineage.step += 1
        self._num_unpublished += len(logged.groups)
        await self._log_trained(batch, learner.trained_logprobs)
        await self._name_weights(learner)
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
            "settings/version": float(self._context.tuning.version),
            "throughput/tokens_per_s": metrics["tokens/trained"] / (ended - started),
        }
        self._stopping.note(self._lineage.step, metrics)
        report = StepReport(self._lineage.step, self._context.held.version, self._claim.epoch, metrics)
        await self._publishing.start(self._publish_step(weights, report, len(logged.groups), learner.alarms))
        return True

    async def _log_trained(self, batch: TrainBatch, logprobs: Sequence[NDArray[np.float32]]) -> None:
        step, found = self._lineage.step, batch.by_episode(logprobs)
        log = TrainedLog(self._services.job_dir)
        await self._disk.write(f"the training log of step {step}", log.write, self._claim.epoch, step, found)

    async def _publish_step(
        self, weights: Written, report: StepReport, num_groups: int, alarms: Sequence[Alarm], *, admits: bool = True
    ) -> None:
        """Publish and report a trained step while the next one trains. ``admits``: groups may be started."""
        services, started = self._services, self._services.clock()
        await self._publish(weights, report.version, report.step)
        self._lineage.num_published += num_groups
        self._num_unpublished -= num_groups
        if admits:
            await self._admission.admit()
        metrics = {
            **report.metrics,
            "time/publish_s": services.clock() - started,
            "time/engine_paused_s": services.engines.last_switch_s(),
            **services.engines.metrics(),
            **self._gate.metrics(),
            **await asyncio.to_thread(disk_metrics, services.job_dir.path, self._context.newest),
        }
        report = replace(report, metrics=metrics)
        await self._disk.wait_for_room(f"the metrics of step {report.step}", lambda: self._reports.step(report, alarms))

    async def _report_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {f"eval/{name}": value for name, value in metrics.items()}
        self._stopping.note(step, values)
        self._guard.note(step, values)
        what = f"the evaluation of step {step}"
        await self._disk.wait_for_room(what, lambda: self._reports.evaluation(step, values))

    async def _after_step(self, learner: AnyLearner, evaluator: Evaluator) -> None:
        step, spec = self._lineage.step, self._spec
        is_evaluated = spec.evaluation is not None and step % spec.evaluation.every == 0 and step < spec.steps
        if is_evaluated:
            await self._publishing.finish()
            is_evaluated = await evaluator.start(step, self._context.newest.version)
        if is_evaluated:  # its result comes later: nothing was awaited since
            self._guard.expect(step)
        if spec.has_checkpoint(step) or (is_evaluated and self._guard.keeps_evaluated):
            await self._checkpoint(learner)

    async def _checkpoint(self, learner: AnyLearner) -> None:
        """Save the current learner state in the background."""
        position, lineage = Position(self._claim.epoch, self._lineage.step), self._lineage
        # A trainer that resumes from it publishes these weights first.
        lineage = replace(
            lineage, settled=set(lineage.settled), num_published=lineage.num_published + self._num_unpublished
        )
        self._saved_step = position.step
        state = await asyncio.to_thread(learner.copy_state)
        await self._saving.start(self._save(position, lineage, state))

    async def _save(self, position: Position, lineage: Lineage, state: Written) -> None:
        # A step that a checkpoint holds is not trained again, so it could not be reported later.
        await self._publishing.succeeded()
        checkpoints = self._services.checkpoints
        await self._disk.write(
            f"the checkpoint of step {position.step}", checkpoints.write, position, lineage, state.write
        )
        keep = self._spec.checkpoints.keep
        step = await asyncio.to_thread(checkpoints.collect, keep, check_state, self._is_spared)
        await asyncio.to_thread(self._collect_batches, step)
        data = {"step": position.step, "epoch": position.epoch}
        await self._services.store.events.add(self._job, "checkpoint", data, token=self._claim.token)

    def _is_spared(self, position: Position) -> bool:
        """Whether a checkpoint stays, however many are newer."""
        kept = self._spec.checkpoints
        # Where a fork began: on the other side of it is its parent's history, which may be long.
        is_beginning = kept.keep_every is not None and position.epoch == 0
        return kept.is_for_good(position.step) or is_beginning or self._guard.is_spared(position)

    def _collect_batches(self, after_step: int) -> None:
        log, kept = self._services.batch_log, self._spec.checkpoints
        # List once, so that the log of a step written meanwhile is not included.
        gone = removable_batches(log.written(), after_step, kept.keep_batches)
        TrainedLog(self._services.job_dir).remove(gone)
        if kept.archive == "all":
            begun_after = self._spec.parent.step if self._spec.parent is not None else 0
            past = LogHistory(self._claim.epoch, self._staleness.forks, begun_after)
            gone = archived(self._services.job_dir, gone, past, kept.archive_bytes)
        log.remove(gone)

    async def _name_weights(self, learner: AnyLearner) -> None:
        """Give the current learner weights a version and a label."""
        version = await self._services.store.versions.next(self._job, self._claim.token)
        self._context.held = LabelledWeights(version, f"{self._job}/{self._claim.epoch}/{version}")
        await self._gate.remember(learner, self._context.held)

    async def _publish(self, weights: Written, version: int, step: int) -> None:
        services, claim = self._services, self._claim
        what = f"version {version}"
        manifest = await self._disk.write(what, services.weights.write, version, claim.epoch, step, weights.write)
        # Register the version before any engine can sample from it.
        self._staleness.add(version, step)
        self._context.newest = manifest
        await self._disk.wait_for_room(what, lambda: services.store.versions.publish(self._job, claim.token, manifest))
        await services.store.jobs.update_progress(self._job, claim.token, step, version)
        await services.engines.publish(manifest)
        newest = self._staleness.newest(self._spec.checkpoints.keep_versions)
        await asyncio.to_thread(services.weights.collect, {*newest, *services.engines.versions_in_use()})
