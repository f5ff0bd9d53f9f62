"""Monte Carlo: recorded log-probs make unbiased weights, wrong attribution biased ones; log s follows the drift law."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.drift_law import clip_law, measure, simulate
from gspo_core.objective import AlarmKind, LossStats, ObjectiveConfig, loss_alarms, loss_metrics, policy_loss
from gspo_core.objective import losses as losses_module
from tests.core.objective_support import OFF

Floats = NDArray[np.float64]
NUM_SYMBOLS = 16
NUM_VERSIONS = 5


@dataclass(frozen=True)
class Episodes:
    """Episodes of a bigram policy; version 4 is the target, episode position t was sampled by `versions[t]`."""

    tables: Floats
    """Log-probs by version, previous symbol and symbol."""
    tokens: NDArray[np.int64]
    versions: NDArray[np.int64]

    def logprobs(self, versions: Any) -> torch.Tensor:
        """Under the given version of each position."""
        before, now = self.tokens[:, :-1], self.tokens[:, 1:]
        return torch.from_numpy(self.tables[np.broadcast_to(versions, now.shape[1]), before, now])

    @property
    def counts(self) -> torch.Tensor:
        """How often symbol 0 was sampled."""
        return torch.from_numpy((self.tokens[:, 1:] == 0).sum(axis=1).astype(np.float64))

    @property
    def expected_count(self) -> float:
        """Of episodes that the target samples, exactly."""
        state = np.full(NUM_SYMBOLS, 1 / NUM_SYMBOLS)
        total = 0.0
        for _ in self.versions:
            state = state @ np.exp(self.tables[-1])
            total += state[0]
        return float(total)

    def divergence(self, version: int) -> float:
        """KL per token from a version to the target, averaged over the contexts of these episodes."""
        sampler, target = self.tables[version], self.tables[-1]
        per_context = (np.exp(sampler) * (sampler - target)).sum(axis=1)
        visited = np.bincount(self.tokens[:, :-1].ravel(), minlength=NUM_SYMBOLS)
        return float((visited * per_context).sum() / visited.sum())


@cache
def sample(schedule: tuple[int, ...], count: int, scale: float, seed: int = 0) -> Episodes:
    """Updates that move the logits by a constant direction."""
    rng = np.random.default_rng(seed)
    start = rng.normal(0, 1, (NUM_SYMBOLS, NUM_SYMBOLS))
    direction = rng.normal(0, scale, (NUM_SYMBOLS, NUM_SYMBOLS))
    logits = start + np.arange(NUM_VERSIONS)[:, None, None] * direction
    tables = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    cumulative = np.exp(tables).cumsum(axis=-1)
    tokens = np.zeros((count, len(schedule) + 1), dtype=np.int64)
    tokens[:, 0] = rng.integers(0, NUM_SYMBOLS, count)
    for position, version in enumerate(schedule):
        rows = cumulative[version][tokens[:, position]]
        drawn = (rng.random((count, 1)) > rows).sum(axis=1)
        tokens[:, position + 1] = np.minimum(drawn, NUM_SYMBOLS - 1)
    return Episodes(tables, tokens, np.array(schedule))


def stitched(length: int) -> tuple[int, ...]:
    """Four updates land during the episode: a quarter each of versions 0 to 3."""
    return tuple(np.repeat(np.arange(4), length // 4).tolist())


UNBOUNDED: dict[str, Any] = {**OFF, "correction": "product", "correction_max": 1e12}


def product_means(episodes: Episodes, behavior: torch.Tensor) -> tuple[float, float, float, float]:
    """Mean of the product weight and of weight times count, as the loss weighs them, and their standard errors."""
    config = ObjectiveConfig(**UNBOUNDED)
    policy = episodes.logprobs(4)
    mask = torch.ones(policy.shape, dtype=torch.bool)
    loss, stats = policy_loss(config, policy, mask, episodes.counts, None, behavior)
    weights = (policy - behavior).sum(-1).exp()
    root = math.sqrt(len(policy))
    mean = loss_metrics(stats, config)["gspo/weight_mean"]
    return mean, float(weights.std()) / root, -float(loss), float((weights * episodes.counts).std()) / root


def test_recorded_logprobs_make_unbiased_weights() -> None:
    episodes = sample(stitched(64), 12_000, 0.03)
    weight, weight_error, value, value_error = product_means(episodes, episodes.logprobs(episodes.versions))
    assert weight == pytest.approx(1, abs=4 * weight_error)
    assert value == pytest.approx(episodes.expected_count, abs=4 * value_error)
    assert weight_error < 0.02


@pytest.mark.parametrize("version", [0, 3], ids=["oldest", "newest"])
def test_attributing_an_episode_to_one_version_is_biased(version: int) -> None:
    """The test above would fail: both means are far off."""
    episodes = sample(stitched(64), 12_000, 0.03)
    weight, weight_error, value, value_error = product_means(episodes, episodes.logprobs(version))
    assert abs(weight - 1) > 6 * weight_error
    assert abs(value - episodes.expected_count) > 6 * value_error


def test_wrong_attribution_raises_the_alarm() -> None:
    episodes = sample(stitched(64), 12_000, 0.03)
    assert AlarmKind.WEIGHT_DRIFT not in _alarms(episodes, episodes.logprobs(episodes.versions))
    for version in (0, 3):
        assert AlarmKind.WEIGHT_DRIFT in _alarms(episodes, episodes.logprobs(version))


def _alarms(episodes: Episodes, behavior: torch.Tensor) -> set[AlarmKind]:
    config = ObjectiveConfig()
    policy = episodes.logprobs(4)
    advantages = episodes.counts - episodes.counts.mean()
    _, stats = policy_loss(config, policy, torch.ones(policy.shape), advantages, None, behavior)
    return {alarm.kind for alarm in loss_alarms(stats, config, 1)}


# The drift law


def drift(episodes: Episodes) -> tuple[LossStats, ObjectiveConfig]:
    config = ObjectiveConfig(anchor="behavior", **OFF)
    policy = episodes.logprobs(4)
    given = (policy, torch.ones(policy.shape), episodes.counts, None, episodes.logprobs(episodes.versions))
    return policy_loss(config, *given)[1], config


def follows_the_drift_law(schedule: tuple[int, ...], factor: float = 1.0) -> None:
    """log s has mean -K and standard deviation sqrt(2 K / n), K being the mean divergence of its parts."""
    episodes = sample(schedule, 4_000, 0.02, seed=1)
    stats, config = drift(episodes)
    metrics = loss_metrics(stats, config)
    shares = np.bincount(episodes.versions, minlength=NUM_VERSIONS) / len(schedule)
    divergence = factor * sum(share * episodes.divergence(version) for version, share in enumerate(shares))
    deviation = math.sqrt(2 * divergence / len(schedule))
    assert metrics["gspo/log_ratio_mean"] == pytest.approx(-divergence, abs=4 * deviation / math.sqrt(4_000))
    assert metrics["gspo/log_ratio_std"] == pytest.approx(deviation, rel=0.06)
    # k3 has the same mean with less noise, and log s + k3 has mean 0
    assert metrics["gspo/k3_policy_behavior"] == pytest.approx(divergence, rel=0.03)
    compensated = metrics["gspo/log_ratio_mean"] + metrics["gspo/k3_policy_behavior"]
    assert compensated == pytest.approx(0, abs=4 * deviation / math.sqrt(4_000))


@pytest.mark.parametrize("schedule", [(0,) * 256, stitched(256)], ids=["all_stale", "stitched"])
def test_drift_law(schedule: tuple[int, ...]) -> None:
    follows_the_drift_law(schedule)


def test_another_law_is_noticed() -> None:
    with pytest.raises(AssertionError):
        follows_the_drift_law(stitched(256), factor=0.8)


def test_uniform_staleness_drifts_a_third_of_complete_staleness() -> None:
    """Linear drift: K grows with the square of the staleness, so the mean over 0..D is a third of K(D)."""
    stale = sample((0,) * 256, 4_000, 0.02, seed=1)
    parts = [stale.divergence(version) for version in range(NUM_VERSIONS)]
    assert parts[1] == pytest.approx(parts[0] * (3 / 4) ** 2, rel=0.1)
    assert parts[4] == 0


# The clip fractions that follow from it, as the benchmark measures them


@pytest.fixture(scope="module")
def iid() -> tuple[Floats, Floats, float]:
    return simulate(1e-3, 262_144, np.random.default_rng(7))


def clip_follows_the_law(tokens: tuple[Floats, Floats, float]) -> None:
    row = measure("behavior", *tokens, length=512)
    low, high = row.law_negative, row.law_positive
    assert low is not None
    assert high is not None
    error = 4 * math.sqrt(0.25 / row.num_sequences)
    assert row.clipped_negative == pytest.approx(low, abs=error)
    assert row.clipped_positive == pytest.approx(high, abs=error)
    assert row.clipped_negative - row.clipped_positive > 0.25


def test_a_clip_on_the_sampler_follows_the_law(iid: tuple[Floats, Floats, float]) -> None:
    clip_follows_the_law(iid)


def test_the_law_notices_an_inverted_ratio(iid: tuple[Floats, Floats, float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        inverted = property(lambda context: context.inputs.behavior_BT - context.inputs.policy_BT)
        patch.setattr(losses_module.LossContext, "delta_BT", inverted)
        with pytest.raises(AssertionError):
            clip_follows_the_law(iid)


def test_compensation_equalises_the_signs(iid: tuple[Floats, Floats, float]) -> None:
    plain = measure("behavior", *iid, length=512)
    compensated = measure("compensated", *iid, length=512)
    assert abs(compensated.clipped_negative - compensated.clipped_positive) < 0.1
    assert plain.clipped_negative - plain.clipped_positive > 0.25


def test_the_default_does_not_see_drift(iid: tuple[Floats, Floats, float]) -> None:
    row = measure("proximal", *iid, length=512)
    assert row.clipped_negative == row.clipped_positive == 0


@pytest.mark.parametrize(
    ("kl", "length", "negative", "positive"),
    [(1e-5, 128, 0.231, 0.149), (1e-4, 8192, 0.100, 0.001), (1e-3, 8192, 0.920, 0.002), (1e-2, 1024, 0.986, 0.009)],
)
def test_worked_values_of_the_law(kl: float, length: int, negative: float, positive: float) -> None:
    assert clip_law(kl, length, 3e-4, 4e-4) == pytest.approx((negative, positive), abs=5e-3)
