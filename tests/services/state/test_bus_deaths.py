"""What the death of a worker costs the episodes that it held, on a real server."""

from __future__ import annotations

import pytest

from gspo_core.types import Split
from services.state.queue import Append, Bus, LeasedEpisode
from services.state.store import Claim

pytestmark = pytest.mark.every_server

NUM_EPISODES, PLACES = 6, 10


async def play(bus: Bus, worker: str, token: str, lease: LeasedEpisode, *, to_its_end: bool = False) -> None:
    job = lease.key.job
    await bus.append(job, token, [Append(lease.key, lease.attempt, lease.num_segments, b"x", to_its_end)])


async def die(bus: Bus, job: str, worker: str) -> str:
    """And come back under the same name; the new token."""
    token = await bus.join(worker)
    await bus.reap(job)
    return token


async def dispatch(bus: Bus, claim: Claim) -> None:
    await bus.dispatch(claim.job_id, claim.token, 0, size=NUM_EPISODES, split=Split.TRAIN, task_index=0)


async def test_an_episode_that_kills_its_workers_takes_no_other_with_it(bus: Bus, claim: Claim) -> None:
    """Every worker dies that holds member 0, before anything was sampled."""
    job, num_deaths = claim.job_id, 0
    await dispatch(bus, claim)
    token = await bus.join("w")
    while not await bus.ready_groups(job):
        leases = await bus.lease(job, "w", token, PLACES)
        if any(lease.key.member == 0 for lease in leases):
            token, num_deaths = await die(bus, job, "w"), num_deaths + 1
            continue
        for lease in leases:
            await play(bus, "w", token, lease, to_its_end=True)
    [group] = await bus.ready_groups(job)
    assert group.dead == (0,)
    assert num_deaths == 6  # three with all the others, three alone
    [letter] = await bus.dead_letters(job)
    assert (letter.key.member, letter.num_failures) == (0, 3)


async def test_a_worker_holds_one_suspect_until_that_has_got_further(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim)
    token = await bus.join("w")
    for _ in range(3):
        assert len(await bus.lease(job, "w", token, PLACES)) == NUM_EPISODES
        token = await die(bus, job, "w")
    other = await bus.join("v")
    [mine], [others] = await bus.lease(job, "w", token, PLACES), await bus.lease(job, "v", other, PLACES)
    assert mine.key != others.key
    assert await bus.lease(job, "w", token, PLACES) == []
    assert await bus.num_queued(job) == NUM_EPISODES - 2
    await play(bus, "w", token, mine)
    [second] = await bus.lease(job, "w", token, PLACES)
    # What got further and dies once more is no suspect again.
    token = await die(bus, job, "w")
    leases = await bus.lease(job, "w", token, PLACES)
    assert mine.key in [lease.key for lease in leases]
    assert len(leases) == 2
    assert second.num_failures == 0
    # New episodes are not held up by those that are under suspicion.
    await bus.dispatch(job, claim.token, 1, size=2, split=Split.TRAIN, task_index=0)
    assert [lease.key.group for lease in await bus.lease(job, "w", token, PLACES)] == [1, 1]


async def test_workers_that_die_as_soon_as_they_start_cost_at_most_one_episode_each_time(
    bus: Bus, claim: Claim
) -> None:
    job, num_deaths = claim.job_id, 12
    await dispatch(bus, claim)
    token = await bus.join("w")
    for _ in range(num_deaths):
        await bus.lease(job, "w", token, PLACES)
        token = await die(bus, job, "w")
    assert len(await bus.dead_letters(job)) == (num_deaths - 3) // 3
