"""The calls of the client for checkpoints: listed, exported as models, fetched, removed.

Rule: a fetched export appears whole or not at all. A connection that breaks is gone on with where it broke, as long as
the file is still the same one.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar, Unpack
from urllib.parse import quote

from gspo_core.api_answers import Checkpoint, CheckpointDetail, CheckpointFile
from gspo_core.client_errors import ClientError
from gspo_core.client_leases import RequestParts

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
# In a row without a byte of progress.
TRIES = 8


class ExportIncomplete(ClientError):
    """The installation does not give all files of the export; the message says why."""


class CheckpointCalls(Protocol):
    """Part of ``gspo_core.client.Client``."""

    def _ask(self, shape: type[T], method: str, path: str, **request: Unpack[RequestParts]) -> T: ...

    def _pages(self, item: type[T], path: str, params: dict[str, str]) -> Iterator[T]: ...

    def _remove(self, path: str, gone: str) -> None: ...

    def _download(
        self, path: str, params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> AbstractContextManager[httpx.Response]: ...

    def _wait_before_another(self, attempt: int, error: Exception) -> None: ...

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
        files = self.checkpoint(checkpoint_id)["export"].get("files")
        if not files:
            raise ExportIncomplete(f"the export of {checkpoint_id} is not ready, or an older service keeps it")
        if directory.exists():
            raise FileExistsError(f"{directory} is there already")
        directory.parent.mkdir(parents=True, exist_ok=True)
        beside = directory.with_name(f".{directory.name}-{uuid.uuid4().hex[:8]}")
        try:
            for file in files:
                target = beside / _inner(file["path"])
                target.parent.mkdir(parents=True, exist_ok=True)
                self._fetch_file(checkpoint_id, file, target, told)
            os.rename(beside, directory)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return directory

    def _fetch_file(
        self, checkpoint_id: str, file: CheckpointFile, target: Path, told: Callable[[CheckpointFile, int], None]
    ) -> None:
        tag, attempt = "", 0
        with target.open("xb") as out:
            while True:
                begun = out.tell()
                path = f"{_path(checkpoint_id)}/export/files/{quote(file['path'])}"
                try:
                    with self._download(path, headers=_going_on(begun, tag)) as answer:
                        tag = answer.headers.get("etag", "")
                        _write(answer, out, lambda done: told(file, done))
                    break
                except ClientError as error:
                    if out.tell() == file["size_bytes"]:
                        break
                    attempt = 1 if out.tell() > begun else attempt + 1
                    if attempt > TRIES:
                        raise
                    self._wait_before_another(attempt, error)
            if out.tell() != file["size_bytes"]:
                raise ExportIncomplete(f"{file['path']} has {out.tell()} bytes, and should have {file['size_bytes']}")

    def remove_checkpoint(self, checkpoint_id: str) -> None:
        """Gone already is as good."""
        self._remove(_path(checkpoint_id), "checkpoint_not_found")


def _path(checkpoint_id: str) -> str:
    return f"/v1/checkpoints/{quote(checkpoint_id, safe='/')}"


def _inner(path: str) -> str:
    """Raises ExportIncomplete where it leads out of a directory."""
    if not path or path.startswith("/") or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ExportIncomplete(f"{path!r} is no name of a file in an export")
    return path


def _going_on(start: int, tag: str) -> dict[str, str]:
    """Plain bytes, as their number is what is gone on from."""
    return {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-", "If-Range": tag} if start and tag else {})


def _write(answer: httpx.Response, out: BinaryIO, told: Callable[[int], None]) -> None:
    if answer.status_code != 206:  # it is given from its beginning
        out.seek(0)
        out.truncate()
    for piece in answer.iter_raw():
        out.write(piece)
        told(out.tell())
