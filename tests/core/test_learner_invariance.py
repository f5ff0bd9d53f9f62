"""How a batch is cut and laid out never changes an update; what is masked never matters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import (
    GATED,
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)

# Updates of the tests move weights by about 1e-2; float32 sums in another order differ by about 1e-8.
TOLERANCE = 2e-6
CUTS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed"},
    "padded": {"layout": "padded"},
    "one sequence at a time": {"micro_batch_tokens": 1},
    "some sequences at a time": {"micro_batch_tokens": 100},
    "some padded": {"layout": "padded", "micro_batch_tokens": 150},
    "small chunks of the head": {"logprob_chunk_tokens": 5},
    "checkpointed": {"activation_checkpointing": True},
}
OBJECTIVES = {
    "gspo": GATED,
    "turns": ObjectiveConfig(minibatches=2, ratio="turn", clip=[0.01, 0.012], k3_gate=0.02),
    "grpo, token mean": ObjectiveConfig(name="grpo", minibatches=2, clip=[0.1, 0.1], aggregate="token", k3_gate=0.02),
    "behavior": ObjectiveConfig(minibatches=2, anchor="behavior", clip=[0.01, 0.012], k3_gate=0.02),
    "reference": ObjectiveConfig(minibatches=2, kl_coef=0.1, k3_gate=0.02),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="module")
def sequences(model_dir: Path) -> list[TrainSequence]:
    sequences = make_sequences()
    with_behavior(make_learner(model_dir), sequences)
    return sequences


Trained = tuple[Learner, dict[str, float]]


def train(model_dir: Path, sequences: list[TrainSequence], **config: Any) -> Trained:
    learner = make_learner(model_dir, **config)
    return learner, learner.step(sequences)


@pytest.fixture(scope="module")
def trained_whole(model_dir: Path, sequences: list[TrainSequence]) -> Callable[[ObjectiveConfig], Trained]:
    """The update that every cut is compared with: trained once for each objective."""
    kept: dict[str, Trained] = {}

    def find(objective: ObjectiveConfig) -> Trained:
        name = objective.model_dump_json()
        if name not in kept:
            kept[name] = train(model_dir, sequences, objective=objective)
        return kept[name]

    return find


@pytest.fixture(scope="module")
def untrained(model_dir: Path) -> dict[str, torch.Tensor]:
    return weights(make_learner(model_dir))


def check_same(first: Trained, second: Trained) -> None:
    assert largest_difference(weights(first[0]), weights(second[0])) < TOLERANCE
    assert first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        assert value == pytest.approx(second[1][name], rel=1e-3, abs=2e-5), name


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("cut", ["packed", "padded", "some sequences at a time"])
def test_an_update_is_the_same_however_the_batch_is_cut(
    model_dir: Path,
    sequences: list[TrainSequence],
    trained_whole: Callable[[ObjectiveConfig], Trained],
    untrained: dict[str, torch.Tensor],
    objective: ObjectiveConfig,
    cut: str,
) -> None:
    whole = trained_whole(objective)
    assert largest_difference(weights(whole[0]), untrained) > 1000 * TOLERANCE
    check_same(whole, train(model_dir, sequences, objective=objective, **CUTS[cut]))


@pytest.mark.parametrize("cut", CUTS)
def test_a_gspo_update_is_the_same_for_every_cut(
    model_dir: Path, sequences: list[TrainSequence], trained_whole: Callable[[ObjectiveConfig], Trained], cut: str
) -> None:
    whole = trained_whole(GATED)
    assert 0 < whole[1]["gspo/kept_frac_k3"] < 1, "the test is about gates, so some must act"
    assert 0 < whole[1]["gspo/clip_frac"] < 1, "and some sequences must be clipped"
    check_same(whole, train(model_dir, sequences, **CUTS[cut]))


def test_advantages_per_token_are_cut_alike(model_dir: Path) -> None:
    sequences = make_sequences(per_token_advantages=True)
    with_behavior(make_learner(model_dir), sequences)
    check_same(train(model_dir, sequences), train(model_dir, sequences, layout="padded", micro_batch_tokens=150))


def test_one_advantage_for_all_tokens_equals_it_written_per_token(
    model_dir: Path, sequences: list[TrainSequence], trained_whole: Callable[[ObjectiveConfig], Trained]
) -> None:
    spread = [
        dataclasses.replace(s, advantages=np.full(s.num_tokens, s.advantages, dtype=np.float32)) for s in sequences
    ]
    check_same(trained_whole(GATED), train(model_dir, spread))


def test_what_stands_at_masked_positions_is_inert(model_dir: Path, sequences: list[TrainSequence]) -> None:
    def disturbed(sequence: TrainSequence) -> TrainSequence:
        acts = sequence.action_mask
        return dataclasses.replace(
            sequence,
            behavior_logprobs=np.where(acts, sequence.behavior_logprobs, np.nan),
            staleness=np.where(acts, sequence.staleness, -7),
            turn_ids=np.where(acts, sequence.turn_ids, 99),
            advantages=np.where(acts, sequence.advantages, np.inf),
        )

    calm = [dataclasses.replace(s, advantages=np.full(s.num_tokens, s.advantages, dtype=np.float32)) for s in sequences]
    first, second = train(model_dir, calm), train(model_dir, [disturbed(s) for s in sequences])
    assert largest_difference(weights(first[0]), weights(second[0])) == 0
    assert first[1] == second[1]


def test_tokens_after_the_last_action_are_inert(
    model_dir: Path, sequences: list[TrainSequence], trained_whole: Callable[[ObjectiveConfig], Trained]
) -> None:
    def extended(sequence: TrainSequence) -> TrainSequence:
        def longer(values: Any, filler: Any) -> Any:
            return np.concatenate([values, np.full(5, filler, values.dtype)])

        return dataclasses.replace(
            sequence,
            token_ids=longer(sequence.token_ids, 3),
            action_mask=longer(sequence.action_mask, False),
            behavior_logprobs=longer(sequence.behavior_logprobs, 0),
            turn_ids=longer(sequence.turn_ids, 0),
            staleness=longer(sequence.staleness, 0),
        )

    first, second = trained_whole(GATED), train(model_dir, [extended(s) for s in sequences])
    assert largest_difference(weights(first[0]), weights(second[0])) == 0


def test_each_sequence_counts_alike_whatever_its_length(model_dir: Path) -> None:
    by_length = sorted((s for s in make_sequences() if s.num_actions and s.weight == 1), key=lambda s: s.num_actions)
    short, long = by_length[0], by_length[-1]
    assert long.num_actions > 5 * short.num_actions
    objective = ObjectiveConfig(minibatches=1, k3_gate=None, outlier_gate=None, off_policy_gate=None, correction="none")
    start = weights(make_learner(model_dir))

    def gradient(batch: list[TrainSequence]) -> dict[str, torch.Tensor]:
        learner, _ = train(model_dir, batch, objective=objective)
        # undo the division of a first AdamW update with eps 1: update = gradient / (|gradient| + 1)
        moved = {name: start[name] - value for name, value in weights(learner).items()}
        return {name: m / (1 - m.abs()) for name, m in moved.items()}

    together, alone_short, alone_long = gradient([short, long]), gradient([short]), gradient([long])
    expected = {name: (alone_short[name] + alone_long[name]) / 2 for name in together}
    assert largest_difference(together, expected) < TOLERANCE


def test_sequences_that_cannot_act_cost_no_forward_and_change_nothing(
    model_dir: Path, sequences: list[TrainSequence]
) -> None:
    idle = [dataclasses.replace(s, advantages=0.0) if i % 2 else s for i, s in enumerate(sequences)]
    almost_idle = [dataclasses.replace(s, advantages=1e-20) if i % 2 else s for i, s in enumerate(sequences)]
    first, second = train(model_dir, idle), train(model_dir, almost_idle)
    assert largest_difference(weights(first[0]), weights(second[0])) < TOLERANCE
    assert (first[1]["learner/num_idle_sequences"], second[1]["learner/num_idle_sequences"]) == (6, 0)
    assert first[1]["gspo/num_empty"] == second[1]["gspo/num_empty"] == 1
    assert first[1]["gspo/num_sequences"] == len(sequences) - 7
    assert second[1]["gspo/num_sequences"] == len(sequences) - 1
