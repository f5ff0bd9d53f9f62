"""A process waits for its Redis, unless it is asked to leave before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.state import retry as contact
from services.state.client import Away, AwayReason, RedisClient, RedisFault
from services.state.retry import first_contact
from services.state.server import RedisServer
from tests.patience import HANG_S

DEADLINE_S = HANG_S


async def test_a_redis_that_comes_late_is_waited_for(
    server_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contact, "AGAIN_S", 0.01)
    with RedisServer.spawn(tmp_path, binary=server_binary) as server:
        url = server.url
    num_asked, has_failed = 0, asyncio.Event()
    async with RedisClient.from_url(url, retry=None) as redis:

        async def ask() -> bytes | None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 2:
                has_failed.set()
            found: bytes = await redis.execute_command("ECHO", "here")
            return found

        async with asyncio.timeout(DEADLINE_S):
            meeting = asyncio.create_task(first_contact(asyncio.Event(), ask))
            await has_failed.wait()
            with await asyncio.to_thread(RedisServer.spawn, tmp_path, binary=server_binary) as again:
                assert again.url == url
                assert await meeting == b"here"


async def test_who_is_asked_to_leave_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "AGAIN_S", 3600.0)
    stop = asyncio.Event()

    async def is_away() -> bool:
        asyncio.get_running_loop().call_soon(stop.set)
        raise Away(AwayReason.UNREACHABLE)

    async def says_nothing() -> bool:
        asyncio.get_running_loop().call_soon(stop.set)
        await asyncio.Event().wait()
        return True

    async with asyncio.timeout(DEADLINE_S):
        for ask in (is_away, says_nothing):
            stop.clear()
            assert await first_contact(stop, ask) is None
        assert stop.is_set()
        assert await first_contact(stop, says_nothing) is None


async def test_what_will_not_pass_rises() -> None:
    async def refuse() -> bool:
        raise RedisFault("unknown command")

    with pytest.raises(RedisFault, match="unknown command"):
        await first_contact(asyncio.Event(), refuse)
