"""What MCP's adapter makes of a server's tools, its answers and its errors. The package itself is not needed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from environments.adapters.mcp import _CLOSED, _HTTP_FAILED, _McpConnection, _tasks
from environments.adapters.remote import RemoteEnvironment
from gspo_core.env import EnvironmentFailed, InvalidEnvironment
from gspo_core.types import Split
from tests.core.env_kit import call, play

PROMPT = "Order tea."
INVALID_PARAMS, INTERNAL_ERROR, CONNECTION_CLOSED = -32602, -32603, -32000


class MCPError(Exception):
    """As in the package."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("mcp")
    package.MCPError = MCPError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mcp", package)


class Shop:
    """A client of a server that lists a tool a page, and refuses every call but one for tea."""

    def __init__(self, code: int = INVALID_PARAMS) -> None:
        self.code = code

    async def list_tools(self, *, cursor: str | None = None) -> SimpleNamespace:
        name = cursor or "order"
        tool = SimpleNamespace(name=name, description="", input_schema={"type": "object", "properties": {}})
        return SimpleNamespace(tools=[tool], next_cursor="pay" if name == "order" else None)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> SimpleNamespace:
        if arguments.get("drink") != "tea":
            raise MCPError(self.code, "Invalid arguments: drink")
        return SimpleNamespace(content=[SimpleNamespace(type="text", text="3 dollars")], is_error=False)


def judge(task: Mapping[str, Any], messages: Sequence[Any], calls: Sequence[Any]) -> dict[str, float]:
    return {"refused": sum(one.error is not None for one in calls), "right": sum(one.error is None for one in calls)}


def environment(
    client: Shop, failures: Collection[int] = _CLOSED, *, prompt: Any = PROMPT, system: str = ""
) -> RemoteEnvironment:
    @asynccontextmanager
    async def connect() -> AsyncIterator[_McpConnection]:
        with closing(_McpConnection(client, judge, system, failures)) as connection:  # type: ignore[arg-type]
            yield connection

    return RemoteEnvironment("mcp", connect, {Split.TRAIN: [{"prompt": prompt}], Split.EVAL: []})


async def test_the_tools_of_all_pages_are_offered() -> None:
    assert (await play(environment(Shop()), "bye")).tools == ["order", "pay"]


@pytest.mark.parametrize(
    ("code", "failures"), [(INVALID_PARAMS, _CLOSED), (INTERNAL_ERROR, _CLOSED), (INVALID_PARAMS, _HTTP_FAILED)]
)
async def test_a_call_that_a_server_refuses_is_answered_and_the_episode_goes_on(
    code: int, failures: Collection[int]
) -> None:
    played = await play(
        environment(Shop(code), failures), call("order", drink=7), call("order", drink="tea"), "thank you"
    )
    assert [one["content"] for one in played.answers] == ["error: Invalid arguments: drink", "3 dollars"]
    assert played.parts == {"refused": 1.0, "right": 1.0}


@pytest.mark.parametrize(
    ("code", "failures"),
    [(CONNECTION_CLOSED, _CLOSED), (CONNECTION_CLOSED, _HTTP_FAILED), (INTERNAL_ERROR, _HTTP_FAILED)],
)
async def test_what_may_be_a_broken_line_is_a_failure_of_the_world(code: int, failures: Collection[int]) -> None:
    with pytest.raises(EnvironmentFailed, match=r"^act: MCPError"):
        await play(environment(Shop(code), failures), call("order", drink=7))


@pytest.mark.parametrize("prompt", [["a", "b"], [], [{"type": "text", "text": "a"}]])
def test_a_prompt_that_is_neither_text_nor_messages_is_refused_as_it_is_read(prompt: list[Any]) -> None:
    with pytest.raises(InvalidEnvironment, match="mine: the task's prompt must be text or a list of messages"):
        _tasks("mine", [{"prompt": prompt}])


async def test_a_prompt_may_be_messages() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    assert (await play(environment(Shop(), prompt=messages), "bye")).first == messages
    system = {"role": "system", "content": "Be kind."}
    for prompt in (PROMPT, messages[1:]):
        played = await play(environment(Shop(), prompt=prompt, system="Be kind."), "bye")
        assert played.first == [system, messages[1]]
