"""A learner says what its policy made of each token when that was trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import GATED, make_learner, make_sequences, with_behavior, write_model

CUTS: list[dict[str, Any]] = [{}, {"layout": "padded"}, {"micro_batch_tokens": 100}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.mark.parametrize("cut", CUTS)
def test_of_one_update_they_are_those_of_the_weights_before_it(model_dir: Path, cut: dict[str, Any]) -> None:
    learner, sequences = make_learner(model_dir, ObjectiveConfig(minibatches=1), **cut), make_sequences()
    with_behavior(learner, sequences)
    before = learner.logprobs(sequences)
    learner.step(sequences)
    assert len(learner.trained_logprobs) == len(sequences)
    for sequence, expected, found in zip(sequences, before, learner.trained_logprobs, strict=True):
        assert found == pytest.approx(expected[sequence.action_mask], abs=1e-5)


def test_later_updates_tell_how_far_the_weights_have_moved(model_dir: Path) -> None:
    learner, sequences = make_learner(model_dir, GATED), make_sequences()
    with_behavior(learner, sequences)
    before = learner.logprobs(sequences)
    learner.step(sequences)
    drifts = [
        float(np.abs(found - expected[sequence.action_mask]).max(initial=0.0))
        for sequence, expected, found in zip(sequences, before, learner.trained_logprobs, strict=True)
    ]
    assert min(drift for drift, sequence in zip(drifts, sequences, strict=True) if sequence.num_actions) < 1e-5
    assert max(drifts) > 1e-3


def test_what_was_not_trained_is_not_a_number(model_dir: Path) -> None:
    learner, sequences = make_learner(model_dir, ObjectiveConfig()), make_sequences()
    sequences[0] = dataclasses.replace(sequences[0], advantages=0.0)
    learner.step(sequences)
    assert np.isnan(learner.trained_logprobs[0]).all()
    assert len(learner.trained_logprobs[2]) == sequences[2].num_actions
    assert not np.isnan(learner.trained_logprobs[2]).any()
