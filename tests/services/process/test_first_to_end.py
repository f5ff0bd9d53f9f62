from __future__ import annotations

import asyncio

import pytest

from services.process import cancelling as race
from services.process.cancelling import first_to_end, unless_set
from tests.patience import HANG_S

DEADLINE_S = HANG_S


class Stubborn:
    """Swallows its first cancellation and goes on, as a call of the Redis client may before Python 3.12."""

    def __init__(self) -> None:
        self.num_cancels = 0

    async def run(self) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.num_cancels += 1
        try:
            await asyncio.sleep(3600)
        finally:
            self.num_cancels += 1


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("the first to end")


async def test_who_swallows_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "CLEANING_UP_S", 0.01)
    stubborn = Stubborn()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ValueError, match="the first to end"):
            await first_to_end(stubborn.run(), fail())
    assert stubborn.num_cancels == 2


async def test_a_race_inside_a_race_leaves_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer one cancels the inner one again while that still waits for its own."""
    monkeypatch.setattr(race, "CLEANING_UP_S", 0.01)
    stubborn = Stubborn()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ValueError, match="the first to end"):
            await first_to_end(first_to_end(stubborn.run(), asyncio.sleep(3600)), fail())
    assert stubborn.num_cancels == 2


async def test_work_is_done_unless_an_event_comes_first() -> None:
    stop = asyncio.Event()

    async def answer() -> str:
        return "done"

    assert await unless_set(stop, answer()) == "done"
    with pytest.raises(ValueError, match="the first to end"):
        await unless_set(stop, fail())
    stop.set()
    assert await unless_set(stop, asyncio.sleep(3600, "late")) is None


async def test_work_that_an_event_cuts_off_is_over_when_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "CLEANING_UP_S", 0.01)
    stop, stubborn = asyncio.Event(), Stubborn()
    asyncio.get_running_loop().call_soon(stop.set)
    async with asyncio.timeout(DEADLINE_S):
        assert await unless_set(stop, stubborn.run()) is None
    assert stubborn.num_cancels == 2


async def test_a_cancellation_from_outside_ends_the_work_too() -> None:
    stubborn = Stubborn()
    waiting = asyncio.create_task(unless_set(asyncio.Event(), stubborn.run()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stubborn.num_cancels == 2
