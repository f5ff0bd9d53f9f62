"""Takes what was read and said in episodes out of a batch log, and leaves the step countable.

Rule: of an erased episode stay the shape of its segments (lengths, masks, turns, versions, engines, times), its stop
reason, reward and metrics; its token ids and log-probs become 0 (log-probs under known weights would give tokens back),
and what its requests named and what its reward was made from becomes empty. The log says which episodes these are, has
a schema number of its own and a sha256 over its new bytes. An erased step is never trained again: other tokens would
lead to other weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from gspo_core.log.batches import BatchExtra, LoggedBatch, encode_batch
from gspo_core.types import NOTHING, Group, Segment, Trajectory

Member = tuple[int, int]
"""Group and member."""


def users_of(episode: Trajectory) -> list[str]:
    """In whose names its turns were asked for."""
    return sorted({segment.user for segment in episode.segments if segment.user})


def without_texts(batch: LoggedBatch, members: Collection[Member]) -> Iterator[bytes]:
    """The bytes of the log with these episodes erased, besides those that were."""
    doomed = {*members, *batch.erased}
    groups = [_group(group, doomed) for group in batch.groups]
    extra: BatchExtra = {**batch.extra, "erased": [list(one) for one in sorted(doomed)]}
    return encode_batch(batch.position, groups, extra)


def _group(group: Group, doomed: Collection[Member]) -> Group:
    episodes = tuple(_blank(one) if (one.key.group, one.key.member) in doomed else one for one in group)
    return Group(group.job, group.group, group.split, group.task_index, group.size, episodes)


def _blank(episode: Trajectory) -> Trajectory:
    return Trajectory(tuple(map(_blank_segment, episode.segments)))


def _blank_segment(segment: Segment) -> Segment:
    asked = None if segment.asked is None else segment.asked._replace(dialect="", model="")
    outcome = None if segment.outcome is None else replace(segment.outcome, evidence=NOTHING)
    return replace(
        segment,
        token_ids=np.zeros(segment.num_tokens, np.int32),
        behavior_logprobs=np.zeros(segment.num_tokens, np.float32),
        outcome=outcome,
        asked=asked,
        user="",
    )
