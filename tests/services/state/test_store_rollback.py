"""A run is rolled back: 37 versions, the checkpoints after step 20 are lost, and the replay goes another way."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from redis.asyncio import Redis

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.staleness import token_staleness
from gspo_core.types import Split
from gspo_core.versions import WeightsManifest
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir, JobsDir
from services.files.weights import WeightStore
from services.state.queue import Append, Bus, Fenced, LeasedEpisode
from services.state.store import Claim, Store

pytestmark = pytest.mark.every_server

NUM_VERSIONS = 37
LAST_CHECKPOINT = 20


class Run:
    """What a trainer does with versions and checkpoints; its weights are a text that its history determines."""

    def __init__(self, store: Store, claim: Claim, job_dir: Path) -> None:
        self.store, self.claim = store, claim
        self.weights, self.checkpoints = WeightStore(JobDir(job_dir)), CheckpointStore(JobDir(job_dir))
        self.history = ""
        self.published: list[WeightsManifest] = []

    async def resume(self) -> Position:
        """Claims its epoch at the newest checkpoint; the state is that checkpoint's."""
        newest = next(iter(self.checkpoints.newest_first()), None)
        parent = newest.position if newest else Position(self.claim.epoch - 1, 0)
        self.history = (newest.learner_dir / "history").read_text() if newest else ""
        self.checkpoints.begin_epoch(self.claim.epoch, parent)
        return parent

    async def publish(self, step: int) -> WeightsManifest:
        job, token = self.claim.job_id, self.claim.token
        version = await self.store.versions.next(job, token)
        manifest = self.weights.write(version, self.claim.epoch, step, self._save)
        await self.store.versions.publish(job, token, manifest)
        await self.store.jobs.update_progress(job, token, step, version)
        self.published.append(manifest)
        return manifest

    def train(self) -> None:
        self.history = hashlib.sha256(f"{self.history} in epoch {self.claim.epoch}".encode()).hexdigest()

    def save(self, step: int) -> None:
        self.checkpoints.write(Position(self.claim.epoch, step), Lineage(step=step), self._save_state)

    def _save(self, directory: Path) -> None:
        (directory / "model.safetensors").write_text(json.dumps(self.history))

    def _save_state(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "history").write_text(self.history)


async def first_run(store: Store, bus: Bus, job_dir: Path) -> tuple[Run, str]:
    """37 versions, a checkpoint every five steps, and a worker that plays a group of the time after the last one."""
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    run = Run(store, claim, job_dir)
    await run.resume()
    for step in range(NUM_VERSIONS):
        if step:
            run.train()
        await run.publish(step)
        if step and step % 5 == 0:
            run.save(step)
    await bus.dispatch(claim.job_id, claim.token, 30, size=2, split=Split.TRAIN, task_index=0)
    worker = await bus.join("worker-0")
    first, _ = await bus.lease(claim.job_id, "worker-0", worker, 2)
    await bus.append(claim.job_id, worker, [Append(first.key, 0, 0, b"of the dead epoch", False, 36)])
    return run, worker


@pytest.mark.parametrize("loss", ["redis kept", "redis lost"])
async def test_no_label_names_two_weight_sets_and_no_token_is_younger_than_the_trainer(
    redis_client: Redis, bus: Bus, tmp_path: Path, loss: str
) -> None:
    jobs_dir = tmp_path / "jobs"
    store = Store(redis_client, jobs_dir=JobsDir(jobs_dir))
    job = (await store.jobs.create("{}")).id
    dead, worker = await first_run(store, bus, jobs_dir / job)
    for directory in (jobs_dir / job / "checkpoints").glob("ep*-step*"):
        if int(directory.name[-6:]) > LAST_CHECKPOINT:
            shutil.rmtree(directory)
    # Weights of old versions are collected in the course of time: their numbers must not come free by that.
    dead.weights.collect({LAST_CHECKPOINT})
    await store.jobs.release(job, dead.claim.token)
    if loss == "redis lost":
        await redis_client.flushall()
    claim = await store.jobs.claim("trainer-1")
    assert claim is not None
    heir = Run(store, claim, jobs_dir / job)
    assert await heir.resume() == Position(1, LAST_CHECKPOINT)
    assert claim.epoch == 2
    current = LAST_CHECKPOINT
    await heir.publish(current)
    forks = heir.checkpoints.forks()
    while current < NUM_VERSIONS + 3:
        table = {one.version: Position(one.epoch, one.step) for one in await store.versions.all(job)}
        versions = np.array(sorted(table), dtype=np.int32)
        ages = token_staleness(versions, table, Position(claim.epoch, current), forks)
        for version, age in zip(versions.tolist(), ages.tolist(), strict=True):
            known = min(table[version].step, LAST_CHECKPOINT) if table[version].epoch == 1 else table[version].step
            assert age == current - known >= 0
        heir.train()
        current += 1
        await heir.publish(current)
    everything = dead.published + heir.published
    assert len({one.label for one in everything}) == len({one.version for one in everything}) == len(everything)
    # the same step twice, with other weights: that is why a step names nothing
    twice = [one for one in everything if one.step == LAST_CHECKPOINT + 5]
    assert len({one.files[0].sha256 for one in twice}) == 2
    assert await store.versions.all(job) == everything
    parents = {one.version: one.parent for one in await store.versions.table(job)}
    assert parents[heir.published[0].version] == LAST_CHECKPOINT
    await the_dead_epoch_is_fenced(store, bus, dead.claim, worker, claim)


async def the_dead_epoch_is_fenced(store: Store, bus: Bus, dead: Claim, worker: str, heir: Claim) -> None:
    job = dead.job_id
    # The heir does not owe that group: it is settled, and whoever still plays it is told so.
    await bus.commit(job, heir.token, LAST_CHECKPOINT, [30], reason="dropped_rolled_back")
    key = (await play_again(bus, heir)).key
    for late in (
        bus.append(job, worker, [Append(key, 0, 1, b"late", True, 36)]),
        bus.restart(key, worker, 1),
        bus.dispatch(job, dead.token, 31, size=1, split=Split.TRAIN, task_index=0),
        bus.commit(job, dead.token, 37, [30]),
        store.versions.next(job, dead.token),
        store.jobs.update_progress(job, dead.token, 37, 37),
    ):
        with pytest.raises(Fenced):
            await late


async def play_again(bus: Bus, heir: Claim) -> LeasedEpisode:
    """The same group number, dispatched in the new epoch and held by somebody else."""
    await bus.dispatch(heir.job_id, heir.token, 30, size=1, split=Split.TRAIN, task_index=0)
    token = await bus.join("worker-1")
    [lease] = await bus.lease(heir.job_id, "worker-1", token, 1)
    return lease


@pytest.mark.parametrize("forgets", ["all", "the newest"])
async def test_a_server_that_forgets_hands_out_no_number_again(
    redis_client: Redis, tmp_path: Path, forgets: str
) -> None:
    store = Store(redis_client, jobs_dir=JobsDir(tmp_path))
    job = (await store.jobs.create("{}")).id
    labels: list[str] = []
    for _ in range(6):
        claim = await store.jobs.claim("t")
        assert claim is not None
        run = Run(store, claim, tmp_path / job)
        await run.resume()
        labels += [(await run.publish(step)).label for step in range(3)]
        await store.jobs.release(job, claim.token)
        if forgets == "all":
            await redis_client.flushall()
        else:
            await redis_client.hset(f"gspo:{{{job}}}:job", mapping={"epoch": 1, "next_version": 1})
            await redis_client.hdel(f"gspo:{{{job}}}:job", "published_version")
            await redis_client.delete(f"gspo:{{{job}}}:versions")
    assert len(set(labels)) == len(labels) == 18
    numbers = [int(label.rpartition("/")[2]) for label in labels]
    assert numbers == sorted(set(numbers))
