"""What all worlds behind a connection have in common: a session is one connection, which one task owns all its life.

Rule: a call that ran past its deadline closes the connection, because a late answer would be taken for that of the next
call; what a tool answers, errors included, is content, and a connection that breaks is never a reward.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from gspo_core.env import CallStatus, EnvironmentFailed, Message, Observation, ParsedTurn, Start, Timeouts, ToolSchema
from gspo_core.environment_contract import Phase, PhaseLimits, description
from gspo_core.environment_records import EnvironmentDescription
from gspo_core.json_value import JSON
from gspo_core.types import Split, StopReason

T = TypeVar("T")
MAX_ERROR_CHARS = 400


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """What one call came back with."""

    content: str
    reward: float | None = None
    done: bool = False


class WorldConnection(Protocol):
    """One episode's line to a world elsewhere."""

    @property
    def is_busy(self) -> bool:
        """A function of its user still runs in a thread here."""
        ...

    async def tools(self) -> Sequence[ToolSchema]: ...

    async def begin(self, task: Mapping[str, JSON], seed: int) -> Sequence[Message]: ...

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> RemoteAnswer: ...

    async def say(self, text: str) -> RemoteAnswer:
        """A turn without a call; ``done`` where words get no answer."""
        ...

    async def score(self, messages: Sequence[Message]) -> tuple[float, dict[str, float]]: ...


Connect = Callable[[], AbstractAsyncContextManager[WorldConnection]]


@dataclass
class RemoteEnvironment:
    """A world that is reached through ``connect``; ``tools`` are asked for once, when it is loaded."""

    name: str
    connect: Connect
    all_tasks: Mapping[Split, Sequence[Mapping[str, JSON]]]
    limits: Mapping[str, JSON] = field(default_factory=dict)
    reward_range: tuple[float, float] | None = None
    replayable: bool = False
    has_snapshot: bool = False
    is_async: bool = True
    tools: Sequence[ToolSchema] = ()

    def __post_init__(self) -> None:
        self.tools = self.tools or _outside_any_loop(self._ask_for_tools)

    async def _ask_for_tools(self) -> Sequence[ToolSchema]:
        async with asyncio.timeout(Timeouts().reset_timeout_s), self.connect() as connection:
            return await connection.tools()

    def num_tasks(self, split: Split) -> int:
        return len(self.all_tasks[split])

    async def task(self, split: Split, index: int) -> Mapping[str, JSON]:
        if not 0 <= index < self.num_tasks(split):
            raise EnvironmentFailed("task", f"{self.name} has {self.num_tasks(split)} {split} tasks, none at {index}")
        return self.all_tasks[split][index]

    def session(self, *, limits: PhaseLimits | None = None, episode_id: str = "") -> RemoteSession:
        return RemoteSession(self, limits or Timeouts())

    def describe(self) -> EnvironmentDescription:
        return description(self)


class RemoteSession:
    """One episode over one connection."""

    def __init__(self, environment: RemoteEnvironment, limits: PhaseLimits) -> None:
        self._environment = environment
        self._limits = limits
        self._jobs: asyncio.Queue[Callable[[WorldConnection], Awaitable[None]] | None]
        self._owner: asyncio.Task[None] | None = None
        self._connection: WorldConnection | None = None
        self._messages: list[Message] = []
        self._num_calls = 0
        self._is_over = False
        self._is_lost = False
        self.metrics: dict[str, float] = {}
        self.close_failure: str | None = None

    @property
    def is_stuck(self) -> bool:
        return self._connection is not None and self._connection.is_busy

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start:
        if self._owner is not None:
            raise RuntimeError("a session can only be started once")
        self._jobs = asyncio.Queue()
        self._owner = asyncio.create_task(self._own())
        messages = await self._phase("reset", self._limits.reset_timeout_s, lambda line: line.begin(task, seed))
        self._messages.extend(messages)
        return Start(messages, self._environment.tools)

    async def act(self, turn: ParsedTurn) -> Observation:
        self._messages.append({"role": "assistant", "content": turn.text})
        if not turn.calls:
            return await self._reply(turn.text)
        answered: list[Message] = []
        reward: float | None = None
        for call in turn.calls:
            try:
                answer = await self._answer(call.name, call.arguments, call.status)
            except TimeoutError:
                self._is_lost = True
                answer = RemoteAnswer(f"error: {call.name} timed out after {self._limits.step_timeout_s:g}s")
            name = f"call_{self._num_calls}"
            answered.append({"role": "tool", "content": answer.content, "name": call.name or "", "tool_call_id": name})
            self._num_calls += 1
            if answer.reward is not None:
                reward = (reward or 0.0) + answer.reward
            self._is_over |= answer.done
            if self._is_over or self._is_lost:
                break
        self._messages.extend(answered)
        if self._is_lost:
            await self.close()
            return Observation(answered, done=True, stop_reason=StopReason.TOOL_TIMEOUT, reward=reward)
        reason = StopReason.ENV_DONE if self._is_over else None
        return Observation(answered, done=self._is_over, stop_reason=reason, reward=reward)

    async def _reply(self, text: str) -> Observation:
        try:
            answer = await self._ask(self._limits.step_timeout_s, "act", lambda line: line.say(text))
        except TimeoutError:
            self._is_lost = True
            await self.close()
            return Observation(done=True, stop_reason=StopReason.TOOL_TIMEOUT)
        if answer.done:
            return Observation(done=True, stop_reason=StopReason.COMPLETED, reward=answer.reward)
        reply: Message = {"role": "user", "content": answer.content}
        self._messages.append(reply)
        return Observation([reply], reward=answer.reward)

    async def score(self) -> tuple[float, dict[str, float]]:
        if self._is_lost:
            return (self._environment.reward_range or (0.0, 0.0))[0], {}
        timeout_s = self._limits.score_timeout_s
        return await self._phase("score", timeout_s, lambda line: line.score(self._messages))

    async def snapshot(self) -> bytes | None:
        return None

    async def restore(self, task: Mapping[str, JSON], seed: int, state: bytes) -> None:
        raise EnvironmentFailed("restore", f"{self._environment.name} gives no snapshots")

    async def close(self) -> None:
        try:
            await self._end()
        except Exception as error:
            self.close_failure = f"{type(error).__name__}: {error}"

    async def _answer(self, name: str | None, arguments: JSON, status: CallStatus) -> RemoteAnswer:
        names = sorted(schema["function"]["name"] for schema in self._environment.tools)
        if status not in (CallStatus.OK, CallStatus.UNKNOWN_TOOL):
            return RemoteAnswer(f"error: {status}")
        if name is None or name not in names:
            return RemoteAnswer(f"error: unknown tool {name!r}; available: {names}")
        if not isinstance(arguments, dict):
            return RemoteAnswer(f"error: {name}: the arguments are an object")
        timeout_s = self._limits.step_timeout_s
        return await self._ask(timeout_s, "act", lambda line: line.call(name, arguments))

    async def _phase(self, phase: Phase, timeout_s: float, job: Callable[[WorldConnection], Awaitable[T]]) -> T:
        try:
            return await self._ask(timeout_s, phase, job)
        except TimeoutError:
            await self.close()
            raise EnvironmentFailed(phase, f"no answer within {timeout_s:g}s") from None

    async def _ask(self, timeout_s: float, phase: Phase, job: Callable[[WorldConnection], Awaitable[T]]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        assert self._owner is not None
        self._jobs.put_nowait(partial(_settle, job, answer))
        async with asyncio.timeout(timeout_s):
            await asyncio.wait((answer, self._owner), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return _result(answer, phase)
        answer.cancel()
        raise EnvironmentFailed(phase, f"the connection is closed: {_reason(self._owner)}")

    async def _own(self) -> None:
        """Opens, uses and closes the connection: libraries tie one to the task in which it began."""
        async with self._environment.connect() as connection:
            self._connection = connection
            while (job := await self._jobs.get()) is not None:
                await job(connection)

    async def _end(self) -> None:
        owner = self._owner
        if owner is None or owner.done():
            return
        self._jobs.put_nowait(None)
        done, _ = await asyncio.wait({owner}, timeout=0 if self._is_lost else self._limits.close_timeout_s)
        if not done:
            owner.cancel()
            await asyncio.wait({owner}, timeout=1.0)
        if owner.done() and not owner.cancelled() and owner.exception() is not None:
            raise owner.exception() or RuntimeError


async def _settle(
    job: Callable[[WorldConnection], Awaitable[T]], answer: asyncio.Future[T], connection: WorldConnection
) -> None:
    try:
        result = await job(connection)
    except Exception as error:
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(result)


def _result(answer: asyncio.Future[T], phase: Phase) -> T:
    try:
        return answer.result()
    except (EnvironmentFailed, TimeoutError):
        raise
    except Exception as error:
        raise EnvironmentFailed(phase, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]) from error


def _reason(owner: asyncio.Task[None]) -> str:
    error = None if owner.cancelled() else owner.exception()
    while isinstance(error, BaseExceptionGroup):  # libraries wrap what went wrong in groups of one
        error = error.exceptions[0]
    if isinstance(error, EnvironmentFailed):
        raise error
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


def _outside_any_loop(question: Callable[[], Awaitable[T]]) -> T:
    """Asked in a thread of its own, which has ended before this returns: loading may happen beside a running loop."""

    async def ask() -> T:
        return await question()

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(ask())).result()
