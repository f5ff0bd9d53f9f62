"""A group of torch processes that meet at an address, beside the default group, to transfer weights.

Rule: blocking calls (meeting, sending, receiving) run in a daemon thread, else a group whose other end hangs would
decide when this process ends. gloo joins CPUs, NCCL joins GPUs. No files, no pickles. Callers decide which tensors are
sent, and what a failure means for an engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as Group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")


class ProcessGroup:
    """Made by ``join``. Errors of torch are RuntimeErrors."""

    def __init__(self, group: Group) -> None:
        self._group: Group | None = group

    @classmethod
    async def join(
        cls, *, host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> ProcessGroup:
        """Returns when all have met. Rank 0 listens at ``host``, ``port``; ``timeout_s`` holds for each tensor too."""
        return cls(await in_own_thread(lambda: _join(host, port, rank, world_size, name, backend, timeout_s)))

    async def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0 sends; the others receive into tensors of the same shapes and types, in the same order."""
        await in_own_thread(partial(_broadcast, self._group, tensors))

    def close(self) -> None:
        """Returns at once; calls that still wait for the other end run into their timeouts. Its connections end with
        the last reference to torch's group, so this keeps none."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=dist.destroy_process_group, args=(group,), daemon=True).start()


def gpu_uuid(device: torch.device | str) -> str:
    """The same in every process that uses the GPU, whatever its number there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def backend_for(device: str, others: Sequence[str | None]) -> str:
    """How a process that sends from ``device`` meets those that compute on these GPUs (`Capabilities.gpu`).

    NCCL joins no two processes of one GPU, and none without one: those meet by gloo, from the CPU.
    """
    if device == "cpu" or "" in others:
        return "gloo"
    known = [gpu_uuid(device), *(gpu for gpu in others if gpu is not None)]
    return "nccl" if len(set(known)) == len(known) else "gloo"


def _broadcast(group: Group | None, tensors: Iterable[Tensor]) -> None:
    if group is None:
        raise RuntimeError("the group was closed")
    for tensor in tensors:
        dist.broadcast(tensor, src=0, group=group)


async def in_own_thread(work: Callable[[], T]) -> T:
    """The result of ``work``. After a cancellation nothing waits for the thread, not even the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # raised where the result is awaited
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await done


def _join(host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float) -> Group:
    """Torch has only a private function for a group beside the default one."""
    timeout = timedelta(seconds=timeout_s)
    address = f"[{host}]" if ":" in host else host
    store, rank, size = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    made = c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timeout,
    )
    group: Group = made[0]
    c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group
