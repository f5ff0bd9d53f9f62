"""Single checkpoints: their files, their export as a model directory, their removal."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Path

from services.api.checkpoint_views import CheckpointDetail, CheckpointView, checkpoints_of, files_of
from services.api.context import ContextOf
from services.api.errors import FINAL, ApiError, documented
from services.api.exports import export_path
from services.durable import TEMPORARY_PREFIX
from services.export import checkpoint_path

router = APIRouter(prefix="/checkpoints/{job}/{epoch}/{step}", tags=["artifacts"])

Number = Annotated[int, Path(ge=0, le=2**53)]


@router.get("")
async def get_checkpoint(job: str, epoch: Number, step: Number, context: ContextOf) -> CheckpointDetail:
    """One checkpoint with its files, and what became of its export."""
    await context.store.get_job(job)
    return await asyncio.to_thread(_detail, context, job, epoch, step)


@router.post("/export", status_code=202)
async def export(job: str, epoch: Number, step: Number, context: ContextOf) -> CheckpointDetail:
    """Write its weights as a plain model directory below the job's. The checkpoint says when it is ready."""
    await context.store.get_job(job)
    await asyncio.to_thread(_detail, context, job, epoch, step)
    context.exports.begin(context.history.job_dir(job), epoch, step)
    return await asyncio.to_thread(_detail, context, job, epoch, step)


@router.delete("", status_code=204, responses=documented(409))
async def remove_checkpoint(job: str, epoch: Number, step: Number, context: ContextOf) -> None:
    """Remove a checkpoint and its export. The newest one of a job that is not over is what it would go on from."""
    record = await context.store.get_job(job)
    job_dir = context.history.job_dir(job)
    found = await asyncio.to_thread(_find, job, job_dir, epoch, step)
    newest = (await asyncio.to_thread(checkpoints_of, job, job_dir))[:1]
    if not record.status.is_terminal and found.id in [one.id for one in newest]:
        raise ApiError(409, "checkpoint_in_use", "the job would go on from this checkpoint", headers=FINAL)
    for path in (export_path(job_dir, epoch, step), checkpoint_path(job_dir, epoch, step)):
        await asyncio.to_thread(_remove, path)


def _detail(context: ContextOf, job: str, epoch: int, step: int) -> CheckpointDetail:
    job_dir = context.history.job_dir(job)
    found = _find(job, job_dir, epoch, step)
    files = files_of(checkpoint_path(job_dir, epoch, step))
    return CheckpointDetail(**dict(found), files=files, export=context.exports.view(job_dir, epoch, step))


def _find(job: str, job_dir: FilePath, epoch: int, step: int) -> CheckpointView:
    for one in checkpoints_of(job, job_dir):
        if (one.epoch, one.step) == (epoch, step):
            return one
    raise ApiError(404, "checkpoint_not_found", f"{job} keeps no checkpoint of epoch {epoch}, step {step}")


def _remove(path: FilePath) -> None:
    """First its name, so that nobody finds half of it."""
    condemned = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
    try:
        path.rename(condemned)
    except FileNotFoundError:
        return
    shutil.rmtree(condemned, ignore_errors=True)
