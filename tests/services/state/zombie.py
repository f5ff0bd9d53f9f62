"""A process that holds a lease until it is stopped, and tries everything that it may when it wakes up.

``python -m tests.services.state.zombie worker|trainer URL JOB LEASE_S``. It prints what it holds as one line of JSON,
beats, and, once a beat is refused, prints one line of JSON with what became of every late write.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping

from gspo_core.types import Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.state.client import connect
from services.state.queue import Append, Bus, Fenced
from services.state.store import Store

Writes = Mapping[str, Callable[[], Awaitable[object]]]


async def beat_until_fenced(beat: Callable[[], Awaitable[object]], lease_s: float) -> None:
    while True:
        try:
            await beat()
        except Fenced:
            return
        await asyncio.sleep(lease_s / 5)


async def try_all(writes: Writes) -> None:
    told: dict[str, str] = {}
    for name, write in writes.items():
        try:
            told[name] = f"answered {await write()!r}"
        except Fenced:
            told[name] = "fenced"
    print(json.dumps(told), flush=True)


async def worker(bus: Bus, job: str, lease_s: float) -> None:
    token = await bus.join("zombie")
    first, second = await bus.lease(job, "zombie", token, 2)
    await bus.append(job, token, [Append(first.key, 0, 0, b"before the stop", False)])
    print(json.dumps([str(first.key), str(second.key)]), flush=True)
    await beat_until_fenced(lambda: bus.beat("zombie", token), lease_s)
    await try_all(
        {
            "append": lambda: bus.append(job, token, [Append(first.key, 0, 1, b"late", False)]),
            "last append": lambda: bus.append(job, token, [Append(second.key, 0, 0, b"late", True)]),
            "append again": lambda: bus.append(job, token, [Append(first.key, 0, 0, b"before the stop", False)]),
            "restart": lambda: bus.restart(first.key, token, 1),
            "beat": lambda: bus.beat("zombie", token),
            # these two pass over what is not held
            "hand back": lambda: bus.hand_back(job, token, [first.key, second.key]),
            "fail": lambda: bus.fail(first.key, token, "late"),
            "lease": lambda: bus.lease(job, "zombie", token, 5),
        }
    )


async def trainer(bus: Bus, store: Store, job: str, lease_s: float) -> None:
    claim = await store.jobs.claim("zombie")
    assert claim is not None
    token = claim.token
    await bus.dispatch(job, token, 0, size=1, split=Split.TRAIN, task_index=0)
    version = await store.versions.next(job, token)
    manifest = WeightsManifest(job, version, claim.epoch, 0, (WeightFile("m", 1, "0" * 64),))
    print(json.dumps({"epoch": claim.epoch}), flush=True)
    await beat_until_fenced(lambda: store.jobs.beat(job, token), lease_s)
    await try_all(
        {
            "dispatch": lambda: bus.dispatch(job, token, 1, size=1, split=Split.TRAIN, task_index=0),
            "commit": lambda: bus.commit(job, token, 1, [0]),
            "status": lambda: store.jobs.set_status(job, "failed", token=token),
            "progress": lambda: store.jobs.update_progress(job, token, 99, 99),
            "next version": lambda: store.versions.next(job, token),
            "publish": lambda: store.versions.publish(job, token, manifest),
            "event": lambda: store.events.add(job, "step", {"step": 99}, token=token),
            "metrics": lambda: store.metrics.add(job, 99, {"reward/mean": 99.0}, token=token),
            "epoch": lambda: store.jobs.raise_epoch(job, token, 99),
            "bind": lambda: store.fleet.bind(job, token, "engine"),
            "release": lambda: store.jobs.release(job, token),
        }
    )


async def main(kind: str, url: str, job: str, lease_s: float) -> None:
    async with connect(url) as redis:
        if kind == "worker":
            await worker(Bus(redis), job, lease_s)
        else:
            await trainer(Bus(redis), Store(redis), job, lease_s)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
