"""An agent whose episode is erased while it talks is told so, in its dialect, at any gateway; nothing of it stays."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import httpx
import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.types import EpisodeKey
from services.gateway.dialects.turns import ERASED, Refusal, RefusalKind
from services.gateway.http.forwarding import REWARD, Neighbours, between_gateways
from services.state.queue_records import ErasedWord
from services.state.refusals import EpisodeErased
from services.state.store import Store
from services.workers.episode import Episode
from tests.services.gateway.agent_kit import AgentWorld, Client, Doors, agent_order, agent_setting, door
from tests.services.gateway.fake_turns import FakeTurns, serving
from tests.services.gateway.gateway_kit import BabblingPolicy, request, said, user
from tests.services.gateway.speakers import SPEAKERS, Speaker
from tests.services.gateway.test_gateway_forwarding import BEARER, asked, forwarding
from tests.services.rollout.rollout_kit import JOB, Speech, Table
from tests.services.state.test_bus_erasing import everything_in

HI = user("hi")
KEY = EpisodeKey(JOB, 0, 0)
ANN = "ann-of-the-test"


@pytest.fixture
async def table(redis_client: Redis) -> Table:
    return await Table.lay(redis_client)


async def refused(asking: object) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        await asking  # type: ignore[misc]
    return refusal.value


@pytest.mark.parametrize("lives_elsewhere", [False, True])
async def test_an_agent_that_talks_on_is_told_and_nothing_is_written(
    table: Table, codec: HermesCodec, redis_client: Redis, lives_elsewhere: bool
) -> None:
    keys, told = list[str](), list[Refusal]()

    async def agent(llm: Client) -> float:
        keys.append(llm.llm.api_key)
        first = await llm.say(HI, user=ANN)
        assert ANN.encode() in await everything_in(redis_client)
        assert await table.bus.erase(KEY) is ErasedWord.ERASED
        told.append(await refused(llm.say(HI, said(first), user("more"), user=ANN)))
        return 1.0

    speech, here = Speech(codec), door()
    policy = BabblingPolicy(codec, random.Random(0), [speech.say(text) for text in ("Hello.", "Fine.")])
    await table.dispatch()
    (lease,) = await table.lease()
    world = AgentWorld(agent, Doors(here), services={} if lives_elsewhere else None)
    with pytest.raises(EpisodeErased):
        await Episode(agent_setting(table, codec, policy, here), agent_order(lease, world)).run()
    if lives_elsewhere:  # else it is stopped with its episode
        assert world.services is not None
        await asyncio.gather(*world.services.values())
        assert [(one.kind, one.message, one.may_retry) for one in told] == [(RefusalKind.ENDED, ERASED, False)]
    again = await refused(here.ask(keys[0], request(HI)))
    assert (again.kind, "erased" in again.message) == (RefusalKind.ENDED, True)
    assert ANN.encode() not in await everything_in(redis_client)
    (ready,) = await table.bus.ready_groups(JOB)
    assert (ready.dead, ready.erased) == ((0,), (0,))


async def test_every_gateway_knows_until_the_group_is_settled(table: Table, redis_client: Redis) -> None:
    another = Neighbours("another", table.bus, Store(redis_client).fleet, time.monotonic)
    await table.dispatch()
    assert await another.address_of(KEY) == ""
    await table.bus.erase(KEY)
    refusal = await refused(another.address_of(KEY))
    assert (refusal.kind, refusal.message) == (RefusalKind.ENDED, ERASED)


async def test_every_gateway_knows_when_an_episode_is_over(table: Table, redis_client: Redis) -> None:
    another = Neighbours("another", table.bus, Store(redis_client).fleet, time.monotonic)
    assert await another.is_over(KEY)
    await table.dispatch()
    assert not await another.is_over(KEY)
    (lease,) = await table.lease()
    assert not await another.is_over(KEY)
    await table.bus.erase(KEY)
    assert await another.is_over(lease.key)


@dataclass
class Gone:
    """Of all episodes it is known that they were erased."""

    http: httpx.AsyncClient

    async def address_of(self, key: EpisodeKey) -> str:
        raise Refusal(RefusalKind.ENDED, ERASED)

    async def is_over(self, key: EpisodeKey) -> bool:
        raise AssertionError

    def forget(self, key: EpisodeKey) -> None:
        raise AssertionError


@pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_gateway_that_never_had_it_says_so_at_once_in_each_dialect(speaker: Speaker, stream: bool) -> None:
    near = FakeTurns([])
    async with between_gateways() as http, serving(near, forwarding=forwarding(Gone(http))) as gateway:  # type: ignore[arg-type]
        answer = await gateway.http.post(speaker.url({"stream": stream}), **asked(speaker, stream=stream))
        assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
        assert speaker.error(answer.json()) == ERASED
        assert not near.asks


async def test_what_is_no_turn_is_refused_alike() -> None:
    async with between_gateways() as http, serving(FakeTurns([]), forwarding=forwarding(Gone(http))) as gateway:  # type: ignore[arg-type]
        for answer in (
            await gateway.http.get("/v1/models", headers=BEARER),
            await gateway.http.post(REWARD, json={"reward": 1.0}, headers=BEARER),
        ):
            assert (answer.status_code, ERASED in answer.text) == (409, True)
