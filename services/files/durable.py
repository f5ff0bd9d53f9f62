"""Files and directories that survive a crash of the machine, not only of the process.

The rule kept here: content is flushed before a name points to it, and a name before anything relies on it. It does not
know what the files mean.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# Readers skip names with this prefix: half-written or half-removed.
TEMPORARY_PREFIX = ".tmp-"
_OWNER = re.compile(re.escape(TEMPORARY_PREFIX) + r"ep(\d+)-")


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents so that they survive a crash of the machine."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    try:
        flush_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # another process uses it already
            path.rmdir()
        raise


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
    """Make a directory and everything below it durable: contents, then names. What was flushed before costs little."""
    for directory, _, names in os.walk(root, topdown=False):
        for path in (Path(directory, name) for name in names):
            if stat.S_ISREG(path.lstat().st_mode):
                _flush_file(path)
        flush_directory(Path(directory))


def _flush_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def temporary_name(epoch: int | None = None) -> str:
    """A name for a file that is incomplete, or on its way out; ``epoch`` is that of the writing trainer."""
    owner = "" if epoch is None else f"ep{epoch:06d}-"
    return f"{TEMPORARY_PREFIX}{owner}{uuid.uuid4().hex}"


def write_once(path: Path, pieces: Iterable[bytes], *, epoch: int | None = None) -> None:
    """Write a file that appears complete or not at all; FileExistsError if the name was ever used before."""
    temporary = path.with_name(temporary_name(epoch))
    try:
        with temporary.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link never replaces a file of another process.
        os.link(temporary, path)
        try:
            flush_directory(path.parent)
        except OSError:  # the next attempt must find the name free
            path.unlink(missing_ok=True)
            raise
    finally:
        temporary.unlink(missing_ok=True)


def name_directory(source: Path, target: Path) -> None:
    """Rename a flushed directory to its final name; if the new name cannot be flushed, it keeps its old one."""
    source.rename(target)
    try:
        flush_directory(target.parent)
    except OSError:
        target.rename(source)
        raise


@contextlib.contextmanager
def whole_directory(
    target: Path, *, epoch: int | None = None, name: Callable[[Path, Path], None] = name_directory
) -> Iterator[Path]:
    """A temporary directory to fill, which becomes ``target`` when the block ends and is removed when it raises.

    ``target`` then survives a crash of the machine. ``name`` renames.
    """
    make_directory(target.parent)
    temporary = target.with_name(temporary_name(epoch))
    temporary.mkdir()
    try:
        yield temporary
        flush_tree(temporary)
        name(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_directory(path: Path, epoch: int | None = None) -> None:
    """Rename it, then remove it, so that no reader finds half of it. A missing one is no error."""
    doomed = path.with_name(temporary_name(epoch))
    with contextlib.suppress(FileNotFoundError):
        path.rename(doomed)
        shutil.rmtree(doomed)


def remove_unfinished(directory: Path, epoch: int) -> None:
    """Remove half-written files of trainers before ``epoch``; the write of one that is still at it fails.

    Files of later trainers stay: the caller may be a trainer that was suspended and does not know its successor.
    """
    for entry in directory.iterdir() if directory.is_dir() else ():
        owner = _OWNER.match(entry.name)
        if entry.name.startswith(TEMPORARY_PREFIX) and (owner is None or int(owner[1]) < epoch):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def append_line(path: Path, line: bytes) -> None:
    """Append to a file of lines; behind one that a crash cut off it begins a new one."""
    append(path, line + b"\n", behind=b"\n")


def append(path: Path, data: bytes, *, behind: bytes = b"") -> None:
    """Append to a file of records; a record that does not fit on the disk leaves nothing behind. ``behind``: what ends
    a record, and is added to one that does not end so."""
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if behind and size:
            file.seek(max(0, size - len(behind)))
            data = data if file.read(len(behind)) == behind else behind + data
        try:
            num_written = file.write(data)
            if num_written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            os.truncate(path, size)
            raise
