"""The losses against their formulas, written down a second time with loops and gradients by hand.

The vectors are a sample of cases; here the cases are random: ragged rows, holes, rows without trained tokens, ratios
far inside and far outside of every bound, advantages per sequence and per token. Nothing is shared with the code under
test.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gspo_core.objective import ObjectiveConfig, loss_metrics, policy_loss

Floats = NDArray[np.float64]
TOLERANCES = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6)}


@dataclass(frozen=True)
class Case:
    new: Floats
    old: Floats
    behave: Floats
    reference: Floats
    mask: NDArray[np.bool_]
    advantages: Floats
    branch_weights: Floats


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 6)), int(rng.integers(1, 12))
    mask = rng.random((rows, columns)) < rng.uniform(0.2, 0.9)
    if seed % 3 == 0:
        mask[rng.integers(rows)] = False
    old = -rng.exponential(1.0, mask.shape)
    size = rng.choice([1e-4, 3e-3, 0.1, 1.0])
    new = old + rng.normal(0, size, mask.shape) + rng.normal(0, size, (rows, 1))
    behave = old - rng.normal(0, rng.choice([0.0, 0.05, 0.8]), mask.shape)
    advantages = rng.choice([-1.5, -0.2, 0.0, 0.4, 2.0], mask.shape if seed % 2 else (rows, 1))
    return Case(
        new=new,
        old=old,
        behave=behave,
        reference=old + rng.normal(0, 0.3, mask.shape),
        mask=mask,
        advantages=np.broadcast_to(advantages, mask.shape),
        branch_weights=rng.choice([1.0, 0.5, 0.25], rows),
    )


def runs_of(row: NDArray[np.bool_]) -> list[list[int]]:
    """Positions of each contiguous run of trained tokens."""
    runs: list[list[int]] = []
    for place in np.flatnonzero(row).tolist():
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def units_of(ratio: str, row: NDArray[np.bool_]) -> list[list[int]]:
    places = np.flatnonzero(row).tolist()
    if ratio == "token":
        return [[place] for place in places]
    return runs_of(row) if ratio == "turn" else [places] if places else []


def by_hand(config: ObjectiveConfig, case: Case) -> tuple[float, Floats, int]:
    """Loss, gradient and number of clipped tokens."""
    num_rows = len(case.mask)
    anchor = case.behave if config.anchor == "behavior" else case.old
    total, grad, num_clipped = 0.0, np.zeros(case.mask.shape), 0
    num_sequences = case.branch_weights.sum()
    num_tokens = sum(case.mask[i].sum() for i in range(num_rows))
    for i in range(num_rows):
        length = int(case.mask[i].sum())
        if not length:
            continue
        share = {
            "sequence": case.branch_weights[i] / (num_sequences * length),
            "sum": 1 / num_sequences,
            "token": 1 / num_tokens,
        }[config.aggregate]
        trained = np.flatnonzero(case.mask[i])
        advantages = case.advantages[i].astype(float).copy()
        if config.advantage_reduction == "mean":
            advantages[trained] = advantages[trained].mean()
        weights = weights_by_hand(config, (case.old - case.behave)[i], trained)
        for unit in units_of(config.ratio, case.mask[i]):
            log_ratio = float(np.mean([case.new[i, t] - anchor[i, t] for t in unit]))
            slopes = {}
            for t in unit:
                value, slope, clipped = term_by_hand(config, log_ratio, advantages[t], unit, (case.new - anchor)[i])
                total += share * weights[t] * value
                slopes[t] = share * weights[t] * slope
                num_clipped += clipped
            for t in unit:
                shared = sum(slopes.values()) / len(unit)
                grad[i, t] += shared if config.gradient == "shared" and config.ratio != "token" else slopes[t]
        if config.kl_coef:
            for t in trained:
                value, slope = kl_by_hand(config, case.reference[i, t] - case.new[i, t], case.new[i, t] - anchor[i, t])
                total += share * config.kl_coef * value
                grad[i, t] += share * config.kl_coef * slope
    return total, grad, num_clipped


def weights_by_hand(config: ObjectiveConfig, mismatch: Floats, trained: Any) -> dict[int, float]:
    if config.correction == "none":
        return dict.fromkeys(trained.tolist(), 1.0)
    level, action = config.correction.split("_")
    raw = {
        "token": {t: math.exp(mismatch[t]) for t in trained},
        "geometric": dict.fromkeys(trained, math.exp(mismatch[trained].mean())),
        "product": dict.fromkeys(trained, math.exp(mismatch[trained].sum())),
    }[level]
    low, high = config.correction_min or 0.0, config.correction_max
    if action == "truncate":
        return {int(t): min(max(w, low), high) for t, w in raw.items()}
    return {int(t): w if low <= w <= high else 0.0 for t, w in raw.items()}


def term_by_hand(
    config: ObjectiveConfig, log_ratio: float, advantage: float, unit: list[int], drift: Floats
) -> tuple[float, float, bool]:
    """-min(s A, clip(s) A), its derivative by the log ratio, and whether it is clipped."""
    clamp = math.inf if config.log_ratio_clamp is None else config.log_ratio_clamp
    ratio = math.exp(min(log_ratio, clamp))
    decision = math.exp(log_ratio)
    if config.anchor == "behavior" and config.compensate and config.ratio != "token":
        decision = math.exp(log_ratio + float(np.mean([math.expm1(drift[t]) - drift[t] for t in unit])))
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if advantage > 0 and decision > high:
        return -high * advantage, 0.0, True
    if advantage < 0 and decision < low:
        return -low * advantage, 0.0, True
    if config.dual_clip is not None and advantage < 0 and ratio > config.dual_clip:
        return -config.dual_clip * advantage, 0.0, False
    return -ratio * advantage, 0.0 if log_ratio > clamp else -ratio * advantage, False


def kl_by_hand(config: ObjectiveConfig, to_reference: float, delta: float) -> tuple[float, float]:
    """exp(x) - 1 - x with x = log reference - log policy, and its derivative by the policy's log-prob."""
    value, slope = math.expm1(to_reference) - to_reference, 1 - math.exp(to_reference)
    if not config.kl_unbiased:
        return value, slope
    clamp = math.inf if config.log_ratio_clamp is None else config.log_ratio_clamp
    ratio = math.exp(min(delta, clamp))
    return ratio * value, ratio * slope + (ratio * value if delta <= clamp else 0.0)


PLAIN: dict[str, Any] = {"k3_gate": None, "outlier_gate": None, "off_policy_gate": None}
RATIOS = ("sequence", "turn", "token")
AGGREGATES = ("sequence", "token", "sum")
VARIANTS: list[dict[str, Any]] = [
    {"correction": "none", "log_ratio_clamp": None},
    {"correction": "none", "clip": [0.25, 0.5], "advantage_reduction": "mean"},
    {"correction": "none", "clip": 0.9, "dual_clip": 1.2},
    {"correction": "none", "clip": 0.9, "log_ratio_clamp": 0.05},
    {"correction": "token"},
    {"correction": "token", "correction_min": 0.7, "correction_max": 1.3, "clip": 0.02},
    {"correction": "icepop", "correction_min": 0.7, "correction_max": 1.3},
    {"correction": "geometric", "correction_min": 0.98, "correction_max": 1.02},
    {"correction": "geometric_mask", "correction_min": 0.98, "correction_max": 1.02},
    {"correction": "product"},
    {"correction": "product_mask", "correction_min": 0.3},
    {"correction": "none", "kl_coef": 0.1},
    {"correction": "token", "kl_coef": 0.1, "kl_unbiased": True},
    {"anchor": "behavior", "compensate": False, "clip": 0.05},
    {"anchor": "behavior", "clip": 0.05},
]


def configs() -> list[ObjectiveConfig]:
    found = []
    for ratio, aggregate, gradient, keys in itertools.product(RATIOS, AGGREGATES, ("per_token", "shared"), VARIANTS):
        if ratio == "token" and (gradient == "shared" or "compensate" in keys):
            continue
        found.append(ObjectiveConfig(**PLAIN, **keys, ratio=ratio, aggregate=aggregate, gradient=gradient))
    return found


CONFIGS = configs()


def check(config: ObjectiveConfig, seed: int, dtype: torch.dtype) -> None:
    case = random_case(seed)
    if dtype == torch.float32 and near_a_bound(config, case):
        return
    expected, expected_grad, num_clipped = by_hand(config, case)
    policy = torch.tensor(case.new, dtype=dtype, requires_grad=True)
    loss, stats = policy_loss(
        config,
        policy,
        torch.tensor(case.mask),
        torch.tensor(case.advantages.copy(), dtype=dtype),
        torch.tensor(case.old, dtype=dtype),
        torch.tensor(case.behave, dtype=dtype),
        torch.tensor(case.reference, dtype=dtype) if config.kl_coef else None,
        sequence_weights_B=torch.tensor(case.branch_weights, dtype=dtype),
    )
    loss.backward()
    rtol, atol = TOLERANCES[dtype]
    assert loss.item() == pytest.approx(expected, rel=rtol, abs=atol)
    assert policy.grad is not None
    np.testing.assert_allclose(policy.grad.double().numpy(), expected_grad, rtol=rtol, atol=atol)
    if case.mask.any():
        clip_frac = loss_metrics(stats, config)["gspo/clip_frac"]
        assert clip_frac == pytest.approx(num_clipped / case.mask.sum(), abs=1e-12)


def near_a_bound(config: ObjectiveConfig, case: Case) -> bool:
    """Whether rounding to float32 could decide a clip, a clamp or a mask the other way."""
    nudges = (1 - 2e-5, 1 + 2e-5)
    moved = [
        config.model_copy(
            update={
                "clip_low": config.clip_low * nudge + (nudge - 1) * 0.1,
                "clip_high": config.clip_high * nudge + (nudge - 1) * 0.1,
                "correction_max": config.correction_max * nudge,
                "correction_min": config.correction_min and config.correction_min * nudge,
                "dual_clip": config.dual_clip and config.dual_clip * nudge,
                "log_ratio_clamp": config.log_ratio_clamp and config.log_ratio_clamp * nudge,
            }
        )
        for nudge in nudges
    ]
    first, second = (by_hand(one, case) for one in moved)
    jump = np.abs(first[1] - second[1]).max(initial=0.0)
    return first[2] != second[2] or jump > 1e-4 * (np.abs(first[1]).max(initial=0.0) + 1e-9)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float64", "float32"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_loss_gradient_and_clip_fraction_are_those_of_the_formulas(ratio: str, dtype: torch.dtype) -> None:
    for number, config in enumerate(CONFIGS):
        if config.ratio == ratio:
            for seed in range(3):
                check(config, 3 * number + seed, dtype)


@pytest.mark.parametrize(
    ("target", "keys"),
    [("loss.k3", {"kl_coef": 0.1, "correction": "none"}), ("losses.k3", {"anchor": "behavior", "clip": 0.05})],
)
def test_a_wrong_formula_is_noticed(monkeypatch: pytest.MonkeyPatch, target: str, keys: dict[str, Any]) -> None:
    """k2 where k3 belongs."""
    monkeypatch.setattr(f"gspo_core.objective.{target}", lambda log_ratio: log_ratio.square() / 2)
    config = ObjectiveConfig(**PLAIN, **keys)

    def check_some() -> None:
        for seed in range(40):
            check(config, seed, torch.float64)

    with pytest.raises(AssertionError):
        check_some()
