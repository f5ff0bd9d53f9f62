"""What tests of the wire types share: segments and whole episodes, drawn by hypothesis or built by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from gspo_core.types import NOTHING, Asked, CacheMode, EpisodeKey, Evidence, Outcome, Segment, StopReason, TimeSplit

JOB = "job-1"


def segment(**changes: Any) -> Segment:
    """A small final segment: one prompt token, three actions."""
    fields: dict[str, Any] = {
        "key": EpisodeKey(JOB, 3, 1),
        "attempt": 0,
        "branch": 0,
        "index": 0,
        "turn": 0,
        "version": 7,
        "temperature": 1.0,
        "engine_id": "engine-0",
        "token_ids": [11, 12, 13, 14],
        "action_mask": [False, True, True, True],
        "behavior_logprobs": [0.0, -0.5, -0.25, -1.0],
        "outcome": Outcome(StopReason.COMPLETED, 1.0),
    }
    return Segment(**(fields | changes))


def episode(
    key: EpisodeKey, cuts: Sequence[int], *, attempt: int = 0, length: int = 12, reward: float = 1.0
) -> tuple[Segment, ...]:
    """An episode of ``length`` tokens with distinct values at each place, cut before each place in ``cuts``."""
    places = np.arange(length)
    mask = places % 3 != 0
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < length}), length]
    return tuple(
        segment(
            key=key,
            attempt=attempt,
            index=index,
            turn=index,
            version=index,
            token_ids=1000 * (key.member + 1) + places[start:end],
            action_mask=mask[start:end],
            behavior_logprobs=np.where(mask, -(places + 1) / 64, 0)[start:end],
            outcome=Outcome(StopReason.COMPLETED, reward) if end == length else None,
        )
        for index, (start, end) in enumerate(itertools.pairwise(edges))
    )


finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31 - 1)
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
named_numbers = st.dictionaries(names, finite, max_size=4)
keys = st.builds(
    EpisodeKey,
    job=names.filter(lambda job: bool(job) and "/" not in job and job.isprintable()),
    group=st.integers(0, 2**63 - 1),
    member=counts,
)


texts = st.dictionaries(names, names, max_size=3)
evidence = st.just(NOTHING) | st.builds(Evidence, texts, texts)


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    stop_reason = draw(st.sampled_from(StopReason))
    return Outcome(
        stop_reason=stop_reason,
        reward=draw(finite) if stop_reason.has_reward else None,
        reward_parts=draw(named_numbers),
        metrics=draw(named_numbers),
        evidence=draw(evidence),
    )


@st.composite
def arrays(draw: st.DrawFn, num_tokens: int) -> dict[str, NDArray[Any]]:
    """Token ids, mask and log-probs of any bits that satisfy the invariants, from raw bytes because that is fast."""
    raw = draw(st.binary(min_size=9 * num_tokens, max_size=9 * num_tokens))
    mask = np.frombuffer(raw, np.uint8, num_tokens) % 2 == 1
    bits = np.frombuffer(raw, np.uint32, num_tokens, num_tokens) | 0x8000_0000
    bits[bits > 0xFF7F_FFFF] -= 0x0080_0000
    return {
        "token_ids": (np.frombuffer(raw, np.uint32, num_tokens, 5 * num_tokens) >> 1).astype(np.int32),
        "action_mask": mask,
        "behavior_logprobs": np.where(mask, bits.view(np.float32), np.float32(0)),
    }


untrained = st.sets(st.integers(0, 2**31 - 1), max_size=4).map(lambda turns: tuple(sorted(turns)))


paid = st.dictionaries(st.integers(0, 2**31 - 1), finite, max_size=4).map(
    lambda rewards: tuple(sorted(rewards.items()))
)


again = st.dictionaries(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1), max_size=4).map(
    lambda times: tuple(sorted(times.items()))
)


@st.composite
def asking(draw: st.DrawFn, turn: int) -> Asked:
    parent = draw(st.none() | st.integers(0, turn - 1)) if turn else None
    num_messages = draw(counts)
    return Asked(parent, draw(names), draw(names), draw(names), num_messages, draw(st.integers(0, num_messages)))


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    outcome = draw(st.none() | outcomes())
    turn = draw(counts)
    asked = draw(st.none() | asking(turn))
    return Segment(
        key=draw(keys),
        attempt=draw(counts),
        branch=draw(counts),
        index=draw(counts),
        turn=turn,
        version=draw(counts),
        temperature=draw(st.floats(min_value=0, exclude_min=True, allow_infinity=False)),
        engine_id=draw(names),
        cache_mode=draw(st.sampled_from(CacheMode)),
        turn_reward=draw(st.none() | finite),
        outcome=outcome,
        spent=draw(st.none() | st.builds(TimeSplit, seconds, seconds, seconds)),
        untrained_turns=draw(untrained) if outcome else (),
        turn_rewards=draw(paid) if outcome else (),
        repeated=draw(again) if outcome else (),
        asked=asked,
        user=draw(names | st.just("")) if asked else "",
        **draw(arrays(draw(st.integers(0 if outcome else 1, 40)))),
    )
