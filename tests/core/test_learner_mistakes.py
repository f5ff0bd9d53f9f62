"""The tests of the learner can fail: each of these mistakes, put into its code, breaks the test that is about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_core.batch import TrainSequence, collate
from gspo_core.learner import attention, logprobs, policy_model, training
from gspo_core.learner.policy_model import UnsupportedModel
from gspo_core.objective_config import ObjectiveConfig
from tests.core import test_learner_invariance as invariance
from tests.core import test_logprobs
from tests.core.learner_support import make_learner, make_sequences, with_behavior, write_model

# The package shows the function of this name, which hides the module.
collating = sys.modules[collate.__module__]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="module")
def sequences(model_dir: Path) -> list[TrainSequence]:
    sequences = make_sequences()
    with_behavior(make_learner(model_dir), sequences)
    return sequences


def _local_denominators(right: Any) -> Any:
    """Each micro-batch divides by its own counts."""
    return lambda *given, **named: right(*given, **{**named, "num_sequences": None, "num_tokens": None})


def _mean_of_micro_batches(right: Any) -> Any:
    """A micro-batch's loss is divided by how many sequences it has, as when averaging over accumulation steps."""

    def wrong(*given: Any, **named: Any) -> Any:
        loss, stats = right(*given, **named)
        return loss / given[2].shape[0], stats

    return wrong


def _by_token(right: Any) -> Any:
    def wrong(config: Any, *given: Any, **named: Any) -> Any:
        return right(config.model_copy(update={"aggregate": "token"}), *given, **named)

    return wrong


def _leaking(right: Any) -> Any:
    """One causal attention over everything that lies end to end."""

    def wrong(query: Any, key: Any, value: Any, packing: Any, scaling: Any, window: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        return [attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)]

    return wrong


def _positions_go_on(right: Any) -> Any:
    def wrong(packing: Any) -> Any:
        token_ids, positions, rows = right(packing)
        return token_ids, np.arange(positions.size)[None], rows

    return wrong


def _shifted(right: Any) -> Any:
    """Tokens are scored by what stands one place further on."""

    def wrong(packing: Any) -> Any:
        token_ids, positions, rows = right(packing)
        return token_ids, positions, [np.minimum(row + 1, token_ids.size - 1) for row in rows]

    return wrong


MISTAKES: list[tuple[str, Any, str, Callable[[Any], Any], str]] = [
    ("local denominators", training, "policy_loss", _local_denominators, "cut"),
    ("mean of micro-batches", training, "policy_loss", _mean_of_micro_batches, "cut"),
    ("mean over tokens", training, "policy_loss", _by_token, "lengths"),
    ("attention leaks", attention, "_by_pieces", _leaking, "packed"),
    ("positions go on", collating, "_packed", _positions_go_on, "packed"),
    ("shifted by one", collating, "_packed", _shifted, "packed"),
]


def _check(which: str, model_dir: Path, sequences: list[TrainSequence]) -> None:
    if which == "lengths":
        invariance.test_each_sequence_counts_alike_whatever_its_length(model_dir)
    else:
        cut = {"cut": "some sequences at a time", "packed": "padded"}[which]

        def trained_whole(objective: ObjectiveConfig) -> invariance.Trained:
            # Anew: what was trained for another test was trained without the mistake.
            return invariance.train(model_dir, sequences, objective=objective)

        invariance.test_a_gspo_update_is_the_same_for_every_cut(model_dir, sequences, trained_whole, cut)


@pytest.mark.parametrize(("name", "module", "attribute", "mutate", "which"), MISTAKES)
def test_the_test_notices(
    model_dir: Path,
    sequences: list[TrainSequence],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: Any,
    attribute: str,
    mutate: Callable[[Any], Any],
    which: str,
) -> None:
    monkeypatch.setattr(module, attribute, mutate(getattr(module, attribute)))
    # a learner that computes something else than its model is refused before it trains: that is a test of its own
    monkeypatch.setattr(policy_model, "_check_forward", lambda *_: None)
    with pytest.raises((AssertionError, ValueError)):
        _check(which, model_dir, sequences)


@pytest.mark.parametrize(("module", "attribute", "mutate"), [m[1:4] for m in MISTAKES if m[4] == "packed"])
def test_a_learner_that_does_not_compute_its_model_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, module: Any, attribute: str, mutate: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(module, attribute, mutate(getattr(module, attribute)))
    with pytest.raises(UnsupportedModel, match="differ"):
        make_learner(model_dir)


def test_gradcheck_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    function = logprobs._ChosenLogprobs
    right = function.backward

    def without_temperature(ctx: Any, grad_N: torch.Tensor) -> Any:
        return right(ctx, grad_N * ctx.saved_tensors[4])

    monkeypatch.setattr(function, "backward", staticmethod(without_temperature))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        test_logprobs.test_gradcheck_in_float64(3)
