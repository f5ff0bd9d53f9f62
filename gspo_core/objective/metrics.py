"""Turns the statistics of a step into readable metrics.

One rule: divide once, at the end. A metric without data is omitted, not 0; every share lies in [0, 1].
`docs/objective.md` lists the names. It judges nothing (`gspo_core.objective.alarms` does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from gspo_core.objective.stats import BUCKETS, LossStats
from gspo_core.objective_config import ObjectiveConfig

# metric: (numerators to add, denominator)
Ratios = Mapping[str, tuple[tuple[str, ...], str]]

BUCKETED: Ratios = {
    "clip_frac": (("clipped_positive", "clipped_negative"), "tokens"),
    "clip_frac_positive": (("clipped_positive",), "tokens_positive"),
    "clip_frac_negative": (("clipped_negative",), "tokens_negative"),
    "clip_frac_sequence": (("sequences_clipped",), "sequences"),
    "clip_frac_sequence_positive": (("sequences_clipped_positive",), "sequences_positive"),
    "clip_frac_sequence_negative": (("sequences_clipped_negative",), "sequences_negative"),
    "k1_policy_behavior": (("k1_policy_behavior",), "tokens"),
    "k3_policy_behavior": (("k3_policy_behavior",), "tokens"),
    "k1_policy_proximal": (("k1_policy_proximal",), "tokens"),
    "k3_policy_proximal": (("k3_policy_proximal",), "tokens"),
    "k1_proximal_behavior": (("k1_proximal_behavior",), "tokens"),
    "k3_proximal_behavior": (("k3_proximal_behavior",), "tokens"),
    "log_ratio_mean": (("log_ratio",), "sequences"),
    "weight_mean": (("weight",), "tokens"),
    "weight_truncated_frac": (("weight_bounded",), "tokens"),
    "kept_frac": (("kept_sequences",), "sequences"),
    "kept_frac_tokens": (("kept_tokens",), "tokens"),
    "kept_frac_k3": (("kept_k3",), "sequences"),
    "kept_frac_outlier": (("kept_outlier",), "sequences"),
    "kept_frac_geometric": (("kept_geometric",), "sequences"),
    "kept_frac_off_policy": (("kept_off_policy",), "tokens"),
    "kept_frac_staleness": (("kept_staleness",), "tokens"),
    "kept_frac_correction": (("kept_correction",), "tokens"),
    "kept_frac_m2": (("kept_m2",), "tokens"),
}
OVERALL: Ratios = {
    "ratio_mean": (("ratio",), "units"),
    "dual_clip_frac": (("capped",), "tokens"),
    "weight_raw_mean": (("weight_raw",), "tokens"),
}
# Metrics of disabled gates and options are omitted.
_NEEDS: Mapping[str, Callable[[ObjectiveConfig], bool]] = {
    "kept_frac_k3": lambda config: config.k3_gate is not None,
    "kept_frac_outlier": lambda config: config.outlier_gate is not None,
    "kept_frac_geometric": lambda config: config.geometric_gate is not None,
    "kept_frac_off_policy": lambda config: config.off_policy_gate is not None,
    "kept_frac_staleness": lambda config: config.staleness_cap is not None,
    "kept_frac_correction": lambda config: config.correction.endswith("_mask"),
    "kept_frac_m2": lambda config: config.m2_bound is not None,
    "dual_clip_frac": lambda config: config.dual_clip is not None,
}


def loss_metrics(stats: LossStats, config: ObjectiveConfig, num_updates: int = 1) -> dict[str, float]:
    """The metrics of a step; `stats` sums its `num_updates` updates, micro-batches and ranks."""
    if num_updates < 1:
        raise ValueError(f"num_updates counts the updates in these statistics, at least 1, not {num_updates}")
    stats = stats.cpu()
    metrics = _losses(stats, config, num_updates)
    wanted = _wanted(BUCKETED, config)
    metrics |= _ratios(stats.total, wanted) | _ratios(stats.total, _wanted(OVERALL, config))
    metrics |= _spread(stats, None) | _counts(stats) | _kl_counts(stats, config) | _extremes(stats, config)
    if stats.bucket("tokens", "0"):
        metrics["gspo/k3_mismatch"] = stats.bucket("k3_proximal_behavior", "0") / stats.bucket("tokens", "0")
    if stats.total("with_reference"):
        metrics["gspo/kl_reference"] = stats.total("kl_reference") / stats.total("with_reference")
    if stats.total("with_staleness"):
        metrics["staleness/mean"] = stats.total("staleness") / stats.total("with_staleness")
        metrics["staleness/max"] = stats.maximum("staleness_max")
        metrics |= _buckets(stats, wanted)
    return metrics


def _wanted(ratios: Ratios, config: ObjectiveConfig) -> Ratios:
    return {name: parts for name, parts in ratios.items() if name not in _NEEDS or _NEEDS[name](config)}


def _losses(stats: LossStats, config: ObjectiveConfig, num_updates: int) -> dict[str, float]:
    policy, kl = stats.total("loss_policy") / num_updates, stats.total("loss_kl") / num_updates
    losses = {"gspo/loss": policy + kl, "gspo/loss_policy": policy}
    return losses | ({"gspo/loss_kl": kl} if config.kl_coef else {})


def _ratios(total: Callable[[str], float], ratios: Ratios, suffix: str = "") -> dict[str, float]:
    found = {}
    for name, (numerators, denominator) in ratios.items():
        divisor = total(denominator)
        if divisor:
            found[f"gspo/{name}{suffix}"] = sum(total(numerator) for numerator in numerators) / divisor
    return found


def _buckets(stats: LossStats, wanted: Ratios) -> dict[str, float]:
    found: dict[str, float] = {}
    for bucket in BUCKETS:
        if not stats.bucket("tokens", bucket):
            continue
        suffix = f"/staleness_{bucket}"
        found |= _ratios(partial(stats.bucket, bucket=bucket), wanted, suffix)
        found |= _spread(stats, bucket)
        found[f"gspo/num_tokens{suffix}"] = stats.bucket("tokens", bucket)
        found[f"gspo/num_sequences{suffix}"] = stats.bucket("sequences", bucket)
    return found


def _spread(stats: LossStats, bucket: str | None) -> dict[str, float]:
    """Spread of log s and effective sample sizes."""

    def total(name: str) -> float:
        return stats.total(name) if bucket is None else stats.bucket(name, bucket)

    suffix = "" if bucket is None else f"/staleness_{bucket}"
    found = {}
    sequences, tokens = total("sequences"), total("tokens")
    if sequences:
        found[f"gspo/log_ratio_std{suffix}"] = _std(total("log_ratio"), total("log_ratio_squared"), sequences)
        found[f"gspo/log_ratio_max{suffix}"] = stats.maximum("log_ratio_max", bucket)
        found[f"gspo/log_ratio_min{suffix}"] = -stats.maximum("log_ratio_negative_min", bucket)
    if total("weight_squared"):
        found[f"gspo/ess_token{suffix}"] = total("weight") ** 2 / (tokens * total("weight_squared"))
    if bucket is None and total("sequence_weight_squared"):
        squares = total("sequence_weight_squared")
        found["gspo/ess_sequence"] = total("sequence_weight") ** 2 / (sequences * squares)
    if bucket is None and tokens > 1:
        spread = _std(total("weight_raw"), total("weight_raw_squared"), tokens)
        found["gspo/weight_raw_stderr"] = spread / math.sqrt(tokens)
    return {name: min(value, 1.0) if "/ess_" in name else value for name, value in found.items()}


def _std(total: float, squares: float, count: float) -> float:
    return math.sqrt(max(squares / count - (total / count) ** 2, 0.0))


def _counts(stats: LossStats) -> dict[str, float]:
    return {
        "gspo/num_sequences": stats.total("sequences"),
        "gspo/num_tokens": stats.total("tokens"),
        "gspo/num_empty": stats.total("empty"),
        "gspo/log_ratio_clamped": stats.total("units_clamped"),
    }


def _kl_counts(stats: LossStats, config: ObjectiveConfig) -> dict[str, float]:
    return {"gspo/kl_ratio_clamped": stats.total("kl_clamped")} if config.kl_unbiased else {}


def _extremes(stats: LossStats, config: ObjectiveConfig) -> dict[str, float]:
    if not stats.total("units"):
        return {}
    highest = stats.maximum("unit_log_ratio_max")
    lowest = -stats.maximum("unit_log_ratio_negative_min")
    # exp(700) still fits in a float; the configured clamp takes precedence.
    bound = 700.0 if config.log_ratio_clamp is None else config.log_ratio_clamp
    return {
        "gspo/ratio_max": math.exp(min(highest, bound)),
        "gspo/ratio_min": math.exp(min(lowest, bound)),
        "gspo/log_ratio_abs_max": max(abs(highest), abs(lowest)),
    }
