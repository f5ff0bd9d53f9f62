"""The tools of an MCP server (a command over stdio, or a URL) with tasks and a reward function of our own.

MCP knows no reward: ``reward`` names a function ``reward(task, messages, calls)``, as `gspo_core.env.from_functions`
takes one. Every episode has a server process, or a connection, of its own. A server that is a command may have an
interpreter, and so packages, of its own: name that in the command.
"""

# /// script
# dependencies = ["mcp==2.3.0"]
# ///

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

from environments.adapters.remote import RemoteAnswer, RemoteEnvironment
from gspo_core.env import InvalidEnvironment, Message, ToolSchema
from gspo_core.env.calls import MemberCaller
from gspo_core.env.functions import Call, Reward, Worth
from gspo_core.env.prompt import first_messages
from gspo_core.json_value import JSON
from gspo_core.types import Split

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import ContentBlock, Tool

_DOC_LINK = "For further information visit"

_CLOSED = frozenset({-32000, -32001})
"""Codes of the package's own errors: a connection was closed, or no answer came. All others come from a command."""
_HTTP_FAILED = _CLOSED | {-32700, -32600, -32601, -32603}
"""With these, too, it says that HTTP failed (a 502, a session that is over): they may come from no server."""


class Mcp:
    """Made by ``load_environment`` with a configuration: see ``as_environment``."""

    @staticmethod
    def as_environment(
        name: str,
        *,
        reward: str,
        tasks: Sequence[Mapping[str, JSON]] | str,
        command: Sequence[str] = (),
        url: str = "",
        environment: Mapping[str, str] | None = None,
        cwd: str = "",
        headers: Mapping[str, str] | None = None,
        eval_tasks: Sequence[Mapping[str, JSON]] | str = (),
        system: str = "",
        limits: Mapping[str, JSON] | None = None,
        reward_range: tuple[float, float] | None = None,
    ) -> RemoteEnvironment:
        """``tasks`` have a ``prompt`` each (text or messages), given here or as a JSONL file; ``reward`` is
        ``package.module:function`` or ``file.py:function``. ``environment`` and ``cwd`` are for a command, ``headers``
        for a ``url``; all are stored with the job, so they are no place for secrets."""
        if bool(command) == bool(url):
            raise InvalidEnvironment(f"{name}: an MCP server is either a command or a url")
        if (environment or cwd) and url:
            raise InvalidEnvironment(f"{name}: environment and cwd are for a command, not for a url")
        if headers and command:
            raise InvalidEnvironment(f"{name}: headers are for a url, not for a command")
        judge = _function(reward)
        all_tasks = {Split.TRAIN: _tasks(name, tasks), Split.EVAL: _tasks(name, eval_tasks)}

        @asynccontextmanager
        async def connect() -> AsyncIterator[_McpConnection]:
            from mcp import Client, StdioServerParameters
            from mcp.client.sse import create_mcp_http_client
            from mcp.client.stdio import stdio_client
            from mcp.client.streamable_http import streamable_http_client

            if url:
                async with (
                    create_mcp_http_client(dict(headers or {})) as http,
                    Client(streamable_http_client(url, http_client=http)) as client,
                ):
                    with closing(_McpConnection(client, judge, system, _HTTP_FAILED)) as connection:
                        yield connection
                return
            program, *words = command
            server = StdioServerParameters(command=program, args=words, env=dict(environment or {}), cwd=cwd or None)
            async with Client(stdio_client(server)) as client:
                with closing(_McpConnection(client, judge, system)) as connection:
                    yield connection

        bounds = (float(reward_range[0]), float(reward_range[1])) if reward_range else None
        return RemoteEnvironment(name, connect, all_tasks, dict(limits or {}), bounds)


class _McpConnection:
    """One connection to the server."""

    def __init__(self, client: Client, judge: Reward, system: str, failures: Collection[int] = _CLOSED) -> None:
        """``failures``: codes of errors that may be no answer of the server."""
        self._client = client
        self._judge = judge
        self._system = system
        self._failures = failures
        self._task: Mapping[str, JSON] = {}
        self._calls: list[Call] = []
        self._judging = MemberCaller("reward")

    @property
    def is_busy(self) -> bool:
        return self._judging.is_busy

    def close(self) -> None:
        self._judging.close()

    async def tools(self) -> list[ToolSchema]:
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            async for tool in self._listed()
        ]

    async def _listed(self) -> AsyncIterator[Tool]:
        """The tools of all pages."""
        page = await self._client.list_tools()
        while True:
            for tool in page.tools:
                yield tool
            if not page.next_cursor:
                return
            page = await self._client.list_tools(cursor=page.next_cursor)

    async def begin(self, task: Mapping[str, JSON], seed: int) -> list[Message]:
        self._task = task
        prompt = task["prompt"]
        asked: dict[str, JSON] = {"prompt": prompt if isinstance(prompt, list) else str(prompt)}
        return first_messages(asked, None, self._system)

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> RemoteAnswer:
        from mcp import MCPError

        try:
            result = await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code in self._failures:
                raise
            return self._refused(name, arguments, error.message)
        text = "\n".join(_text(block) for block in result.content)
        if result.is_error:
            return self._refused(name, arguments, text)
        self._calls.append(Call(name, arguments, text))
        return RemoteAnswer(text)

    def _refused(self, name: str, arguments: Mapping[str, JSON], text: str) -> RemoteAnswer:
        error = text.split(_DOC_LINK)[0].strip()
        self._calls.append(Call(name, arguments, error=ValueError(error)))
        return RemoteAnswer(f"error: {error}")

    async def say(self, text: str) -> RemoteAnswer:
        return RemoteAnswer("", done=True)

    async def score(self, messages: Sequence[Message]) -> tuple[float, dict[str, float]]:
        # The session's deadline holds.
        value: Worth = await self._judging.call(self._judge, math.inf, self._task, messages, self._calls)
        if isinstance(value, Mapping):
            parts = {str(part): float(number) for part, number in value.items()}
            return sum(parts.values()), parts
        return float(value), {}


def _text(block: ContentBlock) -> str:
    return str(block.text) if block.type == "text" else f"({block.type})"


def _tasks(name: str, given: Sequence[Mapping[str, JSON]] | str) -> list[Mapping[str, JSON]]:
    if isinstance(given, str):
        return [_task(where, _json(where, line)) for where, line in _lines(name, given)]
    return [_task(name, task) for task in given]


def _task(where: str, given: JSON | Mapping[str, JSON]) -> Mapping[str, JSON]:
    if not isinstance(given, Mapping) or "prompt" not in given:
        raise InvalidEnvironment(f"{where}: every task has a prompt, {given!r} has none")
    if isinstance(given["prompt"], list):
        try:
            first_messages(given, None, None)
        except ValueError as error:
            raise InvalidEnvironment(f"{where}: {error}") from None
    return given


def _json(where: str, line: str) -> JSON:
    try:
        return cast(JSON, json.loads(line))
    except ValueError as error:
        raise InvalidEnvironment(f"{where} is not JSON: {error}") from None


def _lines(name: str, file: str) -> list[tuple[str, str]]:
    """Those that are not blank, behind their places."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidEnvironment(f"{name}: cannot read {file}: {error}") from None
    return [(f"{name}: {file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _function(ref: str) -> Reward:
    module_name, _, attribute = ref.rpartition(":")
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        found: Reward = getattr(module, attribute)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise InvalidEnvironment(f"there is no reward function {ref}: {error}") from None
    return found
