"""The life of an episode that an agent plays, against a real queue: outcomes, rewards, deaths and moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from gspo_core.chat import HermesCodec
from gspo_core.codec import decode
from gspo_core.types import EpisodeKey, Outcome, Segment, StopReason, Trajectory
from services.episodes.policy import Drained
from services.episodes.snapshots import TreeSnapshot
from services.gateway.agent.rewards import Payer
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.hosts.session import SessionLost
from services.state.keys import job_key
from services.state.queue import Snapshot
from services.workers.episode import Episode
from tests.services.gateway.agent_kit import (
    AgentHere,
    AgentWorld,
    Behavior,
    Client,
    Doors,
    agent_order,
    agent_setting,
    door,
)
from tests.services.gateway.gateway_kit import (
    BabblingPolicy,
    HeldRecords,
    judge,
    quick_setting,
    read,
    request,
    said,
    user,
)
from tests.services.rollout.rollout_kit import JOB, Speech, Table, until

HI = user("hi")
KEY = EpisodeKey(JOB, 0, 0)


@pytest.fixture
async def table(redis_client: Redis) -> Table:
    return await Table.lay(redis_client)


async def test_what_was_kept_of_another_attempt_is_not_taken_for_this_ones(codec: HermesCodec) -> None:
    records = HeldRecords()
    records.snapshot = Snapshot(1, 0, b"kept")
    setting = quick_setting(records, codec, BabblingPolicy(codec, random.Random(0)))
    found = [await setting.kept(KEY, attempt) for attempt in range(3)]
    assert found == [None, records.snapshot, None]


class Play:
    """One episode, leased and ready to run."""

    def __init__(self, table: Table, codec: HermesCodec, behavior: Behavior, *speeches: str, **world: Any) -> None:
        speech = Speech(codec)
        self.table, self.codec = table, codec
        self.policy = BabblingPolicy(codec, random.Random(0), [speech.say(text) for text in speeches])
        self.doors = Doors(door())
        self.world = AgentWorld(behavior, self.doors, **world)
        self.setting = agent_setting(table, codec, self.policy, self.doors.now)

    async def lease(self, **spec: Any) -> Episode:
        await self.table.dispatch()
        (lease,) = await self.table.lease()
        return Episode(self.setting, agent_order(lease, self.world, **spec))

    async def run(self, **spec: Any) -> StopReason:
        return await (await self.lease(**spec)).run()

    async def taken_over(self, **spec: Any) -> Episode:
        """By another gateway, after this one handed the episode back."""
        await self.table.bus.hand_back(JOB, self.table.token, [KEY])
        self.table = await Table.lay(self.table.redis, "worker-1")
        self.doors.now = door()
        self.setting = agent_setting(self.table, self.codec, self.policy, self.doors.now)
        (lease,) = await self.table.lease()
        return Episode(self.setting, agent_order(lease, self.world, **spec))

    async def record(self) -> list[Segment]:
        entries = await self.table.redis.xrange(job_key(JOB, "segments"))
        return [decode(fields[b"d"]) for _, fields in entries]

    async def outcome(self) -> Outcome:
        found = (await self.record())[-1].outcome
        assert found is not None
        return found


async def two_turns(llm: Client) -> float:
    first = await llm.say(HI)
    await llm.say(HI, said(first), user("how are you?"))
    return 0.5


async def test_the_agents_value_is_the_reward(table: Table, codec: HermesCodec) -> None:
    play = Play(table, codec, two_turns, "Hello.", "Fine.")
    assert await play.run() is StopReason.COMPLETED
    record, outcome = await play.record(), await play.outcome()
    assert (outcome.reward, outcome.metrics["turns"], outcome.metrics["forks"]) == (0.5, 2, 0)
    judge(record, play.policy.served)
    assert {segment.branch for segment in record} == {0}
    assert play.world.starts == [f"{KEY}/0/0"]


@pytest.mark.parametrize("returned", [None, 0.75])
async def test_posted_rewards_stand_before_what_the_agent_returns(
    table: Table, codec: HermesCodec, returned: float | None
) -> None:
    async def agent(llm: Client) -> float | None:
        first = await llm.say(HI)
        await llm.reward(0.25, turn=first.id)
        await llm.reward(0.5, token="a")
        await llm.reward(0.5, token="a")
        return returned

    play = Play(table, codec, agent, "Hello.")
    assert await play.run() is StopReason.COMPLETED
    outcome = await play.outcome()
    assert (outcome.reward, outcome.reward_parts) == (0.75, {"turn/0": 0.25})
    assert (await play.record())[-1].turn_rewards == ((0, 0.25),)


@pytest.mark.parametrize("name", ["turn/0", "turn/1"])
async def test_no_part_has_the_name_of_what_was_posted_for_a_turn(table: Table, codec: HermesCodec, name: str) -> None:
    """One of the two would be lost."""

    async def agent(llm: Client) -> float | None:
        first = await llm.say(HI)
        await llm.reward(0.25, turn=first.id)
        return 0.5

    play = Play(table, codec, agent, "Hello.", parts={name: 0.125})
    with capture_logs() as logs:
        stop = await play.run(limits={"retries": 0})
    if name == "turn/1":  # a turn that there was not
        assert (await play.outcome()).reward_parts == {"turn/0": 0.25, "turn/1": 0.125}
        return
    assert stop is StopReason.ENV_ERROR
    assert "a part of the reward is called turn/0, as what was posted for that turn" in str(logs)


async def refused(asking: Awaitable[object]) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        await asking
    return refusal.value


@pytest.mark.parametrize("has_returned", [True, False])
async def test_the_key_that_samples_pays_nothing(table: Table, codec: HermesCodec, has_returned: bool) -> None:
    """A policy that learns this one request would have solved every task."""

    async def agent(llm: Client) -> float | None:
        first = await llm.say(HI)
        assert (await refused(llm.pay_oneself(0.9))).param == "reward"
        assert (await refused(llm.pay_oneself(0.9, turn=first.id))).param == "reward"
        return 0.25 if has_returned else None

    play = Play(table, codec, agent, "Hello.")
    await play.run(limits={"retries": 0})
    assert (await play.outcome()).reward == (0.25 if has_returned else None)
    assert play.setting.counters["rewards/refused"] == 2


async def test_a_job_may_trust_its_agent_with_its_rewards(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float | None:
        await llm.say(HI)
        await llm.pay_oneself(0.75)
        return 0.25

    play = Play(table, codec, agent, "Hello.")
    assert await play.run(agent={"rewards": "posted"}) is StopReason.COMPLETED
    assert (await play.outcome()).reward == 0.75


async def test_where_what_is_returned_counts_nobody_posts(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float | None:
        await llm.say(HI)
        assert "what its agent returns alone" in (await refused(llm.reward(0.75))).message
        return 0.25

    play = Play(table, codec, agent, "Hello.")
    assert await play.run(agent={"rewards": "returned"}) is StopReason.COMPLETED
    assert (await play.outcome()).reward == 0.25
    assert play.setting.counters["rewards/refused"] == 1


async def test_no_reward_leaves_the_range_that_is_stated(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float | None:
        first = await llm.say(HI)
        assert "outside the reward_range (0, 1)" in (await refused(llm.reward(1.5))).message
        await llm.reward(0.5, turn=first.id)
        return 0.75

    play = Play(table, codec, agent, "Hello.", reward_range=(0.0, 1.0))
    assert await play.run(limits={"retries": 0}) is StopReason.ENV_ERROR
    assert (await play.outcome()).reward is None


async def test_the_reward_that_brings_the_sum_out_of_the_range_is_refused(table: Table, codec: HermesCodec) -> None:
    """Each alone is within it. What is refused counts for nothing, and a repetition is answered as before."""
    told = []

    async def agent(llm: Client) -> float | None:
        first = await llm.say(HI)
        await llm.reward(0.5, turn=first.id, token="a")
        await llm.reward(0.75, token="b")
        told.append(await refused(llm.reward(0.5, turn=first.id, token="c")))
        await llm.reward(0.5, turn=first.id, token="a")
        told.append(await refused(llm.reward(-1.0, token="d")))
        await llm.reward(0.25, token="e")  # in place of the last one
        await llm.reward(0.5, turn=first.id, token="c")
        await llm.reward(-0.25, turn=first.id)
        return None

    play = Play(table, codec, agent, "Hello.", reward_range=(-0.375, 1.25))
    assert await play.run() is StopReason.COMPLETED
    outcome = await play.outcome()
    assert (outcome.reward, outcome.reward_parts) == (1.0, {"turn/0": 0.75})
    assert [(one.kind, one.param) for one in told] == [(RefusalKind.INVALID, "reward")] * 2
    assert told[0].message == (
        "with this one its rewards are 1.75 in all, outside the reward_range (-0.375, 1.25) of its environment"
    )
    assert play.setting.counters["rewards/refused"] == 2


async def test_a_repetition_is_answered_also_where_an_earlier_release_took_too_much(
    table: Table, codec: HermesCodec
) -> None:
    async def agent(llm: Client) -> float | None:
        first = await llm.say(HI)
        _, episode = play.doors.now._open[KEY]
        for token in ("a", "b"):
            await llm.reward(0.75, turn=first.id, token=token)
        episode.payer = Payer(None, -1.0, 1.0)
        await llm.reward(0.75, turn=first.id, token="b")
        assert "1.75 in all" in (await refused(llm.reward(0.25, turn=first.id))).message
        await llm.reward(-0.5, turn=first.id)
        return None

    play = Play(table, codec, agent, "Hello.")
    assert await play.run(limits={"retries": 0}) is StopReason.COMPLETED
    assert (await play.outcome()).reward == 1.0


async def test_a_reward_with_which_the_sum_is_too_large_is_refused(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float | None:
        first = await llm.say(HI)
        await llm.reward(7e14, turn=first.id)
        assert "the sum of its rewards is 1.4e+15" in (await refused(llm.reward(7e14, turn=first.id))).message
        assert "the reward is 1e+308" in (await refused(llm.reward(1e308, turn=first.id))).message
        return 0.0

    play = Play(table, codec, agent, "Hello.")
    assert await play.run() is StopReason.COMPLETED
    assert (await play.outcome()).reward == 7e14


async def test_what_is_refused_is_told_with_the_episode(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float | None:
        first = await llm.say(HI)
        await refused(llm.pay_oneself(0.5))
        await refused(llm.reward(0.5, turn=f"{first.id}0"))
        return 0.25

    play = Play(table, codec, agent, "Hello.")
    await play.run()
    assert (await play.outcome()).metrics["rewards_refused"] == 2
    assert play.setting.counters["rewards/refused"] == 2


async def test_what_an_earlier_gateway_refused_is_told_with_the_episode(table: Table, codec: HermesCodec) -> None:
    told, is_moved = asyncio.Event(), asyncio.Event()

    async def agent(llm: Client) -> float | None:
        await refused(llm.pay_oneself(0.5))
        await llm.say(HI)
        for _ in range(4):
            await refused(llm.pay_oneself(0.5))
        told.set()
        await is_moved.wait()
        await refused(llm.pay_oneself(0.5))
        return 0.25

    play = Play(table, codec, agent, "Hello.", services={})
    await cut_short(play, told)
    episode = await play.taken_over()
    is_moved.set()
    assert await episode.run() is StopReason.COMPLETED
    # Of the first five the last was to be kept with what comes next.
    assert (await play.outcome()).metrics["rewards_refused"] == 5
    assert play.setting.counters["rewards/refused"] == 1


async def test_an_end_that_was_told_is_known_to_the_next_gateway(table: Table, codec: HermesCodec) -> None:
    """A service that answered 202, told its end and left is waited for no longer."""
    told = asyncio.Event()

    async def agent(llm: Client) -> float | None:
        await llm.say(HI)
        await llm.reward(0.5)
        await llm.finish()
        told.set()
        return await asyncio.Event().wait() and None

    play = Play(table, codec, agent, "Hello.", services={})
    append, is_cut = play.setting.outbox.append, []

    async def cut(*given: Any, **named: Any) -> None:
        await append(*given, **named)
        kept = named.get("kept")
        tree = None if kept is None else TreeSnapshot.decode(kept.snapshot.data)
        if tree is not None and tree.finished and not is_cut:
            is_cut.append(True)
            running.cancel()

    play.setting.outbox.append = cut  # type: ignore[method-assign]
    running = asyncio.create_task((await play.lease()).run())
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await (await play.taken_over()).run() is StopReason.COMPLETED
    assert (await play.outcome()).reward == 0.5


async def cut_short(play: Play, said_all: asyncio.Event) -> None:
    """Its gateway dies once the agent was answered all that it said, or whoever pays it."""
    running = asyncio.create_task((await play.lease()).run())
    await asyncio.wait([running, told := asyncio.create_task(said_all.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert told.done()
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("where", ["elsewhere", "replayable", "here"])
async def test_what_was_told_before_any_turn_is_known_to_the_next_gateway(
    table: Table, codec: HermesCodec, where: str
) -> None:
    """An agent that began here, and is not begun again on the same terms, has said nothing yet."""
    told = asyncio.Event()

    async def agent(llm: Client) -> float | None:
        if not told.is_set():
            await llm.reward(0.5, token="a")
            await llm.finish()
            told.set()
            await asyncio.Event().wait()
        return 0.125

    named: dict[str, Any] = {"elsewhere": {"services": {}}, "replayable": {"replayable": True}, "here": {}}
    play = Play(table, codec, agent, **named[where])
    await cut_short(play, told)
    assert await (await play.taken_over()).run() is StopReason.COMPLETED
    assert (await play.outcome()).reward == (0.125 if where == "here" else 0.5)
    assert {segment.attempt for segment in await play.record()} == {int(where == "here")}
    assert play.policy.served == []


async def test_what_was_told_before_any_turn_outlives_the_process_beside_the_gateway(
    table: Table, codec: HermesCodec
) -> None:
    told = asyncio.Event()

    async def agent(llm: Client) -> float | None:
        if not told.is_set():
            await llm.reward(0.5)
            told.set()
            await asyncio.Event().wait()
        return 0.125

    async def ended(session: AgentHere) -> None:
        if not told.is_set():
            await told.wait()
            raise SessionLost("host", "killed")
        await watch(session)

    play = Play(table, codec, agent, replayable=True)
    watch = AgentHere.ended
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgentHere, "ended", ended)
        assert await play.run() is StopReason.COMPLETED
    assert (await play.outcome()).reward == 0.5


async def test_what_a_replayed_agent_posts_again_counts_once(table: Table, codec: HermesCodec) -> None:
    """Its rewards have no tokens. What it posts beyond them is new, and what it posted last stands."""
    told = asyncio.Event()

    async def agent(llm: Client) -> float | None:
        await llm.reward(1.0)
        await llm.reward(0.25)
        first = await llm.say(HI)
        await llm.reward(0.25, turn=first.id)
        await llm.reward(0.5, turn=first.id)
        if not told.is_set():
            told.set()
            await asyncio.Event().wait()
        await llm.reward(-0.5, turn=first.id)
        await llm.reward(0.125)
        return None

    play = Play(table, codec, agent, "Hello.", replayable=True, reward_range=(-1, 1))
    await cut_short(play, told)
    assert await (await play.taken_over()).run() is StopReason.COMPLETED
    assert (await play.outcome()).reward == 0.375
    assert (await play.record())[-1].turn_rewards == ((0, 0.25),)
    assert len(play.policy.served) == 1
    assert play.setting.counters["rewards/refused"] == 0


async def test_an_agent_without_a_reward_has_none(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> None:
        await llm.say(HI)

    play = Play(table, codec, agent)
    assert await play.run(limits={"retries": 1}) is StopReason.ENV_ERROR
    assert (await play.outcome()).reward is None
    assert len(play.world.starts) == 2
    assert play.setting.counters["rewards/missing"] == 2
    assert play.setting.counters["agents/asked_nothing"] == 0


async def test_an_agent_that_asks_for_nothing_is_counted(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float:
        return 1.0

    play = Play(table, codec, agent)
    assert await play.run() is StopReason.COMPLETED
    assert play.setting.counters["agents/asked_nothing"] == 1
    assert play.setting.counters["turns/asked"] == 0


async def test_an_agent_that_fails_is_begun_again_with_another_key(table: Table, codec: HermesCodec) -> None:
    keys: list[str] = []

    async def agent(llm: Client) -> float:
        keys.append(llm.llm.api_key)
        await llm.say(HI)
        if len(keys) == 1:
            raise RuntimeError("bad luck")
        return 1.0

    play = Play(table, codec, agent, "Hello.", "Hello again.")
    assert await play.run() is StopReason.COMPLETED
    record = await play.record()
    assert {segment.attempt for segment in record} == {1}
    judge(record, play.policy.served)
    assert len(set(keys)) == 2
    for key in keys:
        with pytest.raises(Refusal) as refusal:
            await play.doors.now.finish(key)
        assert refusal.value.kind is RefusalKind.ENDED


async def test_finish_ends_an_agent_that_goes_on(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float:
        await llm.say(HI)
        await llm.reward(0.25)
        await llm.finish()
        await asyncio.Event().wait()
        return 1.0

    play = Play(table, codec, agent)
    assert await play.run() is StopReason.COMPLETED
    assert (await play.outcome()).reward == 0.25


async def on_and_on(llm: Client) -> float:
    messages = [HI]
    while True:
        messages += [said(await llm.say(*messages)), user("more")]


async def test_an_agent_that_dies_of_a_limit_is_stopped_by_it(table: Table, codec: HermesCodec) -> None:
    play = Play(table, codec, on_and_on, "One.", "Two.")
    assert await play.run(limits={"max_turns": 2, "on_truncation": "zero"}) is StopReason.MAX_TURNS
    assert (await play.outcome()).reward == 0.0
    assert len(play.world.starts) == 1


async def test_an_agent_that_heeds_a_limit_is_scored_and_the_limit_named(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float:
        with pytest.raises(Refusal, match="rollout stopped: max_turns"):
            await on_and_on(llm)
        return 0.25

    play = Play(table, codec, agent, "One.", "Two.")
    assert await play.run(limits={"max_turns": 2}) is StopReason.MAX_TURNS
    assert (await play.outcome()).reward == 0.25


async def test_an_agent_that_never_ends_is_out_of_time(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float:
        await llm.reward(0.5)
        await asyncio.Event().wait()
        return 1.0

    play = Play(table, codec, agent)
    assert await play.run(limits={"episode_timeout_s": 0.2}) is StopReason.EPISODE_TIMEOUT
    assert (await play.outcome()).reward == 0.5


async def test_an_agent_elsewhere_goes_on_at_another_gateway(table: Table, codec: HermesCodec) -> None:
    told: list[str] = []
    between = asyncio.Event()

    async def agent(llm: Client) -> float:
        first = await llm.say(HI)
        told.append(first.id)
        await between.wait()
        second = await llm.say(HI, said(first), user("how are you?"))
        told.append(second.id)
        return 0.5

    play = Play(table, codec, agent, "Hello.", "Fine.", services={})
    running = asyncio.create_task((await play.lease()).run())
    await until(lambda: bool(told))
    play.setting.leaving.set()
    with pytest.raises(Drained):
        await running
    episode = await play.taken_over()
    between.set()
    assert await episode.run() is StopReason.COMPLETED
    record = await play.record()
    judge(record, play.policy.served)
    assert told == ["turn-0-0", "turn-0-1"]
    assert {(segment.attempt, segment.branch) for segment in record} == {(0, 0)}
    assert play.world.starts == [f"{KEY}/0/0"]
    assert play.setting.counters["episodes/resumed"] == 1


async def test_an_agent_elsewhere_goes_on_when_who_watched_it_dies_before_anything_is_stored(
    table: Table, codec: HermesCodec
) -> None:
    """Its first request is held; the process beside the gateway that waits for its end is killed."""
    play = Play(table, codec, two_turns, "Hello.", "Fine.", services={})
    play.policy.gate = asyncio.Event()
    watches = 0
    suspected: list[AgentHere] = []

    async def ended(session: AgentHere) -> None:
        nonlocal watches
        watches += 1
        if watches <= 2:
            await until(lambda: play.setting.counters["turns/asked"] == watches)
            if watches == 2:
                play.policy.gate.set()
            raise SessionLost("host", "killed", is_suspect=True)
        await watch(session)

    async def admit(session: AgentHere) -> None:
        pass

    watch = AgentHere.ended
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.workers.episode.HostedSession", AgentHere)
        patch.setattr(AgentHere, "admit", admit, raising=False)
        patch.setattr(AgentHere, "watch", suspected.append, raising=False)
        patch.setattr(AgentHere, "ended", ended)
        assert await play.run() is StopReason.COMPLETED
    assert suspected == []
    record = await play.record()
    judge(record, play.policy.served)
    assert {segment.attempt for segment in record} == {0}
    assert play.world.starts == [f"{KEY}/0/0"]
    assert watches == 3


async def killed_in_a_turn(play: Play, num_served: int, **spec: Any) -> None:
    """Its gateway is gone without a word, while a turn is sampled."""
    play.policy.silent_after = num_served
    running = asyncio.create_task((await play.lease(**spec)).run())
    await until(lambda: len(play.policy.served) >= num_served)
    running.cancel()
    await asyncio.wait([running])
    play.policy.silent_after = None


SLOW = {"rollout": {"group_size": 2, "chunk_tokens": 4}}


async def test_a_turn_cut_off_by_a_death_goes_on_where_it_stopped(table: Table, codec: HermesCodec) -> None:
    play = Play(table, codec, two_turns, "Hello, you there.", "Fine, and how are you?", services={})
    await killed_in_a_turn(play, 8, **SLOW)
    assert await (await play.taken_over(**SLOW)).run() is StopReason.COMPLETED
    record = await play.record()
    judge(record, play.policy.served)
    assert {(segment.attempt, segment.branch) for segment in record} == {(0, 0)}
    assert [codec.tokenizer.decode(play_turn(record, turn))[:5] for turn in (0, 1)] == ["Hello", "Fine,"]


def play_turn(record: Sequence[Segment], turn: int) -> list[int]:
    return [
        token for segment in record if segment.turn == turn for token in segment.token_ids[segment.action_mask].tolist()
    ]


async def test_an_agent_that_died_with_its_gateway_begins_again(table: Table, codec: HermesCodec) -> None:
    play = Play(table, codec, two_turns, "Hello, you there.", "Fine, and how are you?", "Hello.", "Fine.")
    await killed_in_a_turn(play, 8, **SLOW)
    assert await (await play.taken_over(**SLOW)).run() is StopReason.COMPLETED
    record = await play.record()
    judge(record, play.policy.served)
    assert {segment.attempt for segment in record} == {1}
    assert play.setting.counters["episodes/restarted"] == 1


async def test_a_replayable_agent_gets_its_turns_once_more(table: Table, codec: HermesCodec) -> None:
    answers: list[list[str]] = []

    async def agent(llm: Client) -> float:
        answers.append([])
        for _ in range(2):
            answers[-1].append((await llm.say(HI)).text)
        messages = [HI]
        for _ in range(2):
            answer = await llm.say(*messages, user("three"))
            messages += [said(answer)]
            answers[-1].append(answer.text)
        return 1.0

    play = Play(table, codec, agent, "One.", "Two.", "Three.", "Four, at last.", replayable=True)
    await killed_in_a_turn(play, 8, **SLOW)
    assert answers == [["One.", "Two.", "Three."]]
    assert await (await play.taken_over(**SLOW)).run() is StopReason.COMPLETED
    assert answers[1][:3] == ["One.", "Two.", "Three."]
    assert len(play.world.starts) == 2
    record = await play.record()
    judge(record, play.policy.served)
    assert {segment.attempt for segment in record} == {0}
    assert (await play.outcome()).metrics["turns"] == 4


async def test_a_turn_that_nobody_had_is_not_trained(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float:
        lost = await llm.doors.now.ask(llm.llm.api_key, request(user("lost")))
        await read(lost)
        lost.dropped()
        return await two_turns(llm)

    play = Play(table, codec, agent, "In vain.", "Hello.", "Fine.")
    assert await play.run() is StopReason.COMPLETED
    record = await play.record()
    judge(record, play.policy.served)
    assert record[-1].untrained_turns == (0,)
    trajectory = Trajectory(tuple(record))
    assert trajectory.num_trained == sum(len(play_turn(record, turn)) for turn in (1, 2))
    assert play.setting.counters["turns/untrained"] == 1
    assert play.setting.counters["tokens/untrained"] == len(play_turn(record, 0))
    found = {name: play.setting.counters[name] for name in ("turns/asked", "answers/delivered", "answers/undelivered")}
    assert found == {"turns/asked": 3, "answers/delivered": 2, "answers/undelivered": 1}


async def test_a_turn_that_the_agent_pays_was_had(table: Table, codec: HermesCodec) -> None:
    """Also where the process that sent it died before it could note that."""

    async def agent(llm: Client) -> float:
        delivery = await llm.doors.now.ask(llm.llm.api_key, request(HI))
        await read(delivery)
        delivery.dropped()
        await llm.doors.now.reward(llm.llm.reward_key, 0.5, turn=delivery.id)
        return 0.0

    play = Play(table, codec, agent, "Hello.")
    assert await play.run() is StopReason.COMPLETED
    record = await play.record()
    assert record[-1].untrained_turns == ()
    assert Trajectory(tuple(record)).num_trained == len(play_turn(record, 0))


async def test_turns_that_are_gone_on_from_were_had(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float:
        messages = [HI]
        for _ in range(2):
            delivery = await llm.doors.now.ask(llm.llm.api_key, request(*messages))
            messages += [said(await read(delivery)), user("go on")]
            delivery.dropped()  # its last byte came all the same
        await llm.say(*messages)
        return 1.0

    play = Play(table, codec, agent, "Hello.", "Fine.", "Well.")
    assert await play.run() is StopReason.COMPLETED
    assert (await play.record())[-1].untrained_turns == ()


async def test_turns_say_in_whose_name_they_were_asked_for(table: Table, codec: HermesCodec) -> None:
    async def agent(llm: Client) -> float:
        first = await llm.say(HI, user="ann")
        second = await llm.say(HI, said(first), user("more"))
        await llm.say(HI, said(first), user("more"), said(second), user("again"), user="bob")
        return 1.0

    play = Play(table, codec, agent, "Hello.", "Fine.", "Well.")
    assert await play.run(rollout={"chunk_tokens": 3, "group_size": 2}) is StopReason.COMPLETED
    record = await play.record()
    named = {segment.turn: segment.user for segment in record if segment.asked is not None}
    assert named == {0: "ann", 1: "", 2: "bob"}
    assert all(not segment.user for segment in record if segment.asked is None)
