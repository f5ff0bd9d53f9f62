"""The token ledger: append-only, cut into segments of one version, and restorable only from what it really is."""

from __future__ import annotations

import random

import pytest

from gspo_core.types import EpisodeKey, Outcome, Segment, StopReason, Trajectory
from services.engines.protocol import EngineProtocolError
from services.episodes.policy import Sampled
from services.episodes.tree import Ledger, LedgerConflict
from tests.services.rollout.rollout_kit import answer_of

KEY = EpisodeKey("job", 3, 1)


def answer(ids: list[int], *spans: tuple[int, int, int]) -> Sampled:
    return answer_of(ids, [-0.5] * len(ids), spans, "engine")


def test_one_segment_per_version_and_the_observation_goes_with_the_first() -> None:
    ledger = Ledger(KEY, 0, 1.0)
    ledger.observe([1, 2, 3])
    first, second = ledger.record(answer([4, 5, 6, 7, 8], (10, 0, 2), (11, 2, 5)))
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.action_mask.tolist() == [False] * 3 + [True] * 2
    assert first.behavior_logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert second.token_ids.tolist() == [6, 7, 8]
    assert (first.version, second.version) == (10, 11)
    assert (first.index, second.index, first.turn, second.turn) == (0, 1, 0, 0)
    assert ledger.prompt() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ledger.versions == {10, 11}


def test_a_chunked_turn_keeps_its_turn_number_and_the_next_one_opens_with_its_bridge() -> None:
    ledger = Ledger(KEY, 2, 0.7)
    ledger.observe([1])
    chunks = ledger.record(answer([2, 3], (0, 0, 2))) + ledger.record(answer([4], (0, 0, 1)))
    ledger.observe([5, 6])
    chunks += ledger.record(answer([7], (1, 0, 1)))
    last = ledger.close(Outcome(StopReason.COMPLETED, 1.0))
    assert [segment.turn for segment in (*chunks, last)] == [0, 0, 1, 1]
    assert chunks[2].token_ids.tolist() == [5, 6, 7]
    assert (last.num_tokens, last.version, last.attempt, last.temperature) == (0, 1, 2, 0.7)
    (branch,) = Trajectory((*chunks, last)).branches
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_closing_takes_along_what_was_read_and_never_answered() -> None:
    ledger = Ledger(KEY, 0, 1.0)
    ledger.observe([1, 2])
    last = ledger.close(Outcome(StopReason.MAX_TOKENS, 0.0), version=4)
    assert last.token_ids.tolist() == [1, 2]
    assert (last.num_actions, last.version) == (0, 4)


def test_a_rewritten_history_is_a_new_branch() -> None:
    ledger = Ledger(KEY, 0, 1.0)
    ledger.observe([1, 2])
    segments = ledger.record(answer([3], (0, 0, 1)))
    ledger.prompt()
    ledger.fork([9, 9])
    segments += ledger.record(answer([4], (0, 0, 1)))
    assert ledger.prompt() == [9, 9, 4]
    first, second = Trajectory((*segments, ledger.close(Outcome(StopReason.COMPLETED, 1.0)))).branches
    assert first.token_ids.tolist() == [1, 2, 3]
    assert second.token_ids.tolist() == [9, 9, 4]
    assert second.turn_ids.tolist() == [1, 1, 1]


def test_a_prompt_that_rewrites_the_one_before_is_refused() -> None:
    ledger = Ledger(KEY, 0, 1.0)
    ledger.observe([1, 2, 3])
    ledger.prompt()
    ledger.open.branch.ids._ids[1] = 7
    with pytest.raises(LedgerConflict, match="rewrites"):
        ledger.prompt()


@pytest.mark.parametrize(
    ("ids", "spans"),
    [
        ([1, 2, 3], [(0, 0, 2)]),
        ([1, 2, 3], [(0, 0, 1), (1, 2, 3)]),
        ([1, 2, 3], [(0, 0, 2), (1, 1, 3)]),
        ([1], [(0, 0, 2)]),
        ([1, 2], []),
    ],
)
def test_spans_that_do_not_tile_the_output_are_refused(ids: list[int], spans: list[tuple[int, int, int]]) -> None:
    with pytest.raises(EngineProtocolError):
        answer(ids, *spans)


def test_a_missing_logprob_is_refused() -> None:
    with pytest.raises(EngineProtocolError):
        answer_of([1, 2], [-0.1], [(0, 0, 2)], "engine")


def play(ledger: Ledger, rng: random.Random) -> list[Segment]:
    """A random episode: several turns, each of several chunks, each of several versions."""
    segments = []
    version = 0
    for _ in range(rng.randint(1, 4)):
        ledger.observe([rng.randrange(50) for _ in range(rng.randint(1, 4))])
        for _ in range(rng.randint(1, 3)):
            ids = [rng.randrange(50) for _ in range(rng.randint(1, 5))]
            cut = rng.randint(0, len(ids))
            segments += ledger.record(answer(ids, (version, 0, cut), (version + 1, cut, len(ids))))
            version += 1
    return segments


@pytest.mark.parametrize("seed", range(20))
def test_a_restored_ledger_goes_on_exactly_like_the_one_that_was_lost(seed: int) -> None:
    lost, restored = Ledger(KEY, 0, 1.0), Ledger(KEY, 0, 1.0)
    segments = play(lost, random.Random(seed))
    for segment in segments:
        if segment.turn == len(restored.turns):
            restored.observe(lost.turns[segment.turn].observed)
        restored.restore(segment)
    assert restored.prompt() == lost.prompt()
    assert restored.versions == lost.versions
    assert restored.num_sampled == lost.num_sampled
    more = answer([1, 2], (99, 0, 2))
    assert restored.record(more) == lost.record(more)
    outcome = Outcome(StopReason.COMPLETED, 1.0)
    assert restored.close(outcome) == lost.close(outcome)


def test_a_segment_that_answered_another_observation_is_not_restored() -> None:
    first = Ledger(KEY, 0, 1.0)
    first.observe([1, 2])
    (segment,) = first.record(answer([3], (0, 0, 1)))
    other = Ledger(KEY, 0, 1.0)
    other.observe([1, 5])
    with pytest.raises(LedgerConflict, match="a different observation"):
        other.restore(segment)


def test_a_segment_of_another_attempt_or_a_finished_one_is_not_restored() -> None:
    first = Ledger(KEY, 0, 1.0)
    first.observe([1])
    (segment,) = first.record(answer([3], (0, 0, 1)))
    last = first.close(Outcome(StopReason.COMPLETED, 1.0))
    for wrong, attempt in ((segment, 1), (last, 0)):
        ledger = Ledger(KEY, attempt, 1.0)
        ledger.observe([1])
        with pytest.raises(LedgerConflict, match="does not continue"):
            ledger.restore(wrong)


def test_a_segment_of_a_turn_that_is_not_open_is_not_restored() -> None:
    first = Ledger(KEY, 0, 1.0)
    first.observe([1])
    segments = first.record(answer([3], (0, 0, 1)))
    first.observe([4])
    segments += first.record(answer([5], (0, 0, 1)))
    other = Ledger(KEY, 0, 1.0)
    other.observe([1])
    other.restore(segments[0])
    with pytest.raises(LedgerConflict, match="turn 1 does not continue 1 turns"):
        other.restore(segments[1])


def test_a_segment_of_another_branch_is_not_restored() -> None:
    first = Ledger(KEY, 0, 1.0)
    first.observe([1])
    segments = first.record(answer([3], (0, 0, 1)))
    first.fork([1, 3, 4])
    segments += first.record(answer([5], (0, 0, 1)))
    other = Ledger(KEY, 0, 1.0)
    other.observe([1])
    other.restore(segments[0])
    other.observe([4])
    with pytest.raises(LedgerConflict, match="does not continue turn 1"):
        other.restore(segments[1])
