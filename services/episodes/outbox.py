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
from services.state.queue import Append, Kept
from services.state.retry import Retrier

# One call blocks the server while it runs; several short ones let others in between.
MAX_CALL_BYTES = 4 * 1024 * 1024
# From the end of one call to the start of the next. A caller that appends rarely never waits.
DISTANCE_S = 0.02


class Appends(Protocol):
    """The one method of the queue that is used here."""

    async def append(self, job: str, token: str, appends: Sequence[Append | Kept]) -> None: ...


@dataclass(eq=False, slots=True)
class _Parcel:
    """What one call of ``append`` was given; it is stored together or not at all."""

    appends: list[Append | Kept]
    called: asyncio.Future[None]
    """Done when the parcel is settled, or when its caller has to send for all."""
    settled: bool = False
    failure: Exception | None = None

    @property
    def size_bytes(self) -> int:
        return sum(len(one.snapshot.data if isinstance(one, Kept) else one.payload) for one in self.appends)


@dataclass(frozen=True, slots=True)
class _Call:
    parcels: Sequence[_Parcel]
    over: asyncio.Future[None]
    """Done when nothing of it is sent any more."""


class Outbox:
    """Serves the episodes of one job under one worker token."""

    def __init__(self, bus: Appends, job: str, token: str, retrier: Retrier) -> None:
        self._bus = bus
        self._job = job
        self._token = token
        self._retrier = retrier
        self._waiting: list[_Parcel] = []
        self._sender: _Parcel | None = None
        self._under_way: _Call | None = None
        self._next_call = 0.0

    async def append(self, segments: Sequence[Segment], note: str = "", kept: Kept | None = None) -> None:
        """Returns when ``segments`` of one episode are durable; otherwise raises ``Refused`` or another failure.

        ``note`` says where the episode stands, to be read in the queue; ``kept`` is stored behind the segments.
        """
        appends: list[Append | Kept] = [to_append(segment, note) for segment in segments]
        if kept is not None:
            appends.append(kept)
        if not appends:
            return
        called = asyncio.get_running_loop().create_future()
        parcel = _Parcel(appends, called)
        self._waiting.append(parcel)
        if self._sender is None:
            self._sender = parcel
            called.set_result(None)
        try:
            await called
            while not parcel.settled:
                await self._keep_distance()
                await self._send_some()
        except asyncio.CancelledError:
            await self._withdraw(parcel)
            raise
        finally:
            if self._sender is parcel:
                self._hand_over()
        if parcel.failure is not None:
            raise parcel.failure

    async def _withdraw(self, parcel: _Parcel) -> None:
        """Who reads next what is durable must not be overtaken by it: it is not sent any more, or it has arrived."""
        self._waiting = [one for one in self._waiting if one is not parcel]
        if self._sender is not parcel and self._under_way is not None and parcel in self._under_way.parcels:
            await asyncio.shield(self._under_way.over)

    def _hand_over(self) -> None:
        self._sender = next(iter(self._waiting), None)
        if self._sender is not None and not self._sender.called.done():
            self._sender.called.set_result(None)

    async def _keep_distance(self) -> None:
        if (wait_s := self._next_call - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait_s)

    async def _send_some(self) -> None:
        parcels = self._next_parcels()
        self._under_way = _Call(parcels, asyncio.get_running_loop().create_future())
        try:
            failure = await self._send(parcels)
            if failure is not None and len(parcels) > 1:
                # One episode fails the whole call: send each alone to find out which.
                for parcel in parcels:
                    self._settle([parcel], await self._send([parcel]))
            else:
                self._settle(parcels, failure)
        finally:
            self._under_way.over.set_result(None)
            self._under_way = None
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
