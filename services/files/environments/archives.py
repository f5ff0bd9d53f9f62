"""Unpacks an upload: a Python file, a zip, or a tar, plain or gzipped.

Rule: trust nothing that an archive says. Names, kinds and sizes are judged one by one, bytes are counted as they come
out, and a refused archive leaves nothing behind. It runs nothing; a directory appears whole or not at all.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from services.files.durable import flush_tree, make_directory, temporary_name

MAX_PACKED_BYTES = 10 << 20
MAX_UNPACKED_BYTES = 100 << 20
MAX_FILES = 2000
MAX_RATIO = 100
MAX_NAME_CHARS, MAX_PART_BYTES, MAX_DEPTH = 512, 255, 16
# Small archives of very regular text may compress better than the ratio.
RATIO_FREE_BYTES = 1 << 20
_PIECE = 1 << 16
# Headers and padding of a tar, besides the content.
_TAR_OVERHEAD = MAX_FILES * 4096


class ArchiveRefused(ValueError):
    """The upload is refused; the text says why."""


def unpack(
    packed: bytes, target: Path, *, file_name: str | None = None, check: Callable[[Path], None] = lambda _: None
) -> None:
    """Into a new directory ``target``; if it exists already, it holds the same content.

    ``file_name``: the upload is this one file, not an archive. ``check`` looks at the directory before others see it;
    if it raises, nothing is left behind.
    """
    if len(packed) > MAX_PACKED_BYTES:
        raise ArchiveRefused(f"an upload may have at most {MAX_PACKED_BYTES} bytes")
    if target.is_dir():
        check(target)
        return
    make_directory(target.parent)
    folder = target.with_name(temporary_name())
    folder.mkdir()
    try:
        members = (
            _members(packed) if file_name is None else iter([(file_name, cast(IO[bytes] | None, io.BytesIO(packed)))])
        )
        _Unpacking(folder, len(packed)).run(members)
        check(folder)
        flush_tree(folder)
        try:
            os.rename(folder, target)
        except OSError:
            if not target.is_dir():  # otherwise another process has unpacked the same
                raise
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile, NotImplementedError) as error:
        raise ArchiveRefused(f"the archive cannot be read: {error}") from None
    except (ValueError, OverflowError, UnicodeError) as error:
        raise (
            error if isinstance(error, ArchiveRefused) else ArchiveRefused(f"the archive is damaged: {error}")
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _members(packed: bytes) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Names with their content, None for a directory."""
    if packed.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        yield from _zip_members(packed)
    elif packed.startswith(b"\x1f\x8b"):
        yield from _tar_members(_Counted(cast(IO[bytes], gzip.GzipFile(fileobj=io.BytesIO(packed)))))
    elif packed[257:262] == b"ustar":
        yield from _tar_members(_Counted(io.BytesIO(packed)))
    else:
        raise ArchiveRefused("this is neither a zip nor a tar (plain or gzipped)")


def _zip_members(packed: bytes) -> Iterator[tuple[str, IO[bytes] | None]]:
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        entries = archive.infolist()
        if len(entries) > MAX_FILES:
            raise ArchiveRefused(f"an archive may hold at most {MAX_FILES} files")
        for entry in entries:
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise ArchiveRefused(f"{entry.orig_filename[:80]!r} is neither a file nor a directory")
            # Other methods allocate as much memory as the archive says, and fail in ways of their own.
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ArchiveRefused(f"{entry.orig_filename[:80]!r} is not compressed with deflate")
            if entry.flag_bits & 1:
                raise ArchiveRefused("the archive is encrypted")
            if "\0" in entry.orig_filename:
                raise ArchiveRefused("a file name contains a NUL byte")
            if entry.is_dir():
                yield entry.orig_filename, None
            else:
                with archive.open(entry) as content:
                    yield entry.orig_filename, content


def _tar_members(stream: _Counted) -> Iterator[tuple[str, IO[bytes] | None]]:
    # As a stream: nothing is looked up by an offset that the archive names.
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", errorlevel=2) as archive:
        for entry in archive:
            if entry.isdir():
                yield entry.name, None
            elif entry.isreg() and not entry.issparse():
                content = archive.extractfile(entry)
                assert content is not None
                yield entry.name, content
            else:
                raise ArchiveRefused(f"{entry.name[:80]!r} is neither a file nor a directory")


class _Counted:
    """A stream that refuses to yield more than an archive may hold, headers included."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = MAX_UNPACKED_BYTES + _TAR_OVERHEAD

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(_PIECE if size < 0 else min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise ArchiveRefused(f"an archive may hold at most {MAX_UNPACKED_BYTES} bytes")
        return data


class _Unpacking:
    def __init__(self, folder: Path, packed_bytes: int) -> None:
        self._folder = folder
        self._most = min(MAX_UNPACKED_BYTES, max(RATIO_FREE_BYTES, packed_bytes * MAX_RATIO))
        self._written = 0
        self._seen: dict[str, tuple[str, bool]] = {}
        """By folded name: its spelling, and whether it is a directory."""

    def run(self, members: Iterator[tuple[str, IO[bytes] | None]]) -> None:
        count = 0
        for name, content in members:
            count += 1
            if count > MAX_FILES:
                raise ArchiveRefused(f"an archive may hold at most {MAX_FILES} files")
            parts = _parts(name)
            if not parts:
                continue
            self._claim(parts, is_directory=content is None)
            path = self._folder.joinpath(*parts)
            (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
            if content is not None:
                self._write(path, content)
        if all(is_directory for _, is_directory in self._seen.values()):
            raise ArchiveRefused("the archive holds no file")

    def _claim(self, parts: tuple[str, ...], *, is_directory: bool) -> None:
        """Refuses names that some file system takes for the same, and files that are also directories."""
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            entry = (name, is_directory or depth < len(parts))
            held = self._seen.setdefault(_folded(name), entry)
            if held != entry or (depth == len(parts) and not is_directory and self._files_seen(name)):
                raise ArchiveRefused(f"{name[:80]!r} occurs twice, in two spellings, or as both a file and a directory")

    def _files_seen(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _write(self, path: Path, content: IO[bytes]) -> None:
        with path.open("xb") as file:
            while data := content.read(_PIECE):
                self._written += len(data)
                if self._written > self._most:
                    raise ArchiveRefused(
                        f"it unpacks to more than {MAX_UNPACKED_BYTES} bytes, or {MAX_RATIO} times its size"
                    )
                file.write(data)


def _parts(name: str) -> tuple[str, ...]:
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ArchiveRefused(f"{name[:80]!r} is not a valid file name")
    if name.startswith("/") or "\\" in name or ":" in name:
        raise ArchiveRefused(f"{name[:80]!r}: names must be relative and use /")
    if any(part == ".." for part in name.split("/")):
        raise ArchiveRefused(f"{name[:80]!r} points outside of the archive")
    parts = tuple(part for part in PurePosixPath(name).parts if part != ".")
    if len(parts) > MAX_DEPTH or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        raise ArchiveRefused(f"{name[:80]!r} is too long or too deep")
    return parts


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()
