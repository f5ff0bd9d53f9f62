"""Exports of checkpoints: those of this process, and what others of the API are at; what is ready lies in the job's
directory.

Rule: a checkpoint is exported once, however many requests ask whichever process, and a process runs one export at a
time, in a process of its own; a directory that exists is whole. An export that ends with its process starts anew at
the next request. A process without torch leaves all of them to trainers, and says what they wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from gspo_core.position import Position
from services.api.views.checkpoint_views import CheckpointFile, ExportView
from services.files.durable import remove_directory
from services.files.export_claim import BEAT_S, ExportClaim, ExportRequest
from services.files.job_dir import JobDir

# Each loads a model.
MAX_TOGETHER = 1


class Exports:
    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_TOGETHER)
        self._running: dict[Path, asyncio.Task[None]] = {}
        self._unwritten: dict[Path, str] = {}
        """Why exports failed where not even that could be written."""

    def view(self, job_dir: JobDir, at: Position) -> ExportView:
        """Blocking: call it in a thread."""
        path = job_dir.export(at)
        if path.is_dir():
            return _ready(job_dir, path)
        claim = ExportClaim(path)
        if path in self._running or claim.is_held:
            return _unready("exporting", None)
        request = ExportRequest(path)
        if request.is_open:
            return _unready("exporting", request.waits_for)
        failure = self._unwritten.get(path) or claim.failure or request.given_up
        if _is_listed(path):  # it became ready since it was looked for first
            return _ready(job_dir, path)
        return _unready("none" if failure is None else "failed", failure)

    def file(self, job_dir: JobDir, at: Position, name: str) -> Path | None:
        """The file of a ready export that is listed so. Blocking: call it in a thread."""
        path = job_dir.export(at)
        return path / name if any(one.path == name for one in _files(path)) else None

    async def begin(self, job_dir: JobDir, at: Position) -> None:
        path = job_dir.export(at)
        if path in self._running or await asyncio.to_thread(path.is_dir):
            return
        self._unwritten.pop(path, None)
        if not await asyncio.to_thread(self._is_left_to_trainers, path) and path not in self._running:
            self._running[path] = asyncio.create_task(self._export(job_dir, at), name=f"export {path}")

    def remove(self, job_dir: JobDir, at: Position) -> None:
        """Blocking: call it in a thread."""
        path = job_dir.export(at)
        ExportRequest(path).withdraw()  # first: it ends that of a trainer
        remove_directory(path)
        ExportClaim(path).forget()

    async def close(self) -> None:
        """Abandon the running exports; their processes end with this one."""
        for task in self._running.values():
            task.cancel()

    def _is_left_to_trainers(self, path: Path) -> bool:
        """Whether nobody can write it here; then it is asked of them."""
        from services.files.export import can_export  # few processes of the API are ever asked

        if can_export():
            return False
        claim, request = ExportClaim(path), ExportRequest(path)
        try:
            if not request.is_open:
                claim.bury()  # of somebody who died over an earlier try
            request.ask()
            if not claim.is_held:
                claim.forget()
        except OSError as error:
            self._unwritten[path] = str(error)
        return True

    async def _export(self, job_dir: JobDir, at: Position) -> None:
        from services.files.export import ExportFailed, export_checkpoint  # few processes of the API ever export

        path = job_dir.export(at)
        claim, failure = ExportClaim(path), None
        try:
            if not await _taken(claim, path):
                return
            async with _kept(claim), self._room:
                await asyncio.to_thread(export_checkpoint, job_dir, at.epoch, at.step, path)
        except (ExportFailed, OSError) as error:
            failure = str(error)
        finally:
            try:
                await asyncio.to_thread(claim.leave, failure)
            except OSError:  # its claim becomes stale
                self._unwritten |= {path: failure} if failure else {}
            finally:
                self._running.pop(path, None)


def _ready(job_dir: JobDir, path: Path) -> ExportView:
    try:
        files, written_at = _files(path), datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
    except FileNotFoundError:  # it has just been removed
        return _unready("none", None)
    except OSError as error:
        message = f"its files cannot be listed: {error.strerror}, {job_dir.shown(Path(error.filename or path))}"
        return ExportView(status="ready", path=job_dir.shown(path), message=message, files=[], written_at=None)
    return ExportView(status="ready", path=job_dir.shown(path), message=None, files=files, written_at=written_at)


def _unready(status: Literal["none", "exporting", "failed"], message: str | None) -> ExportView:
    return ExportView(status=status, path=None, message=message, files=[], written_at=None)


def _files(path: Path) -> list[CheckpointFile]:
    """All that an export has. A link is none of its files, wherever it leads. Raises OSError where some cannot be
    seen."""
    found = []
    for folder, _, names in os.walk(path, onerror=_unless_gone):
        for name in names:
            file = Path(folder) / name
            with contextlib.suppress(FileNotFoundError):  # it is just being removed
                about = file.lstat()
                if stat.S_ISREG(about.st_mode):
                    found.append(CheckpointFile(path=file.relative_to(path).as_posix(), size_bytes=about.st_size))
    return sorted(found, key=lambda one: one.path)


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_listed(path: Path) -> bool:
    """Asked of its folder, which a network file system knows better than that a name was missing before."""
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


async def _taken(claim: ExportClaim, path: Path) -> bool:
    """Wait while another process of the API has it, which may have ended; False once the export is there."""
    while not await asyncio.to_thread(claim.take):
        await asyncio.sleep(BEAT_S)
    return not await asyncio.to_thread(path.is_dir)


@contextlib.asynccontextmanager
async def _kept(claim: ExportClaim) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await asyncio.to_thread(claim.beat)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
