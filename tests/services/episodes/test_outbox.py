"""How segments of many episodes leave together, on a queue that only remembers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from gspo_core.types import EpisodeKey, Outcome, StopReason
from services.episodes.metering import Counters
from services.episodes.outbox import Outbox
from services.episodes.tree import Ledger
from services.state.client import RedisFault
from services.state.queue import Append, Gap, Kept, Snapshot
from services.state.retry import Retrier
from tests.patience import HANG_S


class Remembering:
    """Takes a while for a call; what ``refused`` names is refused, with all that comes with it."""

    def __init__(self, *refused: int, failure: Exception | None = None) -> None:
        self.calls: list[list[int]] = []
        self.failure = failure or Gap("refused")
        self.refused = set(refused)
        self.begun = asyncio.Event()
        self.given: list[Append | Kept] = []

    async def append(self, job: str, token: str, appends: Sequence[Append | Kept]) -> None:
        self.begun.set()
        await asyncio.sleep(0.01)
        groups = [append.key.group for append in appends]
        if self.refused & set(groups):
            raise self.failure
        self.calls.append(groups)
        self.given += appends


def outbox(bus: Remembering) -> Outbox:
    return Outbox(bus, "job_a", "token", Retrier(Counters(), random.Random(0)))


def append(box: Outbox, group: int) -> asyncio.Task[None]:
    segment = Ledger(EpisodeKey("job_a", group, 0), 0, 1.0).close(Outcome(StopReason.COMPLETED, 1.0))
    return asyncio.create_task(box.append([segment]))


async def test_all_whose_segments_went_are_woken_at_once() -> None:
    """One after the other would take as many rounds of the event loop, each of which is long where it is busy."""
    box = outbox(bus := Remembering())
    tasks = [append(box, group) for group in range(500)]
    while len(bus.calls) < 2:
        await asyncio.sleep(0.001)
    for _ in range(5):
        await asyncio.sleep(0)
    assert all(task.done() for task in tasks)
    assert bus.calls == [[0], list(range(1, 500))]


async def test_what_is_kept_leaves_with_the_segments_and_with_others() -> None:
    box = outbox(bus := Remembering())
    kept = [Kept(EpisodeKey("job_a", group, 0), Snapshot(0, 1, b"tree")) for group in range(3)]
    first = append(box, 7)
    await bus.begun.wait()
    segment = Ledger(kept[0].key, 0, 1.0).close(Outcome(StopReason.COMPLETED, 1.0))
    await asyncio.gather(first, box.append([segment], kept=kept[0]), *(box.append([], kept=one) for one in kept[1:]))
    assert bus.calls == [[7], [0, 0, 1, 2]]
    assert [isinstance(one, Kept) for one in bus.given[1:]] == [False, True, True, True]


@pytest.mark.parametrize("failure", [Gap("refused"), RedisFault("ERR something that nobody foresaw")])
async def test_a_refused_episode_fails_alone(failure: Exception) -> None:
    box = outbox(bus := Remembering(3, failure=failure))
    tasks = [append(box, group) for group in range(6)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result is failure for result in results] == [group == 3 for group in range(6)]
    assert sorted(group for call in bus.calls for group in call) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("cancelled", [0, 1, 5])
async def test_who_is_cancelled_holds_up_nobody(cancelled: int) -> None:
    """The one that sends, the one that would be next, or any other."""
    box = outbox(bus := Remembering())
    first = append(box, 0)
    await bus.begun.wait()
    tasks = [first, *(append(box, group) for group in range(1, 6))]
    await asyncio.sleep(0)
    tasks[cancelled].cancel()
    async with asyncio.timeout(HANG_S):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [n == cancelled for n in range(6)]
    # What was given away goes, whoever waits for it; twice is harmless.
    assert {group for call in bus.calls for group in call} >= set(range(6)) - {cancelled}
    async with asyncio.timeout(HANG_S):
        await append(box, 9)


@pytest.mark.parametrize("cancelled", [0, 1, 2])
async def test_nothing_is_stored_once_its_caller_was_cancelled(cancelled: int) -> None:
    """Who plays on from what is durable reads it then: what came later would take the place of what is sampled next."""
    box = outbox(bus := Remembering())
    first = append(box, 0)
    await bus.begun.wait()
    tasks = [first, append(box, 1), append(box, 2)]
    await asyncio.sleep(0)
    if cancelled == 2:  # on its way with another's
        while len(bus.calls) < 1:
            await asyncio.sleep(0.001)
        bus.begun.clear()
        await bus.begun.wait()
    tasks[cancelled].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[cancelled]
    stored = [group for call in bus.calls for group in call].count(cancelled)
    await asyncio.gather(*(one for one in tasks if one is not tasks[cancelled]))
    await append(box, 3)
    assert [group for call in bus.calls for group in call].count(cancelled) == stored
