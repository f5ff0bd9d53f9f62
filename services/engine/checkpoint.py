"""Reading a folder of weights completely, and refusing it, before a live parameter is touched.

Rule: the returned tensors fit the model exactly (names, shapes, finite numbers), so that applying them cannot fail
half-way. It reads safetensors only, and never executes code from a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointRejected(Exception):
    """The folder does not hold weights of this model. Nothing was changed."""


def read_checkpoint(directory: Path, shapes: Mapping[str, torch.Size], optional: frozenset[str]) -> dict[str, Tensor]:
    """Every tensor of the model by name, on the CPU. Names in ``optional`` (tied ones) may be missing."""
    tensors: dict[str, Tensor] = {}
    for path in _files(directory):
        try:
            tensors.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointRejected(f"{path.name} cannot be read: {error}") from error
    require_fit(tensors, shapes, optional)
    return tensors


def require_fit(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], optional: frozenset[str]) -> None:
    """Raises ``CheckpointRejected``."""
    missing = shapes.keys() - tensors.keys() - optional
    unknown = tensors.keys() - shapes.keys()
    if missing or unknown:
        raise CheckpointRejected(f"missing tensors {_few(missing)}, unknown tensors {_few(unknown)}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise CheckpointRejected(f"{name} has shape {tuple(tensor.shape)} instead of {tuple(shapes[name])}")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise CheckpointRejected(f"{name} contains values that are not finite floating-point numbers")


def _files(directory: Path) -> list[Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if not index.is_file():
        raise CheckpointRejected(f"the folder {directory.name} holds neither {_SINGLE} nor {_INDEX}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointRejected(f"{_INDEX} is damaged: {error!r}") from error
    if any(Path(name).name != name for name in names):
        raise CheckpointRejected(f"{_INDEX} refers to files outside of its folder")
    return [directory / name for name in names]


def _few(names: set[str]) -> str:
    shown = sorted(names)
    return f"{shown[:3]}{f' and {len(shown) - 3} more' if len(shown) > 3 else ''}"
