"""Keys of agents and the door that they open."""

from __future__ import annotations

import asyncio
import random

import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.types import EpisodeKey
from services.gateway.door import Door
from services.gateway.keys import KEPT_S, Keys, Named, UnknownKey
from services.gateway.turns import Refusal, RefusalKind
from services.state.functions import Functions
from services.state.shared_secrets import AGENT_KEYS, shared_secret
from tests.services.gateway.gateway_kit import Bench, request, take, user

KEY = EpisodeKey("job_a-1.x", 7, 3)
SECRET = bytes(range(32))


def test_a_key_names_what_it_was_made_for() -> None:
    made = Keys(SECRET).make(KEY, 2, 1000.7)
    assert made.startswith("ep_")
    assert Keys(SECRET).read(made) == Named(KEY, 2, 1000 + KEPT_S)


def test_no_other_text_is_a_key() -> None:
    keys, rng = Keys(SECRET), random.Random(0)
    made = keys.make(KEY, 2, 1000)
    forged = Keys(SECRET[::-1]).make(KEY, 2, 1000)
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


def door(patience_s: float = 30.0) -> Door:
    return Door(Keys(SECRET), now=lambda: 1000.0, patience_s=patience_s)


async def refused(asking: object) -> RefusalKind:
    with pytest.raises(Refusal) as refusal:
        await asking  # type: ignore[misc]
    return refusal.value.kind


async def test_a_request_waits_until_its_episode_is_here(codec: HermesCodec) -> None:
    one, entrance = Bench(codec), door()
    key = Keys(SECRET).make(one.order.key, 0, 1000)
    asking = asyncio.create_task(entrance.ask(key, request(user("hi"))))
    await asyncio.sleep(0)
    with entrance.open(one.episode) as given:
        assert given == key
        answer = await take(await asking)
        assert await entrance.count_tokens(key, request(user("hi"))) == answer.usage.num_prompt_tokens
        await entrance.reward(key, 1.0)
        await entrance.finish(key)
        assert one.episode.finished.is_set()
        await one.episode.seal()
    assert await refused(entrance.ask(key, request(user("hi")))) is RefusalKind.ENDED


async def test_what_is_no_key_or_not_here_or_over_is_refused_in_its_own_way(codec: HermesCodec) -> None:
    one, entrance = Bench(codec), door(patience_s=0.0)
    keys = Keys(SECRET)
    key = one.order.key
    assert await refused(entrance.model_names("sk-something")) is RefusalKind.UNKNOWN_KEY
    assert await refused(entrance.finish(keys.make(key, 0, 1000 - KEPT_S - 1))) is RefusalKind.ENDED
    assert await refused(entrance.finish(keys.make(key, 0, 1000))) is RefusalKind.AWAY
    one.tape.attempt = 3
    with entrance.open(one.episode):
        assert await refused(entrance.finish(keys.make(key, 2, 1000))) is RefusalKind.ENDED
        assert await refused(entrance.finish(keys.make(key, 4, 1000))) is RefusalKind.AWAY
    assert await refused(entrance.finish(keys.make(key, 3, 1000))) is RefusalKind.AWAY  # it goes on elsewhere


async def test_a_request_that_cannot_be_stored_in_time_becomes_a_turn_that_the_retry_joins(codec: HermesCodec) -> None:
    one, entrance = Bench(codec), door(patience_s=0.01)
    with entrance.open(one.episode) as key:
        async with one.episode._writing:
            assert await refused(entrance.ask(key, request(user("hi")))) is RefusalKind.AWAY
        patient = door()
        with patient.open(one.episode):
            await take(await patient.ask(key, request(user("hi"), is_retry=True)))
    assert len(one.episode.history.entries) == 1
