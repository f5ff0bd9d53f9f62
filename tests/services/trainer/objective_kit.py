"""Objectives as jobs ask for them, over sequences as jobs make them. It holds no test.

Under torchrun `objective_kit.py DIRECTORY (soon|all)` trains two steps with each and writes what came out.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[3]))

from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner
from gspo_core.learner_config import OptimizerConfig
from gspo_core.log.sequences import train_batch
from gspo_core.objective_config import AdvantageConfig, ObjectiveConfig
from gspo_core.replay.on_ranks import met
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Group, Outcome, Split, StopReason, Trajectory
from tests.core.learner_support import VOCABULARY, make_learner, with_behavior
from tests.services.trainer.trainer_kit import group, segment


def choices(key: str) -> tuple[str, ...]:
    return get_args(ObjectiveConfig.model_fields[key].annotation)


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


Case = tuple[str, str, str]
LAYOUTS = ("shared", "packed", "padded")
MATRIX: list[Case] = list(itertools.product(choices("loss"), choices("aggregate"), LAYOUTS))
# Each loss, each aggregation and each layout; the rest is slow.
SOON: list[Case] = [
    (loss, choices("aggregate")[row % len(choices("aggregate"))], LAYOUTS[(row + row // len(LAYOUTS)) % len(LAYOUTS)])
    for row, loss in enumerate(choices("loss"))
]
# Nearly linear in the gradient, and so slow that one model serves all cases.
SLOW_STEPS = OptimizerConfig(lr=1e-3, eps=1.0)


def two_steps(model_dir: Path, cases: Iterable[Case]) -> dict[str, list[dict[str, float]]]:
    """The metrics of two steps of each case."""
    found: dict[str, list[dict[str, float]]] = {}
    learners: dict[str, Learner] = {}
    for case in cases:
        loss, aggregate, layout = case
        if layout not in learners:
            learners[layout] = make_learner(model_dir, optimizer=SLOW_STEPS, layout=layout)
        learner, sequences = learners[layout], job_made()
        with_behavior(learner, sequences, noise=0.02)
        objective = needed({"loss": loss, "aggregate": aggregate})
        learner.retune(learner.config, job(objective, max_episode_tokens=512).training_objective)
        found["/".join(case)] = [learner.step(sequences) for _ in range(2)]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    root, which = Path(sys.argv[1]), sys.argv[2]
    with met():
        results = two_steps(root / "model", SOON if which == "soon" else MATRIX)
        if dist.get_rank() == 0:
            (root / "metrics.json").write_text(json.dumps(results))
