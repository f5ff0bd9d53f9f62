"""Bytes between the ranks of one trainer: the first rank speaks, the others listen and answer.

Rule: only bytes in CPU tensors travel, never objects, which torch would pickle. A line is a gloo group of its own
beside the default one, used by one thread per rank at a time, so lines never wait for each other. This module does not
interpret messages.
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

# Timeout of a collective: how far the slowest rank may lag behind the first. Loading a model is the longest wait.
COLLECTIVE_TIMEOUT_S = 1800.0
# Timeout of an idle line, where a closed socket reveals a lost rank.
SILENT_TIMEOUT_S = 365 * 24 * 3600.0
_ANSWER_BYTES = 4096
_LOOK_S = 0.1
_MAX_MESSAGE = 2000


@dataclass(frozen=True)
class RankPlace:
    """This process's place among those torchrun started."""

    rank: int
    local_rank: int
    """Rank on this machine."""
    num_ranks: int

    @classmethod
    def of_this_process(cls) -> Self:
        """From torchrun's environment; a single process without it."""
        said = (os.environ.get(name, default) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        return cls(*map(int, said))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def enter(self, kind: str) -> str:
        """Make this rank's device the calling thread's current one and return its name."""
        if kind != "cuda":
            return kind
        torch.cuda.set_device(self.local_rank)
        return f"cuda:{self.local_rank}"


class RankProblem(msgspec.Struct, frozen=True):
    """Why a rank did not do what it was asked."""

    kind: str
    message: str
    errno: int | None = None
    is_of_the_lines: bool = False
    """A communication timeout, on this rank or on all, rather than a problem with the call."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        number = error.errno if isinstance(error, OSError) else None
        return cls(type(error).__name__, str(error)[:_MAX_MESSAGE], number, is_of_the_lines(error))


def is_of_the_lines(error: BaseException) -> bool:
    """Whether ranks failed to reach each other. gloo reports that as RuntimeErrors naming its own source files."""
    if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo/" in str(error)):
        return True
    return error.__cause__ is not None and is_of_the_lines(error.__cause__)


class RankLine:
    """Raises torch RuntimeErrors if a rank is gone or does not answer in time; the line is then unusable."""

    def __init__(self, group: Any, num_ranks: int) -> None:
        self._group = group
        self._num_ranks = num_ranks

    def say(self, message: bytes) -> None:
        """On the first rank: send to all others."""
        dist.broadcast(torch.tensor([len(message)]), src=0, group=self._group)
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), src=0, group=self._group)

    def hear(self, timeout_s: float | None = None) -> bytes:
        """On the others: receive."""
        length = torch.zeros(1, dtype=torch.int64)
        _wait(dist.broadcast(length, src=0, group=self._group, async_op=True), timeout_s)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, src=0, group=self._group)
        return message.numpy().tobytes()

    def answer(self, problem: RankProblem | None) -> None:
        """On the others: answer; None means done."""
        dist.gather(_padded(msgspec.msgpack.encode(problem)), dst=0, group=self._group)

    def answers(self, timeout_s: float | None = None) -> dict[int, RankProblem | None]:
        """On the first rank: the others' answers."""
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
    """A name shared by all ranks that no earlier ranks have used.

    The store and its contents outlive restarted ranks. The first rank names a round; each rank that sees it signs it
    with its process's own signature; the round counts once the first rank has confirmed it.
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


def meet(place: RankPlace, names: Iterable[str]) -> dict[str, RankLine]:
    """Set up the learner's default group and one line per name. Returns when all ranks have joined."""
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
