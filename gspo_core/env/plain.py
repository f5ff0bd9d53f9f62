"""A plain class as an environment: public methods are tools, ``reset(**task)`` starts, ``get_reward()`` judges.

Rule: no base class, decorator or registry; what cannot be used is refused when it is loaded, with what to change.
The members and their meaning are described in ``environments/README.md``. How an episode runs on an instance is the
business of ``session``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from gspo_core.env.dialect import EnvironmentDialect
from gspo_core.env.prompt import docstring_prompt
from gspo_core.env.session import PlainSession
from gspo_core.env.tasks import TASK_MEMBERS, EnvironmentTasks, read_tasks
from gspo_core.env.tools import RESERVED_NAMES, Tool, error_text
from gspo_core.environment_contract import InvalidEnvironment, PhaseLimits, Timeouts, description
from gspo_core.environment_records import EnvironmentDescription
from gspo_core.json_value import JSON
from gspo_core.messages import ToolSchema
from gspo_core.types import Split

OURS = EnvironmentDialect()


class PlainEnvironment:
    """A user's class (or a function that makes instances of one) behind the ``Environment`` interface."""

    def __init__(
        self,
        factory: Callable[..., Any],
        config: Mapping[str, JSON],
        *,
        name: str,
        use_docstring: bool = True,
        dialect: EnvironmentDialect = OURS,
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
        self.reward_range = reward_range_of(self.cls, self.cls.__name__)
        self.has_snapshot = callable(getattr(self.cls, "snapshot", None))
        self._tasks = {split: self._read_tasks(split) for split in Split}
        if self.num_tasks(Split.TRAIN) < 1:
            raise InvalidEnvironment(f"{name}: tasks is empty")

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return [tool.schema for tool in self.tools_by_name.values()]

    def num_tasks(self, split: Split) -> int:
        return len(self._tasks[split])

    async def task(self, split: Split, index: int) -> Mapping[str, JSON]:
        return await self._tasks[split].get(index)

    def session(self, *, limits: PhaseLimits | None = None, episode_id: str = "") -> PlainSession:
        return PlainSession(self, limits or Timeouts(), episode_id)

    def describe(self) -> EnvironmentDescription:
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
        if isinstance(inspect.getattr_static(self.cls, "done", None), FunctionType | staticmethod | classmethod):
            raise InvalidEnvironment(
                f"{self.name}: done is an attribute or property that ends the episode, and no method; "
                "name the tool otherwise, such as finish"
            )
        if hasattr(self.cls, "snapshot") != hasattr(self.cls, "restore"):
            raise InvalidEnvironment(f"{self.name}: define both snapshot() and restore(state), or neither")
        kept = getattr(self.cls, "end_state", ())
        if not isinstance(kept, list | tuple) or not all(isinstance(one, str) for one in kept):
            raise InvalidEnvironment(f"{self.name}: end_state is a list of the attributes to keep, not {kept!r}")
        if inspect.isclass(self._factory):
            try:
                inspect.signature(self.cls).bind(**self._config)
            except TypeError as error:
                message = f"{self.name}: the config {sorted(self._config)} does not fit its __init__: {error}"
                raise InvalidEnvironment(message) from None

    def _read_tasks(self, split: Split) -> EnvironmentTasks:
        try:
            return self._find_tasks(split)
        except InvalidEnvironment:
            raise
        except Exception as error:  # a property may read files
            name = TASK_MEMBERS[split][0]
            raise InvalidEnvironment(
                f"{self.name}: its {name} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _find_tasks(self, split: Split) -> EnvironmentTasks:
        """They belong to the class, or to an instance made to hold them."""
        tasks_name, _ = TASK_MEMBERS[split]
        static = inspect.getattr_static(self.cls, tasks_name, None)
        on_class = static is not None and not isinstance(static, property) and not inspect.isfunction(static)
        # Held-out tasks alone are no reason to make an instance: a class that has tasks has both kinds.
        needs_example = not on_class and (split is Split.TRAIN or static is not None)
        if needs_example and self._example is None:
            self._example = self._make_example()
        holder = self.cls if on_class or self._example is None else self._example
        found = read_tasks(self.name, split, holder)
        if found is not None:
            return found
        # A world without tasks has one: the seed alone tells its episodes apart.
        return EnvironmentTasks(self.name, split, [{}] if split is Split.TRAIN else [])

    def _make_example(self) -> Any:
        try:
            return self.make()
        except InvalidEnvironment:
            raise
        except ModuleNotFoundError as error:
            raise InvalidEnvironment(f"{self.name} needs the module {error.name!r}, which is not installed") from error
        except Exception as error:
            raise InvalidEnvironment(f"{self.name}: creating an instance failed: {error_text(error)}") from error


def _find_tools(cls: type, dialect: EnvironmentDialect) -> list[Tool]:
    """By name. Properties and callables that instances store are no tools."""
    tools = []
    for name in sorted(dir(cls)):
        if name.startswith("_") or name in RESERVED_NAMES:
            continue
        static = inspect.getattr_static(cls, name)
        if dialect.is_tool(static):
            tools.append(dialect.tool(name, getattr(static, "__func__", static)))
    return tools


def reward_range_of(holder: object, name: str) -> tuple[float, float] | None:
    """The bounds that its author declares. Raises ``InvalidEnvironment``."""
    given = getattr(holder, "reward_range", None)
    if given is None:
        return None
    try:
        low, high = (float(bound) for bound in given)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InvalidEnvironment(f"{name}.reward_range must be (low, high), two finite numbers, not {given!r}")
    return low, high
