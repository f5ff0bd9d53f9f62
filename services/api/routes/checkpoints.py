"""Single checkpoints: their files, their export as a model directory, their removal."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path
from starlette.responses import Response, StreamingResponse

from gspo_core.position import Position
from services.api.http.context import ContextOf
from services.api.http.errors import FINAL, RequestRefused, documented
from services.api.http.routers import v1_router
from services.api.http.stored_specs import one_with_model_in
from services.api.views.checkpoint_views import CheckpointDetail, CheckpointView, described, files_of, places_of
from services.files.job_dir import JobDir
from services.state.jobs import JobRecord

BINARY = "application/octet-stream"

router = v1_router("artifacts", "/checkpoints/{job}/{epoch}/{step}")

Number = Annotated[int, Path(ge=0, le=2**53)]


@router.get("")
async def get_checkpoint(job: str, epoch: Number, step: Number, context: ContextOf) -> CheckpointDetail:
    """One checkpoint with its files and the state of its export."""
    await context.store.jobs.get(job)
    return await _shown(context, job, epoch, step)


@router.post("/export", status_code=202)
async def export(job: str, epoch: Number, step: Number, context: ContextOf) -> CheckpointDetail:
    """Write its weights as a plain model directory below the job's. The checkpoint says when it is ready. Where the API
    has no torch, a trainer that sees the job's model writes it, beside a job that it may be training."""
    await context.store.jobs.get(job)
    await asyncio.to_thread(_detail, context, job, epoch, step)
    await context.exports.begin(context.history.job_dir(job), Position(epoch, step))
    return await _shown(context, job, epoch, step)


@router.get(
    "/export/files/{file:path}",
    response_class=StreamingResponse,
    responses={200: {"content": {BINARY: {"schema": {"type": "string", "format": "binary"}}}}, **documented(416)},
)
async def download_export_file(job: str, epoch: Number, step: Number, file: str, context: ContextOf) -> Response:
    """One file of a ready export, by its `path`. With `Range: bytes=N-` it is gone on with from byte N, and with
    `If-Range` only where it still has that `ETag`."""
    from services.api.http.file_download import FileDownload  # few models are fetched

    await context.store.jobs.get(job)
    message = f"the export of this checkpoint is not ready, or has no file {file[:80]!r}: its checkpoint lists them"
    missing = RequestRefused(404, "export_file_not_found", message)
    found = await asyncio.to_thread(context.exports.file, context.history.job_dir(job), Position(epoch, step), file)
    if found is None:
        raise missing
    return FileDownload(found, BINARY, missing)


@router.delete("", status_code=204, responses=documented(409))
async def remove_checkpoint(job: str, epoch: Number, step: Number, context: ContextOf) -> None:
    """Remove a checkpoint and its export. The one that an unfinished job would resume from stays, and so does one whose
    export is the model of an unfinished job."""
    from services.files.checkpoints import CheckpointStore

    record = await context.store.jobs.get(job)
    job_dir = context.history.job_dir(job)
    found = await asyncio.to_thread(_find, job_dir, Position(epoch, step))
    if not record.status.is_terminal and found.id == await asyncio.to_thread(_resumed_from, job_dir, record):
        raise RequestRefused(409, "checkpoint_in_use", "the job would resume from this checkpoint", headers=FINAL)
    await _require_unused_export(context, job_dir, Position(epoch, step))
    await asyncio.to_thread(context.exports.remove, job_dir, Position(epoch, step))
    await asyncio.to_thread(CheckpointStore(job_dir).remove, Position(epoch, step))
    await asyncio.to_thread(context.exports.remove, job_dir, Position(epoch, step))  # what was just becoming whole


async def _require_unused_export(context: ContextOf, job_dir: JobDir, at: Position) -> None:
    """Raises RequestRefused where it is the model of a job that is not over."""
    unfinished = await context.store.jobs.unfinished()
    user = await asyncio.to_thread(one_with_model_in, job_dir.export(at), unfinished)
    if user is not None:
        message = f"job {user.id} has the export of this checkpoint as its model"
        raise RequestRefused(409, "checkpoint_in_use", message, headers=FINAL)


def _resumed_from(job_dir: JobDir, job: JobRecord) -> str | None:
    """The id of the newest checkpoint of its history; None: it has none."""
    from services.files.checkpoints import CheckpointStore

    if job.went_back is not None:  # the process that asked for it may have died, and no trainer has looked since
        CheckpointStore(job_dir).go_back(*job.went_back)
    return next((one.id for one in places_of(job_dir) if one.is_of_history), None)


async def _shown(context: ContextOf, job: str, epoch: int, step: int) -> CheckpointDetail:
    """And where its export waits for a trainer, whether there is one."""
    detail = await asyncio.to_thread(_detail, context, job, epoch, step)
    export = detail.export
    if export.status != "exporting" or export.message is None:
        return detail
    if any(one.role == "trainer" and one.is_alive for one in await context.presence.members()):
        return detail
    message = f"{export.message}; none is running at the moment"
    return detail.model_copy(update={"export": export.model_copy(update={"message": message})})


def _detail(context: ContextOf, job: str, epoch: int, step: int) -> CheckpointDetail:
    job_dir, at = context.history.job_dir(job), Position(epoch, step)
    found = _find(job_dir, at)
    try:
        files = files_of(job_dir, at)
    except FileNotFoundError:
        raise _not_kept(job_dir, at) from None
    return CheckpointDetail(**dict(found), files=files, export=context.exports.view(job_dir, at))


def _find(job_dir: JobDir, at: Position) -> CheckpointView:
    found = described(job_dir, at)
    if found is None:
        raise _not_kept(job_dir, at)
    return found


def _not_kept(job_dir: JobDir, at: Position) -> RequestRefused:
    message = f"{job_dir.id} has no checkpoint of epoch {at.epoch}, step {at.step}"
    return RequestRefused(404, "checkpoint_not_found", message)
