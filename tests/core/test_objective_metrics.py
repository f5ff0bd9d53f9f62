"""Statistics, metrics and alarms of the objective against numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gspo_core.advantage import batch_advantages
from gspo_core.objective import (
    AdvantageConfig,
    Alarm,
    AlarmKind,
    AlarmPatience,
    LossStats,
    ObjectiveConfig,
    group_alarms,
    loss_alarms,
    loss_denominators,
    loss_metrics,
    policy_loss,
)
from gspo_core.objective import alarms as alarms_module
from gspo_core.objective.stats import BUCKETS
from tests.core.objective_support import OFF, random_example, run


def stats_of(
    *,
    log_ratios: list[float],
    advantages: list[float],
    mismatch: list[float] | None = None,
    staleness: list[int] | None = None,
    num_tokens: int = 4,
    **keys: Any,
) -> tuple[LossStats, ObjectiveConfig]:
    """Rows whose tokens all have one log ratio, one advantage, one mismatch and one staleness."""
    rows = len(log_ratios)
    ones = torch.ones(rows, num_tokens, dtype=torch.float64)

    def column(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).unsqueeze(-1) * ones

    proximal = -2 * ones
    config = ObjectiveConfig(**keys)
    _, stats = policy_loss(
        config,
        proximal + column(log_ratios),
        ones,
        torch.tensor(advantages, dtype=torch.float64),
        proximal,
        proximal - column(mismatch or [0.0] * rows),
        staleness_BT=None if staleness is None else column(staleness).long(),
    )
    return stats, config


def test_fractions_by_sign_and_staleness() -> None:
    stats, config = stats_of(
        log_ratios=[1e-3, 1e-3, -1e-3, -1e-3, 0.0, 1e-3],
        advantages=[1.0, -1.0, 1.0, -1.0, 1.0, 0.0],
        staleness=[0, 1, 2, 4, 7, 30],
    )
    metrics = loss_metrics(stats, config)
    # clipped: the high positive and the low negative
    assert metrics["gspo/clip_frac"] == pytest.approx(2 / 6)
    assert metrics["gspo/clip_frac_positive"] == pytest.approx(1 / 3)
    assert metrics["gspo/clip_frac_negative"] == pytest.approx(1 / 2)
    assert metrics["gspo/clip_frac_sequence"] == pytest.approx(2 / 6)
    clipped = {
        bucket: metrics[f"gspo/clip_frac/staleness_{bucket}"] for bucket in ("0", "1", "2", "3_4", "5_8", "17_up")
    }
    assert clipped == {"0": 1, "1": 0, "2": 0, "3_4": 1, "5_8": 0, "17_up": 0}
    assert "gspo/clip_frac/staleness_9_16" not in metrics
    assert metrics["gspo/num_tokens/staleness_3_4"] == 4
    assert metrics["gspo/num_sequences/staleness_17_up"] == 1
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (pytest.approx(44 / 6), 30)
    assert metrics["gspo/log_ratio_mean"] == pytest.approx(1e-3 / 6)
    assert metrics["gspo/log_ratio_std"] == pytest.approx(float(np.std([1e-3, 1e-3, -1e-3, -1e-3, 0, 1e-3])))
    assert metrics["gspo/ratio_max"] == pytest.approx(math.exp(1e-3))
    assert metrics["gspo/ratio_min"] == pytest.approx(math.exp(-1e-3))
    assert metrics["gspo/log_ratio_max/staleness_0"] == pytest.approx(1e-3)


def test_divergences_have_the_direction_of_the_sampler() -> None:
    stats, config = stats_of(log_ratios=[0.01, 0.01], advantages=[1.0, 1.0], mismatch=[0.2, -0.1], staleness=[0, 3])
    metrics = loss_metrics(stats, config)

    def k3(x: float) -> float:
        return math.exp(x) - 1 - x

    assert metrics["gspo/k1_proximal_behavior"] == pytest.approx((-0.2 + 0.1) / 2)
    assert metrics["gspo/k3_proximal_behavior"] == pytest.approx((k3(0.2) + k3(-0.1)) / 2)
    assert metrics["gspo/k3_policy_behavior"] == pytest.approx((k3(0.21) + k3(-0.09)) / 2)
    assert metrics["gspo/k1_policy_proximal"] == pytest.approx(-0.01)
    assert metrics["gspo/k3_policy_proximal"] == pytest.approx(k3(0.01))
    assert metrics["gspo/k3_mismatch"] == pytest.approx(k3(0.2))
    assert metrics["gspo/k3_proximal_behavior/staleness_3_4"] == pytest.approx(k3(-0.1))


def test_k3_is_the_divergence_under_the_sampler() -> None:
    """On a small table, the mean of k3 under the sampler is its KL divergence to the policy, exactly."""
    rng = np.random.default_rng(3)
    sampler, policy = (rng.dirichlet(np.ones(6)) for _ in range(2))

    def mean_k3(log_ratios: Any) -> float:
        mean = 0.0
        for probability, log_ratio in zip(sampler, log_ratios, strict=True):
            stats, _ = stats_of(log_ratios=[0.0], advantages=[1.0], mismatch=[log_ratio], num_tokens=1)
            mean += probability * stats.total("k3_proximal_behavior")
        return mean

    kl = float((sampler * np.log(sampler / policy)).sum())
    assert mean_k3(np.log(policy / sampler)) == pytest.approx(kl, rel=1e-12)
    assert mean_k3(np.log(sampler / policy)) != pytest.approx(kl, rel=1e-3)


def test_weights_and_their_sample_size() -> None:
    stats, config = stats_of(log_ratios=[0.0] * 3, advantages=[1.0] * 3, mismatch=[math.log(3), 0.0, math.log(0.5)])
    metrics = loss_metrics(stats, config)
    weights = np.array([2.0, 1.0, 0.5])
    assert metrics["gspo/weight_mean"] == pytest.approx(weights.mean())
    assert metrics["gspo/weight_truncated_frac"] == pytest.approx(1 / 3)
    assert metrics["gspo/weight_raw_mean"] == pytest.approx(4.5 / 3)
    assert metrics["gspo/weight_raw_stderr"] == pytest.approx(np.std([3, 1, 0.5]) / math.sqrt(12))
    assert metrics["gspo/ess_token"] == pytest.approx(weights.sum() ** 2 / (3 * (weights**2).sum()))
    assert metrics["gspo/ess_sequence"] == pytest.approx(metrics["gspo/ess_token"])


def test_kept_fractions_name_their_gate() -> None:
    stats, config = stats_of(
        log_ratios=[0.0] * 5,
        advantages=[1.0, 1.0, -1.0, 1.0, 1.0],
        mismatch=[0.0, 1.5, -0.7, 0.2, 0.0],
        staleness=[0, 0, 0, 0, 9],
        k3_gate=1.0,
        outlier_gate=1.0,
        geometric_gate=1.1,
        staleness_cap=8,
        correction="icepop",
        correction_min=0.5,
        correction_max=1.1,
    )
    metrics = loss_metrics(stats, config)
    names = [name for name in metrics if "kept_frac_" in name and "/staleness_" not in name]
    kept = {name.removeprefix("gspo/kept_frac_"): metrics[name] for name in names}
    assert kept == {
        "k3": 0.8,  # exp(1.5) - 2.5 = 1.98
        "outlier": 0.8,
        "geometric": pytest.approx(2 / 5),
        "off_policy": pytest.approx(4 / 5),
        "staleness": pytest.approx(4 / 5),
        "correction": pytest.approx(2 / 5),
        "tokens": pytest.approx(1 / 5),
    }
    assert metrics["gspo/kept_frac"] == pytest.approx(1 / 5)


def test_losses_are_means_over_updates() -> None:
    example = random_example(1)
    config = ObjectiveConfig(kl_coef=0.1, **{**OFF, "correction": "token"})
    results = [run(config, random_example(seed), num_sequences=5) for seed in range(3)]
    total = sum((result.stats for result in results), LossStats.zero())
    metrics = loss_metrics(total, config, num_updates=3)
    assert metrics["gspo/loss"] == pytest.approx(np.mean([result.loss for result in results]))
    assert metrics["gspo/loss"] == pytest.approx(metrics["gspo/loss_policy"] + metrics["gspo/loss_kl"])
    delta = (example.reference - example.policy)[example.mask]
    alone = loss_metrics(run(config, example).stats, config)
    assert alone["gspo/kl_reference"] == pytest.approx(float((delta.exp() - 1 - delta).mean()))


def test_counts_and_clamp() -> None:
    config = ObjectiveConfig(**OFF)
    logprobs = torch.tensor([[-0.5, -0.5], [-0.5, -0.5], [0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    proximal = logprobs - torch.tensor([[12.0], [1.0], [0.0]])
    loss, stats = policy_loss(config, logprobs.requires_grad_(), mask, torch.tensor([-1.0, -1.0, 1.0]), proximal)
    loss.backward()
    metrics = loss_metrics(stats, config)
    assert (metrics["gspo/num_sequences"], metrics["gspo/num_tokens"], metrics["gspo/num_empty"]) == (2, 3, 1)
    assert metrics["gspo/log_ratio_clamped"] == 1
    assert metrics["gspo/ratio_max"] == pytest.approx(math.exp(10))
    assert metrics["gspo/log_ratio_abs_max"] == pytest.approx(12)
    assert float(loss.detach()) == pytest.approx((math.exp(10) + math.e) / 3)
    assert logprobs.grad is not None
    assert not logprobs.grad[0].any()  # above the clamp
    assert logprobs.grad[1, 0] == pytest.approx(math.e / 3)


def test_no_rows_and_no_tokens() -> None:
    config = ObjectiveConfig()
    for shape in ((0, 4), (0, 0), (3, 0)):
        logprobs = torch.zeros(shape, requires_grad=True)
        loss, stats = policy_loss(config, logprobs, torch.zeros(shape), torch.zeros(shape[0]), num_sequences=8)
        loss.backward()
        assert float(loss.detach()) == 0
        assert loss_metrics(stats, config)["gspo/num_tokens"] == 0
    assert loss_metrics(LossStats.zero(), config) == {
        "gspo/loss": 0,
        "gspo/loss_policy": 0,
        "gspo/num_sequences": 0,
        "gspo/num_tokens": 0,
        "gspo/num_empty": 0,
        "gspo/log_ratio_clamped": 0,
    }
    assert loss_alarms(LossStats.zero(), config) == []


def test_denominators() -> None:
    masks = [torch.tensor([1, 1, 0]), torch.tensor([0, 0]), np.array([True, True, True, True])]
    assert loss_denominators(masks) == (3.0, 6.0)
    assert loss_denominators(masks, [1.0, 0.5, 0.25]) == (1.75, 6.0)
    assert loss_denominators(masks, [1.0, 1.0, 0.0]) == (2.0, 2.0)
    with pytest.raises(ValueError, match="shorter"):
        loss_denominators(masks, [1.0])


@pytest.mark.parametrize("aggregate", ["sequence", "token", "sum"])
def test_branches_of_an_episode_count_as_one(aggregate: str) -> None:
    """An episode cut into branches weighs as much as one that was not, token by token."""
    config = ObjectiveConfig(**OFF, aggregate=aggregate)
    advantages = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    logprobs = torch.full((3, 6), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    weights = torch.tensor([4 / 6, 2 / 6, 1.0], dtype=torch.float64)
    num_sequences, num_tokens = loss_denominators(mask, weights.tolist())
    given = {"num_sequences": num_sequences, "num_tokens": num_tokens}
    for denominators in ({}, given):
        logprobs.grad = None
        loss, _ = policy_loss(config, logprobs, mask, advantages, sequence_weights_B=weights, **denominators)
        loss.backward()
        assert logprobs.grad is not None
        of_six, of_three = {"sequence": (1 / 12, 1 / 6), "token": (1 / 9, 1 / 9), "sum": (1 / 2, 1 / 2)}[aggregate]
        expected = torch.tensor([[-of_six] * 4 + [0] * 2, [-of_six] * 2 + [0] * 4, [of_three] * 3 + [0] * 3])
        torch.testing.assert_close(logprobs.grad, expected.double())


# Alarms


def kinds(stats: LossStats, config: ObjectiveConfig, num_updates: int = 4) -> set[AlarmKind]:
    return {alarm.kind for alarm in loss_alarms(stats, config, num_updates)}


SIGNS = [1.0, -1.0] * 20


def test_a_healthy_step_raises_nothing() -> None:
    rng = np.random.default_rng(0)
    stats, config = stats_of(log_ratios=list(rng.normal(0, 2e-4, 40)), advantages=SIGNS, staleness=[0] * 40)
    assert kinds(stats, config) == set()


def test_inert_clip() -> None:
    stats, config = stats_of(log_ratios=[0.0] * 40, advantages=SIGNS)
    assert kinds(stats, config) == {AlarmKind.INERT_CLIP}
    assert kinds(stats, config, num_updates=1) == set()
    moved, _ = stats_of(log_ratios=[0.0] * 39 + [1e-6], advantages=SIGNS)
    assert kinds(moved, config) == set()


def test_over_clip_and_one_sided_clip() -> None:
    both, config = stats_of(log_ratios=[1e-3, -1e-3] * 20, advantages=SIGNS)
    assert kinds(both, config) == {AlarmKind.OVER_CLIP}
    one, _ = stats_of(log_ratios=[-1e-3, -1e-3] * 20, advantages=SIGNS)
    assert kinds(one, config) == {AlarmKind.OVER_CLIP, AlarmKind.ONE_SIDED_CLIP}
    few, _ = stats_of(log_ratios=[-1e-3, -1e-3] * 4, advantages=SIGNS[:8])
    assert kinds(few, config) == {AlarmKind.OVER_CLIP}


def test_mismatch_floor_is_about_fresh_tokens() -> None:
    drift = [0.17, -0.17] * 20  # k3 about 0.0145
    small = [1e-4, -1e-4] * 20
    for staleness, expected in ((0, {AlarmKind.MISMATCH_FLOOR}), (3, set())):
        stats, config = stats_of(log_ratios=small, advantages=SIGNS, mismatch=drift, staleness=[staleness] * 40)
        assert kinds(stats, config) == expected
    tight = [0.02, -0.02] * 20  # k3 0.0002: fine for a gate of 0.05, too much for a clip of 3e-4 on the sampler
    stats, config = stats_of(log_ratios=small, advantages=SIGNS, mismatch=tight, staleness=[0] * 40, anchor="behavior")
    assert AlarmKind.MISMATCH_FLOOR in kinds(stats, config)
    stats, config = stats_of(log_ratios=small, advantages=SIGNS, mismatch=tight, staleness=[0] * 40)
    assert kinds(stats, config) == set()


def test_correction_collapse_weight_drift_and_gate_pressure() -> None:
    small = [1e-4, -1e-4] * 20
    truncated, config = stats_of(log_ratios=small, advantages=SIGNS, mismatch=[0.8, -0.9, -0.4, -0.3] * 10, k3_gate=9)
    assert AlarmKind.CORRECTION_COLLAPSE in kinds(truncated, config)
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 0.1, 40) - 0.005
    for shift, expected in ((0.0, set()), (0.1, {AlarmKind.WEIGHT_DRIFT})):
        stats, config = stats_of(log_ratios=small, advantages=SIGNS, mismatch=list(noise + shift), num_tokens=100)
        assert kinds(stats, config) == expected
    gated, config = stats_of(log_ratios=small, advantages=SIGNS, mismatch=[0.5, -0.5, 0.0, 0.0] * 10)
    assert AlarmKind.GATE_PRESSURE in kinds(gated, config)
    alarm = next(alarm for alarm in loss_alarms(gated, config, 4) if alarm.kind == AlarmKind.GATE_PRESSURE)
    assert (alarm.metric, alarm.value, alarm.bound) == ("gspo/kept_frac_k3", 0.5, 0.8)
    assert str(alarm).startswith("gate_pressure: gspo/kept_frac_k3 is 0.5, bound 0.8")


def test_far_step_is_a_step_that_puts_its_own_data_beyond_the_gate() -> None:
    near, config = stats_of(log_ratios=[0.3, -0.3] * 20, advantages=SIGNS, clip=[0.9, 0.9])  # k3 0.045
    assert kinds(near, config) == set()
    far, _ = stats_of(log_ratios=[0.35, -0.35] * 20, advantages=SIGNS, clip=[0.9, 0.9])  # k3 0.061
    assert kinds(far, config) == {AlarmKind.FAR_STEP}
    wider, config = stats_of(log_ratios=[0.35, -0.35] * 20, advantages=SIGNS, clip=[0.9, 0.9], k3_gate=0.1)
    assert kinds(wider, config) == set()


def test_no_signal_is_about_groups_that_nothing_can_be_learned_from() -> None:
    def alarms(*rewards: list[float]) -> list[Alarm]:
        ids = [group for group, members in enumerate(rewards) for _ in members]
        return group_alarms(
            batch_advantages([r for members in rewards for r in members], ids, AdvantageConfig()).metrics()
        )

    (alarm,) = alarms([0.0, 0.0], [1.0, 1.0], [0.5, 0.5])
    assert (alarm.kind, alarm.value) == (AlarmKind.NO_SIGNAL, 0.0)
    assert alarms([0.0, 0.0], [1.0, 1.0], [0.5, 0.6]) == []


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        ("gspo/clip_frac", AlarmKind.OVER_CLIP),
        ("gspo/clip_frac_negative", AlarmKind.ONE_SIDED_CLIP),
        ("gspo/k3_mismatch", AlarmKind.MISMATCH_FLOOR),
        ("gspo/k3_policy_proximal", AlarmKind.FAR_STEP),
        ("gspo/ess_token", AlarmKind.CORRECTION_COLLAPSE),
        ("gspo/weight_truncated_frac", AlarmKind.CORRECTION_COLLAPSE),
        ("gspo/weight_raw_mean", AlarmKind.WEIGHT_DRIFT),
        ("gspo/kept_frac_k3", AlarmKind.GATE_PRESSURE),
    ],
)
def test_a_metric_that_is_no_number_raises_its_alarm(
    monkeypatch: pytest.MonkeyPatch, metric: str, kind: AlarmKind
) -> None:
    rng = np.random.default_rng(0)
    small = list(rng.normal(0, 2e-4, 40))
    stats, config = stats_of(log_ratios=small, advantages=SIGNS, staleness=[0] * 40, num_tokens=100)
    assert kinds(stats, config) == set()
    right = alarms_module.loss_metrics
    monkeypatch.setattr(alarms_module, "loss_metrics", lambda *given: right(*given) | {metric: float("nan")})
    assert kinds(stats, config) == {kind}


def test_patience() -> None:
    over = Alarm(AlarmKind.OVER_CLIP, "gspo/clip_frac", 0.3, 0.25, "")
    mismatch = Alarm(AlarmKind.MISMATCH_FLOOR, "gspo/k3_mismatch", 0.5, 0.2, "")
    patience = AlarmPatience()
    assert patience.ripe([over, mismatch]) == [mismatch]
    assert patience.ripe([over]) == []
    assert patience.ripe([over]) == [over]
    assert patience.ripe([]) == []
    assert patience.ripe([over]) == []


def test_an_alarm_that_lasts_is_repeated_but_rarely() -> None:
    over = Alarm(AlarmKind.OVER_CLIP, "gspo/clip_frac", 0.3, 0.25, "")
    patience = AlarmPatience()
    assert [step for step in range(1, 31) if patience.ripe([over])] == [3, 13, 23]


def test_buckets_have_names() -> None:
    stats, config = stats_of(log_ratios=[0.0] * 20, advantages=[1.0] * 20, staleness=list(range(20)))
    sizes = [int(stats.bucket("sequences", bucket)) for bucket in BUCKETS]
    assert sizes == [1, 1, 1, 2, 4, 8, 3]
    metrics = loss_metrics(stats, config)
    assert sum(metrics[f"gspo/num_sequences/staleness_{bucket}"] for bucket in BUCKETS) == 20
