"""Files and directories that survive a crash of the machine, not only of the process.

The rule kept here: content is flushed before a name points to it, and a name is flushed before anyone relies on it.
It knows nothing about what the files mean.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

# Readers skip names that start like this: half-written or half-removed.
TEMPORARY_PREFIX = ".tmp-"


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents so that they survive a crash of the machine."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    flush_directory(path.parent)


def write_flushed(path: Path, data: bytes) -> None:
    """Write a new file and flush its content to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(root: Path) -> None:
    """Make the names in a directory and in everything below it durable."""
    for directory, _, _ in os.walk(root, topdown=False):
        flush_directory(Path(directory))


def write_once(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file that appears complete or not at all; FileExistsError if the name was ever used before."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link never replaces what another process wrote meanwhile.
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_directory(path.parent)


def remove_unfinished(directory: Path) -> None:
    """What writers that are no more have left half-written. One that still writes there fails."""
    for entry in directory.iterdir() if directory.is_dir() else ():
        if entry.name.startswith(TEMPORARY_PREFIX):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def append_line(path: Path, line: bytes) -> None:
    """Append ``line`` to a file of lines; one that does not fit on the disk leaves nothing behind."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            num_written = file.write(line + b"\n")
            if num_written != len(line) + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            os.truncate(path, size)
            raise
