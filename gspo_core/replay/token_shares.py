"""What each token of an episode did to a step's loss.

The rule: the shares are read off the loss while the step is trained, so they add up to the loss that the step reported;
nothing is estimated. Tokens that were not trained have no row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gspo_core.log.sequences import TrainBatch
from gspo_core.objective import TokenTerms
from gspo_core.types import EpisodeKey, Trajectory


@dataclass(frozen=True, eq=False)
class BranchShares:
    """The sampled tokens of one branch, in order; an array has one entry for each."""

    position: NDArray[np.int64]
    """In the branch."""
    token: NDArray[np.int32]
    turn: NDArray[np.int32]
    version: NDArray[np.int32]
    staleness: NDArray[np.int32]
    behavior_logprob: NDArray[np.float32]
    policy_logprob: NDArray[np.float32]
    advantage: NDArray[np.float64]
    ratio: NDArray[np.float64]
    """For the unit that the token belongs to."""
    weight: NDArray[np.float64]
    kept: NDArray[np.bool_]
    clipped: NDArray[np.bool_]
    gated_by: list[list[str]]
    """The gates that closed, for each token."""
    loss: NDArray[np.float64]
    """Its share of the step's loss, that of the pull to the reference included."""


@dataclass
class LossLedger:
    """Collects the terms of every token while one step is trained. Pass ``tell`` to the learner."""

    batch: TrainBatch
    num_updates: int
    _terms: dict[int, TokenTerms] = field(default_factory=dict)
    _rows: dict[int, int] = field(default_factory=dict)

    def tell(self, indices: tuple[int, ...], terms: TokenTerms) -> None:
        for row, index in enumerate(indices):
            self._terms[index], self._rows[index] = terms, row

    def loss(self) -> float:
        """The shares of all tokens of the step together."""
        return float(sum(self._share(index).sum() for index in self._terms))

    def loss_by_episode(self) -> dict[EpisodeKey, float]:
        """Share of each trained episode; 0 for one whose advantage is 0."""
        found: dict[EpisodeKey, float] = {}
        for index, (episode, _) in enumerate(self._branches()):
            share = float(self._share(index).sum()) if index in self._terms else 0.0
            found[episode.key] = found.get(episode.key, 0.0) + share
        return found

    def of(self, key: tuple[int, int], logprobs: list[NDArray[np.float32]]) -> list[BranchShares]:
        """The branches of the episode of this group and member; ``logprobs``: those of the learner when it trained."""
        return [
            self._branch(index, episode, place, logprobs[index])
            for index, (episode, place) in enumerate(self._branches())
            if (episode.key.group, episode.key.member) == key
        ]

    def _branches(self) -> list[tuple[Trajectory, int]]:
        """The episode and the number of the branch of each sequence."""
        return [(one, place) for one in self.batch.episodes for place in range(len(one.branches))]

    def _share(self, index: int) -> NDArray[np.float64]:
        terms = self._terms[index]
        return self._row(index, terms.policy_BT + terms.kl_BT) / self.num_updates

    def _row(self, index: int, values: Tensor) -> NDArray[np.float64]:
        count = self.batch.sequences[index].num_actions
        found: NDArray[np.float64] = values[self._rows[index]][:count].double().cpu().numpy()
        return found

    def _branch(self, index: int, episode: Trajectory, place: int, logprobs: NDArray[np.float32]) -> BranchShares:
        sequence, branch = self.batch.sequences[index], episode.branches[place]
        mask, count = sequence.action_mask, sequence.num_actions
        terms = self._terms.get(index)
        nothing = np.zeros(count)
        closed: list[list[str]] = [[] for _ in range(count)]
        if terms is not None:
            for name, kept_BT in terms.gates.items():
                for at in np.flatnonzero(self._row(index, kept_BT) == 0):
                    closed[at].append(name)
        advantages = np.broadcast_to(sequence.advantages, sequence.num_tokens)[mask].astype(np.float64)
        return BranchShares(
            position=np.flatnonzero(mask),
            token=sequence.token_ids[mask],
            turn=sequence.turn_ids[mask],
            version=branch.versions[mask],
            staleness=sequence.staleness[mask],
            behavior_logprob=sequence.behavior_logprobs[mask],
            policy_logprob=logprobs,
            advantage=advantages,
            ratio=np.exp(nothing if terms is None else self._row(index, terms.log_ratio_BT)),
            weight=nothing if terms is None else self._row(index, terms.weight_BT),
            kept=np.zeros(count, bool) if terms is None else self._row(index, terms.kept_BT) != 0,
            clipped=np.zeros(count, bool) if terms is None else self._row(index, terms.clipped_BT) != 0,
            gated_by=closed,
            loss=nothing if terms is None else self._share(index),
        )
