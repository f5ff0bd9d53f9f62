"""Serves one of our environments over OpenEnv's protocol, so that other trainers can use it: a WebSocket per episode.

Rule: it keeps the protocol as `environments.adapters.openenv` describes it: exactly one answer to each request, a
refusal with the capacity as the first frame if it is full, and the environment ends with its connection. Tools look
like those of an MCP environment. Two more requests, ``tools`` and ``score``, save our own client from guessing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TypedDict, cast

from gspo_core.env import (
    CallStatus,
    EnvironmentFailed,
    InvalidEnvironment,
    Message,
    Observation,
    ParsedTurn,
    ToolCall,
    ToolSchema,
)
from gspo_core.json_value import JSON
from gspo_core.testing.watch import timeouts_of
from gspo_core.types import Split
from services.hosts.local import LocalHosts
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment, HostedSession
from services.hosts.venv import Interpreters

MAX_MESSAGE_BYTES = 16 << 20
_ACTION: JSON = {
    "type": "object",
    "description": "Call a tool, or say something.",
    "properties": {
        "type": {"type": "string", "enum": ["call_tool", "message", "list_tools"]},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
        "text": {"type": "string"},
    },
    "required": ["type"],
}
_SCHEMA: JSON = {"action": _ACTION, "observation": {"type": "object"}, "state": {"type": "object"}}


class ServerFrame(TypedDict):
    """A frame to the client."""

    type: str
    data: Mapping[str, object]


class RequestData(TypedDict, total=False):
    """The fields of a request, not validated."""

    seed: JSON
    split: JSON
    index: JSON
    episode_id: JSON
    type: JSON
    tool_name: JSON
    arguments: JSON
    text: JSON


class ListedTool(TypedDict):
    """As MCP lists it."""

    name: str
    description: str
    input_schema: Mapping[str, object]


class ToolResult(TypedDict):
    """As MCP returns it."""

    content: list[Mapping[str, str]]
    data: str
    is_error: bool


class Seen(TypedDict, total=False):
    """An observation of a client; which fields there are depends on its request."""

    text: str
    messages: Sequence[Message]
    tools: Sequence[ListedTool]
    tool_name: str
    result: ToolResult
    error: str | None


class FrameRefused(Exception):
    """A request is answered by an error; the connection stays open."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class ServedEpisode:
    """The episode of one connection."""

    environment: HostedEnvironment
    session: HostedSession | None = None
    is_done: bool = False
    paid: float = 0.0
    """The rewards of its turns so far."""
    score: tuple[float, dict[str, float]] | None = None
    num_steps: int = 0
    episode_id: str = ""
    answers: Mapping[str, Callable[[RequestData], Awaitable[ServerFrame]]] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = {
            "reset": self.reset,
            "step": self.step,
            "state": self.state,
            "tools": self.tools,
            "score": self.final,
        }

    async def answer(self, text: str | bytes) -> ServerFrame:
        """The frame that answers ``text``."""
        try:
            request = json.loads(text)
        except ValueError:
            return _error("INVALID_JSON", "a frame must be one JSON object")
        kind, data = _parts(request)
        if kind not in self.answers:
            return _error("UNKNOWN_TYPE", f"unknown type {kind!r}; known: {[*self.answers, 'close']}")
        try:
            return await self.answers[kind](data)
        except FrameRefused as refusal:
            return _error(refusal.code, str(refusal))
        except EnvironmentFailed as failure:
            return _error("EXECUTION_ERROR", str(failure))

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def reset(self, data: RequestData) -> ServerFrame:
        """``index`` and ``split`` name a task; without them the seed chooses one."""
        await self.close()
        seed, split = _number(data.get("seed") or 0), _split(data.get("split", "train"))
        num_tasks = self.environment.num_tasks(split)
        if num_tasks == 0:
            raise FrameRefused("VALIDATION_ERROR", f"there are no {split} tasks")
        index = _number(data["index"]) if "index" in data else seed % num_tasks
        self.is_done, self.paid, self.score, self.num_steps = False, 0.0, None, 0
        self.episode_id = str(data.get("episode_id") or "")
        limits = timeouts_of(self.environment)
        self.session = self.environment.session(limits=limits, episode_id=self.episode_id)
        start = await self.session.start(await self.environment.task(split, index), seed)
        messages: list[Message] = [{**message} for message in start.messages]
        return _observed({"text": str(messages[-1]["content"]), "messages": messages}, None, False)

    async def step(self, data: RequestData) -> ServerFrame:
        kind, name = data.get("type"), data.get("tool_name")
        if kind == "list_tools":
            return _observed({"tools": [_listed(tool) for tool in self.environment.tools]}, None, False)
        if self.session is None or self.is_done:
            raise FrameRefused("EXECUTION_ERROR", "reset first" if self.session is None else "the episode is over")
        if kind == "message":
            turn = ParsedTurn(str(data.get("text", "")))
        elif kind == "call_tool" and isinstance(name, str):
            call = ToolCall(name, data.get("arguments", {}), CallStatus.OK, "", 0, 0)
            turn = ParsedTurn("", (call,))
        else:
            raise FrameRefused("VALIDATION_ERROR", "a step must be call_tool with a tool_name, message, or list_tools")
        self.num_steps += 1
        observation = await self.session.act(turn)
        return await self._seen(observation, None if kind == "message" else str(name))

    async def state(self, data: RequestData) -> ServerFrame:
        return {"type": "state", "data": {"episode_id": self.episode_id, "step_count": self.num_steps}}

    async def tools(self, data: RequestData) -> ServerFrame:
        return {"type": "tools", "data": {"tools": [{**tool} for tool in self.environment.tools]}}

    async def final(self, data: RequestData) -> ServerFrame:
        if self.session is None:
            raise FrameRefused("EXECUTION_ERROR", "reset first")
        reward, parts = await self._judged()
        return {"type": "score", "data": {"reward": reward, "parts": parts}}

    async def _seen(self, observation: Observation, tool: str | None) -> ServerFrame:
        text = "\n".join(str(message["content"]) for message in observation.messages)
        self.paid += observation.reward or 0.0
        self.is_done = observation.done
        reward = observation.reward
        if observation.done:  # the rewards of all steps then sum to that of the episode
            reward = (await self._judged())[0] - self.paid + (observation.reward or 0.0)
        if tool is None:
            return _observed({"text": text}, reward, observation.done)
        failed = text.startswith("error: ")
        result: ToolResult = {"content": [{"type": "text", "text": text}], "data": text, "is_error": failed}
        return _observed({"tool_name": tool, "result": result, "error": None}, reward, observation.done)

    async def _judged(self) -> tuple[float, dict[str, float]]:
        assert self.session is not None
        if self.score is None:
            reward, parts = await self.session.score()
            self.score = reward + self.paid, parts
        return self.score


async def serve(environment: HostedEnvironment, host: str, port: int, capacity: int, ready: asyncio.Event) -> None:
    """Until it is cancelled."""
    from websockets.asyncio.server import ServerConnection, serve
    from websockets.exceptions import ConnectionClosed
    from websockets.http11 import Request, Response

    num_active = 0

    async def play(connection: ServerConnection) -> None:
        nonlocal num_active
        if num_active >= capacity:
            room = {"active_sessions": num_active, "max_sessions": capacity}
            text = f"Server at capacity: {num_active}/{capacity} sessions active."
            await connection.send(json.dumps(_error("CAPACITY_REACHED", text, **room)))
            return
        num_active += 1
        episode = ServedEpisode(environment)
        try:
            async for text in connection:
                if isinstance(text, str) and text.strip() == '{"type":"close"}':
                    return
                await connection.send(json.dumps(await episode.answer(text)))
        except ConnectionClosed:
            return
        finally:
            num_active -= 1
            await episode.close()

    def answer_http(connection: ServerConnection, request: Request) -> Response | None:
        pages = {
            "/health": {"status": "healthy", "active": num_active, "max": capacity},
            "/schema": _SCHEMA,
            "/metadata": {"name": environment.name, "description": environment.describe().get("system_prompt") or ""},
        }
        if request.path == "/ws":
            return None
        if request.path not in pages:
            return connection.respond(HTTPStatus.NOT_FOUND, "the paths are /ws, /health, /schema and /metadata\n")
        response = connection.respond(HTTPStatus.OK, json.dumps(pages[request.path]))
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response

    async with serve(play, host, port, process_request=answer_http, max_size=MAX_MESSAGE_BYTES) as server:
        ready.set()
        await server.serve_forever()


def _parts(request: JSON) -> tuple[str, RequestData]:
    kind = request.get("type") if isinstance(request, dict) else None
    data = request.get("data") if isinstance(request, dict) else None
    return str(kind), cast(RequestData, data) if isinstance(data, dict) else {}


def _number(given: JSON) -> int:
    if isinstance(given, int | float | str):
        return int(given)
    raise FrameRefused("VALIDATION_ERROR", f"not a whole number: {given!r:.80}")


def _split(name: JSON) -> Split:
    try:
        return Split(str(name))
    except ValueError:
        raise FrameRefused("VALIDATION_ERROR", f"split must be train or eval, not {name!r}") from None


def _error(code: str, message: str, **more: int) -> ServerFrame:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def _observed(observation: Seen, reward: float | None, done: bool) -> ServerFrame:
    return {
        "type": "observation",
        "data": {"observation": {**observation, "metadata": {}}, "reward": reward, "done": done},
    }


def _listed(tool: ToolSchema) -> ListedTool:
    function = tool["function"]
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


async def serve_ref(ref: str, config: Mapping[str, JSON], host: str, port: int, capacity: int, venvs: Path) -> None:
    """Until it is cancelled. Raises ``InvalidEnvironment``."""
    environment = await HostedEnvironment.open(HostOrder(ref, config), boot=LocalHosts(Interpreters(venvs)).boot)
    most = min(capacity, environment.capacity)
    ready = asyncio.Event()
    serving = asyncio.create_task(serve(environment, host, port, most, ready))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            print(f"{ref} at ws://{host}:{port}/ws, {most} episodes at once", flush=True)
        await serving
    finally:
        waiting.cancel()
        await environment.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", help="package.module:Class or path/to/file.py:Class")
    parser.add_argument("--config", type=json.loads, default={}, help="keyword arguments of the class, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to bind (default: %(default)s)")
    parser.add_argument("--capacity", type=int, default=16, help="episodes at once (default: %(default)s)")
    parser.add_argument("--venvs", type=Path, default=Path(".gspo/venvs"), help="where dependencies are installed")


def run(arguments: argparse.Namespace) -> int:
    """``gspo env serve``: serves until Ctrl-C; the exit status."""
    if "" not in sys.path:  # modules beside the caller can be named
        sys.path.insert(0, "")
    place = arguments.host, arguments.port, arguments.capacity
    try:
        asyncio.run(serve_ref(arguments.ref, arguments.config, *place, arguments.venvs))
    except KeyboardInterrupt:
        return 0
    except InvalidEnvironment as error:
        print(f"gspo env serve: {error}", file=sys.stderr)
        return 1
    return 0
