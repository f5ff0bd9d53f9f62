"""Programs that speak the Agent Client Protocol, in a host's process: judged there, and ended with all they started."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import Llm, Timeouts
from gspo_core.types import Split
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from tests.apparatus.processes import is_running
from tests.core.acp_kit import write_acp_agent
from tests.patience import HANG_S

SDK_AGENT = Path(__file__).with_name("sdk_acp_agent.py")
PYTHONS = Path(os.environ.get("GSPO_TEST_AGENTS", Path(__file__).parents[3] / ".make" / "agents"))
PYTHON = PYTHONS / "agent-client-protocol" / "bin" / "python"
with_sdk = [
    pytest.mark.third_party,
    pytest.mark.skipif(not PYTHON.exists(), reason="the package is not installed: make test-agents"),
]

TASKS = """
class Tasks:
    def __init__(self, prompt):
        self.tasks = [{"prompt": prompt}]

    def get_reward(self, result, folder):
        words = ["Go.", "once", "two", "-32602"]
        return {"said": float(result.split() == words), "wrote": float((folder / "copy").read_text() == "two\\n")}
"""

HANGS = """
def prompt(text):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path(text).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)
"""

COPIES = """
def prompt(text):
    here = os.environ["GSPO_FOLDER"]
    ask("fs/write_text_file", path=here + "/copy", content="two\\n")
    say("Go. once two -32602")
"""


@asynccontextmanager
async def begun(folder: Path, command: list[str], prompt: str, close_timeout_s: float = HANG_S) -> AsyncIterator[Any]:
    (folder / "tasks.py").write_text(TASKS)
    order = HostOrder(f"{folder}/tasks.py:Tasks", {"prompt": prompt}, {}, agent={"command": command, "acp": {}})
    environment = await HostedEnvironment.open(order)
    try:
        limits = Timeouts(reset_timeout_s=HANG_S, close_timeout_s=close_timeout_s)
        session: Any = environment.session(limits=limits, episode_id="job-1/0/0")
        session.offer(Llm("http://127.0.0.1:1/v1", "ep_secret"))
        await session.start(await environment.task(Split.TRAIN, 0), seed=0)
        yield session
    finally:
        await environment.close()


async def text_of(path: Path) -> str:
    async with asyncio.timeout(HANG_S):
        while not (path.exists() and path.stat().st_size):  # noqa: ASYNC240
            await asyncio.sleep(0.01)
    return path.read_text()  # noqa: ASYNC240


async def test_it_is_asked_and_judged_in_a_process_of_its_own(tmp_path: Path) -> None:
    async with begun(tmp_path, write_acp_agent(tmp_path, COPIES), "Go.") as session:
        await session.ended()
        assert await session.score() == (2.0, {"said": 1.0, "wrote": 1.0})
        await session.close()


async def test_it_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with begun(tmp_path, write_acp_agent(tmp_path, HANGS), str(mark), close_timeout_s=0.5) as session:
        pids = [int(word) for word in (await text_of(mark)).split()]
        await session.close()
        async with asyncio.timeout(HANG_S):
            while any(is_running(pid) for pid in pids):
                await asyncio.sleep(0.01)


class TestWithThePackage:
    """`agent-client-protocol`, unmodified, in an environment of its own: `make test-agents`."""

    pytestmark = with_sdk

    async def test_an_agent_written_with_it_understands_all_that_it_is_told(self, tmp_path: Path) -> None:
        async with begun(tmp_path, [str(PYTHON), "-I", str(SDK_AGENT)], "Go.") as session:
            await session.ended()
            assert await session.score() == (2.0, {"said": 1.0, "wrote": 1.0})
            await session.close()

    async def test_an_agent_written_with_it_is_cancelled_in_words(self, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        command = ["env", f"MARK={mark}", str(PYTHON), "-I", str(SDK_AGENT)]
        async with begun(tmp_path, command, "wait") as session:
            assert (await text_of(mark)).isdecimal()
            await session.close()
            assert session.close_failure is None
        assert await text_of(mark) == "cancelled"
