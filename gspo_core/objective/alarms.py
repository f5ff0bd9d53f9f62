"""Raises alarms about a step, as values.

One rule: an alarm names the number, its bound and the most likely cause. Bounds are reasoned, not tuned
(`docs/objective.md`), and NaN exceeds every bound. It neither logs nor stops anything; `AlarmPatience` counts alarms
that persist over steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gspo_core.bounds import exceeds, falls_below
from gspo_core.objective.metrics import loss_metrics
from gspo_core.objective.stats import LossStats
from gspo_core.objective_config import ObjectiveConfig

INERT_LOG_RATIO = 1e-7
MAX_CLIP_FRAC = 0.25
MAX_CLIP_DIFFERENCE = 0.2
# With fewer sequences of one sign, its clip fraction is meaningless.
MIN_SEQUENCES_OF_A_SIGN = 16
MIN_ESS = 0.3
MAX_TRUNCATED_FRAC = 0.2
MAX_STANDARD_ERRORS = 5.0
# With fewer tokens, the standard error is unreliable.
MIN_TOKENS = 1000
# A smaller drift of the mean weight is float32 rounding, regardless of its standard error.
MIN_WEIGHT_DRIFT = 1e-4
MIN_KEPT_FRAC = 0.8
# Share of the clip width, or of the k3 gate, that engine mismatch may fill.
MISMATCH_SHARE_OF_CLIP = 1 / 3
MISMATCH_SHARE_OF_GATE = 1 / 5
DEFAULT_K3_GATE = 0.05


class AlarmKind(StrEnum):
    """What is wrong."""

    INERT_CLIP = "inert_clip"
    OVER_CLIP = "over_clip"
    ONE_SIDED_CLIP = "one_sided_clip"
    MISMATCH_FLOOR = "mismatch_floor"
    CORRECTION_COLLAPSE = "correction_collapse"
    WEIGHT_DRIFT = "weight_drift"
    GATE_PRESSURE = "gate_pressure"
    FAR_STEP = "far_step"
    NO_SIGNAL = "no_signal"


# Consecutive steps before an alarm becomes an event, since one batch may be odd; other alarms fire at once.
PATIENCE: Mapping[StrEnum, int] = dict.fromkeys(
    (AlarmKind.OVER_CLIP, AlarmKind.ONE_SIDED_CLIP, AlarmKind.GATE_PRESSURE, AlarmKind.NO_SIGNAL), 3
)
# Minimum share of groups in a batch whose members must differ in reward.
MIN_COMPARED_FRAC = 0.1
STEPS_UNTIL_REPEATED = 10


@dataclass(frozen=True, slots=True)
class Alarm:
    """A metric beyond its bound."""

    kind: StrEnum
    """An ``AlarmKind`` here; other modules define their own kinds."""
    metric: str
    value: float
    bound: float
    meaning: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.metric} is {self.value:.3g}, bound {self.bound:.3g}: {self.meaning}"


@dataclass
class AlarmPatience:
    """Passes an alarm on after enough consecutive steps, and repeats it rarely while it lasts."""

    steps: dict[StrEnum, int] = field(default_factory=dict)
    patience: Mapping[StrEnum, int] = field(default_factory=lambda: PATIENCE)

    def ripe(self, alarms: Sequence[Alarm]) -> list[Alarm]:
        """Return the alarms to report. Call this every step, even without alarms."""
        raised = {alarm.kind for alarm in alarms}
        self.steps = {kind: self.steps.get(kind, 0) + 1 for kind in raised}
        return [alarm for alarm in alarms if self._is_due(alarm.kind)]

    def _is_due(self, kind: StrEnum) -> bool:
        overdue = self.steps[kind] - self.patience.get(kind, 1)
        return overdue >= 0 and overdue % STEPS_UNTIL_REPEATED == 0


def group_alarms(metrics: Mapping[str, float]) -> list[Alarm]:
    """The alarms about the groups of one batch, from the metrics of ``batch_advantages``."""
    compared = 1 - metrics["groups/zero_variance"] / max(1.0, metrics["groups/total"])
    if not falls_below(compared, MIN_COMPARED_FRAC):
        return []
    meaning = "nearly all groups have one reward for all members and teach nothing: the tasks are too easy or too hard"
    return [Alarm(AlarmKind.NO_SIGNAL, "1 - groups/zero_variance / groups/total", compared, MIN_COMPARED_FRAC, meaning)]


def loss_alarms(stats: LossStats, config: ObjectiveConfig, num_updates: int = 1) -> list[Alarm]:
    """The alarms of one step. With a single update, a clip that never acts is normal and raises none."""
    metrics = loss_metrics(stats, config, num_updates)
    found = [*_clip_alarms(metrics, config, num_updates), *_one_sided(stats, metrics), *_mismatch(metrics, config)]
    return [*found, *_weight_alarms(metrics), *_gate_alarms(metrics), *_far_step(metrics, config)]


def _clip_alarms(metrics: Mapping[str, float], config: ObjectiveConfig, num_updates: int) -> list[Alarm]:
    clip_frac = metrics.get("gspo/clip_frac")
    if clip_frac is None or config.loss != "clip":
        return []
    largest = metrics["gspo/log_ratio_abs_max"]
    if num_updates > 1 and clip_frac == 0 and falls_below(largest, INERT_LOG_RATIO):
        meaning = "the policy is compared with itself, so the clip can never act"
        return [Alarm(AlarmKind.INERT_CLIP, "gspo/log_ratio_abs_max", largest, INERT_LOG_RATIO, meaning)]
    if exceeds(clip_frac, MAX_CLIP_FRAC):
        meaning = "the clip is too narrow for how far an update moves, or it is anchored on the sampler"
        return [Alarm(AlarmKind.OVER_CLIP, "gspo/clip_frac", clip_frac, MAX_CLIP_FRAC, meaning)]
    return []


def _one_sided(stats: LossStats, metrics: Mapping[str, float]) -> list[Alarm]:
    if min(stats.total("sequences_positive"), stats.total("sequences_negative")) < MIN_SEQUENCES_OF_A_SIGN:
        return []
    difference = metrics["gspo/clip_frac_negative"] - metrics["gspo/clip_frac_positive"]
    if not exceeds(abs(difference), MAX_CLIP_DIFFERENCE):
        return []
    meaning = "the clip reacts to drift instead of updates and removes one sign of the advantage"
    name = "gspo/clip_frac_negative - gspo/clip_frac_positive"
    return [Alarm(AlarmKind.ONE_SIDED_CLIP, name, difference, MAX_CLIP_DIFFERENCE, meaning)]


def _mismatch(metrics: Mapping[str, float], config: ObjectiveConfig) -> list[Alarm]:
    mismatch = metrics.get("gspo/k3_mismatch")
    if mismatch is None:
        return []
    bound = MISMATCH_SHARE_OF_GATE * (config.k3_gate or DEFAULT_K3_GATE)
    if config.anchor == "behavior" and config.loss == "clip" and config.band is None:
        bound = min(bound, MISMATCH_SHARE_OF_CLIP * config.clip_low)
    if not exceeds(mismatch, bound):
        return []
    meaning = "engine and trainer disagree on fresh tokens: numerics, temperature, template or a stale cache"
    return [Alarm(AlarmKind.MISMATCH_FLOOR, "gspo/k3_mismatch", mismatch, bound, meaning)]


def _weight_alarms(metrics: Mapping[str, float]) -> list[Alarm]:
    found = []
    meaning = "the data is too stale, or its log-probs belong to another version"
    for name in ("gspo/ess_token", "gspo/ess_sequence"):
        if falls_below(metrics.get(name, 1.0), MIN_ESS):
            found.append(Alarm(AlarmKind.CORRECTION_COLLAPSE, name, metrics[name], MIN_ESS, meaning))
    truncated = metrics.get("gspo/weight_truncated_frac", 0.0)
    if exceeds(truncated, MAX_TRUNCATED_FRAC):
        name = "gspo/weight_truncated_frac"
        found.append(Alarm(AlarmKind.CORRECTION_COLLAPSE, name, truncated, MAX_TRUNCATED_FRAC, meaning))
    if metrics["gspo/num_tokens"] >= MIN_TOKENS:
        drift = metrics["gspo/weight_raw_mean"] - 1
        bound = max(MAX_STANDARD_ERRORS * metrics["gspo/weight_raw_stderr"], MIN_WEIGHT_DRIFT)
        if exceeds(abs(drift), bound):
            meaning = "the recorded log-probs are not those of the distribution that the tokens were sampled from"
            found.append(Alarm(AlarmKind.WEIGHT_DRIFT, "gspo/weight_raw_mean - 1", drift, bound, meaning))
    return found


def _far_step(metrics: Mapping[str, float], config: ObjectiveConfig) -> list[Alarm]:
    """Data of the weights before such a step are as far off as the gate allows, however good they are."""
    moved, bound = metrics.get("gspo/k3_policy_proximal", 0.0), config.k3_gate or DEFAULT_K3_GATE
    if not exceeds(moved, bound):
        return []
    meaning = "one step moved the policy so far that data sampled before it are withheld"
    return [Alarm(AlarmKind.FAR_STEP, "gspo/k3_policy_proximal", moved, bound, meaning)]


def _gate_alarms(metrics: Mapping[str, float]) -> list[Alarm]:
    gates = ("k3", "outlier", "geometric", "off_policy", "staleness", "correction", "m2")
    names = [f"gspo/kept_frac_{gate}" for gate in gates]
    return [
        Alarm(AlarmKind.GATE_PRESSURE, name, metrics[name], MIN_KEPT_FRAC, "this gate withholds much of the data")
        for name in names
        if falls_below(metrics.get(name, 1.0), MIN_KEPT_FRAC)
    ]
