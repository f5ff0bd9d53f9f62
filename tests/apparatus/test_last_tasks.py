"""What a test leaves running does not hold up the end of its event loop."""

from __future__ import annotations

import asyncio


def test_a_task_that_swallows_a_cancellation_ends_with_its_loop() -> None:
    num_swallowed = 0

    async def stubborn() -> None:
        nonlocal num_swallowed
        for _ in range(500):  # else the test would hang where it should fail
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                num_swallowed += 1
                if num_swallowed > 1:
                    raise

    async def leave_it() -> asyncio.Task[None]:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        return task

    assert asyncio.run(leave_it()).cancelled()
    assert num_swallowed == 2
