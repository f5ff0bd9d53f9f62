"""Stores a learner's tensors and counters as safetensors beside a JSON manifest with the sha256 of every file.

One rule: loading restores the saved state bit for bit or fails. The manifest is written last and atomically, so a
directory holds a complete state exactly when it has one; each directory is written once. Nothing is pickled.
It neither names nor garbage-collects checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gspo_core.learner.moments import MEAN, SCALES, SQUARE, keeps_small, loaded_state
from gspo_core.learner.ranks import local
from gspo_core.plan import share_of

MANIFEST = "learner.json"
PARAMETER = "parameter/"
# What a learner remembers of earlier steps beside the moments; where there is none, the file holds none.
MEMORY = "memory/"
LOG_RATIO_STD = MEMORY + "log_ratio_std"
FORMAT = 1
# AdamW's state per parameter.
MOMENTS = ("step", MEAN, SQUARE)
# The same with moments in eight bits, whose scales stand beside them.
SMALL_FORMAT = 2
SMALL_MOMENTS = (*MOMENTS, *SCALES.values())
# Read at each end of a file of weights.
_SAMPLE_BYTES = 2**20


class Content(TypedDict):
    counters: dict[str, int]
    model: str
    """Fingerprint of the model."""
    lora_alpha: NotRequired[float]


class ShardFile(TypedDict):
    size_bytes: int
    sha256: str


class Manifest(TypedDict):
    format: int
    num_ranks: int
    files: dict[str, ShardFile]
    content: Content


class InvalidState(ValueError):
    """The directory holds no complete state, or one that does not fit this learner."""


class UnfitState(InvalidState):
    """The state is whole, and belongs to another model or to a learner with other settings."""


class UnknownFormat(InvalidState):
    """Another release wrote the state in a format that this one cannot read."""


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Tensor]:
    """This rank's trained parameters, their moments and the random state."""
    tensors = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    for name, parameter in _trained(model):
        tensors[f"parameter/{name}"] = local(parameter.detach())
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = local(value)
    return tensors


@torch.no_grad()
def restore_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `training_tensors`, on whatever device these were saved; the tensors must fit."""
    optimizer.state.clear()
    restore_parameters(model, tensors)
    for name, parameter in _trained(model):
        found = {key: tensors.get(f"optimizer/{key}/{name}") for key in SMALL_MOMENTS}
        moments = {key: value for key, value in found.items() if value is not None}
        if moments:
            optimizer.state[parameter] = loaded_state(optimizer, parameter, moments)
    torch.set_rng_state(tensors["random/cpu"])
    if device.type == "cuda" and "random/cuda" in tensors:  # a CPU saves none: then the GPU keeps its own
        torch.cuda.set_rng_state(tensors["random/cuda"], device)


@torch.no_grad()
def restore_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """What is trained alone; the tensors must fit."""
    for name, parameter in _trained(model):
        local(parameter).copy_(tensors[PARAMETER + name])


def is_parameter(name: str) -> bool:
    """Whether a tensor of a state is what was trained, and not a moment, a memory or a random state."""
    return name.startswith(PARAMETER)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def check_fit(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Raises UnfitState if `tensors` belong to another model, other low-rank additions, or moments kept otherwise."""
    expected = {f"parameter/{name}": local(parameter).shape for name, parameter in _trained(model)}
    found = {name: value.shape for name, value in tensors.items() if name.startswith("parameter/")}
    if expected != found:
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise UnfitState(
            f"the state does not fit this learner: {len(differing)} parameters differ, the first is {differing[0]}"
        )

    has_moments, is_small = (
        any(name.startswith(f"optimizer/{key}/") for name in tensors) for key in (MEAN, SCALES[MEAN])
    )
    if has_moments and is_small != keeps_small(optimizer):
        kept = "8bit" if is_small else "float32"
        raise UnfitState(f"the state holds moments of optimizer.moments: {kept}, and this job asks for others")


def fingerprint(model_dir: Path) -> str:
    """Identify a model by its configuration and weight samples, so that training states of others are refused."""
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:  # training changes every tensor, so the ends of a file suffice
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def write_shard(directory: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of one rank; they are on disk on return."""
    if (directory / MANIFEST).exists():
        raise InvalidState(f"{directory} holds a state already; states are written once")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / shard_name(rank)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    _sync(path)


def format_of(optimizer: torch.optim.Optimizer) -> int:
    return SMALL_FORMAT if keeps_small(optimizer) else FORMAT


def write_manifest(directory: Path, num_ranks: int, content: Content, number: int = FORMAT) -> None:
    """Complete a state once all its shards are on disk."""
    names = [shard_name(rank) for rank in range(num_ranks)]
    files: dict[str, ShardFile] = {
        name: {"size_bytes": (directory / name).stat().st_size, "sha256": _sha256(directory / name)} for name in names
    }
    manifest: Manifest = {"format": number, "num_ranks": num_ranks, "files": files, "content": content}
    _write_whole(directory / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
    _sync(directory)
    _sync(directory.resolve().parent)


def _write_whole(path: Path, text: str) -> None:
    """Write a file atomically and durably; never replaces an existing one."""
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        with temporary.open("x") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_state(
    directory: Path, rank: int, num_ranks: int, wanted: Callable[[str], bool] = lambda _: True
) -> tuple[Content, dict[str, Tensor]]:
    """Return the manifest's content and the tensors of one rank, both verified. Only tensors whose names are `wanted`
    are read into memory; the files are verified whole all the same.

    If a different number of ranks saved the state, every rank verifies all shards and reads its part of each tensor;
    the random state then comes from one of the saving ranks.
    """
    manifest = _read_manifest(directory)
    if manifest["num_ranks"] == num_ranks:
        return manifest["content"], _read_shard(directory, manifest, rank, wanted)
    with contextlib.ExitStack() as stack:
        paths = [_checked_shard(directory, manifest, saved) for saved in range(manifest["num_ranks"])]
        shards = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        own = shards[rank % len(shards)]
        return manifest["content"], {
            name: own.get_tensor(name) if _is_whole(name) else _rows(shards, name, rank, num_ranks)
            for name in filter(wanted, own.keys())
        }


def check_state(directory: Path) -> None:
    """Raises InvalidState if any rank's file differs from what was written. Reads every file."""
    manifest = _read_manifest(directory)
    for rank in range(manifest["num_ranks"]):
        _checked_shard(directory, manifest, rank)


def _is_whole(name: str) -> bool:
    """Whether every rank holds the full tensor."""
    return name.startswith(("random/", "optimizer/step/", MEMORY))


def _rows(shards: Sequence[Any], name: str, rank: int, num_ranks: int) -> Tensor:
    """Read only this rank's rows, along the first dimension."""
    slices = [shard.get_slice(name) for shard in shards]
    ends = list(itertools.accumulate(one.get_shape()[0] for one in slices))
    first, end = share_of(ends[-1], rank, num_ranks)
    pieces = [
        one[max(first, start) - start : min(end, stop) - start]
        for one, start, stop in zip(slices, [0, *ends], ends, strict=False)
        if max(first, start) < min(end, stop)
    ]
    return torch.cat(pieces) if pieces else shards[0].get_tensor(name)[:0].clone()


def _read_shard(directory: Path, manifest: Manifest, rank: int, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    with safe_open(_checked_shard(directory, manifest, rank), framework="pt") as file:
        return {key: file.get_tensor(key) for key in filter(wanted, file.keys())}


def _checked_shard(directory: Path, manifest: Manifest, rank: int) -> Path:
    name = shard_name(rank)
    if name not in manifest["files"]:
        raise InvalidState(f"{directory}: its manifest speaks of {manifest['num_ranks']} ranks and lists no {name}")
    expected, path = manifest["files"][name], directory / name
    if not path.is_file() or path.stat().st_size != expected["size_bytes"] or _sha256(path) != expected["sha256"]:
        raise InvalidState(f"{path} is not what its manifest says: the state is damaged, use an older one")
    return path


def _read_manifest(directory: Path) -> Manifest:
    try:
        manifest: Manifest = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        raise InvalidState(f"{directory} holds no complete state: {MANIFEST} is missing") from None
    except ValueError as error:
        raise InvalidState(f"{directory / MANIFEST} is damaged: {error}") from None
    if manifest.get("format") not in (FORMAT, SMALL_FORMAT):
        raise UnknownFormat(
            f"{directory} has the format {manifest.get('format')}, this release reads {FORMAT} and {SMALL_FORMAT}: go "
            "on with the release that wrote it"
        )
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
