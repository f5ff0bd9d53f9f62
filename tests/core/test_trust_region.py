"""A step that moves the policy too far is taken back in part; one that does not is as if nothing had looked."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner
from gspo_core.learner.trust_region import MAX_CORRECTIONS, StepLength, StepStart, hold_step, mean_k3
from gspo_core.learner_config import OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import (
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)


class Way:
    """A way along which k3 grows with a power of the distance."""

    def __init__(self, k3: float, power: float) -> None:
        self.k3, self.power, self.place = k3, power, 1.0

    def measure(self) -> float:
        return self.k3 * self.place**self.power

    def keep(self, share: float) -> None:
        self.place *= share

    def hold(self, bound: float) -> StepLength:
        return hold_step(bound, self.measure, self.keep)


def test_a_step_within_the_bound_is_left_alone() -> None:
    way = Way(0.01, 2.0)
    assert way.hold(0.01) == StepLength(0.01, 1.0)
    assert way.place == 1.0


@pytest.mark.parametrize("power", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("k3", [0.011, 0.02, 0.5, 40.0])
def test_a_far_step_ends_within_the_bound_and_not_far_from_it(k3: float, power: float) -> None:
    way = Way(k3, power)
    length = way.hold(0.01)
    assert (length.k3, length.kept) == (k3, pytest.approx(way.place))
    assert 0.001 < way.measure() <= 0.01


@pytest.mark.parametrize("never", [math.inf, math.nan])
def test_what_never_comes_within_the_bound_is_taken_back_wholly(never: float) -> None:
    kept: list[float] = []
    length = hold_step(0.01, lambda: never, kept.append)
    assert length.kept == 0
    assert len(kept) == MAX_CORRECTIONS + 1
    assert kept[-1] == 0


def test_k3_is_the_mean_over_sampled_tokens() -> None:
    before = [np.array([0.0, -1.0, -2.0], np.float32), np.array([0.0, -0.5], np.float32)]
    after = [np.array([0.0, -1.5, -2.0], np.float32), np.array([0.0, -0.25], np.float32)]
    expected = (math.exp(-0.5) - 1 + 0.5 + math.exp(0.25) - 1 - 0.25) / 3
    assert mean_k3(before, after, 3) == pytest.approx(expected)
    assert mean_k3([], [], 0) == 0


def test_weights_and_first_moments_go_back_and_second_moments_stay() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0)

    def update() -> None:
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    def found(name: str) -> list[torch.Tensor]:
        return [optimizer.state[parameter][name].clone() for parameter in layer.parameters()]

    def placed() -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in layer.parameters()]

    first = StepStart(optimizer)
    unmoved = placed()
    update()
    first.keep(0.0)
    assert all(torch.equal(one, other) for one, other in zip(unmoved, placed(), strict=True))
    assert all(not moment.any() for moment in found("exp_avg")), "before the first update there were no moments"

    update()
    start, weights_then, moments_then = StepStart(optimizer), placed(), found("exp_avg")
    update()
    weights_now, moments_now, squares_now = placed(), found("exp_avg"), found("exp_avg_sq")
    start.keep(0.5)
    start.keep(0.5)
    for then, now, kept in (
        *zip(weights_then, weights_now, placed(), strict=True),
        *zip(moments_then, moments_now, found("exp_avg"), strict=True),
    ):
        torch.testing.assert_close(kept, then + 0.25 * (now - then))
    assert all(torch.equal(one, other) for one, other in zip(squares_now, found("exp_avg_sq"), strict=True))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3") / "model")


def learner_and_batch(model_dir: Path, **optimizer: Any) -> tuple[Learner, list[TrainSequence]]:
    config = OptimizerConfig(lr=1e-3, max_grad_norm=None, **optimizer)
    learner = make_learner(model_dir, ObjectiveConfig(minibatches=3, clip=0.05), optimizer=config)
    sequences = make_sequences()
    with_behavior(learner, sequences)
    return learner, sequences


def moved(learner: Learner, sequences: list[TrainSequence], before: list[Any]) -> float:
    after = learner.logprobs(sequences, sampled_only=True)
    return mean_k3(before, after, sum(sequence.num_actions for sequence in sequences))


def test_a_step_of_the_learner_ends_within_its_bound(model_dir: Path) -> None:
    learner, sequences = learner_and_batch(model_dir, max_step_k3=1e-3)
    for _ in range(2):
        before = learner.logprobs(sequences, sampled_only=True)
        metrics = learner.step(sequences)
        assert metrics["learner/step_k3"] > 1e-2
        assert 0 < metrics["learner/step_kept"] < 0.5
        assert 1e-4 < moved(learner, sequences, before) <= 1e-3


def test_a_bound_that_is_not_reached_changes_nothing(model_dir: Path) -> None:
    bounded, sequences = learner_and_batch(model_dir, max_step_k3=10.0)
    free, _ = learner_and_batch(model_dir)
    for _ in range(2):
        assert bounded.step(sequences)["learner/step_kept"] == 1
        assert "learner/step_k3" not in free.step(sequences)
    assert largest_difference(weights(bounded), weights(free)) == 0


@pytest.mark.parametrize("bound", [{"max_step_k3": 1e-3}, {"max_grad_growth": 1.0}], ids=str)
def test_a_run_that_is_interrupted_goes_on_bit_for_bit(
    bound: dict[str, float], model_dir: Path, tmp_path: Path
) -> None:
    whole, sequences = learner_and_batch(model_dir, **bound)
    whole.step(sequences)
    whole.save_state(tmp_path / "state")
    resumed, _ = learner_and_batch(model_dir, **bound)
    resumed.load_state(tmp_path / "state")
    assert resumed.step(sequences) == whole.step(sequences)
    assert largest_difference(weights(resumed), weights(whole)) == 0


def test_sequences_that_teach_nothing_count_in_how_far_a_step_went(model_dir: Path) -> None:
    """A policy is damaged where it was good, and what is good teaches nothing."""
    learner, sequences = learner_and_batch(model_dir, max_step_k3=10.0)
    one_acts = [dataclasses.replace(sequence, advantages=float(index == 0)) for index, sequence in enumerate(sequences)]
    before = learner.logprobs(one_acts, sampled_only=True)
    metrics = learner.step(one_acts)
    assert metrics["learner/step_k3"] == pytest.approx(moved(learner, one_acts, before))
    assert metrics["learner/num_idle_sequences"] == len([s for s in sequences if s.num_actions]) - 1


def test_the_rate_follows_the_effective_sample_size(model_dir: Path) -> None:
    scaled, sequences = learner_and_batch(model_dir, ess_scaling=True)
    sequences[4] = dataclasses.replace(sequences[4], advantages=0.0)  # teaches nothing, so it does not count
    metrics = scaled.step(sequences)
    products = [
        float((logprobs - sequence.behavior_logprobs)[sequence.action_mask].astype(np.float64).sum())
        for sequence, logprobs in zip(sequences, learner_and_batch(model_dir)[0].logprobs(sequences), strict=True)
        if sequence.num_actions and sequence is not sequences[4]
    ]
    ratios = np.exp(products)
    share = ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)
    assert 0.1 < share < 0.99
    assert metrics["learner/rate_share"] == pytest.approx(math.sqrt(share), rel=1e-4)
    assert metrics["learner/lr"] == pytest.approx(1e-3 * math.sqrt(share), rel=1e-4)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_the_rate_follows_the_share_of_the_sequences_that_teach(model_dir: Path, kl_coef: float) -> None:
    """By their weights; what has no tokens to train is in no share, and a term that pulls at all teaches nothing."""
    config = OptimizerConfig(lr=1e-3, signal_scaling=True)
    learner = make_learner(model_dir, ObjectiveConfig(minibatches=3, kl_coef=kl_coef), optimizer=config)
    sequences = make_sequences()
    with_behavior(learner, sequences)
    assert learner.step(sequences)["learner/rate_share"] == 1
    teaching = {0, 2, 5}
    for index, sequence in enumerate(sequences):
        if index not in teaching:
            sequences[index] = dataclasses.replace(sequence, advantages=0.0)
    metrics = learner.step(sequences)
    share = sum(sequences[index].weight for index in teaching) / sum(s.weight for s in sequences if s.num_actions)
    assert metrics["learner/rate_share"] == pytest.approx(share)
    assert metrics["learner/lr"] == pytest.approx(1e-3 * share)


def test_a_batch_that_teaches_nothing_leaves_the_policy_where_it_is(model_dir: Path) -> None:
    """Without the share, AdamW's running mean would move it on."""
    kept, moved_on = (learner_and_batch(model_dir, signal_scaling=scales)[0] for scales in (True, False))
    sequences = learner_and_batch(model_dir)[1]
    idle = [dataclasses.replace(sequence, advantages=0.0) for sequence in sequences]
    for learner, is_kept in ((kept, True), (moved_on, False)):
        learner.step(sequences)
        before = weights(learner)
        assert learner.step(idle)["learner/lr"] == (0 if is_kept else 1e-3)
        assert (largest_difference(before, weights(learner)) == 0) == is_kept


def test_both_scales_of_the_rate_are_multiplied(model_dir: Path) -> None:
    sequences = learner_and_batch(model_dir)[1]
    sequences[4] = dataclasses.replace(sequences[4], advantages=0.0)
    settings = ({"ess_scaling": True}, {"signal_scaling": True}, {"ess_scaling": True, "signal_scaling": True})
    learners = (learner_and_batch(model_dir, **one)[0] for one in settings)
    size, signal, both = (learner.step(sequences)["learner/rate_share"] for learner in learners)
    assert both == pytest.approx(size * signal)
    assert max(size, signal) < 1


def test_gates_that_do_not_starve_a_step_say_where_they_are(model_dir: Path) -> None:
    learner, sequences = learner_and_batch(model_dir)
    starving = ObjectiveConfig(minibatches=3, clip=0.05, k3_gate=1e-6)
    learner.retune(learner.config, starving)
    assert learner.step(sequences)["gspo/kept_frac"] == 0
    learner.retune(learner.config, starving.model_copy(update={"min_kept_frac": 0.5}))
    metrics = learner.step(sequences)
    assert metrics["gspo/k3_gate"] > 1e-4
    assert 0.5 <= metrics["gspo/kept_frac"] < 0.7
