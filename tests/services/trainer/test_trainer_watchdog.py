"""A run in which nothing moves is told of, then its attempt ends; what moves, or nobody could help, goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo_core.stop_spec import WatchdogSpec
from services.state.fleet_records import WorkerRecord
from services.trainer import run
from services.trainer.telling.failure import AttemptFailed
from services.trainer.telling.watchdog import Watchdog
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import Loop, a_loop, loop_spec

DEADLINE_S = HANG_S
BOUNDS = WatchdogSpec(alarm_s=10, end_s=30)


class Life:
    """A run as the watchdog sees it: ``script`` says what moves at each look, one second apart."""

    def __init__(self, script: list[Hashable | None], bounds: WatchdogSpec = BOUNDS, excuse: str = "") -> None:
        self.alarms: list[str] = []
        self._script, self._bounds, self._reason, self._second = script, bounds, excuse, -1

    async def watch(self) -> str:
        """The cause of the end; empty when the script is over."""
        dog = Watchdog(
            self._signs, lambda: self._bounds, self._alarm, self._excuse, clock=lambda: float(self._second), poll_s=0
        )
        try:
            await dog.run()
        except AttemptFailed as error:
            return error.code
        except asyncio.CancelledError:
            return ""
        raise AssertionError("a watchdog does not return")

    def _signs(self) -> Hashable | None:
        self._second += 1
        if self._second >= len(self._script):
            raise asyncio.CancelledError
        return self._script[self._second]

    async def _alarm(self, message: str) -> None:
        self.alarms.append(message)

    async def _excuse(self) -> str:
        return self._reason


async def test_what_stands_still_is_told_of_once_and_then_ended() -> None:
    life = Life([0] * 40)
    assert await life.watch() == "no_progress"
    assert len(life.alarms) == 1


async def test_what_moves_is_left_alone_however_slow_it_is() -> None:
    life = Life([second // 9 for second in range(200)])
    assert (await life.watch(), life.alarms) == ("", [])


async def test_what_is_not_expected_to_move_may_stand_still() -> None:
    life = Life([None] * 200)
    assert (await life.watch(), life.alarms) == ("", [])


async def test_what_nobody_could_help_is_told_of_with_the_reason_and_not_ended() -> None:
    life = Life([0] * 200, excuse="no rollout worker is running")
    assert await life.watch() == ""
    (alarm,) = life.alarms
    assert "no rollout worker is running" in alarm


async def test_bounds_that_are_off_do_nothing() -> None:
    life = Life([0] * 200, WatchdogSpec(alarm_s=None, end_s=None))
    assert (await life.watch(), life.alarms) == ("", [])


async def test_an_attempt_that_stands_still_is_listed_and_the_next_one_goes_on(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody plays until the second attempt."""
    monkeypatch.setattr(run, "Watchdog", partial(Watchdog, poll_s=0.05))
    play, may_play = Loop.play, asyncio.Event()

    async def play_later(loop: Loop) -> None:
        await may_play.wait()
        await play(loop)

    monkeypatch.setattr(Loop, "play", play_later)
    spec = loop_spec(write_model(tmp_path / "model"), steps=1, watchdog={"alarm_s": 0.3, "end_s": 0.6})
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop, asyncio.timeout(DEADLINE_S):
        await loop.store.fleet.register_worker(WorkerRecord(id="player"))
        end = asyncio.Event()
        worker = loop.worker()
        serving = asyncio.create_task(worker.run(end))
        while len((await loop.store.jobs.get(loop.job)).attempts) < 2:
            await asyncio.sleep(0.02)
        values = {"watchdog.end_s": 3600.0, "watchdog.alarm_s": 900.0}
        await loop.store.jobs.change_settings(loop.job, 0, values, values)
        may_play.set()
        while not (job := await loop.store.jobs.get(loop.job)).status.is_terminal:
            await asyncio.sleep(0.02)
        end.set()
        await serving
        alerts = [one.data for one in await loop.store.events.read(loop.job) if one.type == "alert"]
    codes = [one.code for one in job.attempts]
    assert (codes[0], codes[-1]) == ("no_progress", "steps_done")
    assert set(codes[:-1]) == {"no_progress"}
    assert alerts[0]["kind"] == "no_progress"
