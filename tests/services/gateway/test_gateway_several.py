"""Several gateways behind one address, as processes: requests come to any of them, and each is restarted in turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from benchmarks.rollout_stage import Stage, open_stage
from gspo_core.codec import decode
from gspo_core.types import EpisodeKey, StopReason
from services.process.ports import free_port
from services.state.functions import Functions
from services.state.loans import Loans
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Claim, Store
from services.state.talks import TalkKeyRecord, Talks
from tests.patience import HANG_S

NUM_GROUPS, GROUP_SIZE, NUM_TURNS, NUM_AGENTS = 6, 2, 12, 6
TASKS = "class Tasks:\n    tasks = [{}] * 8\n"


@dataclass
class Address:
    """One address: each connection goes to any gateway that takes it."""

    ports: list[int]
    generator: random.Random = field(default_factory=lambda: random.Random(0))
    url: str = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        async with await asyncio.start_server(self._connected, "127.0.0.1", port):
            yield

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            for port in self.generator.sample(self.ports, len(self.ports)):
                try:
                    behind, before = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionError:  # refused, or ended by a listener that was closed in this moment
                    continue
                await asyncio.gather(_pipe(reader, before), _pipe(behind, writer))
                break
        writer.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


class Agent:
    """Fetches episodes and plays them; asks again, marked as a retry, wherever a request was not answered."""

    def __init__(self, loans: Loans, job: str, number: int) -> None:
        self._loans, self._job, self._number = loans, job, number
        self.num_again = 0
        self.told: dict[EpisodeKey, list[str]] = {}

    async def run(self) -> None:
        for count in range(NUM_GROUPS * GROUP_SIZE * 100):
            lent = await self._loans.lend(self._job, f"{self._number}-{count}", 60)
            if lent is None:
                await asyncio.sleep(0.05)
            else:
                self.told[lent.loan.key] = await self._play(json.loads(lent.told))
                await self._loans.finish(self._job, lent.loan.id, 1.0)

    async def _play(self, told: dict[str, Any]) -> list[str]:
        messages, answers = [{"role": "user", "content": "begin"}], list[str]()
        for turn in range(NUM_TURNS):
            answers.append(await self._ask(told, messages, stream=turn % 2 == 1))
            messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": f"and {turn}?"}]
        return answers

    async def _ask(self, told: dict[str, Any], messages: list[dict[str, str]], *, stream: bool) -> str:
        body = {"model": "policy", "messages": messages, "stream": stream}
        for attempt in range(1000):
            headers = {"Authorization": f"Bearer {told['api_key']}", "x-stainless-retry-count": str(attempt)}
            try:
                async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as http:
                    answer = await http.post(f"{told['base_url']}/chat/completions", json=body, headers=headers)
                said = _said(answer, stream=stream)
            except httpx.TransportError:
                said = None
            if said is not None:
                return said
            self.num_again += 1
            await asyncio.sleep(0.05)
        raise AssertionError("never answered")


def _said(answer: httpx.Response, *, stream: bool) -> str | None:
    """None: it is to be asked again."""
    if answer.status_code == 503:
        return None
    assert answer.status_code == 200, answer.text
    if not stream:
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        return None
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def start(stage: Stage, claim: Claim, address: Address, port: int) -> subprocess.Popen[bytes]:
    settings = {
        "GSPO_REDIS_URL": stage.redis_url,
        "GSPO_ENGINE_URLS": stage.engine_urls[claim.job_id],
        "GSPO_LEASE_S": "2",
        "GSPO_DATA_DIR": str(stage.root / "data"),
        "GSPO_GATEWAY_BIND": f"127.0.0.1:{port}",
        "GSPO_GATEWAY_URL": address.url,
    }
    command = [sys.executable, "-m", "services.gateway", "--max-episodes", str(NUM_GROUPS * GROUP_SIZE // 2)]
    return stage.start(command, env={**os.environ, **settings})


async def serves(stage: Stage, gateway: subprocess.Popen[bytes]) -> None:
    """It is there, and holds episodes, as long as some are left."""
    async with asyncio.timeout(HANG_S):
        while not any(one.pid == gateway.pid and one.jobs for one in await stage.store.fleet.workers()):
            assert gateway.poll() is None
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_rolling_restart_of_two_loses_no_turn_of_the_agents_that_play(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    async with open_stage(num_turn_tokens=60) as stage:
        entry = {"ref": f"{tmp_path / 'tasks.py'}:Tasks", "agent": {"pull": True}}
        claim = await stage.submit(environments=[entry], limits={"max_turns": 100})
        say = [*stage.codec.tokenizer.encode("so it goes " * 5), stage.codec.stop_ids[0]]
        await stage.serve(claim, say=say, seconds=(0.2, 0.8))
        address = Address([free_port(), free_port()])
        async with address.open():
            gateways = [start(stage, claim, address, port) for port in address.ports]
            await asyncio.gather(*(serves(stage, one) for one in gateways))
            await stage.dispatch(claim, range(NUM_GROUPS), size=GROUP_SIZE)
            loans = Loans(Functions(stage.bus._redis))
            agents = [Agent(loans, claim.job_id, number) for number in range(NUM_AGENTS)]
            playing = [asyncio.create_task(agent.run()) for agent in agents]
            num_restarts = 0
            async with asyncio.timeout(400):
                while len(await stage.bus.ready_groups(claim.job_id)) < NUM_GROUPS:
                    for one in playing:
                        if one.done():
                            one.result()
                    if (num_restarts < 4 and any(agent.told for agent in agents)) or num_restarts < 2:
                        number = num_restarts % 2
                        gateways[number].terminate()
                        assert await asyncio.to_thread(gateways[number].wait, HANG_S) == 0
                        gateways[number] = start(stage, claim, address, address.ports[number])
                        await serves(stage, gateways[number])
                        num_restarts += 1
                    await asyncio.sleep(0.05)
            for one in playing:
                one.cancel()
            await asyncio.wait(playing)
        await judge(stage, claim, agents)
    print(f"{num_restarts} restarts; {sum(agent.num_again for agent in agents)} requests were sent again")
    assert num_restarts >= 2


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_key_that_just_talks_is_answered_from_the_engines_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    async with open_stage(num_turn_tokens=60) as stage:
        entry = {"ref": f"{tmp_path / 'tasks.py'}:Tasks", "agent": {"pull": True}}
        claim = await stage.submit(environments=[entry])
        say = [*stage.codec.tokenizer.encode("so it goes"), stage.codec.stop_ids[0]]
        await stage.serve(claim, say=say)
        address = Address([free_port()])
        async with address.open():
            await serves(stage, start(stage, claim, address, address.ports[0]))
            talks = Talks(Functions(stage.bus._redis))
            given = TalkKeyRecord("0123456789ab", "", "2026-01-01T00:00:00Z", None, 2, None, None)
            key = await talks.make(claim.job_id, given)
            told = {"api_key": key, "base_url": f"{address.url}/v1"}
            agent = Agent(Loans(Functions(stage.bus._redis)), claim.job_id, 0)
            messages = [{"role": "user", "content": "begin"}]
            said = await agent._ask(told, messages, stream=True)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
            assert [said, await agent._ask(told, messages, stream=False)] == ["so it goes"] * 2
            with pytest.raises(AssertionError, match="has used up its turns"):
                await agent._ask(told, messages, stream=False)
        entries = await talks.traffic(claim.job_id)
        segments = [decode(one.payload) for one in entries]
        assert [(one.turn, one.branch, one.version, one.num_actions) for one in segments] == [
            (0, 0, 0, len(say)),
            (1, 0, 0, len(say)),
        ]
        assert len({one.trace for one in entries}) == 1


async def test_a_gateway_that_goes_on_under_another_name_is_reached_as_before(
    redis_client: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Also where it was handed the socket on which it listens."""
    bus, store = Bus(redis_client), Store(redis_client)
    await bus.load_functions()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        bind = f"127.0.0.1:{listening.getsockname()[1]}"
        settings = {"GSPO_REDIS_URL": redis_server.url, "GSPO_DATA_DIR": str(tmp_path), "GSPO_GATEWAY_BIND": bind}
        command = [sys.executable, "-m", "services.gateway", "--fd", str(listening.fileno())]
        environment = {**os.environ, **settings, "GSPO_LEASE_S": "2"}
        gateway = await asyncio.create_subprocess_exec(*command, env=environment, pass_fds=[listening.fileno()])
    try:
        given = f"gateway-{socket.gethostname()}-{gateway.pid}"
        async with asyncio.timeout(HANG_S):
            while await store.fleet.worker(given) is None:
                await asyncio.sleep(0.05)
            while len(await store.fleet.workers()) < 2:
                await bus.join(given)  # as its namesake does, each time that it has lost its lease
                await asyncio.sleep(0.05)
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://{bind}/healthz")).status_code == 200
        gateway.terminate()
        async with asyncio.timeout(HANG_S):
            assert await gateway.wait() == 0
    finally:
        if gateway.returncode is None:
            gateway.kill()
        await gateway.wait()


async def judge(stage: Stage, claim: Claim, agents: list[Agent]) -> None:
    told = {key: answers for agent in agents for key, answers in agent.told.items()}
    assert len(told) == NUM_GROUPS * GROUP_SIZE
    for key, answers in told.items():
        segments = [decode(one) for one in await stage.bus.read_episode(key)]
        outcome = segments[-1].outcome
        assert outcome is not None
        assert (outcome.stop_reason, outcome.reward) == (StopReason.COMPLETED, 1.0)
        numbers = {name: outcome.metrics[name] for name in ("turns", "forks", "untrained_turns")}
        assert numbers == {"turns": NUM_TURNS, "forks": 0, "untrained_turns": 0}
        assert {(segment.attempt, segment.branch) for segment in segments} == {(0, 0)}
        assert len(answers) == NUM_TURNS
