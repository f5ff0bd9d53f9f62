"""``python -m services.hosts.service``: runs environments for rollout workers elsewhere, on a network of its own.

Rule: it is the far side of a wall. It knows no Redis, no engine and no secret, only the digest of the token that
workers show; each connection gets one host, which ends with it. It keeps the deadlines and says who broke a process.
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
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gspo_core.env import InvalidEnvironment
from services.files.data_dir import DataDir
from services.hosts import wire
from services.hosts.process import Cause, Death, Died, HostProcess, Reply
from services.hosts.remote import SILENCE_S
from services.hosts.server import BootFailed, HostOrder, RunningHost
from services.hosts.venv import Interpreters
from services.hosts.wire import MAX_FRAME_BYTES, BadFrame
from services.process.children import bury_orphans
from services.process.health import Health
from services.process.lifecycle import run_until_signalled
from services.process.settings import Settings, SettingsError, load_settings
from services.process.telemetry import configure_logging, get_logger

# Of who has not shown the token yet.
MAX_GREETING_BYTES = 4096
GREETING_TIMEOUT_S = 5.0
# For what is under way when it is asked to leave; less than the grace of the process.
LEAVING_S = 20.0
# The worker that waits knows how long; when it leaves, the host ends.
BOOT_TIMEOUT_S = 3600.0
OPERATIONS = frozenset({"start", "act", "score", "restore", "close"})
_LENGTH = struct.Struct("<I")


class ConnectionRefused(Exception):
    """Whoever connected may not, or does not speak as a worker does."""


@dataclass(frozen=True, slots=True)
class _Request:
    session: int
    operation: str
    budget_s: float
    given: dict[str, Any]


class Guest:
    """One worker's connection, and the host that it asked for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, interpreters: Interpreters) -> None:
        self._reader = reader
        self._writer = writer
        self._interpreters = interpreters
        self._host: RunningHost | None = None
        self._processes: dict[int, HostProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._is_leaving = False

    async def serve(self, token_sha256: str) -> None:
        """Until the connection ends; raises ``ConnectionRefused``."""
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                greeting = await anext(self._frames(MAX_GREETING_BYTES))
            token = greeting.get("token")
            if not isinstance(token, str) or not is_token(token, token_sha256):
                raise ConnectionRefused("a wrong token")
            async for frame in self._frames(MAX_FRAME_BYTES):
                self._take(frame)
        except (StopAsyncIteration, OSError, TimeoutError):
            return  # it left; a worker says something every few seconds
        finally:
            await self._end()

    async def _frames(self, most_bytes: int) -> AsyncIterator[Mapping[str, Any]]:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                    if length > most_bytes:
                        raise ConnectionRefused(f"a frame of {length} bytes")
                    frame = json.loads(await self._reader.readexactly(length))
            except asyncio.IncompleteReadError:
                return
            except (ValueError, RecursionError) as error:
                raise ConnectionRefused(f"not JSON: {error}") from None
            if not isinstance(frame, dict):
                raise ConnectionRefused("a frame is an object")
            yield frame

    async def leave(self) -> None:
        """Ends and answers what is under way. What is asked for from now on is not begun: whoever asked does it
        elsewhere, and nothing is done twice."""
        self._is_leaving = True
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=LEAVING_S)

    def _take(self, frame: Mapping[str, Any]) -> None:
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
                call = self._start(self._call(number, process, _Request(session, operation, budget_s, given)))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            case {"fork": int(number)}:
                self._start(self._fork(number))
            case {"kill": int(number)}:
                process_here = self._processes.pop(number, None)
                if process_here is not None:
                    process_here.condemn(Death(Cause.CLOSED))
            case {
                "boot": {
                    "ref": str(ref),
                    "config": dict(config),
                    "hosting": dict(hosting),
                    "networks": (None | list()) as networks,
                }
            } if self._host is None:
                self._start(self._boot(HostOrder(ref, config, hosting, networks=networks)))
            case {"ping": _}:
                self._say({"pong": True})
            case _:
                raise ConnectionRefused(f"cannot be understood: {', '.join(sorted(map(str, frame)))[:200]}")

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _boot(self, order: HostOrder) -> None:
        try:
            python = await self._interpreters.for_environment(order.ref)
            self._host = await RunningHost.boot(replace(order, python=python, boot_timeout_s=BOOT_TIMEOUT_S))
        except InvalidEnvironment as error:
            self._say({"invalid": str(error)})
        except BootFailed as error:
            self._say({"failed": str(error)})
        else:
            get_logger().info("environment loaded", ref=order.ref)
            self._say({"ready": described(self._host)})

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
            return  # its death was or is being told
        with contextlib.suppress(Died):  # told by its own frame
            reply = await process.call(request.session, request.operation, request.budget_s, **request.given)
            self._answer(number, request.operation, reply)

    def _answer(self, number: int, operation: str, reply: Reply) -> None:
        answer = msgspec.structs.asdict(reply) | {"id": number}
        try:
            self._say({"reply": answer})
        except wire.FrameTooLong as error:
            self._say({"reply": {"id": number, "failed": [operation, f"the answer is too long: {error}"]}})

    def _say(self, frame: Mapping[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(wire.encode(frame))

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()
        if self._host is not None:
            await self._host.close()


def described(host: RunningHost) -> dict[str, Any]:
    """As the host itself said it."""
    given = msgspec.to_builtins(host.description)
    assert isinstance(given, dict)
    return given


def is_token(presented: str, sha256: str) -> bool:
    digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).hexdigest()
    return hmac.compare_digest(digest, sha256)


async def serve(settings: Settings, host: str, port: int, stop: asyncio.Event) -> None:
    """Serves until ``stop`` is set."""
    sha256 = settings.env_token_sha256
    if sha256 is None:
        raise SettingsError("GSPO_ENV_TOKEN_SHA256 is not set: without it anyone could run code here")
    interpreters = Interpreters(DataDir(settings.data_dir).venvs, settings.env_install)

    guests: dict[asyncio.Task[None], Guest] = {}

    async def receive(guest: Guest, peer: object) -> None:
        try:
            await guest.serve(sha256)
        except (ConnectionRefused, BadFrame) as error:
            get_logger().warning("refused", peer=str(peer), reason=str(error))

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest = Guest(reader, writer, interpreters)
        task = asyncio.create_task(receive(guest, writer.get_extra_info("peername")))
        guests[task] = guest
        task.add_done_callback(guests.pop)

    server = await asyncio.start_server(on_connection, host, port)
    get_logger().info("listening", port=server.sockets[0].getsockname()[1])
    # Policies start what they like; what they orphan falls to the first process of the container.
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
        prog="python -m services.hosts.service", description="Runs environments for rollout workers."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8010, help="port to bind; 0 takes a free one")
    arguments = parser.parse_args()
    try:
        settings = load_settings()
        configure_logging("environments", level=settings.log_level, log_format=settings.log_format)
        return run_until_signalled(lambda stop: serve(settings, arguments.host, arguments.port, stop))
    except (SettingsError, OSError) as error:
        print(f"services.hosts.service: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
