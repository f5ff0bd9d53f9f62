"""A file of any size as an answer, from its beginning or from where an earlier download broke off.

Rule: a caller that goes on says with `If-Range` which file it has begun; where that is another one by now, it is given
the whole. Ranges in the middle of a file and several at once are answered with the whole too, as callers must expect.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.datastructures import Headers

from services.api.http.errors import FINAL, RequestRefused
from services.api.http.streams import BoundedStream

PIECE_BYTES = 1 << 20
_REST = re.compile(r"bytes=(\d{1,18})-")


def file_download(path: Path, headers: Headers, media_type: str) -> BoundedStream:
    """Blocking: call it in a thread. Raises FileNotFoundError, RequestRefused 416."""
    found = path.stat()
    tag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
    start = _start(headers, tag, found.st_size)
    said = {"ETag": tag, "Accept-Ranges": "bytes", "Content-Length": str(found.st_size - (start or 0))}
    if start is not None:
        said["Content-Range"] = f"bytes {start}-{found.st_size - 1}/{found.st_size}"
    status = 200 if start is None else 206
    return BoundedStream(_pieces(path, start or 0), status_code=status, headers=said, media_type=media_type)


def _start(headers: Headers, tag: str, size: int) -> int | None:
    """Where the caller goes on; None: it is given the whole."""
    asked = _REST.fullmatch(headers.get("range", "").replace(" ", ""))
    if asked is None or headers.get("if-range", tag).strip() != tag:
        return None
    start = int(asked[1])
    if start >= size:
        said = {**FINAL, "Content-Range": f"bytes */{size}"}
        raise RequestRefused(416, "range_not_satisfiable", f"the file has {size} bytes", param="Range", headers=said)
    return start


async def _pieces(path: Path, start: int) -> AsyncIterator[bytes]:
    """Opened with the first piece: an answer that is refused a seat has opened nothing."""
    with await asyncio.to_thread(path.open, "rb") as file:
        file.seek(start)
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
