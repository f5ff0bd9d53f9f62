"""Recorded episodes as the data of another job: the batches of a job, with other rewards where there are some.

Rule: ids, masks, log-probs, versions and keys stay what they were, so an episode is found where it was played; ages are
those that were logged. Such a job dispatches nothing, so it owes no group. Erased episodes are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gspo_core.log.batches import BatchExtra, LoggedBatch
from gspo_core.log.changes import with_reward
from gspo_core.types import Group, Trajectory

Member = tuple[int, int]
"""Group and member."""
Rewards = Mapping[Member, float]
EPOCH = 1
FIRST_OF_TRACES = 2**52
"""Conversations of keys are groups from this number on, so that they are no episode of their job. Browsers read it."""


class NoSuchEpisode(ValueError):
    """A reward was given to an episode that is not there, or that can have none."""


def rescored(batch: LoggedBatch, rewards: Rewards) -> LoggedBatch:
    """The batch with ``rewards`` in place of those recorded, which then have no parts. Raises NoSuchEpisode."""
    changed = sorted(member for member in map(_member, batch.trajectories) if member in rewards)
    if not changed:
        return batch
    groups = tuple(replace(group, trajectories=tuple(_judged(one, rewards) for one in group)) for group in batch.groups)
    extra: BatchExtra = {**batch.extra, "rescored": [list(one) for one in changed]}
    return replace(batch, groups=groups, extra=extra)


def recording(batches: Iterable[LoggedBatch], rewards: Rewards) -> Iterator[LoggedBatch]:
    """``batches`` as the steps 1, 2, ... of a job that is trained on nothing else. Raises NoSuchEpisode."""
    for step, batch in enumerate(batches, 1):
        told = rescored(_without_erased(batch), rewards)
        extra: BatchExtra = {
            "version": batch.extra.get("version"),
            "num_dispatched": 0,
            "dropped": {},
            "staleness": batch.extra.get("staleness", {}),
            "recorded": [batch.epoch, batch.step],
        }
        for name in ("late", "late_cap", "rescored", "dealing"):
            if name in told.extra:
                extra[name] = told.extra[name]
        yield LoggedBatch(EPOCH, step, told.groups, extra)


def unknown(rewards: Rewards, batches: Iterable[LoggedBatch]) -> list[str]:
    """Episodes of ``rewards`` that are in none of ``batches``, or were erased."""
    present = {_member(one) for batch in batches for one in _without_erased(batch).trajectories}
    return [f"{group}/{member}" for group, member in sorted(set(rewards) - present)]


def _judged(episode: Trajectory, rewards: Rewards) -> Trajectory:
    member = _member(episode)
    if member not in rewards:
        return episode
    if not episode.outcome.stop_reason.has_reward:
        raise NoSuchEpisode(
            f"episode {member[0]}/{member[1]} ended with {episode.outcome.stop_reason}: it has no reward"
        )
    return with_reward(episode, rewards[member], {})


def _without_erased(batch: LoggedBatch) -> LoggedBatch:
    if not batch.erased:
        return batch
    kept = tuple(replace(group, trajectories=tuple(_not_erased(group, batch))) for group in batch.groups)
    return replace(batch, groups=kept)


def _not_erased(group: Group, batch: LoggedBatch) -> Iterator[Trajectory]:
    return (one for one in group if _member(one) not in batch.erased)


def _member(one: Trajectory) -> Member:
    return one.key.group, one.key.member
