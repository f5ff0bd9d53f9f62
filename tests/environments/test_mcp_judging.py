"""The reward function of MCP's adapter: it is its user's code, and runs beside the loop within a deadline."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from environments.adapters.mcp import _McpConnection
from environments.adapters.remote import RemoteEnvironment
from gspo_core.env import EnvironmentFailed, Message, Timeouts
from gspo_core.env.functions import Reward
from gspo_core.types import Split

TASK = {"prompt": "Order tea."}


class NoTools:
    """A client of a server that offers nothing."""

    tools: Sequence[object] = ()
    next_cursor = None

    async def list_tools(self) -> NoTools:
        return self


def environment(judge: Reward) -> RemoteEnvironment:
    @asynccontextmanager
    async def connect() -> AsyncIterator[_McpConnection]:
        with closing(_McpConnection(NoTools(), judge, "")) as connection:  # type: ignore[arg-type]
            yield connection

    return RemoteEnvironment("mcp", connect, {Split.TRAIN: [TASK], Split.EVAL: []})


async def test_a_plain_reward_leaves_the_loop_free_and_has_a_deadline() -> None:
    may_end = threading.Event()

    def slow(task: Mapping[str, Any], messages: Sequence[Message], calls: Sequence[Any]) -> float:
        may_end.wait(10.0)  # less than a blocked test waits
        return 1.0

    session = environment(slow).session(limits=Timeouts(score_timeout_s=0.1, close_timeout_s=0.1))
    await session.start(TASK, 0)
    try:
        with pytest.raises(EnvironmentFailed, match=r"no answer within 0\.1s"):
            await session.score()
        assert session.is_stuck
    finally:
        may_end.set()
        await session.close()


async def test_rewards_of_both_kinds_are_read_and_their_thread_ends() -> None:
    def plain(task: Any, messages: Any, calls: Any) -> dict[str, float]:
        return {"said": float(messages[0]["content"] == task["prompt"]), "threaded": float(_is_threaded())}

    async def awaited(task: Any, messages: Any, calls: Any) -> float:
        return float(_is_threaded())

    for judge, reward in ((plain, 2.0), (awaited, 0.0)):
        session = environment(judge).session()
        await session.start(TASK, 0)
        assert (await session.score())[0] == reward
        await session.close()
        assert (session.close_failure, session.is_stuck) == (None, False)


def _is_threaded() -> bool:
    return threading.current_thread() is not threading.main_thread()
