"""Episodes that are erased while they are in the queue, on a real server: nothing of them stays, and nobody waits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from gspo_core.types import EpisodeKey, Split
from services.state.functions import Functions, library
from services.state.keys import bus_keys
from services.state.loans import Loans
from services.state.queue import Append, Bus, Fenced, LeasedEpisode, Snapshot, Stage
from services.state.queue_records import ErasedWord, RewardWord
from services.state.refusals import EpisodeErased
from services.state.store import Claim, Store

pytestmark = pytest.mark.every_server

NOW = 1_700_000_000.0
SECRET = b"what ann said"


async def everything_in(redis: Redis) -> bytes:
    """All names, fields and values of a server, streams among them."""
    found: list[bytes] = []
    for key in await redis.keys("*"):
        kind = (await redis.type(key)).decode()
        found.append(key)
        if kind == "hash":
            found += [part for pair in (await redis.hgetall(key)).items() for part in pair]
        elif kind == "zset":
            found += await redis.zrange(key, 0, -1)
        elif kind == "set":
            found += await redis.smembers(key)
        elif kind == "stream":
            entries = await redis.xrange(key)
            found += [part for _, fields in entries for pair in fields.items() for part in pair]
        else:
            raise AssertionError(f"{key!r} is a {kind}")
    return b"\n".join(found)


def said(lease: LeasedEpisode, index: int, *, final: bool = False) -> Append:
    text = SECRET + f" {index}".encode()
    return Append(lease.key, lease.attempt, index, text, final=final, version=3, note=SECRET.decode())


async def leased(bus: Bus, claim: Claim, size: int = 2) -> tuple[str, list[LeasedEpisode]]:
    job = claim.job_id
    await bus.dispatch(job, claim.token, 0, size=size, split=Split.TRAIN, task_index=0, bytes_per_episode=100)
    token = await bus.join("w")
    return token, await bus.lease(job, "w", token, size)


async def brought_to(stage: str, bus: Bus, token: str, lease: LeasedEpisode) -> None:
    """With something that was said in all that can be kept of an episode at this stage."""
    job = lease.key.job
    await bus.append(job, token, [said(lease, 0)])
    if stage == "done":
        await bus.append(job, token, [said(lease, 1, final=True)])
    elif stage == "waiting":
        await bus.await_reward(token, said(lease, 1, final=True), SECRET, NOW)
    else:
        await bus.save_snapshot(lease.key, token, Snapshot(0, 1, SECRET))
        await Loans(bus._functions).offer(lease.key, token, 0, SECRET)
    if stage == "queued":
        await bus.hand_back(job, token, [lease.key])
    if stage == "dead":
        await bus.fail(lease.key, token, "it got further than ever")
        for _ in range(3):
            await bus.take(job, "w", token, [lease.key])
            await bus.fail(lease.key, token, SECRET.decode())


@pytest.mark.parametrize("stage", ["queued", "held", "waiting", "done", "dead"])
async def test_nothing_that_was_said_is_left_at_any_stage(
    stage: str, bus: Bus, claim: Claim, redis_client: Redis
) -> None:
    job = claim.job_id
    token, (ann, bob) = await leased(bus, claim)
    await brought_to(stage, bus, token, ann)
    (view,) = await bus.groups(job)
    assert view.episodes[0].stage == Stage(stage)
    assert SECRET in await everything_in(redis_client)
    assert await bus.erase(ann.key) is ErasedWord.ERASED
    assert SECRET not in await everything_in(redis_client)
    assert await bus.erase(ann.key) is ErasedWord.ERASED  # asked again
    assert await bus.num_queued(job) == 0
    with pytest.raises(EpisodeErased):  # also what has ended is not found again, as a resend of its end
        await bus.append(job, token, [said(ann, 1, final=True)])
    (letter,) = await bus.dead_letters(job)
    assert (letter.key, letter.reason, letter.num_segments) == (ann.key, "erased", 0)
    await bus.append(job, token, [Append(bob.key, 0, 0, b"the end", final=True)])
    (ready,) = await bus.ready_groups(job)
    assert (ready.dead, ready.erased) == ((0,), (0,))
    usage = await bus.usage(job)
    assert usage.charged_bytes == usage.stored_bytes == len(b"the end")
    assert await bus.was_erased(ann.key)
    await bus.commit(job, claim.token, 1, [0])
    assert (await bus.usage(job)).charged_bytes == 0
    assert await bus.erase(ann.key) is ErasedWord.ABSENT


async def test_the_last_one_that_is_missing_makes_its_group_ready(bus: Bus, claim: Claim) -> None:
    token, (ann, bob) = await leased(bus, claim)
    await bus.append(claim.job_id, token, [Append(bob.key, 0, 0, b"the end", final=True)])
    assert await bus.ready_groups(claim.job_id) == []
    await bus.erase(ann.key)
    assert [one.group for one in await bus.ready_groups(claim.job_id)] == [0]


async def test_whoever_plays_it_on_is_told_and_writes_nothing(bus: Bus, claim: Claim, redis_client: Redis) -> None:
    job = claim.job_id
    token, (ann, _) = await leased(bus, claim)
    await bus.append(job, token, [said(ann, 0)])
    await bus.erase(ann.key)
    writes = (
        bus.append(job, token, [said(ann, 0)]),
        bus.append(job, token, [said(ann, 1)]),
        bus.save_snapshot(ann.key, token, Snapshot(0, 1, SECRET)),
        bus.restart(ann.key, token, 1),
        bus.await_reward(token, said(ann, 1, final=True), SECRET, NOW),
        Loans(bus._functions).offer(ann.key, token, 0, SECRET),
    )
    for write in writes:
        with pytest.raises(EpisodeErased):
            await write
    await bus.fail(ann.key, token, SECRET.decode())
    await bus.hand_back(job, token, [ann.key])
    await bus.interrupt(job, token, [ann.key])
    assert await bus.look_at_reward(ann.key, 0, "t", NOW) is RewardWord.ENDED
    assert SECRET not in await everything_in(redis_client)
    assert await bus.lease(job, "w", token, 10) == []
    assert await bus.take(job, "w", token, [ann.key]) == []


async def test_an_episode_ends_while_it_is_erased(
    bus: Bus, claim: Claim, redis_client: Redis, new_client: Callable[[], Redis]
) -> None:
    """Over two connections: whichever comes first, nothing stays, and its group is ready once."""
    job, chance, orders = claim.job_id, random.Random(0), set[bool]()
    other = Bus(new_client())
    token = await bus.join("w")
    for group in range(40):
        await bus.dispatch(job, claim.token, group, size=1, split=Split.TRAIN, task_index=0)
        (ann,) = await bus.lease(job, "w", token, 1)
        await bus.append(job, token, [said(ann, 0)])
        both = [bus.append(job, token, [said(ann, 1, final=True)]), other.erase(ann.key)]
        if chance.random() < 0.5:
            both.reverse()
        answers = await asyncio.gather(*both, return_exceptions=True)
        assert ErasedWord.ERASED in answers
        refusals = [one for one in answers if isinstance(one, BaseException)]
        assert all(isinstance(one, EpisodeErased) for one in refusals)
        orders.add(bool(refusals))
    assert orders == {True, False}
    assert SECRET not in await everything_in(redis_client)
    ready = await bus.ready_groups(job)
    assert [(one.group, one.dead, one.erased) for one in ready] == [(group, (0,), (0,)) for group in range(40)]


async def test_a_reward_comes_while_it_is_erased(
    bus: Bus, claim: Claim, redis_client: Redis, new_client: Callable[[], Redis]
) -> None:
    other, token = Bus(new_client()), await bus.join("w")
    for group in range(10):
        await bus.dispatch(claim.job_id, claim.token, group, size=1, split=Split.TRAIN, task_index=0)
        (ann,) = await bus.lease(claim.job_id, "w", token, 1)
        await bus.await_reward(token, said(ann, 0, final=True), SECRET, NOW)
        both = [bus.settle_reward(said(ann, 0, final=True), "t", seen=0, now=NOW), other.erase(ann.key)]
        answers = await asyncio.gather(*(both if group % 2 else reversed(both)))
        assert ErasedWord.ERASED in answers
    assert SECRET not in await everything_in(redis_client)
    assert len(await bus.ready_groups(claim.job_id)) == 10


async def test_what_goes_into_a_log_is_not_erased_here_and_nothing_erased_goes_into_a_log(
    bus: Bus, store: Store, claim: Claim
) -> None:
    job = claim.job_id
    token, leases = await leased(bus, claim, 3)
    await bus.append(job, token, [Append(one.key, 0, 0, SECRET, final=True) for one in leases])
    await bus.erase(leases[1].key)
    assert not await bus.seal(job, claim.token, {0: [0, 1, 2]})
    assert await bus.erase(leases[2].key) is ErasedWord.ERASED  # nothing was sealed
    assert await bus.seal(job, claim.token, {0: [0]})
    assert await bus.seal(job, claim.token, {0: [0]})
    assert await bus.erase(leases[0].key) is ErasedWord.SEALED
    assert await bus.read_episode(leases[0].key) == [SECRET]
    assert await bus.erase(EpisodeKey(job, 0, 7)) is ErasedWord.ABSENT
    with pytest.raises(Fenced):
        await bus.seal(job, "a former trainer", {0: [0]})
    assert not await bus.seal(job, claim.token, {0: [0], 5: [1]})
    # The seal ends with its trainer: the next one has not written anything.
    await store.jobs.release(job, claim.token)
    assert await bus.erase(leases[0].key) is ErasedWord.ERASED


async def test_a_trainer_of_an_earlier_release_reads_what_it_knows(bus: Bus, claim: Claim, redis_client: Redis) -> None:
    token, leases = await leased(bus, claim)
    await bus.append(claim.job_id, token, [Append(one.key, 0, 0, b"end", final=True) for one in leases])
    await bus.erase(leases[1].key)
    (row,) = await Functions(redis_client).call("ready", bus_keys(claim.job_id), "waited")
    assert row[5:] == [b"1", 0]


async def test_functions_of_an_older_process_call_no_episode_over(bus: Bus, claim: Claim, redis_client: Redis) -> None:
    """A process that was started before may load them again, and they know nothing of stages."""
    _, (held, _) = await leased(bus, claim)
    await bus.dispatch(claim.job_id, claim.token, 1, size=1, split=Split.TRAIN, task_index=0, bytes_per_episode=100)
    queued, unknown = EpisodeKey(claim.job_id, 1, 0), EpisodeKey(claim.job_id, 7, 0)
    source, _ = library()
    for is_known in (True, False):
        known = source if is_known else source.replace('args[2] == "stage"', "false")
        assert is_known == (known == source)
        await redis_client.function_load(known, replace=True)
        assert [await bus.is_over(key) for key in (held.key, queued, unknown)] == [False, False, is_known]
    await redis_client.function_flush()  # whoever uses this server next loads its own
