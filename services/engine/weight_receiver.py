"""The engine's end of a process group: receives weights by the calls of the default engine protocol.

Rule: tensors are received into memory of their own and checked; the engine switches, between two steps, only when all
tensors of a call have arrived and fit. So a transfer that breaks off, or that its caller abandons, leaves the old
weights, and one that ends after a newer load is void.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from services.engine.engine import EmbeddedEngine
from services.engines.process_group import ProcessGroup

# To meet, and for each tensor. A lost sender closes its connections, which shows at once.
_TIMEOUT_S = 120.0


class WeightsRefused(Exception):
    """Answered with 400; the weights are as before."""


class JoinBody(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class TensorsBody(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class LeaveBody(msgspec.Struct):
    group_name: str = "weight_update_group"


class WeightReceiver:
    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._groups: dict[str, tuple[ProcessGroup, torch.device]] = {}
        self._is_open = False

    def begin(self) -> None:
        if self._is_open:
            raise WeightsRefused("a weight-update session is already open; call end_weight_update() first")
        self._is_open = True

    def end(self) -> None:
        if not self._is_open:
            raise WeightsRefused("no weight-update session is open; call begin_weight_update() first")
        self._is_open = False

    async def join(self, body: JoinBody) -> None:
        if body.group_name in self._groups:
            raise WeightsRefused(f"there is a group {body.group_name!r} already")
        if body.backend not in ("gloo", "nccl"):
            raise WeightsRefused(f"a group's backend must be gloo or nccl, not {body.backend!r}")
        try:
            group = await ProcessGroup.join(
                host=body.master_address,
                port=body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                name=body.group_name,
                backend=body.backend,
                timeout_s=_TIMEOUT_S,
            )
        except (RuntimeError, ValueError) as error:
            raise WeightsRefused(f"joining the group failed: {error}") from error
        device = torch.device("cpu") if body.backend == "gloo" else self._engine.decoder.device
        self._groups[body.group_name] = group, device

    async def receive(self, body: TensorsBody) -> None:
        """``CacheNotFlushed``: the new weights are in place."""
        if not self._is_open:
            raise WeightsRefused(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        if body.group_name not in self._groups:
            raise WeightsRefused(f"there is no group {body.group_name!r}: call init_weights_update_group first")
        group, device = self._groups[body.group_name]
        tensors = self._room(body, device)
        num_before = self._engine.num_loads
        if body.abort_all_requests:
            self._engine.abort_all()
        try:
            await group.broadcast(tensors.values())
        except RuntimeError as error:
            raise WeightsRefused(f"receiving the tensors failed: {error}") from error
        if strange := [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
            raise WeightsRefused(f"{strange[0]} contains values that are not finite")
        label = self._engine.label if body.weight_version is None else body.weight_version
        if not await self._engine.take_weights(tensors, label, flush_cache=body.flush_cache, unless_after=num_before):
            raise WeightsRefused("other weights were loaded in the meantime")

    def leave(self, name: str) -> None:
        if name not in self._groups:
            raise WeightsRefused(f"there is no group {name!r}")
        self._groups.pop(name)[0].close()

    def _room(self, body: TensorsBody, device: torch.device) -> dict[str, Tensor]:
        """Memory for the tensors; refuses those that the model has no place for before anything is sent."""
        if not len(body.names) == len(body.dtypes) == len(body.shapes) > 0:
            raise WeightsRefused("names, dtypes and shapes must be lists of equal length")
        parameters = self._engine.decoder.parameters
        found: dict[str, Tensor] = {}
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
            if name not in parameters:
                raise WeightsRefused(f"the model has no tensor {name}")
            if list(parameters[name].shape) != shape:
                raise WeightsRefused(f"{name} has shape {_text(shape)} instead of {_text(parameters[name].shape)}")
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
                raise WeightsRefused(f"{name} has the type {dtype!r}, which is not floating point")
            found[name] = torch.empty(shape, dtype=kind, device=device)
        return found


def _text(shape: Sequence[int]) -> str:
    return str(tuple(shape))
