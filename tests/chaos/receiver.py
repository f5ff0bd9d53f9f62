"""The scripted engine's end of a process group: the embedded engine's own receiver, for an engine that has no model.

The tensors that came are compared with the version that they are named for, whose folder this engine sees. What is
found is written down like what is loaded from the disk: an engine without a model samples the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo_core.versions import EngineLabel
from services.engine.engine import EmbeddedEngine
from services.engine.weight_receiver import JoinBody, LeaveBody, TensorsBody, WeightReceiver, WeightsRefused

if TYPE_CHECKING:
    from tests.chaos.engine import Engine

WEIGHTS = "model.safetensors"
OTHERS = "other tensors than the folder of this version holds"


class Receiver:
    """``data`` is the service's directory."""

    def __init__(self, engine: Engine, model_dir: Path, data: Path) -> None:
        self._engine, self._data = engine, data
        self.decoder = SimpleNamespace(device=torch.device("cpu"), parameters=load_file(model_dir / WEIGHTS))
        self.num_loads = 0
        self._receiver = WeightReceiver(cast(EmbeddedEngine, self))

    # What the receiver asks an engine for

    @property
    def label(self) -> str:
        return self._engine.label

    def abort_all(self) -> None:
        self._engine.abort_all()

    async def take_weights(
        self, tensors: Mapping[str, Tensor], label: str, *, flush_cache: bool, unless_after: int
    ) -> bool:
        if self.num_loads != unless_after:
            return False
        named = EngineLabel.parse(label)
        folder = self._data / "jobs" / named.job / "weights" / f"v{named.version}"
        self._engine.received = None if _are_those_of(folder, tensors) else {WEIGHTS: OTHERS}
        await self._engine.update(str(folder), label, flush=flush_cache)
        self.num_loads += 1
        return True

    # Its calls

    async def answer(self, path: str, content: bytes) -> tuple[int, bytes] | None:
        """None: a call of another kind."""
        calls: dict[str, Callable[[], Any]] = {
            "/begin_weight_update": self._receiver.begin,
            "/end_weight_update": self._receiver.end,
            "/init_weights_update_group": lambda: self._receiver.join(msgspec.json.decode(content, type=JoinBody)),
            "/update_weights_from_distributed": lambda: self._receiver.receive(
                msgspec.json.decode(content, type=TensorsBody)
            ),
            "/destroy_weights_update_group": lambda: self._receiver.leave(
                msgspec.json.decode(content, type=LeaveBody).group_name
            ),
        }
        if path not in calls:
            return None
        try:
            found = calls[path]()
            if found is not None:
                await found
        except WeightsRefused as refused:
            return 400, msgspec.json.encode({"success": False, "message": str(refused)})
        return 200, msgspec.json.encode({"success": True, "message": "Success"})


def _are_those_of(folder: Path, tensors: Mapping[str, Tensor]) -> bool:
    try:
        published = load_file(folder / WEIGHTS)
    except FileNotFoundError:  # it is not needed any more and was removed
        return True
    return published.keys() == tensors.keys() and all(torch.equal(published[name], tensors[name]) for name in tensors)
