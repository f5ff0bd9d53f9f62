"""What an agent was paid so far: what one more costs, and that its sums are those of all in their order."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from gspo_core.chat import HermesCodec
from services.episodes.snapshots import Rewards, StoredReward
from tests.services.gateway.gateway_kit import Bench, user


class Unread(list[StoredReward]):
    def __iter__(self) -> Iterator[StoredReward]:
        raise AssertionError("all rewards are gone through")

    def __reversed__(self) -> Iterator[StoredReward]:
        return iter(self)


async def test_one_more_reward_goes_through_none_of_those_before(codec: HermesCodec) -> None:
    """An episode may have a hundred thousand of them, and nobody else is answered meanwhile."""
    one = Bench(codec)
    turn = (await one.ask(user("hi"))).id
    await one.episode.reward(0.25, turn, "first", pays=True)
    one.episode.rewards.posted = Unread(one.episode.rewards.posted)
    await one.episode.reward(0.5, turn, "second", pays=True)
    await one.episode.reward(0.25, turn, "first", pays=True)  # sent again
    await one.episode.reward(1.0, token="final", pays=True)
    assert (one.episode.rewards.final, one.episode.rewards.by_turn()) == (1.0, {0: 0.75})
    assert len(one.episode.rewards.posted) == 3


def test_sums_are_those_of_all_in_their_order_to_the_last_bit() -> None:
    draw = random.Random(0)
    for _ in range(200):
        posted = [
            StoredReward(
                draw.choice(["", f"token {number}"]),
                draw.choice([None, 0, 1, 2]),
                draw.choice([1.0, -1.0]) * 10.0 ** draw.randint(-17, 15) * draw.random(),
            )
            for number in range(draw.randint(1, 40))
        ]
        sums = defaultdict[int, float](float)
        for one in posted:
            if one.turn is not None:
                sums[one.turn] += one.value
        finals = [one.value for one in posted if one.turn is None]
        *before, last = posted
        rewards = Rewards(before)
        amounts = rewards.amounts_with(last)
        assert rewards.posted == before
        rewards.add(last)
        assert (rewards.posted, rewards.final) == (posted, finals[-1] if finals else None)
        assert list(rewards.by_turn().items()) == list(sums.items())
        assert amounts == [rewards.final or 0.0, *sums.values()]


def test_rewards_of_an_agent_that_begins_again_count_once() -> None:
    by_turn = [StoredReward("", 0, 0.5), StoredReward("", 0, 0.25), StoredReward("x", 1, 1.0)]
    posted = [*by_turn, StoredReward("", None, 2.0)]
    rewards = Rewards.come_again(posted)
    for one in posted:
        if one.token:
            assert rewards.knows(one)
            continue
        assert (rewards.knows(one), rewards.comes_again(one)) == (False, True)
        assert rewards.amounts_with(one) == [2.0, 0.75, 1.0]
        rewards.add(one)
    assert rewards.posted == posted
    more = StoredReward("", 0, 0.5)
    assert rewards.amounts_with(more) == [2.0, 1.25, 1.0]
    rewards.add(more)
    assert rewards.posted == [*posted, more]
