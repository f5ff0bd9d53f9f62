"""Exports of checkpoints that this process has under way; what is ready lies in the job's directory.

Rule: a checkpoint is exported once, by one process of its own at a time, whoever asks how often; a directory that is
there is whole. An export that ends with this process is begun anew by the next who asks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.api.checkpoint_views import ExportView
from services.export import ExportFailed, checkpoint_path, export_checkpoint

# Each loads a model.
MAX_TOGETHER = 1
MAX_FAILURES = 100


def export_path(job_dir: Path, epoch: int, step: int) -> Path:
    return job_dir / "exports" / checkpoint_path(job_dir, epoch, step).name


class Exports:
    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_TOGETHER)
        self._running: dict[Path, asyncio.Task[None]] = {}
        self._failures: dict[Path, str] = {}

    def view(self, job_dir: Path, epoch: int, step: int) -> ExportView:
        path = export_path(job_dir, epoch, step)
        if path.is_dir():
            return ExportView(status="ready", path=str(path.relative_to(job_dir.parents[1])), message=None)
        if path in self._running:
            return ExportView(status="exporting", path=None, message=None)
        failure = self._failures.get(path)
        return ExportView(status="failed" if failure else "none", path=None, message=failure)

    def begin(self, job_dir: Path, epoch: int, step: int) -> None:
        path = export_path(job_dir, epoch, step)
        if not path.is_dir() and path not in self._running:
            self._failures.pop(path, None)
            self._running[path] = asyncio.create_task(self._export(job_dir, epoch, step, path), name=f"export {path}")

    async def close(self) -> None:
        """Nobody waits for an export when the process ends; its own process ends with this one."""
        for task in self._running.values():
            task.cancel()

    async def _export(self, job_dir: Path, epoch: int, step: int, path: Path) -> None:
        try:
            async with self._room:
                await asyncio.to_thread(export_checkpoint, job_dir, epoch, step, path)
        except (ExportFailed, OSError) as error:
            while len(self._failures) >= MAX_FAILURES:
                self._failures.pop(next(iter(self._failures)))
            self._failures[path] = str(error)
        finally:
            self._running.pop(path, None)
