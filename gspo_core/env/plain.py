"""A plain class as an environment: public methods are tools, ``reset(**task)`` starts, ``get_reward()`` judges.

Rule: the author's code can only talk to the policy (text), end the episode (``done``), judge it, or fail; it cannot
stop the loop, another session, or the worker. One instance per episode; no base class, decorator or registry.
The members and their meaning are described in ``environments/README.md``.
"""

from __future__ import annotations

import inspect
import json
import math
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from gspo_core.env.calls import Caller, DeadlineExceeded
from gspo_core.env.contract import (
    Context,
    EnvironmentFailed,
    InvalidEnvironment,
    Observation,
    PhaseLimits,
    Start,
    Timeouts,
    description,
)
from gspo_core.env.dialect import Dialect
from gspo_core.env.prompt import docstring_prompt, first_messages
from gspo_core.env.tools import ArgumentError, Tool, error_text
from gspo_core.messages import CallStatus, Message, ParsedTurn, ToolCall, ToolSchema
from gspo_core.types import Split, StopReason

RESERVED_NAMES = frozenset(
    {
        *("tasks", "num_tasks", "eval_tasks", "num_eval_tasks", "reset", "get_reward", "done", "close", "limits"),
        *("snapshot", "restore", "on_message", "replayable", "reward_range"),
    }
)
"""Never tools, like every name that begins with an underscore."""

_TASK_MEMBERS = {Split.TRAIN: ("tasks", "num_tasks"), Split.EVAL: ("eval_tasks", "num_eval_tasks")}
OURS = Dialect()
_LENGTH = struct.Struct("<I")
"""Of what a snapshot holds besides the author's state."""


class PlainEnvironment:
    """A user's class (or a function that makes instances of one) behind the ``Environment`` interface."""

    def __init__(
        self,
        factory: Callable[..., Any],
        config: Mapping[str, Any],
        *,
        name: str,
        use_docstring: bool = True,
        dialect: Dialect = OURS,
        judged_elsewhere: bool = False,
    ) -> None:
        """``judged_elsewhere``: the class needs no ``get_reward``, because whoever uses it knows the reward."""
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
        self.limits: Mapping[str, Any] = dict(getattr(self.cls, "limits", {}))
        self.replayable = bool(getattr(self.cls, "replayable", False))
        self.reward_range = _reward_range(self.cls)
        self.has_snapshot = callable(getattr(self.cls, "snapshot", None))
        self._tasks = {split: self._find_tasks(split) for split in Split}
        if self.num_tasks(Split.TRAIN) < 1:
            raise InvalidEnvironment(f"{name}: tasks is empty")

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return [tool.schema for tool in self.tools_by_name.values()]

    def num_tasks(self, split: Split) -> int:
        tasks, count = self._tasks[split]
        return count if callable(tasks) else len(tasks)

    async def task(self, split: Split, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self.num_tasks(split):
            raise EnvironmentFailed(
                "task", f"{self.name} has {self.num_tasks(split)} {split} tasks, not one at {index}"
            )
        tasks, _ = self._tasks[split]
        if not callable(tasks):
            task = tasks[index]
        else:
            caller = Caller(self.name)
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

    def describe(self) -> dict[str, Any]:
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
            raise InvalidEnvironment(f"{self.name}: snapshot() and restore(state) come together, or neither")
        if inspect.isclass(self._factory):
            try:
                inspect.signature(self.cls).bind(**self._config)
            except TypeError as error:
                message = f"{self.name}: the config {sorted(self._config)} does not fit its __init__: {error}"
                raise InvalidEnvironment(message) from None

    def _find_tasks(self, split: Split) -> tuple[Any, int]:
        """A sequence, or a callable and its count. They belong to the class, or to an instance made to hold them."""
        tasks_name, count_name = _TASK_MEMBERS[split]
        static = inspect.getattr_static(self.cls, tasks_name, None)
        on_class = static is not None and not isinstance(static, property) and not inspect.isfunction(static)
        # Held-out tasks alone are no reason to make an instance: who keeps tasks on the class keeps both there.
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
            raise InvalidEnvironment(f"{self.name}: each of {tasks_name} is a dict, not a {type(tasks[0]).__name__}")
        return tasks, 0

    def _make_example(self) -> Any:
        try:
            return self.make()
        except InvalidEnvironment:
            raise
        except Exception as error:
            raise InvalidEnvironment(f"{self.name}: making an instance failed: {error_text(error)}") from error


class PlainSession:
    """One episode on one instance of a user's class."""

    def __init__(self, environment: PlainEnvironment, limits: PhaseLimits, episode_id: str) -> None:
        self._environment = environment
        self._limits = limits
        self._context = Context(episode_id, 0, {})
        self._caller = Caller(environment.name)
        self._instance: Any = None
        self._num_calls = 0
        self._lost = False
        """A member is still running although its time is over: the instance must not be touched again."""
        self._closed = False
        self.close_failure: str | None = None

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._context.metrics

    async def start(self, task: Mapping[str, Any], seed: int) -> Start:
        if self._instance is not None:
            raise RuntimeError("a session starts once")
        self._context.task, self._context.seed = task, seed
        timeout_s = self._limits.reset_timeout_s
        observation = await self._or_fail("reset", timeout_s, self._reset(task, seed, timeout_s))
        try:
            messages = first_messages(task, observation, self._environment.system_prompt)
        except ValueError as error:
            raise EnvironmentFailed("reset", str(error)) from None
        self._context.messages.extend(messages)
        return Start(messages, self._environment.tools)

    async def act(self, turn: ParsedTurn) -> Observation:
        if self._lost or self._instance is None:
            raise RuntimeError("this session cannot act: it has not started, or its instance is lost")
        self._context.messages.append(_said(turn))
        observation = await (self._answer_all(turn.calls) if turn.calls else self._reply(turn.text))
        self._context.messages.extend(observation.messages)
        return observation

    async def _answer_all(self, calls: Sequence[ToolCall]) -> Observation:
        messages: list[Message] = []
        for call in calls:
            content = await self._answer(call)
            messages.append(self._environment.dialect.message(call, self._num_calls, content))
            self._num_calls += 1
            if self._lost:
                return Observation(messages, done=True, stop_reason=StopReason.TOOL_TIMEOUT)
        if await self._is_done():
            return Observation(messages, done=True, stop_reason=StopReason.ENV_DONE)
        return Observation(messages)

    async def score(self) -> tuple[float, dict[str, float]]:
        if self._lost:  # the policy broke it, so it does not escape its reward
            low = self._environment.reward_range[0] if self._environment.reward_range else 0.0
            return low, {}
        timeout_s = self._limits.score_timeout_s
        return as_reward(await self._or_fail("score", timeout_s, self._call_member("get_reward", timeout_s)))

    async def snapshot(self) -> bytes | None:
        if not self._environment.has_snapshot or self._lost or self._instance is None:
            return None
        timeout_s = self._limits.step_timeout_s
        state = await self._or_fail("snapshot", timeout_s, self._call_member("snapshot", timeout_s))
        if not isinstance(state, bytes):
            raise EnvironmentFailed("snapshot", f"snapshot() returns bytes, not {type(state).__name__}")
        context = self._context
        around = json.dumps(
            {"metrics": context.metrics, "calls": self._num_calls, "messages": context.messages}
        ).encode()
        return _LENGTH.pack(len(around)) + around + state

    async def restore(self, task: Mapping[str, Any], seed: int, state: bytes) -> None:
        if self._instance is not None:
            raise RuntimeError("a session starts once")
        end = _LENGTH.size + _LENGTH.unpack_from(state)[0]
        around = json.loads(state[_LENGTH.size : end])
        self._context.task, self._context.seed = task, seed
        self._context.metrics.update(around["metrics"])
        self._context.messages.extend(around["messages"])
        self._num_calls = around["calls"]
        timeout_s = self._limits.reset_timeout_s
        await self._or_fail("restore", timeout_s, self._restore(state[end:], timeout_s))

    async def _restore(self, state: bytes, timeout_s: float) -> None:
        await self._make(self._environment.cls.restore, timeout_s)  # type: ignore[attr-defined]
        await self._call_member("restore", timeout_s, state)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._close_instance()
        except Exception as error:
            self.close_failure = error_text(error)
        finally:
            self._caller.close()

    async def _close_instance(self) -> None:
        close = getattr(self._environment.cls, "close", None)
        if close is None or (self._instance is None and not self._caller.has_thread):
            return
        # A lost instance may hang for ever: nobody waits for it.
        timeout_s = 0.0 if self._lost else self._limits.close_timeout_s
        if inspect.iscoroutinefunction(close):
            await self._call_member("close", timeout_s)
        else:
            await self._caller.call(self._close_in_thread, timeout_s)

    def _close_in_thread(self) -> Any:
        """Runs behind whatever is still running there: an overrunning tool, or a start that was cancelled half-way."""
        return self._instance.close() if self._instance is not None else None

    def _make_in_thread(self) -> None:
        self._instance = self._environment.make()

    async def _reset(self, task: Mapping[str, Any], seed: int, timeout_s: float) -> Any:
        await self._make(self._environment.cls.reset, timeout_s)  # type: ignore[attr-defined]
        arguments = _accepted(self._instance.reset, {"seed": seed, **task}, keep_seed="seed" in task)
        return await self._call_member("reset", timeout_s, **arguments)

    async def _make(self, first_member: Callable[..., Any], timeout_s: float) -> None:
        if inspect.iscoroutinefunction(first_member):
            self._instance = self._environment.make()  # an async class may want the running loop
        else:
            await self._caller.call(self._make_in_thread, timeout_s)

    async def _reply(self, text: str) -> Observation:
        """A turn without a tool call: free text for ``on_message``, else the end."""
        if not hasattr(self._instance, "on_message"):
            return Observation(done=True, stop_reason=StopReason.COMPLETED)
        timeout_s, dialect = self._limits.step_timeout_s, self._environment.dialect
        try:
            reply = await self._call_member("on_message", timeout_s, text)
            if reply is None:
                return Observation(done=True, stop_reason=StopReason.COMPLETED)
            content = dialect.result(reply)
        except DeadlineExceeded as error:
            self._lost = error.lost
            if self._lost:
                return Observation(done=True, stop_reason=StopReason.TOOL_TIMEOUT)
            content = dialect.problem(str(error))
        except Exception as error:  # the policy's text caused it, so it is an answer and no way out of the episode
            content = dialect.failure(error)
        if await self._is_done():
            return Observation(done=True, stop_reason=StopReason.ENV_DONE)
        return Observation([{"role": "user", "content": content}])

    async def _answer(self, call: ToolCall) -> str | list[Any]:
        """What the policy reads in answer to one attempt, whatever became of it."""
        tools, dialect = self._environment.tools_by_name, self._environment.dialect
        if call.status not in (CallStatus.OK, CallStatus.UNKNOWN_TOOL):
            return dialect.unreadable(call.status)
        if call.name not in tools:
            return dialect.unknown_tool(call.name, tools)
        timeout_s = self._limits.step_timeout_s
        try:
            arguments = dialect.bind(tools[call.name], call.arguments)
            return dialect.result(await self._call_member(call.name, timeout_s, **arguments))
        except ArgumentError as error:
            return dialect.problem(str(error))
        except DeadlineExceeded as error:
            self._lost = error.lost
            return dialect.problem(f"{call.name} {error}")
        except Exception as error:
            return dialect.failure(error)

    async def _is_done(self) -> bool:
        static = inspect.getattr_static(self._environment.cls, "done", None)
        if not isinstance(static, property):
            return bool(getattr(self._instance, "done", False))
        timeout_s = self._limits.step_timeout_s
        reading = self._caller.call(getattr, timeout_s, self._instance, "done", False)
        return bool(await self._or_fail("done", timeout_s, reading))

    async def _call_member(self, name: str, timeout_s: float, *arguments: Any, **keywords: Any) -> Any:
        member = getattr(self._instance, name)
        self._context.deadline_s = timeout_s
        if "ctx" in inspect.signature(member).parameters:
            keywords["ctx"] = self._context
        return await self._caller.call(member, timeout_s, *arguments, **keywords)

    async def _or_fail(self, phase: str, timeout_s: float, awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except DeadlineExceeded as error:
            self._lost = error.lost
            raise EnvironmentFailed(phase, str(error)) from None
        except Exception as error:
            raise EnvironmentFailed(phase, error_text(error)) from error


def _said(turn: ParsedTurn) -> Message:
    """The policy's turn as reward functions read it."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls
        ]
    return message


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
        raise InvalidEnvironment(f"{cls.__name__}.reward_range is (low, high), two finite numbers, not {given!r}")
    return low, high


def _accepted(function: Callable[..., Any], given: Mapping[str, Any], *, keep_seed: bool) -> dict[str, Any]:
    """What the signature takes: everything if it has ``**kwargs`` (then the seed only if the task brings one)."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {name: value for name, value in given.items() if name != "seed" or keep_seed or name in parameters}
    return {name: value for name, value in given.items() if name in parameters}


def as_reward(value: Any) -> tuple[float, dict[str, float]]:
    """What ``get_reward`` returned, as a sum and its named parts. Raises ``EnvironmentFailed``."""
    parts = dict(value) if isinstance(value, Mapping) else {}
    numbers = {str(name): _number(name, part) for name, part in parts.items()}
    if isinstance(value, Mapping) and not numbers:
        raise EnvironmentFailed("score", "get_reward returned an empty dict")
    return (math.fsum(numbers.values()) if numbers else _number("get_reward()", value)), numbers


def _number(name: object, value: Any) -> float:
    """A finite reward. NaN, None and text are failures of the environment, never a reward of 0."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise EnvironmentFailed("score", f"{name} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise EnvironmentFailed("score", f"{name} is {number}, not a finite number")
    return number
