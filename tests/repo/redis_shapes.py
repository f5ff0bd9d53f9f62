"""What lies in Redis, looked at: a job goes through queue and store on a real server, and names of fields are kept.

The rule: every kind of record is written at least once. Records of the queue (packed) are told apart from the rest,
since they have a schema of their own.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from gspo_core.types import Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.state.fleet_records import EngineRecord, EngineReport, EngineState, TrainerRecord, WorkerRecord
from services.state.jobs import CancelManner, DesiredState, JobStatus
from services.state.loans import Loans
from services.state.queue import Append, Bus, Kept, LeasedEpisode, Snapshot
from services.state.queue_records import PostedReward
from services.state.server import RedisServer, connect
from services.state.store import Claim, Store

QUEUE_RECORDS = ("episodes", "groups", "holders", "snapshots", "offers", "loans", "rewards")
# Hashes and streams with fields of fixed names. Fields of others are numbers or names: only their kind is looked at.
_FIXED = ("job", "trainer", "meta", "event_log", "events", "segments", "dead_letters", "rebuild")
Fields = dict[str, list[str]]


def observe() -> tuple[Fields, Fields]:
    """Fields of the queue's records, and of everything else."""
    with tempfile.TemporaryDirectory() as directory, RedisServer.spawn(Path(directory)) as server:
        return asyncio.run(_observe(server.url))


async def _observe(url: str) -> tuple[Fields, Fields]:
    redis = connect(url)
    bus, store = Bus(redis), Store(redis)
    await bus.load_functions()
    seen: defaultdict[str, set[str]] = defaultdict(set)
    async for _ in _play(bus, store):
        await _look(redis, seen)
    await redis.aclose()
    found = {name: sorted(fields) for name, fields in sorted(seen.items())}
    records = {name: fields for name, fields in found.items() if name in QUEUE_RECORDS}
    return records, {name: fields for name, fields in found.items() if name not in records}


async def _play(bus: Bus, store: Store) -> Any:
    """One step of the life of a job after the other."""
    job = (await store.jobs.create('{"model": "m"}', idempotency_key="k")).id
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await _tell(store, claim)
    await bus.join_in_place("gateway", "place")
    token = await bus.join("worker")
    await bus.dispatch(job, claim.token, 0, size=2, split=Split.TRAIN, task_index=0, bytes_per_episode=100)
    first, second = await bus.lease(job, "worker", token, 2)
    await bus.append(job, token, [_segment(first, 0, final=False)])
    yield
    await Loans(store._functions).offer(first.key, token, 0, b"told")
    await Loans(store._functions).lend(job, "loan", 60)
    await bus.save_snapshot(first.key, token, Snapshot(0, 1, b"world"))
    await bus.append(job, token, [Kept(first.key, Snapshot(0, 1, b"part"), is_part=True)])
    yield
    await bus.append(job, token, [_segment(first, 1, final=True)])
    while not await bus.dead_letters(job):
        await bus.fail(second.key, token, "no")
        yield
        await bus.lease(job, "worker", token, 1)
    await bus.dispatch(job, claim.token, 1, size=2, split=Split.TRAIN, task_index=0, bytes_per_episode=100)
    third, fourth = await bus.lease(job, "worker", token, 2)
    for lease in (third, fourth):
        await bus.await_reward(token, _segment(lease, 0, final=True), b"kept", deadline=2.0)
    await bus.post_reward(_segment(third, 0, final=True), PostedReward("t", 0, 0.5), seen=0, now=1.0)
    yield
    await bus.settle_reward(_segment(third, 0, final=True), "u", seen=1, now=1.0)
    await bus.expire_rewards(job, claim.token, now=3.0)
    yield
    await bus.commit(job, claim.token, 1, [0, 1])
    await store.events.trim(job, 1)
    yield
    await store.jobs.set_desired_state(job, DesiredState.CANCELLED, manner=CancelManner.NOW)
    await store.jobs.release(job, claim.token)
    for status in (JobStatus.CANCELLING, JobStatus.CANCELLED):
        await store.jobs.set_status(job, status)
    yield


def _segment(lease: LeasedEpisode, index: int, *, final: bool) -> Append:
    return Append(lease.key, 0, index, b"payload", final, version=1, note="note")


async def _tell(store: Store, claim: Claim) -> None:
    job, token = claim.job_id, claim.token
    await store.jobs.change_settings(job, 0, {"optimizer.lr": 1.0}, {"optimizer.lr": 1.0})
    version = await store.versions.next(job, token)
    files = (WeightFile("model.safetensors", 1, "0" * 64),)
    await store.versions.publish(job, token, WeightsManifest(job, version, claim.epoch, 0, files))
    await store.jobs.set_status(job, JobStatus.RUNNING, token=token)
    await store.jobs.update_progress(job, token, 1, version)
    await store.metrics.add(job, 1, {"loss": 1.0})
    await store.fleet.register_engine(EngineRecord(id="http://e", url="http://e"))
    await store.fleet.register_trainer(TrainerRecord(id="trainer"))
    await store.fleet.register_worker(WorkerRecord(id="worker"))
    await store.fleet.bind(job, token, "http://e")
    await store.fleet.mark(job, token, "http://e", EngineReport(EngineState.READY))


async def _look(redis: Redis, seen: defaultdict[str, set[str]]) -> None:
    for key in await redis.keys("gspo:*"):
        name, kind = key.decode().rpartition(":")[2], (await redis.type(key)).decode()
        if name in QUEUE_RECORDS:
            for packed in await redis.hvals(key):
                seen[name].update(_typed(msgspec.msgpack.decode(packed)))
        elif name in _FIXED and kind == "hash":
            seen[name].update(field.decode() for field in await redis.hkeys(key))
        elif name in _FIXED and kind == "stream":
            seen[name].update(field.decode() for _, fields in await redis.xrange(key) for field in fields)
        else:
            seen[name].add(kind)
        if name == "job" and (attempts := await redis.hget(key, "attempts")):
            seen["attempts of a job"].update(field for one in json.loads(attempts) for field in one)


def _typed(record: dict[str, Any]) -> list[str]:
    return [f"{field}: {type(value).__name__}" for field, value in record.items() if field != "v"]
