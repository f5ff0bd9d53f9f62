"""Layouts: every sequence can be read back from where its tokens lie, and plans keep their promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.batch.packing import MIN_SHARED_TOKENS, Packing, common_prefix, pack, plan_micro_batches

# Few symbols and long runs, so that common prefixes of all lengths occur.
ids = st.lists(st.integers(0, 1), max_size=6).map(lambda runs: np.repeat(np.array(runs, dtype=np.int64), 9))
batches = st.lists(ids, min_size=1, max_size=9)


def check(packing: Packing, sequences: list[np.ndarray]) -> None:
    """Each token stands where `rows` says, at its position, and sees exactly the tokens before it."""
    seen = context_of_rows(packing)
    for sequence, rows in zip(sequences, packing.rows, strict=True):
        assert packing.token_ids[rows].tolist() == sequence.tolist()
        assert packing.positions[rows].tolist() == list(range(len(sequence)))
        for position, row in enumerate(rows):
            assert seen[row] == rows[: position + 1].tolist()


def context_of_rows(packing: Packing) -> dict[int, list[int]]:
    seen: dict[int, list[int]] = {}
    for piece in packing.pieces:
        before = [row for start, length in piece.context for row in range(start, start + length)]
        for offset in range(piece.length):
            seen[piece.start + offset] = before + list(range(piece.start, piece.start + offset + 1))
    return seen


@given(batches, st.booleans())
def test_every_token_sees_its_own_sequence_and_nothing_else(sequences: list[np.ndarray], share: bool) -> None:
    check(pack(sequences, share=share), sequences)


def test_a_common_prompt_lies_once() -> None:
    prompt = np.arange(40)
    answers = [np.full(size, 50 + size) for size in (3, 5, 7)]
    sequences = [np.concatenate([prompt, answer]) for answer in answers]
    assert pack(sequences, share=True).num_tokens == 40 + 3 + 5 + 7
    assert pack(sequences, share=False).num_tokens == 3 * 40 + 3 + 5 + 7


def test_short_common_prefixes_are_not_worth_a_piece() -> None:
    prompt = np.arange(MIN_SHARED_TOKENS - 1)
    sequences = [np.append(prompt, 90), np.append(prompt, 91)]
    assert len(pack(sequences, share=True).pieces) == 2


def test_identical_sequences_and_prefixes_of_others_are_shared() -> None:
    long = np.arange(50)
    sequences = [long, long[:30], long]
    packing = pack(sequences, share=True)
    assert packing.num_tokens == 50
    check(packing, sequences)


def test_nothing_at_all_is_one_placeholder_token() -> None:
    packing = pack([np.zeros(0, np.int64)], share=True)
    assert packing.num_tokens == 1
    assert [len(rows) for rows in packing.rows] == [0]


@given(batches, st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_plans_cover_all_within_budget_and_alike_on_every_rank(
    sequences: list[np.ndarray], budget: int, num_ranks: int, share: bool
) -> None:
    plan = plan_micro_batches(sequences, budget, share=share, num_ranks=num_ranks)
    assert sorted(m for rank in plan for members in rank for m in members) == list(range(len(sequences)))
    assert len({len(rank) for rank in plan}) == 1
    for members in (members for rank in plan for members in rank):
        tokens = pack([sequences[m] for m in members], share=share).num_tokens
        assert len(members) <= 1 or tokens <= budget
    assert plan == plan_micro_batches(sequences, budget, share=share, num_ranks=num_ranks)


def test_ranks_get_about_equal_work() -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 1000, int(size)) for size in rng.integers(20, 400, 64)]
    plan = plan_micro_batches(sequences, 4096, share=True, num_ranks=4)
    loads = [sum(len(sequences[m]) for members in rank for m in members) for rank in plan]
    assert max(loads) <= 1.05 * min(loads)


def test_members_of_a_group_stay_together_when_they_share_their_prompt() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 300) for _ in range(4)]
    sequences = [np.concatenate([prompts[i % 4], rng.integers(0, 1000, 20)]) for i in range(16)]
    plan = plan_micro_batches(sequences, 400, share=True)
    assert sorted(sorted(members) for members in plan[0]) == [[g, g + 4, g + 8, g + 12] for g in range(4)]


@pytest.mark.parametrize(("first", "second", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1)])
def test_common_prefix(first: list[int], second: list[int], length: int) -> None:
    assert common_prefix(np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)) == length
