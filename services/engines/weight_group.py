"""Sends weights through one process group to several engines that share no volume with the trainer.

Rule: one broadcast reaches all engines, bucket by bucket; the label goes with the last bucket, so an engine names the
new weights only when it has all of them. After a failed sending the group is not used again, as what its members hold
is unknown; ``send`` names the engines at fault, so that the others can be sent everything again. The sender is rank 0;
each engine has as many ranks as it says, one behind the other. The caller pauses and resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from services.engines.process_group import ProcessGroup, backend_for
from services.engines.protocol import Engine, EngineDirty, EngineError, EngineRejected, info_within
from services.engines.weight_buckets import WeightBucket
from services.process.ports import free_port

_LEAVE_S = 5.0
# After a failure, the other calls are awaited for so long: their answers show whose fault it was.
_GRACE_S = 2.0
_ANSWER_S = 5.0


class _MeetingPlace(TypedDict):
    host: str
    port: int
    world_size: int
    name: str
    backend: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A sending that failed. No member may be resumed before a whole load."""

    why: str
    by: Mapping[str, str]
    """Engine -> what failed there. The others answer, and can be sent everything again."""


class WeightGroup:
    """Made by ``join``; ``send`` any number of versions; ``close``."""

    def __init__(self, engines: Sequence[Engine], name: str, group: ProcessGroup, device: str) -> None:
        self._engines = engines
        self._name = name
        self._group = group
        self._device = device

    @property
    def urls(self) -> frozenset[str]:
        return frozenset(engine.url for engine in self._engines)

    @classmethod
    async def join(
        cls,
        engines: Sequence[Engine],
        *,
        host: str = "127.0.0.1",
        device: str = "cpu",
        timeout_s: float = 60.0,
    ) -> WeightGroup:
        """A group of this process and ``engines``, which must reach ``host``. All wait for each other.

        ``device`` is where tensors are sent from: a GPU by NCCL to other GPUs, else the CPU by gloo (`backend_for`).
        EngineRejected: an engine has no groups, or an unknown layout; nothing has changed.
        """
        sizes, gpus = [], []
        for engine in engines:  # find a missing or unsuitable one before anything waits for it
            can = await engine.capabilities()
            if can.group_problem:
                raise EngineRejected(f"{engine.url}: {can.group_problem}")
            sizes.append(can.num_ranks)
            gpus.append(can.gpu)
        backend = backend_for(device, gpus)
        device = "cpu" if backend == "gloo" else device
        first_ranks = list(itertools.accumulate(sizes, initial=1))
        name = f"weights-{uuid.uuid4().hex}"  # the name of a destroyed group cannot be used again
        place: _MeetingPlace = {
            "host": host,
            "port": free_port(host),
            "world_size": first_ranks.pop(),
            "name": name,
            "backend": backend,
            "timeout_s": timeout_s,
        }
        met = asyncio.create_task(ProcessGroup.join(rank=0, **place))
        invited = [
            asyncio.ensure_future(engine.join_weight_group(rank=rank, **place))
            for engine, rank in zip(engines, first_ranks, strict=True)
        ]
        try:
            await asyncio.gather(met, *invited)
        except RuntimeError as error:
            raise EngineDirty(f"meeting for weights failed: {error}") from error
        finally:  # where one part fails, the others would wait for it
            for task in (met, *invited):
                task.cancel()
        for engine in engines:
            with contextlib.suppress(EngineRejected):  # none is open, unless a sender before this one was lost
                await engine.end_weight_update()
        return cls(engines, name, met.result(), device)

    async def send(
        self,
        buckets: Sequence[WeightBucket],
        label: str,
        *,
        flush_cache: bool | Mapping[str, bool] = True,
        timeout_s: float = 600.0,
    ) -> Failed | None:
        """Replaces the weights of all engines, which then name them ``label``. ``flush_cache`` may differ by engine."""
        flushes = {url: flush_cache if isinstance(flush_cache, bool) else flush_cache[url] for url in self.urls}

        def takes(bucket: WeightBucket, *, is_last: bool) -> Callable[[Engine], Awaitable[None]]:
            return lambda engine: engine.receive_weights(
                bucket.tensors,
                group=self._name,
                label=label if is_last else None,
                flush_cache=is_last and flushes[engine.url],
                timeout_s=timeout_s,
            )

        if failed := await self._all(lambda engine: engine.begin_weight_update()):
            return failed
        for number, bucket in enumerate(buckets, 1):
            if failed := await self._all(takes(bucket, is_last=number == len(buckets)), bucket):
                return failed
        if failed := await self._all(lambda engine: engine.end_weight_update()):
            return failed
        return await self._all(lambda engine: _require(engine, label))

    async def close(self) -> None:
        """Works even if an engine is gone or hangs."""
        self._group.close()
        await asyncio.gather(*(self._leave(engine) for engine in self._engines))

    async def _leave(self, engine: Engine) -> None:
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await engine.leave_weight_group(self._name)

    async def _all(
        self, call: Callable[[Engine], Awaitable[None]], bucket: WeightBucket | None = None
    ) -> Failed | None:
        """Calls all engines, and sends the bucket meanwhile."""
        calls = {engine.url: asyncio.ensure_future(call(engine)) for engine in self._engines}
        sending = asyncio.ensure_future(self._send(bucket))
        tasks = {sending, *calls.values()}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if all(task.done() and task.exception() is None for task in tasks):
                return None
            self._group.close()
            await asyncio.wait(tasks, timeout=_GRACE_S)
            return await self._judge(sending, calls)
        finally:
            for task in tasks:
                task.cancel()

    async def _send(self, bucket: WeightBucket | None) -> None:
        if bucket is not None:
            await self._group.broadcast([bucket.data.to(self._device)])

    async def _judge(self, sending: asyncio.Task[None], calls: Mapping[str, asyncio.Future[None]]) -> Failed:
        """The engines at fault are those whose connection was lost or that no longer answer. One that refuses may only
        have lost its neighbour in the group."""
        errors = {url: task.exception() if task.done() else None for url, task in calls.items()}
        if strange := [error for error in errors.values() if error and not isinstance(error, EngineError)]:
            raise strange[0]
        for task in calls.values():
            task.cancel()
        by = {url: str(error) for url, error in errors.items() if error and not isinstance(error, EngineRejected)}
        asked = [engine for engine in self._engines if engine.url not in by]
        answers = await asyncio.gather(*(info_within(engine, _ANSWER_S) for engine in asked))
        by |= {engine.url: "it no longer answers" for engine, answer in zip(asked, answers, strict=True) if not answer}
        told = {url: str(error) for url, error in errors.items() if error} | by
        if sending.done() and sending.exception():
            told["sender"] = str(sending.exception())
        return Failed("; ".join(f"{who}: {text}" for who, text in sorted(told.items())), by)


async def _require(engine: Engine, label: str) -> None:
    if (held := (await engine.info()).label) != label:
        raise EngineDirty(f"holds weights {held!r} after {label!r} was sent")
