"""Episodes that are left in the middle and gone on with: what is kept, what is sampled again, and who decides."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.env import Environment, EnvironmentFailed
from gspo_core.episode_limits import TurnTally
from gspo_core.types import EpisodeKey, Segment, StopReason
from services.episodes.history import MAX_WORLD_BYTES, WorldSnapshot
from services.episodes.metering import Timings
from services.episodes.policy import Drained, Interrupted, Sampled
from services.state.queue import LeasedEpisode, Snapshot
from services.workers.episode import Episode
from services.workers.quarantine import MOST_FAILURES, Quarantine
from services.workers.setting import EpisodeSetting
from tests.services.rollout.rollout_kit import (
    JOB,
    TRAINER,
    Counter,
    ScriptedPolicy,
    Speech,
    Table,
    load_codec,
    make_order,
    make_setting,
    sampled,
    stitched,
    world,
)


class Kept(Counter):
    """Raise the counter; every action is entered in a ledger outside, as a payment would be."""

    replayable = False
    entered: list[int] = []  # noqa: RUF012 it is outside

    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        Kept.entered.append(amount)
        return super().add(amount)

    def snapshot(self) -> bytes:
        return json.dumps([self.value, self.target]).encode()

    def restore(self, state: bytes) -> None:
        self.value, self.target = json.loads(state)


class BegunOtherwise(Kept):
    """Raise the counter; no two of its beginnings are the same."""

    num_begun = 0

    def reset(self, target: int) -> str:
        BegunOtherwise.num_begun += 1
        return f"{BegunOtherwise.num_begun}: {super().reset(target)}"


class Once(Counter):
    """Raise the counter."""

    replayable = False


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> HermesCodec:
    return load_codec(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def speech(codec: HermesCodec) -> Speech:
    return Speech(codec)


@pytest.fixture
async def table(redis_client: Redis) -> Table:
    Kept.entered = []
    return await Table.lay(redis_client)


async def leave(input_ids: list[int]) -> Sampled:
    raise Drained


async def always() -> bool:
    return True


def setting_for(table: Table, codec: HermesCodec, *answers: Any) -> EpisodeSetting:
    return make_setting(table, codec, ScriptedPolicy(list(answers)))


async def played_and_left(table: Table, setting: EpisodeSetting, environment: Environment) -> LeasedEpisode:
    """An episode that a worker began and handed back, as it is leased again."""
    await table.dispatch()
    (lease,) = await table.lease()
    return await left_again(table, setting, environment, lease)


async def left_again(
    table: Table, setting: EpisodeSetting, environment: Environment, lease: LeasedEpisode
) -> LeasedEpisode:
    with pytest.raises(Drained):
        await Episode(setting, make_order(lease, environment)).run()
    await table.bus.hand_back(JOB, table.token, [lease.key])
    (lease,) = await table.lease()
    return lease


async def whole(table: Table, codec: HermesCodec, environment: Environment, *answers: Any) -> list[Segment]:
    """The segments of the same episode without a break."""
    await table.dispatch()
    (lease,) = await table.lease()
    await Episode(setting_for(table, codec, *answers), make_order(lease, environment)).run()
    segments = await table.segments(lease.key)
    await table.bus.commit(JOB, TRAINER, 1, [0])
    return segments


@pytest.mark.parametrize("num_sampled_since", [0, 5])
async def test_a_kept_world_survives_its_worker_and_acts_no_second_time(
    table: Table, codec: HermesCodec, speech: Speech, num_sampled_since: int
) -> None:
    one, two, say = speech.call("add", amount=1), speech.call("add", amount=1), speech.say("it is done now")
    expected = await whole(table, codec, world(Kept), one, two, say)
    Kept.entered = []
    began = [sampled(say[:num_sampled_since])] if num_sampled_since else []
    lease = await played_and_left(table, setting_for(table, codec, one, two, *began, leave), world(Kept))
    assert await table.bus.read_snapshot(lease.key) is not None
    setting = setting_for(table, codec, sampled(say[num_sampled_since:], engine="engine-1"))
    assert await Episode(setting, make_order(lease, world(Kept))).run() is StopReason.COMPLETED
    segments = await table.segments(lease.key)
    assert stitched(segments) == stitched(expected)
    assert stitched(segments, "action_mask") == stitched(expected, "action_mask")
    assert {segment.attempt for segment in segments} == {0}
    assert segments[-1].outcome is not None
    assert segments[-1].outcome.reward == 1.0
    assert segments[-1].outcome.metrics["tool_calls"] == 2
    assert Kept.entered == [1, 1]
    counters = setting.counters
    assert counters["episodes/resumed_from_a_world"] == 1
    assert counters["tokens/resumed"] == len(one) + len(two) + num_sampled_since
    assert counters["tokens/sampled"] == len(say) - num_sampled_since
    assert counters["tokens/thrown_away"] == 0
    assert await table.bus.read_snapshot(lease.key) is None


async def test_a_world_that_may_have_acted_since_it_was_kept_is_gone_on_from_as_a_new_attempt(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    """Killed after the turn was stored: nobody knows whether the environment acted on it. What comes before is kept."""
    one, two, say = speech.call("add", amount=1), speech.call("add", amount=1), speech.say("done")
    expected = await whole(table, codec, world(Kept), one, two, say)
    Kept.entered = []

    class Dying:
        """The worker dies between the second action and the keeping of the world behind it."""

        read_snapshot, restart, read_episode = table.bus.read_snapshot, table.bus.restart, table.bus.read_episode

        async def save_snapshot(self, key: EpisodeKey, token: str, snapshot: Snapshot) -> None:
            if snapshot.num_segments == 2:
                raise asyncio.CancelledError
            await table.bus.save_snapshot(key, token, snapshot)

    await table.dispatch()
    (lease,) = await table.lease()
    dying = replace(setting_for(table, codec, one, two), records=Dying())
    with pytest.raises(asyncio.CancelledError):
        await Episode(dying, make_order(lease, world(Kept))).run()
    assert Kept.entered == [1, 1]
    await table.bus.hand_back(JOB, table.token, [lease.key])
    (lease,) = await table.lease()
    assert lease.num_segments == 2
    setting = setting_for(table, codec, two, say)
    assert await Episode(setting, make_order(lease, world(Kept))).run() is StopReason.COMPLETED
    segments = await table.segments(lease.key)
    assert [segment.attempt for segment in segments] == [1] * len(segments)
    assert stitched(segments) == stitched(expected)
    assert segments[-1].outcome is not None
    assert segments[-1].outcome.reward == 1.0
    assert Kept.entered == [1, 1, 1]
    assert setting.counters["worlds/too_old"] == setting.counters["episodes/rewound"] == 1
    assert setting.counters["tokens/resumed"] == len(one)
    assert setting.counters["tokens/thrown_away"] == len(two)


async def test_before_the_world_has_acted_no_token_is_lost_whatever_it_is(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    say = speech.say("a long thought, and then the end")
    lease = await played_and_left(table, setting_for(table, codec, sampled(say[:7]), leave), world(Once))
    setting = setting_for(table, codec, say[7:])
    assert await Episode(setting, make_order(lease, world(Once))).run() is StopReason.COMPLETED
    assert {segment.attempt for segment in await table.segments(lease.key)} == {0}
    assert setting.counters["tokens/resumed"] == 7
    assert setting.counters["tokens/thrown_away"] == 0


async def test_a_world_that_never_begins_the_same_way_is_gone_on_with_before_it_has_acted(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    call, say = speech.call("add", amount=2), speech.say("done")
    lease = await played_and_left(table, setting_for(table, codec, sampled(call[:7]), leave), world(BegunOtherwise))
    setting = setting_for(table, codec, sampled(call[7:]), say)
    assert await Episode(setting, make_order(lease, world(BegunOtherwise))).run() is StopReason.COMPLETED
    segments = await table.segments(lease.key)
    assert {segment.attempt for segment in segments} == {0}
    assert segments[-1].outcome is not None
    assert segments[-1].outcome.reward == 1.0
    assert (setting.counters["tokens/resumed"], setting.counters["tokens/thrown_away"]) == (7, 0)


async def test_a_world_that_may_have_acted_since_its_beginning_was_kept_starts_again(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    """Nothing comes before the turn that it may have acted on."""
    call, say = speech.call("add", amount=2), speech.say("done")

    class Dying:
        """The worker dies between the first action and the keeping of the world behind it."""

        read_snapshot, restart, read_episode = table.bus.read_snapshot, table.bus.restart, table.bus.read_episode

        async def save_snapshot(self, key: EpisodeKey, token: str, snapshot: Snapshot) -> None:
            if snapshot.num_segments:
                raise asyncio.CancelledError
            await table.bus.save_snapshot(key, token, snapshot)

    await table.dispatch()
    (lease,) = await table.lease()
    dying = replace(setting_for(table, codec, call), records=Dying())
    with pytest.raises(asyncio.CancelledError):
        await Episode(dying, make_order(lease, world(BegunOtherwise))).run()
    await table.bus.hand_back(JOB, table.token, [lease.key])
    (lease,) = await table.lease()
    resumed = setting_for(table, codec, sampled(call[:7]), leave)
    lease = await left_again(table, resumed, world(BegunOtherwise), lease)
    setting = setting_for(table, codec, sampled(call[7:]), say)
    assert await Episode(setting, make_order(lease, world(BegunOtherwise))).run() is StopReason.COMPLETED
    segments = await table.segments(lease.key)
    assert [segment.attempt for segment in segments] == [1] * len(segments)
    assert segments[-1].outcome is not None
    assert segments[-1].outcome.reward == 1.0
    assert setting.counters["tokens/thrown_away"] == 0


async def test_a_world_too_large_to_keep_is_counted_and_its_episode_goes_on(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    class Large(Kept):
        """Raise the counter."""

        def snapshot(self) -> bytes:
            return bytes(MAX_WORLD_BYTES)

    await table.dispatch()
    (lease,) = await table.lease()
    setting = setting_for(table, codec, speech.call("add", amount=2), speech.say("done"))
    assert await Episode(setting, make_order(lease, world(Large))).run() is StopReason.COMPLETED
    assert setting.counters["worlds/not_kept"] == 2, "its beginning, and what the action made of it"


@pytest.mark.parametrize("cls", [Counter, Kept, Once])
async def test_a_worker_that_leaves_plays_on_what_nobody_else_could_go_on_with(
    table: Table, codec: HermesCodec, speech: Speech, cls: type
) -> None:
    """After an action: a world that can be replayed, one that is kept, and one that would have to start again."""
    await table.dispatch()
    (lease,) = await table.lease()
    setting = setting_for(table, codec, speech.call("add", amount=2), speech.say("done"))

    async def act_then_leave(input_ids: list[int]) -> Sampled:
        setting.leaving.set()
        return sampled(speech.call("add", amount=2))

    setting.policy.answers[0] = act_then_leave  # type: ignore[attr-defined]
    episode = Episode(setting, make_order(lease, world(cls)))
    if cls is Once:
        assert await episode.run() is StopReason.COMPLETED
    else:
        with pytest.raises(Drained):
            await episode.run()


@pytest.mark.parametrize(
    ("budget", "others", "expected"),
    [
        ({"lease_tokens": 10, "chunk_tokens": 5}, True, 10),
        ({"lease_tokens": 10, "chunk_tokens": 5}, False, None),
        ({"lease_s": 1e-9, "chunk_tokens": 5}, True, 5),
        ({"chunk_tokens": 5}, True, None),
    ],
)
async def test_an_episode_gives_way_when_it_has_had_its_share_and_others_wait(
    table: Table, codec: HermesCodec, speech: Speech, budget: dict[str, Any], others: bool, expected: int | None
) -> None:
    say = speech.say("a very long thought, and then the end of it")
    await table.dispatch()
    (lease,) = await table.lease()
    setting = setting_for(table, codec, say)
    if others:
        setting = replace(setting, others_wait=always)
    order = make_order(lease, rollout={"group_size": 2, **budget})
    if expected is None:
        assert await Episode(setting, order).run() is StopReason.COMPLETED
        return
    with pytest.raises(Interrupted):
        await Episode(setting, order).run()
    assert sum(segment.num_actions for segment in await table.segments(lease.key)) == expected
    # Somebody else's turn, then its own again, and again, until it is done: each lease gets it further.
    num_leases, done = 1, None
    while done is None:
        await table.bus.interrupt(JOB, table.token, [lease.key])
        (lease,) = await table.lease()
        num_done = sum(segment.num_actions for segment in await table.segments(lease.key))
        setting = replace(setting_for(table, codec, say[num_done:]), others_wait=always)
        try:
            done = await Episode(setting, make_order(lease, rollout={"group_size": 2, **budget})).run()
        except Interrupted:
            num_leases += 1
        assert setting.counters["tokens/resumed"] == num_done
        assert setting.counters["tokens/thrown_away"] == 0
    assert done is StopReason.COMPLETED
    assert num_leases == (len(say) - 1) // expected
    segments = await table.segments(lease.key)
    assert [token for one in segments for token in one.token_ids[one.action_mask].tolist()] == say


@pytest.mark.parametrize(("more_s", "expected"), [(-0.5, StopReason.EPISODE_TIMEOUT), (0.5, StopReason.COMPLETED)])
async def test_an_episode_keeps_its_clock_when_it_moves_and_no_time_is_counted_twice(
    table: Table, codec: HermesCodec, speech: Speech, more_s: float, expected: StopReason
) -> None:
    """What brings its world back is no time of its own: else deaths of workers would end it by its limit."""
    say = speech.say("a long thought")
    await table.dispatch()
    (lease,) = await table.lease()
    ticks = iter(range(10_000))
    setting = replace(setting_for(table, codec, sampled(say[:5]), leave), clock=lambda: float(next(ticks)))
    with pytest.raises(Drained):
        await Episode(setting, make_order(lease)).run()
    ((group,),) = [await table.bus.groups(JOB)]
    told = json.loads(group.episodes[0].note)
    assert told["turn"] == 0
    assert told["tokens_sampled"] == 5
    assert told["engine_s"] > 0
    assert told["env_s"] > 0
    await table.bus.hand_back(JOB, table.token, [lease.key])
    (lease,) = await table.lease()
    limits = {"episode_timeout_s": told["engine_s"] + told["env_s"] + more_s}
    setting = setting_for(table, codec, say[5:])
    ticks = iter(range(10_000))
    setting = replace(setting, clock=lambda: float(next(ticks)))
    assert await Episode(setting, make_order(lease, limits=limits)).run() is expected
    segments = await table.segments(lease.key)
    whole = segments[-1].outcome.metrics
    assert sum(one.spent.engine_s for one in segments) == pytest.approx(whole["model_s"])
    assert sum(one.spent.env_s for one in segments) == pytest.approx(whole["env_s"])


@pytest.mark.parametrize(("num_failures", "attempt"), [(3, 0), (9, 1)])
async def test_an_environment_that_fails_for_everybody_costs_no_token_unless_it_is_what_the_episode_has(
    table: Table, codec: HermesCodec, speech: Speech, num_failures: int, attempt: int
) -> None:
    class Failing(Kept):
        """Raise the counter."""

        left = num_failures

        def restore(self, state: bytes) -> None:
            Failing.left -= 1
            if Failing.left >= 0:
                raise OSError("away")
            super().restore(state)

    one, two, say = speech.call("add", amount=1), speech.call("add", amount=1), speech.say("done")
    lease = await played_and_left(table, setting_for(table, codec, one, leave), world(Kept))
    quarantine = Quarantine(first_pause_s=0.001)
    setting = setting_for(table, codec, *([two, say] if not attempt else [one, two, say]))
    for _ in range(MOST_FAILURES):
        with pytest.raises(EnvironmentFailed):
            async with quarantine.entry(setting.leaving):
                raise EnvironmentFailed("reset", "away")
    order = replace(make_order(lease, world(Failing), limits={"retries": 0}), quarantine=quarantine)
    assert await Episode(setting, order).run() is StopReason.COMPLETED
    assert {segment.attempt for segment in await table.segments(lease.key)} == {attempt}
    assert setting.counters["tokens/thrown_away"] == (len(one) if attempt else 0)
    assert not quarantine.is_on


@pytest.mark.parametrize("note", ["", "no json", "[1]", '{"engine_s": "x", "env_s": NaN, "queue_s": -1, "other": 2}'])
def test_a_note_that_cannot_be_read_is_a_clock_at_zero(note: str) -> None:
    assert Timings.from_note(note) == Timings()


def test_what_another_release_wrote_is_no_world() -> None:
    assert WorldSnapshot.decode(b"\x81\xa4turn\x01") is None
    assert WorldSnapshot.decode(b"not msgpack") is None
    world = WorldSnapshot(1, 0, [5], [], [], TurnTally(), b"state")
    assert WorldSnapshot.decode(world.encode()) == world
    assert WorldSnapshot.decode(msgspec.structs.replace(world, schema=world.schema + 1).encode()) is None
