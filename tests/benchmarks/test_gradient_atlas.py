"""The gradient atlas: its gradients are those of autograd, its angles are free of noise, its lies show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gradient_atlas import report
from benchmarks.gradient_atlas.estimators import ESTIMATORS, LIES, NARROWER, PLAIN, TRUTH, Estimator
from benchmarks.gradient_atlas.jackknife import Comparison, Estimate, of_own
from benchmarks.gradient_atlas.measure import Result, Setting, measure
from benchmarks.gradient_atlas.world import (
    NUM_CONTEXTS,
    NUM_SYMBOLS,
    Floats,
    World,
    gradient,
    train,
)

LENGTH = 12
AGE = 16


@pytest.fixture(scope="module")
def world() -> World:
    return World(0)


@pytest.fixture(scope="module")
def versions(world: World) -> list[Floats]:
    return train(world, LENGTH, AGE + 1, 0.06, np.random.default_rng(1))


@pytest.fixture(scope="module")
def stitched(world: World, versions: list[Floats]) -> Result:
    return measure(world, versions, Setting(LENGTH, AGE, AGE, "stitched"), 16, np.random.default_rng(2))


def test_names_are_unique_and_every_lie_is_told_about_an_estimator() -> None:
    names = [one.name for one in ESTIMATORS]
    assert len(set(names)) == len(names)
    assert set(LIES) < set(names)
    assert not Estimator("", {"correction": "product"}).can_take(1000)


def test_a_gradient_of_the_table_is_that_of_autograd(world: World, versions: list[Floats]) -> None:
    episodes = world.play(versions, np.arange(LENGTH), 2, np.random.default_rng(3))
    coefficients_BT = np.random.default_rng(4).normal(size=episodes.symbols_BT.shape)
    weights_NV = torch.tensor(versions[3], requires_grad=True)
    chosen_BT = torch.log_softmax(weights_NV, dim=-1)[episodes.contexts_BT, episodes.symbols_BT]
    (chosen_BT * torch.from_numpy(coefficients_BT)).sum().backward()  # type: ignore[no-untyped-call]
    assert weights_NV.grad is not None
    np.testing.assert_allclose(gradient(coefficients_BT, episodes, versions[3]), weights_NV.grad.numpy(), atol=1e-12)


def test_symbols_are_drawn_by_the_versions_that_are_said_to_have_drawn_them(world: World) -> None:
    always_0, always_5 = (np.full((NUM_CONTEXTS, NUM_SYMBOLS), -50.0) for _ in range(2))
    always_0[:, 0], always_5[:, 5] = 50.0, 50.0
    episodes = world.play([always_0, always_5], np.array([0, 1, 1, 0]), 3, np.random.default_rng(0))
    assert (episodes.symbols_BT == [0, 5, 5, 0]).all()
    assert (episodes.contexts_BT[:, 1:] % NUM_SYMBOLS == episodes.symbols_BT[:, :-1]).all()
    assert (episodes.contexts_BT[:, 2] == 5).all(), "the symbols 0 and 5"


@pytest.mark.slow
def test_an_estimate_on_fresh_data_has_the_direction_and_length_of_the_truth(
    world: World, versions: list[Floats]
) -> None:
    result = measure(world, versions, Setting(LENGTH, AGE, 0, "single"), 32, np.random.default_rng(5))
    line = next(one for one in result.lines if one.estimator == TRUTH.name)
    assert result.k3 == 0
    assert line.cosine is not None
    assert line.cosine.value == pytest.approx(1, abs=0.1)
    assert line.scale == pytest.approx(1, abs=0.25)


def test_noise_is_in_no_angle() -> None:
    rng = np.random.default_rng(6)
    truth, other = np.zeros(400), np.zeros(400)
    truth[0], other[:2] = 2.0, (1.0, 1.0)
    noisy = Comparison(other + rng.normal(size=(400, 400)), truth + rng.normal(size=(400, 400)))
    cosine = noisy.cosine().estimate()
    assert abs(cosine.value - np.sqrt(0.5)) < 2 * cosine.margin
    assert cosine.margin < 0.1
    assert noisy.scale() == pytest.approx(0.5, abs=0.1)
    noise = noisy.noise().estimate()
    assert noise.value == pytest.approx(400 / 4, rel=0.1)
    # A mean over 400 batches of a square that varies by sqrt(2 * 400) about 400, and the reference's length of 2.
    assert 0.2 < noise.margin < 20
    assert noisy.bias().estimate().value == pytest.approx(np.sqrt(2) / 2, abs=0.1)
    assert not (noisy.cosine() - noisy.cosine()).estimate().excludes_zero()


def test_intervals_of_noise_hold_the_truth_as_often_as_they_say() -> None:
    rng, dimensions, batches = np.random.default_rng(7), 60, 24
    mean = np.zeros(dimensions)
    mean[0] = 3.0
    inside = 0
    for _ in range(200):
        own, reference = mean + rng.normal(size=(2, batches, dimensions))
        inside += abs((noise := Comparison(own, reference).noise().estimate()).value - dimensions / 9) <= noise.margin
    assert 0.88 <= inside / 200 <= 0.99
    of_batches = of_own(2.0, [2.0, 2.1, 1.9]).estimate()
    assert of_batches.margin == pytest.approx(1.96 * np.sqrt(2 * 0.02 / 3))


def test_a_clip_is_wide_enough_that_loses_little_as_all_wider_ones(stitched: Result) -> None:
    def with_losses(*losses: float) -> Result:
        lines = {line.estimator: line for line in stitched.lines}
        for one, loss in zip(NARROWER, losses, strict=True):
            estimate = Estimate(-loss, 0.01)
            lines[one.name] = dataclasses.replace(lines[PLAIN.name], estimator=one.name, cosine_beside_truth=estimate)
        return dataclasses.replace(stitched, lines=list(lines.values()))

    assert report.enough(with_losses(1.4, 0.8, 0.2, 0.04, 0.0)) == 1e-2
    assert report.enough(with_losses(0.0, 0.8, 0.04, 0.04, 0.0)) == 3e-3, "a narrower one by chance"
    assert report.enough(with_losses(1.4, 0.8, 0.2, 0.1, 0.06)) is None


def test_an_estimator_of_one_gate_has_the_one_that_it_names() -> None:
    alone = {one.name: one.config for one in ESTIMATORS if one.name.endswith("gate alone")}
    gates = [(config.k3_gate, config.outlier_gate, config.off_policy_gate) for config in alone.values()]
    assert gates == [(0.05, None, None), (None, 5.0, None), (None, None, 0.5)]


def test_tokens_attributed_to_the_newest_version_point_elsewhere(stitched: Result) -> None:
    newest = next(line for line in stitched.lines if line.estimator == LIES[TRUTH.name][1].name)
    assert newest.cosine_beside_truth is not None
    assert newest.cosine_beside_truth.value < -newest.cosine_beside_truth.margin


def test_the_page_says_what_was_measured(stitched: Result, tmp_path: Path) -> None:
    page = report.write([stitched], 16, "Conditions.", tmp_path)
    assert "stitched, 16 steps" in page
    assert all(one.name in page for one in ESTIMATORS)
    assert (tmp_path / "gradient_atlas.png").stat().st_size > 10_000
    stored = report.read(tmp_path / "gradient_atlas.json")
    again = report.write(*stored, tmp_path)
    assert again.splitlines()[:20] == page.splitlines()[:20]
    assert report.read(tmp_path / "gradient_atlas.json") == stored
