"""One file from the installation into a new file here, over connections that break.

Rule: what came is kept, and the next request goes on behind it; a file counts when it has the size that was announced.
What cannot be the announced file, or was changed on the way, is refused in words and not asked for again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gspo_core.api_answers import CheckpointFile
from gspo_core.client_errors import ClientError, Unreachable

if TYPE_CHECKING:
    import httpx

# In a row without a byte more than ever before.
TRIES = 8
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class ExportIncomplete(ClientError):
    """The installation does not give all files of the export; the message says why."""


def fetch_file(
    ask: Callable[[Mapping[str, str]], AbstractContextManager[httpx.Response]],
    wait: Callable[[int, ClientError], None],
    file: CheckpointFile,
    target: Path,
    told: Callable[[int], None],
) -> None:
    """``ask``: for the file with these headers. ``wait``: before another attempt, with its number; raises the error
    where it would not help. ``told``: after each piece, how many bytes are there."""
    tag, attempt, furthest, is_begun = "", 0, 0, False
    with target.open("xb") as out:
        while True:
            before = out.tell()
            try:
                with ask(_going_on(before, tag)) as answer:
                    _require_announced(answer, before, tag, file)
                    tag, is_begun = answer.headers.get("etag", ""), True
                    _write(answer, out, file, told)
                error: ClientError = Unreachable("the answer ended early")
            except ExportIncomplete:
                raise
            except ClientError as broke:
                error = broke
            if is_begun and out.tell() >= file["size_bytes"]:
                break
            attempt = 1 if out.tell() > furthest else attempt + 1
            furthest = max(furthest, out.tell())
            if attempt > TRIES and isinstance(error, Unreachable):
                where = f"{file['path']} broke off after {out.tell()} of {file['size_bytes']} bytes"
                raise ExportIncomplete(f"{where}, and {TRIES} more tries brought nothing: {error}") from error
            if attempt > TRIES:
                raise error
            wait(attempt, error)
        _require_size(out.tell(), file)
        out.flush()
        os.fsync(out.fileno())


def _going_on(start: int, tag: str) -> dict[str, str]:
    """Plain bytes, as their number is what is gone on from."""
    return {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-", "If-Range": tag} if start and tag else {})


def _require_announced(answer: httpx.Response, before: int, tag: str, file: CheckpointFile) -> None:
    """Raises ExportIncomplete."""
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ExportIncomplete(
            f"{file['path']} came as Content-Encoding: {encoding}: something between here and the API compresses it, "
            "and must leave it as it is (it is sent with Cache-Control: no-transform)"
        )
    if answer.status_code == 206:
        given = _RANGE.fullmatch(answer.headers.get("content-range", ""))
        if given is None or int(given[1]) != before:
            said = answer.headers.get("content-range", "no Content-Range")
            raise ExportIncomplete(f"{file['path']} was asked for from byte {before} on, and came as {said!r}")
        _require_size(int(given[2]), file)
        if (theirs := answer.headers.get("etag", "no ETag")) != tag:
            raise ExportIncomplete(f"{file['path']} was begun as {tag}, and came as {theirs} from byte {before} on")
    elif (length := answer.headers.get("content-length", "")).isdecimal():
        _require_size(int(length), file)


def _require_size(found: int, file: CheckpointFile) -> None:
    """Raises ExportIncomplete."""
    if found != file["size_bytes"]:
        raise ExportIncomplete(
            f"{file['path']} has {found} bytes, and was announced with {file['size_bytes']}: it is another file by now"
        )


def _write(answer: httpx.Response, out: BinaryIO, file: CheckpointFile, told: Callable[[int], None]) -> None:
    """Raises ExportIncomplete where more comes than was announced, before it fills the disk."""
    if answer.status_code != 206:  # it is given from its beginning
        out.seek(0)
        out.truncate()
    for piece in answer.iter_raw():
        if (there := out.tell() + len(piece)) > file["size_bytes"]:
            _require_size(there, file)
        out.write(piece)
        told(out.tell())
