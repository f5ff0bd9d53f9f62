"""Episodes that wait for their reward, on a real server: set aside once, paid once, ended when their time is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo_core.types import EpisodeKey, Split
from services.state import queue
from services.state.keys import BUS_KEYS, bus_keys
from services.state.queue import Append, Bus, Fenced, Gap, LeasedEpisode, Snapshot, Stage
from services.state.queue_records import AwaitedReward, PostedReward, RewardWord, Waiting
from services.state.server import connect
from services.state.store import Claim, Store
from tests.services.state.faults import MortalServer

pytestmark = pytest.mark.every_server

NOW = 1_700_000_000.0
HOUR = 3600.0


def end(lease: LeasedEpisode, payload: bytes, index: int = 1) -> Append:
    return Append(lease.key, lease.attempt, index, payload, final=True)


async def lease_all(bus: Bus, claim: Claim, size: int, group: int = 0) -> tuple[str, list[LeasedEpisode]]:
    """Episodes with a segment of ten bytes each."""
    job = claim.job_id
    await bus.dispatch(job, claim.token, group, size=size, split=Split.TRAIN, task_index=0, bytes_per_episode=100)
    token = await bus.join("w")
    leases = await bus.lease(job, "w", token, size)
    for one in leases:
        await bus.append(job, token, [Append(one.key, 0, 0, b"x" * 10, final=False, version=3)])
    return token, leases


async def payloads(bus: Bus, job: str) -> list[bytes]:
    return [data for _, data in await bus.read_segments(job, block_ms=0)]


async def test_an_episode_waits_for_its_reward_held_by_nobody(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    token, (first, second) = await lease_all(bus, claim, 2)
    await bus.save_snapshot(first.key, token, Snapshot(0, 1, b"tree"))
    await bus.await_reward(token, end(first, b"none"), b"kept", NOW + HOUR)
    await bus.await_reward(token, end(first, b"none"), b"kept", NOW + HOUR)  # said again
    assert await bus.waiting(job) == Waiting(num_episodes=1)
    (view,) = await bus.groups(job)
    assert [one.stage for one in view.episodes] == [Stage.WAITING, Stage.HELD]
    # Its worker is rid of it, and nobody else is given it.
    with pytest.raises(Fenced):
        await bus.append(job, token, [end(first, b"theirs")])
    await bus.hand_back(job, token, [first.key])
    await bus.fail(first.key, token, "no")
    assert await bus.take(job, "w", token, [first.key]) == []
    assert await bus.lease(job, "other", await bus.join("other"), 10) == []
    # What was reserved is free: it holds its segment, its record, and what the other one reserved.
    usage = await bus.usage(job)
    assert 110 < usage.charged_bytes == usage.stored_bytes - 10 + 100
    await bus.append(job, token, [end(second, b"done")])
    assert (await bus.waiting(job)).groups == (0,)
    assert await bus.ready_groups(job) == []


async def test_a_reward_ends_the_wait_once(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    token, (lease,) = await lease_all(bus, claim, 1)
    assert await bus.look_at_reward(lease.key, 0, "t", NOW) is RewardWord.PLAYING
    await bus.await_reward(token, end(lease, b"none"), b"kept", NOW + HOUR)
    assert await bus.look_at_reward(lease.key, 0, "t", NOW) == AwaitedReward(b"none", b"kept", ())
    assert await bus.look_at_reward(lease.key, 1, "t", NOW) is RewardWord.PLAYING
    assert await bus.settle_reward(end(lease, b"paid"), "t", seen=0, now=NOW) is RewardWord.TAKEN
    assert await bus.settle_reward(end(lease, b"paid"), "t", seen=0, now=NOW) is RewardWord.AGAIN
    assert await bus.settle_reward(end(lease, b"more"), "u", seen=0, now=NOW) is RewardWord.ENDED
    (ready,) = await bus.ready_groups(job)
    assert (ready.group, ready.num_waited, ready.dead) == (0, 1, ())
    assert await payloads(bus, job) == [b"x" * 10, b"paid"]
    assert await bus.waiting(job) == Waiting(num_late=1)
    usage = await bus.usage(job)
    assert usage.charged_bytes == usage.stored_bytes == 14
    await bus.commit(job, claim.token, 1, [0])
    # Also when the group is gone.
    assert await bus.settle_reward(end(lease, b"paid"), "t", seen=0, now=NOW) is RewardWord.AGAIN
    assert await bus.look_at_reward(lease.key, 0, "u", NOW) is RewardWord.ENDED
    assert (await bus.usage(job)).charged_bytes == 0


async def test_a_token_stands_for_one_reward(bus: Bus, claim: Claim) -> None:
    token, (lease,) = await lease_all(bus, claim, 1)
    await bus.await_reward(token, end(lease, b"none"), b"kept", NOW + HOUR)
    first, other = PostedReward("t" * 50_000, 0, 0.5), PostedReward("t" * 50_000, 1, 0.5)
    assert await bus.post_reward(end(lease, b"one"), first, said="0=0.5", seen=0, now=NOW) is RewardWord.TAKEN
    assert await bus.post_reward(end(lease, b"two"), other, said="1=0.5", seen=1, now=NOW) is RewardWord.CONFLICT
    assert await bus.settle_reward(end(lease, b"x"), first.token, said="=0.5", seen=1, now=NOW) is RewardWord.CONFLICT
    assert await bus.look_at_reward(lease.key, 0, first.token, NOW, said="0=0.5") is RewardWord.AGAIN
    assert await bus.settle_reward(end(lease, b"paid"), "u", said="=1", seen=1, now=NOW) is RewardWord.TAKEN
    assert await bus.settle_reward(end(lease, b"more"), "u", said="=2", seen=1, now=NOW) is RewardWord.CONFLICT
    assert await payloads(bus, claim.job_id) == [b"x" * 10, b"paid"]


async def test_what_was_paid_before_the_end_is_known_behind_it(
    bus: Bus, claim: Claim, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ITEMS_REMEMBERED_PER_CALL", 2)
    job = claim.job_id
    token, (late, early) = await lease_all(bus, claim, 2)
    await bus.await_reward(token, end(late, b"none"), b"kept", NOW + HOUR)
    assert await bus.settle_reward(end(late, b"paid"), "t", said="=1", seen=0, now=NOW) is RewardWord.TAKEN
    with pytest.raises(Fenced):
        await bus.remember_rewards(early.key, "another", 0, {"t": "=1"})
    with pytest.raises(Gap):
        await bus.remember_rewards(early.key, token, 1, {"t": "=1"})
    for _ in range(2):  # the reply was lost
        await bus.remember_rewards(early.key, token, 0, {"t": "=1", "u": "turn-0-0=2"})
    await bus.append(job, token, [end(early, b"done")])
    with pytest.raises(Fenced):
        await bus.remember_rewards(early.key, token, 0, {"v": "=1"})
    said = {"t": ("=1", "=2"), "u": ("turn-0-0=2", "=2")}
    for name, (same, other) in said.items():
        assert await bus.look_at_reward(early.key, 0, name, NOW, said=same) is RewardWord.AGAIN
        assert await bus.look_at_reward(early.key, 0, name, NOW, said=other) is RewardWord.CONFLICT
    assert await bus.look_at_reward(early.key, 0, "v", NOW, said="=1") is RewardWord.ENDED
    # Those of late rewards are forgotten last.
    names = await redis_client.zrange(bus_keys(job)[BUS_KEYS.index("posted")], 0, -1)
    assert [name.split(b"/")[0] for name in names] == [b"0:1", b"0:1", b"0:0"]


async def test_what_a_given_up_attempt_was_paid_is_not_said_to_count(bus: Bus, claim: Claim) -> None:
    """It was about to end when its gateway was lost, and another one began the episode again."""
    token, (lease,) = await lease_all(bus, claim, 1)
    await bus.remember_rewards(lease.key, token, 0, {"t": "=1"})
    assert await bus.look_at_reward(lease.key, 0, "t", NOW, said="=1") is RewardWord.AGAIN
    await bus.restart(lease.key, token, 1)
    assert await bus.look_at_reward(lease.key, 0, "t", NOW, said="=1") is RewardWord.ENDED
    assert await bus.look_at_reward(lease.key, 1, "t", NOW, said="=1") is RewardWord.PLAYING


async def test_tokens_of_an_earlier_release_are_known(bus: Bus, claim: Claim, redis_client: Redis) -> None:
    """It kept them whole, and not what was said with them."""
    token, (lease,) = await lease_all(bus, claim, 1)
    await bus.await_reward(token, end(lease, b"none"), b"kept", NOW + HOUR)
    posted = bus_keys(claim.job_id)[BUS_KEYS.index("posted")]
    await redis_client.zadd(posted, {"0:0/0/t": 1})
    assert await bus.settle_reward(end(lease, b"paid"), "t", said="=1", seen=0, now=NOW) is RewardWord.AGAIN
    assert await bus.settle_reward(end(lease, b"paid"), "u", said="=1", seen=0, now=NOW) is RewardWord.TAKEN


async def test_rewards_of_turns_are_kept_until_the_last_one(bus: Bus, claim: Claim) -> None:
    token, (lease,) = await lease_all(bus, claim, 1)
    await bus.await_reward(token, end(lease, b"none"), b"kept", NOW + HOUR)
    first, second = PostedReward("a", 0, 0.1), PostedReward("b", 2, -1e-300)
    assert await bus.post_reward(end(lease, b"by turn"), first, seen=0, now=NOW) is RewardWord.TAKEN
    assert await bus.post_reward(end(lease, b"by turn"), first, seen=0, now=NOW) is RewardWord.AGAIN
    # Two gateways at once: the one that has not seen the other's looks again.
    assert await bus.post_reward(end(lease, b"by turns"), second, seen=0, now=NOW) is RewardWord.CHANGED
    assert await bus.settle_reward(end(lease, b"paid"), "c", seen=0, now=NOW) is RewardWord.CHANGED
    assert await bus.post_reward(end(lease, b"by turns"), second, seen=1, now=NOW) is RewardWord.TAKEN
    assert await bus.look_at_reward(lease.key, 0, "c", NOW) == AwaitedReward(b"by turns", b"kept", (first, second))
    assert await bus.settle_reward(end(lease, b"paid"), "c", seen=2, now=NOW) is RewardWord.TAKEN
    assert (await payloads(bus, claim.job_id))[-1] == b"paid"


async def test_a_reward_that_never_comes_ends_the_wait_at_the_deadline(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    token, leases = await lease_all(bus, claim, 3)
    for number, lease in enumerate(leases):
        await bus.await_reward(token, end(lease, b"none %d" % number), b"kept", NOW + number)
    with pytest.raises(Fenced):
        await bus.expire_rewards(job, "somebody", now=NOW + HOUR)
    assert await bus.expire_rewards(job, claim.token, now=NOW + 0.5) == 1
    assert await bus.settle_reward(end(leases[0], b"paid"), "a", seen=0, now=NOW + 0.5) is RewardWord.ENDED
    # Late, though the trainer has not looked.
    assert await bus.settle_reward(end(leases[1], b"paid"), "b", seen=0, now=NOW + 1.5) is RewardWord.LATE
    assert await bus.settle_reward(end(leases[2], b"paid"), "c", seen=0, now=NOW + 1.5) is RewardWord.TAKEN
    assert await bus.expire_rewards(job, claim.token, now=NOW + HOUR) == 1
    assert await bus.expire_rewards(job, claim.token, now=NOW + HOUR) == 0
    assert (await payloads(bus, job))[3:] == [b"none 0", b"paid", b"none 1"]
    assert await bus.waiting(job) == Waiting(num_late=1, num_missed=2)
    (ready,) = await bus.ready_groups(job)
    assert (ready.num_waited, ready.dead) == (3, ())


async def test_who_may_not_end_an_episode_may_not_set_it_aside(bus: Bus, claim: Claim) -> None:
    token, (lease,) = await lease_all(bus, claim, 1)
    for stranger, index, refusal in (("", 1, Fenced), ("other", 1, Fenced), (token, 2, Gap), (token, 0, Gap)):
        with pytest.raises(refusal):
            await bus.await_reward(stranger, end(lease, b"none", index), b"kept", NOW)
    await bus.await_reward(token, end(lease, b"none"), b"kept", NOW)
    with pytest.raises(Fenced):
        await bus.await_reward("other", end(lease, b"none"), b"kept", NOW)


async def test_a_group_that_is_settled_or_cancelled_waits_no_more(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    token, (first, second) = await lease_all(bus, claim, 2)
    for lease in (first, second):
        await bus.await_reward(token, end(lease, b"none"), b"kept", NOW + HOUR)
    assert await bus.settle_reward(end(first, b"paid"), "a", seen=0, now=NOW) is RewardWord.TAKEN
    assert await bus.cancel(job, claim.token, 0) == 1
    assert await bus.settle_reward(end(second, b"paid"), "b", seen=0, now=NOW) is RewardWord.ENDED
    (ready,) = await bus.ready_groups(job)
    assert ready.dead == (second.key.member,)
    await bus.commit(job, claim.token, 1, [0])
    token, (third,) = await lease_all(bus, claim, 1, group=1)
    await bus.await_reward(token, end(third, b"none"), b"kept", NOW + HOUR)
    await bus.commit(job, claim.token, 1, [1], reason="dropped_late")
    assert await bus.waiting(job) == Waiting(num_late=1)
    assert await bus.look_at_reward(third.key, 0, "c", NOW) is RewardWord.ENDED
    assert await bus.look_at_reward(EpisodeKey("never", 0, 0), 0, "c", NOW) is RewardWord.ENDED
    usage = await bus.usage(job)
    assert (usage.charged_bytes, usage.stored_bytes) == (0, 0)


async def test_a_reward_for_an_attempt_of_a_lost_queue_pays_no_later_one(
    bus: Bus, store: Store, claim: Claim, redis_client: Redis
) -> None:
    """Attempts are counted anew then, so its number comes again."""
    job = claim.job_id
    _, (lost,) = await lease_all(bus, claim, 1)
    await redis_client.delete(*bus_keys(job)[1:])
    await store.jobs.release(job, claim.token)
    again = await store.jobs.claim("another")
    assert again is not None
    token, (lease,) = await lease_all(bus, again, 1)
    assert (lost.key, lost.attempt, lost.epoch) == (lease.key, lease.attempt, lease.epoch - 1)
    await bus.await_reward(token, end(lease, b"none"), b"kept", NOW + HOUR)
    assert await bus.look_at_reward(lease.key, 0, "t", NOW, epoch=lost.epoch) is RewardWord.ENDED
    found = await bus.look_at_reward(lease.key, 0, "t", NOW, epoch=lease.epoch)
    assert found == AwaitedReward(b"none", b"kept", ())


async def test_what_an_emptied_queue_was_paid_pays_no_later_attempt(bus: Bus, claim: Claim) -> None:
    """Its groups are dispatched again, and an agent posts its reward with the token that it always has."""
    job = claim.job_id
    token, (lost, late) = await lease_all(bus, claim, 2)
    await bus.remember_rewards(lost.key, token, 0, {"final": "=1"})
    await bus.await_reward(token, end(late, b"none"), b"kept", NOW + HOUR)
    assert await bus.settle_reward(end(late, b"paid"), "final", said="=1", seen=0, now=NOW) is RewardWord.TAKEN
    await bus.empty_queue(job, claim.token)
    for lease in (lost, late):
        assert await bus.look_at_reward(lease.key, 0, "final", NOW, said="=1", epoch=lost.epoch) is RewardWord.ENDED
    token, (lease, _) = await lease_all(bus, claim, 2)
    assert (lease.key, lease.attempt) == (lost.key, lost.attempt)
    assert await bus.look_at_reward(lease.key, 0, "final", NOW, said="=1") is RewardWord.PLAYING
    await bus.await_reward(token, end(lease, b"none"), b"kept", NOW + HOUR)
    assert await bus.settle_reward(end(lease, b"paid"), "final", said="=1", seen=0, now=NOW) is RewardWord.TAKEN


async def test_what_waits_survives_the_server(tmp_path: Path, server_binary: Path) -> None:
    """Killed without warning right after it had answered."""
    server = MortalServer(tmp_path, server_binary)
    try:
        async with connect(server.url) as redis:
            bus, store = Bus(redis), Store(redis)
            await bus.load_functions()
            await store.jobs.create("{}")
            claim = await store.jobs.claim("t")
            assert claim is not None
            token, (lease,) = await lease_all(bus, claim, 1)
            await bus.await_reward(token, end(lease, b"none"), b"kept", NOW + HOUR)
        await server.kill_and_restart()
        async with connect(server.url) as redis:
            assert await Bus(redis).settle_reward(end(lease, b"paid"), "t", seen=0, now=NOW) is RewardWord.TAKEN
        await server.kill_and_restart()
        async with connect(server.url) as redis:
            bus = Bus(redis)
            assert await bus.settle_reward(end(lease, b"paid"), "t", seen=0, now=NOW) is RewardWord.AGAIN
            assert await payloads(bus, claim.job_id) == [b"x" * 10, b"paid"]
    finally:
        server.close()
