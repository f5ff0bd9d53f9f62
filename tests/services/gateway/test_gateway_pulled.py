"""Agents that fetch their episodes, against a real queue: offers, loans, signs of life, and what a lost one costs."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.codec import decode
from gspo_core.env import Llm
from gspo_core.types import EpisodeKey, Outcome, Segment, StopReason
from services.episodes.policy import Drained
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.state.functions import Functions
from services.state.keys import job_key
from services.state.loans import Lent, Loans, LoanState
from services.state.refusals import Fenced, OutOfRange
from services.workers.episode import Episode
from services.workers.setting import EpisodeSpec
from tests.patience import HANG_S
from tests.services.gateway.agent_kit import AgentWorld, Client, Doors, agent_setting, door
from tests.services.gateway.gateway_kit import BabblingPolicy, judge, said, user
from tests.services.rollout.rollout_kit import JOB, TRAINER, Speech, Table, spec, until

HI = user("hi")
KEY = EpisodeKey(JOB, 0, 0)
LONG = 300.0


async def nobody(llm: Client) -> float | None:
    raise AssertionError("nothing is started for an agent that pulls")


class Shop:
    """One episode that waits for an agent, and the agents' side of it."""

    def __init__(self, table: Table, codec: HermesCodec, *speeches: str) -> None:
        speech = Speech(codec)
        self.table, self.codec = table, codec
        self.policy = BabblingPolicy(codec, random.Random(0), [speech.say(text) for text in speeches])
        self.doors = Doors(door())
        self.world = AgentWorld(nobody, self.doors, pulls=True)
        self.loans = Loans(Functions(table.redis))
        self.now = 0.0
        self.setting = self._setting()

    def _setting(self) -> Any:
        return agent_setting(self.table, self.codec, self.policy, self.doors.now, clock=lambda: self.now)

    async def open(self, **changes: Any) -> Episode:
        await self.table.dispatch()
        return await self._lease(**changes)

    async def _lease(self, **changes: Any) -> Episode:
        (lease,) = await self.table.lease()
        environments = [{"ref": "tests:agent", "agent": {"pull": True}}]
        order = EpisodeSpec.from_spec(spec(environments=environments, **changes), self.world, lease, 4096)  # type: ignore[arg-type]
        return Episode(self.setting, order)

    async def taken_over(self) -> Episode:
        """By another gateway, after this one handed the episode back."""
        await self.table.bus.hand_back(JOB, self.table.token, [KEY])
        self.table = await Table.lay(self.table.redis, "worker-1")
        self.doors.now = door()
        self.setting = self._setting()
        return await self._lease()

    async def fetch(self, name: str = "a", length_s: float = LONG) -> Lent:
        found: list[Lent] = []

        async def is_there() -> bool:
            lent = await self.loans.lend(JOB, name, length_s)
            found.extend([lent] if lent else [])
            return lent is not None

        await until_true(is_there)
        return found[0]

    def client(self, lent: Lent) -> Client:
        told = json.loads(lent.told)
        return Client(self.doors, Llm(told["base_url"], told["api_key"], reward_key=told["reward_key"]))

    async def record(self) -> list[Segment]:
        entries = await self.table.redis.xrange(job_key(JOB, "segments"))
        return [decode(fields[b"d"]) for _, fields in entries]

    async def outcome(self) -> Outcome:
        found = (await self.record())[-1].outcome
        assert found is not None
        return found


async def until_true(asked: Callable[[], Any]) -> None:
    async with asyncio.timeout(HANG_S):
        while not await asked():
            await asyncio.sleep(0.005)


@pytest.fixture
async def table(redis_client: Redis) -> Table:
    return await Table.lay(redis_client)


async def test_an_agent_fetches_plays_and_finishes_with_its_reward(table: Table, codec: HermesCodec) -> None:
    shop = Shop(table, codec, "Hello.", "Fine.")
    running = asyncio.create_task((await shop.open()).run())
    lent = await shop.fetch()
    assert json.loads(lent.told)["task"] == {"number": 1}
    agent = shop.client(lent)
    first = await agent.say(HI)
    await agent.say(HI, said(first), user("how are you?"))
    await shop.loans.finish(JOB, lent.loan.id, 0.5)
    await shop.loans.finish(JOB, lent.loan.id, 0.5)
    assert await running is StopReason.COMPLETED
    judge(await shop.record(), shop.policy.served)
    assert (await shop.outcome()).reward == 0.5
    assert not await shop.loans.offers(JOB)
    with pytest.raises(Fenced):
        await shop.loans.extend(JOB, lent.loan.id)


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_reward_that_its_world_does_not_know_ends_nothing_and_is_counted(
    table: Table, codec: HermesCodec, is_moved: bool
) -> None:
    shop = Shop(table, codec, "Hello.")
    shop.world.reward_range = (-0.5, 1.0)
    running = asyncio.create_task((await shop.open()).run())
    lent = await shop.fetch()
    await shop.client(lent).say(HI)
    for value in (1.5, -0.75, 1e300):
        with pytest.raises(OutOfRange, match=r"\(-0\.5, 1\.0\)"):
            await shop.loans.finish(JOB, lent.loan.id, value)
    if is_moved:
        running.cancel()
        await asyncio.wait([running])
        running = asyncio.create_task((await shop.taken_over()).run())
    await shop.loans.finish(JOB, lent.loan.id, 1.0)
    assert await running is StopReason.COMPLETED
    outcome = await shop.outcome()
    assert (outcome.reward, outcome.metrics["rewards_refused"]) == (1.0, 3)
    assert shop.setting.counters["rewards/refused"] == 3


async def test_where_a_world_states_no_bound_every_reward_ends_its_episode(table: Table, codec: HermesCodec) -> None:
    shop = Shop(table, codec, "Hello.")
    shop.world.reward_range = (-math.inf, 1.0)
    running = asyncio.create_task((await shop.open()).run())
    lent = await shop.fetch()
    with pytest.raises(OutOfRange):
        await shop.loans.finish(JOB, lent.loan.id, 1.25)
    await shop.loans.finish(JOB, lent.loan.id, -1e9)
    assert await running is StopReason.COMPLETED
    assert (await shop.outcome()).reward == -1e9


async def test_one_episode_is_lent_once_and_a_lost_answer_gives_it_again(table: Table, codec: HermesCodec) -> None:
    shop = Shop(table, codec)
    running = asyncio.create_task((await shop.open()).run())
    first = await shop.fetch("a")
    assert await shop.loans.lend(JOB, "b", LONG) is None
    assert await shop.loans.lend(JOB, "a", LONG) == replace(first, is_again=True)
    await shop.loans.finish(JOB, "a", 1.0)
    assert await running is StopReason.COMPLETED


async def test_waiting_for_an_agent_is_no_time_of_the_episode(table: Table, codec: HermesCodec) -> None:
    shop = Shop(table, codec)
    running = asyncio.create_task((await shop.open(limits={"episode_timeout_s": 60})).run())
    await until_true(lambda: table.bus.num_offered(JOB))
    shop.now += 100_000.0
    lent = await shop.fetch()
    assert await table.bus.num_offered(JOB) == 0
    await until(lambda: shop.setting.counters["loans/lent"] == 1)
    shop.now += 1.0
    await shop.loans.finish(JOB, lent.loan.id, 1.0)
    assert await running is StopReason.COMPLETED
    assert (await shop.outcome()).metrics["env_s"] == pytest.approx(1.0)


async def test_without_a_sign_of_life_another_agent_gets_it_with_another_key(table: Table, codec: HermesCodec) -> None:
    shop = Shop(table, codec, "Hello.", "Hello again.")
    shop.world.reward_range = (0.0, 0.5)
    running = asyncio.create_task((await shop.open()).run())
    lost = await shop.fetch("a", 60.0)
    await shop.client(lost).say(HI)
    await until(lambda: shop.setting.counters["loans/lent"] == 1)
    for _ in range(3):  # each is a sign
        shop.now += 50.0
        await shop.loans.extend(JOB, "a")
        await looked_at(shop)
    with pytest.raises(OutOfRange):
        await shop.loans.finish(JOB, "a", 1.0)
    await looked_at(shop)
    shop.now += 61.0
    found = await shop.fetch("b", 60.0)
    assert (lost.loan.attempt, found.loan.attempt) == (0, 1)
    with pytest.raises(Refusal) as refusal:
        await shop.client(lost).finish()
    assert refusal.value.kind is RefusalKind.ENDED
    with pytest.raises(Fenced):
        await shop.loans.finish(JOB, "a", 1.0)
    await shop.client(found).say(HI)
    await shop.loans.finish(JOB, "b", 0.25)
    assert await running is StopReason.COMPLETED
    record = await shop.record()
    judge(record, shop.policy.served)
    assert {segment.attempt for segment in record} == {1}
    assert shop.setting.counters["loans/expired"] == 1
    assert shop.setting.counters["rewards/refused"] == 1  # of the one that was lost


async def looked_at(shop: Shop) -> None:
    """Three looks of the board: the second began after this was called, and the third after it was judged."""
    for _ in range(3):
        await shop.setting.driver.board.next(JOB, shop.setting.retrier)


async def test_an_agent_that_gives_it_back_loses_nothing_but_its_tokens(table: Table, codec: HermesCodec) -> None:
    shop = Shop(table, codec, "Hello.")
    running = asyncio.create_task((await shop.open(limits={"retries": 0})).run())
    lent = await shop.fetch("a")
    await shop.client(lent).say(HI)
    await shop.loans.release(JOB, "a")
    again = await shop.fetch("b")
    await shop.loans.finish(JOB, again.loan.id, 1.0)
    assert await running is StopReason.COMPLETED
    assert {segment.attempt for segment in await shop.record()} == {1}


async def test_an_agent_without_a_reward_has_none(table: Table, codec: HermesCodec) -> None:
    shop = Shop(table, codec)
    running = asyncio.create_task((await shop.open(limits={"retries": 0})).run())
    await shop.fetch("a")
    await shop.loans.finish(JOB, "a")
    assert await running is StopReason.ENV_ERROR
    assert (await shop.outcome()).reward is None


async def test_a_lent_episode_goes_on_at_another_gateway(table: Table, codec: HermesCodec) -> None:
    shop = Shop(table, codec, "Hello.", "Fine.")
    running = asyncio.create_task((await shop.open()).run())
    lent = await shop.fetch()
    agent = shop.client(lent)
    first = await agent.say(HI)
    shop.setting.leaving.set()
    with pytest.raises(Drained):
        await running
    running = asyncio.create_task((await shop.taken_over()).run())
    await agent.say(HI, said(first), user("how are you?"))
    await shop.loans.finish(JOB, lent.loan.id, 0.5)
    assert await running is StopReason.COMPLETED
    record = await shop.record()
    judge(record, shop.policy.served)
    assert {(segment.attempt, segment.branch) for segment in record} == {(0, 0)}


@pytest.mark.parametrize("end", [LoanState.FINISHED, LoanState.RELEASED])
async def test_what_an_agent_said_while_no_gateway_held_its_episode_counts(
    table: Table, codec: HermesCodec, end: LoanState
) -> None:
    shop = Shop(table, codec, "Hello.")
    running = asyncio.create_task((await shop.open()).run())
    lent = await shop.fetch()
    await shop.client(lent).say(HI)
    running.cancel()
    await asyncio.wait([running])
    await (shop.loans.finish(JOB, "a", 1.0) if end is LoanState.FINISHED else shop.loans.release(JOB, "a"))
    running = asyncio.create_task((await shop.taken_over()).run())
    if end is LoanState.RELEASED:
        await shop.fetch("b")
        await shop.loans.finish(JOB, "b", 0.5)
    assert await running is StopReason.COMPLETED
    assert (await shop.outcome()).reward == (1.0 if end is LoanState.FINISHED else 0.5)


@pytest.mark.parametrize("is_lent", [True, False])
async def test_a_group_that_is_settled_takes_its_offers_along(table: Table, codec: HermesCodec, is_lent: bool) -> None:
    shop = Shop(table, codec)
    running = asyncio.create_task((await shop.open()).run())
    await until_true(lambda: table.redis.zcard(job_key(JOB, "offered")))
    if is_lent:
        await shop.fetch("a")
    await table.bus.commit(JOB, TRAINER, 1, [0])
    for name in ("offers", "offered", "loans"):
        assert not await table.redis.exists(job_key(JOB, name))
    with pytest.raises(Fenced):
        await running
