"""One look-out per job for all who follow its events in this process.

One rule: it only says that there may be news; whoever is woken reads at its own position, so nothing depends on what
the look-out saw. However many readers are silent, a job costs one waiting read. It ends with its last reader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from services.store import Store

# How long one read waits for news.
BLOCK_MS = 500
COUNT = 1000


class Tail:
    """Take ``generation`` before reading, and wait for another one if there was nothing to read."""

    def __init__(self, store: Store, job: str, after: str) -> None:
        self._store = store
        self._job = job
        self._after = after
        self._news = asyncio.Event()
        self.generation = 0
        self.is_over = False
        """The job has ended: all its events were written before this was set."""
        self.failure: Exception | None = None
        self.num_readers = 0

    async def run(self) -> None:
        try:
            while self.num_readers and not self.is_over:
                events = await self._store.read_events(self._job, self._after, count=COUNT, block_ms=BLOCK_MS)
                is_over = (await self._store.get_job(self._job)).status.is_terminal
                if events:
                    self._after = events[-1].id
                if events or is_over:
                    self.is_over = is_over
                    self._wake()
        except Exception as error:  # its readers meet it
            self.failure = error
            self._wake()

    def _wake(self) -> None:
        self.generation += 1
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, generation: int, timeout_s: float) -> bool:
        """Whether there may be news since ``generation``; waits for them. Raises what the look-out met."""
        if self.generation == generation:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        if self.failure is not None:
            raise self.failure
        return self.generation != generation


class Tails:
    """The look-outs of this process, one for each job that somebody follows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, tuple[Tail, asyncio.Task[None]]] = {}

    @contextlib.contextmanager
    def of(self, job: str, after: str) -> Iterator[Tail]:
        """The look-out of a job; a new one begins at the position ``after``."""
        held = self._held.get(job)
        if held is None or held[1].done():
            tail = Tail(self._store, job, after)
            tail.num_readers = 1
            self._held[job] = (tail, asyncio.create_task(tail.run(), name=f"tail of {job}"))
        else:
            tail = held[0]
            tail.num_readers += 1
        try:
            yield tail
        finally:
            tail.num_readers -= 1
            held = self._held.get(job)
            if not tail.num_readers and held is not None and held[0] is tail:
                del self._held[job]
                held[1].cancel()
