"""Weights to engines through a process group: gloo between CPUs, NCCL between GPUs; no files, no pickles.

Rule: engines that were told of tensors and did not confirm them are DIRTY, and their group is not used again. The
sender is rank 0; every engine is one rank behind it (tensor parallelism 1). Pausing and resuming is the caller's.
Only real SGLang servers offer this; jobs load from disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.rendezvous import rendezvous

from services.engine_client import EngineClient, EngineDirty, EngineError, EngineProfile


class WeightGroup:
    """Made by ``join``; ``send`` any number of versions; ``close``."""

    def __init__(self, engines: Sequence[EngineClient], name: str, group: Any, profile: EngineProfile) -> None:
        self._engines = engines
        self._name = name
        self._group = group
        self._profile = profile

    @classmethod
    async def join(
        cls, engines: Sequence[EngineClient], *, host: str = "127.0.0.1", backend: str = "gloo", timeout_s: float = 60.0
    ) -> WeightGroup:
        """A group of this process and ``engines``, which must reach ``host``. Both sides wait for each other."""
        profile = min([await engine.profile() for engine in engines])
        port, world_size = _free_port(host), len(engines) + 1
        name = f"weights-{uuid.uuid4().hex}"  # a name that was destroyed cannot be used again
        invitations = [
            engine.join_weight_group(
                host=host, port=port, rank=rank, world_size=world_size, name=name, backend=backend, timeout_s=timeout_s
            )
            for rank, engine in enumerate(engines, 1)
        ]
        ours = asyncio.to_thread(_rendezvous, host, port, world_size, name, backend, timeout_s)
        group, *_ = await _all_or_dirty(ours, *invitations)
        return cls(engines, name, group, profile)

    async def send(self, tensors: Mapping[str, Tensor], label: str, *, flush_cache: bool = True) -> None:
        """Replaces the weights of all engines, which then name them ``label``. EngineDirty: they hold anything."""
        if self._profile.has_weight_sessions:
            await asyncio.gather(*(engine.begin_weight_update() for engine in self._engines))
        described = [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in tensors.items()]
        announced = [
            engine.receive_weights(described, group=self._name, label=label, flush_cache=flush_cache)
            for engine in self._engines
        ]
        await _all_or_dirty(asyncio.to_thread(self._broadcast, list(tensors.values())), *announced)
        if self._profile.has_weight_sessions:
            await _all_or_dirty(*(engine.end_weight_update() for engine in self._engines))
        for engine in self._engines:
            if (held := (await engine.model_info()).get("weight_version")) != label:
                raise EngineDirty(f"{engine.url}: holds weights {held!r} after {label!r} was sent")

    async def close(self) -> None:
        for engine in self._engines:
            with contextlib.suppress(EngineError):
                await engine.leave_weight_group(self._name)
        dist.destroy_process_group(self._group)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.detach().contiguous(), src=0, group=self._group)


async def _all_or_dirty(*work: Awaitable[Any]) -> list[Any]:
    """All results. When one part fails the others would wait for it: nobody does, and the engines are DIRTY."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except (EngineError, RuntimeError) as error:
        raise EngineDirty(f"weights were not handed over: {error}") from error
    finally:
        for task in tasks:
            task.cancel()


def _rendezvous(host: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> Any:
    """Rank 0 of a group beside the default one, which torch makes by a function that it keeps to itself."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous(f"tcp://{host}:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
