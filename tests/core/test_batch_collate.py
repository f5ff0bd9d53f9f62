"""Sequences that cannot be trained are refused; those that can come out of a micro-batch as they went in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.batch import InvalidSequence, TrainSequence, collate, deal_minibatches, split_batch
from tests.core.learner_support import make_sequences

PLAIN: dict[str, Any] = {
    "token_ids": [5, 6, 7, 8],
    "action_mask": [False, True, False, True],
    "behavior_logprobs": [0, -1, 0, -2],
    "turn_ids": [0, 0, 1, 1],
    "staleness": [0, 1, 1, 0],
    "advantages": 0.5,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"action_mask": [True, True, False, True]}, "no prefix"),
        ({"behavior_logprobs": [0, -np.inf, 0, -2]}, "corrupt"),
        ({"behavior_logprobs": [0, np.nan, 0, -2]}, "corrupt"),
        ({"turn_ids": [0, 0]}, "turn_ids has the shape"),
        ({"advantages": np.array([1.0, 2.0])}, "advantages have the shape"),
        ({"advantages": float("nan")}, "advantage is not finite"),
        ({"advantages": np.array([0, np.inf, 0, 0])}, "advantage is not finite"),
        ({"temperature": 0.0}, "temperature"),
        ({"weight": 0.0}, "weight"),
        ({name: [] for name in ("token_ids", "action_mask", "behavior_logprobs", "turn_ids", "staleness")}, "at least"),
    ],
)
def test_sequences_that_cannot_be_trained_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSequence, match=reason):
        TrainSequence(**{**PLAIN, **change})


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("score_all", [False, True])
def test_everything_about_a_token_stays_together(layout: Any, score_all: bool) -> None:
    """Each field holds values that tell sequence and place apart, so that any shift shows."""
    sequences = []
    for number, sequence in enumerate(make_sequences(9, per_token_advantages=True)):
        places = np.arange(sequence.num_tokens) + 100 * number
        sequences.append(
            TrainSequence(
                sequence.token_ids, sequence.action_mask, -1.0 - places, places + 10_000, places + 20_000, places + 0.25
            )
        )
    indices = [3, 0, 7, 1]
    batch = collate(sequences, indices, layout=layout, score_all=score_all)
    flat_ids, flat_positions = batch.token_ids.flatten(), batch.positions.flatten()
    scored = 0
    for row, index in enumerate(indices):
        sequence = sequences[index]
        places = np.arange(1, sequence.num_tokens) if score_all else np.flatnonzero(sequence.action_mask)
        mine = slice(scored, scored + len(places))
        assert batch.targets_N[mine].tolist() == sequence.token_ids[places].tolist()
        # the hidden state that predicts a token belongs to the token before it
        assert flat_ids[batch.rows_N[mine]].tolist() == sequence.token_ids[places - 1].tolist()
        assert flat_positions[batch.rows_N[mine]].tolist() == (places - 1).tolist()
        cells = slice(0, len(places))
        assert batch.action_mask_BT[row, cells].tolist() == sequence.action_mask[places].tolist()
        for name, table in {
            "behavior_logprobs": batch.behavior_logprobs_BT,
            "turn_ids": batch.turn_ids_BT,
            "staleness": batch.staleness_BT,
            "advantages": batch.advantages,
        }.items():
            assert table[row, cells].tolist() == getattr(sequence, name)[places].tolist()
            assert not table[row, len(places) :].any()
        scored += len(places)
    assert scored == len(batch.targets_N)
    values_N = torch.arange(1.0, scored + 1)
    assert torch.equal(batch.table(values_N)[batch.table(values_N) != 0], values_N)


def test_read_only_arrays_are_taken_as_they_are() -> None:
    fixed = {name: np.array(value) for name, value in PLAIN.items() if name != "advantages"}
    for array in fixed.values():
        array.flags.writeable = False
    collate([TrainSequence(**fixed, advantages=1.0)], [0], layout="shared")


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 5))
def test_minibatches_share_a_batch_out_evenly_and_repeatably(number: int, minibatches: int, step: int) -> None:
    shares = deal_minibatches([None] * number, minibatches, seed=1, step=step)
    assert sorted(index for share in shares for index in share) == list(range(number))
    assert len(shares) == min(number, minibatches)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert shares == deal_minibatches([None] * number, minibatches, seed=1, step=step)


def test_minibatches_differ_between_steps() -> None:
    alone = [None] * 40
    assert deal_minibatches(alone, 4, seed=1, step=0) != deal_minibatches(alone, 4, seed=1, step=1)


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_ranks_share_a_batch_out(layout: Any) -> None:
    sequences = make_sequences(10)
    batches = [split_batch(sequences, range(10), 120, layout=layout, rank=rank, num_ranks=3) for rank in range(3)]
    assert len({len(rank) for rank in batches}) == 1
    assert sorted(index for rank in batches for batch in rank for index in batch.indices) == list(range(10))


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_a_rank_without_sequences_still_has_a_micro_batch(layout: Any) -> None:
    (batch,) = split_batch(make_sequences(1), [0], 1000, layout=layout, rank=1, num_ranks=2)
    assert batch.indices == ()
    assert batch.token_ids.numel() == 1
    assert len(batch.rows_N) == 0
