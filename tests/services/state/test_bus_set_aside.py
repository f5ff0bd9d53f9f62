"""Episodes that are set aside, on a real server: interrupted, cancelled, and the worlds that they are in."""

from __future__ import annotations

import pytest

from gspo_core.types import EpisodeKey, Split
from services.state.queue import Append, Bus, Fenced, Gap, Kept, LeasedEpisode, Snapshot, Stage
from services.state.store import Claim

pytestmark = pytest.mark.every_server


async def dispatch(bus: Bus, claim: Claim, group: int, size: int = 1) -> None:
    await bus.dispatch(
        claim.job_id, claim.token, group, size=size, split=Split.TRAIN, task_index=0, bytes_per_episode=100
    )


async def append(bus: Bus, token: str, lease: LeasedEpisode, index: int, *, final: bool = False) -> None:
    item = Append(lease.key, lease.attempt, index, b"x" * 10, final, 3, f"turn {index}")
    await bus.append(lease.key.job, token, [item])


async def test_an_interrupted_episode_waits_behind_what_waits_now_and_before_what_comes_later(
    bus: Bus, claim: Claim
) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    (long,) = await bus.lease(job, "w", token, 1)
    await append(bus, token, long, 0)
    await dispatch(bus, claim, 1)
    assert await bus.num_queued(job) == 1
    await bus.interrupt(job, token, [long.key])
    await bus.interrupt(job, token, [long.key])  # said again
    await dispatch(bus, claim, 2)
    with pytest.raises(Fenced):
        await append(bus, token, long, 1)
    leases = await bus.lease(job, "w", token, 10)
    assert [lease.key.group for lease in leases] == [1, 0, 2]
    assert (leases[1].attempt, leases[1].num_segments, leases[1].num_failures) == (0, 1, 0)
    # One that comes back for another reason still goes first.
    await bus.hand_back(job, token, [lease.key for lease in leases])
    assert [lease.key.group for lease in await bus.lease(job, "w", token, 10)] == [0, 1, 2]


async def test_what_is_left_of_a_group_can_be_cancelled_by_its_trainer(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=3)
    await dispatch(bus, claim, 1)
    token = await bus.join("w")
    done, held = await bus.lease(job, "w", token, 2)
    await append(bus, token, done, 0, final=True)
    await append(bus, token, held, 0)
    with pytest.raises(Fenced):
        await bus.cancel(job, "somebody", 0)
    assert await bus.cancel(job, claim.token, 0) == 2
    assert await bus.cancel(job, claim.token, 0) == 0
    assert await bus.cancel(job, claim.token, 77) == 0
    (ready,) = await bus.ready_groups(job)
    assert (ready.group, ready.dead) == (0, (1, 2))
    with pytest.raises(Fenced):
        await append(bus, token, held, 1)
    assert [lease.key.group for lease in await bus.lease(job, "w", token, 10)] == [1]
    # No failure: nobody looks for a cause. What they reserved is free again.
    usage = await bus.usage(job)
    assert (usage.num_dead_letters, usage.stored_bytes, usage.charged_bytes) == (0, 20, 120)
    await bus.commit(job, claim.token, 1, [0, 1])
    assert (await bus.usage(job)).charged_bytes == 0


async def test_a_snapshot_lies_beside_the_segments_until_its_episode_ends_or_starts_again(
    bus: Bus, claim: Claim
) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    first, second = await bus.lease(job, "w", token, 2)
    for lease in (first, second):
        await append(bus, token, lease, 0)
        await bus.save_snapshot(lease.key, token, Snapshot(0, 1, bytes(200)))
    await bus.save_snapshot(first.key, token, Snapshot(0, 1, bytes(300)))
    usage = await bus.usage(job)
    assert (usage.stored_bytes, usage.charged_bytes) == (520, 310 + 210)
    await bus.hand_back(job, token, [first.key])
    assert await bus.read_snapshot(first.key) == Snapshot(0, 1, bytes(300))
    await bus.restart(second.key, token, 1)
    assert await bus.read_snapshot(second.key) is None
    (first,) = await bus.lease(job, "w", token, 1)
    await append(bus, token, first, 1, final=True)
    assert await bus.read_snapshot(first.key) is None
    assert (await bus.usage(job)).stored_bytes == 20


async def test_only_the_holder_keeps_a_snapshot_and_only_of_what_is_stored(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    (lease,) = await bus.lease(job, "w", token, 1)
    await append(bus, token, lease, 0)
    for attempt, num_segments in ((0, 2), (0, 0), (1, 1)):
        with pytest.raises(Gap):
            await bus.save_snapshot(lease.key, token, Snapshot(attempt, num_segments, b"x"))
    await bus.hand_back(job, token, [lease.key])
    with pytest.raises(Fenced):
        await bus.save_snapshot(lease.key, token, Snapshot(0, 1, b"x"))
    assert await bus.read_snapshot(lease.key) is None


async def test_a_snapshot_is_stored_together_with_the_segments_that_it_stands_behind(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    first, second = await bus.lease(job, "w", token, 2)

    def segment(lease: LeasedEpisode, index: int, *, final: bool = False) -> Append:
        return Append(lease.key, 0, index, b"x" * 10, final)

    old, new = Kept(first.key, Snapshot(0, 1, b"old")), Kept(first.key, Snapshot(0, 2, b"new!"))
    call = [segment(first, 0), old, segment(first, 1), new, segment(second, 0)]
    for _ in range(2):  # the second one is a resend
        await bus.append(job, token, call)
        assert await bus.read_snapshot(first.key) == new.snapshot
        assert (await bus.usage(job)).stored_bytes == 34
    refused = [segment(first, 2), Kept(first.key, Snapshot(0, 4, b"of nothing"))]
    with pytest.raises(Gap):
        await bus.append(job, token, refused)
    assert len(await bus.read_episode(first.key)) == 2
    delivered = Kept(first.key, Snapshot(0, 2, b"delivered"))
    for _ in range(2):
        await bus.append(job, token, [delivered, segment(first, 2, final=True)])
        assert await bus.read_snapshot(first.key) is None
    await bus.append(job, token, [Kept(first.key, Snapshot(0, 3, b"late"))])  # on its way when it ended
    assert await bus.read_snapshot(first.key) is None
    assert (await bus.usage(job)).stored_bytes == 40
    with pytest.raises(Fenced):
        await bus.append(job, "another", [Kept(second.key, Snapshot(0, 1, b"x"))])


async def test_what_a_worker_notes_is_seen_until_the_episode_starts_again(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    (lease,) = await bus.lease(job, "w", token, 1)
    for index in range(2):
        await append(bus, token, lease, index)
        ((episode,),) = [group.episodes for group in await bus.groups(job)]
        assert (episode.note, episode.stage) == (f"turn {index}", Stage.HELD)
    await bus.restart(lease.key, token, 1)
    ((episode,),) = [group.episodes for group in await bus.groups(job)]
    assert episode.note == ""


async def test_a_new_attempt_begins_with_what_its_world_holds(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    (lease,) = await bus.lease(job, "w", token, 1)
    for index in range(2):
        await append(bus, token, lease, index)
    await bus.save_snapshot(lease.key, token, Snapshot(0, 2, b"the world"))
    await append(bus, token, lease, 2)

    def kept(number: int) -> list[Append]:
        return [Append(lease.key, 1, index, b"y" * 10, False, 3, f"turn {index}") for index in range(number)]

    for number in (1, 3):
        with pytest.raises(Gap):
            await bus.restart(lease.key, token, 1, kept(number))
    with pytest.raises(ValueError, match="does not begin"):
        await bus.restart(lease.key, token, 1, kept(2)[1:])
    for _ in range(2):  # the second one is a resend
        await bus.restart(lease.key, token, 1, kept(2))
    assert await bus.read_episode(lease.key) == [b"y" * 10] * 2
    assert await bus.read_snapshot(lease.key) == Snapshot(1, 2, b"the world")
    assert [payload for _, payload in await bus.read_segments(job, "0", block_ms=0)] == [b"y" * 10] * 2
    usage = await bus.usage(job)
    assert (usage.stored_bytes, usage.charged_bytes) == (29, 100)
    await bus.hand_back(job, token, [lease.key])
    (lease,) = await bus.lease(job, "w", token, 1)
    assert (lease.attempt, lease.num_segments, lease.note) == (1, 2, "turn 1")
    # Without them the world goes too.
    await bus.restart(lease.key, token, 2)
    assert await bus.read_snapshot(lease.key) is None


async def test_episodes_that_are_asked_for_by_name_are_taken_if_they_wait(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=3)
    await dispatch(bus, claim, 1)
    mine, other = await bus.join("mine"), await bus.join("other")
    (held,) = await bus.lease(job, "other", other, 1)
    keys = [EpisodeKey(job, 0, member) for member in range(3)]
    free = [key for key in keys if key != held.key]
    for _ in range(2):  # said again
        assert [one.key for one in await bus.take(job, "mine", mine, [*keys, EpisodeKey(job, 9, 0)])] == free
    assert [one.key for one in await bus.lease(job, "other", other, 10)] == [EpisodeKey(job, 1, 0)]
    for lease in await bus.take(job, "mine", mine, free[:1]):
        await append(bus, mine, lease, 0)
        with pytest.raises(Fenced):
            await append(bus, other, lease, 1)
        await append(bus, mine, lease, 1, final=True)
    assert await bus.take(job, "mine", mine, free[:1]) == []  # it has ended
    (view,) = await bus.groups(job, limit=1)
    assert [one.worker for one in view.episodes if one.stage is Stage.HELD] == [
        "other" if one.key == held.key else "mine" for one in view.episodes if one.key != free[0]
    ]
    await bus.hand_back(job, mine, free)
    assert [one.key for one in await bus.lease(job, "other", other, 10)] == free[1:]
