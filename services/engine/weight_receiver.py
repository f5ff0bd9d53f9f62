"""The engine's end of a process group: receives weights by the calls of the default engine protocol.

Rule: tensors are received into memory of their own and checked; the engine switches, between two steps, only when all
tensors of an update have arrived and fit: those of calls that name no version wait for the one that does. So a transfer
that breaks off, or that its caller abandons, leaves the old weights, and one that ends after a newer load is void.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from services.engine.engine import EmbeddedEngine
from services.engines.process_group import ProcessGroup
from services.engines.weight_buckets import num_bytes, unpack

# As the protocol spells it: many tensors in one block of bytes.
FLATTENED = "flattened_bucket"
# To meet, and for each block. A lost sender closes its connections, which shows at once.
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
    load_format: str | None = None


class LeaveBody(msgspec.Struct):
    group_name: str = "weight_update_group"


class WeightReceiver:
    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._groups: dict[str, tuple[ProcessGroup, torch.device]] = {}
        self._is_open = False
        self._waiting: dict[str, Tensor] = {}
        """Came without a version in this session."""
        self._num_before = 0
        """Loads of the engine before them."""

    def begin(self) -> None:
        if self._is_open:
            raise WeightsRefused("a weight-update session is already open; call end_weight_update() first")
        self._is_open = True
        self._waiting = {}

    def end(self) -> None:
        if not self._is_open:
            raise WeightsRefused("no weight-update session is open; call begin_weight_update() first")
        self._is_open = False
        if self._waiting:
            self._waiting = {}
            raise WeightsRefused("tensors came, and no version with the last of them: the weights are as before")

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
        room = self._room(body, device)
        if not self._waiting:
            self._num_before = self._engine.num_loads
        if body.abort_all_requests:
            self._engine.abort_all()
        described = list(zip(body.names, body.dtypes, body.shapes, strict=True))
        try:
            await group.broadcast([room] if isinstance(room, Tensor) else room.values())
            came = unpack(described, room) if isinstance(room, Tensor) else room
        except RuntimeError as error:
            raise WeightsRefused(f"receiving the tensors failed: {error}") from error
        if strange := await asyncio.to_thread(_not_finite, came):
            raise WeightsRefused(f"{strange} contains values that are not finite")
        self._waiting |= came
        if body.weight_version is None:
            return
        tensors, self._waiting = self._waiting, {}
        if not await self._engine.take_weights(
            tensors, body.weight_version, flush_cache=body.flush_cache, unless_after=self._num_before
        ):
            raise WeightsRefused("other weights were loaded in the meantime")

    def leave(self, name: str) -> None:
        if name not in self._groups:
            raise WeightsRefused(f"there is no group {name!r}")
        self._groups.pop(name)[0].close()

    def _room(self, body: TensorsBody, device: torch.device) -> dict[str, Tensor] | Tensor:
        """Memory for the tensors, or for one block of them; refuses what the model has no place for before anything is
        sent."""
        if not len(body.names) == len(body.dtypes) == len(body.shapes) > 0:
            raise WeightsRefused("names, dtypes and shapes must be lists of equal length")
        if body.load_format not in (None, FLATTENED):
            raise WeightsRefused(f"load_format must be {FLATTENED} or left out, not {body.load_format!r}")
        parameters = self._engine.decoder.parameters
        kinds: dict[str, torch.dtype] = {}
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
            if name not in parameters:
                raise WeightsRefused(f"the model has no tensor {name}")
            if list(parameters[name].shape) != shape:
                raise WeightsRefused(f"{name} has shape {_text(shape)} instead of {_text(parameters[name].shape)}")
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
                raise WeightsRefused(f"{name} has the type {dtype!r}, which is not floating point")
            kinds[name] = kind
        if body.load_format == FLATTENED:
            num = sum(map(num_bytes, body.dtypes, body.shapes))
            return torch.empty(num, dtype=torch.uint8, device=device)
        return {
            name: torch.empty(shape, dtype=kinds[name], device=device)
            for name, shape in zip(body.names, body.shapes, strict=True)
        }


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)


def _text(shape: Sequence[int]) -> str:
    return str(tuple(shape))
