"""Measures selection bias: compares length and reward of all dispatched episodes with those of the trained ones.

Rule: every episode counts once its group is settled, whatever its outcome. A cut-off episode counts with the tokens
sampled so far, which exposes a bias towards short episodes. Evaluation is not included.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo_core.types import EpisodeKey, Trajectory
from services.trainer.groups.intake import Intake


class SelectionBias:
    """Covers the groups settled since the last call of ``take_metrics``."""

    def __init__(self, intake: Intake, job: str) -> None:
        self._intake = intake
        self._job = job
        self._clear()

    def _clear(self) -> None:
        self._trained: list[Trajectory] = []
        self._others: list[Trajectory] = []
        self._cut_off: list[int] = []
        """Sampled tokens of each episode that did not end."""

    def settle(self, group: int, size: int, *, is_trained: bool) -> None:
        """Record the episodes of ``group``; call this before the intake forgets it."""
        for member in range(size):
            key = EpisodeKey(self._job, group, member)
            trajectory = self._intake.trajectory(key)
            if trajectory is None:
                self._cut_off.append(self._intake.num_actions(key))
            elif is_trained and trajectory.reward is not None:
                self._trained.append(trajectory)
            else:
                self._others.append(trajectory)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call; reward means skip episodes without a reward."""
        ended = [*self._trained, *self._others]
        lengths = [one.num_actions for one in ended] + self._cut_off
        trained = [one.num_actions for one in self._trained]
        metrics: dict[str, float] = {
            "selection/dispatched": len(lengths),
            "selection/trained_share": len(trained) / len(lengths) if lengths else 0.0,
            "selection/cut_off": len(self._cut_off),
            "selection/actions_dispatched": _mean(lengths),
            "selection/actions_trained": _mean(trained),
        }
        if rewards := _rewards(ended):
            metrics["selection/reward_dispatched"] = _mean(rewards)
        if rewards := _rewards(self._trained):
            metrics["selection/reward_trained"] = _mean(rewards)
        self._clear()
        return metrics


def _rewards(episodes: Sequence[Trajectory]) -> list[float]:
    return [one.reward for one in episodes if one.reward is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
