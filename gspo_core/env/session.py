"""One episode on one instance of a user's class.

Rule: the author's code can only talk to the policy (text), end the episode (``done``), judge it, or fail; it cannot
stop the loop, another session, or the worker.
"""

from __future__ import annotations

import inspect
import json
import math
import struct
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, Protocol, TypeAlias, TypeVar

from gspo_core.env.calls import DeadlineExceeded, MemberCaller
from gspo_core.env.dialect import EnvironmentDialect
from gspo_core.env.prompt import first_messages
from gspo_core.env.tools import ArgumentError, Tool, error_text
from gspo_core.environment_contract import (
    BeyondBounds,
    Context,
    EnvironmentFailed,
    Observation,
    Phase,
    PhaseLimits,
    Start,
    check_all,
    check_size,
)
from gspo_core.evidence import MESSAGES, TASK, gathered, state_of
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, Content, Message, ParsedTurn, ToolCall, ToolSchema
from gspo_core.types import NOTHING, Evidence, StopReason

T = TypeVar("T")
Keyword: TypeAlias = object
"""A member's keyword argument: read from JSON as its hint says, or a ``Context``."""

_LENGTH = struct.Struct("<I")
"""Length of the part of a snapshot before the author's state."""


class SessionHome(Protocol):
    """The part of an environment that a session needs; ``PlainEnvironment`` is one."""

    name: str
    dialect: EnvironmentDialect
    cls: type
    system_prompt: str | None
    tools_by_name: dict[str, Tool]
    reward_range: tuple[float, float] | None
    has_snapshot: bool

    @property
    def tools(self) -> Sequence[ToolSchema]: ...

    def make(self) -> Any: ...


class PlainSession:
    """One episode on one instance of a user's class."""

    def __init__(self, environment: SessionHome, limits: PhaseLimits, episode_id: str) -> None:
        self._environment = environment
        self._limits = limits
        self._context = Context(episode_id, 0, {})
        self._caller = MemberCaller(environment.name)
        self._instance: Any = None
        self._num_calls = 0
        self._lost = False
        """A member is still running although its time is over: the instance must not be touched again."""
        self._closed = False
        self.close_failure: str | None = None
        self.evidence: Evidence = NOTHING
        self._evidence_bytes = 0

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._context.metrics

    @property
    def is_stuck(self) -> bool:
        return self._lost or self._caller.is_busy

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start:
        if self._instance is not None:
            raise RuntimeError("a session can only be started once")
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
        context = self._context
        context.messages.append(_said(turn))
        context.turn_reward, context.is_in_turn = None, True
        try:
            observation = await (self._answer_all(turn.calls) if turn.calls else self._reply(turn.text))
        finally:
            context.is_in_turn = False
        context.messages.extend(observation.messages)
        return replace(observation, reward=context.turn_reward)

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

    def keep_evidence(self, most_bytes: int) -> None:
        self._evidence_bytes = most_bytes

    def _look(self) -> None:
        """Before the reward is computed, which may change the instance."""
        if not self._evidence_bytes or self._instance is None:
            return
        chosen = getattr(self._environment.cls, "end_state", None)
        values = [(TASK, dict(self._context.task)), *state_of(self._instance, chosen)]
        if self._reads_messages:
            values.append((MESSAGES, list(self._context.messages)))
        self.evidence = gathered(values, self._evidence_bytes)

    @property
    def _reads_messages(self) -> bool:
        judge = getattr(self._instance, "get_reward", None)
        return judge is None or "ctx" in inspect.signature(judge).parameters

    async def score(self) -> tuple[float, dict[str, float]]:
        if self._lost:  # the policy broke it, so it does not escape its reward
            low = self._environment.reward_range[0] if self._environment.reward_range else 0.0
            return low, {}
        self._look()
        timeout_s = self._limits.score_timeout_s
        return as_reward(await self._or_fail("score", timeout_s, self._call_member("get_reward", timeout_s)))

    async def snapshot(self) -> bytes | None:
        if not self._environment.has_snapshot or self._lost or self._instance is None:
            return None
        timeout_s = self._limits.step_timeout_s
        state = await self._or_fail("snapshot", timeout_s, self._call_member("snapshot", timeout_s))
        if state is None:  # there is none of this turn, e.g. because it would be too large
            return None
        if not isinstance(state, bytes):
            raise EnvironmentFailed("snapshot", f"snapshot() must return bytes, not {type(state).__name__}")
        context = self._context
        around = json.dumps(
            {"metrics": context.metrics, "calls": self._num_calls, "messages": context.messages}
        ).encode()
        return _LENGTH.pack(len(around)) + around + state

    async def restore(self, task: Mapping[str, JSON], seed: int, state: bytes) -> None:
        if self._instance is not None:
            raise RuntimeError("a session can only be started once")
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
        # A lost instance may hang for ever, so do not wait for it.
        timeout_s = 0.0 if self._lost else self._limits.close_timeout_s
        if inspect.iscoroutinefunction(close):
            await self._call_member("close", timeout_s)
        else:
            await self._caller.call(self._close_in_thread, timeout_s)

    def _close_in_thread(self) -> object:
        """Runs behind whatever is still running there: an overrunning tool, or a start that was cancelled half-way."""
        return self._instance.close() if self._instance is not None else None

    def _make_in_thread(self) -> None:
        self._instance = self._environment.make()

    async def _reset(self, task: Mapping[str, JSON], seed: int, timeout_s: float) -> object:
        await self._make(self._environment.cls.reset, timeout_s)  # type: ignore[attr-defined]
        arguments = _accepted(self._instance.reset, {"seed": seed, **task}, keep_seed="seed" in task)
        return await self._call_member("reset", timeout_s, **arguments)

    async def _make(self, first_member: FunctionType, timeout_s: float) -> None:
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

    async def _answer(self, call: ToolCall) -> Content:
        """The text that answers one attempt, successful or not."""
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

    async def _call_member(
        self, name: str, timeout_s: float, /, *arguments: str | bytes, **keywords: Keyword
    ) -> object:
        member = getattr(self._instance, name)
        self._context.deadline_s = timeout_s
        if "ctx" in inspect.signature(member).parameters:
            keywords["ctx"] = self._context
        return await self._caller.call(member, timeout_s, *arguments, **keywords)

    async def _or_fail(self, phase: Phase, timeout_s: float, awaitable: Awaitable[T]) -> T:
        try:
            return await awaitable
        except DeadlineExceeded as error:
            self._lost = error.lost
            raise EnvironmentFailed(phase, f"timed out after {timeout_s:g}s") from None
        except Exception as error:
            raise EnvironmentFailed(phase, error_text(error)) from error


def _said(turn: ParsedTurn) -> Message:
    """The policy's turn as reward functions read it."""
    message: Message = {"role": "assistant", "content": turn.text}
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls
        ]
    return message


def _accepted(function: FunctionType, given: Mapping[str, JSON], *, keep_seed: bool) -> dict[str, JSON]:
    """The arguments that fit the signature: all if it has ``**kwargs`` (then the seed only if the task brings one)."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {name: value for name, value in given.items() if name != "seed" or keep_seed or name in parameters}
    return {name: value for name, value in given.items() if name in parameters}


def as_reward(value: object, whose: str = "get_reward()") -> tuple[float, dict[str, float]]:
    """The result of ``get_reward`` as a sum and its named parts. Raises ``EnvironmentFailed``."""
    parts = dict(value) if isinstance(value, Mapping) else {}
    numbers = {str(name): _number(name, part) for name, part in parts.items()}
    if isinstance(value, Mapping) and not numbers:
        raise EnvironmentFailed("score", f"{whose} is an empty dict")
    try:
        check_all(numbers)
    except BeyondBounds as error:
        raise EnvironmentFailed("score", f"{whose}: {error}") from None
    return (math.fsum(numbers.values()) if numbers else _number(whose, value)), numbers


def _number(name: str, value: object) -> float:
    """A finite reward. NaN, None and text are failures of the environment, never a reward of 0."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise EnvironmentFailed("score", f"{name} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise EnvironmentFailed("score", f"{name} is {number}, not a finite number")
    try:
        check_size(name, number)
    except BeyondBounds as error:
        raise EnvironmentFailed("score", str(error)) from None
    return number
