"""Fetches models and data sets of the Hugging Face hub into the data directory, once each.

The rule: a directory holds one commit of one repository; it appears whole, with every file checked against the size and
digest that the hub states, or not at all, and never changes. Only files that hold data are fetched: no pickle, no code.
It decides nothing about who may fetch; names and directories are those of ``data_dir``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from services.files.data_dir import FETCHED, HubDir, HubKind, HubName
from services.files.disk_space import lacks_room, raising_no_room
from services.files.durable import flush_directory, flush_tree, make_directory, name_directory, write_flushed

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo, ModelInfo, RepoSibling

_CHUNK_BYTES = 1 << 20
_ANSWER_S = 20.0


# The files that are fetched. None of these formats can hold code that loading would run.
PATTERNS: Mapping[HubKind, tuple[str, ...]] = {
    HubKind.MODEL: ("*.json", "*.safetensors", "*.txt", "*.jinja"),
    HubKind.DATASET: ("*.json", "*.jsonl", "*.txt", "*.parquet"),
}


class NotFetched(Exception):
    """The hub cannot be reached, or does not have the requested files; nothing is left that looks whole."""


def fetch(hub: HubDir, kind: HubKind, name: HubName) -> Path:
    """The directory of ``name``, fetched unless that commit is there. Raises NotFetched, NoRoom.

    Blocking, for as long as the download takes. Callers that ask meanwhile wait for it. After a crash it goes on with
    the files that are missing.
    """
    if name.revision is not None and (there := hub.fetched(kind, name)) is not None:
        return there
    # Read when the package is imported: nothing but what is asked for leaves this machine.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    commit, files = _ask(kind, name)
    target = hub.directory(kind, name, commit)
    make_directory(hub.place(kind))
    with _alone(target), raising_no_room():
        if not target.is_dir():
            part = target.with_name(f".{target.name}.part")
            _download(kind, name, commit, part)
            (part / FETCHED).unlink(missing_ok=True)  # of a process that ended right here
            _check(part, files, name)
            names = [one.rfilename for one in files]
            record = {"repository": name.repo_id, "kind": kind, "commit": commit, "files": names}
            write_flushed(part / FETCHED, json.dumps(record, indent=1).encode())
            flush_tree(part)
            name_directory(part, target)
    return target


def is_fetched(kind: HubKind, path: str) -> bool:
    """A model's files are fetched only from the top: its folders hold other forms of it, such as ONNX."""
    is_below = kind is HubKind.MODEL and "/" in path
    return not is_below and any(fnmatch(path, pattern) for pattern in PATTERNS[kind])


def _ask(kind: HubKind, name: HubName) -> tuple[str, Sequence[RepoSibling]]:
    """The commit, and its files of the formats that are fetched."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    with _translated(name):
        try:
            info: ModelInfo | DatasetInfo
            repository, revision = name.repo_id, name.revision
            if kind is HubKind.MODEL:
                info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_ANSWER_S)
            else:
                info = HfApi().dataset_info(repository, revision=revision, files_metadata=True, timeout=_ANSWER_S)
        except RevisionNotFoundError as error:
            raise NotFetched(f"the hub has {name.repo_id}, but no revision {name.revision} of it") from error
        except RepositoryNotFoundError as error:
            raise NotFetched(
                f"the hub has no {kind} {name.repo_id}, or shows it only to those who agreed to its terms (HF_TOKEN)"
            ) from error
    files = [one for one in info.siblings or () if is_fetched(kind, one.rfilename)]
    needed = "*.safetensors" if kind is HubKind.MODEL else "*.json*, *.parquet"
    if info.sha is None or not any(fnmatch(one.rfilename, pattern) for one in files for pattern in needed.split(", ")):
        raise NotFetched(f"{name} has no {needed}: files that can hold code, such as pickles, are never fetched")
    return info.sha, files


def _download(kind: HubKind, name: HubName, commit: str, part: Path) -> None:
    from huggingface_hub import snapshot_download

    ignored = ["*/*"] if kind is HubKind.MODEL else []
    with _translated(name):
        snapshot_download(
            name.repo_id,
            repo_type=kind,
            revision=commit,
            local_dir=part,
            allow_patterns=list(PATTERNS[kind]),
            ignore_patterns=ignored,
        )
    shutil.rmtree(part / ".cache", ignore_errors=True)


def _check(part: Path, files: Sequence[RepoSibling], name: HubName) -> None:
    """Raises NotFetched if a file is missing, is not what the hub states, or was never asked for."""
    there = {str(path.relative_to(part)): path for path in part.rglob("*") if path.is_symlink() or not path.is_dir()}
    expected = {one.rfilename: one for one in files}
    wrong = sorted(set(there) ^ set(expected))
    wrong += [path for path, one in expected.items() if path in there and not _is_whole(there[path], one)]
    if wrong:
        shutil.rmtree(part)
        raise NotFetched(f"{name} did not arrive whole: {', '.join(wrong[:4])}; fetch it again")


def _is_whole(path: Path, stated: RepoSibling) -> bool:
    """Flushes it, too."""
    size = path.lstat().st_size
    if path.is_symlink() or (stated.size is not None and size != stated.size):
        return False
    # Large files are named by their own digest, small ones by that of git.
    is_large = stated.lfs is not None
    digest = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        os.fsync(file.fileno())
    return digest.hexdigest() == (stated.lfs.sha256 if stated.lfs is not None else stated.blob_id)


@contextmanager
def _translated(name: HubName) -> Iterator[None]:
    from httpx2 import HTTPError  # what huggingface_hub speaks HTTP with

    try:
        yield
    except NotFetched:
        raise
    except (OSError, ValueError, HTTPError) as error:
        if lacks_room(error):
            raise
        raise NotFetched(f"{name} could not be fetched: {str(error).partition(chr(10))[0]}") from error


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One process fetches; others wait."""
    with (target.with_name(f".{target.name}.lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        flush_directory(target.parent)
