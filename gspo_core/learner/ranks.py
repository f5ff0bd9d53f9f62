"""One process or several: sharding a model over ranks, and numbers that all ranks agree on.

One rule: with one rank every function here is the identity, so that a learner is written once. Tensors travel, objects
never do (they would be pickled). Process groups are made and ended by whoever starts the processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together."""

    rank: int
    num_ranks: int

    @classmethod
    def current(cls) -> Self:
        """Of torch's default process group; one rank where there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def shard(self, model: nn.Module, layers: Iterable[nn.Module], *, dtype: torch.dtype, device: torch.device) -> None:
        """Spread parameters, gradients and moments over the ranks (FSDP2); what is computed in is `dtype`."""
        if self.num_ranks == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (self.num_ranks,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def sum(self, values: Tensor) -> Tensor:
        """Over the ranks, on each of them."""
        if self.num_ranks > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM)
        return values

    def max(self, values: Tensor) -> Tensor:
        if self.num_ranks > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def wait(self) -> None:
        """Until every rank has come here."""
        if self.num_ranks > 1:
            dist.barrier()


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this rank holds a part; every rank must ask."""
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds; shares its memory."""
    if isinstance(tensor, DTensor):
        part: Tensor = tensor.to_local()
        return part
    return tensor


def spread_like(part: Tensor, tensor: Tensor) -> Tensor:
    """The inverse of `local`: a tensor spread over the ranks as `tensor` is, of which this rank holds `part`."""
    if isinstance(tensor, DTensor):
        make: Any = DTensor.from_local
        spread: Tensor = make(
            part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return spread
    return part
