"""Rewards that come after the agent's end, also when nobody is left who knew the episode: each counts once."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.codec import decode
from gspo_core.types import EpisodeKey, Segment, StopReason
from services.episodes.keys import KEPT_S, Keys
from services.episodes.metering import Counters
from services.gateway.agent import rewards as rewards_module
from services.gateway.agent.door import EpisodeRouter
from services.gateway.agent.rewards import ANYBODY, EndedEpisode, LateRewards, Payer
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.state.client import NotPermitted
from services.state.queue import Bus
from services.state.queue_records import Waiting
from services.state.retry import Backoff, Retrier
from services.state.server import connect
from services.workers.episode import Episode
from tests.services.gateway.agent_kit import SECRET, AgentWorld, Behavior, Client, Doors, agent_order, agent_setting
from tests.services.gateway.gateway_kit import BabblingPolicy, judge, said, user
from tests.services.rollout.rollout_kit import JOB, TRAINER, Speech, Table
from tests.services.state.faults import MortalServer

HI = user("hi")
KEY = EpisodeKey(JOB, 0, 0)
START = 1_700_000_000.0
HOUR = 3600.0
# A call that Redis answers takes as long as it takes on a busy machine; only who is to be sent away waits briefly.
PATIENT_S, BRIEF_S = 60.0, 0.5


class Hours:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def gateway(bus: Bus, now: Hours, patience_s: float = PATIENT_S) -> EpisodeRouter:
    """A new one, which knows nothing of what came before."""
    door, counters = EpisodeRouter(Keys(SECRET), now=now, patience_s=patience_s), Counters()
    retrier = Retrier(counters, random.Random(0), Backoff(first_s=0.001, max_s=0.002))
    door.late = LateRewards(bus, retrier, counters, now)
    return door


class Played:
    """One episode whose agent ended; ``key`` is all that is left of it."""

    def __init__(self, table: Table, policy: BabblingPolicy, key: str, counters: Counters, stop: StopReason) -> None:
        self.table, self.policy, self.key, self.counters, self.stop = table, policy, key, counters, stop

    async def record(self) -> list[Segment]:
        return [decode(data) for _, data in await self.table.bus.read_segments(JOB, block_ms=0)]


async def two_turns(llm: Client) -> None:
    first = await llm.say(HI)
    await llm.say(HI, said(first), user("how are you?"))


async def play(
    table: Table,
    codec: HermesCodec,
    now: Hours,
    behavior: Behavior = two_turns,
    reward_range: tuple[float, float] | None = None,
    **spec: Any,
) -> Played:
    keys: list[str] = []

    async def agent(llm: Client) -> float | None:
        keys.append(llm.llm.reward_key)
        return await behavior(llm)

    speech = Speech(codec)
    policy = BabblingPolicy(codec, random.Random(0), [speech.say(text) for text in ("Hello.", "Fine.")])
    doors = Doors(gateway(table.bus, now))
    setting = agent_setting(table, codec, policy, doors.now)
    await table.dispatch()
    (lease,) = await table.lease()
    rewards = {"rewards": {"deadline_s": HOUR}} | spec
    stop = await Episode(
        setting, agent_order(lease, AgentWorld(agent, doors, reward_range=reward_range), **rewards)
    ).run()
    return Played(table, policy, keys[-1], setting.counters, stop)


@pytest.fixture
async def table(redis_client: Redis) -> Table:
    return await Table.lay(redis_client)


async def refused(asking: Any) -> RefusalKind:
    with pytest.raises(Refusal) as refusal:
        await asking
    return refusal.value.kind


async def test_a_reward_comes_an_hour_after_the_end_and_counts_once(table: Table, codec: HermesCodec) -> None:
    now = Hours()
    played = await play(table, codec, now)
    assert (played.stop, played.counters["rewards/awaited"]) == (StopReason.COMPLETED, 1)
    assert await table.bus.ready_groups(JOB) == []
    assert await table.bus.waiting(JOB) == Waiting(num_episodes=1, groups=(0,))
    now.now += HOUR
    another = gateway(table.bus, now)
    await another.reward(played.key, 0.5, turn="turn-0-1", token="a")
    await another.reward(played.key, 0.5, turn="turn-0-1", token="a")
    await another.reward(played.key, 0.25, token="b")
    await gateway(table.bus, now).reward(played.key, 0.25, token="b")
    assert await refused(another.reward(played.key, 1.0, token="c")) is RefusalKind.ENDED
    record = await played.record()
    judge(record, played.policy.served)
    (outcome,) = [one.outcome for one in record if one.outcome is not None]
    assert (outcome.stop_reason, outcome.reward, outcome.reward_parts) == ("completed", 0.75, {"turn/1": 0.5})
    assert (outcome.metrics["turns"], record[-1].turn_rewards) == (2, ((1, 0.5),))
    assert outcome.evidence.value("task") == {"number": 1}
    (ready,) = await table.bus.ready_groups(JOB)
    assert ready.num_waited == 1


async def test_a_reward_that_is_sent_again_after_the_end_is_answered_as_it_was(
    table: Table, codec: HermesCodec
) -> None:
    """It came while the agent played; another gateway, which knows nothing of that, answers it."""

    async def agent(llm: Client) -> None:
        first = await llm.say(HI)
        await llm.reward(0.5, turn=first.id, token="a")
        await llm.reward(0.25, token="b")

    now = Hours()
    played = await play(table, codec, now, agent)
    for door in (gateway(table.bus, now), gateway(table.bus, now)):
        await door.reward(played.key, 0.5, turn="turn-0-0", token="a")
        await door.reward(played.key, 0.25, token="b")
        assert await refused(door.reward(played.key, 0.75, token="b")) is RefusalKind.INVALID
        for new in ({"token": "c"}, {"turn": "turn-0-0"}):
            assert await refused(door.reward(played.key, 0.25, **new)) is RefusalKind.ENDED
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    assert (outcome.reward, outcome.reward_parts) == (0.75, {"turn/0": 0.5})


async def test_an_episode_ends_paid_also_where_its_rewards_may_not_be_remembered(
    table: Table, codec: HermesCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under permissions of an earlier release."""

    async def agent(llm: Client) -> None:
        await llm.say(HI)
        await llm.reward(0.25, token="a")

    async def may_not(*given: Any) -> None:
        raise NotPermitted("no permissions to run the function")

    monkeypatch.setattr(Bus, "remember_rewards", may_not)
    played = await play(table, codec, Hours(), agent)
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    assert outcome.reward == 0.25


async def test_a_token_that_was_used_for_another_reward_is_refused(table: Table, codec: HermesCodec) -> None:
    now = Hours()
    played = await play(table, codec, now)
    door = gateway(table.bus, now)
    await door.reward(played.key, -0.0, turn="turn-0-0", token="t")
    await gateway(table.bus, now).reward(played.key, 0.0, turn="turn-0-0", token="t")
    assert await refused(door.reward(played.key, 0.25, turn="turn-0-1", token="t")) is RefusalKind.INVALID
    assert await refused(door.reward(played.key, 1.0, token="t")) is RefusalKind.INVALID
    await door.reward(played.key, 0.75, token="u")
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    assert (outcome.reward, outcome.reward_parts) == (0.75, {"turn/0": 0.0})


@pytest.mark.parametrize("reward", [2e15, -2e15, 1e308])
async def test_a_reward_is_as_small_as_that_of_an_environment(table: Table, codec: HermesCodec, reward: float) -> None:
    """Larger ones would leave no number of their group."""
    played = await play(table, codec, Hours())
    door = gateway(table.bus, Hours())
    assert await refused(door.reward(played.key, reward)) is RefusalKind.INVALID
    await door.reward(played.key, math.copysign(7e14, reward), turn="turn-0-0")
    assert await refused(door.reward(played.key, math.copysign(7e14, reward))) is RefusalKind.INVALID  # in all


async def test_what_is_known_of_the_end_stays(table: Table, codec: HermesCodec) -> None:
    """The limit that was met, and the cost of the length."""
    now = Hours()
    limits = {"max_turns": 1, "max_episode_tokens": 20, "overlong_tokens": 20}
    played = await play(table, codec, now, limits=limits)
    assert played.stop is StopReason.MAX_TURNS
    await gateway(table.bus, now).reward(played.key, 1.0)
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    cost = 7 / 20  # six letters and the end of the turn
    assert outcome.stop_reason is StopReason.MAX_TURNS
    assert (outcome.reward, outcome.reward_parts) == (pytest.approx(1 - cost), {"overlong": pytest.approx(-cost)})


async def test_a_reward_that_never_comes_is_no_reward_of_0(table: Table, codec: HermesCodec) -> None:
    now = Hours()
    played = await play(table, codec, now)
    now.now += HOUR + 1
    door = gateway(table.bus, now)
    assert await refused(door.reward(played.key, 1.0)) is RefusalKind.ENDED
    assert await table.bus.expire_rewards(JOB, TRAINER, now=now()) == 1
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    assert (outcome.stop_reason, outcome.reward, outcome.metrics["turns"]) == (StopReason.NO_REWARD, None, 2)
    assert await refused(door.reward(played.key, 1.0)) is RefusalKind.ENDED
    assert await table.bus.waiting(JOB) == Waiting(num_missed=1)


async def test_what_turns_were_paid_is_the_reward_where_no_other_comes(table: Table, codec: HermesCodec) -> None:
    now = Hours()
    played = await play(table, codec, now)
    door = gateway(table.bus, now)
    await door.reward(played.key, 0.5, turn="turn-0-0")
    await door.reward(played.key, 0.25, turn="turn-0-0")
    for unknown in ("turn-0-2", "turn-1-0", "turn-0-00", "x"):
        assert await refused(door.reward(played.key, 1.0, turn=unknown)) is RefusalKind.INVALID
    await table.bus.expire_rewards(JOB, TRAINER, now=now() + HOUR + 1)
    last = (await played.record())[-1]
    assert last.outcome is not None
    assert (last.outcome.stop_reason, last.outcome.reward, last.turn_rewards) == ("completed", 0.75, ((0, 0.75),))


async def test_an_agent_that_was_paid_by_the_turn_waits_for_nothing(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> None:
        first = await llm.say(HI)
        await llm.reward(0.5, turn=first.id)

    played = await play(table, codec, Hours(), agent)
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    assert outcome.reward == 0.5


async def test_rewards_from_many_sides_at_once(table: Table, codec: HermesCodec) -> None:
    """Gateways that know nothing of each other: each reward of a turn counts once, and one final reward does."""
    now = Hours()
    played = await play(table, codec, now)
    doors = [gateway(table.bus, now) for _ in range(4)]
    await asyncio.gather(
        *(door.reward(played.key, 1.0, turn="turn-0-0", token=token) for token in "abcd" for door in doors)
    )
    ends = await asyncio.gather(
        *(door.reward(played.key, float(number)) for number, door in enumerate(doors)), return_exceptions=True
    )
    (winner,) = [number for number, end in enumerate(ends) if end is None]
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    assert outcome.reward == 4 + winner
    assert sum(one.is_final for one in await played.record()) == 1


async def test_a_reward_that_comes_while_the_episode_is_set_aside(table: Table, codec: HermesCodec) -> None:
    """Its agent has ended, its worker has not yet said so."""
    now, begun = Hours(), asyncio.Event()
    keys: list[str] = []

    async def agent(llm: Client) -> None:
        keys.append(llm.llm.reward_key)
        await two_turns(llm)

    awaiting, proceed = table.bus.await_reward, asyncio.Event()

    async def slowly(*given: Any) -> None:
        begun.set()
        await proceed.wait()
        await awaiting(*given)

    table.bus.await_reward = slowly  # type: ignore[method-assign]
    playing = asyncio.create_task(play(table, codec, now, agent))
    await begun.wait()
    paying = gateway(table.bus, now, BRIEF_S).reward(keys[0], 1.0, token="t")
    assert await refused(paying) is RefusalKind.AWAY  # to be asked again
    proceed.set()
    played = await playing
    door = gateway(table.bus, now)
    await door.reward(keys[0], 1.0, token="t")
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    assert outcome.reward == 1.0


async def test_a_reward_that_comes_in_the_moment_of_the_end(table: Table, codec: HermesCodec) -> None:
    """It is given to the episode, which is sealed before it can take it."""

    class Sealing:
        is_sealed = False

        async def reward(self, *_: Any) -> None:
            self.is_sealed = True
            raise Refusal(RefusalKind.ENDED, "this episode has ended")

    now = Hours()
    played = await play(table, codec, now)
    door = gateway(table.bus, now)
    door._open[KEY] = (0, cast(Any, Sealing()))
    await door.reward(played.key, 1.0)
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    assert outcome.reward == 1.0


async def test_the_key_lives_as_long_as_the_reward_may_come(table: Table, codec: HermesCodec) -> None:
    now = Hours()
    played = await play(table, codec, now, rewards={"deadline_s": 1000 * HOUR / 3})
    now.now += KEPT_S + 1000 * HOUR / 3 - 1
    assert await refused(gateway(table.bus, now).reward(played.key, 1.0)) is RefusalKind.ENDED
    now.now = START + 1000 * HOUR / 3 - 1
    await gateway(table.bus, now).reward(played.key, 1.0)


async def test_an_episode_is_not_paid_without_end(
    table: Table, codec: HermesCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards_module, "MAX_REWARDS", 8)
    now = Hours()
    played = await play(table, codec, now)
    door = gateway(table.bus, now)
    for _ in range(8):
        await door.reward(played.key, 0.5, turn="turn-0-0")
    assert await refused(door.reward(played.key, 0.5, turn="turn-0-0")) is RefusalKind.OVER_BUDGET
    await door.reward(played.key, 0.0)


async def test_a_reward_counts_once_after_everything_was_killed(
    tmp_path: Path, server_binary: Path, codec: HermesCodec
) -> None:
    now, server = Hours(), MortalServer(tmp_path, server_binary)
    try:
        async with connect(server.url) as redis:
            played = await play(await Table.lay(redis), codec, now)
        for _ in range(2):  # before the reward, and after it
            await server.kill_and_restart()
            async with connect(server.url) as redis:
                bus = Bus(redis)
                await gateway(bus, now).reward(played.key, 0.5, token="t")
        async with connect(server.url) as redis:
            played.table = await Table.lay(redis, "another")
            record = await played.record()
            judge(record, played.policy.served)
            assert [one.outcome.reward for one in record if one.outcome] == [0.5]
            assert len(await played.table.bus.ready_groups(JOB)) == 1
    finally:
        server.close()


async def one_of_two(llm: Client) -> None:
    await llm.say(HI)
    second = await llm.say(HI)
    await llm.say(HI, said(second), user("how are you?"))


async def test_a_turn_that_was_had_is_trained_also_where_its_reward_is_late(table: Table, codec: HermesCodec) -> None:
    """Nobody went on from it, so it was not to be; then somebody paid it."""
    now = Hours()
    played = await play(table, codec, now, one_of_two)
    door = gateway(table.bus, now)
    await door.reward(played.key, 0.5, turn="turn-0-0", token="a")
    await door.reward(played.key, 1.0, token="b")
    last = (await played.record())[-1]
    assert last.outcome is not None
    assert (last.untrained_turns, last.outcome.reward, last.outcome.metrics["untrained_turns"]) == ((), 1.5, 0)


async def test_late_rewards_do_not_leave_the_range_together(table: Table, codec: HermesCodec) -> None:
    """Nor does one that was refused end the wait."""
    now = Hours()
    played = await play(table, codec, now, reward_range=(0.0, 1.0))
    door = gateway(table.bus, now)
    await door.reward(played.key, 0.75, turn="turn-0-0", token="a")
    for named in ({"turn": "turn-0-1"}, {}):
        with pytest.raises(Refusal, match=r"its rewards are 1\.25 in all, outside the reward_range") as told:
            await door.reward(played.key, 0.5, **named)
        assert (told.value.kind, told.value.param) == (RefusalKind.INVALID, "reward")
    await door.reward(played.key, 0.75, turn="turn-0-0", token="a")
    assert door.late is not None
    assert door.late._counters["rewards/refused"] == 2
    await door.reward(played.key, 0.25)
    outcome = (await played.record())[-1].outcome
    assert outcome is not None
    assert outcome.reward == 1.0


@pytest.mark.parametrize("missing", [("payer",), ("payer", "untrained")])
def test_what_an_earlier_release_kept_is_read(missing: tuple[str, ...]) -> None:
    """It took rewards from anybody and within no range."""
    kept = msgspec.msgpack.decode(EndedEpisode(StopReason.MAX_TURNS, 0.25, [0, 1], Payer("judge")).encode())
    ended = EndedEpisode.decode(msgspec.msgpack.encode({name: kept[name] for name in kept.keys() - set(missing)}))
    assert ended == EndedEpisode(StopReason.MAX_TURNS, 0.25, [0, 1], ANYBODY)
    ended.payer.check(1e6, by_own_key=True)


def test_who_is_paid_late_had_all_that_it_goes_on_from() -> None:
    ended = EndedEpisode(StopReason.COMPLETED, 0.0, [0, 1, 2, 3], untrained={1: 0, 2: 1, 3: None})
    assert (ended._had_by([2]), ended._had_by([0, 3]), ended._had_by([])) == ({1, 2}, {3}, set())
    assert EndedEpisode.decode(ended.encode()).untrained == ended.untrained
