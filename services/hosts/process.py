"""A process of a host, seen from its user: it answers requests, or this module finds out why it did not.

Rule: a caller gets an answer, or ``Died`` with the reason and the sessions that may have caused it, within a deadline
of this side: a process that neither answers nor keeps its own deadlines is killed (by `server`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from services.hosts import wire
from services.hosts.mark import Mark
from services.hosts.wire import BadFrame

# How long to wait for the report of a process's end once its connection has closed.
REPORT_S = 2.0
# Signals that come from outside: from an operator, or from a kernel that is short of memory.
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class Cause(StrEnum):
    """Why a process of a host is gone."""

    HUNG = "hung"
    CRASHED = "crashed"
    OVER_MEMORY = "over_memory"
    KILLED = "killed"
    """From outside: no session is to blame, unless it happens again to the same action."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Death:
    cause: Cause
    suspects: frozenset[int] = frozenset()
    """Sessions whose code was running; exactly one if the culprit is certain."""
    detail: str = ""

    def __str__(self) -> str:
        return f"its process {_WORDS[self.cause]}{f' ({self.detail})' if self.detail else ''}"


_WORDS = {
    Cause.HUNG: "did not answer in time and was killed",
    Cause.CRASHED: "crashed",
    Cause.OVER_MEMORY: "exceeded its memory limit and was killed",
    Cause.KILLED: "was killed from outside",
    Cause.CLOSED: "was closed",
}


class Died(Exception):
    """The process died before it answered."""

    def __init__(self, death: Death, *, was_begun: bool = True) -> None:
        super().__init__(str(death))
        self.death = death
        self.was_begun = was_begun
        """False: the call certainly had no effect."""


class HostReply(msgspec.Struct):
    id: int
    result: Any = None
    failed: tuple[str, str] | None = None
    hung: bool = False
    """A member is still running although its time is over."""
    metrics: dict[str, float] | None = None
    snapshot: str | None = None
    evidence: tuple[dict[str, str], dict[str, str]] | None = None


_read_reply = msgspec.json.Decoder(HostReply).decode


@dataclass
class _Call:
    session: int
    future: asyncio.Future[HostReply]
    budget_s: float
    begun: float
    overdue: asyncio.TimerHandle | None = None


class HostProcess(asyncio.Protocol):
    """A forked process that holds sessions; made by ``RunningHost.fork``."""

    def __init__(self, number: int, mark: Mark, kill: Callable[[int], None], hang_grace_s: float) -> None:
        self.number = number
        self.pid: int | None = None
        self.num_sessions = 0
        self.is_retired = False
        """It takes no new sessions."""
        self.death: Death | None = None
        self.on_death: Callable[[HostProcess], None] = lambda process: None
        self.ended: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._mark = mark
        self._kill = kill
        self._hang_grace_s = hang_grace_s
        self._loop = asyncio.get_running_loop()
        self._frames = wire.Frames()
        self._calls: dict[int, _Call] = {}
        self._next_id = 0
        self._transport: asyncio.Transport | None = None
        self._concluding: asyncio.Task[None] | None = None

    async def call(self, session: int, operation: str, budget_s: float, arguments: wire.Arguments) -> HostReply:
        """Raises ``Died``; failures of the environment are in the reply."""
        if self.death is not None or self._transport is None:
            raise Died(self.death or Death(Cause.KILLED))
        self._next_id += 1
        number = self._next_id
        request: wire.Request = {"id": number, "session": session, "op": operation, **arguments}
        call = _Call(session, self._loop.create_future(), budget_s, self._loop.time())
        self._calls[number] = call
        call.overdue = self._loop.call_later(budget_s + self._hang_grace_s, self._is_overdue, number)
        try:
            self._transport.write(wire.encode(request))
            return await call.future
        finally:
            call.overdue.cancel()
            self._calls.pop(number, None)

    def condemn(self, death: Death) -> None:
        """Kills it now; every answer that it still owes fails with ``death``."""
        if self.death is None:
            self._conclude(death)
        self._kill(self.number)

    # called by the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.death is not None:
            return
        try:
            for body in self._frames.feed(data):
                reply = _read_reply(body)
                call = self._calls.get(reply.id)
                if call is not None and not call.future.done():
                    call.future.set_result(reply)
        except (BadFrame, msgspec.DecodeError, RecursionError) as error:
            self.condemn(Death(Cause.CRASHED, self._acting(), f"its answer cannot be read: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_retired = True
        if self.death is None:
            self._concluding = self._loop.create_task(self._find_out())

    async def _find_out(self) -> None:
        if self.death is not None:
            return
        suspects = self._acting()
        await asyncio.wait({self.ended}, timeout=REPORT_S)
        kind, number = self.ended.result() if self.ended.done() else ("signal", signal.SIGKILL)
        if kind == "memory":
            death = Death(Cause.OVER_MEMORY, suspects)
        elif kind == "signal" and number in FROM_OUTSIDE:
            death = Death(Cause.KILLED, suspects, signal.Signals(number).name)
        else:
            detail = signal.Signals(number).name if kind == "signal" else f"exit status {number}"
            death = Death(Cause.CRASHED, suspects, detail)
        if self.death is None:
            self._conclude(death)

    def _conclude(self, death: Death) -> None:
        self.death = death
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(Died(death))
        if self._transport is not None:
            self._transport.abort()
        self._mark.close()
        self.on_death(self)

    # finding the culprit

    def _is_overdue(self, number: int) -> None:
        if self.death is not None or number not in self._calls:
            return
        holder = self._mark.holder()
        if holder is not None:
            allowed_s = max(
                (call.budget_s for call in self._calls.values() if call.session == holder.session), default=0.0
            )
            if holder.held_s < allowed_s:  # this call only waits its turn
                rest_s = allowed_s - holder.held_s
                self._calls[number].overdue = self._loop.call_later(rest_s, self._is_overdue, number)
                return
        self.condemn(Death(Cause.HUNG, self._acting()))

    def _acting(self) -> frozenset[int]:
        holder = self._mark.holder()
        if holder is not None:
            return frozenset({holder.session})
        return frozenset(call.session for call in self._calls.values())
