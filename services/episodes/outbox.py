"""Makes segments durable: the appends of many episodes leave together in few atomic calls.

Rule: ``append`` returns only when the segments are stored, and a failure of one episode is that episode's alone.
One of the waiting callers sends for all of them, so there is no separate task to lose; all callers whose segments went
out are woken at once, since a busy loop has no time to wake them in turn.
Calls keep a distance, in which others can join: a call costs as much as ten segments in it.
Appending the same segment twice is harmless, so a broken connection is answered by sending again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gspo_core.codec import encode
from gspo_core.types import Segment
from services.episodes.retry import Retrier
from services.state.queue import Append

# One call blocks the server while it runs; several short ones let others in between.
MAX_CALL_BYTES = 4 * 1024 * 1024
# From the end of one call to the start of the next. A caller that appends rarely never waits.
DISTANCE_S = 0.02


class Appends(Protocol):
    """The one method of the queue that is used here."""

    async def append(self, job: str, token: str, appends: Sequence[Append]) -> None: ...


@dataclass(eq=False, slots=True)
class _Parcel:
    """The segments of one call of ``append``; they are stored together or not at all."""

    appends: list[Append]
    called: asyncio.Future[None]
    """Done when the parcel is settled, or when its caller has to send for all."""
    settled: bool = False
    abandoned: bool = False
    """Its caller no longer waits for it."""
    failure: Exception | None = None

    @property
    def size_bytes(self) -> int:
        return sum(len(append.payload) for append in self.appends)


class Outbox:
    """Serves the episodes of one job under one worker token."""

    def __init__(self, bus: Appends, job: str, token: str, retrier: Retrier) -> None:
        self._bus = bus
        self._job = job
        self._token = token
        self._retrier = retrier
        self._waiting: list[_Parcel] = []
        self._sender: _Parcel | None = None
        self._next_call = 0.0

    async def append(self, segments: Sequence[Segment], note: str = "") -> None:
        """Returns when ``segments`` of one episode are durable; otherwise raises ``Refused`` or another failure.

        ``note`` says where the episode stands, to be read in the queue.
        """
        if not segments:
            return
        called = asyncio.get_running_loop().create_future()
        parcel = _Parcel([to_append(segment, note) for segment in segments], called)
        self._waiting.append(parcel)
        if self._sender is None:
            self._sender = parcel
            called.set_result(None)
        try:
            await called
            while not parcel.settled:
                await self._keep_distance()
                await self._send_some()
        finally:
            parcel.abandoned = True
            if self._sender is parcel:
                self._hand_over()
        if parcel.failure is not None:
            raise parcel.failure

    def _hand_over(self) -> None:
        self._sender = next((one for one in self._waiting if not one.abandoned), None)
        if self._sender is not None and not self._sender.called.done():
            self._sender.called.set_result(None)

    async def _keep_distance(self) -> None:
        if (wait_s := self._next_call - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait_s)

    async def _send_some(self) -> None:
        parcels = self._next_parcels()
        failure = await self._send(parcels)
        if failure is not None and len(parcels) > 1:
            # One episode fails the whole call: send each alone to find out which.
            for parcel in parcels:
                self._settle([parcel], await self._send([parcel]))
        else:
            self._settle(parcels, failure)
        self._next_call = asyncio.get_running_loop().time() + DISTANCE_S

    def _next_parcels(self) -> list[_Parcel]:
        parcels: list[_Parcel] = []
        size_bytes = 0
        for parcel in self._waiting:
            size_bytes += parcel.size_bytes
            if parcels and size_bytes > MAX_CALL_BYTES:
                break
            parcels.append(parcel)
        return parcels

    async def _send(self, parcels: Sequence[_Parcel]) -> Exception | None:
        appends = [append for parcel in parcels for append in parcel.appends]
        try:
            await self._retrier.keep_trying(self._bus.append, self._job, self._token, appends)
        except Exception as failure:
            return failure
        return None

    def _settle(self, parcels: Sequence[_Parcel], failure: Exception | None) -> None:
        for parcel in parcels:
            parcel.settled, parcel.failure = True, failure
            if not parcel.called.done():
                parcel.called.set_result(None)
        gone = set(map(id, parcels))
        self._waiting = [parcel for parcel in self._waiting if id(parcel) not in gone]


def to_append(segment: Segment, note: str) -> Append:
    """The segment as the queue takes it."""
    version = segment.version if segment.num_actions else None
    return Append(segment.key, segment.attempt, segment.index, encode(segment), segment.is_final, version, note)
