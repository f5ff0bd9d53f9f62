"""A policy of another kind is one file and one line of a registry: the learner trains it without knowing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from gspo_core.learner import UnsupportedModel, training
from gspo_core.learner.policy import load_policy
from gspo_core.learner_config import POLICIES, LearnerConfig, LearnerOptions, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.plan import UnknownShape, planned_shape
from tests.core import tiny_policy
from tests.core.learner_support import (
    VOCABULARY,
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)

RATE = OptimizerConfig(lr=1e-2)
OBJECTIVE = ObjectiveConfig(minibatches=2, kl_coef=0.01)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line."""
    monkeypatch.setitem(POLICIES, "tiny", tiny_policy.__name__)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_policy.write_tiny(tmp_path / "tiny", VOCABULARY)


def tiny_learner(model_dir: Path, **options: Any) -> training.Learner:
    return make_learner(model_dir, OBJECTIVE, optimizer=RATE, **{"policy": "tiny", "layout": "padded", **options})


def test_a_second_policy_trains_publishes_and_goes_on(model_dir: Path, tmp_path: Path) -> None:
    learner, cut = tiny_learner(model_dir), tiny_learner(model_dir, micro_batch_tokens=60)
    assert isinstance(learner._policy, tiny_policy.TinyPolicy)
    sequences = make_sequences(8)
    with_behavior(learner, sequences)
    likelihood = [-mean_surprise(learner, sequences)]
    for step in range(2):
        metrics = learner.step(sequences)
        assert metrics["learner/num_updates"] == 2
        assert metrics["gspo/kl_reference"] >= 0
        likelihood.append(-mean_surprise(learner, sequences))
        if not step:
            learner.save_state(tmp_path / "state")
    assert likelihood[0] < likelihood[1] < likelihood[2], "what is rewarded became likelier"
    for _ in range(2):
        cut.step(sequences)
    assert largest_difference(weights(learner), weights(cut)) < 1e-5, "how a batch is cut changes nothing"
    resumed = tiny_learner(model_dir)
    resumed.load_state(tmp_path / "state")
    resumed.step(sequences)
    assert largest_difference(weights(learner), weights(resumed)) == 0
    learner.save_weights(tmp_path / "published")
    published = load_file(tmp_path / "published" / "model.safetensors")
    assert largest_difference(weights(learner), published) == 0


def mean_surprise(learner: training.Learner, sequences: list[Any]) -> float:
    """Of the sampled tokens, those of good sequences counted for and those of bad ones against."""
    found = learner.logprobs(sequences)
    return -float(np.sum([s.advantages * row[s.action_mask].mean() for s, row in zip(sequences, found, strict=True)
                          if s.num_actions]))  # fmt: skip


@pytest.mark.parametrize(
    "option",
    [{"dtype": "bfloat16"}, {"activation_checkpointing": True}, {"lora": {"rank": 2}}, {"logprob_chunk_tokens": 8}],
    ids=str,
)
def test_an_option_that_a_policy_does_not_know_is_refused_by_name(model_dir: Path, option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=rf"learner\.{next(iter(option))}: the policy tiny does not know it"):
        tiny_learner(model_dir, **option)


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValidationError, match="no policy megatron here, but transformers, tiny"):
        LearnerOptions(policy="megatron")


def test_memory_is_planned_for_the_policy_that_the_plan_counts(model_dir: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "qwen3")
    planned_shape(tmp_path / "qwen3", LearnerOptions())
    with pytest.raises(UnknownShape, match="not for tiny"):
        planned_shape(tmp_path / "qwen3", LearnerOptions(policy="tiny"))


def test_the_learner_knows_no_code_of_a_model() -> None:
    """Nothing of transformers stands in the modules that train, update and save."""
    root = Path(training.__file__).parent
    for name in ("training", "optimizer", "state", "trust_region", "batch_view", "policy"):
        text = (root / f"{name}.py").read_text()
        assert "policy_model import" not in text
        assert "model_directory" not in text
        assert "import transformers" not in text


def test_the_first_policy_is_loaded_by_the_same_door(tmp_path: Path) -> None:
    from gspo_core.learner.fitting import settled
    from gspo_core.learner.ranks import Ranks

    model_dir, device, ranks = write_model(tmp_path / "qwen3"), torch.device("cpu"), Ranks(0, 1)
    config = settled(model_dir, LearnerConfig(), device, ranks, has_reference=False)
    policy = load_policy(model_dir, config, device, ranks)
    assert [type(layer).__name__ for layer in policy.layers()] == ["Qwen3DecoderLayer"] * 2
