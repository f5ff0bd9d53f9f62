"""Agents that own their loop, behind the interface of an environment: a function, a program, or a service.

Rule: an agent never runs on the event loop, so it may block as it likes; what runs here has a thread of its own. What
goes wrong in it is ``EnvironmentFailed`` with the phase ``agent``; one that ends without a reward has none, never 0.
The turns that it asks for come from elsewhere: here is only how it begins, ends, and is judged.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from gspo_core.env.acp_run import AcpStart, acp_run
from gspo_core.env.agent_runs import AgentFailed, AgentRun, CommandRun, FunctionRun, remove, without_key
from gspo_core.env.agent_urls import AgentService, UrlRun
from gspo_core.env.calls import DeadlineExceeded, MemberCaller, raised_at
from gspo_core.env.plain import reward_range_of
from gspo_core.env.session import as_reward
from gspo_core.env.tasks import EnvironmentTasks, read_tasks
from gspo_core.env.tools import error_text
from gspo_core.environment_contract import (
    NO_REWARD,
    Context,
    EnvironmentFailed,
    InvalidEnvironment,
    Llm,
    Observation,
    PhaseLimits,
    Start,
    Timeouts,
    description,
)
from gspo_core.environment_records import EnvironmentDescription
from gspo_core.evidence import RESULT, TASK, gathered, with_texts
from gspo_core.json_value import JSON
from gspo_core.messages import ParsedTurn, ToolSchema
from gspo_core.types import NOTHING, Evidence, Split


@dataclass(frozen=True, slots=True)
class AgentStart:
    """How the agent of a job is started, as its specification says. With nothing: a function."""

    url: str | None = None
    command: Sequence[str] | None = None
    pull: bool = False
    """It is not: it fetches the episode by itself."""
    reward: str | None = None
    """The function that judges its episodes, where one is named."""
    judge: Mapping[str, JSON] | None = None
    """The model that does, as a job has it. Nothing here asks it."""
    rewards: str | None = None
    """Where the job says that rewards come from."""
    acp: AcpStart | None = None
    """How the program is spoken to, where it speaks the Agent Client Protocol."""

    @classmethod
    def from_json(cls, given: Mapping[str, JSON]) -> AgentStart:
        url, command = given.get("url"), given.get("command")
        words = [str(word) for word in command] if isinstance(command, list | tuple) else None
        reward = given.get("reward")
        place, named = str(url) if url is not None else None, str(reward) if reward is not None else None
        judge, rewards, acp = given.get("judge"), given.get("rewards"), given.get("acp")
        return cls(
            place,
            words,
            given.get("pull") is True,
            named,
            judge if isinstance(judge, dict) else None,
            str(rewards) if rewards is not None else None,
            AcpStart.from_json(acp) if isinstance(acp, Mapping) else None,
        )

    @property
    def is_function(self) -> bool:
        return self.url is None and self.command is None and not self.pull


class AgentEnvironment:
    """``found`` is what the reference names: the function itself, or what holds the tasks of a program or service."""

    has_snapshot = False
    is_async = False
    tools: Sequence[ToolSchema] = ()

    def __init__(
        self,
        found: object,
        module: ModuleType,
        config: Mapping[str, JSON],
        start: AgentStart,
        *,
        name: str,
        reward: object = None,
    ) -> None:
        """``reward``: what ``start.reward`` names."""
        self.name = name
        if reward is not None and not inspect.isroutine(reward):
            raise InvalidEnvironment(f"{start.reward} is a {type(reward).__name__}; agent.reward names a function")
        self._reward: Any = reward
        self.start = start
        self.service = None if start.url is None else AgentService(start.url)
        self.found, self.config = found, dict(config)
        is_played_by_run = start.is_function and callable(getattr(found, "run", None))
        if is_played_by_run:
            self._become_run()
        self.is_function = start.is_function or (start.pull and inspect.isroutine(found))
        self.home: object = module if self.is_function and not is_played_by_run else self.found
        """What may have ``tasks``, ``get_reward``, ``limits``, ``replayable``, ``reward_range`` and ``hosting``."""
        file = getattr(module, "__file__", None)
        self.folder = Path(file).parent if file else Path.cwd()
        self._check()
        self._tasks = {split: self._read_tasks(split) for split in Split}
        if self.is_function:
            self.config = {key: value for key, value in self.config.items() if key not in ("tasks", "eval_tasks")}
        if start.is_function:
            self.function: Any = self.found.run if is_played_by_run else self.found  # type: ignore[attr-defined]
            _check_function(self.function, self.config, name)
        if not self.num_tasks(Split.TRAIN):
            raise InvalidEnvironment(f"{name}: an agent needs tasks; {self._where_tasks_are()}")
        self.limits: Mapping[str, JSON] = dict(getattr(self.home, "limits", {}))
        self.replayable = bool(getattr(self.home, "replayable", False))
        self.reward_range = reward_range_of(self.home, name)
        self.has_judge = start.rewards != "returned" and (
            reward is not None or callable(getattr(self.home, "get_reward", None))
        )
        if start.rewards == "judge" and not self.has_judge and start.judge is None:
            raise InvalidEnvironment(f"{name} has no get_reward, and agent.rewards says that a judge gives the reward")

    def num_tasks(self, split: Split) -> int:
        return len(self._tasks[split])

    async def task(self, split: Split, index: int) -> Mapping[str, JSON]:
        return await self._tasks[split].get(index)

    def session(self, *, limits: PhaseLimits | None = None, episode_id: str = "") -> LocalAgentSession:
        return LocalAgentSession(self, limits or Timeouts(), episode_id)

    def describe(self) -> EnvironmentDescription:
        return description(self)

    def judge(self) -> Callable[..., object]:
        """The job's function, else ``get_reward`` of the home; of a fresh instance where that is a class."""
        if self._reward is not None:
            judge: Callable[..., object] = self._reward
            return judge
        home: Any = self.home(**self.config) if inspect.isclass(self.home) else self.home
        member: Callable[..., object] = home.get_reward
        return member

    def _become_run(self) -> None:
        """One instance, made with ``config``, plays all episodes of a process: what it loads is loaded once."""
        if not inspect.isclass(self.found):
            return
        try:
            inspect.signature(self.found).bind(**self.config)
        except TypeError as error:
            raise InvalidEnvironment(
                f"{self.name}: the config {sorted(self.config)} does not fit its __init__: {error}"
            ) from None
        try:
            self.found = self.found(**self.config)
        except InvalidEnvironment:
            raise
        except ModuleNotFoundError as error:
            raise InvalidEnvironment(f"{self.name} needs the module {error.name!r}, which is not installed") from error
        except Exception as error:
            raise InvalidEnvironment(f"{self.name} cannot be made: {_named(error)}") from error
        self.config = {}

    def _check(self) -> None:
        if self.is_function:
            return
        if self.config and not inspect.isclass(self.found):
            raise InvalidEnvironment(
                f"{self.name} is no class and takes no config, but was given {sorted(self.config)}"
            )
        if inspect.isroutine(self.found):
            raise InvalidEnvironment(
                f"{self.name} is a function; with agent.url or agent.command, name a class or an object with tasks"
            )

    def _read_tasks(self, split: Split) -> EnvironmentTasks:
        holder = self.home
        if self.is_function and "tasks" in self.config:
            holder = SimpleNamespace(**{key: self.config.get(key) for key in ("tasks", "eval_tasks")})
        try:
            if inspect.isclass(holder):
                holder = holder(**self.config)
            return read_tasks(self.name, split, holder) or EnvironmentTasks(self.name, split)
        except InvalidEnvironment:
            raise
        except Exception as error:  # the author's code: an __init__, or a property that reads files
            raise InvalidEnvironment(f"{self.name}: its tasks cannot be read: {_named(error)}") from error

    def _where_tasks_are(self) -> str:
        beside = "define tasks (a list of dicts) beside the function, or give config.tasks"
        return beside if self.is_function else "give it tasks, a list of dicts"


def _check_function(found: object, config: Mapping[str, JSON], name: str) -> None:
    if not inspect.isroutine(found):
        raise InvalidEnvironment(
            f"{name} is a {type(found).__name__}; an agent is a function run(task, llm), a class with such a method, "
            "or has agent.url, agent.command or agent.pull"
        )
    signature = inspect.signature(found)
    context = {"ctx": None} if "ctx" in signature.parameters else {}
    try:
        signature.bind({}, None, **config, **context)
    except TypeError as error:
        raise InvalidEnvironment(
            f"{name} cannot be called as run(task, llm{''.join(f', {key}=…' for key in sorted(config))}): {error}"
        ) from None


async def _awaited(answer: Awaitable[object]) -> object:
    return await answer


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class LocalAgentSession:
    """One episode of an agent. ``offer``, ``start``, ``ended``, ``score``, ``close``, in this order."""

    def __init__(self, environment: AgentEnvironment, limits: PhaseLimits, episode_id: str) -> None:
        self._environment = environment
        self._limits = limits
        self._context = Context(episode_id, 0, {})
        self._caller, self._judging = MemberCaller(environment.name), MemberCaller(environment.name)
        self._llm: Llm | None = None
        self._run: AgentRun | UrlRun | None = None
        self._running: asyncio.Task[object] | None = None
        self._scratch: Path | None = None
        self.close_failure: str | None = None
        self.evidence: Evidence = NOTHING
        self._evidence_bytes = 0

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._context.metrics

    @property
    def is_stuck(self) -> bool:
        """Its agent still runs; before ``close`` that is as it should be."""
        return self._judging.is_busy or (self.close_failure is not None and self._caller.is_busy)

    def offer(self, llm: Llm) -> None:
        """Where the agent will ask for its turns."""
        self._llm = llm

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start:
        """The agent runs when this returns. What it says is in no message here."""
        if self._llm is None or self._running is not None:
            raise RuntimeError("an agent is started once, and after it was offered a policy")
        self._context.task, self._context.seed = task, seed
        if self._environment.start.pull:
            return Start((), ())
        try:
            self._run = self._make_run(task, self._llm)
        except AgentFailed as error:
            self._fail(error)
        run = self._run
        playing = run.run() if isinstance(run, UrlRun) else self._caller.call(run.run, math.inf)
        self._running = asyncio.create_task(playing)
        self._running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Start((), ())

    async def handed_out(self) -> str:
        """The task as JSON, for an agent that fetches it. Raises ``EnvironmentFailed``."""
        try:
            return json.dumps(dict(self._context.task), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailed("task", f"an agent cannot be told this task, which is no JSON: {error}") from error

    async def ended(self) -> None:
        """Waits for the agent, however long. Raises ``EnvironmentFailed`` if it failed."""
        if self._running is None:
            raise RuntimeError("the agent was not started")
        try:
            await asyncio.shield(self._running)
        except Exception as error:
            self._fail(error)

    def keep_evidence(self, most_bytes: int) -> None:
        self._evidence_bytes = most_bytes

    async def score(self) -> tuple[float, dict[str, float]]:
        """By ``get_reward`` where there is one, else what the agent returned. Raises ``EnvironmentFailed``."""
        result = None
        if self._running is not None and self._running.done():
            await self.ended()
            result = self._running.result()
            result = self._without_keys(result) if isinstance(result, str) else result
        if self._evidence_bytes:
            known = [(TASK, dict(self._context.task)), (RESULT, result)]
            found = gathered(known, self._evidence_bytes)
            told = {name: with_texts(text, self._without_keys) for name, text in found.told.items()}
            self.evidence = Evidence(told, found.left_out)
        if self._environment.has_judge:
            result = await self._judged(result)
        elif self._environment.start.url is not None:
            result = result.get("reward") if isinstance(result, Mapping) else None
        elif not self._environment.start.is_function:
            result = None
        if result is None:
            raise EnvironmentFailed("score", NO_REWARD)
        return as_reward(result, "get_reward()" if self._environment.has_judge else "the agent's reward")

    async def act(self, turn: ParsedTurn) -> Observation:
        raise RuntimeError("an agent acts by itself")

    async def snapshot(self) -> bytes | None:
        return None

    async def restore(self, task: Mapping[str, JSON], seed: int, state: bytes) -> None:
        raise RuntimeError("an agent cannot be restored; it is started again")

    async def close(self) -> None:
        if self._running is not None and not self._running.done():
            assert self._run is not None
            self._run.cancel()
            await asyncio.wait({self._running}, timeout=self._limits.close_timeout_s)
            if not self._running.done():
                self.close_failure = f"the agent did not stop within {self._limits.close_timeout_s:g}s"
        self._caller.close()
        self._judging.close()
        if self._scratch is not None:
            remove(self._scratch)

    def _make_run(self, task: Mapping[str, JSON], llm: Llm) -> AgentRun | UrlRun:
        environment = self._environment
        start = environment.start
        if environment.service is not None:
            return UrlRun(environment.service, task, llm, patience_s=self._limits.reset_timeout_s)
        if start.command is not None and start.acp is not None:
            folders = environment.folder, self._folder()
            return acp_run(start.command, start.acp, task, llm, *folders, limits=self._limits)
        if start.command is not None:
            return CommandRun(start.command, task, llm, folder=environment.folder, scratch=self._folder())
        function = environment.function
        context = {"ctx": self._context} if "ctx" in inspect.signature(function).parameters else {}
        return FunctionRun(function, task, llm, **environment.config, **context)

    def _folder(self) -> Path:
        """Made when it is needed: few agents write files."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="agent-"))
        return self._scratch

    async def _judged(self, result: object) -> object:
        timeout_s = self._limits.score_timeout_s
        self._context.deadline_s = timeout_s
        offered = {"task": self._context.task, "result": result, "ctx": self._context}

        def judge() -> object:
            member = self._environment.judge()
            names = inspect.signature(member).parameters
            if "folder" in names and self._running is not None:
                offered["folder"] = self._folder()
            judged = member(**{name: value for name, value in offered.items() if name in names})
            return asyncio.run(_awaited(judged)) if inspect.isawaitable(judged) else judged

        try:
            return await self._judging.call(judge, timeout_s)
        except DeadlineExceeded as error:
            raise EnvironmentFailed("score", str(error)) from None
        except Exception as error:
            raise EnvironmentFailed("score", f"{error_text(error)}{raised_at(error)}") from error

    def _without_keys(self, text: str) -> str:
        """What is kept of an episode, or judged."""
        for secret in (self._llm.api_key, self._llm.reward_key) if self._llm is not None else ():
            text = without_key(text, secret)
        return text

    def _fail(self, error: Exception) -> NoReturn:
        told = str(error) if isinstance(error, AgentFailed) else f"{_named(error)}{raised_at(error)}"
        text = self._without_keys(told)
        text = text.encode("utf-8", "replace").decode()  # a program may write half of a surrogate pair as JSON
        raise EnvironmentFailed("agent", text) from None
