"""Transcripts of episodes whose branches grew at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gspo_core.log.branches import links
from gspo_core.log.transcript import arrivals, by_branch, tokens_view, turns_view
from gspo_core.messages import ParsedTurn
from gspo_core.types import Asked, EpisodeKey, Repeated, Segment, Trajectory
from tests.core.segments import JOB, segment

KEY = EpisodeKey(JOB, 0, 0)


def interleaved() -> tuple[Segment, ...]:
    """Turn 0 of branch 0 and turn 1 of branch 1, piece by piece; nobody ever had turn 2."""
    open_ended = {"key": KEY, "attempt": 0, "outcome": None}
    nothing: dict[str, Any] = {"token_ids": [], "action_mask": [], "behavior_logprobs": []}
    places = [(0, 0), (1, 1), (0, 0), (2, 2), (1, 1)]
    pieces = [segment(**open_ended, index=n, branch=branch, turn=turn) for n, (branch, turn) in enumerate(places)]
    return (*pieces, segment(**nothing, key=KEY, attempt=0, index=5, branch=1, turn=1, untrained_turns=(2,)))


def test_each_turn_is_shown_in_one_piece() -> None:
    turns = turns_view(by_branch(interleaved()), None, None)
    assert [(one["branch"], one["turn"], one["num_actions"]) for one in turns] == [(0, 0, 6), (1, 1, 6), (2, 2, 3)]
    assert [one["end_token"] for one in turns[:-1]] == [one["first_token"] for one in turns[1:]]


def test_an_outcome_alone_is_no_turn() -> None:
    nothing: dict[str, Any] = {"token_ids": [], "action_mask": [], "behavior_logprobs": []}
    assert turns_view([segment(**nothing, key=KEY, attempt=0, index=0, turn=0)], None, None) == []


def test_turns_stand_where_their_last_token_arrived() -> None:
    """Not where the outcome did, which has none."""
    segments = interleaved()
    assert arrivals(segments) == arrivals(by_branch(segments)) == {0: 12, 2: 16, 1: 20}
    end = replace(segments[-1], turn=0, untrained_turns=())
    assert arrivals((*segments[:-1], end)) == {0: 12, 2: 16, 1: 20}


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


def tree() -> list[Segment]:
    """Two turns, a second answer to the second request, a sub-agent, and a turn that forks from the first one."""
    prompt, answer = [1, 2, 3], [4, 5]
    turns = [
        (0, 0, [*prompt], answer, Asked(None, "", "messages", "claude", 1, 0)),
        (0, 1, [6, 7], [8], Asked(0, "", "messages", "claude", 3, 2)),
        (1, 2, [*prompt, *answer, 6, 7], [9], Asked(0, "resampled", "messages", "claude", 3, 0)),
        (2, 3, [1, 30], [31], Asked(None, "sub_agent", "responses", "gpt", 1, 0)),
        (3, 4, [*prompt, *answer, 60], [61], Asked(0, "edited_history", "messages", "claude", 3, 2)),
    ]
    found = [
        segment(
            key=KEY,
            attempt=0,
            index=index,
            branch=branch,
            turn=turn,
            token_ids=[*given, *sampled],
            action_mask=[False] * len(given) + [True] * len(sampled),
            behavior_logprobs=[0.0] * len(given) + [-0.5] * len(sampled),
            outcome=None,
            asked=asked,
        )
        for index, (branch, turn, given, sampled, asked) in enumerate(turns)
    ]
    nothing: dict[str, Any] = {"token_ids": [], "action_mask": [], "behavior_logprobs": []}
    end = {"untrained_turns": (3,), "repeated": (Repeated(1, 2),)}
    return [*found, segment(**nothing, **end, key=KEY, attempt=0, index=5, branch=3, turn=4)]


def test_turns_are_a_tree_with_their_requests() -> None:
    shown = links(by_branch(tree()))
    assert {turn: one["parent"] for turn, one in shown.items()} == {0: None, 1: 0, 2: 0, 3: None, 4: 0}
    assert {turn: one["reason"] for turn, one in shown.items()} == {
        0: None,
        1: None,
        2: "resampled",
        3: "sub_agent",
        4: "edited_history",
    }
    assert [one["shared_tokens"] for one in shown.values()] == [0, 0, 7, 1, 5]
    assert [one["tokens_read_again"] for one in shown.values()] == [0, 0, 0, 0, 1]
    assert [turn for turn, one in shown.items() if not one["is_trained"]] == [3]
    assert shown[1]["request"] == {
        "dialect": "messages",
        "model": "claude",
        "num_messages": 3,
        "num_new_messages": 1,
        "num_repeats": 2,
    }


def test_without_records_the_tree_is_read_from_the_tokens() -> None:
    """As of worlds that rewrite their history, and of releases before."""
    bare = [replace(one, asked=None) for one in tree()]
    shown = links(by_branch(bare))
    assert {turn: one["parent"] for turn, one in shown.items()} == {0: None, 1: 0, 2: 0, 3: None, 4: 0}
    assert {one["reason"] for one in shown.values()} == {None}
    assert [one["shared_tokens"] for one in shown.values()] == [0, 0, 7, 1, 5]


class Letters:
    """The part of a codec that reading needs: letters, with 1 and 2 around each message."""

    @property
    def tokenizer(self) -> Letters:
        return self

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def token_id(self, token: str) -> int | None:
        return {"<|im_start|>": 1, "<|im_end|>": 2}.get(token)

    def parse(self, sampled_ids: Sequence[int], tools: object = None) -> ParsedTurn:
        return ParsedTurn(self.decode(sampled_ids))


def test_a_branch_shows_the_messages_that_no_other_has_whole() -> None:
    def message(role: str, text: str) -> list[int]:
        return [1, *map(ord, f"{role}\n{text}"), 2, 10]

    system, first = message("system", "be kind"), message("user", "count to 3")
    edited = message("user", "count to 4")
    later = [*message("assistant", "123"), *message("user", "on")]
    pieces = [[*system, *first], [*system, *edited], [*system, *first, *later]]
    segments = [
        segment(
            key=KEY,
            attempt=0,
            index=number,
            branch=number,
            turn=number,
            token_ids=[*given, 50],
            action_mask=[False] * len(given) + [True],
            behavior_logprobs=[0.0] * len(given) + [-1.0],
            outcome=None,
        )
        for number, given in enumerate(pieces)
    ]
    shown = turns_view(segments, Letters(), None)
    said = [[(one["role"], one["text"]) for one in turn["messages"]] for turn in shown]
    assert said == [
        [("system", "be kind"), ("user", "count to 3")],
        [("user", "count to 4")],
        [("assistant", "123"), ("user", "on")],
    ]
