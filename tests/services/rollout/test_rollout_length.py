"""Policies that talk without end: those that go in circles, and those that are merely long."""

from __future__ import annotations

import random
from array import array
from typing import NoReturn

import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.episode_limits import goes_in_circles
from gspo_core.types import Split, StopReason
from services.engines.protocol import ContextFull
from services.workers.episode import Episode
from tests.services.rollout.rollout_kit import ScriptedPolicy, Speech, Table, load_codec, make_order, make_setting


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> HermesCodec:
    return load_codec(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("piece", [1, 3, 16, 64])
def test_any_short_piece_again_and_again_is_a_circle_and_one_other_token_is_none(piece: int) -> None:
    rng = random.Random(piece)
    once = [rng.randrange(1000) for _ in range(piece)]
    said = array("i", [7, 8, 9, *once * (512 // piece)])
    assert goes_in_circles(said, 256)
    said[-100] = 5000
    assert not goes_in_circles(said, 256)
    assert not goes_in_circles(said[:200], 256), "it has not gone on for so long yet"


def test_a_text_is_no_circle() -> None:
    rng = random.Random(0)
    assert not goes_in_circles(array("i", [rng.randrange(50) for _ in range(4096)]), 8)


@pytest.mark.parametrize("limit", [None, 40])
async def test_an_episode_that_goes_in_circles_ends_and_is_scored(
    redis_client: Redis, codec: HermesCodec, limit: int | None
) -> None:
    table, speech = await Table.lay(redis_client), Speech(codec)
    circles = speech.say("no " * 60)
    await table.dispatch()
    (lease,) = await table.lease()
    setting = make_setting(table, codec, ScriptedPolicy([circles]))
    order = make_order(lease, limits={"max_repetition_tokens": limit}, rollout={"group_size": 2, "chunk_tokens": 30})
    reason = await Episode(setting, order).run()
    segments = await table.segments(lease.key)
    assert segments[-1].outcome is not None
    if limit is None:
        assert reason is StopReason.COMPLETED
    else:
        assert reason is StopReason.REPETITION
        assert sum(segment.num_actions for segment in segments) == 60
        assert segments[-1].outcome.reward == 0.0


async def test_an_episode_that_fills_the_context_of_its_engines_ends_there_with_its_tokens(
    redis_client: Redis, codec: HermesCodec
) -> None:
    """It is neither failed nor sampled again, where theirs is shorter than its own."""
    table, said = await Table.lay(redis_client), Speech(codec).say("x" * 50)

    async def is_full(_ids: list[int]) -> NoReturn:
        raise ContextFull("http://e: as long as any that it samples")

    await table.dispatch()
    (lease,) = await table.lease()
    policy = ScriptedPolicy([said[:30], is_full])
    assert await Episode(make_setting(table, codec, policy), make_order(lease)).run() is StopReason.CONTEXT_OVERFLOW
    segments = await table.segments(lease.key)
    assert sum(segment.num_actions for segment in segments) == 30
    assert segments[-1].outcome is not None
    assert segments[-1].outcome.reward is not None
    assert len(policy.prompts) == 2


@pytest.mark.parametrize(
    ("num_sampled", "split", "cost"),
    [
        (50, Split.TRAIN, 0.0),
        (80, Split.TRAIN, 0.0),
        (90, Split.TRAIN, 0.5),
        (100, Split.TRAIN, 1.0),
        (90, Split.EVAL, 0),
    ],
)
async def test_length_costs_evenly_towards_the_limit(
    redis_client: Redis, codec: HermesCodec, num_sampled: int, split: Split, cost: float
) -> None:
    table = await Table.lay(redis_client)
    said = Speech(codec).say("x" * (num_sampled - 1))
    await table.dispatch(split=split, task=0)
    (lease,) = await table.lease()
    limits = {"max_episode_tokens": 100, "overlong_tokens": 20}
    setting = make_setting(table, codec, ScriptedPolicy([said]))
    await Episode(setting, make_order(lease, limits=limits)).run()
    outcome = (await table.segments(lease.key))[-1].outcome
    assert outcome is not None
    assert outcome.reward == pytest.approx(-cost)
    assert outcome.reward_parts == ({"overlong": pytest.approx(-cost)} if cost else {})
