"""Every objective that a job may ask for trains the sequences that a job makes, or is refused when it is submitted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from gspo_core.batch import TrainSequence, collate
from gspo_core.learner_config import OptimizerConfig
from gspo_core.objective import loss_denominators, policy_loss
from gspo_core.objective_config import RATIO_OF_LOSS, AdvantageConfig, ObjectiveConfig
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Group, Outcome, Split, StopReason, Trajectory
from services.trainer.groups.sequences import train_batch
from tests.core.learner_support import VOCABULARY, make_learner, with_behavior, write_model
from tests.services.trainer.trainer_kit import group, segment


def choices(key: str) -> tuple[str, ...]:
    return get_args(ObjectiveConfig.model_fields[key].annotation)


# So small that one model serves all combinations.
TINY_STEPS = OptimizerConfig(lr=1e-9)
COMBINATIONS = [
    dict(zip(("loss", "ratio", "aggregate", "correction", "anchor"), values, strict=True))
    for values in itertools.product(*map(choices, ("loss", "ratio", "aggregate", "correction", "anchor")))
]


def job(objective: dict[str, Any], **limits: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": "m",
            "environments": [{"ref": "environments.calculator:Calculator"}],
            "objective": objective,
            "limits": limits,
        }
    )


def needed(keys: dict[str, str]) -> dict[str, Any]:
    """The keys without which a loss is no loss."""
    return {**keys, "minibatches": 2, **({"dppo_delta": 0.2} if keys["loss"].startswith("dppo") else {})}


def is_defined(keys: dict[str, str]) -> bool:
    """The page's own rules: some losses have one ratio, and a ratio to the sampler contains the correction."""
    has_ratio = RATIO_OF_LOSS.get(keys["loss"], keys["ratio"]) == keys["ratio"]
    return has_ratio and (keys["anchor"] == "proximal" or keys["correction"] == "none")


def rewritten(number: int, member: int, reward: float) -> Trajectory:
    """An episode whose history was rewritten after its first turn: two branches of three actions each."""
    key = EpisodeKey("job_a", number, member)
    outcome = Outcome(StopReason.COMPLETED, reward)
    return Trajectory((segment(key, 0, 0, 3), segment(key, 1, 1, 3, branch=1, outcome=outcome)))


def job_made() -> list[TrainSequence]:
    """Several turns, versions and branches, a failed member, and a group that teaches nothing."""
    ragged = group(0, [1.0, 0.0, None, 0.5], versions=(0, 1, 1))
    cut = Group("job_a", 1, Split.TRAIN, 1, 2, (rewritten(1, 0, 1.0), rewritten(1, 1, 0.0)))

    def staleness_of(versions: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.asarray(1 - versions, np.int32)

    sequences = train_batch([ragged, cut, group(2, [1.0, 1.0])], staleness_of, AdvantageConfig()).sequences
    assert max(int(sequence.token_ids.max()) for sequence in sequences) < VOCABULARY
    return sequences


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model only loses time by sharing its work with other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("loss", choices("loss"))
def test_every_objective_trains_or_is_refused_at_submission(model_dir: Path, loss: str) -> None:
    num_trained, learner, sequences = 0, make_learner(model_dir, optimizer=TINY_STEPS), job_made()
    with_behavior(learner, sequences, noise=0.02)
    for keys in COMBINATIONS:
        if keys["loss"] != loss:
            continue
        if not is_defined(keys):
            with pytest.raises(ValidationError, match=r"ratio|correction"):
                job(needed(keys), max_episode_tokens=512)
            continue
        learner.retune(learner.config, job(needed(keys), max_episode_tokens=512).training_objective)
        metrics = learner.step(sequences)
        assert math.isfinite(metrics["gspo/loss"]), keys
        assert metrics["learner/num_skipped_updates"] == 0, keys
        assert metrics["learner/grad_norm"] > 0, keys
        num_trained += 1
    assert num_trained == len(choices("aggregate")) * (len(choices("correction")) + 1) * (
        1 if loss in RATIO_OF_LOSS else len(choices("ratio"))
    )


def test_an_episode_has_one_advantage_unless_turn_rewards_act() -> None:
    """Losses over whole sequences take nothing else."""
    assert all(isinstance(sequence.advantages, float) for sequence in job_made())


@pytest.mark.parametrize("aggregate", choices("aggregate"))
def test_an_episode_keeps_its_say_when_its_history_is_rewritten(aggregate: str) -> None:
    """Two episodes of six actions weigh the same, whether or not one of them was cut into two branches."""
    objective = ObjectiveConfig(aggregate=aggregate, minibatches=1)

    def mass(trajectories: tuple[Trajectory, ...]) -> list[float]:
        groups = [Group("job_a", 0, Split.TRAIN, 0, 2, trajectories)]
        sequences = train_batch(groups, np.zeros_like, AdvantageConfig()).sequences
        return [gradient_mass(objective, sequences, place) for place in range(len(sequences))]

    whole = group(0, [1.0, 0.0]).trajectories
    first, second = mass(whole)
    assert first == pytest.approx(second)
    first_of_cut, *branches = mass((whole[0], rewritten(0, 1, 0.0)))
    assert (first_of_cut, sum(branches)) == pytest.approx((first, second))


def gradient_mass(objective: ObjectiveConfig, sequences: list[TrainSequence], place: int) -> float:
    """The weight that the loss gives the tokens of one sequence, from its own loss with advantage 1 and ratio 1."""
    one = collate([replace(sequences[place], advantages=1.0)], [0], layout="padded")
    denominators = loss_denominators([s.action_mask for s in sequences], [s.weight for s in sequences])
    logprobs = one.behavior_logprobs_BT.clone().requires_grad_()
    loss, _ = policy_loss(
        objective,
        logprobs,
        one.action_mask_BT,
        one.advantages,
        behavior_logprobs_BT=one.behavior_logprobs_BT,
        sequence_weights_B=one.weights_B,
        num_sequences=denominators[0],
        num_tokens=denominators[1],
    )
    loss.backward()
    assert logprobs.grad is not None
    return float(-logprobs.grad.sum())


def test_product_weights_need_episodes_that_they_do_not_refuse() -> None:
    """Else the job would end at the first long episode, with the rollouts of a step paid for."""
    with pytest.raises(ValidationError, match=r"product_max_tokens.*8192.*set limits.max_episode_tokens"):
        job({"correction": "product"})
    with pytest.raises(ValidationError, match=r"this job allows 513"):
        job({"correction": "product_mask"}, max_episode_tokens=513)
    assert job({"correction": "product"}, max_episode_tokens=512).objective.correction == "product_truncate"
    assert job({"correction": "product", "product_max_tokens": 9000}).objective.product_max_tokens == 9000


def test_one_advantage_per_sequence_and_turn_rewards_exclude_each_other() -> None:
    advantage = {"turn_reward_weight": 0.5}
    with pytest.raises(ValidationError, match=r"gmpo takes one advantage per sequence"):
        ObjectiveConfig(loss="gmpo", advantage=advantage)
    assert ObjectiveConfig(loss="gmpo", advantage=advantage, advantage_reduction="mean").loss == "gmpo"
