"""Logged steps trained again: as they were, compared with what was published; and otherwise, compared with that.

The rule: the way that was taken is always trained first, so every answer says whether it is the past that was found
again. Weights and states go into a folder that is removed afterwards; the past is only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner, Ranks
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.changes import ImpossibleChange, Without, changed_batch, without_live
from gspo_core.log.sequences import TrainBatch
from gspo_core.log.settings import Tuning
from gspo_core.log.steps import logged_sequences
from gspo_core.lora_adapter import name_base
from gspo_core.replay.comparison import Difference, Parameters, Sameness, difference, sameness
from gspo_core.replay.journey import Say, arrive, compute_alike, new_learner, say_nothing
from gspo_core.replay.on_ranks import shared_folder
from gspo_core.replay.past import Past
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.token_shares import BranchShares, LossLedger
from gspo_core.types import Trajectory


@dataclass(frozen=True)
class StepFound:
    """A step that was trained again as it was."""

    step: int
    loss: float
    versions: tuple[Sameness, ...]
    """Every version that was published after it."""


@dataclass(frozen=True)
class Influence:
    """How far the steps end from where they ended, with the advantages of one group 0 and all else as it was."""

    group: int
    difference: Difference


@dataclass(frozen=True, eq=False)
class SingleEpisode:
    """One episode in its step."""

    step: int
    episode: Trajectory
    advantage: float
    loss: float
    """Its share of the step's loss."""
    step_loss: float
    """As the step reported it."""
    sum_of_shares: float
    """Over all tokens of the step."""
    branches: tuple[BranchShares, ...]


@dataclass(frozen=True)
class ReplayFindings:
    job_model: str
    start: str
    """Where it came from: a checkpoint, or the base model."""
    num_replayed: int
    """Steps trained again to get to the first one asked for."""
    steps: tuple[StepFound, ...]
    otherwise: Difference | None = None
    """With the change asked for."""
    losses_otherwise: tuple[float, ...] = ()
    influences: tuple[Influence, ...] = ()
    """The largest distance first."""
    single: SingleEpisode | None = None

    @property
    def is_same(self) -> bool:
        """Every version that was published in these steps was found again, bit for bit."""
        return all(one.is_same for step in self.steps for one in step.versions)


def replay(past: Past, question: ReplayQuestion, say: Say = say_nothing) -> ReplayFindings:
    """Raises PastError, ImpossibleChange."""
    batches = [past.whole_batch(step) for step in range(question.first, question.last + 1)]
    spec = question.checked(past.spec, batches)
    ranks = Ranks.current()
    if ranks.num_ranks > 1 and (question.changes or question.influence or question.single is not None):
        raise ImpossibleChange("on several ranks steps are trained again as they were: ask for the rest on one")
    with shared_folder() as folder:
        arrived = arrive(past, question.first - 1, say)
        work = _Work(past, question, batches, folder)
        if question.changes or question.influence:
            arrived.learner.copy_state().write(work.state)
        before = arrived.learner.parameters()
        steps, single = work.as_it_was(arrived.learner, arrived.tuning, say)
        taken = arrived.learner.parameters()
        start = "the base model" if arrived.start is None else f"the checkpoint of step {arrived.start.step}"
        answer = ReplayFindings(past.spec.model, start, arrived.num_replayed, tuple(steps), single=single)
        del arrived
        if question.changes:
            other, losses, single = work.otherwise(Tuning(spec), question.without, say)
            answer = replace(answer, losses_otherwise=tuple(losses), single=single)
            answer = replace(answer, otherwise=difference(before, taken, other))
        if question.influence:
            answer = replace(answer, influences=tuple(work.influences(before, taken, say)))
    return answer


class _Work:
    """One question, with the state before its first step in a folder."""

    def __init__(self, past: Past, question: ReplayQuestion, batches: Sequence[LoggedBatch], folder: Path) -> None:
        self._past, self._question, self._batches, self._folder = past, question, batches, folder
        self.state = folder / "before"

    def as_it_was(self, learner: Learner, tuning: Tuning, say: Say) -> tuple[list[StepFound], SingleEpisode | None]:
        found, single = [], None
        for batch in self._batches:
            compute_alike(batch, self._past.spec, say)
            loss, shown = self._train(learner, tuning, batch)
            single = shown or single
            weights = self._folder / f"weights-{batch.step}"
            self._save(learner, weights)
            published = self._past.published(batch.step) if Ranks.current().is_first else []
            versions = [sameness(self._past, one, weights) for one in published]
            found.append(StepFound(batch.step, loss, tuple(versions)))
            say(f"step {batch.step} trained again")
        return found, single

    def _save(self, learner: Learner, weights: Path) -> None:
        """As it was published: an adapter names the place where its base was."""
        learner.save_weights(weights)
        if learner.config.publishes_adapter and Ranks.current().is_first:
            name_base(weights, str(Path(self._past.accepted.job_spec.model)))

    def otherwise(
        self, tuning: Tuning, without: Without, say: Say
    ) -> tuple[Parameters, list[float], SingleEpisode | None]:
        learner = self._learner_before(tuning)
        losses, single = list[float](), None
        for batch in self._batches:
            changed = changed_batch(without_live(batch, self._question.settings), without)
            loss, shown = self._train(learner, tuning, changed)
            losses.append(loss)
            single = shown or single
            say(f"step {batch.step} trained otherwise")
        return learner.parameters(), losses, single

    def influences(self, before: Parameters, taken: Parameters, say: Say) -> list[Influence]:
        """What each group's advantages did, greatest first. Taking a whole group out would change more: the rest would
        be dealt to other updates, which moves the weights even if the group taught nothing."""
        found = []
        for number in [group.group for batch in self._batches for group in batch.groups]:
            tuning = Tuning(self._past.spec)
            learner = self._learner_before(tuning)
            for batch in self._batches:
                tuning.recall(learner, batch.extra.get("settings", {}))
                learner.step(_muted(logged_sequences(batch, tuning.spec.objective.advantage), number))
            found.append(Influence(number, difference(before, taken, learner.parameters())))
            say(f"trained without the pull of group {number}")
        return sorted(found, key=lambda one: -one.difference.distance)

    def _learner_before(self, tuning: Tuning) -> Learner:
        learner = new_learner(tuning.spec)
        learner.load_state(self.state)
        return learner

    def _train(self, learner: Learner, tuning: Tuning, batch: LoggedBatch) -> tuple[float, SingleEpisode | None]:
        """The step's loss, and the episode that was asked for if it is in this step."""
        tuning.recall(learner, batch.extra.get("settings", {}))
        train = logged_sequences(batch, tuning.spec.objective.advantage)
        if not train.sequences:
            raise ImpossibleChange(f"step {batch.step} has nothing left to train")
        single = self._question.single
        episodes = [one for one in train.episodes if (one.key.group, one.key.member) == single]
        if not episodes:
            return learner.step(train.sequences)["gspo/loss"], None
        updates = min(tuning.spec.objective.minibatches, len(train.sequences))
        ledger = LossLedger(train, updates)
        loss = learner.step_telling(train.sequences, ledger.tell)["gspo/loss"]
        assert single is not None
        branches = tuple(ledger.of(single, learner.trained_logprobs))
        own = ledger.loss_by_episode()[episodes[0].key]
        advantage = float(branches[0].advantage.mean()) if branches and len(branches[0].advantage) else 0.0
        return loss, SingleEpisode(batch.step, episodes[0], advantage, own, loss, ledger.loss(), branches)


def _muted(train: TrainBatch, group: int) -> list[TrainSequence]:
    owners = [one.key.group for one in train.episodes for _ in one.branches]
    return [
        replace(one, advantages=np.zeros_like(one.advantages) if isinstance(one.advantages, np.ndarray) else 0.0)
        if owner == group
        else one
        for owner, one in zip(owners, train.sequences, strict=True)
    ]
