"""Records which environments of a job have brought an episode to its end.

Rule: one such episode is proof for the rest of the run, in training or in evaluation. It judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.trainer.groups.intake import Intake
from services.trainer.groups.tasks import Task, TaskSchedule, environment_of


class ProvenEnvironments:
    """Set ``schedule`` and ``held_out``, which map groups to tasks, once they are known."""

    schedule: TaskSchedule | None = None
    held_out: Sequence[Task] = ()

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._found: set[int] = set()

    def found(self) -> set[int]:
        """Return the positions of the proven environments in the job's list."""
        if self.schedule is not None:
            groups = self._intake.take_ended_well()
            self._found |= {environment_of(group, self.schedule, self.held_out) for group in groups}
        return self._found
