"""Exports of checkpoints that this process has under way; what is ready lies in the job's directory.

Rule: a checkpoint is exported once, however many requests ask, and one export runs at a time, in a process of its own;
a directory that exists is whole. An export that ends with this process starts anew at the next request.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from gspo_core.position import Position
from services.api.views.checkpoint_views import ExportView
from services.files.durable import remove_directory
from services.files.job_dir import JobDir

# Each loads a model.
MAX_TOGETHER = 1
MAX_FAILURES = 100


class Exports:
    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_TOGETHER)
        self._running: dict[Path, asyncio.Task[None]] = {}
        self._failures: dict[Path, str] = {}

    def view(self, job_dir: JobDir, at: Position) -> ExportView:
        path = job_dir.export(at)
        if path.is_dir():
            return ExportView(status="ready", path=job_dir.shown(path), message=None)
        if path in self._running:
            return ExportView(status="exporting", path=None, message=None)
        failure = self._failures.get(path)
        return ExportView(status="failed" if failure else "none", path=None, message=failure)

    def begin(self, job_dir: JobDir, at: Position) -> None:
        path = job_dir.export(at)
        if not path.is_dir() and path not in self._running:
            self._failures.pop(path, None)
            self._running[path] = asyncio.create_task(self._export(job_dir, at), name=f"export {path}")

    def remove(self, job_dir: JobDir, at: Position) -> None:
        """Blocking: call it in a thread."""
        remove_directory(job_dir.export(at))

    async def close(self) -> None:
        """Abandon the running exports; their processes end with this one."""
        for task in self._running.values():
            task.cancel()

    async def _export(self, job_dir: JobDir, at: Position) -> None:
        from services.files.export import ExportFailed, export_checkpoint  # few processes of the API ever export

        path = job_dir.export(at)
        try:
            async with self._room:
                await asyncio.to_thread(export_checkpoint, job_dir, at.epoch, at.step, path)
        except (ExportFailed, OSError) as error:
            while len(self._failures) >= MAX_FAILURES:
                self._failures.pop(next(iter(self._failures)))
            self._failures[path] = str(error)
        finally:
            self._running.pop(path, None)
