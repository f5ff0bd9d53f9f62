"""How two ways from the same weights differ, and whether weights are those that were published.

The rule: distances are of what is trained (the additions where those are trained), in double precision; sameness is of
bytes. It trains nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from gspo_core.lora_adapter import ADAPTER_WEIGHTS
from gspo_core.replay.past import Past, digests
from gspo_core.versions import WeightsManifest

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """How another way differs from the one that was taken, both from the same weights."""

    cosine: float | None
    """Between the two updates; None where one of them moved nothing."""
    distance: float
    """Between the two ends."""
    way: float
    """Length of the way that was taken."""

    @property
    def share(self) -> float | None:
        """The distance as a share of the way."""
        return self.distance / self.way if self.way else None


@torch.no_grad()
def difference(before: Parameters, taken: Parameters, other: Parameters) -> Difference:
    sums = torch.zeros(4, dtype=torch.float64)
    for name, start in before.items():
        here, there = (end[name].double() - start.double() for end in (taken, other))
        sums += torch.stack(
            [(here * there).sum(), here.square().sum(), there.square().sum(), (here - there).square().sum()]
        )
    product, own, others, apart = sums.tolist()
    cosine = product / math.sqrt(own * others) if own and others else None
    return Difference(cosine, math.sqrt(apart), math.sqrt(own))


@dataclass(frozen=True, slots=True)
class Sameness:
    """A published version beside the weights that were trained again."""

    version: int
    step: int
    epoch: int
    is_same: bool
    """Every file has the bytes that were published."""
    num_tensors: int
    num_same: int | None
    """Tensors that are bit for bit the same; None where files differ and the version is no longer kept."""
    differing_files: tuple[str, ...] = ()


def sameness(past: Past, manifest: WeightsManifest, replayed: Path) -> Sameness:
    """``replayed``: a directory that the learner saved."""
    expected = {file.path: file.sha256 for file in manifest.files}
    found = digests(replayed)
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    names = _tensors(replayed)
    kept = past.weights(manifest.version)
    if not differing:
        num_same: int | None = len(names)
    else:
        num_same = None if kept is None else _num_same(replayed, kept, names)
    place = (manifest.version, manifest.step, manifest.epoch)
    return Sameness(*place, not differing, len(names), num_same, tuple(differing))


def _tensors(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        found: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return found
    is_adapter = (folder / ADAPTER_WEIGHTS).is_file()
    name = ADAPTER_WEIGHTS if is_adapter else "model.safetensors"
    with safe_open(folder / name, framework="pt") as file:
        return dict.fromkeys(file.keys(), name)


def _num_same(replayed: Path, kept: Path, names: Mapping[str, str]) -> int:
    theirs = _tensors(kept)
    same = 0
    for name in names.keys() & theirs.keys():
        ours, old = (_tensor(folder / of[name], name) for folder, of in ((replayed, names), (kept, theirs)))
        same += torch.equal(ours, old)
    return same


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        found: Tensor = file.get_tensor(name)
        return found
