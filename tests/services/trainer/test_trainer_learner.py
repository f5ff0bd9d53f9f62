"""What a job says about its learner reaches the learner."""

from __future__ import annotations

from pathlib import Path

from gspo_core.spec import JobSpec
from services.trainer.building import make_learner
from tests.core.learner_support import write_model


def test_a_jobs_optimizer_objective_and_options_reach_its_learner(tmp_path: Path) -> None:
    spec = JobSpec.model_validate(
        {
            "model": str(write_model(tmp_path / "model")),
            "environments": [{"ref": "environments.calculator:Calculator"}],
            "optimizer": {"lr": 2e-5, "schedule": "linear"},
            "learner": {"lora": {"rank": 2}, "micro_batch_tokens": 512, "activation_checkpointing": True},
            "objective": {"minibatches": 2},
            "rollout": {"staleness_cap": 9},
            "resources": {"device": "cpu"},
            "steps": 7,
        }
    )
    learner = make_learner(spec)
    config = learner.config
    assert (config.optimizer, config.total_steps) == (spec.optimizer, 7)
    assert config.lora is not None
    assert (config.lora.rank, config.micro_batch_tokens, config.activation_checkpointing) == (2, 512, True)
    assert (learner.objective.minibatches, learner.objective.staleness_cap) == (2, 9)
