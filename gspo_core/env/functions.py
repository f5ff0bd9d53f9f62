"""The shortest form of an environment: functions as tools, a list of tasks, and a reward function.

Rule: it makes a class like any other, so that everything which holds for classes holds here. Functions keep no state
between calls; write a class to keep some.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol, TypeAlias

from gspo_core.env.tools import by_name
from gspo_core.environment_contract import Context, InvalidEnvironment
from gspo_core.json_value import JSON
from gspo_core.messages import Message


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the policy made and that came back."""

    name: str
    arguments: Mapping[str, object]
    """As the function was given them: of the types that it declares."""
    result: object = None
    error: Exception | None = None
    """Raised by the function, which then has no result."""


Worth: TypeAlias = float | Mapping[str, float]
"""A number, or named parts."""


class Reward(Protocol):
    def __call__(
        self, task: Mapping[str, JSON], messages: Sequence[Message], calls: Sequence[Call], /
    ) -> Worth | Awaitable[Worth]: ...


def from_functions(
    functions: Iterable[FunctionType],
    *,
    tasks: Sequence[Mapping[str, JSON]],
    reward: Reward,
    eval_tasks: Sequence[Mapping[str, JSON]] = (),
    system: str = "",
    **attributes: JSON,
) -> type:
    """A class whose tools are ``functions`` and whose tasks have a ``prompt`` each (text or messages).

    ``attributes`` become class attributes, e.g. ``replayable=True`` or ``limits={"max_turns": 4}``.
    """
    for task in (*tasks, *eval_tasks):
        if "prompt" not in task:
            raise InvalidEnvironment(f"from_functions: every task needs a prompt, {dict(task)!r} has none")
    tools = by_name("from_functions", functions)
    if hidden := [name for name in tools if name.startswith("_")]:
        raise InvalidEnvironment(f"from_functions: no tool can be named {hidden[0]}")
    if twice := tools.keys() & attributes.keys():
        raise InvalidEnvironment(f"from_functions: {min(twice)} is a tool and an attribute")
    members: dict[str, object] = {name: _as_method(function) for name, function in tools.items()}
    members |= {"tasks": list(tasks), "__doc__": system or None, **attributes}
    if eval_tasks:
        members["eval_tasks"] = list(eval_tasks)
    base = _AsyncFunctions if inspect.iscoroutinefunction(reward) else _Functions
    cls = type("Functions", (base,), members)
    cls._reward = staticmethod(reward)  # type: ignore[attr-defined]
    return cls


class _Functions:
    _reward: Reward

    def reset(self, **task: JSON) -> None:
        self._task = task
        self._calls: list[Call] = []

    def get_reward(self, ctx: Context) -> Worth | Awaitable[Worth]:
        return self._reward(self._task, ctx.messages, self._calls)


class _AsyncFunctions(_Functions):
    async def get_reward(self, ctx: Context) -> Worth:
        value = super().get_reward(ctx)
        return await value if inspect.isawaitable(value) else value


def _as_method(function: FunctionType) -> Callable[..., object]:
    @functools.wraps(function)
    def call(self: _Functions, **arguments: object) -> object:
        try:
            result = function(**arguments)
        except Exception as error:
            self._calls.append(Call(function.__name__, arguments, error=error))
            raise
        self._calls.append(Call(function.__name__, arguments, result))
        return result

    @functools.wraps(function)
    async def call_async(self: _Functions, **arguments: object) -> object:
        try:
            result = await function(**arguments)
        except Exception as error:
            self._calls.append(Call(function.__name__, arguments, error=error))
            raise
        self._calls.append(Call(function.__name__, arguments, result))
        return result

    method = call_async if inspect.iscoroutinefunction(function) else call
    signature = inspect.signature(function)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(method)["__signature__"] = signature.replace(parameters=[first, *signature.parameters.values()])
    return method
