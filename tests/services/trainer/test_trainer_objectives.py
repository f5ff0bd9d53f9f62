"""Every objective that a job may ask for trains the sequences that a job makes, or is refused when it is submitted."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from gspo_core.batch import TrainSequence, collate
from gspo_core.learner_config import OptimizerConfig
from gspo_core.log.sequences import train_batch
from gspo_core.objective import loss_denominators, policy_loss
from gspo_core.objective_config import RATIO_OF_LOSS, AdvantageConfig, ObjectiveConfig
from gspo_core.types import Group, Split, Trajectory
from tests.core.learner_support import make_learner, with_behavior, write_model
from tests.services.trainer import objective_kit
from tests.services.trainer.objective_kit import MATRIX, SOON, choices, job, job_made, needed, rewritten, two_steps
from tests.services.trainer.trainer_kit import group

# So small that one model serves all combinations.
TINY_STEPS = OptimizerConfig(lr=1e-9)
COMBINATIONS = [
    dict(zip(("loss", "ratio", "aggregate", "correction", "anchor"), values, strict=True))
    for values in itertools.product(*map(choices, ("loss", "ratio", "aggregate", "correction", "anchor")))
]


def is_defined(keys: dict[str, str]) -> bool:
    """The page's own rules: some losses have one ratio, and a ratio to the sampler contains the correction."""
    has_ratio = RATIO_OF_LOSS.get(keys["loss"], keys["ratio"]) == keys["ratio"]
    return has_ratio and (keys["anchor"] == "proximal" or keys["correction"] == "none")


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


@pytest.fixture(scope="module")
def on_one_rank(model_dir: Path) -> dict[str, list[dict[str, float]]]:
    return two_steps(model_dir, MATRIX)


def check_trained(metrics: dict[str, float]) -> None:
    assert math.isfinite(metrics["gspo/loss"])
    assert metrics["learner/num_updates"] == 2
    assert metrics["learner/grad_norm"] > 0


@pytest.mark.parametrize("case", MATRIX, ids="/".join)
def test_every_loss_aggregation_and_layout_trains_two_steps(
    on_one_rank: dict[str, list[dict[str, float]]], case: objective_kit.Case
) -> None:
    loss, aggregate, _ = case
    steps = on_one_rank["/".join(case)]
    assert len(steps) == 2
    for metrics in steps:
        check_trained(metrics)
    for layout in objective_kit.LAYOUTS:  # which changes nothing
        check_same(steps, on_one_rank[f"{loss}/{aggregate}/{layout}"])


def check_same(first: list[dict[str, float]], second: list[dict[str, float]]) -> None:
    for one, other in zip(first, second, strict=True):
        for name in ("gspo/loss", "learner/grad_norm", "learner/grad_norm_max"):
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=1e-5), name


def on_two_ranks(model_dir: Path, root: Path, which: str) -> dict[str, list[dict[str, float]]]:
    """All cases in one start of both processes."""
    shutil.copytree(model_dir, root / "model")
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(objective_kit.__file__, str(root), which),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
        timeout=600,
    )
    found: dict[str, list[dict[str, float]]] = json.loads((root / "metrics.json").read_text())
    return found


def check_ranks(model_dir: Path, root: Path, which: str, cases: list[objective_kit.Case]) -> None:
    alone, together = two_steps(model_dir, cases), on_two_ranks(model_dir, root, which)
    assert together.keys() == alone.keys()
    for case, steps in together.items():
        for metrics in steps:
            check_trained(metrics)
        check_same(alone[case], steps)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("warm_children")
def test_two_ranks_train_every_loss_every_aggregation_and_every_layout(model_dir: Path, tmp_path: Path) -> None:
    assert [set(one) for one in zip(*SOON, strict=True)] == [set(one) for one in zip(*MATRIX, strict=True)]
    check_ranks(model_dir, tmp_path, "soon", SOON)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_them_in_every_combination(model_dir: Path, tmp_path: Path) -> None:
    check_ranks(model_dir, tmp_path, "all", MATRIX)
