"""The contract of the queue, on a real server."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from gspo_core.types import EpisodeKey, Split
from services.state import keys
from services.state.jobs import JobStatus
from services.state.keys import BUS_KEYS, job_key
from services.state.queue import Append, Bus, Conflict, Fenced, Full, Gap, LeasedEpisode, QueueUsage, ReadyGroup, Stage
from services.state.store import Claim, Store

pytestmark = pytest.mark.every_server


async def dispatch(bus: Bus, claim: Claim, group: int, size: int = 2) -> bool:
    return await bus.dispatch(claim.job_id, claim.token, group, size=size, split=Split.TRAIN, task_index=group + 100)


def segment(lease: LeasedEpisode, index: int, *, final: bool = False, attempt: int | None = None) -> Append:
    attempt = lease.attempt if attempt is None else attempt
    return Append(lease.key, attempt, index, f"{lease.key}:{attempt}:{index}".encode(), final)


async def finish(bus: Bus, job: str, token: str, leases: list[LeasedEpisode]) -> None:
    await bus.append(job, token, [segment(lease, lease.num_segments, final=True) for lease in leases])


async def payloads(bus: Bus, job: str) -> list[bytes]:
    return [payload for _, payload in await bus.read_segments(job, "0", count=10_000, block_ms=0)]


async def test_dispatched_episodes_are_leased_with_what_the_worker_needs(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await bus.dispatch(job, claim.token, 7, size=2, split=Split.EVAL, task_index=31, environment=1)
    token = await bus.join("w")
    leases = await bus.lease(job, "w", token, 10)
    assert leases == [
        LeasedEpisode(EpisodeKey(job, 7, member), 0, 0, Split.EVAL, task_index=31, environment=1, group_size=2, epoch=1)
        for member in (0, 1)
    ]
    assert await bus.lease(job, "w", token, 10) == []
    assert await bus.lease(job, "w", token, 0) == []


async def test_a_group_is_dispatched_once(bus: Bus, claim: Claim) -> None:
    assert await dispatch(bus, claim, 0) is True
    assert await dispatch(bus, claim, 0) is False
    token = await bus.join("w")
    assert len(await bus.lease(claim.job_id, "w", token, 10)) == 2
    assert (await bus.counters(claim.job_id))["dispatched"] == 1


async def test_a_process_of_an_earlier_release_names_fewer_keys(
    bus: Bus, store: Store, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of release 0.2.0 were the first thirteen of a queue and the first twenty of a job."""
    job, all_of_queue, all_of_job = claim.job_id, keys.bus_keys, keys.job_keys
    monkeypatch.setattr("services.state.queue.bus_keys", lambda job: all_of_queue(job)[:13])
    for module in ("kept_jobs", "job_claims", "job_table"):
        monkeypatch.setattr(f"services.state.{module}.job_keys", lambda job: all_of_job(job)[:20])
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    first, second = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [segment(first, 0)])
    await bus.restart(first.key, token, 1)
    await bus.append(job, token, [segment(second, 0, final=True), segment(first, 0, final=True, attempt=1)])
    assert [len(row) for row in await bus._functions.call("ready", keys.bus_keys(job))] == [6]
    await bus.commit(job, claim.token, 1, [0])
    await dispatch(bus, claim, 1)
    await store.jobs.set_status(job, JobStatus.FAILED, token=claim.token)
    assert (await store.jobs.get(job)).status is JobStatus.FAILED


@pytest.mark.parametrize(("group", "size"), [(-1, 1), (0, 0)])
async def test_impossible_groups_are_refused_before_they_are_sent(
    bus: Bus, claim: Claim, group: int, size: int
) -> None:
    with pytest.raises(ValueError, match="a group needs a number"):
        await dispatch(bus, claim, group, size)


async def test_only_the_owner_of_the_job_dispatches_and_commits(bus: Bus, store: Store, claim: Claim) -> None:
    await dispatch(bus, claim, 0)
    await store.jobs.release(claim.job_id, claim.token)
    heir = await store.jobs.claim("trainer-1")
    assert heir is not None
    with pytest.raises(Fenced):
        await dispatch(bus, claim, 1)
    with pytest.raises(Fenced):
        await bus.commit(claim.job_id, claim.token, 1, [0])
    assert await bus.open_groups(claim.job_id) == [0]
    await bus.commit(claim.job_id, heir.token, 1, [0])
    assert await bus.open_groups(claim.job_id) == []


async def test_without_an_owner_no_token_is_right(bus: Bus, store: Store, claim: Claim) -> None:
    await store.jobs.release(claim.job_id, claim.token)
    for token in ("", claim.token):
        with pytest.raises(Fenced):
            await bus.dispatch(claim.job_id, token, 0, size=1, split=Split.TRAIN, task_index=0)


async def test_episodes_that_come_back_go_before_new_ones_and_the_oldest_first(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    for group in range(12):
        await dispatch(bus, claim, group, size=1)
    token = await bus.join("w")
    leases = await bus.lease(job, "w", token, 11)
    assert [lease.key.group for lease in leases] == list(range(11))
    await bus.hand_back(job, token, [leases[10].key, leases[2].key])
    await bus.hand_back(job, token, [leases[9].key])
    again = await bus.lease(job, "w", token, 10)
    assert [lease.key.group for lease in again] == [2, 9, 10, 11]


async def test_an_episode_resumes_after_its_last_appended_segment(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    first, second = await bus.join("a"), await bus.join("b")
    [lease] = await bus.lease(job, "a", first, 1)
    await bus.append(job, first, [segment(lease, 0), segment(lease, 1)])
    await bus.hand_back(job, first, [lease.key])
    [resumed] = await bus.lease(job, "b", second, 1)
    assert (resumed.attempt, resumed.num_segments) == (0, 2)
    assert await bus.read_episode(lease.key) == [segment(lease, 0).payload, segment(lease, 1).payload]
    with pytest.raises(Fenced):
        await bus.append(job, first, [segment(lease, 2)])
    await bus.append(job, second, [segment(lease, 2, final=True)])
    assert len(await payloads(bus, job)) == 3


async def test_who_has_handed_back_is_fenced_even_before_another_leases(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token = await bus.join("w")
    [lease] = await bus.lease(job, "w", token, 1)
    await bus.append(job, token, [segment(lease, 0)])
    await bus.hand_back(job, token, [lease.key])
    for late in (segment(lease, 0), segment(lease, 1)):
        with pytest.raises(Fenced):
            await bus.append(job, token, [late])
    with pytest.raises(Fenced):
        await bus.restart(lease.key, token, 1)
    await bus.hand_back(job, token, [lease.key])
    [again] = await bus.lease(job, "w", token, 5)
    assert again.num_segments == 1


async def test_only_the_holder_hands_back(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    first, second = await bus.join("a"), await bus.join("b")
    [lease] = await bus.lease(job, "a", first, 1)
    await bus.hand_back(job, second, [lease.key])
    assert await bus.lease(job, "b", second, 1) == []
    await finish(bus, job, first, [lease])
    await bus.hand_back(job, first, [lease.key])
    assert await bus.lease(job, "b", second, 1) == []


async def test_two_workers_never_share_an_episode(bus: Bus, claim: Claim, new_client: Callable[[], Redis]) -> None:
    job = claim.job_id
    for group in range(30):
        await dispatch(bus, claim, group, size=2)

    async def work(worker: str) -> list[EpisodeKey]:
        mine = Bus(new_client())
        token = await mine.join(worker)
        keys: list[EpisodeKey] = []
        while leases := await mine.lease(job, worker, token, 1):
            keys += [lease.key for lease in leases]
        return keys

    taken = await asyncio.gather(*(work(f"w{number}") for number in range(4)))
    counts = Counter(key for keys in taken for key in keys)
    assert len(counts) == 60
    assert set(counts.values()) == {1}
    assert sum(bool(keys) for keys in taken) > 1, "one worker took everything: nothing was concurrent"


async def test_leases_that_one_worker_asks_for_at_once_are_different_ones(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    for group in range(20):
        await dispatch(bus, claim, group, size=1)
    token = await bus.join("w")
    leases = await asyncio.gather(*(bus.lease(job, "w", token, 2) for _ in range(10)))
    assert sorted(lease.key.group for some in leases for lease in some) == list(range(20))


async def test_a_resent_append_changes_nothing(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token = await bus.join("w")
    [lease] = await bus.lease(job, "w", token, 1)
    batch = [segment(lease, 0), segment(lease, 1), segment(lease, 2, final=True)]
    for _ in range(3):
        await bus.append(job, token, batch)
    await bus.append(job, token, batch[1:])
    assert await payloads(bus, job) == [item.payload for item in batch]
    assert len(await bus.ready_groups(job)) == 1


async def test_the_same_index_with_another_content_is_an_error(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token = await bus.join("w")
    [lease] = await bus.lease(job, "w", token, 1)
    await bus.append(job, token, [segment(lease, 0)])
    with pytest.raises(Conflict):
        await bus.append(job, token, [Append(lease.key, 0, 0, b"another", False)])
    with pytest.raises(Conflict):  # the same bytes, but now they would end the episode
        await bus.append(job, token, [segment(lease, 0, final=True)])
    with pytest.raises(Conflict):
        await bus.append(job, token, [segment(lease, 1), Append(lease.key, 0, 1, b"another", False)])
    assert await payloads(bus, job) == [segment(lease, 0).payload]


async def test_nothing_follows_the_last_segment(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token = await bus.join("w")
    [lease] = await bus.lease(job, "w", token, 1)
    await finish(bus, job, token, [lease])
    with pytest.raises(Conflict):
        await bus.append(job, token, [segment(lease, 1)])
    with pytest.raises(Fenced):
        await bus.restart(lease.key, token, 1)


async def test_a_worker_that_is_ahead_of_the_server_is_told_so(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token = await bus.join("w")
    [lease] = await bus.lease(job, "w", token, 1)
    with pytest.raises(Gap):
        await bus.append(job, token, [segment(lease, 1)])
    with pytest.raises(Gap):
        await bus.append(job, token, [segment(lease, 0, attempt=1)])
    with pytest.raises(Gap):
        await bus.restart(lease.key, token, 2)
    assert await payloads(bus, job) == []


async def test_a_refused_batch_writes_nothing_at_all(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=2)
    token, other = await bus.join("w"), await bus.join("v")
    [mine] = await bus.lease(job, "w", token, 1)
    [theirs] = await bus.lease(job, "v", other, 1)
    with pytest.raises(Fenced, match="0:1:0"):
        await bus.append(job, token, [segment(mine, 0), segment(theirs, 0)])
    assert await payloads(bus, job) == []
    await bus.append(job, token, [segment(mine, 0)])
    await bus.append(job, other, [segment(theirs, 0)])
    assert len(await payloads(bus, job)) == 2


async def test_one_call_takes_very_many_segments_or_none_of_them(bus: Bus, claim: Claim) -> None:
    """More than a function can hold on its stack at once, of two episodes in turns, the first one said twice."""
    job, count = claim.job_id, 1500
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    one, other = await bus.lease(job, "w", token, 2)
    many = [segment(lease, index, final=index == count - 1) for index in range(count) for lease in (one, other)]
    for wrong, refusal in (
        (Append(EpisodeKey(job, 9, 0), 0, 0, b"", False), Fenced),
        (segment(one, count), Conflict),
        (Append(one.key, 0, 0, b"another", False), Conflict),
    ):
        with pytest.raises(refusal):
            await bus.append(job, token, [*many, wrong])
        assert await payloads(bus, job) == []
        assert await bus.usage(job) == QueueUsage(charged_bytes=0, stored_bytes=0, num_dead_letters=0)
    for _ in range(2):
        await bus.append(job, token, [*many, many[0]])
    assert await payloads(bus, job) == [item.payload for item in many]
    assert await bus.read_episode(other.key) == [item.payload for item in many[1::2]]
    stored = sum(len(item.payload) for item in many)
    assert await bus.usage(job) == QueueUsage(charged_bytes=stored, stored_bytes=stored, num_dead_letters=0)
    assert [ready.group for ready in await bus.ready_groups(job)] == [0]


async def test_an_append_names_its_own_job(bus: Bus, claim: Claim) -> None:
    with pytest.raises(ValueError, match="not an episode of job"):
        await bus.append(claim.job_id, "token", [Append(EpisodeKey("other", 0, 0), 0, 0, b"", False)])
    await bus.append(claim.job_id, "token", [])


async def test_a_group_is_ready_when_its_last_member_ends(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=2)
    await dispatch(bus, claim, 1, size=1)
    token = await bus.join("w")
    first, second, third = await bus.lease(job, "w", token, 3)
    await finish(bus, job, token, [first])
    assert await bus.ready_groups(job) == []
    await finish(bus, job, token, [third])
    await finish(bus, job, token, [second])
    assert await bus.ready_groups(job) == [
        ReadyGroup(1, Split.TRAIN, task_index=101, environment=0, size=1),
        ReadyGroup(0, Split.TRAIN, task_index=100, environment=0, size=2),
    ]


async def test_members_that_end_at_the_same_time_complete_the_group_once(
    bus: Bus, claim: Claim, new_client: Callable[[], Redis]
) -> None:
    job = claim.job_id
    clients = [new_client() for _ in range(8)]
    for group in range(10):
        await dispatch(bus, claim, group, size=8)
        workers = []
        for number, client in enumerate(clients):
            worker = Bus(client)
            token = await worker.join(f"w{number}")
            workers.append((worker, token, await worker.lease(job, f"w{number}", token, 1)))
        await asyncio.gather(*(finish(worker, job, token, leases) for worker, token, leases in workers))
    assert [ready.group for ready in await bus.ready_groups(job)] == list(range(10))


async def test_a_new_attempt_leaves_no_segment_of_the_old_one(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    lease, other = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [segment(lease, 0), segment(other, 0), segment(lease, 1)])
    await bus.restart(lease.key, token, 1)
    assert await payloads(bus, job) == [segment(other, 0).payload]
    assert await bus.read_episode(lease.key) == []
    with pytest.raises(Fenced):
        await bus.append(job, token, [segment(lease, 2, attempt=0)])
    await bus.append(job, token, [segment(lease, 0, attempt=1)])
    await bus.restart(lease.key, token, 1)  # resent: not a second restart
    assert await payloads(bus, job) == [segment(other, 0).payload, segment(lease, 0, attempt=1).payload]
    await bus.hand_back(job, token, [lease.key])
    [resumed] = await bus.lease(job, "w", token, 1)
    assert (resumed.attempt, resumed.num_segments) == (1, 1)


async def test_only_the_holder_restarts(bus: Bus, claim: Claim) -> None:
    await dispatch(bus, claim, 0, size=1)
    token, other = await bus.join("w"), await bus.join("v")
    [lease] = await bus.lease(claim.job_id, "w", token, 1)
    await bus.append(claim.job_id, token, [segment(lease, 0)])
    with pytest.raises(Fenced):
        await bus.restart(lease.key, other, 1)
    assert len(await payloads(bus, claim.job_id)) == 1


async def test_commit_leaves_nothing_behind(bus: Bus, claim: Claim, redis_client: Redis) -> None:
    job = claim.job_id
    for group in range(20):
        await dispatch(bus, claim, group, size=2)
    token = await bus.join("w")
    leases = await bus.lease(job, "w", token, 30)
    await bus.append(job, token, [segment(lease, index) for lease in leases for index in range(3)])
    await finish(bus, job, token, [LeasedEpisode(lease.key, 0, 3, *_rest(lease)) for lease in leases[:20]])
    # ended, held and queued episodes alike
    await bus.commit(job, claim.token, 4, list(range(20)))
    assert await payloads(bus, job) == []
    left = {name for name in BUS_KEYS if await redis_client.exists(job_key(job, name))}
    assert left == {"trainer", "counters", "meta", "segments"}
    assert await redis_client.xlen(job_key(job, "segments")) == 0


def _rest(lease: LeasedEpisode) -> tuple[Split, int, int, int]:
    return lease.split, lease.task_index, lease.environment, lease.group_size


async def test_what_arrives_after_the_commit_is_fenced_and_revives_nothing(
    bus: Bus, claim: Claim, redis_client: Redis
) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    done, open_ = await bus.lease(job, "w", token, 2)
    await finish(bus, job, token, [done])
    await bus.commit(job, claim.token, 1, [0], reason="dropped_stale")
    for late in (segment(open_, 0), segment(open_, 0, final=True), segment(done, 0, final=True)):
        with pytest.raises(Fenced):
            await bus.append(job, token, [late])
    with pytest.raises(Fenced):
        await bus.restart(open_.key, token, 1)
    await bus.hand_back(job, token, [open_.key])
    assert await bus.reap(job) == 0
    assert await bus.ready_groups(job) == []
    left = {name for name in BUS_KEYS if await redis_client.exists(job_key(job, name))}
    assert left == {"trainer", "counters", "meta", "segments"}


async def test_a_repeated_commit_counts_once(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    for group in range(4):
        await dispatch(bus, claim, group)
    await bus.commit(job, claim.token, 1, [0, 1])
    await bus.commit(job, claim.token, 1, [0, 1, 2])
    await bus.commit(job, claim.token, 1, [2], reason="dropped_stale")
    await bus.commit(job, claim.token, 1, [])
    assert await bus.counters(job) == {"dispatched": 4, "trained": 3, "evaluated": 0, "in_flight": 1}


@pytest.mark.parametrize("reason", ["", "lost", "dropped_", "dropped_A", "trained "])
async def test_reasons_are_a_closed_vocabulary(bus: Bus, claim: Claim, reason: str) -> None:
    with pytest.raises(ValueError, match="a group is settled as"):
        await bus.commit(claim.job_id, claim.token, 1, [0], reason=reason)


async def test_reading_goes_on_after_the_last_position(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token = await bus.join("w")
    [lease] = await bus.lease(job, "w", token, 1)
    await bus.append(job, token, [segment(lease, index) for index in range(5)])
    read: list[bytes] = []
    after = "0"
    while some := await bus.read_segments(job, after, count=2, block_ms=0):
        assert len(some) <= 2
        read += [payload for _, payload in some]
        after = some[-1][0]
    assert read == [segment(lease, index).payload for index in range(5)]
    waiting = asyncio.create_task(bus.read_segments(job, after, block_ms=5000))
    await bus.append(job, token, [segment(lease, 5)])
    assert [payload for _, payload in await waiting] == [segment(lease, 5).payload]
    assert await bus.read_segments(job, "0", count=1) != []


async def test_jobs_do_not_see_each_other(bus: Bus, store: Store, claim: Claim) -> None:
    await store.jobs.create("{}")
    other = await store.jobs.claim("trainer-1")
    assert other is not None
    assert other.job_id != claim.job_id
    await dispatch(bus, claim, 0)
    with pytest.raises(Fenced):
        await bus.dispatch(other.job_id, claim.token, 0, size=1, split=Split.TRAIN, task_index=0)
    token = await bus.join("w")
    assert await bus.lease(other.job_id, "w", token, 5) == []
    assert (await bus.counters(other.job_id))["dispatched"] == 0


async def test_a_storm_of_everything_keeps_the_books(bus: Bus, claim: Claim, redis_client: Redis) -> None:
    """Any order of calls: dispatched = settled + in flight, and each episode is in exactly one place."""
    job, random_ = claim.job_id, random.Random(7)
    tokens = {f"w{number}": await bus.join(f"w{number}") for number in range(3)}
    held: dict[str, dict[EpisodeKey, list[int]]] = {worker: {} for worker in tokens}
    next_group = 0
    for _ in range(600):
        worker = random_.choice(list(tokens))
        token, mine = tokens[worker], held[worker]
        action = random_.choice(["dispatch", "lease", "append", "append", "finish", "restart", "back", "commit"])
        key = random_.choice(list(mine)) if mine else None
        if action == "dispatch":
            await dispatch(bus, claim, next_group, size=random_.randint(1, 3))
            next_group += 1
        elif action == "lease":
            for lease in await bus.lease(job, worker, token, random_.randint(1, 4)):
                mine[lease.key] = [lease.attempt, lease.num_segments]
        elif action == "commit":
            groups = await bus.open_groups(job)
            chosen = random_.sample(groups, min(len(groups), random_.randint(0, 2)))
            await bus.commit(job, claim.token, 1, chosen, reason=random_.choice(["trained", "dropped_stale"]))
            for episodes in held.values():
                for gone in [k for k in episodes if k.group in chosen]:
                    del episodes[gone]
        elif key is not None:
            attempt, index = mine[key]
            if action == "restart":
                await bus.restart(key, token, attempt + 1)
                mine[key] = [attempt + 1, 0]
            elif action == "back":
                await bus.hand_back(job, token, [key])
                del mine[key]
            else:
                await bus.append(job, token, [Append(key, attempt, index, b"x", action == "finish")])
                mine[key][1] += 1
                if action == "finish":
                    del mine[key]
        await _check_books(bus, redis_client, job, held)


async def _check_books(bus: Bus, redis_client: Redis, job: str, held: dict[str, dict[EpisodeKey, list[int]]]) -> None:
    counts = await bus.counters(job)
    assert counts["dispatched"] == sum(count for name, count in counts.items() if name != "dispatched")
    queued = {name.decode() for name in await redis_client.zrange(job_key(job, "queue"), 0, -1)}
    leased = [name.decode().split("/")[1] for name in await redis_client.zrange(job_key(job, "held"), 0, -1)]
    expected = sorted(f"{key.group}:{key.member}" for episodes in held.values() for key in episodes)
    assert sorted(leased) == expected
    assert not queued & set(leased)
    assert await redis_client.hlen(job_key(job, "holders")) == sum(bool(episodes) for episodes in held.values())
    assert await redis_client.xlen(job_key(job, "segments")) == await redis_client.hlen(job_key(job, "index"))


# The order of leases


async def test_of_those_that_come_back_the_one_with_the_oldest_token_goes_first(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    for group in range(6):
        await dispatch(bus, claim, group, size=1)
    token = await bus.join("w")
    leases = await bus.lease(job, "w", token, 5)
    versions = {0: 9, 1: 4, 2: 7, 3: 4}  # group 4 holds no token yet
    for lease in leases[:4]:
        oldest = versions[lease.key.group]
        await bus.append(job, token, [Append(lease.key, 0, 0, b"x", False, oldest + 1)])
        await bus.append(job, token, [Append(lease.key, 0, 1, b"y", False, oldest)])
    await bus.hand_back(job, token, [lease.key for lease in leases])
    again = await bus.lease(job, "w", token, 6)
    assert [lease.key.group for lease in again] == [1, 3, 2, 0, 4, 5]


async def test_a_new_attempt_has_no_old_tokens(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    for group in range(2):
        await dispatch(bus, claim, group, size=1)
    token = await bus.join("w")
    first, second = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [Append(first.key, 0, 0, b"x", False, 1), Append(second.key, 0, 0, b"x", False, 5)])
    await bus.restart(first.key, token, 1)
    await bus.append(job, token, [Append(first.key, 1, 0, b"x", False, 8)])
    await bus.hand_back(job, token, [first.key, second.key])
    assert [lease.key.group for lease in await bus.lease(job, "w", token, 2)] == [1, 0]


# Bytes


async def reserve(bus: Bus, claim: Claim, group: int, size: int, each: int, budget: int) -> bool:
    return await bus.dispatch(
        claim.job_id,
        claim.token,
        group,
        size=size,
        split=Split.TRAIN,
        task_index=0,
        bytes_per_episode=each,
        budget_bytes=budget,
    )


async def test_a_group_beyond_the_budget_is_not_admitted(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    assert await reserve(bus, claim, 0, size=2, each=400, budget=1000)
    with pytest.raises(Full, match="800 of 1000"):
        await reserve(bus, claim, 1, size=1, each=201, budget=1000)
    assert not await reserve(bus, claim, 0, size=2, each=400, budget=1000)  # it is there already
    assert await reserve(bus, claim, 1, size=1, each=200, budget=1000)
    assert await bus.usage(job) == QueueUsage(charged_bytes=1000, stored_bytes=0, num_dead_letters=0)
    assert (await bus.counters(job))["dispatched"] == 2


async def test_an_admitted_episode_is_never_refused_for_its_bytes(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await reserve(bus, claim, 0, size=2, each=100, budget=200)
    token = await bus.join("w")
    first, second = await bus.lease(job, "w", token, 2)
    for index in range(5):
        await bus.append(job, token, [Append(first.key, 0, index, bytes(90), index == 4)])
    assert await bus.usage(job) == QueueUsage(charged_bytes=450 + 100, stored_bytes=450, num_dead_letters=0)
    with pytest.raises(Full):
        await reserve(bus, claim, 1, size=1, each=1, budget=550)
    await bus.append(job, token, [Append(second.key, 0, 0, bytes(30), True)])
    assert await bus.usage(job) == QueueUsage(charged_bytes=480, stored_bytes=480, num_dead_letters=0)
    await bus.commit(job, claim.token, 1, [0])
    assert await bus.usage(job) == QueueUsage(0, 0, 0)


async def test_what_an_ended_episode_did_not_need_is_free_again(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await reserve(bus, claim, 0, size=1, each=1000, budget=1000)
    token = await bus.join("w")
    [lease] = await bus.lease(job, "w", token, 1)
    await bus.append(job, token, [Append(lease.key, 0, 0, bytes(300), False)])
    assert (await bus.usage(job)).charged_bytes == 1000
    await bus.restart(lease.key, token, 1)
    assert await bus.usage(job) == QueueUsage(1000, 0, 0)
    await bus.append(job, token, [Append(lease.key, 1, 0, bytes(100), True)])
    assert await reserve(bus, claim, 1, size=1, each=900, budget=1000)


# Failures


async def test_an_episode_that_fails_again_and_again_is_given_up_with_the_reason(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    good, bad = await bus.lease(job, "w", token, 2)
    await finish(bus, job, token, [good])
    await bus.append(job, token, [segment(bad, 0)])  # progress: this lease does not count
    failures = []
    for number in range(4):
        assert await bus.ready_groups(job) == []
        await bus.fail(bad.key, token, f"reason {number}")
        leases = await bus.lease(job, "w", token, 2)
        failures += [lease.num_failures for lease in leases]
    assert failures == [0, 1, 2]
    assert await bus.ready_groups(job) == [ReadyGroup(0, Split.TRAIN, 100, 0, 2, dead=(1,))]
    [letter] = await bus.dead_letters(job)
    assert (letter.key, letter.num_segments, letter.num_failures, letter.reason) == (bad.key, 1, 3, "reason 3")
    assert await bus.dead_letters(job, letter.id) == []
    assert (await bus.usage(job)).num_dead_letters == 1
    for late in (segment(bad, 1), segment(bad, 1, final=True)):
        with pytest.raises(Fenced):
            await bus.append(job, token, [late])
    await bus.fail(bad.key, token, "again")  # resent: nothing happens
    assert len(await bus.dead_letters(job)) == 1
    await bus.commit(job, claim.token, 1, [0])
    assert await payloads(bus, job) == []
    assert await bus.usage(job) == QueueUsage(0, 0, num_dead_letters=1)


async def test_a_new_attempt_that_comes_no_further_is_no_progress(bus: Bus, claim: Claim) -> None:
    """An environment that kills its worker at the third turn would do so for ever."""
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token = await bus.join("w")
    for attempt in range(4):
        [lease] = await bus.lease(job, "w", token, 1)
        if attempt:
            await bus.restart(lease.key, token, attempt)
        await bus.append(job, token, [segment(lease, index, attempt=attempt) for index in range(2)])
        await bus.fail(lease.key, token, "killed at the third turn")
    assert await bus.lease(job, "w", token, 1) == []
    assert [group.dead for group in await bus.ready_groups(job)] == [(0,)]


async def test_progress_and_orderly_returns_keep_an_episode_alive(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token = await bus.join("w")
    for index in range(6):
        [lease] = await bus.lease(job, "w", token, 1)
        await bus.append(job, token, [segment(lease, index)])
        await bus.fail(lease.key, token, "one step further each time")
    for _ in range(6):
        [lease] = await bus.lease(job, "w", token, 1)
        await bus.hand_back(job, token, [lease.key])
    assert await bus.dead_letters(job) == []


async def test_only_the_holder_says_that_an_episode_failed(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token, other = await bus.join("w"), await bus.join("v")
    [lease] = await bus.lease(job, "w", token, 1)
    for _ in range(5):
        await bus.fail(lease.key, other, "not mine")
    await finish(bus, job, token, [lease])
    await bus.fail(lease.key, token, "too late")
    assert await bus.lease(job, "v", other, 1) == []
    assert [group.dead for group in await bus.ready_groups(job)] == [()]


# Looking


async def test_groups_and_episodes_can_be_looked_at(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    for group in range(3):
        await dispatch(bus, claim, group, size=2)
    token = await bus.join("worker-7")
    first, second, _ = await bus.lease(job, "worker-7", token, 3)
    await bus.append(job, token, [Append(first.key, 0, 0, b"12345", False, 6), Append(first.key, 0, 1, b"67", True, 4)])
    await bus.append(job, token, [segment(second, 0)])
    views = await bus.groups(job)
    assert [[episode.stage for episode in view.episodes] for view in views] == [
        [Stage.DONE, Stage.HELD],
        [Stage.HELD, Stage.QUEUED],
        [Stage.QUEUED, Stage.QUEUED],
    ]
    done, held = views[0].episodes
    assert (done.worker, done.num_segments, done.size_bytes, done.oldest_version) == (None, 2, 7, 4)
    assert (held.key, held.worker, held.num_segments, held.oldest_version) == (second.key, "worker-7", 1, None)
    assert (views[0].group, views[0].split, views[0].task_index, views[0].is_ready) == (0, Split.TRAIN, 100, False)
    await finish(bus, job, token, [LeasedEpisode(second.key, 0, 1, *_rest(second))])
    assert (await bus.groups(job))[0].is_ready
    assert [view.group for view in await bus.groups(job, after=0, limit=1)] == [1]


async def test_a_position_of_a_wiped_server_does_not_hide_what_comes_after(bus: Bus, claim: Claim) -> None:
    """The clock of a new server may be behind that of the old one."""
    job = claim.job_id
    await dispatch(bus, claim, 0, size=1)
    token = await bus.join("w")
    assert await bus.read_segments(job, "99999999999999-0", block_ms=0) == []
    [lease] = await bus.lease(job, "w", token, 1)
    await bus.append(job, token, [segment(lease, 0)])
    [(position, payload)] = await bus.read_segments(job, "99999999999999-0", block_ms=0)
    assert payload == segment(lease, 0).payload
    assert await bus.read_segments(job, position, block_ms=0) == []
