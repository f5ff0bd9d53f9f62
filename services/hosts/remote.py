"""Environments that run in a service elsewhere (`service`), with the interfaces of a host and its processes here.

Rule: a caller gets an answer or ``Died``, as from a local process. A lost service takes its processes along, and no
session is blamed for that at once. Its frames are foreign data: read as JSON of known shape, bounded.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import msgspec

from gspo_core.environment_contract import InvalidEnvironment
from services.hosts import wire
from services.hosts.process import Cause, Death, Died, HostReply
from services.hosts.server import BootFailed, HostOrder
from services.hosts.wire import BadFrame, HostDescription

PING_S = 5.0
# Both sides: a peer that is silent for so long is gone, whatever its kernel says.
SILENCE_S = 30.0
CONNECT_TIMEOUT_S = 5.0
RETRY_S = (0.2, 5.0)


class Said(msgspec.Struct):
    """A frame from a service: one of these."""

    ready: HostDescription | None = None
    invalid: str | None = None
    failed: str | None = None
    forked: int | None = None
    pid: int = 0
    reply: HostReply | None = None
    leaving: int | None = None
    """The last call that it has begun: it begins no other."""
    died: int | None = None
    cause: Cause = Cause.KILLED
    suspects: tuple[int, ...] = ()
    detail: str = ""
    output: str = ""


_read = msgspec.json.Decoder(Said).decode

_Call = TypedDict(
    "_Call",
    {"process": int, "session": int, "op": str, "budget_s": float, "with": wire.Arguments},
)


@dataclass(frozen=True)
class RemoteHosts:
    """Boots hosts at one of ``addresses``, each ``HOST:PORT``; a name may stand for many."""

    addresses: Sequence[str]
    token: str = field(repr=False)

    async def boot(self, order: HostOrder) -> RemoteHost:
        """Tries again until ``boot_timeout_s``. Raises ``InvalidEnvironment`` or ``BootFailed``."""
        if order.paths:
            raise InvalidEnvironment(
                f"{order.ref} was uploaded: its files are here, where the services in GSPO_ENV_HOSTS cannot read them. "
                "Put them where those services can read them, and refer to them as path/to/file.py:Class"
            )
        wait_s, reason = RETRY_S[0], "no address"
        try:
            async with asyncio.timeout(order.boot_timeout_s):
                while True:
                    try:
                        return await self._boot_once(order)
                    except (OSError, _Lost) as error:
                        reason = str(error) or type(error).__name__
                    await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                    wait_s = min(wait_s * 2, RETRY_S[1])
        except TimeoutError:
            raise BootFailed(
                f"{order.ref} was not loaded by {', '.join(self.addresses)} within {order.boot_timeout_s:g}s: {reason}"
            ) from None

    async def _boot_once(self, order: HostOrder) -> RemoteHost:
        connection = await _connect(self.addresses)
        host = RemoteHost(order)
        try:
            await asyncio.get_running_loop().create_connection(lambda: host, sock=connection)
            await host.load(self.token)
        except BaseException:
            await host.close()
            raise
        return host


class _Lost(Exception):
    """The connection ended before the environment was loaded."""


async def _connect(addresses: Sequence[str]) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        found += await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    random.shuffle(found)
    error: OSError = ConnectionError(f"{', '.join(addresses)} has no address")
    for family, kind, protocol, _, at in found:
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(connection, at)
        except OSError as failed:  # a timeout is one, too
            connection.close()
            error = failed
        except BaseException:  # it is no longer awaited
            connection.close()
            raise
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
    raise error


class RemoteHost(asyncio.Protocol):
    """An environment that a service has loaded for us, with the interface of ``server.RunningHost``."""

    pid = 0
    """Unknown: its process is on another machine."""

    def __init__(self, order: HostOrder) -> None:
        self._order = order
        self._loop = asyncio.get_running_loop()
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[HostDescription] = self._loop.create_future()
        self._processes: dict[int, RemoteProcess] = {}
        self._forking: dict[int, asyncio.Future[int]] = {}
        self._calls: dict[int, asyncio.Future[HostReply]] = {}
        self._next_call = 0
        self._last_begun: int | None = None
        """The last call that a leaving service has begun."""
        self._next_number = 0
        self._heard = self._loop.time()
        self._pinging: asyncio.Task[None] | None = None
        self.tail = ""
        self.is_dead = False
        self.description: HostDescription

    async def load(self, token: str) -> None:
        order = self._order
        self.send({"token": token})
        self.send({"boot": order.frame()})
        self._pinging = self._loop.create_task(self._ping())
        self.description = await self._ready

    async def fork(self) -> RemoteProcess:
        """Raises ``BootFailed`` if the host has ended."""
        self._next_number += 1
        process = RemoteProcess(self._next_number, self)
        forked: asyncio.Future[int] = self._loop.create_future()
        self._forking[process.number] = forked
        self._processes[process.number] = process
        try:
            self.send({"fork": process.number})
            process.pid = await forked
        except BaseException:
            self._processes.pop(process.number, None)
            raise
        finally:
            self._forking.pop(process.number, None)
        return process

    async def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        for process in list(self._processes.values()):
            process.condemn(Death(Cause.CLOSED))
        if self._transport is not None:
            self._transport.close()
        self._fail(BootFailed(f"{self._order.ref}: closed"))

    def send(self, frame: Mapping[str, object]) -> None:
        if self._transport is not None and not self.is_dead:
            self._transport.write(wire.encode(frame))

    async def _ping(self) -> None:
        while not self.is_dead:
            await asyncio.sleep(PING_S)
            if self._loop.time() - self._heard > SILENCE_S and self._transport is not None:
                self._transport.abort()
            self.send({"ping": True})

    # called by the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            for body in self._frames.feed(data):
                self._hear(_read(body))
        except (BadFrame, msgspec.DecodeError, RecursionError) as error:
            self.tail = f"it sent an unreadable frame: {error}"
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_dead = True
        self._fail(_Lost(str(error or "the service closed the connection (a wrong GSPO_ENV_TOKEN?)")))
        self._fail_what_was_not_begun()
        for process in list(self._processes.values()):
            process.end(Death(Cause.KILLED, process.acting(), "the environment service is unreachable"))

    def _fail_what_was_not_begun(self) -> None:
        if self._last_begun is None:
            return
        death = Death(Cause.KILLED, detail="the environment service is leaving")
        for number, answered in self._calls.items():
            if number > self._last_begun and not answered.done():
                answered.set_exception(Died(death, was_begun=False))

    def _hear(self, said: Said) -> None:
        if not self._ready.done():
            if said.invalid is not None:
                self._ready.set_exception(InvalidEnvironment(said.invalid))
            elif said.failed is not None:
                self._ready.set_exception(BootFailed(said.failed))
            elif said.ready is not None:
                self._ready.set_result(said.ready)
        elif said.forked is not None:
            self._has_forked(said.forked, said)
        elif said.reply is not None:
            answered = self._calls.get(said.reply.id)
            if answered is not None and not answered.done():
                answered.set_result(said.reply)
        elif said.leaving is not None:
            self._last_begun = said.leaving
        elif said.died is not None and said.died in self._processes:
            self.tail = said.output
            self._processes[said.died].end(Death(said.cause, frozenset(said.suspects), said.detail))

    def _has_forked(self, number: int, said: Said) -> None:
        forked = self._forking.get(number)
        if forked is not None and not forked.done():
            if said.failed is None:
                forked.set_result(said.pid)
            else:
                self.is_dead = True  # the host behind the service has ended; the connection is of no use
                forked.set_exception(BootFailed(said.failed))

    def _fail(self, error: Exception) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marked as retrieved: there may be no waiter left
        for forked in self._forking.values():
            if not forked.done():
                forked.set_exception(BootFailed(str(error)))

    async def ask(self, call: _Call, answered: asyncio.Future[HostReply]) -> HostReply:
        self._next_call += 1
        number = self._next_call
        self._calls[number] = answered
        try:
            self.send({**call, "call": number})
            return await answered
        finally:
            self._calls.pop(number, None)

    def forget(self, process: RemoteProcess) -> None:
        self._processes.pop(process.number, None)


class RemoteProcess:
    """Has the interface of ``process.HostProcess``; the service keeps the deadlines and finds the culprit."""

    def __init__(self, number: int, host: RemoteHost) -> None:
        self.number = number
        self.pid: int | None = None
        self.num_sessions = 0
        self.is_retired = False
        self.death: Death | None = None
        self.on_death: Callable[[RemoteProcess], None] = lambda process: None
        self._host = host
        self._owed: dict[asyncio.Future[HostReply], int] = {}
        """Outstanding answers, with their sessions."""

    async def call(self, session: int, operation: str, budget_s: float, arguments: wire.Arguments) -> HostReply:
        """Raises ``Died``; failures of the environment are in the reply."""
        if self.death is not None:
            raise Died(self.death)
        answered: asyncio.Future[HostReply] = asyncio.get_running_loop().create_future()
        self._owed[answered] = session
        call: _Call = {
            "process": self.number,
            "session": session,
            "op": operation,
            "budget_s": budget_s,
            "with": arguments,
        }
        try:
            return await self._host.ask(call, answered)
        finally:
            del self._owed[answered]

    def condemn(self, death: Death) -> None:
        """Kills it now; every answer that it still owes fails with ``death``."""
        self._host.send({"kill": self.number})
        self.end(death)

    def end(self, death: Death) -> None:
        if self.death is not None:
            return
        self.death = death
        self.is_retired = True
        for answered in self._owed:
            if not answered.done():
                answered.set_exception(Died(death))
        self._host.forget(self)
        self.on_death(self)

    def acting(self) -> frozenset[int]:
        return frozenset(session for answered, session in self._owed.items() if not answered.done())
