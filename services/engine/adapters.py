"""Turns a version that is an adapter into the weights of the whole model, or into a refusal that changed nothing.

Rule: the weights are the base plus the additions, whatever the engine holds, in the arithmetic and with the digest of
the trainer. The base stays mapped between versions, so that of a version only its adapter is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gspo_core.log.manifests import decode_manifest
from gspo_core.lora_adapter import AdapterRefused, BaseWeights, merged_weights, read_additions
from services.engine.checkpoint import CheckpointRejected, require_fit
from services.files.weights import MANIFEST_NAME


class AdapterReader:
    def __init__(self) -> None:
        self._base: BaseWeights | None = None

    def read(
        self, directory: Path, label: str, shapes: Mapping[str, torch.Size], optional: frozenset[str]
    ) -> dict[str, Tensor]:
        """Every tensor of the model, as ``read_checkpoint`` gives it. Raises ``CheckpointRejected``."""
        try:
            _require_label(directory, label)
            tensors = self._merged(directory)
        except AdapterRefused as error:
            raise CheckpointRejected(str(error)) from error
        require_fit(tensors, shapes, optional)
        return tensors

    def _merged(self, directory: Path) -> dict[str, Tensor]:
        place = read_additions(directory).base
        known = self._base if self._base is not None and self._base.directory == place else None
        try:
            self._base = known or BaseWeights(place)
            return merged_weights(self._base, directory)
        except AdapterRefused:
            self._base = None  # another model may lie there by the next time
            raise


def _require_label(directory: Path, label: str) -> None:
    try:
        found = decode_manifest((directory / MANIFEST_NAME).read_bytes()).label
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterRefused(f"the folder {directory.name} holds no complete version: {error!r}") from error
    if found != label:
        raise AdapterRefused(f"the folder {directory.name} holds {found}, not {label}")
