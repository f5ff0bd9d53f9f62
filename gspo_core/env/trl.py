"""TRL's environments unchanged, answered in TRL's words: ``environment = from_trl(WordleEnv, dataset=rows)``.

Rule: what a policy reads is what TRL 1.16 gives it (schemas by transformers, results by ``str``, errors as
``{'error': ...}``, no docstring in the prompt, no call ids), so that prompts are the same. TRL itself is neither
imported nor needed.
Differences that stay: one instance per episode instead of a pool, calls in their order, and our reserved names are no
tools. A class can also be named directly in a job; then it is answered in our words.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Protocol, TypeAlias, TypeVar

from gspo_core.env.dialect import EnvironmentDialect
from gspo_core.env.plain import PlainEnvironment
from gspo_core.env.session import PlainSession, as_reward
from gspo_core.env.tools import HIDDEN_PARAMETERS, ArgumentError, Bound, Tool, by_name
from gspo_core.env.trl_schema import trl_schema
from gspo_core.environment_contract import (
    EnvironmentFailed,
    InvalidEnvironment,
    PhaseLimits,
    Start,
    Timeouts,
    description,
)
from gspo_core.environment_records import EnvironmentDescription
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, Content, Message, ToolCall, ToolSchema, is_parts
from gspo_core.types import Split

T = TypeVar("T")


class RewardFunction(Protocol):
    """TRL's: keywords ``prompts``, ``completions``, ``environments`` and the columns of the row, each a list of one.

    Prompt and completion are texts where the row's prompt is one and there are no tools, else messages.
    """

    __name__: str

    def __call__(self, **keywords: Any) -> Sequence[float | None] | Awaitable[Sequence[float | None]]: ...


Factory: TypeAlias = Callable[[], object] | Mapping[str, Callable[[], object]]


class TrlDialect(EnvironmentDialect):
    uses_docstring = False

    def is_tool(self, member: object) -> bool:
        return inspect.isfunction(member) or isinstance(member, staticmethod)

    def tool(self, name: str, function: FunctionType) -> Tool:
        schema = trl_schema(name, function, HIDDEN_PARAMETERS)
        return dataclasses.replace(super().tool(name, function), schema=schema)

    def bind(self, tool: Tool, arguments: JSON) -> Bound:
        """As they are: TRL checks no types, so a wrong one reads as the error of the method."""
        if not isinstance(arguments, dict):
            raise ArgumentError(f"argument after ** must be a mapping, not {type(arguments).__name__}")
        return {**arguments}

    def result(self, value: object) -> Content:
        return value if is_parts(value) else str(value)

    def failure(self, error: BaseException) -> str:
        return str({"error": str(error)})

    def problem(self, text: str) -> str:
        return str({"error": text})

    def unknown_tool(self, name: str | None, tools: Collection[str]) -> str:
        return self.problem(f"Tool {name} not found.")

    def unreadable(self, status: CallStatus) -> str:
        return self.problem(str(status))

    def message(self, call: ToolCall, number: int, content: Content) -> Message:
        return {"role": "tool", "name": call.name or "", "content": content}


def from_trl(
    environment_factory: Factory | None = None,
    *,
    tools: Sequence[FunctionType] = (),
    dataset: Sequence[Mapping[str, JSON]] | None = None,
    eval_dataset: Sequence[Mapping[str, JSON]] = (),
    reward_funcs: RewardFunction | Sequence[RewardFunction] = (),
    name: str = "trl",
) -> TrlEnvironment:
    """An environment of what ``GRPOTrainer`` takes under the same names."""
    functions = (reward_funcs,) if callable(reward_funcs) else tuple(reward_funcs)
    if environment_factory is None:
        if dataset is None or not functions:
            raise InvalidEnvironment(f"{name}: without environment_factory, a dataset and reward_funcs are needed")
        environment_factory = _Stateless
    return TrlEnvironment(environment_factory, tools, dataset, eval_dataset, functions, name)


class _Stateless:
    """Where tools are functions alone."""

    def reset(self, **row: JSON) -> None:
        pass


class TrlEnvironment:
    """One or several TRL classes over one dataset, behind the ``Environment`` interface."""

    has_snapshot = False

    def __init__(
        self,
        factory: Factory,
        tools: Sequence[FunctionType],
        dataset: Sequence[Mapping[str, JSON]] | None,
        eval_dataset: Sequence[Mapping[str, JSON]],
        reward_functions: Sequence[RewardFunction],
        name: str,
    ) -> None:
        self.name = name
        self.reward_functions = reward_functions
        self._functions = by_name(name, tools)
        self.has_several = isinstance(factory, Mapping)
        factories = factory if isinstance(factory, Mapping) else {"": factory}
        self.environments = {key: self._wrap(key, made) for key, made in factories.items()}
        if self.has_several and dataset is None:
            raise InvalidEnvironment(f"{name}: several environments need a dataset whose rows name one of them")
        for function in reward_functions:
            _check_reward_function(function)
        first = next(iter(self.environments.values()))
        classes = {key: environment.cls for key, environment in self.environments.items()}
        self.limits = _agreed(name, "limits", classes)
        self.hosting = _agreed(name, "hosting", classes)
        self.runs_in_sandboxes = all(getattr(cls, "runs_in_sandboxes", False) for cls in classes.values())
        self.replayable = all(environment.replayable for environment in self.environments.values())
        self.reward_range = first.reward_range if not self.has_several and not reward_functions else None
        self._rows = {Split.TRAIN: dataset, Split.EVAL: eval_dataset}
        self._own_tasks = first if dataset is None else None
        """Where the tasks come from if there is no dataset: the class may bring its own."""

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The tools of all classes; an episode is offered those of its own class."""
        return [schema for environment in self.environments.values() for schema in environment.tools]

    def num_tasks(self, split: Split) -> int:
        if self._own_tasks is not None:
            return self._own_tasks.num_tasks(split)
        return len(self._rows[split] or ())

    async def task(self, split: Split, index: int) -> Mapping[str, JSON]:
        if self._own_tasks is not None:
            return await self._own_tasks.task(split, index)
        rows = self._rows[split] or ()
        if not 0 <= index < len(rows):
            raise EnvironmentFailed("task", f"{self.name} has {len(rows)} {split} rows, none at index {index}")
        return rows[index]

    def of_row(self, row: Mapping[str, JSON]) -> PlainEnvironment:
        """The class that a row asks for."""
        key = row.get("environment") if self.has_several else ""
        if key not in self.environments:
            raise EnvironmentFailed(
                "reset", f"the row asks for the environment {key!r}; there are {list(self.environments)}"
            )
        return self.environments[key]

    def session(self, *, limits: PhaseLimits | None = None, episode_id: str = "") -> TrlSession:
        return TrlSession(self, limits or Timeouts(), episode_id)

    def describe(self) -> EnvironmentDescription:
        return description(self)

    def _wrap(self, key: str, factory: Callable[[], object]) -> PlainEnvironment:
        name = f"{self.name}/{key}" if key else self.name
        judged_elsewhere, dialect = bool(self.reward_functions), TrlDialect()
        made_by = partial(_with_functions, factory, self._functions) if self._functions else factory
        environment = PlainEnvironment(made_by, {}, name=name, dialect=dialect, judged_elsewhere=judged_elsewhere)
        own = {name: dialect.tool(name, function) for name, function in self._functions.items()}
        if twice := own.keys() & environment.tools_by_name.keys():
            raise InvalidEnvironment(f"{environment.name}: two tools are named {min(twice)}")
        environment.tools_by_name = {**own, **environment.tools_by_name}
        return environment


def _agreed(name: str, attribute: str, classes: Mapping[str, type]) -> Mapping[str, JSON]:
    """The classes' settings merged: a class that leaves one out leaves it to the others."""
    agreed: dict[str, JSON] = {}
    by: dict[str, str] = {}
    for key, cls in classes.items():
        for setting, value in dict(getattr(cls, attribute, {})).items():
            if agreed.setdefault(setting, value) != value:
                raise InvalidEnvironment(
                    f"{name}: one {attribute} holds for all classes, but {setting} is {agreed[setting]!r} for "
                    f"{by[setting]} and {value!r} for {key}"
                )
            by.setdefault(setting, key)
    return agreed


def _with_functions(factory: Callable[[], object], functions: Mapping[str, FunctionType]) -> object:
    """An instance that also has the functions, which are called as they are."""
    instance = factory()
    for name, function in functions.items():
        setattr(instance, name, function)
    return instance


class TrlSession(PlainSession):
    """One episode; the row decides of which class."""

    def __init__(self, environment: TrlEnvironment, limits: PhaseLimits, episode_id: str) -> None:
        super().__init__(next(iter(environment.environments.values())), limits, episode_id)
        self._trl = environment
        self._prompt: Sequence[Message] = ()
        self._judged_by = 0.0

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start:
        self._environment = self._trl.of_row(task)
        row = {name: value for name, value in task.items() if name != "environment" or not self._trl.has_several}
        start = await super().start(row, seed)
        self._prompt = start.messages
        return start

    async def score(self) -> tuple[float, dict[str, float]]:
        if self._lost:
            return await super().score()
        self._look()
        self._judged_by = asyncio.get_running_loop().time() + self._limits.score_timeout_s
        values: list[tuple[str, object]] = [
            (function.__name__, await self._judge(function)) for function in self._trl.reward_functions
        ]
        if hasattr(self._instance, "get_reward"):
            own = await self._within_time(self._call_member("get_reward", self._left_s))
            values.append((type(self._instance).__name__, own))
        names = _distinct([name for name, _ in values])
        # None: not scored by this source.
        parts = {name: as_reward(value)[0] for name, (_, value) in zip(names, values, strict=True) if value is not None}
        if not parts:
            raise EnvironmentFailed("score", f"none of {names} scored the episode")
        return math.fsum(parts.values()), parts

    async def _judge(self, function: RewardFunction) -> float | None:
        prompt, completion = self._texts() if self._is_of_texts else self._messages()
        given: dict[str, object] = {
            "prompts": [prompt],
            "completions": [completion],
            "environments": [self._instance],
            **{name: [value] for name, value in self._context.task.items() if name != "prompt"},
        }
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        rewards = await self._within_time(self._caller.call(function, self._left_s, **given))
        if not isinstance(rewards, Sequence) or len(rewards) != 1:
            raise EnvironmentFailed("score", f"{function.__name__} must return a list with one reward per completion")
        return rewards[0]

    @property
    def _left_s(self) -> float:
        """Time left for the reward; all that judge share it."""
        return max(0.0, self._judged_by - asyncio.get_running_loop().time())

    async def _within_time(self, judging: Awaitable[T]) -> T:
        return await self._or_fail("score", self._limits.score_timeout_s, judging)

    @property
    def _is_of_texts(self) -> bool:
        """TRL reads calls from messages alone, so with tools every prompt is one."""
        can_answer = bool(self._trl.tools) or hasattr(self._instance, "on_message")
        return isinstance(self._context.task.get("prompt"), str) and not can_answer

    def _messages(self) -> tuple[Sequence[Message], Sequence[Message]]:
        return list(self._prompt), self._context.messages[len(self._prompt) :]

    def _texts(self) -> tuple[Content | None, str]:
        prompt, completion = self._messages()
        said = [str(message["content"]) for message in completion if message["role"] == "assistant"]
        return prompt[-1]["content"], "".join(said)


def _distinct(names: Sequence[str]) -> list[str]:
    """Repeated names are numbered: ``reward``, ``reward_2``."""
    taken, found = set(names), list[str]()
    for name in names:
        is_free = name not in found
        numbered = (one for number in itertools.count(2) if (one := f"{name}_{number}") not in taken)
        found.append(name if is_free else next(numbered))
        taken.add(found[-1])
    return found


_NOT_GIVEN = ("completion_ids", "trainer_state", "log_extra", "log_metric")


def _check_reward_function(function: RewardFunction) -> None:
    if not callable(function) or not hasattr(function, "__name__"):
        raise InvalidEnvironment(f"reward_funcs: {function!r} is not a function; reward models are not supported here")
    for name in _NOT_GIVEN:
        parameter = inspect.signature(function).parameters.get(name)
        if parameter is not None and parameter.default is parameter.empty:
            raise InvalidEnvironment(f"{function.__name__} needs {name}, which an environment does not see")
