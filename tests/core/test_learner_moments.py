"""Moments in eight bits or in the host's memory, AdamW in one kernel: what changes, by how much, and what does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from gspo_core.learner.eight_bits import Codes, narrowed, widened
from gspo_core.learner.moments import KeptAdamW
from gspo_core.learner.optimizer import apply_update, build_adamw, usual_grad_norm
from gspo_core.learner.state import InvalidState
from gspo_core.learner_config import LearnerOptions, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.plan import LearnerPlace, Setting, choose, plan_memory, read_shape, refusal, shape_of
from tests.core.learner_support import (
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)
from tests.core.test_plan import QWEN3_8B

GROWING = OptimizerConfig(lr=1e-3, max_grad_norm=None, max_grad_growth=1.0)
SMALL = GROWING.model_copy(update={"moments": "8bit"})
# Of what the weights have moved by, for six steps of two updates.
EIGHT_BIT_BOUND = 0.06
FUSED_BOUND = 1e-4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3") / "model")


def trained(model_dir: Path, optimizer: OptimizerConfig = GROWING, *, steps: int = 6, **options: Any) -> Any:
    learner = make_learner(model_dir, ObjectiveConfig(minibatches=2), optimizer=optimizer, **options)
    for step in range(steps):
        sequences = make_sequences(8, seed=step)
        with_behavior(learner, sequences)
        learner.step(sequences)
    return learner


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Any:
    return trained(model_dir)


def test_moments_in_the_hosts_memory_change_no_bit(model_dir: Path, plain: Any) -> None:
    """With a bound by the earlier gradients, which reads the second moments, and metrics that read the first."""
    offloaded = trained(model_dir, offload_moments=True)
    assert isinstance(offloaded._optimizer, KeptAdamW)
    assert largest_difference(weights(plain), weights(offloaded)) == 0


def test_a_step_is_taken_back_alike_with_moments_in_the_hosts_memory(model_dir: Path) -> None:
    held = OptimizerConfig(lr=1e-2, max_step_k3=1e-4)
    device, host = (trained(model_dir, held, steps=2, offload_moments=one) for one in (False, True))
    assert largest_difference(weights(device), weights(host)) == 0


def moved(model_dir: Path, plain: Any) -> float:
    return largest_difference(weights(make_learner(model_dir)), weights(plain))


def test_a_fused_update_differs_in_last_bits(model_dir: Path, plain: Any) -> None:
    fused = trained(model_dir, fused_optimizer=True)
    assert fused._optimizer.param_groups[0]["fused"]
    difference = largest_difference(weights(plain), weights(fused))
    assert 0 < difference < FUSED_BOUND * moved(model_dir, plain)


def test_moments_in_eight_bits_end_near_those_in_float32(model_dir: Path, plain: Any) -> None:
    small = trained(model_dir, SMALL)
    difference = largest_difference(weights(plain), weights(small)) / moved(model_dir, plain)
    assert 0 < difference < EIGHT_BIT_BOUND
    both = trained(model_dir, SMALL, offload_moments=True)
    assert largest_difference(weights(small), weights(both)) == 0


@pytest.mark.parametrize("options", [{}, {"offload_moments": True}, {"fused_optimizer": True}], ids=str)
@pytest.mark.parametrize("optimizer", [GROWING, SMALL], ids=["float32", "8bit"])
def test_a_state_goes_on_bit_for_bit(
    model_dir: Path, tmp_path: Path, optimizer: OptimizerConfig, options: dict[str, Any]
) -> None:
    learner = trained(model_dir, optimizer, steps=2, **options)
    learner.save_state(tmp_path / "state")
    resumed = make_learner(model_dir, ObjectiveConfig(minibatches=2), optimizer=optimizer, seed=5, **options)
    resumed.load_state(tmp_path / "state")
    sequences = make_sequences(8, seed=9)
    with_behavior(learner, sequences)
    learner.step(sequences)
    resumed._seed = learner._seed  # which deals the minibatches
    resumed.step(sequences)
    assert largest_difference(weights(learner), weights(resumed)) == 0


def test_a_state_with_moments_of_another_kind_is_refused(model_dir: Path, tmp_path: Path, plain: Any) -> None:
    plain.save_state(tmp_path / "state")
    with pytest.raises(InvalidState, match=r"optimizer\.moments: float32"):
        make_learner(model_dir, optimizer=SMALL).load_state(tmp_path / "state")
    trained(model_dir, SMALL, steps=1).save_state(tmp_path / "small")
    with pytest.raises(InvalidState, match=r"optimizer\.moments: 8bit"):
        make_learner(model_dir, optimizer=GROWING).load_state(tmp_path / "small")


def test_a_step_that_may_be_taken_back_needs_exact_moments() -> None:
    with pytest.raises(ValidationError, match="max_step_k3"):
        OptimizerConfig(moments="8bit", max_step_k3=0.01)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 700), (5, 4, 33), (2, 256), (0, 7), (4, 1)], ids=str)
def test_a_number_becomes_one_near_it(shape: tuple[int, ...], is_signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 3, shape, generator=generator)
    values = values if is_signed else values.abs()
    kept = narrowed(values, 3, is_signed=is_signed)
    found = widened(kept, is_signed=is_signed)
    assert kept.codes.dtype == torch.uint8
    assert found.shape == values.shape
    assert bool((found.sign() * values.sign() >= 0).all())
    scales = kept.scales.repeat_interleave(256, 1)[:, : values.flatten(1).shape[1]]
    away = (found.flatten(1).abs() / scales) ** 0.25 - (values.flatten(1).abs() / scales) ** 0.25
    assert bool((away.abs() <= 1.001 / (127 if is_signed else 255)).all()), "more than a code away"
    if not is_signed:
        assert bool((found[values > 0] > 0).all()), "AdamW divides by its root"


def test_rounding_does_not_hang_on_how_rows_are_shared() -> None:
    values = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    whole = narrowed(values, 7, is_signed=True)
    parts = [narrowed(values[rows], 7, is_signed=True) for rows in (slice(0, 4), slice(4, 6))]
    assert torch.equal(whole.codes, torch.cat([one.codes for one in parts]))
    assert torch.equal(whole.scales, torch.cat([one.scales for one in parts]))


def test_a_mean_that_moves_by_less_than_a_code_moves_all_the_same() -> None:
    """To the nearest code it would stay for ever where it was."""
    target = torch.full((1, 256), 0.25)
    target[0, 0] = 1.0  # the largest of the block, so that the scale stays
    mean = torch.ones(1, 256)
    kept = narrowed(mean, 0, is_signed=False)
    for step in range(1, 3001):
        mean = widened(kept, is_signed=False).mul_(0.999).add_(target, alpha=0.001)
        kept = narrowed(mean, step, is_signed=False)
    found = widened(Codes(*kept), is_signed=False)[0, 1:]
    expected = 0.25 + 0.75 * 0.999**3000
    assert bool(((found / expected - 1).abs() < 0.05).all())


def test_the_usual_gradient_is_read_from_kept_moments(model_dir: Path) -> None:
    exact, small = (build_adamw(a_matrix(), one) for one in (GROWING, SMALL))
    for optimizer in (exact, small):
        for value in (0.1, 0.3, 0.2):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.full_like(parameter, value)
            update = apply_update(optimizer, 1e-3, OptimizerConfig(max_grad_norm=None))
        assert update.alignment == pytest.approx(1.0, abs=1e-3)
    assert usual_grad_norm(small) == pytest.approx(usual_grad_norm(exact), rel=0.05)


def a_matrix() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(512, 300, bias=False)


WIDE: dict[str, Any] = {"hidden_size": 320, "intermediate_size": 700, "vocab_size": 4000}


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_the_plan_counts_what_an_update_holds(tmp_path: Path, moments: str, is_offloaded: bool, is_fused: bool) -> None:
    """By torch's own accountant. In float32 on the device it is held against whole ranks elsewhere (test_plan)."""
    shape = read_shape(write_model(tmp_path, **WIDE))
    shapes = [*shape.root().values(), *(one for n in range(shape.num_layers) for one in shape.layer(n).values())]
    parts = nn.ParameterList(nn.Parameter(torch.randn(one)) for one in shapes)
    for part in parts:
        part.grad = torch.randn_like(part)
    optimizer = build_adamw(parts, OptimizerConfig(moments=moments), is_fused=is_fused, on_host=is_offloaded)
    optimizer.step()
    setting = Setting(
        shape,
        device="cpu",
        is_half=False,
        has_small_moments=moments == "8bit",
        is_offloaded=is_offloaded,
        is_fused=is_fused,
    )
    planned = next(one for one in plan_memory(setting) if one.phase == "update")
    held = sum(v.nbytes for state in optimizer.state.values() for key, v in state.items() if key != "step")
    counted = {**planned.on_device, **planned.on_host}["moments"]
    assert counted == held
    tracker = MemTracker()
    tracker.track_external(parts, optimizer)
    with tracker:
        optimizer.step()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    # on a CPU what is offloaded is in the same memory
    total = planned.device_total + (held if is_offloaded else 0)
    assert total == pytest.approx(found["Total"], rel=0.06)


EIGHT_B = shape_of(QWEN3_8B)


def place(gib: float, **more: Any) -> LearnerPlace:
    return LearnerPlace(8, "cuda", int(gib * 2**30), **more)


def test_moments_are_offloaded_where_nothing_else_fits() -> None:
    asked = LearnerOptions(offload_moments="auto")
    roomy, tight = choose(EIGHT_B, asked, place(73)), choose(EIGHT_B, asked, place(22))
    assert (roomy.offload_moments, tight.offload_moments, tight.fits) == (False, True, True)
    without = choose(EIGHT_B, LearnerOptions(), place(22))
    assert not without.fits
    assert "learner.offload_moments to auto" in refusal(without, LearnerOptions(), place(22))
    assert tight.phases[1].on_host["moments"] == pytest.approx(8 * 8.19e9 / 8, rel=0.01)


def test_moments_in_eight_bits_take_a_quarter() -> None:
    exact, small = (
        plan_memory(Setting(EIGHT_B, num_ranks=8, has_small_moments=is_small))[1].on_device["moments"]
        for is_small in (False, True)
    )
    assert small == pytest.approx(exact * (1 + 4 / 256) / 4, rel=0.001)
    plenty = dataclasses.replace(place(73), has_small_moments=True)
    assert choose(EIGHT_B, LearnerOptions(), plenty).setting.has_small_moments
