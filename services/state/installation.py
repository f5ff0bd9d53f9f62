"""Holds a data directory and a Redis together: neither is used with another one's.

Rule: a server that has forgotten everything is taken back by its directory, since jobs are given back from disk; a
server of another installation is refused, and so is a second server while the first one is at work: two would hand out
the same epochs and write over each other's files. Which of two is at work is decided by signs that move, not by clocks.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

from services.files.data_dir import DataDir
from services.files.installation import InstallationFiles
from services.process.telemetry import get_logger
from services.state.client import Away, RedisClient
from services.state.keys import service_key

BEAT_S = 2.0
# A directory that another server may be serving is looked at four times in a beat, for three beats.
LOOKS = 12
# So many prove another server at work. A process that told this one its token just before a wipe may give one more.
SIGNS = 2
# A server that is silent for so long, by the files' clock, is not watched at all.
LONG_GONE_S = 60.0
_KEY = service_key("installation")


class WrongInstallation(RuntimeError):
    """Redis and data directory do not belong together; the message is for the operator."""


class InstallationGuard:
    """Call ``check`` before anything is read or written; ``run`` for as long as the process lives."""

    def __init__(self, redis: RedisClient, data_dir: DataDir, *, beat_s: float = BEAT_S) -> None:
        # Replies are bytes; the client's types allow for more.
        self._redis: Any = redis
        self._path = data_dir.path
        self._files = InstallationFiles(data_dir)
        self._beat_s = beat_s
        self._token: str | None = None
        """Names the server that this process uses; None before it was checked."""

    async def check(self) -> None:
        """Raises WrongInstallation, and Away."""
        held_id, held_token = await self.held()
        own = await asyncio.to_thread(self._files.id)
        if own is None:
            own = await asyncio.to_thread(self._files.begin, held_id or uuid4().hex)
        if held_id not in (None, own):
            raise WrongInstallation(
                f"this Redis belongs to installation {held_id}, and {self._path} to {own}: GSPO_REDIS_URL or "
                f"GSPO_DATA_DIR names another one's. If this Redis is to serve this directory, empty it"
            )
        token = await self._token_of_who_serves(held_token)
        await self._redis.hsetnx(_KEY, "id", own)
        await self._redis.hsetnx(_KEY, "token", token)
        held_id, held_token = await self.held()
        if held_id not in (None, own):
            raise WrongInstallation("another process has just given this Redis to another installation; start again")
        token = held_token or token  # of those that start together, one names the server
        self._token = token
        try:
            await asyncio.to_thread(self._files.say_served, token)
        except OSError as error:  # `run` says it again and again
            _warn(error)

    async def run(self) -> None:
        """Raises WrongInstallation when another server has taken the directory over."""
        while True:
            try:
                await self._beat()
            except Away:
                pass
            except OSError as error:
                _warn(error)
            await asyncio.sleep(self._beat_s)

    async def _beat(self) -> None:
        if self._token is None:
            await self.check()
            return
        served = await asyncio.to_thread(self._files.served)
        if served is not None and served.token != self._token:
            raise WrongInstallation(f"another Redis serves {self._path} now; this process must not go on beside it")
        own = await asyncio.to_thread(self._files.id)
        if own is not None:  # a server that was wiped is told again whose it is
            await self._redis.hsetnx(_KEY, "id", own)
            await self._redis.hsetnx(_KEY, "token", self._token)
        held_id, held_token = await self.held()
        if held_token not in (None, self._token) or held_id not in (None, own):  # None: wiped at this moment
            raise WrongInstallation(f"this Redis was given to installation {held_id}; this process served {own}")
        await asyncio.to_thread(self._files.say_served, self._token)

    async def held(self) -> tuple[str | None, str | None]:
        """The id of the installation that the server belongs to, and its own token."""
        found_id, token = await self._redis.hmget(_KEY, ["id", "token"])
        return found_id and found_id.decode(), token and token.decode()

    async def _token_of_who_serves(self, held: str | None) -> str:
        """The token that this server has, or is to have. Raises WrongInstallation while another server is at work."""
        before = await asyncio.to_thread(self._files.served)
        if before is None or before.token == held or before.age_s > LONG_GONE_S:
            return held or uuid4().hex
        num_looks = num_signs = 0
        while num_looks < LOOKS:
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(self._beat_s / 4)
            now = await asyncio.to_thread(self._files.served)
            _, held = await self.held()  # later than the sign: a process tells its server before it gives one
            if now is None or now.token == held:  # its own processes have told this server its token again
                return held or uuid4().hex
            num_looks += 1
            if asyncio.get_running_loop().time() - began > self._beat_s:
                num_looks = 0  # this server was away, so no process could tell it anything
            if now.sign == before.sign:
                continue
            before, num_looks, num_signs = now, 0, num_signs + 1
            if num_signs == SIGNS:
                raise WrongInstallation(
                    f"another Redis serves {self._path} at this moment: two would write over each other's files. End "
                    "the processes that use the other one, or correct GSPO_REDIS_URL or GSPO_DATA_DIR"
                )
        get_logger().warning("the Redis that served this data directory is gone; this one takes over")
        return held or uuid4().hex


def _warn(error: OSError) -> None:
    """A full disk neither ends the process nor keeps it from starting."""
    get_logger().warning("cannot say that this data directory is served", error=str(error))
