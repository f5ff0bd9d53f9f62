"""Alarms for problems of a run other than its loss, each with advice on what to do.

Rule: an alarm compares a step's metrics with a bound, or with the job's first steps, and states both numbers. Alarms on
the loss live in ``gspo_core.objective``, which also counts how long a problem must last. Alarms stop nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from gspo_core.bounds import exceeds, falls_below
from gspo_core.objective import Alarm, AlarmKind, AlarmPatience, group_alarms
from gspo_core.objective.alarms import PATIENCE
from services.trainer.telling.aligned import AlignedGradients
from services.trainer.telling.best_evaluation import HIGH, MEAN, BestEvaluation
from services.trainer.telling.held_back import HeldBackReward
from services.trainer.telling.unreported_parts import UnreportedParts


class RunAlarm(StrEnum):
    ENTROPY_COLLAPSE = "entropy_collapse"
    REWARD_COLLAPSE = "reward_collapse"
    ALL_REWARDS_EQUAL = "all_rewards_equal"
    STALE_BACKLOG = "stale_backlog"
    EVALUATION_FELL = "evaluation_fell"
    REWARDS_DIVERGE = "rewards_diverge"
    DISK_NEARLY_FULL = "disk_nearly_full"
    GRADIENTS_ALIGNED = "gradients_aligned"
    NO_PROGRESS = "no_progress"
    EPISODES_LOST = "episodes_lost"
    PART_UNREPORTED = "part_unreported"


# The baseline is the mean of this many first reported steps.
BASELINE_STEPS = 5
# The share of the baseline that must remain.
MIN_SHARE_LEFT = 0.1
# How far the mean reward is below the best of the batch, in standard deviations (with rewards 0 and 1: four of five are
# 1). A policy that is nearly always as good as its best is rightly confident.
MIN_HEADROOM = 0.5
MAX_BEYOND_CAP = 0.2
MIN_DISK_FREE = 0.05
MAX_LOST = 0.05
MAX_AGAIN = 0.25
# A checkpoint holds the weights and two moments in float32, with a version written beside it.
VERSIONS_THAT_MUST_FIT = 8
# Consecutive steps.
RUN_PATIENCE: Mapping[StrEnum, int] = {
    **PATIENCE,
    RunAlarm.ENTROPY_COLLAPSE: 3,
    RunAlarm.REWARD_COLLAPSE: 3,
    RunAlarm.ALL_REWARDS_EQUAL: 3,
    RunAlarm.STALE_BACKLOG: 3,
    RunAlarm.REWARDS_DIVERGE: 3,
    RunAlarm.EPISODES_LOST: 3,
}

ADVICE: Mapping[StrEnum, str] = {
    AlarmKind.INERT_CLIP: "check objective.anchor and minibatches: the ratio must be able to differ from 1",
    AlarmKind.OVER_CLIP: "lower optimizer.lr, widen objective.clip_low and clip_high, or set objective.clip_spread",
    AlarmKind.ONE_SIDED_CLIP: "use anchor: proximal, or compare the clip range with the spread of the log ratio",
    AlarmKind.MISMATCH_FLOOR: "compare the engine's model, dtype, template and temperature with the trainer's",
    AlarmKind.CORRECTION_COLLAPSE: "lower rollout.max_staleness or optimizer.lr",
    AlarmKind.WEIGHT_DRIFT: "log-probs differ between engine and trainer: check top_p, temperature and stale caches",
    AlarmKind.GATE_PRESSURE: "find out why the gate withholds so much before you widen it",
    AlarmKind.FAR_STEP: "set optimizer.max_grad_growth: 1 and max_step_k3, or lower optimizer.lr; go back if it falls",
    AlarmKind.NO_SIGNAL: "choose tasks that the policy sometimes solves, or advantage.zero_variance: drop",
    RunAlarm.ENTROPY_COLLAPSE: "lower optimizer.lr, raise objective.clip_high, or go back to an earlier checkpoint",
    RunAlarm.REWARD_COLLAPSE: "read some episodes: unless all tasks are solved, the policy does the same for each task",
    RunAlarm.ALL_REWARDS_EQUAL: "check the reward: it does not depend on what the policy does, or all tasks are solved",
    RunAlarm.STALE_BACKLOG: "lower rollout.max_staleness, give the trainer more compute, or limit episode length",
    RunAlarm.EVALUATION_FELL: "go back to the best evaluation, with a lower optimizer.lr, or set watchdog.on_fall",
    RunAlarm.REWARDS_DIVERGE: "read episodes with a high reward: the policy may be paid for what was not meant",
    RunAlarm.DISK_NEARLY_FULL: "free space in the data directory, or keep fewer checkpoints, versions and batches",
    RunAlarm.GRADIENTS_ALIGNED: "lower rollout.max_staleness, or optimizer.lr until the data are younger",
    RunAlarm.EPISODES_LOST: "read what they did (gspo episodes, workers' logs): what all of them do is never trained",
    RunAlarm.PART_UNREPORTED: "compare objective.advantage.part_weights with the names that the reward has, for typos",
    RunAlarm.NO_PROGRESS: "check that rollout workers, engines and environments are alive, and read their logs",
}


class Alarms:
    """The alarms of one run, fed with the metrics of every step."""

    def __init__(self) -> None:
        self._first: dict[int, Mapping[str, float]] = {}
        self._patience = AlarmPatience(patience=RUN_PATIENCE)
        self._evaluations = BestEvaluation()
        self._held_back = HeldBackReward()
        self._aligned = AlignedGradients()
        self._parts = UnreportedParts()

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Load what earlier trainers of the job reported."""
        for row in rows:
            self._note(int(row["step"]), row)
            self._evaluations.compare(int(row["step"]), row)
            self._held_back.note(row)
            self._aligned.note(row)
            self._parts.note(int(row["step"]), row)

    def due(self, step: int, metrics: Mapping[str, float], of_the_loss: Sequence[Alarm]) -> list[Alarm]:
        """Alarms that have lasted long enough to raise."""
        self._note(step, metrics)
        found = [*_shrunk(metrics, self._at_first(step)), *_rewards(metrics), *_backlog(metrics), *_disk(metrics)]
        found += _lost(metrics)
        if _has_mastered(metrics):
            found = [alarm for alarm in found if alarm.kind is not RunAlarm.ENTROPY_COLLAPSE]
        found += self._held_back.alarms(RunAlarm.REWARDS_DIVERGE, metrics)
        found += self._aligned.alarms(RunAlarm.GRADIENTS_ALIGNED, metrics)
        found += self._parts.alarms(RunAlarm.PART_UNREPORTED, step, metrics)
        return self._patience.ripe([*of_the_loss, *group_alarms(metrics), *found])

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Held-out reward that fell by more than chance: its interval lies below that of the best evaluation."""
        best = self._evaluations.compare(step, metrics)
        if best is None:
            return []
        was = f"{best.mean:.3g} after step {best.step}, with an interval from {best.low:.3g}"
        meaning = f"held-out reward fell to {metrics[MEAN]:.3g}; it was {was}"
        return [Alarm(RunAlarm.EVALUATION_FELL, HIGH, metrics[HIGH], best.low, meaning)]

    def _note(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the first steps reported; a step whose trainer died before reporting it stays missing."""
        if step < 1 or "reward/std" not in metrics:
            return
        self._first[step] = {name: float(metrics[name]) for name in _COMPARED if name in metrics}
        for later in sorted(self._first)[BASELINE_STEPS:]:
            del self._first[later]

    def _at_first(self, step: int) -> Mapping[str, float]:
        """The baseline; empty until the job is old enough to compare with it."""
        if step in self._first or len(self._first) < BASELINE_STEPS:
            return {}
        return {name: sum(one.get(name, 0.0) for one in self._first.values()) / len(self._first) for name in _COMPARED}


_COMPARED: Mapping[str, tuple[RunAlarm, str]] = {
    "sampling/entropy": (RunAlarm.ENTROPY_COLLAPSE, "what the policy says hardly varies any more"),
    "reward/std": (RunAlarm.REWARD_COLLAPSE, "rewards hardly differ between episodes any more"),
}


def _shrunk(metrics: Mapping[str, float], at_first: Mapping[str, float]) -> list[Alarm]:
    found = []
    for name, before in at_first.items():
        kind, meaning = _COMPARED[name]
        value, bound = metrics.get(name, before), MIN_SHARE_LEFT * before
        if falls_below(value, bound):
            found.append(Alarm(kind, name, value, bound, f"{meaning}; in the first steps it was {before:.3g}"))
    return found


def _has_mastered(metrics: Mapping[str, float]) -> bool:
    """Whether the mean is close to the best; equal rewards have an alarm of their own."""
    below_the_best = metrics.get("reward/max", math.inf) - metrics.get("reward/mean", 0.0)
    return below_the_best <= MIN_HEADROOM * metrics.get("reward/std", 0.0)


def _rewards(metrics: Mapping[str, float]) -> list[Alarm]:
    lowest, highest = metrics.get("reward/min"), metrics.get("reward/max")
    if lowest is None or lowest != highest or metrics["episodes/count"] < 2:
        return []
    meaning = f"all {metrics['episodes/count']:.0f} episodes of the batch have the reward {lowest:g}"
    return [Alarm(RunAlarm.ALL_REWARDS_EQUAL, "reward/max - reward/min", 0.0, 0.0, meaning)]


def _backlog(metrics: Mapping[str, float]) -> list[Alarm]:
    beyond = metrics.get("staleness/beyond_cap_frac", 0.0)
    num_dropped, num_trained = metrics.get("dropped/stale", 0.0), metrics["groups/total"]
    dropped = num_dropped / max(1.0, num_dropped + num_trained)
    meaning = "many samples are too old by the time they are due for training"
    names = {"staleness/beyond_cap_frac": beyond, "dropped/stale of all groups": dropped}
    return [
        Alarm(RunAlarm.STALE_BACKLOG, name, value, MAX_BEYOND_CAP, meaning)
        for name, value in names.items()
        if exceeds(value, MAX_BEYOND_CAP)
    ][:1]


def _lost(metrics: Mapping[str, float]) -> list[Alarm]:
    """What is lost for one cause may have one thing in common, which the policy then unlearns in silence."""
    lost, again = metrics.get("episodes/lost_share", 0.0), metrics.get("episodes/again_share", 0.0)
    if exceeds(lost, MAX_LOST):
        causes = ", ".join(
            f"{name.removeprefix('stop/')} {metrics[name]:.0f}"
            for name in ("stop/env_error", "stop/no_reward")
            if name in metrics
        )
        worst, turns = metrics.get("episodes/lost_share_worst_group", 0.0), metrics.get("episodes/lost_turns_mean", 0.0)
        meaning = (
            f"episodes end without a reward ({causes or 'see stop/'}), {worst:.0%} of those of one group; they had "
            f"{turns:.1f} turns where all have {metrics.get('episodes/turns_mean', 0.0):.1f}"
        )
        return [Alarm(RunAlarm.EPISODES_LOST, "episodes/lost_share", lost, MAX_LOST, meaning)]
    if exceeds(again, MAX_AGAIN):
        meaning = "so many episodes were begun again, because their world or their worker failed"
        return [Alarm(RunAlarm.EPISODES_LOST, "episodes/again_share", again, MAX_AGAIN, meaning)]
    return []


def _disk(metrics: Mapping[str, float]) -> list[Alarm]:
    free, total = metrics.get("disk/free_bytes"), metrics.get("disk/total_bytes", 0.0)
    needed = max(MIN_DISK_FREE * total, VERSIONS_THAT_MUST_FIT * metrics.get("disk/version_bytes", 0.0))
    if free is None or free >= needed:
        return []
    return [Alarm(RunAlarm.DISK_NEARLY_FULL, "disk/free_bytes", free, needed, "the data directory is nearly full")]
