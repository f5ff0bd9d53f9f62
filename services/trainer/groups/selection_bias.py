"""Who is trained and who is not: length and reward of the episodes that were dispatched beside those that were trained.

Rule: an episode counts when its group is settled, whatever became of it; one that was cut off counts with the tokens
that it had sampled by then, so that a policy which prefers short episodes shows. Evaluation is no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo_core.types import EpisodeKey, Trajectory
from services.trainer.groups.intake import Intake


class SelectionBias:
    """Of the groups that were settled since the last step."""

    def __init__(self, intake: Intake, job: str) -> None:
        self._intake = intake
        self._job = job
        self._clear()

    def _clear(self) -> None:
        self._trained: list[Trajectory] = []
        self._others: list[Trajectory] = []
        self._cut_off: list[int] = []
        """Tokens of those that came to no end."""

    def settle(self, group: int, size: int, *, is_trained: bool) -> None:
        """Before the group is forgotten."""
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
        """Since the last call. Rewards are those of the episodes that have one."""
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
