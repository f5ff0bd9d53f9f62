"""A world behind an OpenEnv server, spoken to over its WebSocket without the package: one connection, one episode.

Its capacity is respected: a refusal says how many fit, and the others wait. A server of ours also says its tools
and its score; others show tools of MCP, or one action, which becomes the tool ``step``.
"""

# /// script
# dependencies = ["websockets==17.4"]
# ///

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Required, TypedDict, cast

from environments.adapters.remote import RemoteAnswer, RemoteEnvironment
from gspo_core.env import AtCapacity, EnvironmentFailed, InvalidEnvironment, Message, ToolSchema
from gspo_core.json_value import JSON
from gspo_core.messages import ContentPart, ParameterSchema
from gspo_core.types import Split

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

MAX_MESSAGE_BYTES = 16 << 20
CONNECT_S = 10.0


class StepAnswer(TypedDict, total=False):
    """The answer to ``reset`` and ``step``."""

    observation: dict[str, JSON] | None
    reward: float | None
    done: bool


class Score(TypedDict):
    reward: float
    parts: dict[str, float]


class McpTool(TypedDict, total=False):
    name: Required[str]
    description: str
    input_schema: Required[ParameterSchema]


class Kind(StrEnum):
    """What a server understands."""

    OURS = "ours"
    MCP = "mcp"
    ACTION = "action"


class OpenEnv:
    """Made by ``load_environment`` with a configuration: see ``as_environment``."""

    @staticmethod
    def as_environment(
        name: str,
        *,
        url: str,
        num_tasks: int = 1000,
        num_eval_tasks: int = 100,
        tasks: Sequence[Mapping[str, JSON]] = (),
        eval_tasks: Sequence[Mapping[str, JSON]] = (),
        system: str = "",
        limits: Mapping[str, JSON] | None = None,
        reward_range: tuple[float, float] | None = None,
    ) -> RemoteEnvironment:
        """``tasks`` are what ``reset`` is given; without them a task is a seed, and held-out seeds follow."""
        if not url.startswith(("ws://", "wss://")):
            raise InvalidEnvironment(
                f"{name}: url is the address of the server's WebSocket, ws://HOST:PORT/ws, not {url}"
            )
        all_tasks = {
            Split.TRAIN: list(tasks) or [{"seed": seed} for seed in range(num_tasks)],
            Split.EVAL: list(eval_tasks) or [{"seed": num_tasks + seed} for seed in range(num_eval_tasks)],
        }
        kinds: list[Kind] = []

        @asynccontextmanager
        async def connect() -> AsyncIterator[_OpenEnvConnection]:
            from websockets.asyncio.client import connect as open_socket

            async with open_socket(url, max_size=MAX_MESSAGE_BYTES, open_timeout=CONNECT_S) as socket:
                yield _OpenEnvConnection(socket, url, kinds, system)

        bounds = (float(reward_range[0]), float(reward_range[1])) if reward_range else None
        return RemoteEnvironment(name, connect, all_tasks, dict(limits or {}), bounds)


class ServerRefused(Exception):
    """The server answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class _OpenEnvConnection:
    """One connection. ``kinds`` is empty until the server was asked what it understands."""

    is_busy = False

    def __init__(self, socket: ClientConnection, url: str, kinds: list[Kind], system: str) -> None:
        self._socket = socket
        self._url = url
        self._kinds = kinds
        self._system = system

    async def tools(self) -> list[ToolSchema]:
        found = await self._own_tools() or await self._mcp_tools()
        if found is None:
            self._kinds[:] = [Kind.ACTION]
            return [self._action_tool()]
        return found

    async def begin(self, task: Mapping[str, JSON], seed: int) -> Sequence[Message]:
        data = await self._observe("reset", {"seed": seed, **task})
        observation = _plain(data)
        if self._kinds == [Kind.OURS] and isinstance(observation.get("messages"), list):
            return cast(list[Message], observation["messages"])
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": _shown(observation)}]

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> RemoteAnswer:
        action = dict(arguments)
        if self._kinds != [Kind.ACTION]:
            action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        try:
            data = await self._observe("step", action)
        except ServerRefused as error:
            return RemoteAnswer(f"error: {error.message}")
        # A server of ours says at the end what the episode was worth as a whole.
        reward = None if self._kinds == [Kind.OURS] else data.get("reward")
        content = _mcp_result(_plain(data)) if self._kinds != [Kind.ACTION] else _shown(_plain(data))
        return RemoteAnswer(content, None if reward is None else float(reward), bool(data.get("done")))

    async def say(self, text: str) -> RemoteAnswer:
        if self._kinds != [Kind.OURS]:
            return RemoteAnswer("", done=True)
        data = await self._observe("step", {"type": "message", "text": text})
        return RemoteAnswer(_shown(_plain(data)), None, bool(data.get("done")))

    async def score(self, messages: Sequence[Message]) -> tuple[float, dict[str, float]]:
        if self._kinds != [Kind.OURS]:
            return 0.0, {}  # the steps have paid already
        reply = cast(Score, await self._ask("score", None))
        return float(reply["reward"]), {str(name): float(part) for name, part in reply["parts"].items()}

    async def _own_tools(self) -> list[ToolSchema] | None:
        try:
            reply = await self._ask("tools", None)
        except ServerRefused:
            return None
        self._kinds[:] = [Kind.OURS]
        return cast(list[ToolSchema], reply["tools"])

    async def _mcp_tools(self) -> list[ToolSchema] | None:
        try:
            listed = cast(list[McpTool], _plain(await self._observe("step", {"type": "list_tools"}))["tools"])
        except (ServerRefused, KeyError):
            return None
        self._kinds[:] = [Kind.MCP]
        return [_schema(tool["name"], tool.get("description", ""), tool["input_schema"]) for tool in listed]

    def _action_tool(self) -> ToolSchema:
        address = self._url.replace("ws", "http", 1).removesuffix("/ws") + "/schema"
        with urllib.request.urlopen(address, timeout=CONNECT_S) as reply:  # noqa: S310 - built from ws:// or wss://
            action: ParameterSchema = json.load(reply)["action"]
        properties = {name: value for name, value in action.get("properties", {}).items() if name != "metadata"}
        parameters: ParameterSchema = {**action, "properties": properties}
        return _schema("step", str(action.get("description", "Take one action.")), parameters)

    async def _observe(self, kind: str, data: Mapping[str, JSON]) -> StepAnswer:
        return cast(StepAnswer, await self._ask(kind, data))

    async def _ask(self, kind: str, data: Mapping[str, JSON] | None) -> dict[str, JSON]:
        from websockets.exceptions import ConnectionClosed

        request = {"type": kind} if data is None else {"type": kind, "data": data}
        with contextlib.suppress(ConnectionClosed):  # the reason is waiting to be read
            await self._socket.send(json.dumps(request))
        try:
            reply = json.loads(await self._socket.recv())
        except ConnectionClosed as error:
            raise EnvironmentFailed("connection", f"the server closed it: {error}") from None
        given: dict[str, JSON] = reply.get("data") or {}
        if reply.get("type") != "error":
            return given
        if given.get("code") == "CAPACITY_REACHED":
            raise AtCapacity(int(cast(int, given.get("max_sessions", 1))))
        raise ServerRefused(str(given.get("code")), str(given.get("message")))


def _schema(name: str, description: str, parameters: ParameterSchema) -> ToolSchema:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _plain(data: StepAnswer) -> dict[str, JSON]:
    return {name: value for name, value in (data.get("observation") or {}).items() if name != "metadata"}


def _shown(observation: Mapping[str, JSON]) -> str:
    """The text of an observation that is nothing else, else JSON."""
    (only,) = observation.values() if len(observation) == 1 else (None,)
    return only if isinstance(only, str) else json.dumps(observation, ensure_ascii=False, separators=(",", ":"))


def _mcp_result(observation: Mapping[str, JSON]) -> str:
    error, result = observation.get("error"), observation.get("result")
    if error:
        return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        blocks = cast(list[ContentPart], result["content"])
        text = "\n".join(str(block.get("text", f"({block.get('type')})")) for block in blocks)
        return f"error: {text}" if result.get("is_error") else text
    return result if isinstance(result, str) else json.dumps(result if result is not None else observation)
