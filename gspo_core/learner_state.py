"""Tensors and counters of a learner on disk: safetensors beside a JSON manifest with the sha256 of every file.

One rule: what is loaded is what was saved, bit for bit, or nothing at all. The manifest is written last, so a directory
without one is no state; a directory is written once. Nothing is pickled. What the tensors mean is not known here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MANIFEST = "learner.json"
FORMAT = 1


class InvalidState(ValueError):
    """A directory that holds no complete state, or one that does not fit this learner."""


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_shard(directory: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """The tensors of one rank; on disk when this returns."""
    if (directory / MANIFEST).exists():
        raise InvalidState(f"{directory} holds a state already; states are written once")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / shard_name(rank)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    _sync(path)


def write_manifest(directory: Path, num_ranks: int, content: Mapping[str, Any]) -> None:
    """Completes a state whose shards are all on disk."""
    names = [shard_name(rank) for rank in range(num_ranks)]
    files = {
        name: {"size_bytes": (directory / name).stat().st_size, "sha256": _sha256(directory / name)} for name in names
    }
    manifest = {"format": FORMAT, "num_ranks": num_ranks, "files": files, "content": dict(content)}
    path = directory / MANIFEST
    with path.open("x") as stream:
        json.dump(manifest, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(directory)


def read_state(directory: Path, rank: int, num_ranks: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The manifest's content and the tensors of one rank, both checked."""
    manifest = _read_manifest(directory)
    if manifest["num_ranks"] != num_ranks:
        raise InvalidState(
            f"the state in {directory} was saved by {manifest['num_ranks']} ranks and {num_ranks} cannot "
            "resume it: take as many ranks, or start from its weights"
        )
    name = shard_name(rank)
    expected, path = manifest["files"][name], directory / name
    if not path.is_file() or path.stat().st_size != expected["size_bytes"] or _sha256(path) != expected["sha256"]:
        raise InvalidState(f"{path} is not what its manifest says: the state is damaged, use an older one")
    with safe_open(path, framework="pt") as file:
        return manifest["content"], {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        raise InvalidState(f"{directory} holds no complete state: {MANIFEST} is missing") from None
    except ValueError as error:
        raise InvalidState(f"{directory / MANIFEST} is damaged: {error}") from None
    if manifest.get("format") != FORMAT:
        raise InvalidState(f"{directory} has the format {manifest.get('format')}, not {FORMAT}")
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
