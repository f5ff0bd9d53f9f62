"""Versions of a job's weights on disk: ``weights/v<version>/``, each a plain model directory plus its manifest.

The rule kept here: what carries a version's name is complete, checked and never changes. Files are written into a
temporary sibling, hashed, flushed to disk and only then renamed to a name that nobody has used; a process that dies
in between leaves nothing but a temporary directory, which no reader sees. Which versions may be removed is the
caller's knowledge; this store neither decides that nor knows which version is current.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from gspo_core.types import InvalidValue, WeightFile, WeightsManifest
from services.durable import (
    TEMPORARY_PREFIX,
    flush_tree,
    make_directory,
    name_directory,
    remove_unfinished,
    temporary_name,
    write_flushed,
)

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_VERSION_NAME = re.compile(r"v(0|[1-9][0-9]*)")
# A writer that is still alive after an hour is not expected; what it left is swept.
_TEMPORARY_LIFETIME_S = 3600.0


class VersionExists(Exception):
    """Another writer has used this version number. Versions are never reused: take the next number."""


class VersionNotFound(Exception):
    """No complete version of this number is on disk."""


class DamagedVersion(Exception):
    """A version on disk is not what its manifest says; ``file`` is the first bad file."""

    def __init__(self, directory: Path, file: str, problem: str) -> None:
        super().__init__(f"{directory / file}: {problem}")
        self.file = file


class WeightStore:
    """The versions of the job whose directory is ``job_dir``; the directory's name is the job's id."""

    def __init__(self, job_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._job = job_dir.name
        self._root = job_dir / "weights"
        self._clock = clock

    def path(self, version: int) -> Path:
        """Where ``version`` lies, or would lie."""
        return self._root / f"v{version}"

    def write(self, version: int, epoch: int, step: int, save: Callable[[Path], None]) -> WeightsManifest:
        """Publish on disk what ``save`` writes into the directory that it is given."""
        target = self.path(version)
        if os.path.lexists(target):
            raise VersionExists(f"{target} exists; versions are written once")
        make_directory(self._root)
        temporary = self._root / temporary_name(epoch)
        temporary.mkdir()
        try:
            save(temporary)
            manifest = WeightsManifest(
                job=self._job, version=version, epoch=epoch, step=step, files=_flush_and_hash(temporary)
            )
            write_flushed(temporary / MANIFEST_NAME, _manifest_bytes(manifest))
            flush_tree(temporary)
            _rename_once(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return manifest

    def versions(self) -> list[int]:
        """The complete versions on disk, oldest first."""
        if not self._root.is_dir():
            return []
        names = (_VERSION_NAME.fullmatch(entry.name) for entry in self._root.iterdir())
        numbers = sorted(int(match[1]) for match in names if match)
        return [number for number in numbers if (self.path(number) / MANIFEST_NAME).is_file()]

    def manifest(self, version: int) -> WeightsManifest:
        """What the version says about itself; ``verify`` checks that it is true."""
        directory = self.path(version)
        try:
            data = (directory / MANIFEST_NAME).read_bytes()
        except FileNotFoundError as error:
            raise VersionNotFound(f"{directory} holds no complete version") from error
        try:
            return _parse_manifest(data)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedVersion(directory, MANIFEST_NAME, f"unreadable: {error}") from error

    def verify(self, manifest: WeightsManifest) -> None:
        """Read every file of the version; raises ``DamagedVersion`` for the first that differs from ``manifest``."""
        directory = self.path(manifest.version)
        if self.manifest(manifest.version) != manifest:
            raise DamagedVersion(directory, MANIFEST_NAME, "describes other weights than the manifest to be checked")
        for file in manifest.files:
            problem = _problem(directory / file.path, file)
            if problem:
                raise DamagedVersion(directory, file.path, problem)
        known = {MANIFEST_NAME, *(file.path for file in manifest.files)}
        for path in _files(directory):
            name = path.relative_to(directory).as_posix()
            if name not in known:
                raise DamagedVersion(directory, name, "is not in the manifest; a loader might take it for weights")

    def collect(self, keep: set[int]) -> list[int]:
        """Remove every version that is not in ``keep`` and what dead writers left; returns the removed versions.

        Versions newer than all of ``keep`` stay: somebody who has taken the job over published them, and the caller
        does not know it yet.
        """
        newest = max(keep, default=math.inf)
        removed = [version for version in self.versions() if version not in keep and version < newest]
        for version in removed:
            # Renamed first, so that nobody sees a half-removed version.
            doomed = self._root / temporary_name()
            with contextlib.suppress(FileNotFoundError):  # another trainer was faster
                self.path(version).rename(doomed)
                shutil.rmtree(doomed)
        self._sweep()
        return removed

    def remove_unfinished(self, epoch: int) -> None:
        """For who has taken the job over as ``epoch``: those before it have lost it."""
        remove_unfinished(self._root, epoch)

    def _sweep(self) -> None:
        if not self._root.is_dir():
            return
        for entry in self._root.iterdir():
            if entry.name.startswith(TEMPORARY_PREFIX):
                # A long save renews only the file that it writes to, not the directory.
                times = [path.lstat().st_mtime for path in (entry, *entry.rglob("*"))]
                if self._clock() - max(times) > _TEMPORARY_LIFETIME_S:
                    shutil.rmtree(entry, ignore_errors=True)


def _flush_and_hash(root: Path) -> tuple[WeightFile, ...]:
    files = []
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() or not path.is_file():
            raise InvalidValue(f"{name} is no plain file; a version holds plain files only")
        if name == MANIFEST_NAME:
            raise InvalidValue(f"the name {MANIFEST_NAME} is taken by the manifest of the version")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files.append(WeightFile(path=name, size_bytes=path.stat().st_size, sha256=digest))
    return tuple(files)


def _files(root: Path) -> list[Path]:
    """Everything below ``root`` that is no directory, in order of its name."""
    return sorted(path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())


def _problem(path: Path, expected: WeightFile) -> str | None:
    if path.is_symlink() or not path.is_file():
        return "is missing"
    size_bytes = path.stat().st_size
    if size_bytes != expected.size_bytes:
        return f"has {size_bytes} bytes, not {expected.size_bytes}"
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
            return "has another sha256 than the manifest says"
    return None


def _rename_once(source: Path, target: Path) -> None:
    # A directory replaces an empty one without complaint, but a version is never empty: it holds its manifest.
    try:
        name_directory(source, target)
    except OSError as error:
        if os.path.lexists(target):
            raise VersionExists(f"{target} was written by another process meanwhile") from error
        raise


def _manifest_bytes(manifest: WeightsManifest) -> bytes:
    record = {
        "format": _FORMAT,
        "job": manifest.job,
        "version": manifest.version,
        "epoch": manifest.epoch,
        "step": manifest.step,
        "files": [{"path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in manifest.files],
    }
    return (json.dumps(record, indent=1) + "\n").encode()


def _parse_manifest(data: bytes) -> WeightsManifest:
    record = json.loads(data)
    if record["format"] != _FORMAT:
        raise ValueError(f"format {record['format']}, this release reads {_FORMAT}")
    return WeightsManifest(
        job=record["job"],
        version=record["version"],
        epoch=record["epoch"],
        step=record["step"],
        files=tuple(WeightFile(file["path"], file["size_bytes"], file["sha256"]) for file in record["files"]),
    )
