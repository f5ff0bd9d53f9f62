"""Agents of the Agent Client Protocol for tests: a program of the standard library, which does what a test says."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gspo_core.env import AgentStart, Llm, Timeouts, load_environment
from gspo_core.env.acp_run import AcpStart
from gspo_core.evidence import RESULT
from gspo_core.json_value import JSON
from gspo_core.types import Split
from tests.patience import HANG_S

# Each way to end a program is waited for during a fifth of it, on a busy machine too.
CLOSE_S = 25.0
LLM = Llm("http://127.0.0.1:1/v1", "ep_secret", episode="job-1/0/0/0")

PRELUDE = """
import json, os, pathlib, signal, sys, time

HEARD = []

def write(text):
    sys.stdout.write(text)
    sys.stdout.flush()

def send(**message):
    write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n")

def read():
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    HEARD.append(json.loads(line))
    return HEARD[-1]

def ask(method, **params):
    send(id="mine", method=method, params={"sessionId": "one", **params})
    while (message := read()).get("id") != "mine":
        pass
    return message.get("result", message.get("error"))

def say(text, session="one", kind="agent_message_chunk"):
    update = {"sessionUpdate": kind, "content": {"type": "text", "text": text}}
    send(method="session/update", params={"sessionId": session, "update": update})

def initialize(params):
    return {"protocolVersion": 1, "agentCapabilities": {}, "authMethods": [{"id": "by-key", "name": "Key"}]}

def authenticate(params):
    return {}

def session_new(params):
    return {"sessionId": "one"}

def session_prompt(params):
    said = prompt(params["prompt"][0]["text"])
    return {"stopReason": said or "end_turn"}

def prompt(text):
    say(text)

class Refused(Exception):
    pass

def refuse(code, message, data=None):
    raise Refused({"code": code, "message": message, **({} if data is None else {"data": data})})

def serve():
    while True:
        message = read()
        if "id" in message:
            try:
                result = globals()[message["method"].replace("/", "_")](message["params"])
            except Refused as refused:
                send(id=message["id"], error=refused.args[0])
            else:
                send(id=message["id"], result=result)
"""

TASKS = """
class Tasks:
    def __init__(self, tasks):
        self.tasks = tasks

    def get_reward(self, task, result, folder):
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.name: float(path.read_text() or 0) for path in found} or 0.0
"""


def write_acp_agent(folder: Path, body: str) -> list[str]:
    """Its command; ``body`` overrides its functions."""
    (folder / "agent.py").write_text(f"{PRELUDE}\n{body}\n\nif __name__ == '__main__':\n    serve()\n")
    return [sys.executable, "agent.py"]


def acp_environment(
    folder: Path, body: str, acp: AcpStart | None = None, task: Mapping[str, JSON] | None = None
) -> Any:
    """Such an agent, and one task."""
    start = AgentStart(command=write_acp_agent(folder, body), acp=acp or AcpStart())
    (folder / "tasks.py").write_text(TASKS)
    return load_environment(f"{folder}/tasks.py:Tasks", {"tasks": [dict(task or {"prompt": "Go."})]}, agent=start)


@asynccontextmanager
async def played_session(environment: Any, llm: Llm = LLM) -> AsyncIterator[Any]:
    """An episode of its first task, whose agent has ended."""
    session = environment.session(limits=Timeouts(reset_timeout_s=HANG_S, close_timeout_s=CLOSE_S))
    session.offer(llm)
    session.keep_evidence(1 << 21)
    try:
        await session.start(await environment.task(Split.TRAIN, 0), seed=0)
        await session.ended()
        yield session
    finally:
        await session.close()
        assert session.close_failure is None


async def acp_reward(environment: Any) -> float:
    async with played_session(environment) as session:
        reward: float = (await session.score())[0]
        return reward


async def played(environment: Any) -> tuple[str, Mapping[str, float]]:
    """What the agent said, and the numbers in the files that it left, by their names."""
    async with played_session(environment) as session:
        _, left = await session.score()
        return json.loads(session.evidence.told[RESULT]), left
