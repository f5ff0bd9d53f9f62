"""The tasks of one split, wherever an author keeps them: a sequence, or a function of an index and their number.

Rule: the task of an episode is chosen by its number, so whatever cannot be numbered is refused when it is read. It
knows no class: its caller says which object holds the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gspo_core.env.calls import MemberCaller
from gspo_core.env.tools import error_text
from gspo_core.environment_contract import EnvironmentFailed, InvalidEnvironment, Timeouts
from gspo_core.json_value import JSON
from gspo_core.types import Split

TASK_MEMBERS: Final = {Split.TRAIN: ("tasks", "num_tasks"), Split.EVAL: ("eval_tasks", "num_eval_tasks")}
Task: TypeAlias = Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class EnvironmentTasks:
    """``read_tasks`` makes one."""

    owner: str
    """Whose they are, for messages."""
    split: Split
    held: Sequence[Task] | Callable[[int], Task] = ()
    count: int = 0
    """Number of tasks, if ``held`` is a function."""

    def __len__(self) -> int:
        return self.count if callable(self.held) else len(self.held)

    async def get(self, index: int) -> Task:
        """Raises ``EnvironmentFailed``."""
        if not 0 <= index < len(self):
            raise EnvironmentFailed("task", f"{self.owner} has {len(self)} {self.split} tasks, none at index {index}")
        task = await self._made(self.held, index) if callable(self.held) else self.held[index]
        if not isinstance(task, Mapping):
            raise EnvironmentFailed("task", f"task {index} of {self.owner} is a {type(task).__name__}, not a dict")
        return task

    async def _made(self, make: Callable[[int], Task], index: int) -> Task:
        caller = MemberCaller(self.owner)
        try:
            return await caller.call(make, Timeouts().reset_timeout_s, index)
        except Exception as error:
            raise EnvironmentFailed("task", f"tasks({index}) of {self.owner}: {error_text(error)}") from error
        finally:
            caller.close()


def read_tasks(owner: str, split: Split, holder: object) -> EnvironmentTasks | None:
    """The tasks that ``holder`` has under the usual names; None if it has none. Raises ``InvalidEnvironment``."""
    tasks_name, count_name = TASK_MEMBERS[split]
    tasks = getattr(holder, tasks_name, None)
    if tasks is None:
        return None
    if callable(tasks):
        count = getattr(holder, count_name, None)
        if not isinstance(count, int):
            raise InvalidEnvironment(f"{owner}: {tasks_name}(index) needs {count_name}, the number of tasks")
        return EnvironmentTasks(owner, split, tasks, count)
    if isinstance(tasks, Iterator) or not (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")):
        raise InvalidEnvironment(
            f"{owner}: {tasks_name} is a {type(tasks).__name__}; it must be a list, or a function of an index "
            f"with {count_name}, because the task of an episode is chosen by its number"
        )
    if len(tasks) and not isinstance(tasks[0], Mapping):
        raise InvalidEnvironment(f"{owner}: each of {tasks_name} must be a dict, not a {type(tasks[0]).__name__}")
    return EnvironmentTasks(owner, split, tasks)
