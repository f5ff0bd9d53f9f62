"""Serves the sessions of one process: requests come in over a socket, each session does one thing at a time.

Rule: every request gets one answer, also when its session fails; the sessions keep their deadlines themselves, and the
caller keeps a second one outside. When the socket closes, everything here ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from gspo_core.env import AgentSession, Environment, EnvironmentFailed, Llm, Message, Session, Timeouts, Witness
from gspo_core.json_value import JSON
from gspo_core.types import Split, StopReason
from services.hosts import wire
from services.hosts.inside import limits
from services.hosts.inside.traits import is_async
from services.hosts.mark import SESSION, Mark, mark_sessions

_TOO_LONG = "error: the answer is too long"


@dataclass
class _Held:
    session: Session
    running: asyncio.Task[None] | None = None


class SessionServer(asyncio.Protocol):
    """Holds sessions of ``environment`` until its connection ends."""

    def __init__(self, environment: Environment, memory_bytes: int) -> None:
        self._environment = environment
        self._peak, self._memory_bytes = limits.Peak(), memory_bytes
        self._frames = wire.Frames()
        self._held: dict[int, _Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            request: wire.Request = json.loads(body)
            SESSION.set(request["session"])  # inherited by the task, and by every task that it starts
            task = asyncio.create_task(self._serve(request))
            SESSION.set(-1)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if request["op"] != "close":
                self._held.setdefault(request["session"], self._open(request)).running = task

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()

    def _open(self, request: wire.Request) -> _Held:
        if "limits" not in request:
            return _Held(self._environment.session())
        timeouts = Timeouts(*request["limits"])
        return _Held(self._environment.session(limits=timeouts, episode_id=request["episode"]))

    async def _serve(self, request: wire.Request) -> None:
        number, operation = request["session"], request["op"]
        reply: wire.Reply
        try:
            if operation == "close":
                reply = await self._close(number)
            else:
                reply = await getattr(self, f"_{operation}")(self._held[number].session, request)
        except EnvironmentFailed as failure:
            held = self._held.get(number)
            reply = {"failed": (failure.phase, failure.reason), "hung": held is not None and held.session.is_stuck}
        except Exception as error:
            reply = {"failed": (operation, f"{type(error).__name__}: {error}")}
        if self._peak.is_beyond(self._memory_bytes):
            os._exit(limits.OVER_MEMORY_STATUS)
        self._answer({"id": request["id"], **reply}, operation)

    def _answer(self, reply: wire.Reply, operation: str) -> None:
        assert self._transport is not None
        try:
            data = wire.encode(reply)
        except wire.FrameTooLong as error:
            data = wire.encode(_shortened(reply, operation, str(error)))
        except (TypeError, ValueError, RecursionError) as error:
            refusal = f"what the environment returned is not JSON: {error}"
            data = wire.encode({"id": reply["id"], "failed": (operation, refusal)})
        self._transport.write(data)

    async def _start(self, session: Session, request: wire.Request) -> wire.Reply:
        if "llm" in request:
            cast(AgentSession, session).offer(Llm(**request["llm"]))
        start = await session.start(await self._task(request), request["seed"])
        return {"result": wire.start_to_json(start), **await self._state(session)}

    async def _restore(self, session: Session, request: wire.Request) -> wire.Reply:
        state = base64.b64decode(request["state"])
        await session.restore(await self._task(request), request["seed"], state)
        return {"result": None}

    async def _act(self, session: Session, request: wire.Request) -> wire.Reply:
        observation = await session.act(wire.turn_from_json(request["turn"]))
        result = wire.observation_to_json(observation)
        if observation.stop_reason is StopReason.TOOL_TIMEOUT:
            return {"result": result, "hung": session.is_stuck}
        return {"result": result, "metrics": _finite(session.metrics), **await self._state(session)}

    async def _handed_out(self, session: Session, request: wire.Request) -> wire.Reply:
        return {"result": await cast(AgentSession, session).handed_out()}

    async def _ended(self, session: Session, request: wire.Request) -> wire.Reply:
        await cast(AgentSession, session).ended()
        return {"result": None, "metrics": _finite(session.metrics)}

    async def _score(self, session: Session, request: wire.Request) -> wire.Reply:
        most_bytes = request.get("evidence_bytes", 0)
        if not most_bytes or not isinstance(session, Witness):
            return {"result": await session.score(), "metrics": _finite(session.metrics)}
        session.keep_evidence(most_bytes)
        score, found = await session.score(), session.evidence
        evidence = dict(found.told), dict(found.left_out)
        return {"result": score, "metrics": _finite(session.metrics), "evidence": evidence}

    async def _task(self, request: wire.Request) -> Mapping[str, JSON]:
        if "task" in request:
            return request["task"]
        split, index = request["task_at"]
        return await self._environment.task(Split(split), index)

    async def _state(self, session: Session) -> wire.Reply:
        """The snapshot after this answer, if the environment offers one."""
        state = await session.snapshot()
        return {} if state is None else {"snapshot": base64.b64encode(state).decode()}

    async def _close(self, number: int) -> wire.Reply:
        held = self._held.pop(number, None)
        if held is None:
            return {"result": None}
        if held.running is not None and not held.running.done():
            held.running.cancel()
            await asyncio.wait({held.running})
        await held.session.close()
        return {"result": held.session.close_failure, "hung": held.session.is_stuck}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """What JSON can say of them: a mean of nothing is no reason to lose the answer."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _shortened(reply: wire.Reply, operation: str, reason: str) -> wire.Reply:
    result = reply.get("result")
    if operation != "act" or not isinstance(result, dict) or "stop" not in result:
        return {"id": reply["id"], "failed": (operation, f"the answer is too long: {reason}")}
    if reply.pop("snapshot", None) is not None:  # if only the snapshot was too long, the policy gets its answer
        with contextlib.suppress(wire.FrameTooLong):
            wire.encode(reply)
            return reply
    messages: list[Message] = [{**message, "content": _TOO_LONG} for message in result["messages"]]
    return {"id": reply["id"], "result": {**result, "messages": messages}}


def serve(environment: Environment, connection: socket.socket, mark: Mark, memory_bytes: int) -> None:
    """Returns when the other side has closed the connection."""
    asyncio.run(_serve(environment, connection, mark, memory_bytes))


async def _serve(environment: Environment, connection: socket.socket, mark: Mark, memory_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    if is_async(environment):
        mark_sessions(loop, mark)
    connection.setblocking(False)
    _, server = await loop.create_connection(lambda: SessionServer(environment, memory_bytes), sock=connection)
    await server.gone.wait()
