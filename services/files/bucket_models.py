"""Fetches a model or a data set from an object store, or from a folder that is mounted, into a directory of its own.

Rule: the directory appears whole, with each file as long as the store says, or not at all; only the files that are
fetched from a hub are fetched here. A store states no digest that all stores share, so contents are not checked: anyone
who can write to the bucket decides what is trained.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from services.files.bucket import Bucket, BucketEntry
from services.files.data_dir import HubKind
from services.files.disk_space import raising_no_room
from services.files.durable import whole_directory
from services.files.hub import PATTERNS, NotFetched, is_fetched


def fetch_from(bucket: Bucket, kind: HubKind, target: Path) -> Path:
    """``target``, which must not be there. Raises BucketRefused, NotFetched, NoRoom."""
    entries = [one for one in bucket.entries("") if is_fetched(kind, one.name)]
    needed = ("*.safetensors",) if kind is HubKind.MODEL else PATTERNS[kind]
    if not any(fnmatch(one.name, pattern) for one in entries for pattern in needed):
        raise NotFetched(f"{bucket.address} has no {', '.join(needed)}: files that can hold code are never fetched")
    with raising_no_room(), whole_directory(target) as directory:
        for one in entries:
            _copy(bucket, one, directory)
    return target


def _copy(bucket: Bucket, entry: BucketEntry, directory: Path) -> None:
    if ".." in PurePosixPath(entry.name).parts:
        raise NotFetched(f"{bucket.address}: {entry.name} leads elsewhere")
    path = directory / entry.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        size = sum(file.write(piece) for piece in bucket.get(entry.name))
    if size != entry.size_bytes:
        raise NotFetched(f"{bucket.address}: {entry.name} came with {size} of {entry.size_bytes} bytes; fetch it again")
