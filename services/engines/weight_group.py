"""Sends weights through a process group to engines that share no volume with the trainer.

Rule: an engine that was told of tensors and did not confirm them is DIRTY, and its group is not used again. The
sender is rank 0; every engine is one rank behind it (tensor parallelism 1). The caller pauses and resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypedDict

from torch import Tensor

from services.engines.errors import EngineDirty, EngineError, EngineRejected
from services.engines.process_group import ProcessGroup
from services.engines.protocol import Engine
from services.process.ports import free_port

_LEAVE_S = 5.0


class _MeetingPlace(TypedDict):
    host: str
    port: int
    world_size: int
    name: str
    backend: str
    timeout_s: float


class WeightGroup:
    """Made by ``join``; ``send`` any number of versions; ``close``."""

    def __init__(self, engines: Sequence[Engine], name: str, group: ProcessGroup, device: str) -> None:
        self._engines = engines
        self._name = name
        self._group = group
        self._device = device

    @classmethod
    async def join(
        cls,
        engines: Sequence[Engine],
        *,
        host: str = "127.0.0.1",
        device: str = "cpu",
        timeout_s: float = 60.0,
    ) -> WeightGroup:
        """A group of this process and ``engines``, which must reach ``host``. Both sides wait for each other.

        ``device`` is where tensors are sent from: by gloo from the CPU, by NCCL from a GPU. EngineRejected: an engine
        has no groups; nothing has changed.
        """
        backend = "gloo" if device == "cpu" else "nccl"
        for engine in engines:  # find a missing one before anything waits for it
            await engine.capabilities()
        port, world_size = free_port(host), len(engines) + 1
        name = f"weights-{uuid.uuid4().hex}"  # the name of a destroyed group cannot be used again
        place: _MeetingPlace = {
            "host": host,
            "port": port,
            "world_size": world_size,
            "name": name,
            "backend": backend,
            "timeout_s": timeout_s,
        }
        invitations = [engine.join_weight_group(rank=rank, **place) for rank, engine in enumerate(engines, 1)]
        group, *_ = await _all_or_dirty(ProcessGroup.join(rank=0, **place), *invitations)
        assert group is not None
        for engine in engines:
            with contextlib.suppress(EngineRejected):  # none is open, unless a sender before this one was lost
                await engine.end_weight_update()
        return cls(engines, name, group, device)

    async def send(
        self, tensors: Mapping[str, Tensor], label: str, *, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Replaces the weights of all engines, which then name them ``label``. EngineDirty: they hold unknown
        weights."""
        await asyncio.gather(*(engine.begin_weight_update() for engine in self._engines))
        described = [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in tensors.items()]
        announced = [
            engine.receive_weights(
                described, group=self._name, label=label, flush_cache=flush_cache, timeout_s=timeout_s
            )
            for engine in self._engines
        ]
        sending = self._group.broadcast(one.detach().to(self._device).contiguous() for one in tensors.values())
        await _all_or_dirty(sending, *announced, refused_is_dirty=True)
        await _all_or_dirty(*(engine.end_weight_update() for engine in self._engines), refused_is_dirty=True)
        for engine in self._engines:
            if (held := (await engine.info()).label) != label:
                raise EngineDirty(f"{engine.url}: holds weights {held!r} after {label!r} was sent")

    async def close(self) -> None:
        """Works even if an engine is gone or hangs."""
        for engine in self._engines:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await engine.leave_weight_group(self._name)
        self._group.close()


async def _all_or_dirty(
    *work: Awaitable[ProcessGroup | None], refused_is_dirty: bool = False
) -> list[ProcessGroup | None]:
    """All results. When one part fails, the others would wait for it, so they are cancelled; the engines are DIRTY."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except (EngineError, RuntimeError) as error:
        if isinstance(error, EngineRejected) and not refused_is_dirty:
            raise
        raise EngineDirty(f"handing over weights failed: {error}") from error
    finally:
        for task in tasks:
            task.cancel()
