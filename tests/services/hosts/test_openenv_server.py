"""Our environments over OpenEnv's protocol, and our client of it: what goes in comes out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from environments.calculator import Calculator, evaluate
from gspo_core.env import ParsedTurn, Session
from gspo_core.types import Split, StopReason
from services.hosts.openenv_server import serve
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.process.ports import free_port
from tests.services.hosts.test_host import call, said

CALCULATOR = "environments.calculator:Calculator"
CLIENT = "environments.adapters.openenv:OpenEnv"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server of the calculator with room for two."""
    async with served(CALCULATOR) as address:
        yield address


@contextlib.asynccontextmanager
async def served(ref: str) -> AsyncIterator[str]:
    port = free_port()
    environment = await HostedEnvironment.open(HostOrder(ref))
    ready = asyncio.Event()
    serving = asyncio.create_task(serve(environment, "127.0.0.1", port, 2, ready))
    await asyncio.wait_for(ready.wait(), 20)
    yield f"ws://127.0.0.1:{port}/ws"
    serving.cancel()
    await asyncio.wait({serving})
    await environment.close()
    assert environment.pool.num_seated == 0


async def ask(connection: ClientConnection, kind: str, **data: Any) -> Any:
    await connection.send(json.dumps({"type": kind, "data": data}))
    return json.loads(await connection.recv())


async def test_an_episode_as_a_foreign_client_plays_it(url: str) -> None:
    async with connect(url) as connection:
        listed = await ask(connection, "step", type="list_tools")
        (tool,) = listed["data"]["observation"]["tools"]
        assert (tool["name"], tool["input_schema"]["required"]) == ("calculate", ["expression"])
        early = await ask(connection, "step", type="call_tool", tool_name="calculate", arguments={})
        assert (early["type"], early["data"]["code"]) == ("error", "EXECUTION_ERROR")
        first = await ask(connection, "reset", seed=3)
        expression = Calculator.tasks[3]["expression"]
        assert first["data"]["observation"]["text"] == f"What is {expression}?"
        assert (first["data"]["reward"], first["data"]["done"]) == (None, False)
        arguments = {"expression": expression}
        step = await ask(connection, "step", type="call_tool", tool_name="calculate", arguments=arguments)
        result = step["data"]["observation"]["result"]
        assert (result["content"][0]["text"], result["is_error"]) == (str(evaluate(expression)), False)
        wrong = await ask(connection, "step", type="call_tool", tool_name="calculate", arguments={"expression": "7/2"})
        assert wrong["data"]["observation"]["result"]["is_error"]
        last = await ask(connection, "step", type="message", text=str(evaluate(expression)))
        assert (last["data"]["reward"], last["data"]["done"]) == (1.0, True)
        over = await ask(connection, "step", type="message", text="more")
        assert over["data"]["code"] == "EXECUTION_ERROR"
        assert (await ask(connection, "state"))["data"]["step_count"] == 3


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        *(("no json", "INVALID_JSON"), ("[1]", "UNKNOWN_TYPE"), ('{"type": "dance"}', "UNKNOWN_TYPE")),
        *(('{"type": "score"}', "EXECUTION_ERROR"), ('{"type": "reset", "data": {"split": "x"}}', "VALIDATION_ERROR")),
        ('{"type": "reset", "data": {"index": 99999}}', "EXECUTION_ERROR"),
    ],
)
async def test_mistakes_are_answered_and_the_connection_stays(url: str, frame: str, code: str) -> None:
    async with connect(url) as connection:
        await connection.send(frame)
        assert json.loads(await connection.recv())["data"]["code"] == code
        assert (await ask(connection, "reset", seed=0))["type"] == "observation"


HANGING = '''
import asyncio


class Hanging:
    limits = {"step_timeout_s": 1}

    async def reset(self):
        return "go"

    async def hang(self) -> None:
        """Hang."""
        await asyncio.Event().wait()

    async def get_reward(self):
        return 1.0
'''


async def test_a_tool_has_the_time_that_its_author_gives_it(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    async with served(f"{tmp_path}/hanging.py:Hanging") as url, connect(url) as connection:
        await ask(connection, "reset")
        step = await ask(connection, "step", type="call_tool", tool_name="hang", arguments={})
        assert step["data"]["observation"]["result"]["data"] == "error: hang timed out after 1s"


async def test_who_finds_no_room_is_told_how_much_there_is(url: str) -> None:
    async with connect(url), connect(url):
        async with connect(url) as third:
            refusal = json.loads(await third.recv())["data"]
        assert (refusal["code"], refusal["active_sessions"], refusal["max_sessions"]) == ("CAPACITY_REACHED", 2, 2)
        health = await asyncio.to_thread(urllib.request.urlopen, url.replace("ws", "http", 1).replace("/ws", "/health"))
        with health:
            assert json.load(health) == {"status": "healthy", "active": 2, "max": 2}


async def test_our_client_plays_it_as_if_it_were_here_and_waits_for_room(url: str) -> None:
    environment = await HostedEnvironment.open(HostOrder(CLIENT, {"url": url}))
    try:
        assert [tool["function"]["name"] for tool in environment.tools] == ["calculate"]

        async def play(index: int) -> tuple[float, StopReason | None]:
            session: Session = environment.session()
            start = await session.start(await environment.task(Split.TRAIN, index), index)
            assert [message["role"] for message in start.messages] == ["system", "user"]
            expression = Calculator.tasks[index]["expression"]
            value = said(await session.act(call("calculate", expression=expression)))
            assert value == str(evaluate(expression))
            end = await session.act(ParsedTurn(value if index % 2 else "no idea"))
            reward, _ = await session.score()
            await session.close()
            assert session.close_failure is None
            return reward + (end.reward or 0.0), end.stop_reason

        played = await asyncio.gather(*(play(index) for index in range(6)))
        assert played == [(float(index % 2), StopReason.COMPLETED) for index in range(6)]
        assert environment.capacity == 2
    finally:
        await environment.close()
