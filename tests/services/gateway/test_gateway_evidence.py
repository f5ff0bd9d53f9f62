"""An agent's episode says which of its job's environments it is of, so that it is judged again by that one's reward."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.env import Environment
from gspo_core.replay.rescoring import recorded
from gspo_core.types import EpisodeKey, Group, Split, StopReason, Trajectory
from services.gateway.agent.judging import Judges
from services.workers.episode import Episode
from services.workers.setting import EpisodeSpec
from tests.services.gateway.agent_kit import AgentWorld, Behavior, Client, Doors, agent_setting, door
from tests.services.gateway.gateway_kit import BabblingPolicy, user
from tests.services.gateway.judge_kit import judge_server, judges, verdict
from tests.services.rollout.rollout_kit import JOB, Speech, Table, spec


@pytest.fixture
async def table(redis_client: Redis) -> Table:
    return await Table.lay(redis_client)


@pytest.fixture
async def asking() -> AsyncIterator[Judges]:
    async with judges() as (made, _):
        yield made


async def speaks(llm: Client) -> None:
    await llm.say(user("hi"))


async def is_paid(llm: Client) -> None:
    await llm.say(user("hi"))
    await llm.reward(0.25)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("behavior", "reward"), [(speaks, 0.75), (is_paid, 0.25)], ids=["judged", "posted"])
async def test_it_names_its_environment(
    table: Table, codec: HermesCodec, asking: Judges, behavior: Behavior, reward: float, number: int
) -> None:
    doors = Doors(door())
    policy = BabblingPolicy(codec, random.Random(0), [Speech(codec).say("Hello.")])
    world = AgentWorld(behavior, doors)
    await table.dispatch()
    (lease,) = await table.lease()
    async with judge_server([verdict(0.75)]) as server:
        judge = {"url": server.url, "model": "m", "prompt": "{{answer}}"}
        url = {"url": "http://agent.example/run"} if world.services is not None else {}
        environments = [{"ref": f"tests:agent{one}", "agent": {"judge": judge} | url} for one in range(2)]
        order = EpisodeSpec.from_spec(
            spec(environments=environments),
            cast(Environment, world),
            replace(lease, environment=number),
            model_context_tokens=4096,
        )
        stop = await Episode(agent_setting(table, codec, policy, doors.now, asking), order).run()
    assert stop is StopReason.COMPLETED
    episode = Trajectory(tuple(await table.segments(EpisodeKey(JOB, 0, 0))))
    assert episode.outcome.reward == reward
    again = recorded(1, Group(JOB, 0, Split.TRAIN, 1, 1, (episode,)), episode, None)
    assert (again.environment, again.task) == (number, {"number": 1})
