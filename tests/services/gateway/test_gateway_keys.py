"""Keys of agents and the door that they open."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.types import EpisodeKey, Split
from services.episodes.keys import KEPT_S, MAX_SECRETS, AttemptId, Keys, Named, UnknownKey
from services.gateway.__main__ import renew
from services.gateway.agent.door import EpisodeRouter
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.state.functions import Functions
from services.state.queue_records import LeasedEpisode
from services.state.shared_secrets import AGENT_KEYS, shared_secret
from tests.patience import HANG_S
from tests.services.gateway.gateway_kit import Bench, request, take, user
from tests.services.rollout.rollout_kit import JOB

KEY = EpisodeKey("job_a-1.x", 7, 3)
SECRET = bytes(range(32))


def test_a_key_names_what_it_was_made_for() -> None:
    made = Keys(SECRET).make(KEY, AttemptId(5, 2), 1000.7)
    assert made.startswith("ep_")
    assert Keys(SECRET).read(made) == Named(KEY, AttemptId(5, 2), 1000 + KEPT_S)


def test_no_other_text_is_a_key() -> None:
    keys, rng = Keys(SECRET), random.Random(0)
    made = keys.make(KEY, AttemptId(5, 2), 1000)
    forged = Keys(SECRET[::-1]).make(KEY, AttemptId(5, 2), 1000)
    wrong = ["", "ep_", made[3:], made + "A", made[:-1], forged, "ep_\u00e4", "ep_" + "A" * 600]
    for _ in range(200):
        place = rng.randrange(3, len(made) - 1)
        other = rng.choice([letter for letter in "ABCxyz019-_" if letter != made[place]])
        wrong.append(made[:place] + other + made[place + 1 :])
    for text in wrong:
        with pytest.raises(UnknownKey):
            keys.read(text)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than 32"):
        Keys(b"secret")


async def test_all_processes_of_an_installation_have_one_secret(redis_client: Redis) -> None:
    await Functions(redis_client).load()
    first, *others = await asyncio.gather(*(shared_secret(redis_client, AGENT_KEYS) for _ in range(5)))
    assert len(first) == 32
    assert set(others) == {first}
    assert await shared_secret(redis_client, "another") != first


def test_keys_of_a_secret_that_was_lost_are_still_known_here() -> None:
    keys, another = Keys(SECRET), SECRET[::-1]
    old = keys.make(KEY, AttemptId(5, 2), 1000)
    keys.renew(another)
    assert keys.secret == another
    assert keys.read(old) == Keys(another).read(keys.make(KEY, AttemptId(5, 2), 1000))
    with pytest.raises(UnknownKey):
        Keys(another).read(old)
    for number in range(MAX_SECRETS):
        keys.renew(bytes([number]) * 32)
        keys.renew(bytes([number]) * 32)
    with pytest.raises(UnknownKey):
        keys.read(old)


async def test_a_gateway_that_outlives_a_wipe_brings_its_secret_back(redis_client: Redis) -> None:
    functions = Functions(redis_client)
    await functions.load()
    first = Keys(await shared_secret(redis_client, AGENT_KEYS))
    made = first.make(KEY, AttemptId(5, 2), 1000)
    await redis_client.flushall()
    await functions.load()
    await renew(first, redis_client)
    newcomer = Keys(await shared_secret(redis_client, AGENT_KEYS))
    assert newcomer.read(made) == first.read(made)


async def test_a_gateway_that_comes_back_late_takes_the_new_secret_and_knows_the_old(redis_client: Redis) -> None:
    functions = Functions(redis_client)
    await functions.load()
    survivor = Keys(await shared_secret(redis_client, AGENT_KEYS))
    old = survivor.make(KEY, AttemptId(5, 2), 1000)
    await redis_client.flushall()
    await functions.load()
    newcomer = Keys(await shared_secret(redis_client, AGENT_KEYS))
    await renew(survivor, redis_client)
    assert survivor.secret == newcomer.secret
    assert newcomer.read(survivor.make(KEY, AttemptId(6, 0), 1000)).attempt == AttemptId(6, 0)
    assert survivor.read(old).attempt == AttemptId(5, 2)


def door(patience_s: float = 30.0) -> EpisodeRouter:
    return EpisodeRouter(Keys(SECRET), now=lambda: 1000.0, patience_s=patience_s)


async def refused(asking: object) -> RefusalKind:
    with pytest.raises(Refusal) as refusal:
        await asking  # type: ignore[misc]
    return refusal.value.kind


async def test_a_request_waits_until_its_episode_is_here(codec: HermesCodec) -> None:
    one, entrance = Bench(codec), door()
    key = Keys(SECRET).make(one.order.key, AttemptId(0, 0), 1000)
    asking = asyncio.create_task(entrance.ask(key, request(user("hi"))))
    await asyncio.sleep(0)
    with entrance.open(one.episode) as given:
        assert given == key
        answer = await take(await asking)
        assert await entrance.count_tokens(key, request(user("hi"))) == answer.usage.num_prompt_tokens
        await entrance.reward(entrance.paying(key), 1.0)
        for refusing in (entrance.ask, entrance.count_tokens):
            assert await refused(refusing(entrance.paying(key), request(user("hi")))) is RefusalKind.UNKNOWN_KEY
        await entrance.finish(key)
        assert one.episode.finished.is_set()
        await one.episode.seal()
    assert await refused(entrance.ask(key, request(user("hi")))) is RefusalKind.ENDED


async def test_what_is_no_key_or_not_here_or_over_is_refused_in_its_own_way(codec: HermesCodec) -> None:
    one, entrance = Bench(codec), door(patience_s=0.0)
    keys = Keys(SECRET)
    key = one.order.key
    assert await refused(entrance.model_names("sk-something")) is RefusalKind.UNKNOWN_KEY
    assert await refused(entrance.finish(keys.make(key, AttemptId(0, 0), 1000 - KEPT_S - 1))) is RefusalKind.ENDED
    assert await refused(entrance.finish(keys.make(key, AttemptId(0, 0), 1000))) is RefusalKind.AWAY
    one.tree.attempt = 3
    with entrance.open(one.episode):
        assert await refused(entrance.finish(keys.make(key, AttemptId(0, 2), 1000))) is RefusalKind.ENDED
        assert await refused(entrance.finish(keys.make(key, AttemptId(0, 4), 1000))) is RefusalKind.AWAY
    assert (
        await refused(entrance.finish(keys.make(key, AttemptId(0, 3), 1000))) is RefusalKind.AWAY
    )  # it goes on elsewhere


async def test_the_same_attempt_of_a_queue_that_was_lost_is_over(codec: HermesCodec) -> None:
    lease = LeasedEpisode(EpisodeKey(JOB, 0, 0), 0, 0, Split.TRAIN, 0, 0, 1, epoch=4)
    one, entrance, keys = Bench(codec, lease=lease), door(patience_s=0.0), Keys(SECRET)
    with entrance.open(one.episode) as given:
        assert keys.read(given).attempt == AttemptId(4, 0)
        for lost in (AttemptId(3, 0), AttemptId(3, 7)):
            key = keys.make(one.order.key, lost, 1000)
            assert await refused(entrance.ask(key, request(user("hi")))) is RefusalKind.ENDED
            assert await refused(entrance.reward(key, 1.0)) is RefusalKind.ENDED
            assert entrance.absent(key) is None
        await take(await entrance.ask(given, request(user("hi"))))
    assert await refused(entrance.finish(keys.make(one.order.key, AttemptId(5, 0), 1000))) is RefusalKind.AWAY


async def test_a_request_that_cannot_be_stored_is_held_and_its_retry_joins_it(codec: HermesCodec) -> None:
    one, entrance = Bench(codec), door(patience_s=0.01)
    with entrance.open(one.episode) as key:
        async with one.episode._writing:  # as while the server is away
            waiting = asyncio.create_task(take(await entrance.ask(key, request(user("hi")))))
            again = asyncio.create_task(take(await entrance.ask(key, request(user("hi"), is_retry=True))))
            while not one.policy.served:
                await asyncio.sleep(0)
            assert not one.records.payloads
            assert not waiting.done()
        assert (await waiting).id == (await again).id
    assert len(one.episode.history.entries) == 1


async def test_a_reward_that_takes_long_to_be_stored_is_not_sent_away_and_counts_once(codec: HermesCodec) -> None:
    one, entrance = Bench(codec), door(patience_s=0.0)
    is_back, append = asyncio.Event(), one.records.append

    async def slowly(*given: Any) -> None:
        await is_back.wait()
        await append(*given)

    with entrance.open(one.episode) as key:
        turn = await take(await entrance.ask(key, request(user("hi"))))
        one.records.append = slowly
        paying = asyncio.create_task(entrance.reward(entrance.paying(key), 0.25, turn=turn.id))
        while not one.episode.rewards.posted:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # longer than anybody waits here for an episode
        assert not paying.done()
        is_back.set()
        await paying
        assert one.episode.rewards.by_turn() == {0: 0.25}


async def test_who_waits_for_an_episode_is_sent_on_when_the_gateway_leaves() -> None:
    leaving = asyncio.Event()
    entrance = EpisodeRouter(Keys(SECRET), now=lambda: 1000.0, leaving=leaving)
    asking = asyncio.create_task(
        refused(entrance.finish(Keys(SECRET).make(EpisodeKey("job-1", 0, 0), AttemptId(0, 0), 1000)))
    )
    await asyncio.sleep(0)
    assert not asking.done()
    leaving.set()
    async with asyncio.timeout(HANG_S):
        assert await asking is RefusalKind.AWAY
