"""Which engines, trainers and workers there are, and which engine serves which job.

The rule: an engine serves one job at a time; the binding names job, epoch and token, and is replaced only by the same
job's newer owner, or when its job is over or nobody's. Presence is a counter that rises with every registration: who
wants to know whether one is alive watches it. Who was silent while all others registered hundreds of times is
forgotten. It routes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from services.functions import Functions
from services.keys import job_key, service_key, service_keys
from services.refusals import Fenced

Kind = Literal["engine", "trainer", "worker"]
_KINDS: tuple[Kind, ...] = ("engine", "trainer", "worker")


class Fleet:
    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._redis = functions.redis

    async def enlist(self, kind: Kind, record: Mapping[str, Any]) -> None:
        name = record.get("id")
        if not isinstance(name, str) or not name:
            raise ValueError(f"the record of an {kind} has a text under 'id', not {name!r}")
        text = json.dumps(dict(record), separators=(",", ":"), allow_nan=False)
        await self._functions.call("enlist", service_keys(), kind, name, text)

    async def delist(self, kind: Kind, name: str) -> None:
        await self._functions.call("delist", service_keys(), kind, name)
        if kind == "engine":
            await self.drain_engine(name, False)

    async def engines(self) -> list[dict[str, Any]]:
        records = await self._records("engine")
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(service_key("engine_bindings"))
            pipeline.hgetall(service_key("engine_states"))
            pipeline.hkeys(service_key("engine_drains"))
            bindings, states, drains = await pipeline.execute()
        bindings = await self._without_void(bindings)
        return _described(records, bindings, states, drains)

    async def drain_engine(self, engine_id: str, wanted: bool) -> None:
        """Whether it is to be left alone: an engine knows no Redis, so this is kept for whoever would use it."""
        key = service_key("engine_drains")
        await (self._redis.hset(key, engine_id, 1) if wanted else self._redis.hdel(key, engine_id))

    async def everyone(self) -> dict[Kind, list[dict[str, Any]]]:
        """All processes by kind, in one look."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for kind in _KINDS:
                pipeline.hgetall(service_key(f"{kind}s"))
                pipeline.hgetall(service_key(f"{kind}_beats"))
            pipeline.hgetall(service_key("engine_bindings"))
            pipeline.hgetall(service_key("engine_states"))
            pipeline.hkeys(service_key("engine_drains"))
            *replies, bindings, states, drains = await pipeline.execute()
        bindings = await self._without_void(bindings)
        found = {
            kind: _merged(records, beats)
            for kind, records, beats in zip(_KINDS, replies[::2], replies[1::2], strict=True)
        }
        found["engine"] = _described(found["engine"], bindings, states, drains)
        return found

    async def trainers(self) -> list[dict[str, Any]]:
        return await self._records("trainer")

    async def workers(self) -> list[dict[str, Any]]:
        return await self._records("worker")

    async def bind(self, job: str, token: str, engine_id: str) -> bool:
        binding = await self._binding(job, token)
        held = await self._redis.hget(service_key("engine_bindings"), engine_id)
        replaceable = held if held is not None and await self._may_be_replaced(held.decode(), binding) else ""
        return bool(await self._functions.call("bind_engine", service_keys(), engine_id, binding, replaceable))

    async def mark(self, job: str, token: str, engine_id: str, state: Mapping[str, Any]) -> bool:
        """Says how an engine is; False when it is not ours any more."""
        held = await self._redis.hget(service_key("engine_bindings"), engine_id)
        if held is None or held.decode().split("/")[::2] != [job, token]:
            return False
        text = json.dumps(dict(state), separators=(",", ":"), allow_nan=False)
        return bool(await self._functions.call("mark_engine", service_keys(), engine_id, held, text))

    async def unbind(self, job: str, token: str, engine_id: str) -> None:
        held = await self._redis.hget(service_key("engine_bindings"), engine_id)
        if held is not None and held.decode().split("/")[::2] == [job, token]:
            await self._functions.call("unbind_engine", service_keys(), engine_id, held)

    async def _binding(self, job: str, token: str) -> str:
        """Of the job's owner; Fenced for everyone else."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hget(job_key(job, "trainer"), "token")
            pipeline.hget(job_key(job, "job"), "epoch")
            owner, epoch = await pipeline.execute()
        if owner is None or owner.decode() != token:
            raise Fenced(f"engine for job {job}")
        return f"{job}/{int(epoch)}/{token}"

    async def _may_be_replaced(self, held: str, wanted: str) -> bool:
        """Whether the binding is of an earlier owner of the same job, or void."""
        bound_job, bound_epoch, _ = held.split("/")
        job, epoch, _ = wanted.split("/")
        if bound_job == job:
            return int(bound_epoch) < int(epoch)
        return bound_job in await self._void([bound_job])

    async def _without_void(self, bindings: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Who held an engine and was killed has not given it back."""
        jobs = {name: held.decode().split("/")[0] for name, held in bindings.items()}
        void = await self._void(set(jobs.values()))
        return {name: held for name, held in bindings.items() if jobs[name] not in void}

    async def _void(self, jobs: Collection[str]) -> set[str]:
        """Jobs whose bindings bind nobody: they are over or gone, or no trainer owns them."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job in jobs:
                pipeline.hmget(job_key(job, "job"), ["status", "finished_at"])
                pipeline.hget(job_key(job, "trainer"), "token")
            replies = await pipeline.execute() if jobs else []
        looked_at = zip(jobs, replies[::2], replies[1::2], strict=True)
        return {job for job, (status, finished_at), token in looked_at if not status or finished_at or not token}

    async def _records(self, kind: Kind) -> list[dict[str, Any]]:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(service_key(f"{kind}s"))
            pipeline.hgetall(service_key(f"{kind}_beats"))
            records, beats = await pipeline.execute()
        return _merged(records, beats)


def _merged(records: Mapping[bytes, bytes], beats: Mapping[bytes, bytes]) -> list[dict[str, Any]]:
    """One that registered between two reads has no beat yet, and one that left no record any more."""
    return [json.loads(records[name]) | {"beats": int(beats.get(name, 0))} for name in sorted(records)]


def _described(
    records: Sequence[dict[str, Any]],
    bindings: Mapping[bytes, bytes],
    states: Mapping[bytes, bytes],
    drains: Iterable[bytes],
) -> list[dict[str, Any]]:
    """Engines with who holds them, what that one says, and whether they drain."""
    bound = {name.decode(): binding.decode().split("/")[0] for name, binding in bindings.items()}
    told = {name.decode(): json.loads(state) for name, state in states.items()}
    draining = {name.decode(): {"draining": True} for name in drains}
    return [
        record
        | {"job": bound.get(record["id"])}
        | draining.get(record["id"], {})
        | (told.get(record["id"], {}) if record["id"] in bound else {})
        for record in records
    ]
