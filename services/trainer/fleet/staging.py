"""Making sure of a version before an engine is paused for it, and of an engine before it is given a version.

Rule: an engine is only told to load what was read completely and compared with its manifest, and what has the shapes of
the model that the engine was started with: a real engine ends when it is given others. Reading a version also brings
it into the page cache, so that the paused part is short. It pauses and loads nothing.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from gspo_core.types import WeightsManifest
from services.engines.protocol import EngineInfo
from services.files.weights import WeightStore

# What of a config.json decides the shapes of the tensors.
_SHAPES = (
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "moe_intermediate_size"),
)


class Staging:
    def __init__(self, weights: WeightStore) -> None:
        self._weights = weights
        self._staged: tuple[str, Path] | None = None

    async def stage(self, manifest: WeightsManifest) -> Path:
        """Where the version lies, whole. Raises ``DamagedVersion``."""
        if self._staged is None or self._staged[0] != manifest.label:
            await asyncio.to_thread(self._weights.verify, manifest)
            self._staged = manifest.label, self._weights.path(manifest.version)
        return self._staged[1]

    async def unfit(self, manifest: WeightsManifest, info: EngineInfo) -> str | None:
        """Why the engine cannot take this version, as far as can be seen from here; None if nothing speaks against it.

        An engine elsewhere may name a folder that is not here: then only its architecture is compared.
        """
        return await asyncio.to_thread(self._unfit, manifest, info)

    def _unfit(self, manifest: WeightsManifest, info: EngineInfo) -> str | None:
        ours = _config(self._weights.path(manifest.version))
        theirs = _config(Path(info.model_path)) if info.model_path else {}
        theirs = theirs or {"architectures": list(info.architectures) if info.architectures else None}
        for name in _SHAPES:
            mine, its = ours.get(name), theirs.get(name)
            if mine is not None and its is not None and mine != its:
                return f"its model has {name} {its}, the job's has {mine}"
        return None


def _config(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
