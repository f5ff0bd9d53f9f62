"""The storage of checkpoints: the one interface that another kind of store (of objects, say) has to provide.

The rule: a directory under its final name is complete, and everything written when a call returns survives a crash of
the machine. A storage moves bytes under names; ``checkpoints`` decides which are valid and which may go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.files.durable import make_directory, remove_directory, remove_unfinished, whole_directory, write_once
from services.files.job_dir import JobDir


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: str
    """Below the stored directory, with slashes."""
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored directory, unopened."""

    changed_at: float
    """Seconds since 1970."""
    files: tuple[StoredFile, ...]


class CheckpointStorage(Protocol):
    def names(self) -> list[str]:
        """All names, in no order; half-written directories may be among them, under meaningless names."""

    def put(self, name: str, epoch: int, fill: Callable[[Path], None]) -> None:
        """Store everything that ``fill`` writes into a given directory, or nothing. Raises OSError."""

    def fetch(self, name: str) -> Path:
        """A directory on this machine with everything stored under ``name``."""

    def read(self, name: str) -> bytes:
        """One file: ``NAME``, or ``NAME/FILE`` of a directory. Raises OSError; FileNotFoundError if it is missing."""

    def describe(self, name: str) -> Stored:
        """A directory's files; fewer while it is being removed. Raises FileNotFoundError."""

    def write_once(self, name: str, data: bytes, epoch: int) -> None:
        """Raises FileExistsError if the name was ever used."""

    def remove(self, name: str, epoch: int | None = None) -> None:
        """Remove a file or directory, if it exists. ``epoch`` is that of the removing trainer."""

    def remove_unfinished(self, epoch: int) -> None:
        """Remove directories that trainers before ``epoch`` left half-written or half-removed."""


def storage_of(job: JobDir) -> CheckpointStorage:
    """The storage of the checkpoints of ``job``."""
    return DirectoryStorage(job.checkpoints)


class DirectoryStorage:
    """Checkpoints in a directory that all processes share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> list[str]:
        return [path.name for path in self._root.iterdir()] if self._root.is_dir() else []

    def put(self, name: str, epoch: int, fill: Callable[[Path], None]) -> None:
        with whole_directory(self._root / name, epoch=epoch) as temporary:
            fill(temporary)

    def fetch(self, name: str) -> Path:
        return self._root / name

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def describe(self, name: str) -> Stored:
        root = self._root / name
        changed_at, files = root.stat().st_mtime, []
        for folder, _, names in os.walk(root):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    about = path.stat()
                    files.append(StoredFile(path.relative_to(root).as_posix(), about.st_size, about.st_mtime_ns))
        return Stored(changed_at, tuple(files))

    def write_once(self, name: str, data: bytes, epoch: int) -> None:
        make_directory(self._root)
        write_once(self._root / name, [data], epoch=epoch)

    def remove(self, name: str, epoch: int | None = None) -> None:
        path = self._root / name
        if path.is_dir():
            remove_directory(path, epoch)
        else:
            path.unlink(missing_ok=True)

    def remove_unfinished(self, epoch: int) -> None:
        remove_unfinished(self._root, epoch)
