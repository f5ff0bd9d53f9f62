from __future__ import annotations

import asyncio

import pytest

from services.process import first_to_end as race
from services.process.first_to_end import first_to_end

DEADLINE_S = 10.0


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
