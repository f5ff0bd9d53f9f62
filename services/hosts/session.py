"""An environment that runs in processes of its own, behind the same interface as one that runs here.

Rule: only the session that acted is blamed. If its own action broke its process, that is its outcome
(``tool_timeout``, ``env_crash``); a session that merely shared the process goes on elsewhere, from its snapshot or by
replay, and notices nothing. Several suspects each go on alone, so that the guilty one is found and no other pays.
An interrupted action is repeated only if the environment declares that harmless (``replayable``): otherwise it may
already have had its effect, and the session is lost.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

from gspo_core.environment_contract import (
    AtCapacity,
    BeyondBounds,
    EnvironmentFailed,
    Llm,
    Observation,
    Phase,
    PhaseLimits,
    Start,
    Timeouts,
    check_all,
    check_size,
)
from gspo_core.json_value import JSON
from gspo_core.messages import Message, ParsedTurn, ToolSchema
from gspo_core.types import NOTHING, Evidence, Split, StopReason
from services.hosts import wire
from services.hosts.pool import Boot, HostPool, Seat
from services.hosts.process import Cause, Death, Died, HostReply
from services.hosts.server import HostOrder, RunningHost

if TYPE_CHECKING:
    from gspo_core.environment_records import EnvironmentDescription

# How often a session may lose its process through no fault of its own before its episode starts again.
MAX_LOSSES = 8
# How long a session that a full world refused waits before it asks again.
REFUSED_S = (0.1, 0.5)
# An agent ends when it ends: its episode has a limit, which is not kept here.
AGENT_BUDGET_S = 30 * 86400.0
# An async member that is cancelled gets so long to clean up (`gspo_core.env.calls`).
_CANCEL_GRACE_S = 1.0


class SessionLost(EnvironmentFailed):
    """The session is gone, and neither its policy nor its environment is known to be the cause: neither is charged."""

    def __init__(self, phase: Phase, reason: str, *, is_suspect: bool = False) -> None:
        super().__init__(phase, reason)
        self.is_suspect = is_suspect
        """This session may be the culprit: its successor is to be watched (``HostedSession.watch``)."""


class HostedTask(dict[str, str | int]):
    """Names a task by its place. The task itself stays in the environment's process, so it may hold anything."""

    def __init__(self, split: Split, index: int) -> None:
        super().__init__(split=str(split), index=index)
        self.place = str(split), index


class HostedEnvironment:
    """``open`` starts its host; ``close`` ends it."""

    def __init__(self, order: HostOrder, pool: HostPool, count: Callable[[str], None]) -> None:
        self.name = order.ref
        self.starts_program = bool(order.agent and order.agent.get("command"))
        """Its agent, which may read all that the process that starts it holds."""
        self.pool = pool
        self._count = count

    @classmethod
    async def open(
        cls, order: HostOrder, count: Callable[[str], None] = lambda name: None, boot: Boot = RunningHost.boot
    ) -> HostedEnvironment:
        """Raises ``InvalidEnvironment``."""
        return cls(order, await HostPool.open(order, count, boot), count)

    async def close(self) -> None:
        await self.pool.close()

    @property
    def capacity(self) -> int:
        """How many sessions may be open at once; more of them wait for a seat."""
        return self.pool.capacity

    @property
    def limits(self) -> Mapping[str, JSON]:
        return self.pool.description.limits

    @property
    def replayable(self) -> bool:
        return self.pool.description.replayable

    @property
    def has_snapshot(self) -> bool:
        return self.pool.description.has_snapshot

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return self.pool.description.reward_range

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return cast(list[ToolSchema], self.pool.description.tools)

    def num_tasks(self, split: Split) -> int:
        return self.pool.description.num_tasks[split]

    async def task(self, split: Split, index: int) -> HostedTask:
        if not 0 <= index < self.num_tasks(split):
            raise EnvironmentFailed(
                "task", f"{self.name} has {self.num_tasks(split)} {split} tasks, none at index {index}"
            )
        return HostedTask(split, index)

    def session(self, *, limits: PhaseLimits | None = None, episode_id: str = "") -> HostedSession:
        kind = HostedAgentSession if self.pool.description.is_agent else HostedSession
        return kind(self, limits or Timeouts(), episode_id, self._count)

    def describe(self) -> EnvironmentDescription:
        return cast("EnvironmentDescription", dict(self.pool.description.describe))


class HostedSession:
    """One episode. Where it runs may change between two of its turns."""

    def __init__(
        self, environment: HostedEnvironment, limits: PhaseLimits, episode_id: str, count: Callable[[str], None]
    ) -> None:
        self._environment = environment
        self._pool = environment.pool
        self._limits = limits
        self._episode_id = episode_id
        self._count = count
        self._seat: Seat | None = None
        self._begin: wire.Arguments = {}
        """The arguments that start it, and start it again."""
        self._first: Sequence[Message] | None = None
        self._history: list[tuple[ParsedTurn, Sequence[Message]]] = []
        """Turns and their answers, for a replay."""
        self._snapshot: str | None = None
        self._is_alone = False
        self._is_broken = False
        """The policy broke it: it cannot act again, and has the lowest reward."""
        self._num_losses = 0
        self._is_suspect = False
        """Its process was killed from outside while it acted: once may be chance."""
        self._is_watched = False
        """It becomes a suspect once it acts; bringing it back is no action of its policy."""
        self._metrics: dict[str, float] = {}
        self.evidence: Evidence = NOTHING
        self._evidence_bytes = 0
        self.held_s = 0.0
        """Seconds spent bringing it back after its process had died; they do not count against the episode."""
        self.close_failure: str | None = None

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    @property
    def is_stuck(self) -> bool:
        """Never: a hanging process is killed."""
        return False

    def watch(self) -> None:
        """An earlier session of the same episode was a suspect: this one sits alone, and a second kill is its fault."""
        self._is_alone = self._is_watched = True

    async def admit(self) -> None:
        """Waits until there is room. ``start`` does so too; a caller that measures time calls this first."""
        if self._seat is None:
            self._seat = await self._pool.seat(alone=self._is_alone)

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start:
        if self._first is not None:
            raise RuntimeError("a session can only be started once")
        self._prepare(task, seed)
        while True:
            try:
                start = await self._start()
            except Died as died:
                self._leave()
                if self._is_guilty(died.death):
                    raise EnvironmentFailed("reset", str(died.death)) from died
                self._lose(died.death)
            except AtCapacity as full:
                self._count("host/at_capacity")
                self._pool.limit_to(full.most)
                await self.close()
                await asyncio.sleep(random.uniform(*REFUSED_S))
            else:
                self._first = start.messages
                return start

    async def act(self, turn: ParsedTurn) -> Observation:
        if self._is_broken or self._first is None:
            raise RuntimeError("this session cannot act: it has not started, or its policy broke it")
        self._is_suspect, self._is_watched = self._is_suspect or self._is_watched, False
        while True:
            may_have_acted = False
            try:
                await self._be_seated()
                may_have_acted = True
                observation = await self._act(turn)
            except Died as died:
                self._leave()
                if self._is_guilty(died.death):
                    return self._broken(died.death, turn)
                self._lose(died.death)
                if may_have_acted and died.was_begun and not self._environment.replayable:
                    me = self._died_as in died.death.suspects
                    raise SessionLost("host", f"it is unknown whether it acted: {died.death}", is_suspect=me) from died
            else:
                self._is_suspect = False
                if self._environment.replayable:
                    self._history.append((turn, observation.messages))
                return observation

    def keep_evidence(self, most_bytes: int) -> None:
        self._evidence_bytes = most_bytes

    async def score(self) -> tuple[float, dict[str, float]]:
        if self._is_broken:
            return (self._environment.reward_range or (0.0, 0.0))[0], {}
        while True:
            try:
                await self._be_seated()
                reply = await self._call("score", self._limits.score_timeout_s, self._judging)
            except Died as died:
                self._leave()
                if self._is_guilty(died.death):
                    raise EnvironmentFailed("score", str(died.death)) from died
                self._lose(died.death)
            else:
                return self._scored(reply)

    @property
    def _judging(self) -> wire.Arguments:
        return {"evidence_bytes": self._evidence_bytes} if self._evidence_bytes else {}

    def _scored(self, reply: HostReply) -> tuple[float, dict[str, float]]:
        self.evidence = NOTHING if reply.evidence is None else Evidence(*reply.evidence)
        reward, parts = wire.score_from_json(reply.result)
        _check("score", {**parts}, reward)
        return reward, parts

    async def snapshot(self) -> bytes | None:
        return base64.b64decode(self._snapshot) if self._snapshot is not None and not self._is_broken else None

    async def restore(self, task: Mapping[str, JSON], seed: int, state: bytes) -> None:
        if self._first is not None:
            raise RuntimeError("a session can only be started once")
        self._prepare(task, seed)
        self._snapshot = base64.b64encode(state).decode()
        self._first = ()
        try:
            await self._bring_back()
        except Died as died:
            self._leave()
            raise SessionLost("restore", str(died.death)) from died

    async def close(self) -> None:
        seat = self._seat
        if seat is None:
            return
        try:
            budget_s = self._limits.close_timeout_s + _CANCEL_GRACE_S
            reply = await seat.process.call(seat.session, "close", budget_s, {})
            seat.process.is_retired |= reply.hung  # its neighbours play on, but it gets no new sessions
            self.close_failure = reply.result if isinstance(reply.result, str) else None
        except Died as died:  # a dead process closes its sessions too; only a hang of this one is a failure
            if died.death.cause is Cause.HUNG and seat.session in died.death.suspects:
                self.close_failure = str(died.death)
        finally:
            self._leave()

    # one request

    @property
    def _step_s(self) -> float:
        """What one member of a turn may take until it is given up inside."""
        return self._limits.step_timeout_s + _CANCEL_GRACE_S

    @property
    def _snapshot_s(self) -> float:
        """What an answer may take longer because the state behind it is kept."""
        return self._step_s if self._environment.has_snapshot else 0.0

    def _prepare(self, task: Mapping[str, JSON], seed: int) -> None:
        limits = self._limits
        phases = limits.reset_timeout_s, limits.step_timeout_s, limits.score_timeout_s, limits.close_timeout_s
        self._begin = {"seed": seed, "limits": phases, "episode": self._episode_id}
        if isinstance(task, HostedTask):
            self._begin["task_at"] = task.place
        else:
            self._begin["task"] = dict(task)

    async def _start(self) -> Start:
        await self.admit()
        budget_s = self._limits.reset_timeout_s * 2 + self._snapshot_s
        reply = await self._call("start", budget_s, self._begin)
        self._snapshot = reply.snapshot
        return wire.start_from_json(reply.result)

    async def _act(self, turn: ParsedTurn) -> Observation:
        budget_s = max(1, len(turn.calls)) * self._step_s + self._snapshot_s
        reply = await self._call("act", budget_s, {"turn": wire.turn_to_json(turn)})
        self._snapshot = reply.snapshot  # one from an earlier turn would bring back another world
        observation = wire.observation_from_json(reply.result)
        _check("act", {}, observation.reward)
        if observation.stop_reason is StopReason.TOOL_TIMEOUT:
            self._is_broken = True
            self._count("host/broken_by_policy")
        return observation

    async def _call(self, operation: str, budget_s: float, arguments: wire.Arguments) -> HostReply:
        seat = self._seat
        assert seat is not None
        reply = await seat.process.call(seat.session, operation, budget_s, arguments)
        self._metrics = reply.metrics if reply.metrics is not None else self._metrics
        if reply.hung:  # it still runs in there, perhaps for ever
            seat.process.condemn(Death(Cause.HUNG, frozenset({seat.session})))
            self._leave()
        if reply.failed is not None:
            phase, reason = reply.failed
            raise AtCapacity(int(reason)) if phase == "capacity" else EnvironmentFailed(cast(Phase, phase), reason)
        _check("host", self._metrics)
        return reply

    # when its process is gone

    def _is_guilty(self, death: Death) -> bool:
        """Whether it was certainly this one. It has left the seat that died with ``death``."""
        me = self._died_as in death.suspects
        if death.cause is Cause.OVER_MEMORY and not self._sat_alone and (self._may_go_on or self._first is None):
            self._is_alone |= me  # all sessions there filled the memory; this one merely acted when it was full
            return False
        if death.cause is Cause.KILLED:
            known, self._is_suspect = self._is_suspect and len(death.suspects) == 1, me
            self._is_alone |= me
            return me and known
        self._is_alone |= me
        return me and len(death.suspects) == 1

    def _broken(self, death: Death, turn: ParsedTurn) -> Observation:
        self._is_broken = True
        self._count("host/broken_by_policy")
        hung = death.cause is Cause.HUNG
        text = "error: timed out" if hung else "error: the environment's process ended"
        names = [call.name or "" for call in turn.calls] or [""]
        messages: list[Message] = [{"role": "tool", "content": text, "name": names[-1], "tool_call_id": "call_last"}]
        reason = StopReason.TOOL_TIMEOUT if hung else StopReason.ENV_CRASH
        return Observation(messages if turn.calls else (), done=True, stop_reason=reason)

    def _lose(self, death: Death) -> None:
        self._num_losses += 1
        self._count("host/sessions_lost")
        if self._num_losses > MAX_LOSSES:
            raise SessionLost("host", f"lost {self._num_losses} times; last: {death}")

    def _leave(self) -> None:
        seat, self._seat = self._seat, None
        if seat is not None:
            self._died_as, self._sat_alone = seat.session, seat.is_alone
            self._pool.leave(seat)

    _died_as = -1
    _sat_alone = False

    @property
    def _may_go_on(self) -> bool:
        return self._snapshot is not None or self._environment.replayable

    async def _be_seated(self) -> None:
        if self._seat is not None and self._seat.process.death is None:
            return
        lost = self._seat.process.death if self._seat is not None else None
        self._leave()
        if not self._may_go_on:
            raise SessionLost("host", str(lost or "the session lost its process"))
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            await self._bring_back()
        finally:
            self.held_s += clock() - began

    async def _bring_back(self) -> None:
        await self.admit()
        if self._snapshot is not None:
            arguments: wire.Arguments = {**self._begin, "state": self._snapshot}
            await self._call("restore", self._limits.reset_timeout_s * 2, arguments)
        else:
            await self._replay()
        self._count("host/sessions_restored")

    async def _replay(self) -> None:
        start = await self._start()
        if list(start.messages) != list(self._first or ()):
            self._differs()
        for turn, messages in self._history:
            if list((await self._act(turn)).messages) != list(messages):
                self._differs()

    def _differs(self) -> NoReturn:
        self._count("host/replay_differed")
        raise SessionLost("replay", f"{self._environment.name} is declared replayable, but answers differently")


class HostedAgentSession(HostedSession):
    """An episode that an agent plays in a host. An agent whose process died is gone: nothing brings it back."""

    _llm: Llm | None = None

    def offer(self, llm: Llm) -> None:
        """Before ``start``: where the agent asks for its turns."""
        self._llm = llm

    async def handed_out(self) -> str:
        """The task as JSON, for an agent that fetches it. Raises ``EnvironmentFailed``."""
        return cast(str, (await self._ask("handed_out", self._limits.reset_timeout_s, "task")).result)

    async def ended(self) -> None:
        """Waits for the agent, however long. Raises ``EnvironmentFailed``."""
        self._is_suspect, self._is_watched = self._is_suspect or self._is_watched, False
        await self._ask("ended", AGENT_BUDGET_S, "agent")

    async def score(self) -> tuple[float, dict[str, float]]:
        return self._scored(await self._ask("score", self._limits.score_timeout_s, "score", self._judging))

    async def act(self, turn: ParsedTurn) -> Observation:
        raise RuntimeError("an agent acts by itself")

    def _prepare(self, task: Mapping[str, JSON], seed: int) -> None:
        super()._prepare(task, seed)
        if self._llm is None:
            raise RuntimeError("an agent is started after it was offered a policy")
        llm, paying = self._llm, "" if self._environment.starts_program else self._llm.reward_key
        self._begin["llm"] = wire.LlmFrame(
            base_url=llm.base_url, api_key=llm.api_key, model=llm.model, episode=llm.episode, reward_key=paying
        )

    async def _ask(
        self, operation: str, budget_s: float, phase: Phase, arguments: wire.Arguments | None = None
    ) -> HostReply:
        if self._seat is None:
            raise SessionLost("host", "the agent's process is gone")
        try:
            return await self._call(operation, budget_s, arguments or {})
        except Died as died:
            self._leave()
            if self._is_guilty(died.death):
                raise EnvironmentFailed(phase, str(died.death)) from died
            me = self._died_as in died.death.suspects
            raise SessionLost("host", str(died.death), is_suspect=me) from died


def _check(phase: Phase, numbers: Mapping[str, float], reward: float | None = None) -> None:
    """Once more, outside: in there a policy may have been at work. Raises ``EnvironmentFailed``."""
    try:
        check_all(numbers)
        check_size("the reward", reward or 0.0)
    except BeyondBounds as error:
        raise EnvironmentFailed(phase, f"it reports too much: {error}") from None
