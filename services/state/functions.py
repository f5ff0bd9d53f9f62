"""Our library of server-side functions: built from the .lua files, loaded if the server lacks it, called.

The rule: a process never replaces a newer library with an older one, so a rolling upgrade only moves forward. All
functions are idempotent, so the client library may resend after a lost reply. It knows neither queue nor jobs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from services.process.telemetry import get_logger
from services.state.client import Away, AwayReason, NotPermitted, RedisClient, RedisFault
from services.state.keys import BUS_KEYS, JOB_KEYS, SERVICE_KEYS
from services.state.refusals import BY_WORD, Damaged

# Servers keep the highest version they were given. Released text never changes under its version number: a test
# compares the digests.
LIBRARY_VERSION = 3
FUNCTIONS_WAIT_S = (0.5, 8.0)
LUA = Path(__file__).with_name("lua")
SOURCES = (
    "library.lua",
    "queue_records.lua",
    "queue.lua",
    "episodes.lua",
    "rewards.lua",
    "loans.lua",
    "erasing.lua",
    "talks.lua",
    "views.lua",
    "jobs.lua",
    "records.lua",
    "service.lua",
    "replies.lua",
    "rates.lua",
)


class LibraryTooNew(RuntimeError):
    """The server holds functions of a newer release than this process."""


class LibraryTooOld(RuntimeError):
    """The server has no Functions (Redis 7.0, Valkey 7.2)."""


class Loads(Protocol):
    """A queue or a store."""

    async def load_functions(self) -> None: ...


async def functions_there(on: Loads) -> bool:
    """Returns when they are. For those who may not load them: the API and trainers do, and perhaps start later."""
    wait_s = FUNCTIONS_WAIT_S[0]
    while True:
        try:
            await on.load_functions()
            return True
        except NotPermitted:
            get_logger().info("waiting for the API or a trainer to load the functions", wait_s=wait_s)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, FUNCTIONS_WAIT_S[1])


class Functions:
    """Calls functions by name and turns error replies into ``Refused`` errors."""

    def __init__(self, redis: RedisClient) -> None:
        # The library's reply types allow for every protocol and decoding; ours are bytes.
        self.redis: Any = redis

    async def load(self) -> None:
        """Make sure the server holds this library; safe to call from many processes at once."""
        source, digest = library()
        held = await self._held_version()
        if held is not None and held[0] > LIBRARY_VERSION:
            raise LibraryTooNew(
                f"the Redis server holds version {held[0]} of our functions, this process only {LIBRARY_VERSION}: "
                "upgrade this process"
            )
        if held != (LIBRARY_VERSION, digest):
            await self.redis.function_load(source, replace=True)

    async def call(self, name: str, keys: Sequence[str | bytes], *args: str | bytes | int | float) -> Any:
        """The reply of ``gspo_<name>``. Reloads the library if the server lost it (say, a new server).

        Raises Away where another process has to reload it.
        """
        try:
            return await self._fcall(name, keys, args)
        except RedisFault as error:
            if "Function not found" not in str(error):
                raise _refusal(error) from None
        try:
            await self.load()
        except NotPermitted as error:
            raise Away(AwayReason.NO_FUNCTIONS, str(error)) from error
        try:
            return await self._fcall(name, keys, args)
        except RedisFault as error:
            raise _refusal(error) from None

    async def _fcall(self, name: str, keys: Sequence[str | bytes], args: Sequence[str | bytes | int | float]) -> Any:
        return await self.redis.execute_command("FCALL", f"gspo_{name}", len(keys), *keys, *args)

    async def _held_version(self) -> tuple[int, str] | None:
        try:
            version, digest = await self._fcall("version", (), ())
        except RedisFault as error:
            if "Function not found" in str(error):
                return None
            if "unknown command" in str(error).lower():
                raise LibraryTooOld("the server has no functions: use Redis >= 7.0 or Valkey >= 7.2") from None
            raise
        return int(version), digest.decode()


def library() -> tuple[str, str]:
    """The library's source and its digest."""
    parts = [(LUA / name).read_text(encoding="utf-8") for name in SOURCES]
    keys = [
        _lua_names("BUS_KEYS", BUS_KEYS),
        _lua_names("JOB_KEYS", JOB_KEYS),
        _lua_names("SERVICE_KEYS", SERVICE_KEYS),
    ]
    body = "\n".join([*keys, *parts])
    digest = hashlib.sha256(body.encode()).hexdigest()[:16]
    version = f'local VERSION, DIGEST = {LIBRARY_VERSION}, "{digest}"'
    return f"#!lua name=gspo\n{version}\n{body}", digest


def _lua_names(name: str, names: Sequence[str]) -> str:
    listed = ", ".join(f'"{entry}"' for entry in names)
    return f"local {name} = {{{listed}}}"


def _refusal(error: RedisFault) -> Exception:
    text = str(error)
    word, _, detail = text.partition(" ")
    if kind := BY_WORD.get(word):
        return kind.of(detail)
    # A function only ever fails on data it read.
    return Damaged(text) if "user_function" in text else error
