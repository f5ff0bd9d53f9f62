"""Gradients that estimators make of old episodes, beside the true one at the same weights.

The weights are those of the last of a step's four updates, so clips have something to judge: three quarters of the way
from the proximal version to the next. The truth is the expected update of fresh episodes of these weights.

Rule: every estimator is given the same episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from benchmarks.gradient_atlas.estimators import BESIDE, ESTIMATORS, PLAIN, Attribution, Estimator
from benchmarks.gradient_atlas.jackknife import Comparison, Estimate, of_own
from benchmarks.gradient_atlas.world import Episodes, Floats, Ints, World, gradient, log_probs, true_gradient
from gspo_core.objective import LossStats, loss_metrics, policy_loss

Kind = Literal["single", "stitched"]
UPDATE = 0.75
GROUPS = 16
"""Of a batch."""
TURNS = 4
"""Of an episode, equally long; of interest to ratios of turns only."""
# Gradients of less have no length that stands out of their noise, and angles wider than that say nothing.
MIN_KEPT, MAX_MARGIN = 0.05, 0.5


@dataclass(frozen=True)
class Setting:
    length: int
    point: int
    """The version that is trained."""
    age: int
    """Of the oldest token, in versions."""
    kind: Kind
    """Drawn by one version, or by all from the oldest to the newest, one after the other."""

    def versions_T(self) -> Ints:
        """Counted from the oldest."""
        if self.kind == "single":
            return np.zeros(self.length, np.int64)
        return np.round(np.linspace(0, self.age, self.length)).astype(np.int64)


@dataclass(frozen=True)
class Line:
    """One estimator in one setting."""

    estimator: str
    cosine: Estimate | None
    """Between its expected update and the true one; None where too little was left to tell."""
    bias: Estimate
    """Length of the difference of the two, as a share of the true one."""
    scale: float
    """Its expected update along the true one, as a multiple of it."""
    noise: Estimate
    """Variance of one batch's update, as a multiple of the true one's squared length."""
    kept: float
    clipped: float
    ess: Estimate
    """Effective sample size of the token weights, as a share."""
    cosine_beside_truth: Estimate | None = None
    """Its cosine less that of what it is compared with (``BESIDE``), on the same episodes."""


@dataclass(frozen=True)
class Result:
    setting: Setting
    k3: float
    """Between sampler and proximal policy, a token."""
    spread: float
    """Standard deviation of a sequence's log ratio at this update, `gspo/log_ratio_std`."""
    lines: list[Line]


class Batch:
    """Old episodes with their log-probs under all that estimators ask for."""

    def __init__(self, episodes: Episodes, versions: Sequence[Floats], policy_NV: Floats) -> None:
        self._episodes, self._policy_NV = episodes, policy_NV
        where = episodes.contexts_BT, episodes.symbols_BT
        tables = np.stack([log_probs(one) for one in versions])
        newest = int(episodes.versions_BT.max())
        self._behavior: Mapping[Attribution, Floats] = {
            "recorded": tables[(episodes.versions_BT, *where)],
            "oldest": tables[0][where],
            "newest": tables[newest][where],
        }
        self._proximal_BT = tables[-1][where]
        self._policy_BT = log_probs(policy_NV)[where]
        self._staleness_BT = len(versions) - 1 - episodes.versions_BT
        length = episodes.symbols_BT.shape[1]
        self._turns_T = np.arange(length) * TURNS // length

    @property
    def k3(self) -> float:
        difference_BT = self._proximal_BT - self._behavior["recorded"]
        return float((np.expm1(difference_BT) - difference_BT).mean())

    def gradient(self, estimator: Estimator) -> tuple[Floats, LossStats]:
        policy_BT = torch.tensor(self._policy_BT, requires_grad=True)
        loss, stats = policy_loss(
            estimator.config,
            policy_BT,
            np.ones(self._policy_BT.shape, np.bool_),
            self._episodes.advantages_B,
            proximal_logprobs_BT=self._proximal_BT,
            behavior_logprobs_BT=self._behavior[estimator.attribution],
            turn_ids_BT=np.broadcast_to(self._turns_T, self._policy_BT.shape),
            staleness_BT=self._staleness_BT,
        )
        (coefficients_BT,) = torch.autograd.grad(loss, policy_BT)
        return gradient(coefficients_BT.numpy(), self._episodes, self._policy_NV).ravel(), stats


def measure(
    world: World, versions: Sequence[Floats], setting: Setting, num_batches: int, rng: np.random.Generator
) -> Result:
    proximal, following = versions[setting.point], versions[setting.point + 1]
    policy_NV = proximal + UPDATE * (following - proximal)
    used = versions[setting.point - setting.age : setting.point + 1]
    estimators = [one for one in ESTIMATORS if one.can_take(setting.length)]
    found: dict[str, list[Floats]] = {one.name: [] for one in estimators}
    stats: dict[str, list[LossStats]] = {one.name: [] for one in estimators}
    reference, k3 = [], 0.0
    for _ in range(num_batches):
        fresh = world.play([policy_NV], np.zeros(setting.length, np.int64), 2 * GROUPS, rng)
        reference.append(true_gradient(fresh, policy_NV).ravel())
        batch = Batch(world.play(used, setting.versions_T(), GROUPS, rng), used, policy_NV)
        k3 += batch.k3 / num_batches
        for one in estimators:
            own, some = batch.gradient(one)
            found[one.name].append(own)
            stats[one.name].append(some)
    compared = {name: Comparison(np.stack(rows), np.stack(reference)) for name, rows in found.items()}
    spread = loss_metrics(_total(stats[PLAIN.name]), PLAIN.config)["gspo/log_ratio_std"]
    return Result(setting, k3, spread, [_line(one, compared, stats[one.name]) for one in estimators])


def _total(stats: Sequence[LossStats]) -> LossStats:
    return sum(stats, LossStats.zero())


def _line(estimator: Estimator, compared: Mapping[str, Comparison], stats: Sequence[LossStats]) -> Line:
    own = compared[estimator.name]
    total = _total(stats)
    metrics = loss_metrics(total, estimator.config)
    truth = BESIDE.get(estimator.name)
    beside = None if truth is None else (own.cosine() - compared[truth].cosine()).estimate()
    kept = metrics.get("gspo/kept_frac_tokens", 1.0)
    cosine = own.cosine().estimate()
    return Line(
        estimator=estimator.name,
        cosine=cosine if kept >= MIN_KEPT and cosine.margin <= MAX_MARGIN else None,
        bias=own.bias().estimate(),
        scale=own.scale(),
        noise=own.noise().estimate(),
        kept=kept,
        clipped=metrics["gspo/clip_frac"],
        ess=of_own(_ess(total, estimator), [_ess(_less(total, one), estimator) for one in stats]).estimate(),
        cosine_beside_truth=beside,
    )


def _less(total: LossStats, one: LossStats) -> LossStats:
    """Sums without those of one batch; the maxima stay, and are not read."""
    return LossStats(total.sums - one.sums, total.maxima)


def _ess(stats: LossStats, estimator: Estimator) -> float:
    return loss_metrics(stats, estimator.config)["gspo/ess_token"]
