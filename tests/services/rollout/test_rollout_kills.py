"""Workers that are killed without end: everything finishes, little is sampled twice, nothing acts twice, nothing leaks.

Three real worker processes on a real server; every few seconds one of them is killed and another takes its place. The
world writes down outside of itself what it does, so that what is undone by a death stays visible.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.rollout_stage import Stage, open_stage
from gspo_core.codec import decode
from gspo_core.types import EpisodeKey, Segment, StopReason
from services.state.store import Claim
from tests.apparatus.processes import is_running
from tests.patience import HANG_S
from tests.services.rollout.rollout_kit import until

LEASE_S = 1.0
NUM_WORKERS, KILL_EVERY_S = 3, 3.0
GROUP_SIZE, MAX_OPEN_GROUPS, NUM_TURNS = 4, 8, 8
# So few that the episodes need all three.
EPISODES_PER_WORKER = 12
SLOW_S, FAST_S = (1.0, 3.0), (0.1, 0.4)
MIN_REUSED = 0.9
WORLD = '''
import json
import os
import uuid
from pathlib import Path


class Replayed:
    """Pay again and again."""

    tasks = [{}] * 8
    replayable = True

    def __init__(self, folder):
        self.folder = Path(folder)

    def reset(self):
        self.run, self.num_paid = uuid.uuid4().hex, 0
        Path(self.folder, "pids", str(os.getpid())).touch()
        return "Pay."

    def read(self, page: int) -> str:
        """Pay once more.

        Args:
            page: to whom
        """
        file = os.open(self.folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{self.run} {self.num_paid}\\n".encode())
        os.close(file)
        self.num_paid += 1
        return f"Paid {self.num_paid} times."

    def get_reward(self):
        return float(self.num_paid)


class Kept(Replayed):
    """Pay again and again."""

    replayable = False

    def reset(self):
        super().reset()
        return f"Pay as {self.run}."

    def snapshot(self):
        return json.dumps([self.run, self.num_paid]).encode()

    def restore(self, state):
        self.run, self.num_paid = json.loads(state)
        Path(self.folder, "pids", str(os.getpid())).touch()
'''


@dataclass(frozen=True)
class Seen:
    """A segment as it was stored. ``logprob_sum`` tells one answer of the engine from all others."""

    key: EpisodeKey
    attempt: int
    index: int
    logprob_sum: float

    @property
    def answer(self) -> tuple[EpisodeKey, int, float]:
        return self.key, self.index, self.logprob_sum


class Watcher:
    """Sees every segment that was ever stored, also those that a new attempt throws away."""

    def __init__(self, stage: Stage, claim: Claim) -> None:
        self._stage, self._claim = stage, claim
        self._position = "0"
        self.seen: Counter[Seen] = Counter()
        self.num_attempts: Counter[str] = Counter()
        """Of each run of a world, by the name that its first words give it."""

    async def look(self) -> None:
        while entries := await self._stage.bus.read_segments(
            self._claim.job_id, self._position, count=1000, block_ms=0
        ):
            self._position = entries[-1][0]
            for _, payload in entries:
                self._see(decode(payload))

    def _see(self, segment: Segment) -> None:
        self.seen[seen(segment)] += 1
        if segment.index == 0:
            run = re.search("Pay as (.*)[.]", self._stage.codec.tokenizer.decode(segment.token_ids.tolist()))
            self.num_attempts[run.group(1) if run else ""] += 1


def seen(segment: Segment) -> Seen:
    return Seen(segment.key, segment.attempt, segment.index, segment.logprob_sum)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", ["Kept", "Replayed"])
@pytest.mark.parametrize(("num_kills", "turn_s"), [(6, SLOW_S), (40, SLOW_S), (40, FAST_S)])
async def test_killed_workers_cost_little_and_repeat_nothing(
    world: str, num_kills: int, turn_s: tuple[float, float], tmp_path: Path
) -> None:
    (tmp_path / "pids").mkdir()
    (tmp_path / "world.py").write_text(WORLD)
    async with open_stage(num_turn_tokens=70) as stage:
        entry = {"ref": f"{tmp_path / 'world.py'}:{world}", "config": {"folder": str(tmp_path)}}
        claim = await stage.submit(environments=[entry], limits={"max_turns": NUM_TURNS})
        url = await stage.serve(claim, seconds=turn_s)
        watcher = Watcher(stage, claim)
        num_groups = await storm(stage, claim, watcher, url, num_kills)
        keys = [EpisodeKey(claim.job_id, group, member) for group in range(num_groups) for member in range(GROUP_SIZE)]
        final = [[decode(one) for one in await stage.bus.read_episode(key)] for key in keys]
        assert await stage.bus.dead_letters(claim.job_id) == []
    judge(final, watcher)
    payments = Counter((tmp_path / "ledger").read_text().splitlines())
    assert len(payments) >= NUM_TURNS * len(keys)
    # Once in an attempt: one that was gone on from an earlier world has more of them.
    assert [line for line, count in payments.items() if count > max(1, watcher.num_attempts[line.split()[0]])] == []
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) >= num_kills
    await until(lambda: not [pid for pid in pids if is_running(pid)])


async def storm(stage: Stage, claim: Claim, watcher: Watcher, url: str, num_kills: int) -> int:
    """How many groups were played, to the end of all of them."""
    generator, num_groups, kill_at = random.Random(num_kills), 0, 0.0
    workers = {worker.pid: worker for worker in [start_worker(stage, url) for _ in range(NUM_WORKERS)]}
    while True:
        await watcher.look()
        num_ready = len(await stage.bus.ready_groups(claim.job_id))
        if num_kills:
            more = range(num_groups, num_ready + MAX_OPEN_GROUPS)
            await stage.dispatch(claim, more, size=GROUP_SIZE)
            num_groups = max(num_groups, more.stop)
            playing = [pid for pid in await pids_that_play(stage) if pid in workers]
            if len(playing) == NUM_WORKERS and time.monotonic() > kill_at:
                workers.pop(generator.choice(playing)).kill()
                replacement = start_worker(stage, url)
                workers[replacement.pid] = replacement
                kill_at, num_kills = time.monotonic() + KILL_EVERY_S, num_kills - 1
        elif num_ready == num_groups:
            break
        await asyncio.sleep(0.05)
    await watcher.look()
    while not workers.keys() <= {record.pid for record in await stage.store.fleet.workers()}:
        await asyncio.sleep(0.05)  # one that is only starting does not know how to leave yet
    for worker in workers.values():
        worker.terminate()
    assert {await asyncio.to_thread(worker.wait, HANG_S) for worker in workers.values()} == {0}
    return num_groups


async def pids_that_play(stage: Stage) -> list[int]:
    """Where the machine is slow, a worker that has only just started is left alone: its death would show nothing."""
    return [record.pid for record in await stage.store.fleet.workers() if record.num_episodes]


def start_worker(stage: Stage, url: str) -> subprocess.Popen[bytes]:
    settings = {"GSPO_REDIS_URL": stage.redis_url, "GSPO_ENGINE_URLS": url, "GSPO_LEASE_S": str(LEASE_S)}
    # Worlds keep a ledger and the ids of their processes, which behind a wall are other ones.
    settings["GSPO_ENV_TIER"] = "process"
    environment = {**os.environ, **settings, "GSPO_DATA_DIR": str(stage.root / "data")}
    command = [sys.executable, "-m", "services.rollout", "--max-episodes", str(EPISODES_PER_WORKER)]
    return stage.start(command, env=environment)


def judge(final: list[list[Segment]], watcher: Watcher) -> None:
    for segments in final:
        outcome = segments[-1].outcome
        assert outcome is not None
        assert (outcome.stop_reason, outcome.reward) == (StopReason.MAX_TURNS, NUM_TURNS)
        assert [segment.index for segment in segments] == list(range(len(segments)))
        assert len({segment.attempt for segment in segments}) == 1
    assert set(watcher.seen.values()) == {1}, "a segment was stored twice"
    kept = {seen(segment) for segments in final for segment in segments}
    assert kept <= watcher.seen.keys()
    num_answers = len({one.answer for one in watcher.seen})
    share = len({one.answer for one in kept}) / num_answers
    num_again = sum(segments[-1].attempt > 0 for segments in final)
    # Shown where it fails, or with -s.
    print(f"{num_answers} segments were stored, {share:.1%} of them stayed; {num_again} of {len(final)} episodes had")
    print("more than one attempt")
    assert share >= MIN_REUSED
