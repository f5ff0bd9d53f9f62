"""A picture of a folder as bytes, and the folder made from it again, perhaps at another place.

Rule: a picture is whole or there is none: files, folders, links, modes and times. Where files name the place itself,
they name the new one afterwards; one that does so and is no text cannot be moved, which is said.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

_MODE = 0o777
_MOST_FILES = 5_000


def packed(root: Path, names: Sequence[str], most_bytes: int) -> bytes | None:
    """``names`` below ``root``. None where it is more than ``most_bytes`` or ``_MOST_FILES``, or holds what no picture
    has: a socket, a pipe, or a file that may not be read."""
    try:
        found = (path for name in names for path in chain((root / name,), _below(root / name)))
        files = list(islice(found, _MOST_FILES + 1))
        kinds = [(path, path.lstat()) for path in files]
        regular = [info.st_size for _, info in kinds if stat.S_ISREG(info.st_mode)]
        usual = all(stat.S_IFMT(info.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK) for _, info in kinds)
        if not usual or sum(regular) > most_bytes or len(files) > _MOST_FILES:
            return None
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in files:
                archive.add(path, str(path.relative_to(root)), recursive=False, filter=_of_nobody)
    except (OSError, RecursionError):
        return None
    return zlib.compress(held.getvalue(), 1)


def unpack(state: bytes, root: Path, old_root: str) -> None:
    """Into ``root``, which has none of the names yet. Raises ``ValueError``, ``OSError``."""
    with tarfile.open(fileobj=io.BytesIO(zlib.decompress(state))) as archive:
        archive.extractall(root, filter=as_it_was)  # noqa: S202 - the filter checks each member
    for path in _below(root):
        if path.is_symlink():
            _move_link(path, old_root, str(root))
        elif path.is_file():
            _move_text(path, old_root.encode(), str(root).encode())


def remove(root: Path) -> None:
    """All of it, also what its owner may not enter."""
    os.chmod(root, 0o700)
    for name in os.listdir(root):
        path = root / name
        if path.is_dir() and not path.is_symlink():
            remove(path)
        else:
            path.unlink()
    root.rmdir()


def _below(root: Path) -> Iterator[Path]:
    """Folders before what is in them; links are not followed."""
    for name in sorted(os.listdir(root)):
        path = root / name
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The next process to set it up owns it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def as_it_was(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """Within ``path``, and with its own mode."""
    checked = tarfile.tar_filter(member, path)
    return checked.replace(mode=(member.mode or 0) & _MODE, deep=False)


def _move_link(path: Path, old: str, new: str) -> None:
    aim = os.readlink(path)
    if old in aim:
        path.unlink()
        path.symlink_to(aim.replace(old, new))


def _move_text(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    if old not in data:
        return
    try:
        data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} names the folder that it was in and is no text, so it cannot be moved") from None
    info = path.stat()
    path.chmod(0o600)
    path.write_bytes(data.replace(old, new))
    path.chmod(stat.S_IMODE(info.st_mode))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
