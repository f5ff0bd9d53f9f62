"""Transcripts of episodes whose branches grew at the same time."""

from __future__ import annotations

import numpy as np

from gspo_core.types import EpisodeKey, Segment, Trajectory
from services.api.views.transcript import by_branch, tokens_view, turns_view
from tests.core.segments import JOB, segment

KEY = EpisodeKey(JOB, 0, 0)


def interleaved() -> tuple[Segment, ...]:
    """Turn 0 of branch 0 and turn 1 of branch 1, piece by piece; nobody ever had turn 2."""
    open_ended = {"key": KEY, "attempt": 0, "outcome": None}
    nothing = {"token_ids": [], "action_mask": [], "behavior_logprobs": []}
    places = [(0, 0), (1, 1), (0, 0), (2, 2), (1, 1)]
    pieces = [segment(**open_ended, index=n, branch=branch, turn=turn) for n, (branch, turn) in enumerate(places)]
    return (*pieces, segment(**nothing, key=KEY, attempt=0, index=5, branch=1, turn=1, untrained_turns=(2,)))


def test_each_turn_is_shown_in_one_piece() -> None:
    turns = turns_view(by_branch(interleaved()), None, None)
    assert [(one["branch"], one["turn"], one["num_actions"]) for one in turns] == [(0, 0, 6), (1, 1, 6), (2, 2, 3)]
    assert [one["end_token"] for one in turns[:-1]] == [one["first_token"] for one in turns[1:]]


def test_log_probs_of_training_find_their_tokens() -> None:
    segments = interleaved()
    branches = Trajectory(segments).branches
    trained = np.concatenate(
        [branch.behavior_logprobs[branch.action_mask] + place for place, branch in enumerate(branches)]
    ).astype(np.float32)
    shown = tokens_view(by_branch(segments), None, trained)
    for branch, turn, is_sampled, ratio in zip(
        shown["branch"], shown["turn"], shown["sampled"], shown["ratio"], strict=True
    ):
        if not is_sampled or turn == 2:
            assert ratio is None
        else:
            assert ratio is not None
            assert abs(ratio - np.exp(branch)) < 1e-5
