"""The tokens of a logged episode in columns: what tables, the view of a batch and rewards of recorded episodes read.

The rule: a column is what was recorded, and what a log does not say is named as such; nothing is shown or decoded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_core.types import Branch, Trajectory


@dataclass(frozen=True, eq=False)
class BranchTokens:
    """The tokens of one branch, in order; an array has one entry for each."""

    position: NDArray[np.int32]
    turn: NDArray[np.int32]
    token: NDArray[np.int32]
    is_sampled: NDArray[np.bool_]
    version: NDArray[np.int32]
    """The weights that sampled the token; for one that was not sampled, those that answered it."""
    staleness: NDArray[np.int32]
    """In steps; -1 where the log does not say."""
    logprob: NDArray[np.float32]
    """When it was sampled; NaN where it was not."""
    trained_logprob: NDArray[np.float32]
    """When it was trained; NaN where it was not, or where that is no longer kept."""


def tokens_of(
    episode: Trajectory, ages: Mapping[str, int], trained: NDArray[np.float32] | None = None
) -> list[BranchTokens]:
    """By branch. ``ages``: of versions, as the batch says them (``staleness``). ``trained``: log-probs of the sampled
    tokens when they were trained, branch after branch."""
    found, begin = [], 0
    for branch in episode.branches:
        end = begin + int(branch.action_mask.sum())
        found.append(_tokens(branch, ages, None if trained is None else trained[begin:end]))
        begin = end
    return found


def _tokens(branch: Branch, ages: Mapping[str, int], trained: NDArray[np.float32] | None) -> BranchTokens:
    mask, versions = branch.action_mask, branch.versions
    later = np.full(branch.num_tokens, np.nan, np.float32)
    if trained is not None:
        later[mask] = trained
    known = {version: ages.get(str(version), -1) for version in set(versions.tolist())}
    return BranchTokens(
        position=np.arange(branch.num_tokens, dtype=np.int32),
        turn=branch.turn_ids,
        token=branch.token_ids,
        is_sampled=mask,
        version=versions,
        staleness=np.array([known[version] for version in versions.tolist()], np.int32),
        logprob=np.where(mask, branch.behavior_logprobs, np.float32(np.nan)),
        trained_logprob=later,
    )


def said_in(tokens: BranchTokens) -> tuple[tuple[int, ...], ...]:
    """The ids that the policy sampled, turn by turn."""
    turns = sorted(set(tokens.turn[tokens.is_sampled].tolist()))
    return tuple(tuple(tokens.token[tokens.is_sampled & (tokens.turn == turn)].tolist()) for turn in turns)
