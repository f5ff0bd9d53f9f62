"""When an environment counts as ill, who still tries it, and what ends that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gspo_core.env import EnvironmentFailed
from services.episodes.policy import Drained
from services.hosts.session import SessionLost
from services.workers import quarantine as quarantine_module
from services.workers.quarantine import MOST_FAILURES, Quarantine
from tests.services.rollout.rollout_kit import until


class Ward:
    """A quarantine, what it told, and who is inside of an attempt."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, str]] = []
        self.quarantine = Quarantine(self._tell, first_pause_s=0.05)
        self.leaving = asyncio.Event()
        self.num_tries = 0

    async def _tell(self, is_well: bool, error: str) -> None:
        self.told.append((is_well, error))

    async def attempt(self, failure: Callable[[], Exception] | None) -> None:
        async with self.quarantine.entry(self.leaving):
            self.num_tries += 1
            if failure is not None:
                raise failure()

    async def fail(
        self, times: int, failure: Callable[[], Exception] = lambda: EnvironmentFailed("reset", "gone")
    ) -> None:
        for _ in range(times):
            with pytest.raises(EnvironmentFailed):
                await self.attempt(failure)


async def test_it_is_told_once_with_the_error_and_once_that_it_is_over() -> None:
    ward = Ward()
    await ward.fail(MOST_FAILURES - 1)
    assert not ward.quarantine.is_on
    await ward.fail(3)
    assert ward.quarantine.is_on
    await ward.attempt(None)
    assert not ward.quarantine.is_on
    assert [is_well for is_well, _ in ward.told] == [False, True]
    assert "gone" in ward.told[0][1]


async def test_failures_that_take_long_count_as_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that hangs until its deadline: sixteen of them, four at a time, take minutes."""
    ward = Ward()
    monkeypatch.setattr(quarantine_module, "SLOW_S", 0.0)
    await ward.fail(MOST_FAILURES // quarantine_module.SLOW_COUNT - 1)
    assert not ward.quarantine.is_on
    await ward.fail(1)
    assert ward.quarantine.is_on


async def test_one_success_among_the_failures_is_enough_to_be_well() -> None:
    ward = Ward()
    for _ in range(5):
        await ward.fail(MOST_FAILURES - 1)
        await ward.attempt(None)
    assert ward.told == []


async def test_while_it_lasts_few_try_and_the_rest_wait_until_one_comes_to_its_end() -> None:
    ward, release = Ward(), asyncio.Event()
    await ward.fail(MOST_FAILURES)
    before = ward.num_tries

    async def play() -> None:
        async with ward.quarantine.entry(ward.leaving):
            ward.num_tries += 1
            await release.wait()

    playing = [asyncio.create_task(play()) for _ in range(30)]
    await until(lambda: ward.num_tries > before)
    assert ward.num_tries < before + 15
    assert ward.quarantine.num_waiting > 15
    release.set()
    await asyncio.gather(*playing)
    assert ward.num_tries == before + 30


async def test_what_was_under_way_when_it_began_makes_nobody_wait_longer() -> None:
    """Hundreds of episodes fail together; only the tries that it lets in lengthen its pause."""
    ward, release = Ward(), asyncio.Event()

    async def play() -> None:
        async with ward.quarantine.entry(ward.leaving):
            ward.num_tries += 1
            await release.wait()
            raise EnvironmentFailed("reset", "gone")

    playing = [asyncio.create_task(play()) for _ in range(10 * MOST_FAILURES)]
    await until(lambda: ward.num_tries == len(playing))
    release.set()
    await asyncio.gather(*playing, return_exceptions=True)
    assert ward.quarantine.is_on
    async with asyncio.timeout(quarantine_module.MAX_PAUSE_S / 2):
        await ward.fail(3)
        await ward.attempt(None)


async def test_who_waits_leaves_with_the_worker_and_costs_no_time_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    ward, looking = Ward(), []
    ward.quarantine = Quarantine(first_pause_s=1e6)
    await ward.fail(MOST_FAILURES)
    sleep = asyncio.sleep

    async def look(delay: float) -> None:
        looking.append(asyncio.current_task())
        await sleep(delay)

    monkeypatch.setattr(quarantine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(quarantine_module.asyncio, "sleep", look)
    waiting = [asyncio.create_task(ward.attempt(None)) for _ in range(500)]
    while len(looking) < 20:
        await sleep(0.001)
    assert len(set(looking)) == 1
    assert ward.quarantine.num_waiting == 500
    ward.leaving.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(one) for one in ended} == {Drained}
    assert ward.quarantine.num_waiting == 0


async def test_sessions_that_die_together_make_nobody_ill() -> None:
    ward = Ward()
    await ward.fail(4 * MOST_FAILURES, lambda: SessionLost("host", "killed"))
    assert not ward.quarantine.is_on
