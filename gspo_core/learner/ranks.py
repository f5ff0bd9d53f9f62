"""One process or several: sharding a model over ranks, and numbers that all ranks agree on.

One rule: with one rank every function here is the identity, so one learner serves both cases. It exchanges tensors but
never objects (they would be pickled). The caller that starts the processes creates and destroys process groups.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gspo_core.learner.context import ContextRanks
from gspo_core.learner_config import LearnerOptions
from gspo_core.plan import arrangement_problem, share_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class UnsupportedRanks(ValueError):
    """The job's learner cannot be arranged on these ranks."""


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together, and how they divide it and its work."""

    rank: int
    num_ranks: int
    context_parallel: int = 1
    """So many neighbours share each micro-batch."""
    replicas: int = 1
    """Copies of the model, each sharded over as many neighbours."""

    @classmethod
    def current(cls) -> Self:
        """The ranks of torch's default process group, or a single rank without one."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    def arranged(self, options: LearnerOptions) -> Self:
        """The same ranks, divided as a job asks. Raises `UnsupportedRanks`."""
        problem = arrangement_problem(options, self.num_ranks)
        if problem:
            raise UnsupportedRanks(problem)
        return replace(self, context_parallel=options.context_parallel, replicas=options.replicas)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def num_parts(self) -> int:
        """Into how many parts each copy of the model is cut."""
        return self.num_ranks // self.replicas

    @property
    def part(self) -> int:
        """Which of them this rank holds."""
        return self.rank % self.num_parts

    @property
    def is_of_first_copy(self) -> bool:
        return self.rank < self.num_parts

    @property
    def num_shares(self) -> int:
        """Into how many shares the micro-batches of an update are dealt."""
        return self.num_ranks // self.context_parallel

    @property
    def share(self) -> int:
        return self.rank // self.context_parallel

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for those that compute the same micro-batches, which sums must hold once."""
        return self.rank % self.context_parallel == 0

    def context(self, device: torch.device) -> ContextRanks | None:
        """Those that share each micro-batch with this rank; None where each has its own."""
        if self.context_parallel == 1:
            return None
        mesh = _mesh(device.type, (self.num_shares, self.context_parallel), dist.group.WORLD)
        return ContextRanks(mesh.get_group(1), mesh.get_local_rank(1), self.context_parallel)

    def shard(self, model: nn.Module, layers: Iterable[nn.Module], *, dtype: torch.dtype, device: torch.device) -> None:
        """Shard parameters, gradients and moments over the ranks (FSDP2), computing in `dtype`.

        With several copies of the model, gradients are summed within each copy and then between them.
        """
        if self.num_ranks == 1:
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shape = (self.num_ranks,) if self.replicas == 1 else (self.replicas, self.num_parts)
        mesh = _mesh(device.type, shape, dist.group.WORLD)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def sum_between_copies(self, model: nn.Module, *, now: bool) -> None:
        """Whether the next backward pass adds up gradients between the copies of the model, or leaves that to a later
        one. Within each copy every pass does."""
        if self.replicas == 1:
            return
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(model, FSDPModule)
        model.set_requires_all_reduce(now)

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


@functools.lru_cache(maxsize=8)
def _mesh(device_type: str, shape: tuple[int, ...], world: dist.ProcessGroup | None) -> DeviceMesh:
    """Made once for each `world`: the groups of a mesh live as long as the process, and every attempt at a job asks."""
    from torch.distributed.device_mesh import init_device_mesh

    names = ("outer", "inner")[-len(shape) :]  # FSDP asks for names where there are two
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


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


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """First row and end of this rank's part; all rows of a tensor that is not sharded."""
    num_rows = len(tensor) if tensor.ndim else 0
    if isinstance(tensor, DTensor):
        mesh, across = tensor.device_mesh, tensor.device_mesh.ndim - 1  # copies, if any, come before it
        return share_of(num_rows, mesh.get_local_rank(across), mesh.size(across))
    return 0, num_rows


def sum_of_parts(value: Tensor, like: Tensor) -> Tensor:
    """The sum of what each rank found in its part of a tensor that is sharded as `like`, each part once."""
    if isinstance(like, DTensor):
        dist.all_reduce(value, group=like.device_mesh.get_group(like.device_mesh.ndim - 1))
    return value


def spread_like(part: Tensor, tensor: Tensor) -> Tensor:
    """The inverse of `local`: a tensor sharded like `tensor`, with `part` as this rank's part."""
    if isinstance(tensor, DTensor):
        make: Any = DTensor.from_local
        spread: Tensor = make(
            part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return spread
    return part
