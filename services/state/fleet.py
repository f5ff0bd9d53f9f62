"""The registered engines, trainers and workers, and which engine serves which job.

Rule: an engine serves one job at a time; its binding names job, epoch and token, and yields only to a newer owner of
the same job, or once its job is over or has no trainer. Presence is a counter that rises with every registration: watch
it to see whether a process is alive. A process that stays silent while the others register hundreds of times is
forgotten. An unreadable record is reported once and skipped. It does not route.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from services.process.telemetry import get_logger
from services.state.fleet_records import (
    EngineRecord,
    EngineReport,
    ProcessRecord,
    TrainerRecord,
    UnreadableRecord,
    WorkerRecord,
)
from services.state.functions import Functions
from services.state.keys import job_key, service_key, service_keys
from services.state.refusals import Fenced

Kind = Literal["engine", "trainer", "worker"]
_KINDS: tuple[Kind, ...] = ("engine", "trainer", "worker")
R = TypeVar("R", bound=ProcessRecord)
Hash = Mapping[bytes, bytes]

# As the functions keep.
NEWS_KEPT = 16
# Unreadable records already reported: the fleet is read ten times a second.
_MAX_REPORTED = 1000


@dataclass(frozen=True)
class Everyone:
    """All registered processes."""

    trainers: list[TrainerRecord]
    workers: list[WorkerRecord]
    engines: list[EngineRecord]


class Fleet:
    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._redis = functions.redis
        self._reported: set[str] = set()

    async def enlist(self, kind: Kind, record: ProcessRecord) -> None:
        await self._functions.call("enlist", service_keys(), kind, record.id, record.to_json())

    async def delist(self, kind: Kind, name: str) -> None:
        await self._functions.call("delist", service_keys(), kind, name)
        if kind == "engine":
            await self.drain_engine(name, False)

    async def engines(self) -> list[EngineRecord]:
        """All registered engines, by id."""
        records = await self._records("engine", EngineRecord)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(service_key("engine_bindings"))
            pipeline.hgetall(service_key("engine_states"))
            pipeline.hkeys(service_key("engine_drains"))
            bindings, states, drains = await pipeline.execute()
        bound = await self._without_void(bindings)
        return self._described(records, bound, states, drains)

    async def drain_engine(self, engine_id: str, wanted: bool = True) -> None:
        """Stop new requests and weights for the engine; its job gives it back when idle, and no job takes it until
        this is undone with ``wanted=False``."""
        key = service_key("engine_drains")
        async with self._redis.pipeline(transaction=True) as pipeline:
            if wanted:
                pipeline.hset(key, engine_id, 1)
            else:
                pipeline.hdel(key, engine_id)
            pipeline.xadd(service_key("engine_news"), {"e": engine_id}, maxlen=NEWS_KEPT, approximate=False)
            await pipeline.execute()

    async def everyone(self) -> Everyone:
        """Trainers, workers and engines in one read."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for kind in _KINDS:
                pipeline.hgetall(service_key(f"{kind}s"))
                pipeline.hgetall(service_key(f"{kind}_beats"))
            pipeline.hgetall(service_key("engine_bindings"))
            pipeline.hgetall(service_key("engine_states"))
            pipeline.hkeys(service_key("engine_drains"))
            *replies, bindings, states, drains = await pipeline.execute()
        bound = await self._without_void(bindings)
        engines, trainers, workers = zip(replies[::2], replies[1::2], strict=True)
        return Everyone(
            self._merged(TrainerRecord, *trainers),
            self._merged(WorkerRecord, *workers),
            self._described(self._merged(EngineRecord, *engines), bound, states, drains),
        )

    async def trainers(self) -> list[TrainerRecord]:
        """All registered trainers, by id."""
        return await self._records("trainer", TrainerRecord)

    async def workers(self) -> list[WorkerRecord]:
        """All registered workers, by id."""
        return await self._records("worker", WorkerRecord)

    async def worker(self, name: str) -> WorkerRecord | None:
        """None: it never registered here, or was forgotten."""
        text = await self._redis.hget(service_key("workers"), name)
        return None if text is None else WorkerRecord.from_json(text)

    async def bind(self, job: str, token: str, engine_id: str) -> bool:
        """Bind an engine to the job. False: it serves another job. Raises Fenced, Missing (no such engine)."""
        binding = await self._binding(job, token)
        held = await self._redis.hget(service_key("engine_bindings"), engine_id)
        replaceable = held if held is not None and await self._may_be_replaced(held.decode(), binding) else ""
        return bool(await self._functions.call("bind_engine", service_keys(), engine_id, binding, replaceable))

    async def mark(self, job: str, token: str, engine_id: str, report: EngineReport) -> bool:
        """Store the owner's report on an engine it holds; False if it does not hold it."""
        held = await self._redis.hget(service_key("engine_bindings"), engine_id)
        if held is None or held.decode().split("/")[::2] != [job, token]:
            return False
        return bool(await self._functions.call("mark_engine", service_keys(), engine_id, held, report.to_json()))

    async def unbind(self, job: str, token: str, engine_id: str) -> None:
        """Give an engine back; does nothing if this owner does not hold it."""
        held = await self._redis.hget(service_key("engine_bindings"), engine_id)
        if held is not None and held.decode().split("/")[::2] == [job, token]:
            await self._functions.call("unbind_engine", service_keys(), engine_id, held)

    async def unbind_inherited(self, job: str, token: str, engine_id: str) -> None:
        """Give back an engine that an earlier owner of the job held; does nothing if none did. Raises Fenced."""
        binding = await self._binding(job, token)
        held = await self._redis.hget(service_key("engine_bindings"), engine_id)
        if (
            held is not None
            and held.decode().split("/")[0] == job
            and await self._may_be_replaced(held.decode(), binding)
        ):
            await self._functions.call("unbind_engine", service_keys(), engine_id, held)

    async def register_engine(self, record: EngineRecord) -> None:
        """Call repeatedly: every call raises the engine's ``beats``."""
        await self.enlist("engine", record)

    async def register_trainer(self, record: TrainerRecord) -> None:
        """Call repeatedly: every call raises the trainer's ``beats``."""
        await self.enlist("trainer", record)

    async def register_worker(self, record: WorkerRecord) -> None:
        """Call repeatedly: every call raises the worker's ``beats``."""
        await self.enlist("worker", record)

    async def remove_engine(self, engine_id: str) -> None:
        await self.delist("engine", engine_id)

    async def remove_trainer(self, trainer: str) -> None:
        await self.delist("trainer", trainer)

    async def _binding(self, job: str, token: str) -> str:
        """The binding value of the job's owner. Raises Fenced for any other caller."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hget(job_key(job, "trainer"), "token")
            pipeline.hget(job_key(job, "job"), "epoch")
            owner, epoch = await pipeline.execute()
        if owner is None or owner.decode() != token:
            raise Fenced(f"engine for job {job}")
        return f"{job}/{int(epoch)}/{token}"

    async def _may_be_replaced(self, held: str, wanted: str) -> bool:
        """Whether the binding belongs to an earlier owner of the same job, or is void."""
        bound_job, bound_epoch, _ = held.split("/")
        job, epoch, _ = wanted.split("/")
        if bound_job == job:
            return int(bound_epoch) < int(epoch)
        return bound_job in await self._void([bound_job])

    async def _without_void(self, bindings: Hash) -> dict[str, str]:
        """Engine -> job, without the engines that a killed trainer never gave back."""
        jobs = {name.decode(): held.decode().split("/")[0] for name, held in bindings.items()}
        void = await self._void(set(jobs.values()))
        return {name: job for name, job in jobs.items() if job not in void}

    async def _void(self, jobs: Collection[str]) -> set[str]:
        """Jobs with void bindings: those that are over, gone, or without a trainer."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job in jobs:
                pipeline.hmget(job_key(job, "job"), ["status", "finished_at"])
                pipeline.hget(job_key(job, "trainer"), "token")
            replies = await pipeline.execute() if jobs else []
        looked_at = zip(jobs, replies[::2], replies[1::2], strict=True)
        return {job for job, (status, finished_at), token in looked_at if not status or finished_at or not token}

    async def _records(self, kind: Kind, record_type: type[R]) -> list[R]:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(service_key(f"{kind}s"))
            pipeline.hgetall(service_key(f"{kind}_beats"))
            records, beats = await pipeline.execute()
        return self._merged(record_type, records, beats)

    def _merged(self, record_type: type[R], records: Hash, beats: Hash) -> list[R]:
        """Records by name, each with its beats; zero if the process registered between the two reads."""
        found = []
        for name in sorted(records):
            try:
                record = record_type.from_json(records[name])
            except UnreadableRecord as error:
                self._report(name, error)
            else:
                found.append(msgspec.structs.replace(record, beats=int(beats.get(name, 0))))
        return found

    def _described(
        self, records: Sequence[EngineRecord], bound: Mapping[str, str], states: Hash, drains: Collection[bytes]
    ) -> list[EngineRecord]:
        """Engines with their job, their trainer's report, and whether they drain."""
        return [
            msgspec.structs.replace(
                record,
                job=bound.get(record.id),
                draining=record.id.encode() in drains,
                report=self._read_report(record.id.encode(), states) if record.id in bound else None,
            )
            for record in records
        ]

    def _read_report(self, name: bytes, states: Hash) -> EngineReport | None:
        if (text := states.get(name)) is None:
            return None
        try:
            return EngineReport.from_json(text)
        except UnreadableRecord as error:
            self._report(name, error)
            return None

    def _report(self, name: bytes, error: UnreadableRecord) -> None:
        """Report each distinct text once."""
        if str(error) not in self._reported and len(self._reported) < _MAX_REPORTED:
            self._reported.add(str(error))
            get_logger().warning("a record in Redis cannot be read and is skipped", name=repr(name), error=str(error))
