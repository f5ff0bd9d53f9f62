"""A reward that is posted after every process of the installation was killed: it counts, and once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.demo.demo import NO_KEYS, demo_spec
from examples.demo.provenance import check_provenance
from gspo_core.client import Client, Unreachable
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.launch.stack import Stack, StackConfig
from services.state.client import connect
from services.state.queue import Bus
from tests.e2e.test_learning import changed

pytestmark = pytest.mark.slow

GROUP = 4
DEADLINE_S = 240.0
WORLD = """
class Sums:
    tasks = [{"expression": f"{number} + 3"} for number in range(8)]
    eval_tasks = tasks[:1]
"""


class Agents(ThreadingHTTPServer):
    """Each asks once and ends without a reward; who pays has kept the base URL and the key that pays its episode."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asking)
        self.ended: dict[str, dict[str, Any]] = {}
        self.changed = threading.Condition()


class Asking(BaseHTTPRequestHandler):
    server: Agents

    def do_POST(self) -> None:
        start = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = {"role": "user", "content": start["task"]["expression"]}
        answered = post(start, "/chat/completions", {"model": "policy", "messages": [question]})
        assert answered["choices"]
        with self.server.changed:
            self.server.ended[start["episode"]] = start
            self.server.changed.notify_all()
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def post(start: dict[str, Any], path: str, body: dict[str, Any]) -> Any:
    """As a patient client does: it asks again while it is told to."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            key = start["reward_key" if path.endswith("reward") else "api_key"]
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(f"{start['base_url']}{path}", json=body, headers=headers, timeout=60)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code < 500 and answer.status_code != 429:
            assert answer.status_code == 200, answer.text
            return answer.json()
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)


def waiting(redis_url: str, job: str) -> int:
    async def ask() -> int:
        async with connect(redis_url) as redis:
            return (await Bus(redis).waiting(job)).num_episodes

    return asyncio.run(ask())


def is_over(client: Client, job: str) -> bool:
    try:
        return client.job(job)["status"] in ("succeeded", "failed")
    except Unreachable:  # it is being started
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def test_a_reward_that_comes_after_all_was_killed_counts_once(model_dir: Path, tmp_path: Path) -> None:
    world = tmp_path / "sums.py"
    world.write_text(WORLD)
    agents = Agents()
    threading.Thread(target=agents.serve_forever, daemon=True).start()
    given = {
        "environments": [{"ref": f"{world}:Sums", "agent": {"url": f"http://127.0.0.1:{agents.server_port}/"}}],
        "steps": 1,
        "groups_per_step": 1,
        "evaluation": None,
        "rollout": {"group_size": GROUP, "max_staleness": 0},
        "rewards": {"deadline_s": 3600},
    }
    environment = {**NO_KEYS, "GSPO_LEASE_S": "3", "GSPO_OUTBOUND_NETWORKS": "127.0.0.0/8"}
    config = StackConfig(tmp_path / "data", model_dir, port=0, environment=environment)
    try:
        with Stack(config) as stack, Client(stack.api_url) as client:
            job = client.create_job(changed(demo_spec(model_dir, 0), given))["id"]
            until(lambda: waiting(stack.redis_url, job) == GROUP)
            pids = stack.pids()
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            for name in pids:
                stack.restart(name)
            for number, start in enumerate(agents.ended.values()):
                for _ in range(2):
                    post(start, "/episode/reward", {"reward": float(number), "token": f"paid {number}"})
            until(lambda: is_over(client, job))
            record = client.job(job)
            assert record["status"] == "succeeded", record["status_reason"]
    finally:
        agents.shutdown()
        agents.server_close()
    log = BatchLog(JobDir(tmp_path / "data" / "jobs" / job))
    (place,) = log.steps()
    (group,) = log.read(*place).groups
    assert sorted(one.outcome.reward for one in group) == [float(number) for number in range(GROUP)]
    provenance = check_provenance(JobDir(tmp_path / "data" / "jobs" / job), 20, seed=0)
    assert provenance.num_equal == provenance.num_tokens == 20
