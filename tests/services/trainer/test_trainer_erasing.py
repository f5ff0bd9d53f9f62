"""Episodes that are erased before they are trained: their groups go on without them, and no log ever has them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.codec import decode, encode
from gspo_core.log.batches import LoggedBatch
from gspo_core.types import Asked, EpisodeKey
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.state.queue import Append
from services.state.queue_records import ErasedWord
from services.trainer.groups import batch_selection
from services.trainer.groups.batch_selection import BatchSelection
from tests.core.learner_support import write_model
from tests.services.state.test_bus_erasing import everything_in
from tests.services.trainer.loop_kit import DEADLINE_S, Loop, a_loop, loop_spec

ANN, BOB = "ann-of-the-test", "bob-of-the-test"


@dataclass
class NamedJob:
    """The members of ``anns`` are asked for by ann, all others by bob; ``ended`` is called with what has ended."""

    loop: Loop
    anns: set[tuple[int, int]]
    ended: Callable[[EpisodeKey], Any] | None = None

    def begin(self) -> None:
        real = self.loop.bus.append

        async def append(name: str, token: str, appends: list[Append]) -> None:
            await real(name, token, [self._named(one) for one in appends])
            if self.ended is not None and appends and appends[-1].final:
                await self.ended(appends[-1].key)

        self.loop.bus.append = append  # type: ignore[method-assign, assignment]

    def _named(self, one: Append) -> Append:
        user = ANN if (one.key.group, one.key.member) in self.anns else BOB
        asked = Asked(None, "", "messages", "m", 1, 0)
        return replace(one, payload=encode(replace(decode(one.payload), asked=asked, user=user)))

    async def run(self) -> None:
        await asyncio.wait_for(self.loop.run_of(await self.loop.claim()).run(), DEADLINE_S)

    def batches(self) -> list[LoggedBatch]:
        log = BatchLog(JobDir(self.loop.job_dir))
        return [log.read(position.epoch, position.step) for position in log.steps()]

    def members(self) -> dict[int, list[int]]:
        """Of each group that was trained."""
        return {group.group: [one.key.member for one in group] for batch in self.batches() for group in batch.groups}

    async def names(self, name: str) -> list[str]:
        """Where a name is found: files of the job's directory, or the whole of Redis."""
        files = [path for path in self.loop.job_dir.rglob("*") if path.is_file()]
        found = [path.name for path in files if name.encode() in path.read_bytes()]
        return [*found, *(["Redis"] if name.encode() in await everything_in(self.loop.redis) else [])]


Play = Callable[..., Any]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def make(redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    def job(anns: set[tuple[int, int]], **changes: Any) -> Any:
        spec = loop_spec(model_dir, **({"steps": 3} | changes))
        return a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch), anns

    return job


async def test_a_group_is_trained_without_the_member_that_was_erased(make: Play) -> None:
    entering, anns = make({(0, 1), (3, 2)})
    async with entering as loop:
        job = NamedJob(loop, anns)

        async def erase(key: EpisodeKey) -> None:
            if (key.group, key.member) in anns:
                assert await loop.bus.erase(key) is ErasedWord.ERASED

        job.ended = erase
        job.begin()
        await job.run()
        members = job.members()
        assert (members[0], members[3]) == ([0, 2], [0, 1])
        assert Counter(map(len, members.values())) == {3: 4, 2: 2}
        assert (await loop.bus.counters(loop.job))["trained"] == 6
        assert await job.names(BOB)
        assert await job.names(ANN) == []


async def test_what_is_erased_after_its_group_was_chosen_is_in_no_log(
    make: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer holds the whole group in its memory by then, and is about to write it."""
    entering, anns = make({(0, 1)})
    async with entering as loop:
        job, choose, times = NamedJob(loop, anns), BatchSelection._choose, Counter[str]()
        job.begin()

        async def then_erased(self: BatchSelection, *given: Any) -> Any:
            chosen = await choose(self, *given)
            times["chosen"] += 1
            if times["chosen"] == 1:
                assert [len(one.trajectories) for one in chosen if one.group == 0] == [3]
                assert await loop.bus.erase(EpisodeKey(loop.job, 0, 1)) is ErasedWord.ERASED
            return chosen

        monkeypatch.setattr(BatchSelection, "_choose", then_erased)
        await job.run()
        assert times["chosen"] == 4  # three steps
        assert job.members()[0] == [0, 2]
        assert await job.names(ANN) == []


async def test_what_is_in_a_log_and_not_committed_yet_is_not_said_to_be_erased(make: Play) -> None:
    entering, anns = make({(0, 1)})
    async with entering as loop:
        job, real, words = NamedJob(loop, anns), loop.bus.commit, list[ErasedWord]()
        job.begin()

        async def commit(*given: Any, **more: Any) -> None:
            words.append(await loop.bus.erase(EpisodeKey(loop.job, 0, 1)))
            await real(*given, **more)

        loop.bus.commit = commit  # type: ignore[method-assign]
        await job.run()
        assert words == [ErasedWord.SEALED, ErasedWord.ABSENT, ErasedWord.ABSENT]
        assert job.members()[0] == [0, 1, 2]


async def test_groups_that_were_erased_are_replaced_and_count_against_nobody(
    make: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups that leave nothing to train would end the job otherwise."""
    monkeypatch.setattr(batch_selection, "MAX_BATCHES_DROPPED_IN_A_ROW", 1)
    entering, anns = make({(group, member) for group in (0, 1) for member in range(3)})
    async with entering as loop:
        job = NamedJob(loop, anns)

        async def erase(key: EpisodeKey) -> None:
            if (key.group, key.member) in anns:
                await loop.bus.erase(key)

        job.ended = erase
        job.begin()
        await job.run()
        counters = await loop.bus.counters(loop.job)
        assert (counters["dropped_erased"], counters["trained"], counters["in_flight"]) == (2, 6, 0)
        assert set(job.members()) == set(range(2, 8))
        assert [one["dropped/erased"] for one in await loop.store.metrics.read(loop.job) if "dropped/erased" in one]
        assert await job.names(ANN) == []
