"""Weights as buckets: many tensors, end to end in one block of bytes, with the list that takes them apart again.

Rule: a bucket holds tensors of one type, so that each begins where its type may begin; both ends agree on it by the
list alone (names, types, shapes, in the order of the bytes). Those of a folder are pieces of its files, mapped and not
copied, with every page touched: sending them reads no disk. Nothing is sent here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

# What an engine has to have free beside its model. Smaller ones cost a call of some milliseconds each.
MAX_BYTES = 256 * 2**20
_LENGTH_BYTES = 8
_PAGE_BYTES = 4096
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Described: TypeAlias = tuple[str, str, list[int]]
"""Name, type as torch spells it, shape."""


class NoBuckets(ValueError):
    """The folder holds a tensor that cannot be sent."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    tensors: tuple[Described, ...]
    data: Tensor
    """Bytes."""


def buckets_in(directory: Path, max_bytes: int = MAX_BYTES) -> list[WeightBucket]:
    """All tensors of the safetensors files of a folder. Raises NoBuckets."""
    return [bucket for path in sorted(directory.glob("*.safetensors")) for bucket in _buckets_of(path, max_bytes)]


def unpack(tensors: Sequence[Described], data: Tensor) -> dict[str, Tensor]:
    """Views of ``data``, which has as many bytes as they need."""
    found: dict[str, Tensor] = {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + num_bytes(dtype, shape)
        found[name] = data[position:end].view(getattr(torch, dtype)).view(shape)
        position = end
    return found


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return math.prod(shape) * kind.itemsize


def _buckets_of(path: Path, max_bytes: int) -> Iterator[WeightBucket]:
    raw = np.memmap(path, np.uint8, "c")
    raw[::_PAGE_BYTES].max()
    body = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES].tobytes(), "little")
    held: list[Described] = []
    start = stop = body
    for (first, end), one in _in_order(path, raw[_LENGTH_BYTES:body].tobytes()):
        begins, ends = body + first, body + end
        if held and (one[1] != held[-1][1] or begins != stop or ends - start > max_bytes):
            yield WeightBucket(tuple(held), torch.from_numpy(raw[start:stop]))
            held = []
        if not held:
            start = begins
        held.append(one)
        stop = ends
    if held:
        yield WeightBucket(tuple(held), torch.from_numpy(raw[start:stop]))


def _in_order(path: Path, header: bytes) -> list[tuple[tuple[int, int], Described]]:
    """As they lie in the file."""
    found = []
    for name, said in json.loads(header).items():
        if name == "__metadata__":
            continue
        if said["dtype"] not in _TYPES:
            raise NoBuckets(f"{name} in {path.name} has type {said['dtype']}, which no group takes")
        first, end = said["data_offsets"]
        found.append(((first, end), (name, _TYPES[said["dtype"]], list(said["shape"]))))
    return sorted(found)
