"""Cancelling for certain, and without cutting short what cleans up after itself."""

from __future__ import annotations

import asyncio

import pytest

from services.process.cancelling import cancel_all


class Cleaning:
    """Work that takes a while to clean up after itself."""

    def __init__(self) -> None:
        self.began, self.may_end, self.is_clean = asyncio.Event(), asyncio.Event(), False

    async def __call__(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.began.set()
            await self.may_end.wait()
            self.is_clean = True


async def test_who_is_cancelled_while_it_cancels_lets_the_cleaning_up_end() -> None:
    work = Cleaning()
    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    caller = asyncio.create_task(cancel_all([task], again_after_s=60))
    await work.began.wait()
    for _ in range(2):
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.is_clean


async def test_a_cancellation_that_is_swallowed_comes_again() -> None:
    async def swallow() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    task = asyncio.create_task(swallow())
    await asyncio.sleep(0)
    await cancel_all([task], again_after_s=0.01)
    assert task.cancelled()


async def test_what_was_over_and_failed_is_not_raised() -> None:
    async def fail() -> None:
        raise ValueError("once")

    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    await cancel_all([task])
    assert isinstance(task.exception(), ValueError)
