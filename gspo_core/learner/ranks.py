"""One process or several: sharding a model over ranks, and numbers that all ranks agree on.

One rule: with one rank every function here is the identity, so one learner serves both cases. It exchanges tensors but
never objects (they would be pickled). The caller that starts the processes creates and destroys process groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
        """The ranks of torch's default process group, or a single rank without one."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def shard(self, model: nn.Module, layers: Iterable[nn.Module], *, dtype: torch.dtype, device: torch.device) -> None:
        """Shard parameters, gradients and moments over the ranks (FSDP2), computing in `dtype`."""
        if self.num_ranks == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (self.num_ranks,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def settle(self, model: nn.Module) -> None:
        """Reshard all parameters, including those left whole by a forward pass without a backward pass.

        Call this before reading parameters: moments are keyed by the sharded ones.
        """
        if self.num_ranks == 1:
            return
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks; every rank gets the result."""
        if self.num_ranks > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM)
        return values

    def max(self, values: Tensor) -> Tensor:
        if self.num_ranks > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def wait(self) -> None:
        """Block until every rank arrives."""
        if self.num_ranks > 1:
            dist.barrier()


# A layer's tensors stay together because some disk formats join several of them.
_LAYER = re.compile(r".*?\.\d+(?=\.)")


def owners(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Assign each tensor to the rank that keeps and writes it on export, balancing sizes.

    Every rank computes the same result; all tensors of a layer share an owner.
    """
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        parts[_part_of(name)] = parts.get(_part_of(name), 0) + size
    loads, chosen = [0] * num_ranks, dict[str, int]()
    for part, size in sorted(parts.items(), key=lambda item: (-item[1], item[0])):
        chosen[part] = loads.index(min(loads))
        loads[chosen[part]] += size
    return {name: chosen[_part_of(name)] for name in sizes}


def _part_of(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else name


def whole(tensor: Tensor) -> Tensor:
    """Gather the full tensor from its parts; every rank must call this."""
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor; shares its memory."""
    if isinstance(tensor, DTensor):
        part: Tensor = tensor.to_local()
        return part
    return tensor


def spread_like(part: Tensor, tensor: Tensor) -> Tensor:
    """The inverse of `local`: a tensor sharded like `tensor`, with `part` as this rank's part."""
    if isinstance(tensor, DTensor):
        make: Any = DTensor.from_local
        spread: Tensor = make(
            part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return spread
    return part
