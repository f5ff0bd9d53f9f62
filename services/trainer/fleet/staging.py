"""Checks a version before any engine pauses for it, and an engine before it gets a version.

Rule: an engine only loads a version that was read completely, matches its manifest, and has the shapes of the model
the engine started with, since a real engine dies on others. Reading also warms the page cache, which shortens the
pause. This module pauses and loads nothing.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from gspo_core.versions import WeightsManifest
from services.engines import quantization
from services.engines.protocol import EngineInfo
from services.files.weights import WeightStore

# As peft spells it.
_ADAPTER = "adapter_config.json"
# The entries of config.json that determine tensor shapes.
_SHAPES = (
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "moe_intermediate_size"),
)


class Staging:
    def __init__(self, weights: WeightStore) -> None:
        self._weights = weights
        self._staged: tuple[str, Path] | None = None

    async def stage(self, manifest: WeightsManifest) -> Path:
        """Path of the verified version. Raises ``DamagedVersion``."""
        if self._staged is None or self._staged[0] != manifest.label:
            await asyncio.to_thread(self._weights.verify, manifest)
            self._staged = manifest.label, self._weights.path(manifest.version)
        return self._staged[1]

    async def unfit(self, manifest: WeightsManifest, info: EngineInfo) -> str | None:
        """Why the engine cannot take this version, as far as this machine can tell; None if it can.

        A remote engine may name a folder that does not exist here; then only its architecture is compared.
        """
        return await asyncio.to_thread(self._unfit, manifest, info)

    def _unfit(self, manifest: WeightsManifest, info: EngineInfo) -> str | None:
        ours = _config(self._weights.path(manifest.version))
        theirs = _config(Path(info.model_path)) if info.model_path else {}
        if method := quantization.of_config(theirs):
            return quantization.problem(method, is_of_model=True)
        theirs = theirs or {"architectures": list(info.architectures) if info.architectures else None}
        for name in _SHAPES:
            mine, its = ours.get(name), theirs.get(name)
            if mine is not None and its is not None and mine != its:
                return f"its model has {name} {its}, the job's has {mine}"
        return None


def _config(directory: Path) -> dict[str, Any]:
    """The configuration of the model in a folder; for an adapter, its base's."""
    over = _read(directory / _ADAPTER).get("base_model_name_or_path")
    return _read((Path(over) if isinstance(over, str) else directory) / "config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
