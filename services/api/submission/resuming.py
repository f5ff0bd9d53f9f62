"""Going on with a job that is over, as itself: from where it ended or from an earlier step, perhaps for longer.

Rule: what is asked for is checked against the job's files before anything changes. What lies beyond an earlier step is
left, not removed: a record on disk says where the new history forks off. It is written after the job has gone back, by
this process or by the trainer that takes the job: so who asks in vain, or dies, has changed nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from gspo_core.json_value import JSON
from gspo_core.live_settings import ChangeRefused, tuned
from gspo_core.problems import Problem
from gspo_core.spec import JobSpec
from services.api.http.context import ApiContext
from services.api.http.errors import FINAL, RequestRefused, invalid
from services.api.http.stored_specs import spec_of
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.disk_space import require_room
from services.files.job_dir import JobDir
from services.files.job_records import JobRecords
from services.process.telemetry import get_logger
from services.state.jobs import JobRecord, WentBack
from services.state.refusals import Conflict


@dataclass(frozen=True)
class ResumeRequest:
    from_step: int | None = None
    steps: int | None = None
    horizon: int | None = None

    @property
    def is_plain(self) -> bool:
        return self.from_step is None and self.steps is None and self.horizon is None


async def resume(context: ApiContext, job: JobRecord, wanted: ResumeRequest) -> JobRecord:
    """Raises RequestRefused."""
    while True:
        settings = _settings(job, wanted)
        directory = context.history.job_dir(job.id)
        await asyncio.to_thread(_require_data, directory, tuned(spec_of(job), settings))
        epoch, back = await asyncio.to_thread(_looked_at, directory, job, wanted.from_step)
        try:
            reopened = await context.store.jobs.reopen(job, epoch=epoch, settings=settings, went_back=back)
        except Conflict:  # its settings changed meanwhile: look again
            job = await context.store.jobs.get(job.id)
            continue
        if back is not None:
            await asyncio.to_thread(_write_down, directory, back)
        return reopened


def _settings(job: JobRecord, wanted: ResumeRequest) -> Mapping[str, JSON]:
    """The live settings that it goes on with. Raises RequestRefused."""
    spec = tuned(spec_of(job), job.settings)
    begins = job.step if wanted.from_step is None else wanted.from_step
    steps = wanted.steps or spec.steps
    if begins >= steps:
        message = f"steps: the job goes on from step {begins} and would end at {steps}; say how many steps in all"
        raise invalid([Problem("validation_failed", ("steps",), message)])
    values = {**job.settings} | ({"steps": steps} if steps != spec.steps else {})
    end = _end_of_decay(spec, steps, wanted.horizon)
    values |= {} if end is None else {"optimizer.decay_steps": end}
    try:
        tuned(spec_of(job), values)
    except ChangeRefused as refusal:
        raise invalid(refusal.problems) from None
    return values


def _end_of_decay(spec: JobSpec, steps: int, horizon: int | None) -> int | None:
    """None: as it is. A longer job keeps its schedule, unless it is told another horizon."""
    if spec.optimizer.schedule == "constant":
        if horizon is not None:
            message = "horizon: the job's learning rate follows no schedule"
            raise invalid([Problem("validation_failed", ("horizon",), message)])
        return None
    if horizon is not None:
        return horizon
    return None if spec.optimizer.decay_steps is not None or steps == spec.steps else spec.steps


def _require_data(directory: JobDir, spec: JobSpec) -> None:
    """A job on recorded episodes ends with them. Raises RequestRefused."""
    if spec.recorded is not None and spec.steps > (most := len(BatchLog(directory.recorded).steps())):
        message = f"steps: {spec.steps} are more than the {most} batches that are recorded"
        raise invalid([Problem("validation_failed", ("steps",), message)])


def _looked_at(directory: JobDir, job: JobRecord, step: int | None) -> tuple[int, WentBack | None]:
    """The lowest epoch that the job goes on with, and where it goes back to. Raises RequestRefused, OSError where the
    disk has no room for what is to be written."""
    from gspo_core.replay.past import Past, PastError  # few requests need it

    require_room(directory.path)
    if job.went_back is not None:  # the process that asked for it may have died, and no trainer has looked since
        CheckpointStore(directory).go_back(*job.went_back)
    past = Past(directory.path)
    try:
        highest = max(job.epoch, JobRecords(directory).highest_epoch(), *past.forks, 0)
        if step is None:
            return highest, None
        past.way_to(step)
        return highest + 1, WentBack(highest + 1, past.place_of(step))
    except PastError as error:
        raise RequestRefused(409, "step_not_kept", str(error), param="from_step", headers=FINAL) from error


def _write_down(directory: JobDir, back: WentBack) -> None:
    try:
        CheckpointStore(directory).go_back(*back)
    except OSError as error:  # its trainer does it once it can
        get_logger().warning("where a job went back to is not written down yet", job=directory.id, error=str(error))
