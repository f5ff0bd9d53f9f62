"""Whole workers against the real server and the real engine: a random tiny model, thousands of odd tokens.

What is sampled is noise, so what is checked is what must hold for any tokens: they are stitched as they were sent,
every token names the version that sampled it, and no death or failure loses, doubles or spreads anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.codec import decode
from gspo_core.types import EpisodeKey, Split, StopReason, Trajectory
from gspo_core.versions import WeightFile, WeightsManifest
from services.engines.http_engine import open_http
from services.engines.sglang import EngineClient
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.session import HostedEnvironment
from services.hosts.venv import Interpreters
from services.process.cancelling import first_to_end
from services.process.children import die_with_parent
from services.process.ports import free_port
from services.rollout import __main__ as rollout_main
from services.rollout.attempt import EnvironmentDriver
from services.state.queue import Append, Bus, Kept
from services.state.queue_records import Stage as EpisodeStage
from services.state.server import RedisServer, connect
from services.state.store import Claim, Store
from services.workers import worker as worker_module
from services.workers.engines import JobEngines
from services.workers.episode import Episode
from services.workers.loading import JobNotServable, LoadedJob, load_job
from services.workers.worker import EpisodeWorker, WorkerConfig
from tests.apparatus.processes import is_running
from tests.apparatus.warm_python import Child
from tests.patience import HANG_S
from tests.services.rollout.rollout_kit import until, write_model

LEASE_S = 1.0
# What is asked to end, does, however busy the machine is.
ENDED_S = HANG_S
WORLD = '''
class Talk:
    """Keep talking."""

    tasks = [{"replies": number % 4 + 1} for number in range(50)]
    eval_tasks = [{"replies": 2}]
    replayable = True
    limits = {"max_turns": 40, "max_tool_calls": 1000, "on_parse_error": {"feedback": 1000}}

    def __init__(self, replies=None):
        self.fixed = replies

    def reset(self, replies):
        self.left = self.total = self.fixed or replies
        return f"Say {self.left} things."

    def on_message(self, text):
        if not self.left:
            return None
        self.left -= 1
        return f"{self.left} to go, {len(text)} heard."

    def get_reward(self):
        return 1.0 - self.left / self.total


class Remembers(Talk):
    """Keep talking."""

    replayable = False

    def snapshot(self):
        return bytes([self.left, self.total])

    def restore(self, state):
        self.left, self.total = state


class Away:
    """Cannot be started before its server is there."""

    tasks = [{} for _ in range(10)]

    def __init__(self, server):
        self.server = server

    def reset(self):
        with open(self.server):
            return "It is there."

    def get_reward(self):
        return 1.0


class Gone:
    """Cannot be started."""

    tasks = [{}, {}]

    def reset(self):
        raise OSError("gone")

    def get_reward(self):
        return 0.0
'''


@dataclass(frozen=True)
class Place:
    """Where everything is that does not change between tests."""

    chatty: Path
    """A model whose turns end soon."""
    endless: Path
    """A model that practically never ends a turn."""
    world: Path
    engine_url: str

    @property
    def codec(self) -> HermesCodec:
        return HermesCodec(load_tokenizer(self.chatty))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("rollout")
    chatty = write_model(root / "chatty", seed=1, stop_bias=3.5)
    endless = write_model(root / "endless", seed=2, stop_bias=-30.0)
    world = root / "world.py"
    world.write_text(WORLD)
    port = free_port()
    engine = spawn("services.engine", ["--model", str(chatty), "--port", str(port)], {})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready", timeout=5.0).status_code == 200:
                    break
            assert engine.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield Place(chatty, endless, world, url)
    finally:
        engine.terminate()
        engine.wait(ENDED_S)


def alive(pids: set[int]) -> list[int]:
    return [pid for pid in pids if is_running(pid)]


def spawn(module: str, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return Child(
        ["-m", module, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        preexec_fn=die_with_parent(),
    )


class Stage:
    """A job whose trainer is this test, and the workers that play for it."""

    def __init__(self, place: Place, redis: Redis, redis_url: str, http: httpx.AsyncClient) -> None:
        self.place = place
        self.redis_url = redis_url
        self.bus, self.store = Bus(redis, lease_s=LEASE_S), Store(redis)
        self.engine = EngineClient(place.engine_url, http)
        self._redis = redis
        self._http = http
        self.claim: Claim
        self.children: list[subprocess.Popen[bytes]] = []
        self.num_joins = 0
        """Of all its workers."""

    async def submit(self, world: str = "Talk", config: dict[str, Any] | None = None, **changes: Any) -> Claim:
        """A job that is starting."""
        spec = {
            "model": str(self.place.chatty),
            "environments": [{"ref": f"{self.place.world}:{world}", "config": config or {}}],
            "sampling": {"max_new_tokens": 24},
            "rollout": {"group_size": 2, "max_staleness": 1},
        }
        await self.store.jobs.create(json.dumps(spec | changes))
        claim = await self.store.jobs.claim("trainer")
        assert claim is not None
        return claim

    async def publish(self, claim: Claim, model: Path, *, step: int = 0, load: bool = True) -> WeightsManifest:
        version = await self.store.versions.next(claim.job_id, claim.token)
        files = (WeightFile("model.safetensors", 1, "0" * 64),)
        manifest = WeightsManifest(claim.job_id, version, claim.epoch, step, files)
        await self.store.versions.publish(claim.job_id, claim.token, manifest)
        if load:
            await self.load(manifest, model)
        return manifest

    async def load(self, manifest: WeightsManifest, model: Path) -> None:
        await self.engine.pause()
        await self.engine.load_weights(model, manifest.label)
        await self.engine.resume()

    async def dispatch(self, claim: Claim, num_groups: int, *, size: int = 2, split: Split = Split.TRAIN) -> None:
        for group in range(num_groups):
            task = group % 50 if split is Split.TRAIN else 0
            await self.bus.dispatch(claim.job_id, claim.token, group, size=size, split=split, task_index=task)

    async def count_join(self) -> None:
        self.num_joins += 1

    def worker(self, name: str = "worker-0", **config: Any) -> EpisodeWorker:
        config = {"lease_s": LEASE_S, "engine_urls": [self.place.engine_url], **config}
        # Some worlds look for files in the directory of their test.
        hosts = LocalHosts(
            Interpreters(self.place.world.parent), WallPolicy(readable=(str(self.place.world.parents[1]),))
        )
        return EpisodeWorker(
            WorkerConfig(name, **config),
            Bus(self._redis, lease_s=LEASE_S),
            self.store,
            lambda url: EngineClient(url, self._http),
            partial(load_job, boot=hosts.boot),
            EnvironmentDriver(),
            clock=time.monotonic,
            rng=random.Random(0),
            joined=self.count_join,
        )

    @contextlib.asynccontextmanager
    async def working(self, worker: EpisodeWorker) -> AsyncIterator[EpisodeWorker]:
        """``worker`` runs inside the block and drains at its end."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.run(stop))
            try:
                yield worker
            finally:
                stop.set()

    def process(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {
            "GSPO_REDIS_URL": self.redis_url,
            "GSPO_ENGINE_URLS": self.place.engine_url,
            "GSPO_LEASE_S": str(LEASE_S),
        }
        child = spawn("services.rollout", list(arguments), environment)
        self.children.append(child)
        return child

    async def num_ready(self, claim: Claim) -> int:
        return len(await self.bus.ready_groups(claim.job_id))

    async def all_ready(self, claim: Claim, num_groups: int) -> None:
        async def enough() -> bool:
            return await self.num_ready(claim) == num_groups

        await until(enough, 60.0)

    async def num_segments(self, claim: Claim) -> int:
        return len(await self.bus.read_segments(claim.job_id, count=100_000, block_ms=0))

    async def trajectory(self, claim: Claim, group: int, member: int) -> Trajectory:
        payloads = await self.bus.read_episode(EpisodeKey(claim.job_id, group, member))
        return Trajectory(tuple(decode(payload) for payload in payloads))

    async def trajectories(self, claim: Claim, num_groups: int, size: int = 2) -> list[Trajectory]:
        keys = [(group, member) for group in range(num_groups) for member in range(size)]
        return [await self.trajectory(claim, group, member) for group, member in keys]


@pytest.fixture
async def stage(place: Place, redis_client: Redis, redis_server: RedisServer) -> AsyncIterator[Stage]:
    async with open_http() as http:
        stage = Stage(place, redis_client, redis_server.url, http)
        await stage.bus.load_functions()
        yield stage
        for child in stage.children:
            child.kill()
            child.wait()


def assert_stitched(trajectory: Trajectory, codec: HermesCodec, task: dict[str, int]) -> None:
    """The record equals what a second pair of hands renders, parses and bridges from the sampled ids alone."""
    left = task["replies"]
    messages = [{"role": "system", "content": "Keep talking."}, {"role": "user", "content": f"Say {left} things."}]
    (branch,) = trajectory.branches
    expected: list[int] = codec.render(messages)
    for turn in range(trajectory.num_turns):
        sampled = branch.token_ids[(branch.turn_ids == turn) & branch.action_mask].tolist()
        parsed = codec.parse(sampled)
        prefix = list(expected)
        expected += sampled
        if turn == trajectory.num_turns - 1:
            break
        if parsed.calls:
            replies = [{"role": "tool", "content": reply(call)} for call in parsed.calls]
        else:
            left -= 1
            replies = [{"role": "user", "content": f"{left} to go, {len(parsed.text)} heard."}]
        bridge = codec.bridge(prefix, sampled, replies)
        assert isinstance(bridge, list)
        expected += bridge
    assert branch.token_ids.tolist() == expected


def reply(call: Any) -> str:
    return f"error: unknown tool {call.name!r}; available: []" if call.status == "ok" else f"error: {call.status}"


async def test_episodes_complete_and_every_recorded_token_is_what_was_sent(stage: Stage) -> None:
    claim = await stage.submit()
    manifest = await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 8)
    async with stage.working(stage.worker()) as worker:
        await stage.all_ready(claim, 8)
        await until(lambda: worker.counters["episodes/finished"] == 16)
        assert worker._record().environment_capacity == {claim.job_id: 16 * 64}
        description = await stage.store.environments.get(claim.job_id, 0)
    assert description is not None
    assert description["num_tasks"] == {"train": 50, "eval": 1}
    codec = stage.place.codec
    trajectories = await stage.trajectories(claim, 8)
    for trajectory in trajectories:
        assert_stitched(trajectory, codec, {"replies": trajectory.key.group % 4 + 1})
        assert trajectory.versions == {manifest.version}
        assert trajectory.attempt == 0
    assert {trajectory.outcome.stop_reason for trajectory in trajectories} <= {
        StopReason.COMPLETED,
        StopReason.MAX_TOKENS,
        StopReason.PARSE_ERROR,  # noise may end a turn by another token than the format does
    }
    assert max(trajectory.num_turns for trajectory in trajectories) > 2
    (record,) = await stage.store.fleet.workers()
    assert record.counters["episodes/finished"] == 16
    assert record.counters["tokens/sampled"] == sum(trajectory.num_actions for trajectory in trajectories)


async def test_a_gateway_leaves_the_jobs_of_environments_to_rollout_workers(stage: Stage) -> None:
    claim = await stage.submit()
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 4)
    async with stage.working(stage.worker("gateway-0", kind="gateway")) as gateway:
        await until(lambda: claim.job_id in gateway._leaving)
        async with stage.working(stage.worker()) as worker:
            await stage.all_ready(claim, 4)
            await until(lambda: worker.counters["episodes/finished"] == 8)
        assert (gateway._jobs, gateway.counters["jobs/not_servable"]) == ({}, 0)
        kinds = {one.id: one.kind for one in await stage.store.fleet.workers()}
        assert kinds["gateway-0"] == "gateway"


async def test_evaluation_episodes_are_played_on_held_out_tasks(stage: Stage) -> None:
    claim = await stage.submit(evaluation={"temperature": 0.5})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 1, split=Split.EVAL)
    async with stage.working(stage.worker()):
        await stage.all_ready(claim, 1)
    trajectory = await stage.trajectory(claim, 0, 0)
    assert {segment.temperature for segment in trajectory.segments} == {0.5}
    assert_stitched(trajectory, stage.place.codec, {"replies": 2})


async def test_new_weights_in_the_middle_of_a_turn_become_segments_of_their_own(stage: Stage) -> None:
    claim = await stage.submit(sampling={"max_new_tokens": 600})
    await stage.publish(claim, stage.place.endless)
    await stage.dispatch(claim, 4)

    async def sampling() -> bool:
        loads = (await stage.engine.loads())["loads"]
        return bool(loads[0]["num_running_reqs"] > 0)

    async with stage.working(stage.worker()) as worker:
        await until(sampling)
        await stage.publish(claim, stage.place.endless, step=1)
        await stage.all_ready(claim, 4)
        assert worker.counters["episodes/mixed_versions"] > 0
    mixed = 0
    for trajectory in await stage.trajectories(claim, 4):
        assert_stitched(trajectory, stage.place.codec, {"replies": trajectory.key.group % 4 + 1})
        versions = [segment.version for segment in trajectory.segments]
        assert versions == sorted(versions)
        assert set(versions) <= {0, 1}
        first_turn = {segment.version for segment in trajectory.segments if segment.turn == 0 and segment.num_actions}
        mixed += first_turn == {0, 1}
    assert mixed > 0


async def test_another_worker_finishes_what_a_killed_one_had_begun_and_nothing_is_doubled(stage: Stage) -> None:
    claim = await stage.submit(config={"replies": 15})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 12)
    victim = stage.process()

    async def halfway() -> bool:
        return await stage.num_segments(claim) > 40

    await until(halfway, 60.0)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    begun = await stage.num_segments(claim)
    assert await stage.num_ready(claim) < 12
    async with stage.working(stage.worker("survivor")) as survivor:
        await stage.all_ready(claim, 12)
        assert survivor.counters["episodes/resumed"] > 0
        assert survivor.counters["tokens/resumed"] > 0
        assert survivor.counters["episodes/restarted"] == 0
    segments = [decode(payload) for _, payload in await stage.bus.read_segments(claim.job_id, count=100_000)]
    assert len(segments) > begun
    names = [(segment.key, segment.attempt, segment.index) for segment in segments]
    assert len(names) == len(set(names))
    assert sum(segment.is_final for segment in segments) == 24
    for trajectory in await stage.trajectories(claim, 12):
        assert trajectory.attempt == 0
        assert_stitched(trajectory, stage.place.codec, {"replies": 15})


async def test_kept_worlds_survive_the_worker_that_is_killed(stage: Stage) -> None:
    claim = await stage.submit("Remembers", {"replies": 15})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 12)
    victim = stage.process()

    async def halfway() -> bool:
        return await stage.num_segments(claim) > 80

    await until(halfway, 60.0)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    async with stage.working(stage.worker("survivor")) as survivor:
        await stage.all_ready(claim, 12)
        counters = survivor.counters
        assert counters["episodes/resumed_from_a_world"] > 0
        # Only those that the death met between an action and the keeping of the world start again.
        assert counters["tokens/resumed"] > counters["tokens/thrown_away"]
    for trajectory in await stage.trajectories(claim, 12):
        assert_stitched(trajectory, stage.place.codec, {"replies": 15})


async def test_episodes_take_turns_where_there_are_fewer_places_and_no_token_is_sampled_twice(stage: Stage) -> None:
    claim = await stage.submit(
        config={"replies": 6}, rollout={"group_size": 2, "max_staleness": 1, "lease_tokens": 20, "chunk_tokens": 10}
    )
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 3)
    async with stage.working(stage.worker(max_episodes=2)) as worker:
        await stage.all_ready(claim, 3)
        await until(lambda: worker.counters["episodes/finished"] == 6)
    trajectories = await stage.trajectories(claim, 3)
    for trajectory in trajectories:
        assert trajectory.attempt == 0
        assert_stitched(trajectory, stage.place.codec, {"replies": 6})
    counters = worker.counters
    assert counters["episodes/interrupted"] > 0
    assert counters["episodes/resumed"] == counters["episodes/interrupted"]
    assert counters["tokens/thrown_away"] == 0
    assert counters["tokens/sampled"] == sum(trajectory.num_actions for trajectory in trajectories)


async def test_places_go_to_jobs_by_priority_and_the_idle_ones_share_to_the_busy(stage: Stage) -> None:
    class Stub:
        def __init__(self, priority: float, num_wanted: int) -> None:
            self.priority, self._num_wanted = priority, num_wanted
            self.is_idle, self.num_episodes = False, 0

        def num_wanted(self, spare: int) -> int:
            return self._num_wanted

    worker = stage.worker(max_episodes=16)
    worker._jobs = {"high": Stub(3.0, 99), "low": Stub(1.0, 99)}  # type: ignore[dict-item]
    assert (worker._share("high"), worker._share("low"), worker._share("gone")) == (12, 4, 0)
    worker._jobs["high"] = Stub(3.0, 2)  # type: ignore[assignment]
    assert (worker._share("high"), worker._share("low")) == (2, 14)


async def test_no_turn_of_jobs_makes_a_worker_hold_more_than_its_places(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stub:
        priority, is_idle, num_episodes = 1.0, False, 0

        def num_wanted(self, spare: int) -> int:
            return 9

    worker, jobs = stage.worker(max_episodes=2), {name: Stub() for name in "abcde"}
    worker._jobs = jobs  # type: ignore[assignment]
    played = set[str]()
    for turn in range(5):
        monkeypatch.setattr(worker, "_clock", lambda turn=turn: turn * worker_module.TURN_S)
        for name, job in jobs.items():  # they play on from turn to turn
            job.num_episodes += max(0, worker._share(name) - job.num_episodes)
        assert sum(job.num_episodes for job in jobs.values()) == 2
    for turn in range(5):
        monkeypatch.setattr(worker, "_clock", lambda turn=turn: turn * worker_module.TURN_S)
        for job in jobs.values():
            job.num_episodes = 0
        played |= {name for name in jobs if worker._share(name)}
    assert played == {*jobs}


async def test_a_job_that_no_engine_serves_leaves_its_places_to_the_others(stage: Stage) -> None:
    served, waits = [await stage.submit(sampling={"max_new_tokens": 600}) for _ in range(2)]
    await stage.publish(served, stage.place.endless)
    await stage.publish(waits, stage.place.endless, load=False)
    async with stage.working(stage.worker(max_episodes=4)) as worker:
        await until(lambda: worker._jobs.keys() >= {served.job_id, waits.job_id})
        for claim in (served, waits):
            await stage.dispatch(claim, 8)
        await until(lambda: worker._share(served.job_id) == 4)
        assert worker._share(waits.job_id) == 0


async def test_a_redis_that_is_killed_and_started_again_costs_no_token(place: Place, tmp_path: Path) -> None:
    with contextlib.ExitStack() as servers:
        server = servers.enter_context(RedisServer.spawn(tmp_path))
        async with open_http() as http, connect(server.url) as redis:
            stage = Stage(place, redis, server.url, http)
            await stage.bus.load_functions()
            claim = await stage.submit(config={"replies": 15})
            await stage.publish(claim, place.chatty)
            await stage.dispatch(claim, 4)

            async def begun() -> bool:
                return await stage.num_segments(claim) > 10

            async with stage.working(stage.worker()) as worker:
                await until(begun)
                assert server.pid is not None
                os.kill(server.pid, signal.SIGKILL)
                server.close()
                again = await asyncio.to_thread(RedisServer.spawn, tmp_path)
                servers.callback(again.close)
                assert again.url == server.url
                await stage.all_ready(claim, 4)
                await until(lambda: worker.counters["episodes/finished"] == 8)
                assert worker.counters["worker/fenced"] == 0
            for trajectory in await stage.trajectories(claim, 4):
                assert trajectory.attempt == 0
                assert_stitched(trajectory, place.codec, {"replies": 15})


async def test_sigterm_hands_everything_back_at_once_and_ends_with_status_0(stage: Stage) -> None:
    claim = await stage.submit(config={"replies": 35})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 12)
    leaver = stage.process()

    async def halfway() -> bool:
        return await stage.num_segments(claim) > 60

    await until(halfway, 60.0)
    leaver.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(leaver.wait, ENDED_S) == 0
    num_open = 24 - sum(
        [decode(payload).is_final for _, payload in await stage.bus.read_segments(claim.job_id, count=100_000)]
    )
    token = await stage.bus.join("next")
    leases = await stage.bus.lease(claim.job_id, "next", token, 100)
    assert len(leases) == num_open > 0
    assert sum(lease.num_segments > 0 for lease in leases) > 0
    assert all(lease.attempt == 0 for lease in leases)


async def test_a_worker_leaves_although_a_lease_is_not_answered_and_hands_that_back_too(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = await stage.submit(config={"replies": 3})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 12)
    leaver = stage.worker("leaver", max_episodes=4, drain_s=0.1)
    call, is_silent, num_leases = leaver._bus._functions.call, asyncio.Event(), 0

    async def second_lease_is_not_answered(name: str, *given: Any) -> Any:
        nonlocal num_leases
        answer = await call(name, *given)
        num_leases += name == "lease"
        if name == "lease" and num_leases == 2:
            is_silent.set()
            await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(leaver._bus._functions, "call", second_lease_is_not_answered)
    async with asyncio.timeout(HANG_S), stage.working(leaver):
        await is_silent.wait()
    num_open = 24 - leaver.counters["episodes/finished"]
    token = await stage.bus.join("next")
    assert len(await stage.bus.lease(claim.job_id, "next", token, 100)) == num_open > 0


async def test_a_worker_that_leaves_costs_no_token_and_another_goes_on(stage: Stage) -> None:
    """All that was sampled is in the record, nothing is sampled again, and both see the same ledger."""
    claim = await stage.submit(config={"replies": 25})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 8)
    leaver, heir = stage.worker("leaver"), stage.worker("heir")

    async def begun() -> bool:
        return await stage.num_segments(claim) > 60

    async with stage.working(leaver):
        await until(begun, 60.0)
    assert leaver.counters["episodes/handed_back"] > 0
    async with stage.working(heir):
        await stage.all_ready(claim, 8)
    trajectories = await stage.trajectories(claim, 8)
    for trajectory in trajectories:
        assert trajectory.attempt == 0
        assert_stitched(trajectory, stage.place.codec, {"replies": 25})
    num_sampled = leaver.counters["tokens/sampled"] + heir.counters["tokens/sampled"]
    assert num_sampled == sum(trajectory.num_actions for trajectory in trajectories)
    assert heir.counters["tokens/resumed"] > 0
    assert leaver.counters["tokens/thrown_away"] == heir.counters["tokens/thrown_away"] == 0


async def test_a_worker_of_several_processes_shares_the_job_replaces_a_dead_one_and_leaves_as_one(stage: Stage) -> None:
    claim = await stage.submit(config={"replies": 35})
    await stage.publish(claim, stage.place.chatty)
    num_groups = 60  # more than can be played before the dead process is replaced
    await stage.dispatch(claim, num_groups)
    parent = stage.process("--processes", "2", "--max-episodes", "8")

    async def players() -> set[int]:
        groups = await stage.bus.groups(claim.job_id)
        workers = {one.worker for group in groups for one in group.episodes if one.worker}
        return {int(name.rpartition("-")[2]) for name in workers}

    async def two_play() -> bool:
        return len(await players()) == 2

    await until(two_play, 60.0)
    before = await players()
    victim = min(before)
    os.kill(victim, signal.SIGKILL)

    async def replaced() -> bool:
        now = await players()
        return victim not in now and len(now) == 2

    await until(replaced, 60.0)
    now = await players()
    parent.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(parent.wait, ENDED_S) == 0
    assert not alive(now | before)
    token = await stage.bus.join("next")
    leases = await stage.bus.lease(claim.job_id, "next", token, 2 * num_groups)
    num_ended = sum([decode(one).is_final for _, one in await stage.bus.read_segments(claim.job_id, count=100_000)])
    assert len(leases) == 2 * num_groups - num_ended > 0
    assert all(lease.attempt == 0 for lease in leases)


async def test_a_process_that_was_asked_to_leave_is_not_replaced_and_one_that_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_main, "RESTART_S", 0.0)
    starts = tmp_path / "starts"
    program = f"import os; f = open({str(starts)!r}, 'a'); print('x', file=f, flush=True); f.close()"
    failing_first = f"{program}; os._exit(len(open({str(starts)!r}).readlines()) < 3)"
    async with asyncio.timeout(HANG_S):
        await rollout_main.watch([sys.executable, "-c", failing_first], 1, dict(os.environ), asyncio.Event())
    assert len(starts.read_text().splitlines()) == 3


async def test_a_worker_that_lost_its_lease_drops_its_episodes_and_joins_again(stage: Stage) -> None:
    claim = await stage.submit(config={"replies": 30}, sampling={"max_new_tokens": 200})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 4)

    async def begun() -> bool:
        return await stage.num_segments(claim) > 10

    async with stage.working(stage.worker("twin")) as worker:
        await until(begun)
        await stage.bus.join("twin")  # its name is taken by another: the old token is void
        await until(lambda: worker.counters["worker/fenced"] == 1)
        await until(lambda: stage.num_joins == 2)
        await stage.all_ready(claim, 4)
    for trajectory in await stage.trajectories(claim, 4):
        assert_stitched(trajectory, stage.place.codec, {"replies": 30})


async def test_a_process_whose_name_another_has_too_goes_on_under_one_of_its_own(stage: Stage) -> None:
    """Containers on the network of their host have its hostname, and each the first process id."""
    claim = await stage.submit()
    await stage.publish(claim, stage.place.chatty)
    process = stage.process()

    async def names() -> list[str]:
        return [one.id for one in await stage.store.fleet.workers()]

    async def is_there() -> bool:
        return bool(await names())

    await until(is_there, 60.0)
    [given] = await names()

    async def has_given_in() -> bool:
        await stage.bus.join(given)  # as its namesake does, each time that it has lost its lease
        return any(name.startswith(f"{given}-") for name in await names())

    await until(has_given_in, 60.0)
    await stage.dispatch(claim, 2)
    await stage.all_ready(claim, 2)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, ENDED_S) == 0


async def test_a_worker_that_is_cancelled_at_any_moment_ends(stage: Stage) -> None:
    claim = await stage.submit(config={"replies": 30})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 4)
    rng = random.Random(0)
    for number in range(20):
        running = asyncio.create_task(stage.worker(f"worker-{number}").run(asyncio.Event()))
        await asyncio.wait({running}, timeout=0.3 * rng.random())
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=ENDED_S)
        assert done


async def test_a_failing_world_and_a_job_that_cannot_be_loaded_do_not_touch_the_healthy_job(stage: Stage) -> None:
    healthy = await stage.submit()
    await stage.publish(healthy, stage.place.chatty)
    unloadable = await stage.submit("Nowhere")
    await stage.dispatch(healthy, 4)
    async with stage.working(stage.worker()) as worker:
        await stage.all_ready(healthy, 4)
        await until(lambda: worker.counters["jobs/not_servable"] > 0)
        events = await stage.store.events.read(unloadable.job_id)
        (health,) = [event.data for event in events if event.type == "env.health"]
        assert health["healthy"] is False
        assert "has no 'Nowhere'" in health["error"]
        failing = await stage.submit("Gone")
        await stage.publish(failing, stage.place.chatty)
        await stage.dispatch(failing, 2)
        await stage.all_ready(failing, 2)
    for trajectory in await stage.trajectories(failing, 2):
        assert (trajectory.outcome.stop_reason, trajectory.reward) == (StopReason.ENV_ERROR, None)
    assert worker.counters["attempts/reset_failed"] == 12


async def test_a_job_that_can_be_served_after_all_is_said_to_be_well(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "RELOAD_S", 0.01)
    claim = await stage.submit()
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 1)
    worker = stage.worker()
    load, num_tries = worker._load, itertools.count()

    async def loads_at_last(*order: Any) -> LoadedJob:
        if next(num_tries) < 2:
            raise JobNotServable("its image is not here yet")
        return await load(*order)

    monkeypatch.setattr(worker, "_load", loads_at_last)
    async with stage.working(worker):
        await stage.all_ready(claim, 1)
    told = [event.data for event in await stage.store.events.read(claim.job_id) if event.type == "env.health"]
    assert [(one["healthy"], one["error"]) for one in told] == [
        *[(False, "its image is not here yet")] * 2,
        (True, ""),
    ]


async def test_a_worker_that_is_asked_to_leave_does_not_wait_for_an_environment_that_is_loading(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, given_up = asyncio.Event(), asyncio.Event()

    async def never(cls: type[HostedEnvironment], *order: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(HostedEnvironment, "open", classmethod(never))
    await stage.submit()
    async with asyncio.timeout(HANG_S), stage.working(stage.worker()):
        await begun.wait()
    assert given_up.is_set()


@pytest.mark.parametrize("num_ticks", range(8))
async def test_what_a_job_has_loaded_is_closed_whenever_its_worker_is_cancelled(stage: Stage, num_ticks: int) -> None:
    """Also in the moment in which loading has just ended: its processes would be nobody's."""
    is_loaded, num_closed = asyncio.Event(), 0

    class Loaded:
        async def close(self) -> None:
            nonlocal num_closed
            num_closed += 1

    async def load() -> Any:
        await asyncio.sleep(0)
        is_loaded.set()
        return Loaded()

    serving = asyncio.create_task(stage.worker()._unless_left(load(), asyncio.Event()))
    await is_loaded.wait()
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait({serving})
    assert num_closed == (1 if serving.cancelled() else 0)


@pytest.mark.parametrize("during_an_end", [False, True], ids=["", "an end is stored and not confirmed"])
async def test_a_job_whose_serving_fails_strands_no_episode_and_takes_no_places(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, during_an_end: bool
) -> None:
    """Also where those fail that only watch: the worker lives on, so nobody would ever find what it holds."""
    real, append, is_broken = JobEngines.refresh, Bus.append, asyncio.Event()

    async def refresh(self: JobEngines) -> None:
        await real(self)
        if is_broken.is_set():
            raise LookupError("a defect")

    async def unconfirmed(self: Bus, job: str, token: str, appends: Sequence[Append | Kept]) -> None:
        await append(self, job, token, appends)
        if any(isinstance(item, Append) and item.final for item in appends):
            is_broken.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(JobEngines, "refresh", refresh)
    if during_an_end:
        monkeypatch.setattr(Bus, "append", unconfirmed)
    monkeypatch.setattr(worker_module, "RELOAD_S", 1e6)
    claim = await stage.submit(config={"replies": 1 if during_an_end else 30})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 4)
    async with stage.working(stage.worker()) as worker:
        if not during_an_end:
            await until(lambda: worker.counters["tokens/sampled"] > 100)
            is_broken.set()
        await until(lambda: worker.counters["jobs/not_servable"] > 0)
        # The queue's word: the worker does not count an end whose confirmation it no longer waited for.
        groups = await stage.bus.groups(claim.job_id)
        stages = {episode.stage for group in groups for episode in group.episodes}
        assert stages <= {EpisodeStage.QUEUED, EpisodeStage.DONE}
        assert EpisodeStage.DONE in stages or not during_an_end
        record = worker._record()
        assert (record.jobs, record.environment_capacity, record.num_episodes) == ((), {}, 0)


async def test_an_environment_that_only_fails_is_quarantined_said_to_be_ill_and_recovers(
    stage: Stage, tmp_path: Path
) -> None:
    server = tmp_path / "server"
    ill = await stage.submit("Away", {"server": str(server)}, limits={"retries": 2})
    await stage.publish(ill, stage.place.chatty)
    await stage.dispatch(ill, 10, size=2)

    async def told() -> list[dict[str, Any]]:
        events = await stage.store.events.read(ill.job_id)
        return [event.data for event in events if event.type == "env.health"]

    async def is_ill() -> bool:
        return any(not data["healthy"] for data in await told())

    async with stage.working(stage.worker()) as worker:
        await until(is_ill)
        assert "No such file" in (await told())[0]["error"]
        (record,) = await stage.store.fleet.workers()
        ((environment, error),) = record.ill_environments[ill.job_id].items()
        assert environment.endswith(":Away")
        assert "No such file" in error
        # Who waits for it wants no more places than it takes to try it.
        assert worker._jobs[ill.job_id].num_wanted(3) == 3
        # Nobody uses up the retries of an episode while it lasts.
        num_failures = worker.counters["attempts/reset_failed"]
        await until(lambda: worker.counters["attempts/reset_failed"] > num_failures)
        assert await stage.num_ready(ill) == 0
        server.write_text("")
        await stage.all_ready(ill, 10)
        assert [data["healthy"] for data in await told()] == [False, True]
        assert worker._record().ill_environments == {}
    trajectories = await stage.trajectories(ill, 10)
    assert {trajectory.reward for trajectory in trajectories} == {1.0}


async def test_an_episode_that_meets_a_defect_of_ours_is_given_up_with_the_cause(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Episode.run

    async def defect(self: Episode) -> StopReason:
        if self._order.key.member == 1:
            raise LookupError("a defect")
        return await real(self)

    monkeypatch.setattr(Episode, "run", defect)
    claim = await stage.submit()
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 1)
    async with stage.working(stage.worker()) as worker:
        await stage.all_ready(claim, 1)
        assert worker.counters["episodes/broken"] == 3
    (ready,) = await stage.bus.ready_groups(claim.job_id)
    assert ready.dead == (1,)
    (letter,) = await stage.bus.dead_letters(claim.job_id)
    assert (letter.key.member, letter.reason) == (1, "LookupError: a defect")


async def test_a_job_that_is_paused_gets_its_episodes_back_and_goes_on_later(stage: Stage) -> None:
    claim = await stage.submit(config={"replies": 30})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 4)
    async with stage.working(stage.worker()) as worker:

        async def begun() -> bool:
            return await stage.num_segments(claim) > 10

        await until(begun)
        for status in ("running", "pausing", "paused"):
            await stage.store.jobs.set_status(claim.job_id, status, token=claim.token)
        await until(lambda: worker.counters["episodes/handed_back"] > 0)
        await stage.store.jobs.set_status(claim.job_id, "resuming", token=claim.token)
        await stage.all_ready(claim, 4)
        assert worker.counters["episodes/resumed"] > 0


async def test_an_engine_that_is_too_far_behind_or_holds_another_job_samples_nothing(stage: Stage) -> None:
    claim = await stage.submit(rollout={"group_size": 2, "max_staleness": 1})
    old = await stage.publish(claim, stage.place.chatty)
    dead_line = await stage.publish(claim, stage.place.chatty, step=3, load=False)
    newest = await stage.publish(claim, stage.place.chatty, step=2, load=False)
    other = await stage.submit()
    foreign = await stage.publish(other, stage.place.chatty, load=False)
    await stage.dispatch(claim, 2)
    async with stage.working(stage.worker()) as worker:
        await until(lambda: len(worker._jobs) == 2 and worker._jobs[claim.job_id]._engines._published == newest)
        for manifest in (old, dead_line, foreign):
            await stage.load(manifest, stage.place.chatty)
            engine = worker._table._engines[stage.place.engine_url]
            await until(lambda engine=engine, manifest=manifest: str(engine.label) == manifest.label)  # type: ignore[misc]
            assert worker._jobs[claim.job_id]._engines.usable() == []
        assert await stage.num_segments(claim) == 0
        await stage.load(newest, stage.place.chatty)
        await stage.all_ready(claim, 2)
    for trajectory in await stage.trajectories(claim, 2):
        assert trajectory.versions == {newest.version}


async def test_tokens_of_another_job_are_thrown_away_and_sampled_again(stage: Stage) -> None:
    claim = await stage.submit(sampling={"max_new_tokens": 600})
    mine = await stage.publish(claim, stage.place.endless)
    other = await stage.submit()
    foreign = await stage.publish(other, stage.place.endless, load=False)
    await stage.dispatch(claim, 1)

    async def sampling() -> bool:
        loads = (await stage.engine.loads())["loads"]
        return bool(loads[0]["num_running_reqs"] > 0)

    async with stage.working(stage.worker()) as worker:
        await until(sampling)
        await stage.load(foreign, stage.place.endless)
        await until(lambda: worker.counters["engine/InvalidAnswer"] > 0)
        assert await stage.num_segments(claim) == 0
        await stage.load(mine, stage.place.endless)
        await stage.all_ready(claim, 1)
    for trajectory in await stage.trajectories(claim, 1):
        assert trajectory.versions == {mine.version}


class Cable:
    """Between worker and engine; can be cut and mended."""

    def __init__(self, target: str) -> None:
        self._target = httpx.URL(target)
        self._port = free_port()  # one that nobody is given while it is cut
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.flows = asyncio.Event()
        self.flows.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._port)

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert self._server is not None
        self._pumps.add(task)
        async with contextlib.AsyncExitStack() as ends:
            # Also when it is cut before the far end is reached: else its client waits for ever.
            ends.callback(writer.close)
            ends.callback(self._pumps.discard, task)
            ends.enter_context(contextlib.suppress(asyncio.CancelledError))
            if not self._server.is_serving():
                return
            far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
            ends.callback(far_writer.close)
            await first_to_end(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self.flows.wait()
                writer.write(data)
                await writer.drain()


async def test_an_engine_that_goes_away_is_waited_for(stage: Stage) -> None:
    cable = Cable(stage.place.engine_url)
    await cable.mend()
    claim = await stage.submit(config={"replies": 20})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 4)

    async def begun() -> bool:
        return await stage.num_segments(claim) > 10

    async with stage.working(stage.worker(engine_urls=[cable.url])) as worker:
        await until(begun)
        await cable.cut()
        await until(lambda: worker.counters["engine/EngineUnavailable"] > 0)
        await cable.mend()
        await stage.all_ready(claim, 4)
        await until(lambda: worker.counters["episodes/finished"] == 8)
    await cable.cut()
    for trajectory in await stage.trajectories(claim, 4):
        assert trajectory.attempt == 0
        assert_stitched(trajectory, stage.place.codec, {"replies": 20})


async def test_requests_of_an_engine_that_fell_silent_are_asked_again_elsewhere(stage: Stage) -> None:
    hung, sound = Cable(stage.place.engine_url), Cable(stage.place.engine_url)
    await hung.mend()
    await sound.mend()
    claim = await stage.submit(config={"replies": 20})
    await stage.publish(claim, stage.place.chatty)
    await stage.dispatch(claim, 4)

    async def begun() -> bool:
        return await stage.num_segments(claim) > 10

    async with stage.working(stage.worker(engine_urls=[hung.url, sound.url], engine_silence_s=0.5)) as worker:
        await until(begun)
        hung.flows.clear()
        await stage.all_ready(claim, 4)
        assert worker.counters["engine/no_answers"] > 0
        hung.flows.set()
    for cable in (hung, sound):
        await cable.cut()
    trajectories = await stage.trajectories(claim, 4)
    assert {segment.engine_id for one in trajectories for segment in one.segments} == {hung.url, sound.url}
    for trajectory in trajectories:
        assert_stitched(trajectory, stage.place.codec, {"replies": 20})


def test_the_worker_needs_no_torch() -> None:
    code = "import sys, services.rollout.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_redis_the_process_says_what_to_set() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
    ended = subprocess.run(
        [sys.executable, "-m", "services.rollout"], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "GSPO_REDIS_URL" in ended.stderr
