"""A plain class as an environment: public methods are tools, ``reset(**task)`` starts, ``get_reward()`` judges.

Rule: no base class, decorator or registry; what cannot be used is refused when it is loaded, with what to change.
The members and their meaning are described in ``environments/README.md``. How an episode runs on an instance is the
business of ``session``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from gspo_core.env.calls import MemberCaller
from gspo_core.env.contract import (
    EnvironmentFailed,
    InvalidEnvironment,
    PhaseLimits,
    Timeouts,
    description,
)
from gspo_core.env.dialect import Dialect
from gspo_core.env.prompt import docstring_prompt
from gspo_core.env.session import PlainSession
from gspo_core.env.tools import Tool, error_text
from gspo_core.environment_records import Description
from gspo_core.json_value import JSON
from gspo_core.messages import ToolSchema
from gspo_core.types import Split

RESERVED_NAMES = frozenset(
    {
        *("tasks", "num_tasks", "eval_tasks", "num_eval_tasks", "reset", "get_reward", "done", "close", "limits"),
        *("snapshot", "restore", "on_message", "replayable", "reward_range"),
    }
)
"""Never tools, like every name that begins with an underscore."""

_TASK_MEMBERS = {Split.TRAIN: ("tasks", "num_tasks"), Split.EVAL: ("eval_tasks", "num_eval_tasks")}
OURS = Dialect()
Tasks: TypeAlias = Sequence[Mapping[str, JSON]] | Callable[[int], Mapping[str, JSON]]


class PlainEnvironment:
    """A user's class (or a function that makes instances of one) behind the ``Environment`` interface."""

    def __init__(
        self,
        factory: Callable[..., Any],
        config: Mapping[str, JSON],
        *,
        name: str,
        use_docstring: bool = True,
        dialect: Dialect = OURS,
        judged_elsewhere: bool = False,
    ) -> None:
        """``judged_elsewhere``: the class needs no ``get_reward``, because its user knows the reward."""
        self.name = name
        self.dialect = dialect
        self._config = dict(config)
        self._factory = factory
        self._example: Any = None
        if not inspect.isclass(factory):
            self._example = self._make_example()
        self.cls: type = factory if inspect.isclass(factory) else type(self._example)
        self._check_class(("reset",) if judged_elsewhere else ("reset", "get_reward"))
        self.system_prompt = docstring_prompt(self.cls) if use_docstring and dialect.uses_docstring else None
        self.tools_by_name = {tool.name: tool for tool in _find_tools(self.cls, dialect)}
        self.limits: Mapping[str, JSON] = dict(getattr(self.cls, "limits", {}))
        self.replayable = bool(getattr(self.cls, "replayable", False))
        self.reward_range = _reward_range(self.cls)
        self.has_snapshot = callable(getattr(self.cls, "snapshot", None))
        self._tasks = {split: self._read_tasks(split) for split in Split}
        if self.num_tasks(Split.TRAIN) < 1:
            raise InvalidEnvironment(f"{name}: tasks is empty")

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return [tool.schema for tool in self.tools_by_name.values()]

    def num_tasks(self, split: Split) -> int:
        tasks, count = self._tasks[split]
        return count if callable(tasks) else len(tasks)

    async def task(self, split: Split, index: int) -> Mapping[str, JSON]:
        if not 0 <= index < self.num_tasks(split):
            raise EnvironmentFailed(
                "task", f"{self.name} has {self.num_tasks(split)} {split} tasks, none at index {index}"
            )
        tasks, _ = self._tasks[split]
        if not callable(tasks):
            task = tasks[index]
        else:
            caller = MemberCaller(self.name)
            try:
                task = await caller.call(tasks, Timeouts().reset_timeout_s, index)
            except Exception as error:
                raise EnvironmentFailed("task", f"tasks({index}) of {self.name}: {error_text(error)}") from error
            finally:
                caller.close()
        if not isinstance(task, Mapping):
            raise EnvironmentFailed("task", f"task {index} of {self.name} is a {type(task).__name__}, not a dict")
        return task

    def session(self, *, limits: PhaseLimits | None = None, episode_id: str = "") -> PlainSession:
        return PlainSession(self, limits or Timeouts(), episode_id)

    def describe(self) -> Description:
        return description(self, self.system_prompt)

    def make(self) -> Any:
        """A fresh instance. Raises ``InvalidEnvironment`` where the configuration does not fit."""
        try:
            inspect.signature(self._factory).bind(**self._config)
        except TypeError as error:
            raise InvalidEnvironment(f"{self.name}: the config {sorted(self._config)} does not fit: {error}") from None
        return self._factory(**self._config)

    def _check_class(self, members: Sequence[str]) -> None:
        for member in members:
            if not callable(getattr(self.cls, member, None)):
                raise InvalidEnvironment(f"{self.name} needs a method {member}(); see environments/README.md")
        if hasattr(self.cls, "snapshot") != hasattr(self.cls, "restore"):
            raise InvalidEnvironment(f"{self.name}: define both snapshot() and restore(state), or neither")
        if inspect.isclass(self._factory):
            try:
                inspect.signature(self.cls).bind(**self._config)
            except TypeError as error:
                message = f"{self.name}: the config {sorted(self._config)} does not fit its __init__: {error}"
                raise InvalidEnvironment(message) from None

    def _read_tasks(self, split: Split) -> tuple[Tasks, int]:
        try:
            return self._find_tasks(split)
        except InvalidEnvironment:
            raise
        except Exception as error:  # a property may read files
            name = _TASK_MEMBERS[split][0]
            raise InvalidEnvironment(
                f"{self.name}: its {name} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _find_tasks(self, split: Split) -> tuple[Tasks, int]:
        """A sequence, or a callable and its count. They belong to the class, or to an instance made to hold them."""
        tasks_name, count_name = _TASK_MEMBERS[split]
        static = inspect.getattr_static(self.cls, tasks_name, None)
        on_class = static is not None and not isinstance(static, property) and not inspect.isfunction(static)
        # Held-out tasks alone are no reason to make an instance: a class that has tasks has both kinds.
        needs_example = not on_class and (split is Split.TRAIN or static is not None)
        if needs_example and self._example is None:
            self._example = self._make_example()
        holder = self.cls if on_class or self._example is None else self._example
        tasks = getattr(holder, tasks_name, None)
        if tasks is None:
            # A world without tasks has one: the seed alone tells its episodes apart.
            return ([{}] if split is Split.TRAIN else []), 0
        if callable(tasks):
            count = getattr(holder, count_name, None)
            if not isinstance(count, int):
                raise InvalidEnvironment(f"{self.name}: {tasks_name}(index) needs {count_name}, the number of tasks")
            return tasks, count
        if isinstance(tasks, Iterator) or not (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")):
            raise InvalidEnvironment(
                f"{self.name}: {tasks_name} is a {type(tasks).__name__}; it must be a list, or a function of an index "
                f"with {count_name}, because the task of an episode is chosen by its number"
            )
        if len(tasks) and not isinstance(tasks[0], Mapping):
            raise InvalidEnvironment(
                f"{self.name}: each of {tasks_name} must be a dict, not a {type(tasks[0]).__name__}"
            )
        return tasks, 0

    def _make_example(self) -> Any:
        try:
            return self.make()
        except InvalidEnvironment:
            raise
        except ModuleNotFoundError as error:
            raise InvalidEnvironment(f"{self.name} needs the module {error.name!r}, which is not installed") from error
        except Exception as error:
            raise InvalidEnvironment(f"{self.name}: creating an instance failed: {error_text(error)}") from error


def _find_tools(cls: type, dialect: Dialect) -> list[Tool]:
    """By name. Properties and callables that instances store are no tools."""
    tools = []
    for name in sorted(dir(cls)):
        if name.startswith("_") or name in RESERVED_NAMES:
            continue
        static = inspect.getattr_static(cls, name)
        if dialect.is_tool(static):
            tools.append(Tool.of(name, getattr(static, "__func__", static)))
    return tools


def _reward_range(cls: type) -> tuple[float, float] | None:
    given = getattr(cls, "reward_range", None)
    if given is None:
        return None
    try:
        low, high = (float(bound) for bound in given)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InvalidEnvironment(f"{cls.__name__}.reward_range must be (low, high), two finite numbers, not {given!r}")
    return low, high
