"""Reads tensors, or rows of them, from the safetensors files of a model directory.

One rule: only the bytes that were asked for are read, into memory of their own. Files are neither mapped nor read
whole, so a process that reads a part of a model never holds more than that part. It knows no model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class UnreadableWeights(ValueError):
    """The directory holds no complete set of safetensors files."""


@dataclass(frozen=True)
class _Place:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""


class WeightFiles:
    """The tensors of a model directory by name; a shape costs no read, since headers are read once."""

    def __init__(self, model_dir: Path) -> None:
        self._places: dict[str, _Place] = {}
        for path in _files(model_dir):
            self._places.update(_places(path))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the dtype of its file."""
        place = self._places[name]
        return _read(place, place.start, place.shape)

    def read_rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows `first` to `end` of its first dimension."""
        place = self._places[name]
        row_bytes = math.prod(place.shape[1:]) * place.dtype.itemsize
        return _read(place, place.start + first * row_bytes, (end - first, *place.shape[1:]))


def _files(model_dir: Path) -> list[Path]:
    if (model_dir / _ONE).is_file():
        return [model_dir / _ONE]
    if not (model_dir / _INDEX).is_file():
        raise UnreadableWeights(f"{model_dir} holds neither {_ONE} nor {_INDEX}")
    names = sorted(set(json.loads((model_dir / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise UnreadableWeights(f"{model_dir}: its index names {missing[0]}, which is not there")
    return [model_dir / name for name in names]


def _places(path: Path) -> Iterator[tuple[str, _Place]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise UnreadableWeights(f"{path} is cut short")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise UnreadableWeights(f"{path}: {name} has the type {entry['dtype']}, which is not read here")
        start, end = entry["data_offsets"]
        place = _Place(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start)
        if 8 + length + end > path.stat().st_size:
            raise UnreadableWeights(f"{path} is cut short: {name} is not in it")
        yield name, place


def _read(place: _Place, start: int, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape) * place.dtype.itemsize
    data = torch.empty(size, dtype=torch.uint8)
    with place.path.open("rb", buffering=0) as file:
        file.seek(start)
        view = data.numpy().data
        done = 0
        while done < size:
            count = file.readinto(view[done:])
            if not count:
                raise UnreadableWeights(f"{place.path} is cut short")
            done += count
    return data.view(place.dtype).view(shape)
