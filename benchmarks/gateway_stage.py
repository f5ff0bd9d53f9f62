"""What the benchmark of the gateway stands on: a real gateway process, real Redis, a fast engine, and agents.

The agents live in the benchmark's process: the gateway is given their URL, and calls it once for each episode, as it
would call anybody's service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from benchmarks.rollout_stage import CONTEXT_TOKENS, Stage, open_stage
from services.engines.http_engine import open_http
from services.engines.transport import EngineHttp
from services.state.store import Claim

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "on"]
TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a page of the book.",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer", "description": "its number"}}},
    },
}
# Of /proc/PID/stat.
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_NO_LIMIT = {
    "max_turns": 10_000,
    "max_tool_calls": 10_000,
    "max_episode_tokens": 10_000_000,
    "max_context_tokens": CONTEXT_TOKENS,
    "episode_timeout_s": 3600,
}


def many_tools(number: int) -> list[dict[str, object]]:
    """Of about 1 kB each, as a coding agent has them; the first is the one that is called."""
    properties = {name: {"type": "string", "description": words(100)} for name in ("what", "where")}
    others: list[dict[str, object]] = [
        {"type": "function", "function": {"name": f"tool_{place}", "parameters": {"properties": properties}}}
        for place in range(1, number)
    ]
    return [TOOL, *others]


def words(number: int) -> str:
    """A text of so many tokens."""
    return "".join(f" {WORDS[place % len(WORDS)]}" for place in range(number))


class Agent(msgspec.Struct):
    base_url: str
    api_key: str
    reward_key: str = ""
    """Empty before there was one: the episode's own key pays then."""


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function
    type: str = "function"


class _Message(msgspec.Struct):
    content: str | None
    tool_calls: list[_Call] = []


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


_completion = msgspec.json.Decoder(_Completion).decode


@dataclass
class Episode:
    """One episode, as its agent sees it: it keeps all messages and sends them with each request."""

    http: EngineHttp
    base_url: str
    key: str
    reward_key: str
    messages: list[dict[str, object]] = field(default_factory=list)
    num_prompt: int = 0
    """Tokens of the last prompt."""
    tools: Sequence[Mapping[str, object]] = (TOOL,)
    _call_id: str = ""

    def read(self, num_tokens: int) -> None:
        """The next message: the question, or what the tool answers."""
        if not self.messages:
            self.messages.append({"role": "user", "content": words(num_tokens)})
            return
        self.messages.append({"role": "tool", "tool_call_id": self._call_id, "content": words(num_tokens)})

    def request(self, *, stream: bool = False) -> bytes:
        return msgspec.json.encode(
            {"model": "policy", "messages": self.messages, "tools": self.tools, "stream": stream}
        )

    async def turn(self) -> float:
        """Asks for the next turn; returns the seconds until its answer was read whole."""
        body = self.request()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        started = time.perf_counter()
        answer = await self.http.ask("POST", f"{self.base_url}/chat/completions", headers, body, httpx.Timeout(None))
        spent = time.perf_counter() - started
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.content.decode()}")
        found = _completion(answer.content)
        said = msgspec.to_builtins(found.choices[0].message)
        self.messages.append({"role": "assistant", **said})
        self._call_id = found.choices[0].message.tool_calls[0].id
        self.num_prompt = found.usage.prompt_tokens
        return spent

    async def end(self) -> None:
        for path, key, body in (("reward", self.reward_key, b'{"reward": 1}'), ("finish", self.key, b"{}")):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            await self.http.ask("POST", f"{self.base_url}/episode/{path}", headers, body, httpx.Timeout(None))


class Process:
    """What a process of another id uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._folder = Path("/proc") / str(pid)

    def cpu_s(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S

    def resident_bytes(self) -> int:
        return int((self._folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def most_resident_bytes(self) -> int:
        """Since it began."""
        fields = dict(line.split(":") for line in (self._folder / "status").read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024


@dataclass
class Gateway:
    """A gateway process with the episodes that it holds."""

    stage: Stage
    claim: Claim
    url: str
    process: Process
    http: EngineHttp
    reception: asyncio.Queue[Episode]
    num_groups: int = 0

    @property
    def engine_url(self) -> str:
        return self.stage.engine_urls[self.claim.job_id]

    async def dispatch(self, number: int) -> None:
        groups = range(self.num_groups, self.num_groups + number)
        self.num_groups += number
        await self.stage.dispatch(self.claim, groups, size=1)

    async def episodes(self, number: int) -> list[Episode]:
        await self.dispatch(number)
        return [await self.reception.get() for _ in range(number)]

    async def plain(self, num_prompt: int) -> float:
        """Seconds of a call to the engine itself, with as many ids as a prompt has."""
        ids = [100_300 + place % 50 for place in range(num_prompt)]
        sampling = {"max_new_tokens": 4096, "temperature": 1.0, "stop_token_ids": [0]}
        body = msgspec.json.encode(
            {"rid": os.urandom(16).hex(), "input_ids": ids, "return_logprob": True, "sampling_params": sampling}
        )
        headers = {"Content-Type": "application/json"}
        started = time.perf_counter()
        answer = await self.http.ask("POST", f"{self.engine_url}/generate", headers, body, httpx.Timeout(None))
        spent = time.perf_counter() - started
        if answer.status_code != 200:
            raise RuntimeError(str(answer.status_code))
        return spent


@contextlib.asynccontextmanager
async def open_gateway(
    *, turn_tokens: int, seconds: tuple[float, float], max_episodes: int, chunk_tokens: int = 4096, agent_url: str = ""
) -> AsyncIterator[Gateway]:
    """A gateway that serves one job; the engine takes ``seconds`` for a turn of ``turn_tokens``. Agents are those of
    ``agent_url``, or met here."""
    async with open_stage(num_turn_tokens=turn_tokens, words=[*WORDS, "so"]) as stage, _reception() as (url, agents):
        environment = {"ref": "benchmarks.rollout_worlds:Elsewhere", "agent": {"url": agent_url or url}}
        sampling, rollout = {"max_new_tokens": 4096}, {"chunk_tokens": chunk_tokens}
        claim = await stage.submit(environments=[environment], limits=_NO_LIMIT, sampling=sampling, rollout=rollout)
        await stage.serve(claim, say=_call(stage, turn_tokens), seconds=seconds)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            bind = f"127.0.0.1:{listener.getsockname()[1]}"
        child = _spawn(stage, claim, bind, max_episodes)
        async with open_http(max_connections=max_episodes + 50) as http:
            assert isinstance(http, EngineHttp)
            episodes: asyncio.Queue[Episode] = asyncio.Queue()
            meeting = asyncio.create_task(_meet(agents, episodes, http))
            try:
                await _until_up(f"http://{bind}/readyz")
                yield Gateway(stage, claim, f"http://{bind}/v1", Process(child.pid), http, episodes)
            finally:
                meeting.cancel()


def _call(stage: Stage, num_tokens: int) -> list[int]:
    """A turn of so many ids: some words, then a call."""
    tokenizer = stage.codec.tokenizer
    opening, closing = tokenizer.token_id("<tool_call>"), tokenizer.token_id("</tool_call>")
    assert opening is not None
    assert closing is not None
    body = tokenizer.encode('{"name": "read", "arguments": {"page": 7}}')
    aloud = tokenizer.encode(words(num_tokens))[: num_tokens - len(body) - 3]
    return [*aloud, opening, *body, closing, stage.codec.stop_ids[0]]


def _spawn(stage: Stage, claim: Claim, bind: str, max_episodes: int) -> subprocess.Popen[bytes]:
    settings = {
        "GSPO_REDIS_URL": stage.redis_url,
        "GSPO_DATA_DIR": str(stage.root / "data"),
        "GSPO_ENGINE_URLS": stage.engine_urls[claim.job_id],
        "GSPO_GATEWAY_BIND": bind,
        "GSPO_OUTBOUND_NETWORKS": "127.0.0.0/8",
        "GSPO_LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", "services.gateway", "--max-episodes", str(max_episodes)]
    return stage.start(command, env={**os.environ, **settings})


async def _until_up(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(url)).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} does not answer")
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _reception() -> AsyncIterator[tuple[str, asyncio.Queue[Agent]]]:
    """Where the gateway starts agents: it is answered 202 at once, so each plays on and says itself when it ends."""
    met: asyncio.Queue[Agent] = asyncio.Queue()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        met.put_nowait(msgspec.json.decode(await reader.readexactly(length), type=Agent))
        writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0, backlog=2048)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/play", met
    finally:
        server.close()


async def _meet(agents: asyncio.Queue[Agent], episodes: asyncio.Queue[Episode], http: EngineHttp) -> None:
    while True:
        agent = await agents.get()
        episodes.put_nowait(Episode(http, agent.base_url, agent.api_key, agent.reward_key or agent.api_key))
