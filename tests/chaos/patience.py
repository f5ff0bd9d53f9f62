"""After a kill: has what it struck recovered?

The rule kept here: struck is every episode that somebody holds when the kill has happened. It has recovered when the
gateway answers and each of them has ended or has got further than ever before, which is what its queue counts deaths
by. Who waits has a deadline, and what had not recovered by then is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import httpx
import msgspec

from services.state.client import Away, RedisClient, RedisFault
from services.state.keys import job_key

LOOK_S = 0.1
RECOVERS_S = 90.0
Name = tuple[str, str]
"""Job, and "group:member"."""
State = Mapping[str, Any]


def reached(state: State) -> int:
    return max(int(state["segments"]), int(state["furthest"]))


def held_back(struck: Mapping[Name, int], now: Mapping[Name, State]) -> list[Name]:
    """Of those that were struck with so many segments behind them. Who is gone has ended with its group or its job."""
    return [
        name
        for name, before in struck.items()
        if name in now and not (now[name]["done"] or now[name].get("waits")) and reached(now[name]) <= before
    ]


async def episodes(redis: RedisClient, jobs: Iterable[str]) -> dict[Name, State]:
    found = {}
    for job in jobs:
        for name, packed in (await redis.hgetall(job_key(job, "episodes"))).items():
            assert isinstance(name, bytes)
            assert isinstance(packed, bytes)
            found[job, name.decode()] = msgspec.msgpack.decode(packed)
    return found


def struck_of(now: Mapping[Name, State]) -> dict[Name, int]:
    """Those that are held, and how far each has got."""
    return {name: reached(state) for name, state in now.items() if state["token"] and not state["done"]}


async def recovered(
    look: Callable[[], Awaitable[Mapping[Name, State]]],
    serves: Callable[[], Awaitable[bool]],
    within_s: float = RECOVERS_S,
) -> list[Name]:
    """What had not recovered in time; to be called at once after the kill, before leases end."""
    deadline = time.monotonic() + within_s
    struck: dict[Name, int] | None = None
    left: list[Name] = [("gateway", "")]
    while left and time.monotonic() < deadline:
        with contextlib.suppress(Away, RedisFault):
            now = await look()
            struck = struck_of(now) if struck is None else struck
            left = held_back(struck, now) or ([] if await serves() else [("gateway", "")])
        if left:
            await asyncio.sleep(LOOK_S)
    return left


async def answers(port: int) -> bool:
    """Over the line of agents, whatever it says."""
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{port}/v1/models", timeout=2.0)
            return True
    return False
