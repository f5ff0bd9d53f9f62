"""Plays episodes in another process, under a Python that has one package and nothing of ours.

Rule: where the process ends before its episodes do, each of them is told how it ended and what it said last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from gspo_core.env import Llm
from tests.play.stage import Player

PLAYERS = Path(__file__).with_name("players")
# A line holds one report.
MAX_LINE_BYTES = 1 << 20
LAST_LINES = 20
"""Of what it says beside its reports."""
PIECE = 1 << 16


class PlayerFailed(Exception):
    """What it met, as it tells it."""


@contextlib.asynccontextmanager
async def outside(python: Path, script: str, *words: str) -> AsyncIterator[Player]:
    process = await asyncio.create_subprocess_exec(
        python,
        "-E",
        "-s",
        "-X",
        "faulthandler",
        PLAYERS / script,
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
    )
    outsider = _Outsider(process)
    try:
        yield outsider.play
        await outsider.leave()
    finally:
        await outsider.close()


class _Outsider:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self._last_words: deque[bytes] = deque(maxlen=LAST_LINES)
        self._hearing = asyncio.create_task(self._hear())
        self._listening = asyncio.create_task(self._listen())
        self._end = ""

    async def play(self, task: Mapping[str, Any], llm: Llm) -> Mapping[str, Any]:
        if self._listening.done():
            raise PlayerFailed(self._end)
        told = self._waiting[llm.episode] = asyncio.get_running_loop().create_future()
        given = {"id": llm.episode, "task": task, "base_url": llm.base_url, "api_key": llm.api_key}
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended, which is told with its reason
            self._process.stdin.write(json.dumps(given).encode() + b"\n")
            await self._process.stdin.drain()
        return await told

    async def leave(self) -> None:
        """It ends when it has played what it was given."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._listening

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        for task in (self._listening, self._hearing):
            task.cancel()
        await asyncio.gather(self._listening, self._hearing, return_exceptions=True)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        why = ""
        try:
            async for line in self._process.stdout:
                self._report(json.loads(line))
        except (ValueError, KeyError) as error:  # also of a line that is longer than a report may be
            why = f"what it reports cannot be read: {error}; "
            self._process.kill()
        finally:
            self._end = why + await self._how_it_ended()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(PlayerFailed(self._end))

    def _report(self, told: Mapping[str, Any]) -> None:
        future = self._waiting.pop(told["id"])
        if future.done():  # nobody waits for it any more
            return
        if "error" in told:
            future.set_exception(PlayerFailed(f"{told['error']}\n{told['trace']}"))
        else:
            future.set_result(told["report"])

    async def _hear(self) -> None:
        """What it says beside its reports is passed on, and its end kept."""
        assert self._process.stderr is not None
        rest = b""
        while piece := await self._process.stderr.read(PIECE):
            sys.stderr.write(piece.decode(errors="replace"))
            *whole, rest = (rest + piece).split(b"\n")
            self._last_words.extend(whole)
            rest = rest[-PIECE:]
        self._last_words.append(rest)

    async def _how_it_ended(self) -> str:
        status = await self._process.wait()
        await self._hearing
        said = b"\n".join(self._last_words).decode(errors="replace").strip()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"its process has ended ({how}); it said last: {said or 'nothing'}"
