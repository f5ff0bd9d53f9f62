"""Schedules, clipping, weight decay and skipped updates."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from gspo_core.learner import Learner
from gspo_core.learner.optimizer import apply_update, build_adamw, learning_rate, usual_grad_norm
from gspo_core.learner_config import LearnerConfig, OptimizerConfig
from gspo_core.objective import AlarmKind
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import (
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)


def rates(num_steps: int, **config: Any) -> list[float]:
    return [learning_rate(OptimizerConfig(lr=2.0, **config), step, total_steps=10) for step in range(num_steps)]


def test_constant_after_a_warm_up() -> None:
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_to_its_end_and_stays() -> None:
    assert rates(6, schedule="linear", decay_steps=4) == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert rates(6, schedule="linear", decay_steps=4, min_lr_ratio=0.5) == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]


def test_cosine_is_half_way_in_the_middle_and_ends_with_the_job() -> None:
    cosine = rates(12, schedule="cosine", warmup_steps=2)
    assert cosine[:3] == [1.0, 2.0, 2.0]
    assert cosine[6] == pytest.approx(1.0)
    assert cosine[4] == pytest.approx(1 + math.cos(math.pi / 4))
    assert cosine[10:] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"schedule": "linear", "warmup_steps": 5, "decay_steps": 5}, "above warmup_steps"),
        ({"schedule": "constant", "min_lr_ratio": 0.1}, "linear and cosine"),
        ({"schedule": "exponential"}, "schedule"),
        ({"lr": -1e-6}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"momentum": 0.9}, "momentum"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_settings_that_cannot_act_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        OptimizerConfig(**config)


def test_a_schedule_must_have_an_end() -> None:
    falling = OptimizerConfig(schedule="cosine", warmup_steps=5)
    with pytest.raises(ValidationError, match=r"needs optimizer\.decay_steps or total_steps"):
        LearnerConfig(optimizer=falling)
    with pytest.raises(ValidationError, match="within the warm-up"):
        LearnerConfig(optimizer=falling, total_steps=5)
    LearnerConfig(optimizer=falling, total_steps=6)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))


def bounded(max_grad_norm: float | None) -> OptimizerConfig:
    return OptimizerConfig(max_grad_norm=max_grad_norm)


def set_gradients(model: nn.Module, value: float) -> float:
    """The same gradient everywhere; its norm."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return abs(value) * math.sqrt(sum(p.numel() for p in model.parameters()))


def test_a_long_gradient_is_scaled_down_to_the_bound() -> None:
    clipped, scaled = small_model(), small_model()
    config = OptimizerConfig(lr=1.0, eps=1.0)
    norm = set_gradients(clipped, 3.0)
    assert apply_update(build_adamw(clipped, config), 1.0, bounded(0.5)).grad_norm == pytest.approx(norm)
    set_gradients(scaled, 3.0 * 0.5 / norm)
    apply_update(build_adamw(scaled, config), 1.0, bounded(None))
    for first, second in zip(clipped.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(first, second)


def test_the_usual_norm_is_the_root_mean_square_of_the_applied_gradients() -> None:
    model, beta = small_model(), 0.9
    optimizer = build_adamw(model, OptimizerConfig(lr=0.1, betas=(0.5, beta)))
    assert usual_grad_norm(optimizer) == 0
    mean_square, share = 0.0, 0.0
    for value in (0.01, 3.0, 0.2, 0.7):
        norm = set_gradients(model, value)
        applied = min(norm, 5.0)
        apply_update(optimizer, 0.1, bounded(5.0))
        mean_square, share = beta * mean_square + (1 - beta) * applied**2, beta * share + (1 - beta)
        assert usual_grad_norm(optimizer) == pytest.approx(math.sqrt(mean_square / share), rel=1e-5)


def test_the_usual_norm_does_not_hang_on_the_order_of_the_states() -> None:
    """Loaded states come in another order than made ones, and a resumed run must bound to the last bit alike."""
    model = torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(20)))
    optimizer = build_adamw(model, OptimizerConfig(lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.ndim))
    apply_update(optimizer, 0.1, bounded(None))
    norm, states = usual_grad_norm(optimizer), dict(optimizer.state)
    for seed in range(20):
        order = list(states)
        random.Random(seed).shuffle(order)
        optimizer.state.clear()
        optimizer.state.update({parameter: states[parameter] for parameter in order})
        assert usual_grad_norm(optimizer) == norm


def test_a_growth_of_0_bounds_nothing() -> None:
    model, config = torch.nn.Linear(3, 2), OptimizerConfig(lr=0.1, max_grad_norm=None, max_grad_growth=0)
    optimizer = build_adamw(model, config)
    for length in (1.0, 100.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, length)
        assert not apply_update(optimizer, 0.1, config).was_bounded


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_alignment_is_the_cosine_with_the_running_mean_of_earlier_gradients(beta: float) -> None:
    """By hand, in double precision; without memory that is the update before."""
    model, rng = torch.nn.Linear(3, 2).double(), torch.Generator().manual_seed(0)
    config = OptimizerConfig(lr=0.1, betas=(beta, 0.99), max_grad_norm=0.5)
    optimizer = build_adamw(model, config)
    mean: torch.Tensor | None = None
    for _ in range(4):
        gradients = [torch.randn(one.shape, generator=rng, dtype=torch.float64) for one in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        whole = torch.cat([gradient.flatten() for gradient in gradients])
        found = apply_update(optimizer, 0.1, config).alignment
        if mean is None:
            assert found is None, "there is nothing before the first"
            mean = torch.zeros_like(whole)
        else:
            assert found == pytest.approx(float(torch.nn.functional.cosine_similarity(whole, mean, dim=0)), abs=1e-9)
        applied = whole * min(1.0, 0.5 / float(whole.norm()))
        mean = beta * mean + (1 - beta) * applied


def test_a_gradient_that_is_no_number_has_no_alignment() -> None:
    model, config = torch.nn.Linear(3, 2), OptimizerConfig(lr=0.1)
    optimizer = build_adamw(model, config)
    for value in (1.0, math.nan):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        update = apply_update(optimizer, 0.1, config)
    assert (update.applied, update.alignment) == (False, None)


def test_a_gradient_is_bounded_by_the_usual_ones() -> None:
    grown, scaled = small_model(), small_model()
    config = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None, max_grad_growth=2.0)
    updates, optimizers = [], [build_adamw(model, config) for model in (grown, scaled)]
    for value, other in ((0.1, 0.1), (0.15, 0.15), (5.0, 2.0 * math.sqrt((0.999 * 0.01 + 0.0225) / 1.999))):
        set_gradients(grown, value)
        updates.append(apply_update(optimizers[0], 1.0, config))
        set_gradients(scaled, other)
        apply_update(optimizers[1], 1.0, bounded(None))
    assert [update.was_bounded for update in updates] == [False, False, True]
    for first, second in zip(grown.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(first, second)


def test_only_matrices_decay() -> None:
    model = small_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    apply_update(build_adamw(model, OptimizerConfig(weight_decay=0.5)), 1.0, bounded(None))  # no gradient but the decay
    for name, parameter in model.named_parameters():
        expected = before[name] * 0.5 if parameter.ndim == 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = small_model()
    optimizer = build_adamw(model, OptimizerConfig(lr=0.1))
    set_gradients(model, 1.0)
    apply_update(optimizer, 0.1, bounded(1.0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    set_gradients(model, 1.0)
    next(model.parameters()).grad[0, 0] = bad
    assert not apply_update(optimizer, 0.1, bounded(1.0)).applied
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3") / "model")


def poison_gradients(learner: Learner) -> None:
    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")

    next(learner._policy.parameters()).register_hook(poison)


def test_a_step_skips_and_counts_updates_without_a_finite_gradient(model_dir: Path) -> None:
    learner = make_learner(model_dir, ObjectiveConfig(minibatches=2))
    sequences = make_sequences()
    with_behavior(learner, sequences)
    before = weights(learner)
    poison_gradients(learner)
    metrics = learner.step(sequences)
    assert metrics["learner/num_skipped_updates"] == 2
    assert metrics["learner/num_updates"] == 0
    assert (learner.counters.num_skipped_updates, learner.counters.num_updates) == (2, 0)
    assert largest_difference(before, weights(learner)) == 0


def _inert(learner: Learner) -> bool:
    return AlarmKind.INERT_CLIP in [alarm.kind for alarm in learner.alarms]


def test_a_clip_is_called_inert_only_where_the_weights_had_moved(model_dir: Path) -> None:
    sequences = make_sequences()
    with_behavior(make_learner(model_dir), sequences)
    still, moving = (
        make_learner(model_dir, ObjectiveConfig(), optimizer=OptimizerConfig(lr=lr)) for lr in (0.0, 1e-14)
    )
    still.step(sequences)
    assert not _inert(still), "a control with a learning rate of 0"
    moving.step(sequences)
    assert _inert(moving), "weights moved and no ratio saw it"
    one_acts = [dataclasses.replace(s, advantages=float(i == 0)) for i, s in enumerate(sequences)]
    moving.step(one_acts)
    assert not _inert(moving), "nothing was trained after the weights had moved"


def test_updates_that_are_skipped_report_the_rate_of_their_step_and_no_inert_clip(model_dir: Path) -> None:
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=10)
    learner = make_learner(model_dir, ObjectiveConfig(minibatches=2), optimizer=optimizer)
    sequences = make_sequences()
    with_behavior(learner, sequences)
    poison_gradients(learner)
    assert learner.step(sequences)["learner/lr"] == pytest.approx(0.1)
    assert not _inert(learner)


def test_a_batch_that_teaches_nothing_is_a_step_of_gradient_zero(model_dir: Path) -> None:
    learner = make_learner(model_dir)
    idle = [dataclasses.replace(s, advantages=0.0) for s in make_sequences()]
    before = weights(learner)
    metrics = learner.step(idle)
    assert metrics["learner/grad_norm"] == 0
    assert largest_difference(before, weights(learner)) == 0
    assert learner.counters.num_steps == 1


def test_a_learning_rate_of_zero_changes_nothing(model_dir: Path) -> None:
    learner = make_learner(model_dir, optimizer=OptimizerConfig(lr=0, weight_decay=0.1))
    sequences = make_sequences()
    with_behavior(learner, sequences)
    before = weights(learner)
    assert learner.step(sequences)["learner/grad_norm"] > 0
    assert largest_difference(before, weights(learner)) == 0


def test_all_updates_of_a_step_share_one_learning_rate(model_dir: Path) -> None:
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=4)
    learner = make_learner(model_dir, ObjectiveConfig(minibatches=3), optimizer=optimizer)
    sequences = make_sequences()
    with_behavior(learner, sequences)
    assert [learner.step(sequences)["learner/lr"] for _ in range(3)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4])
