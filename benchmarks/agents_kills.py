"""Do agents come to their end, and is what is trained true, while gateway and embedded engine are killed under them?
``python -m benchmarks.agents_kills [--kills 30] [--steps 40]``. It needs `.make/agents` (`make test-agents`).

The demo's job is played by the agent of ``benchmarks/agents_streaming.py``, which lives on, with the unmodified
`openai` package. Again and again gateway or engine gets SIGKILL while an answer is open: begun at the agent and not at
its end, which a line between agent and gateway tells; an engine that samples nothing is not killed. Who was killed is
started again at the same address. Judged are the logs, by checks of ``tests.chaos``, and 200 tokens against their
weights. `results/agents_kills.md` has what was found, beside runs with scripted engines, whose oracle knows more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.agent_demo import agent_service, spec_of
from examples.demo.demo import NUM_PROVENANCE_TOKENS, started
from examples.demo.model import make_demo_model
from examples.demo.provenance import check_provenance
from gspo_core.client import Client
from gspo_core.spec import JobSpec
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.launch.stack import Stack
from services.process.ports import free_port
from services.state.jobs import JobStatus
from tests.chaos import judge_learning, judge_lineage
from tests.chaos.evidence import JobEvidence
from tests.chaos.lines import Line
from tests.chaos.streams import IN_A_STREAM, Stream, Streams, Wait, told_of

VICTIMS = ("gateway", "engine")
PAUSE_S = (0.5, 4.0)
"""Between two kills, whatever has recovered."""
INTO_S = 0.15
"""Of the stream that is struck, at most."""
QUESTION = re.compile(r"What is (?P<run>[^?]+)\?")
CHUNK_TOKENS = 4
"""What is sampled is passed on so often: the first words of an answer while the engine is at the others."""
LOOK_S = 0.2
CHECKS: tuple[Callable[[JobEvidence], Iterator[str]], ...] = (
    judge_lineage.jobs_are_over,
    judge_lineage.steps_are_whole,
    judge_lineage.groups_are_settled_once,
    judge_lineage.attempts_are_not_mixed,
    judge_lineage.versions_go_forward,
    judge_lineage.nothing_is_too_old,
    judge_lineage.nothing_of_a_dead_epoch_is_trained,
    judge_lineage.admission_is_paced,
    judge_learning.weights_follow_from_the_logs,
)


class Killer:
    """Kills in open streams until ``most`` are killed, or it is told that all is over."""

    def __init__(self, folder: Path, rng: random.Random, most: int) -> None:
        self._rng, self._most = rng, most
        self._notes = folder / "happened.jsonl"
        self._streams = Streams(folder / "streams.jsonl", QUESTION)
        self._loop = asyncio.new_event_loop()
        self._struck = queue.Queue[str]()
        self._stack: Stack | None = None
        self._line = Line(self._to_gateway)
        self._line.tap = self._streams.tap
        self.killed: Counter[str] = Counter()
        self.is_over = threading.Event()
        threading.Thread(target=self._loop.run_forever, name="line", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._line.open(), self._loop).result()
        self.url = f"http://127.0.0.1:{self._line.port}"
        """Where agents ask."""

    async def _to_gateway(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._stack is not None
        return await asyncio.open_connection("127.0.0.1", int(self._stack.gateway_url.rpartition(":")[2]))

    def ready(self, stack: Stack) -> None:
        self._stack = stack

    def run(self) -> None:
        assert self._stack is not None
        while self.killed.total() < self._most and not self.is_over.wait(self._rng.uniform(*PAUSE_S)):
            name = self._rng.choice(VICTIMS)
            wait = Wait(f"kill {name} {IN_A_STREAM}", self._rng.uniform(0.0, INTO_S), self._strike(name))
            self._loop.call_soon_threadsafe(self._streams.wait, wait)
            while not self.is_over.is_set():
                with contextlib.suppress(queue.Empty):
                    self.killed[self._struck.get(timeout=LOOK_S)] += 1
                    self._stack.restart(name)
                    break
        self.is_over.wait()  # what this thread has started ends with it

    def _strike(self, name: str) -> Callable[[list[Stream], int], bool]:
        def strike(met: list[Stream], number: int) -> bool:
            assert self._stack is not None
            sampled = self._num_sampled() if name == "engine" else 0
            if self.is_over.is_set() or (name == "engine" and not sampled):
                return False
            os.kill(self._stack.pids()[name], signal.SIGKILL)
            for stream in met if name == "gateway" else ():
                stream.is_doomed = True
            more = {"sampled": [""] * sampled} if name == "engine" else {}
            note = {"kind": f"kill {name} {IN_A_STREAM}", "strike": number, "open": [one.told() for one in met], **more}
            with self._notes.open("a") as file:
                file.write(json.dumps(note) + "\n")
            self._struck.put(name)
            return True

        return strike

    def _num_sampled(self) -> int:
        """Requests that the engine is at, as it says; 0 where it does not answer."""
        assert self._stack is not None
        with contextlib.suppress(httpx.HTTPError):
            (load,) = httpx.get(f"{self._stack.engine_url}/v1/loads", timeout=1.0).json()["loads"]
            return int(load["num_running_reqs"])
        return 0


def play(spec: JobSpec, model_dir: Path, folder: Path, port: int, rng: random.Random, kills: int) -> dict[str, object]:
    data = folder / "data"
    killer = Killer(folder, rng, kills)
    os.environ["GSPO_GATEWAY_URL"] = killer.url
    with (
        agent_service(port, "benchmarks.agents_streaming") as agent,
        started(data, model_dir, quiet=True) as stack,
        Client(stack.api_url) as client,
    ):
        killer.ready(stack)
        job = client.create_job(spec)["id"]
        killing, began = threading.Thread(target=killer.run, name="killer", daemon=True), time.monotonic()
        killing.start()
        while not (status := JobStatus(client.job(job)["status"])).is_terminal:
            time.sleep(LOOK_S)
        seconds = time.monotonic() - began
        killer.is_over.set()
        killing.join()
        agent_lived = agent.poll() is None
    found = judged(DataDir(data).jobs.job(job), data, spec.seed)
    told = {"status": str(status), "seconds": seconds, "killed": dict(killer.killed), "agent_lived": agent_lived}
    return {**told, "streams": told_of(folder), **found}


def judged(directory: JobDir, data: Path, seed: int) -> dict[str, Any]:
    evidence = JobEvidence(directory.path, str(data))
    problems = [f"{check.__name__}: {problem}" for check in CHECKS for problem in check(evidence)]
    batches = evidence.batches.values()
    groups = [group for batch in batches for group in batch.groups]
    checked = check_provenance(directory, NUM_PROVENANCE_TOKENS, seed=seed)
    return {
        "steps": len(evidence.lineage),
        "groups": len(groups),
        "episodes": sum(len(group.trajectories) for group in groups),
        "episodes_missing": sum(group.size - len(group.trajectories) for group in groups),
        "episodes_begun_again": sum(one.attempt > 0 for group in groups for one in group.trajectories),
        "branches_beyond_one": sum(len(one.branches) - 1 for group in groups for one in group.trajectories),
        "dropped": sum(len(found) for batch in batches for found in batch.extra["dropped"].values()),
        "tokens_checked": checked.num_tokens,
        "tokens_equal": checked.num_equal,
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="of kills and job; left out: drawn")
    parser.add_argument("--model", type=Path, help="a demo's model; left out: one is made")
    parser.add_argument("--keep", type=Path, help="a folder where all that the run left is kept")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    os.environ["GSPO_OUTBOUND_NETWORKS"] = "127.0.0.0/8"
    os.environ["GSPO_LEASE_S"] = "3"
    with tempfile.TemporaryDirectory() as made:
        folder = given.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        model_dir = given.model or folder / "model"
        make_demo_model(model_dir)
        port = free_port()
        spec = spec_of("agent", model_dir, seed, port)
        given_spec = spec.model_dump(mode="json", exclude_unset=True)
        changes = {"steps": given.steps, "evaluation": {"tasks": 50, "every": 1000}}
        changes["rollout"] = given_spec["rollout"] | {"chunk_tokens": CHUNK_TOKENS}
        spec = JobSpec.model_validate(given_spec | changes)
        found = play(spec, model_dir, folder, port, random.Random(seed), given.kills)
    print(json.dumps({"seed": seed, **found}, indent=1))
    return 1 if found["problems"] or found["status"] != "succeeded" else 0


if __name__ == "__main__":
    raise SystemExit(main())
