"""How long is a gateway away that was killed in the middle of a turn, for a client that repeats a request twice?
``python -m benchmarks.gateway_kills [--kills 100] [--minutes 9]``.

A real gateway process, real Redis, an engine that says what it is told, and one agent at a time: the unmodified
`openai` package where `.make/agents` has it (`make test-agents`), else the standard library by the same rule. In each
episode the gateway gets SIGKILL once, in mid-turn, and is started again after ``--restart-after-s``, as `gspo up`
starts it: where it listens is held by whoever starts it. The lease is the default one. Every second episode is
streamed. Judged is what was stored of each: as many turns and tokens as were heard, none twice, none begun again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gateway_kills_client import MAX_TOKENS
from benchmarks.rollout_stage import Stage, machine, open_stage
from gspo_core.codec import decode
from gspo_core.types import EpisodeKey, StopReason
from services.launch.supervisor import FIRST_WAIT_S
from services.process.listening import listen
from services.process.ports import free_port
from services.state.functions import Functions
from services.state.loans import Lent, Loans
from services.state.store import Claim

TASKS = "class Tasks:\n    tasks = [{}]\n"
CLIENT = Path(__file__).with_name("gateway_kills_client.py")
PYTHON = Path(__file__).parents[1] / ".make" / "agents" / "openai" / "bin" / "python"
NUM_TURNS, CHUNK_TOKENS = 2, 4
CHUNK_S = (0.15, 0.25)
"""What a turn of six chunks takes: more than a second."""
INTO_S = {True: (0.0, 0.5), False: (0.2, 0.9)}
"""From what the agent told (a first piece; that it asks) to the kill: streamed or not, in the middle of a turn."""
LONG_S = 120.0
LOAN_S = 300.0


@dataclass
class Door:
    """A gateway, and where it listens, which outlives it."""

    stage: Stage
    claim: Claim
    lease_s: float
    listening: socket.socket = field(default_factory=lambda: listen("127.0.0.1", free_port(), "this benchmark"))
    gateway: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        stage, fd = self.stage, self.listening.fileno()
        host, port = self.listening.getsockname()
        settings = {
            "GSPO_REDIS_URL": stage.redis_url,
            "GSPO_ENGINE_URLS": stage.engine_urls[self.claim.job_id],
            "GSPO_LEASE_S": str(self.lease_s),
            "GSPO_DATA_DIR": str(stage.root / "data"),
            "GSPO_GATEWAY_BIND": f"{host}:{port}",
            "GSPO_LOG_LEVEL": "warning",
        }
        command = [sys.executable, "-P", "-m", "services.gateway", "--fd", str(fd)]
        self.gateway = stage.start(command, env={**os.environ, **settings}, pass_fds=[fd])

    def kill(self) -> float:
        """When."""
        assert self.gateway is not None
        assert self.gateway.poll() is None, "it ended by itself"
        at = time.monotonic()
        self.gateway.kill()
        self.gateway.wait()
        return at


class Agent:
    def __init__(self, python: Path | None) -> None:
        """``python``: one that has the package; None for this one, without it."""
        words = [str(python or sys.executable), "-I", str(CLIENT), "package" if python else "plain"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, told: dict[str, Any], *, stream: bool, struck: int) -> None:
        assert self._process.stdin is not None
        given = {"base_url": told["base_url"], "api_key": told["api_key"], "turns": NUM_TURNS}
        self._process.stdin.write(json.dumps(given | {"stream": stream, "struck": struck}) + "\n")
        self._process.stdin.flush()

    async def tells(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(LONG_S):
            found: dict[str, Any] = json.loads(await asyncio.to_thread(self._process.stdout.readline))
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Found:
    """``silent_s``: from the kill to the next piece of a stream. ``answer_s``: to the whole answer."""

    kills: int = 0
    finished: int = 0
    silent_s: list[float] = field(default_factory=list)
    answer_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    failures: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def told(self) -> dict[str, object]:
        return {
            "kills": self.kills,
            "finished": self.finished,
            "streamed, to the next piece": percentiles(self.silent_s),
            "streamed, to the whole answer": percentiles(self.answer_s[True]),
            "not streamed, to the answer": percentiles(self.answer_s[False]),
            "failures": self.failures,
            "problems": self.problems,
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float | int]:
    ordered, last = sorted(seconds), len(seconds) - 1
    if not ordered:
        return {"count": 0}
    at = {"p50": ordered[len(ordered) // 2], "p99": ordered[min(int(0.99 * len(ordered)), last)], "max": ordered[last]}
    return {"count": len(ordered), **{name: round(one, 2) for name, one in at.items()}}


async def lent(loans: Loans, job: str, name: str) -> Lent:
    async with asyncio.timeout(LONG_S):
        while (found := await loans.lend(job, name, LOAN_S)) is None:
            await asyncio.sleep(0.02)
    return found


async def strike(
    door: Door, agent: Agent, given: Lent, found: Found, rng: random.Random, restart_after_s: float
) -> bool:
    """One episode. Whether its agent came to its end."""
    is_stream = found.kills % 2 == 0
    agent.begin(json.loads(given.told), stream=is_stream, struck=rng.randrange(NUM_TURNS))
    said = await agent.tells()
    if said["event"] == "open":
        await asyncio.sleep(rng.uniform(*INTO_S[is_stream]))
        killed_at = door.kill()
        found.kills += 1
        await asyncio.sleep(restart_after_s)
        door.start()
        while (said := await agent.tells())["event"] not in ("done", "failed"):
            took = said["at"] - killed_at
            (found.silent_s if said["event"] == "first" else found.answer_s[is_stream]).append(took)
    if said["event"] == "failed":
        found.failures.append(said["error"])
    return bool(said["event"] == "done")


async def judged(stage: Stage, key: EpisodeKey) -> list[str]:
    segments = [decode(one) for one in await stage.bus.read_episode(key)]
    outcome = segments[-1].outcome
    if outcome is None:
        return [f"{key} has no outcome"]
    told = {name: outcome.metrics[name] for name in ("turns", "forks", "untrained_turns")}
    wanted = {"turns": NUM_TURNS, "forks": 0, "untrained_turns": 0}
    problems = [] if told == wanted else [f"{key}: {told}"]
    if outcome.stop_reason is not StopReason.COMPLETED or outcome.reward != 1.0:
        problems.append(f"{key}: {outcome.stop_reason} {outcome.reward}")
    if (num := sum(one.num_actions for one in segments)) != NUM_TURNS * MAX_TOKENS:
        problems.append(f"{key}: {num} tokens")
    if {(one.attempt, one.branch) for one in segments} != {(0, 0)}:
        problems.append(f"{key}: begun again")
    return problems


async def ready(stage: Stage, claim: Claim, key: EpisodeKey) -> None:
    async with asyncio.timeout(LONG_S):
        while key.group not in {one.group for one in await stage.bus.ready_groups(claim.job_id)}:
            await asyncio.sleep(0.02)


async def run(
    *, kills: int, minutes: float, restart_after_s: float, lease_s: float, python: Path | None, seed: int
) -> Found:
    """So many kills, or as many as the minutes allow."""
    found, rng, until = Found(), random.Random(seed), time.monotonic() + 60 * minutes
    agent = Agent(python)
    try:
        async with open_stage(num_turn_tokens=60) as stage:
            (stage.root / "tasks.py").write_text(TASKS)
            entry = {"ref": f"{stage.root / 'tasks.py'}:Tasks", "agent": {"pull": True}}
            claim = await stage.submit(environments=[entry], rollout={"chunk_tokens": CHUNK_TOKENS})
            await stage.serve(claim, say=stage.codec.tokenizer.encode("so it goes"), seconds=CHUNK_S)
            loans = Loans(Functions(stage.bus._redis))
            door = Door(stage, claim, lease_s)
            with door.listening:
                door.start()
                while found.kills < kills and time.monotonic() < until:
                    group = found.kills
                    await stage.dispatch(claim, range(group, group + 1), size=1)
                    given = await lent(loans, claim.job_id, f"agent-{group}")
                    if not await strike(door, agent, given, found, rng, restart_after_s):
                        if found.kills == group:
                            raise RuntimeError(f"an agent failed before any kill: {found.failures}")
                        await loans.finish(claim.job_id, given.loan.id, 0.0)
                        continue
                    found.finished += 1
                    await loans.finish(claim.job_id, given.loan.id, 1.0)
                    await ready(stage, claim, given.loan.key)
                    found.problems += await judged(stage, given.loan.key)
    finally:
        agent.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=9.0, help="no kill begins after them")
    parser.add_argument("--restart-after-s", type=float, default=FIRST_WAIT_S, help="default: as `gspo up` waits")
    parser.add_argument("--lease-s", type=float, default=30.0)
    parser.add_argument("--python", type=Path, default=PYTHON, help="one that has `openai`")
    parser.add_argument("--seed", type=int, default=None, help="left out: drawn")
    given = parser.parse_args()
    python = given.python if given.python.exists() else None
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    found = asyncio.run(
        run(
            kills=given.kills,
            minutes=given.minutes,
            restart_after_s=given.restart_after_s,
            lease_s=given.lease_s,
            python=python,
            seed=seed,
        )
    )
    client = "the openai package" if python else "the standard library, by the same rule"
    print(json.dumps({"seed": seed, "client": client, **found.told(), "machine": machine()}, indent=1))
    return 1 if found.failures or found.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
