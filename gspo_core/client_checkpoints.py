"""The calls of the client for checkpoints: listed, exported as models, fetched, removed.

Rule: a fetched export appears whole or not at all, and all its files are of one export. What one call has not brought
to its end is removed, but for a hidden folder beside the directory: where the process is killed, or the name was taken
meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, Unpack
from urllib.parse import quote

from gspo_core.api_answers import Checkpoint, CheckpointDetail, CheckpointExport, CheckpointFile
from gspo_core.client_errors import ClientError
from gspo_core.client_fetching import ExportIncomplete, fetch_file
from gspo_core.client_leases import RequestParts

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
OLDER_SERVICE = "the service is of an older release, which gives no files over HTTP"


class CheckpointCalls(Protocol):
    """Part of ``gspo_core.client.Client``."""

    def _ask(self, shape: type[T], method: str, path: str, **request: Unpack[RequestParts]) -> T: ...

    def _pages(self, item: type[T], path: str, params: dict[str, str]) -> Iterator[T]: ...

    def _remove(self, path: str, gone: str) -> None: ...

    def _download(
        self, path: str, params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> AbstractContextManager[httpx.Response]: ...

    def _wait_before_another(self, attempt: int, error: ClientError) -> None: ...

    def checkpoints(self, job_id: str) -> Iterator[Checkpoint]:
        """The checkpoints of a job that are kept, newest first."""
        yield from self._pages(Checkpoint, f"/v1/jobs/{quote(job_id, safe='')}/checkpoints", {"limit": "100"})

    def checkpoint(self, checkpoint_id: str) -> CheckpointDetail:
        """One checkpoint with its files, by its id ``JOB/EPOCH/STEP``; ``export`` says what became of its export."""
        return self._ask(CheckpointDetail, "GET", _path(checkpoint_id))

    def export_checkpoint(self, checkpoint_id: str) -> CheckpointDetail:
        """Have its weights written as a plain model directory; ask for the checkpoint until its export is ready."""
        return self._ask(CheckpointDetail, "POST", f"{_path(checkpoint_id)}/export")

    def fetch_export(
        self, checkpoint_id: str, directory: Path, told: Callable[[CheckpointFile, int], None] = lambda file, done: None
    ) -> Path:
        """Copy the files of a ready export from the installation into ``directory``, which must not exist and appears
        whole. ``told``: after each piece, the file and how many of its bytes are there. Raises ExportIncomplete,
        OSError."""
        export = self.checkpoint(checkpoint_id)["export"]
        files = _listed(checkpoint_id, export)
        beside = _place_beside(directory, sum(file["size_bytes"] for file in files))
        try:
            for file in files:
                target = beside / _inner(file["path"])
                target.parent.mkdir(parents=True, exist_ok=True)
                ask = partial(self._download, f"{_path(checkpoint_id)}/export/files/{quote(file['path'])}", None)
                fetch_file(ask, self._wait_before_another, file, target, partial(told, file))
            if self.checkpoint(checkpoint_id)["export"] != export:
                raise ExportIncomplete(f"the export of {checkpoint_id} is another one by now: fetch it again")
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        try:
            os.rename(beside, directory)
        except OSError as error:
            message = f"all of it was fetched and lies in {beside}, which cannot be renamed: {error.strerror}"
            raise ExportIncomplete(message) from error
        return directory

    def remove_checkpoint(self, checkpoint_id: str) -> None:
        """Gone already is as good."""
        self._remove(_path(checkpoint_id), "checkpoint_not_found")


def _path(checkpoint_id: str) -> str:
    return f"/v1/checkpoints/{quote(checkpoint_id, safe='/')}"


def _listed(checkpoint_id: str, export: CheckpointExport) -> list[CheckpointFile]:
    """Raises ExportIncomplete where there is nothing to fetch."""
    if export["status"] != "ready":
        raise ExportIncomplete(f"the export of {checkpoint_id} is not ready: it is {export['status']!r}")
    if "files" not in export:
        raise ExportIncomplete(f"{OLDER_SERVICE}: copy {export['path']} out of its data directory")
    if not export["files"]:
        raise ExportIncomplete(f"the export of {checkpoint_id} gives no files: {export['message']}")
    return export["files"]


def _place_beside(directory: Path, num_bytes: int) -> Path:
    """A folder that does not exist yet, for what shall become ``directory``. Raises OSError."""
    if os.path.lexists(directory):
        raise FileExistsError(errno.EEXIST, "it is there already", str(directory))
    directory.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory.parent).free
    if free < num_bytes:
        message = f"it takes {num_bytes / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free"
        raise OSError(errno.ENOSPC, message, str(directory))
    return directory.with_name(f".{directory.name[:50]}-{uuid.uuid4().hex[:8]}")


def _inner(path: str) -> str:
    """Raises ExportIncomplete where it leads out of a directory, on any system."""
    if re.search(r"[\\:\x00-\x1f\x7f-\x9f\ud800-\udfff]", path) or any(
        part in ("", ".", "..") for part in path.split("/")
    ):
        raise ExportIncomplete(f"{path!r} is no name of a file in an export")
    return path
