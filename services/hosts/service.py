"""``python -m services.hosts.service``: runs environments for rollout workers elsewhere, on a network of its own.

Rule: it is the far side of a wall. It knows no Redis, no engine and no secret, only the digest of the token that
workers show. Each connection gets one host, which ends with it. It keeps the deadlines and names the session that
broke a process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import json
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import msgspec

from gspo_core.environment_contract import InvalidEnvironment
from gspo_core.json_value import JSON
from services.files.data_dir import DataDir
from services.hosts import wire
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.process import Cause, Death, Died, HostProcess, HostReply
from services.hosts.remote import SILENCE_S
from services.hosts.server import BootFailed, HostOrder, RunningHost
from services.hosts.venv import Interpreters
from services.hosts.wire import MAX_FRAME_BYTES, BadFrame
from services.process.cancelling import cancel_all
from services.process.children import bury_orphans
from services.process.health import Health
from services.process.lifecycle import run_until_signalled, tell_of_root
from services.process.settings import Settings, SettingsError, load_settings
from services.process.telemetry import configure_logging, get_logger, tell_unread_settings

# Before the token has been shown.
MAX_GREETING_BYTES = 4096
GREETING_TIMEOUT_S = 5.0
# For calls under way when it is told to stop; less than the grace period of the process.
LEAVING_S = 20.0
# The waiting worker has its own limit; when it disconnects, the host ends.
BOOT_TIMEOUT_S = 3600.0
OPERATIONS = frozenset({"start", "act", "handed_out", "ended", "score", "restore", "close"})
_LENGTH = struct.Struct("<I")


class ConnectionRefused(Exception):
    """The peer showed no valid token, or broke the protocol."""


@dataclass(frozen=True, slots=True)
class _Request:
    session: int
    operation: str
    budget_s: float
    given: wire.Arguments


class _Boot(msgspec.Struct):
    """As `wire.Boot`."""

    ref: str
    config: dict[str, Any]
    hosting: dict[str, bool | int | Literal["process", "wall", "container", "remote"]]
    networks: list[str] | None
    agent: dict[str, Any] | None = None

    @property
    def order(self) -> HostOrder:
        return HostOrder(self.ref, self.config, self.hosting, networks=self.networks, agent=self.agent)


class Guest:
    """A worker's connection and the host that it asked for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hosts: LocalHosts) -> None:
        self._reader = reader
        self._writer = writer
        self._hosts = hosts
        self._host: RunningHost | None = None
        self._processes: dict[int, HostProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._last_begun = 0
        """Calls are numbered by the worker, in order."""
        self._is_leaving = False

    async def serve(self, token_sha256: str) -> None:
        """Until the connection ends; raises ``ConnectionRefused``."""
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                greeting = await anext(self._frames(MAX_GREETING_BYTES))
            match greeting:
                case {"token": str(token)} if is_token(token, token_sha256):
                    pass
                case _:
                    raise ConnectionRefused("a wrong token")
            async for frame in self._frames(MAX_FRAME_BYTES):
                self._take(frame)
        except (StopAsyncIteration, OSError, TimeoutError):
            return  # it left: a worker sends something every few seconds
        finally:
            await self._end()

    async def _frames(self, most_bytes: int) -> AsyncIterator[JSON]:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                    if length > most_bytes:
                        raise ConnectionRefused(f"a frame of {length} bytes")
                    frame: JSON = json.loads(await self._reader.readexactly(length))
            except asyncio.IncompleteReadError:
                return
            except (ValueError, RecursionError) as error:
                raise ConnectionRefused(f"not JSON: {error}") from None
            yield frame

    async def leave(self) -> None:
        """Finishes and answers the calls under way. It starts no later ones, and says which was the last: their callers
        go elsewhere, so nothing is done twice."""
        self._is_leaving = True
        if self._host is not None:
            self._say({"leaving": self._last_begun})
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=LEAVING_S)

    def _take(self, frame: JSON) -> None:
        if self._is_leaving:
            return
        match frame:
            case {
                "call": int(number),
                "process": int(process),
                "session": int(session),
                "op": str(operation),
                "budget_s": float() | int() as budget_s,
                "with": dict(given),
            } if operation in OPERATIONS:
                call = self._start(
                    self._call(number, process, _Request(session, operation, budget_s, cast(wire.Arguments, given)))
                )
                self._last_begun = number
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            case {"fork": int(number)}:
                self._start(self._fork(number))
            case {"kill": int(number)}:
                process_here = self._processes.pop(number, None)
                if process_here is not None:
                    process_here.condemn(Death(Cause.CLOSED))
            case {"boot": boot} if self._host is None:
                try:
                    order = msgspec.convert(boot, _Boot).order
                except msgspec.ValidationError as error:
                    raise ConnectionRefused(f"boot: {error}") from None
                self._start(self._boot(order))
            case {"ping": _}:
                self._say({"pong": True})
            case _:
                found = ", ".join(sorted(frame)) if isinstance(frame, dict) else type(frame).__name__
                raise ConnectionRefused(f"unknown frame: {found[:200]}")

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _boot(self, order: HostOrder) -> None:
        try:
            self._host = await self._hosts.boot(replace(order, boot_timeout_s=BOOT_TIMEOUT_S))
        except InvalidEnvironment as error:
            self._say({"invalid": str(error)})
        except BootFailed as error:
            self._say({"failed": str(error)})
        else:
            get_logger().info("environment loaded", ref=order.ref)
            self._say({"ready": asdict(self._host.description)})

    async def _fork(self, number: int) -> None:
        try:
            if self._host is None:
                raise BootFailed("no environment is loaded")
            process = await self._host.fork()
        except BootFailed as error:
            self._say({"forked": number, "failed": str(error)})
            return
        self._processes[number] = process
        process.on_death = self._reports(number)
        if process.death is not None:
            process.on_death(process)
        self._say({"forked": number, "pid": process.pid or 0})

    def _reports(self, number: int) -> Callable[[HostProcess], None]:
        def report(process: HostProcess) -> None:
            death = process.death
            if self._processes.pop(number, None) is None or death is None:
                return
            output = self._host.tail if self._host is not None else ""
            suspects = sorted(death.suspects)
            self._say(
                {"died": number, "cause": death.cause, "suspects": suspects, "detail": death.detail, "output": output}
            )

        return report

    async def _call(self, number: int, process_number: int, request: _Request) -> None:
        process = self._processes.get(process_number)
        if process is None:
            return  # its death has been reported, or is about to be
        with contextlib.suppress(Died):  # reported in a frame of its own
            reply = await process.call(request.session, request.operation, request.budget_s, request.given)
            self._answer(number, request.operation, reply)

    def _answer(self, number: int, operation: str, reply: HostReply) -> None:
        try:
            self._say({"reply": msgspec.structs.asdict(reply) | {"id": number}})
        except wire.FrameTooLong as error:
            self._say({"reply": {"id": number, "failed": [operation, f"the answer is too long: {error}"]}})

    def _say(self, frame: Mapping[str, object]) -> None:
        if not self._writer.is_closing():
            self._writer.write(wire.encode(frame))

    async def _end(self) -> None:
        try:
            await cancel_all(list(self._tasks))
        finally:
            self._writer.close()
            if self._host is not None:
                await self._host.close()


def is_token(presented: str, sha256: str) -> bool:
    digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).hexdigest()
    return hmac.compare_digest(digest, sha256)


async def serve(settings: Settings, host: str, port: int, stop: asyncio.Event) -> None:
    """Serves until ``stop`` is set."""
    sha256 = settings.env_token_sha256
    if sha256 is None:
        raise SettingsError("GSPO_ENV_TOKEN_SHA256 is not set: without it anyone could run code here")
    policy = WallPolicy.of(settings)
    policy.announce()
    hosts = LocalHosts(Interpreters(DataDir(settings.data_dir).venvs, settings.env_install), policy)

    guests: dict[asyncio.Task[None], Guest] = {}

    async def receive(guest: Guest, peer: str) -> None:
        try:
            await guest.serve(sha256)
        except (ConnectionRefused, BadFrame) as error:
            get_logger().warning("refused", peer=peer, reason=str(error))

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest = Guest(reader, writer, hosts)
        task = asyncio.create_task(receive(guest, str(writer.get_extra_info("peername"))))
        guests[task] = guest
        task.add_done_callback(guests.pop)
        # However it ends: asyncio leaves the connection of a task that was cancelled open, and the worker would wait.
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(on_connection, host, port)
    get_logger().info("listening", port=server.sockets[0].getsockname()[1])
    tell_of_root()
    # Policies start processes as they like; orphaned ones become children of the container's first process.
    burying = asyncio.create_task(bury_orphans(), name="burying")
    async with Health(settings.health_file, stop) as health:
        health.is_ready = True
        await stop.wait()
        server.close()
        await asyncio.gather(*(guest.leave() for guest in guests.values()))
        for task in guests:
            task.cancel()
        burying.cancel()
        await asyncio.gather(*guests, burying, return_exceptions=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.hosts.service", description="Run environments for rollout workers."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8010, help="port to bind; 0 picks a free one")
    arguments = parser.parse_args()
    try:
        settings = load_settings()
        configure_logging("environments", level=settings.log_level, log_format=settings.log_format)
        tell_unread_settings()
        return run_until_signalled(lambda stop: serve(settings, arguments.host, arguments.port, stop))
    except (SettingsError, OSError) as error:
        print(f"services.hosts.service: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
