"""A file of any size as an answer, from its beginning or from where an earlier download broke off.

Rule: a caller that goes on says with `If-Range` which file it has begun; where that is another one by now, it is given
the whole. Ranges in the middle of a file and several at once are answered with the whole too, as callers must expect.
One look at the file decides what is answered and what is given: it is opened once, after its caller has a seat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.api.http.errors import FINAL, RequestRefused
from services.api.http.streams import BoundedStream, seated

PIECE_BYTES = 1 << 20
_REST = re.compile(r"bytes=(\d{1,18})-")


class FileDownload(Response):
    """Raises RequestRefused 416, and ``missing`` where there is no such file, before the answer begins."""

    def __init__(self, path: Path, media_type: str, missing: RequestRefused) -> None:
        super().__init__(media_type=media_type)
        self._path = path
        self._missing = missing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with seated(scope):
            async with self._opened() as (file, found):
                answer = _answer(file, found, Headers(scope=scope), str(self.media_type))
                await answer.send_seated(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[BinaryIO, os.stat_result]]:
        try:
            file = await asyncio.to_thread(self._path.open, "rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise self._missing from None
        try:
            yield file, await asyncio.to_thread(os.fstat, file.fileno())
        finally:
            # In a thread that nobody waits for: a piece may just be read from a disk that hangs.
            asyncio.get_running_loop().run_in_executor(None, file.close)


def _answer(file: BinaryIO, found: os.stat_result, headers: Headers, media_type: str) -> BoundedStream:
    tag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
    start = _start(headers, tag, found.st_size)
    num_bytes = found.st_size - (start or 0)
    # What is gone on from is a number of bytes: nobody on the way may compress them.
    said = {"ETag": tag, "Accept-Ranges": "bytes", "Cache-Control": "private, no-cache, no-transform"}
    said["Content-Length"] = str(num_bytes)
    if start is not None:
        said["Content-Range"] = f"bytes {start}-{found.st_size - 1}/{found.st_size}"
    status = 200 if start is None else 206
    return BoundedStream(_pieces(file, start or 0, num_bytes), status_code=status, headers=said, media_type=media_type)


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


async def _pieces(file: BinaryIO, start: int, num_bytes: int) -> AsyncIterator[bytes]:
    """No more than was announced, whatever is written to it meanwhile."""
    file.seek(start)
    while piece := await asyncio.to_thread(file.read, min(PIECE_BYTES, num_bytes)):
        num_bytes -= len(piece)
        yield piece
