"""Bytes between the ranks of one trainer: the first one speaks, the others hear and answer.

The rule kept here: what travels are bytes in tensors on the CPU, never objects, which torch would pickle. A line is a
gloo group of its own beside the default one, used by one thread of each rank at a time, so that what is said on one
line waits for nothing that happens on another. What a message means is not known here.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# Of a collective call: the slowest rank may come so much later than the first. Loading a model is the longest wait.
COLLECTIVE_TIMEOUT_S = 1800.0
# On a line on which nothing is said while nothing is to do, and on which a rank that is gone is noticed by its socket.
SILENT_TIMEOUT_S = 365 * 24 * 3600.0
_ANSWER_BYTES = 4096
_LOOK_S = 0.1
_MAX_MESSAGE = 2000


@dataclass(frozen=True)
class Place:
    """Which of the processes that torchrun has started this is."""

    rank: int
    local_rank: int
    """On this machine."""
    num_ranks: int

    @classmethod
    def of_this_process(cls) -> Self:
        """As torchrun says; the only one where there is none."""
        said = (os.environ.get(name, default) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        return cls(*map(int, said))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def enter(self, kind: str) -> str:
        """The device of this rank, which is that of the calling thread from now on."""
        if kind != "cuda":
            return kind
        torch.cuda.set_device(self.local_rank)
        return f"cuda:{self.local_rank}"


class RankProblem(msgspec.Struct, frozen=True):
    """Why a rank has not done what was asked."""

    kind: str
    message: str
    errno: int | None = None
    is_of_the_lines: bool = False
    """It says nothing of what was asked: the others could not be reached in time, on this rank or on all."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        number = error.errno if isinstance(error, OSError) else None
        return cls(type(error).__name__, str(error)[:_MAX_MESSAGE], number, is_of_the_lines(error))


def is_of_the_lines(error: BaseException) -> bool:
    """Whether ranks could not reach each other. gloo says that by RuntimeErrors that name its own source files."""
    if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo/" in str(error)):
        return True
    return error.__cause__ is not None and is_of_the_lines(error.__cause__)


class RankLine:
    """Raises RuntimeErrors of torch where a rank is gone or does not answer in time; then it is of no more use."""

    def __init__(self, group: Any, num_ranks: int) -> None:
        self._group = group
        self._num_ranks = num_ranks

    def say(self, message: bytes) -> None:
        """On the first rank, to all others."""
        dist.broadcast(torch.tensor([len(message)]), src=0, group=self._group)
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), src=0, group=self._group)

    def hear(self, timeout_s: float | None = None) -> bytes:
        """On the others."""
        length = torch.zeros(1, dtype=torch.int64)
        _wait(dist.broadcast(length, src=0, group=self._group, async_op=True), timeout_s)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, src=0, group=self._group)
        return message.numpy().tobytes()

    def answer(self, problem: RankProblem | None) -> None:
        """On the others; None: it is done."""
        dist.gather(_padded(msgspec.msgpack.encode(problem)), dst=0, group=self._group)

    def answers(self, timeout_s: float | None = None) -> dict[int, RankProblem | None]:
        """On the first rank: those of the others."""
        found = [torch.zeros(_ANSWER_BYTES, dtype=torch.uint8) for _ in range(self._num_ranks)]
        own = _padded(msgspec.msgpack.encode(None))
        _wait(dist.gather(own, found, dst=0, group=self._group, async_op=True), timeout_s)
        return {rank: _read(one) for rank, one in enumerate(found) if rank}


def _wait(work: Any, timeout_s: float | None) -> None:
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout_s))


def _padded(answer: bytes) -> Tensor:
    data = len(answer).to_bytes(4, "little") + answer
    return torch.frombuffer(bytearray(data.ljust(_ANSWER_BYTES, b"\0")), dtype=torch.uint8)


def _read(answer: Tensor) -> RankProblem | None:
    data = answer.numpy().tobytes()
    return msgspec.msgpack.decode(data[4 : 4 + int.from_bytes(data[:4], "little")], type=RankProblem | None)


def agree_on_round(store: Any, rank: int, num_ranks: int) -> str:
    """A name that is the same on all ranks and that no ranks before these have used.

    The store outlives ranks that are started again, with all that they have written into it. The first rank names a
    round; who sees it signs it, with a signature of its own process; it counts once the first rank has confirmed it.
    """
    signature = uuid.uuid4().hex
    if rank == 0:
        store.set("round", signature)
        signed = [f"{signature}/signed/{other}" for other in range(1, num_ranks)]
        store.wait(signed)
        store.set(f"{signature}/confirmed", b" ".join(store.get(one) for one in signed))
        return signature
    while True:
        name: str = store.get("round").decode()
        store.set(f"{name}/signed/{rank}", signature)
        if store.check([f"{name}/confirmed"]) and signature.encode() in store.get(f"{name}/confirmed").split():
            return name
        time.sleep(_LOOK_S)


def meet(place: Place, names: Iterable[str]) -> dict[str, RankLine]:
    """The default group, through which the learner computes, and a line of each name. Returns when all have come."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(place.local_rank)
    store, rank, num_ranks = next(rendezvous("env://", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        store=PrefixStore(agree_on_round(store, rank, num_ranks), store),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    silent = timedelta(seconds=SILENT_TIMEOUT_S)
    return {name: RankLine(dist.new_group(backend="gloo", timeout=silent), place.num_ranks) for name in names}
