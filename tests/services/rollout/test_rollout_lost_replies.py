"""A worker ends a lease, and the reply to that is lost: saying it again takes nothing from the next lease. And a worker
that has no place for a job still asks whether anything waits there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from services.episodes.policy import Interrupted
from services.state.queue import Append, Bus, Gap
from services.state.server import RedisServer, connect
from services.workers import job as job_module
from services.workers.engines import JobEngines
from services.workers.job import LEASE_POLL_S, JobEpisodes
from services.workers.loading import LoadedJob
from services.workers.setting import EpisodeSetting, EpisodeSpec
from tests.services.rollout.rollout_kit import JOB, Table, make_setting, spec, until, world
from tests.services.state.faults import FaultyLine

# The client waits so long before it repeats a call: meanwhile the worker could ask for episodes several times.
WAIT_S = 6 * LEASE_POLL_S
PLAY_S = 1.5 * WAIT_S


class ScriptedEpisodes:
    """In the place of ``Episode``: the first play ends as it is told to, each later one lasts beyond the repetition."""

    def __init__(self, ending: Exception) -> None:
        self.num_plays = 0
        self._ending = ending
        self._setting: EpisodeSetting | None = None
        self._order: EpisodeSpec | None = None

    def __call__(self, setting: EpisodeSetting, order: EpisodeSpec) -> ScriptedEpisodes:
        self._setting, self._order = setting, order
        return self

    async def run(self) -> None:
        setting, order = self._setting, self._order
        assert setting is not None
        assert order is not None
        self.num_plays += 1
        if self.num_plays == 1:
            raise self._ending
        await asyncio.sleep(PLAY_S)
        bus = cast(Bus, setting.records)
        await bus.append(JOB, setting.token, [Append(order.lease.key, 0, 0, b"whole", final=True)])


class AmpleEngines:
    async def watch(self) -> None:
        await asyncio.Event().wait()

    def has_room(self) -> bool:
        return True


async def unheard(health: Mapping[str, str | bool]) -> None: ...


def episodes_of(table: Table, setting: EpisodeSetting, limit: Callable[[], int] = lambda: 4) -> JobEpisodes:
    loaded = LoadedJob(spec(), [cast(Any, world())], cast(Any, None), context_tokens=4096, vocab_size=300)
    return JobEpisodes(
        JOB,
        loaded,
        setting,
        cast(JobEngines, AmpleEngines()),
        table.bus,
        worker=table.worker,
        limit=limit,
        drain_s=0.1,
        tell=unheard,
    )


@pytest.mark.parametrize(
    ("ending", "lost"),
    [
        pytest.param(Interrupted(), b"gspo_interrupt", id="interrupted"),
        pytest.param(Gap("rolled back"), b"gspo_hand_back", id="handed back"),
        pytest.param(RuntimeError("a defect of ours"), b"gspo_fail", id="failed"),
    ],
)
async def test_an_ending_that_is_said_twice_leaves_the_next_lease_alone(
    redis_server: RedisServer, redis_client: Redis, monkeypatch: pytest.MonkeyPatch, ending: Exception, lost: bytes
) -> None:
    script = ScriptedEpisodes(ending)
    monkeypatch.setattr(job_module, "Episode", script)
    direct = await Table.lay(redis_client)
    await direct.dispatch()
    async with FaultyLine(redis_server.url, 0, 0, surely=[lost]) as line, connect(line.url) as client:
        client.set_retry(Retry(ConstantBackoff(WAIT_S), 1))
        table = Table(client, Bus(client), direct.token)
        setting = make_setting(table, cast(Any, None), None)
        running = asyncio.create_task(episodes_of(table, setting).run())

        async def is_complete() -> bool:
            return bool(await direct.bus.ready_groups(JOB))

        await until(is_complete)
        setting.leaving.set()
        await running
    assert line.counts["lose reply"] == 1
    assert (script.num_plays, setting.counters["episodes/fenced"]) == (2, 0)


async def test_a_job_that_has_no_place_learns_that_it_has_something_to_play(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would count as idle, and be given none, for good."""
    table = await Table.lay(redis_client)
    setting, limit = make_setting(table, cast(Any, None), None), [4]
    num_queued, asked = table.bus.num_queued, asyncio.Event()

    async def asks(job: str) -> int:
        asked.set()
        return await num_queued(job)

    monkeypatch.setattr(table.bus, "num_queued", asks)
    episodes = episodes_of(table, setting, lambda: limit[0])
    running = asyncio.create_task(episodes.run())
    await until(lambda: episodes.is_idle)
    limit[0] = 0
    await until(asked.is_set)
    await table.dispatch()
    await until(lambda: not episodes.is_idle)
    assert episodes.num_episodes == 0
    setting.leaving.set()
    await running
