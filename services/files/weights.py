"""Versions of a job's weights on disk: ``weights/v<version>/``, each a plain model directory plus its manifest.

The rule kept here: a directory with a version's name is complete, checked and never changes. Files are written into a
temporary sibling, hashed, flushed to disk and only then renamed to an unused name; a process that dies in between
leaves nothing but a temporary directory, which no reader sees. The caller decides which versions may be removed; this
store does not know which version is current.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from gspo_core.invariants import InvalidValue
from gspo_core.log.layout import WEIGHTS_MANIFEST
from gspo_core.log.manifests import decode_manifest, encode_manifest
from gspo_core.versions import EngineLabel, WeightFile, WeightsManifest
from services.files.durable import (
    TEMPORARY_PREFIX,
    name_directory,
    remove_directory,
    remove_unfinished,
    whole_directory,
    write_flushed,
)
from services.files.job_dir import JobDir, versions_in

MANIFEST_NAME = WEIGHTS_MANIFEST
_TOKENIZER_NAME = "tokenizer.json"
# A writer that has been silent for an hour is dead: its leavings are swept.
_TEMPORARY_LIFETIME_S = 3600.0


WriteDelta = Callable[[Path, str, Path, str], object]
"""Takes the folder and the label of a version, and those of the next one, which is being written."""


class VersionExists(Exception):
    """Another writer has used this version number. Versions are never reused: take the next number."""


class VersionNotFound(Exception):
    """No complete version of this number is on disk."""


class DamagedVersion(Exception):
    """A version on disk differs from its manifest; ``file`` is the first bad file."""

    def __init__(self, directory: Path, file: str, problem: str) -> None:
        super().__init__(f"{directory / file}: {problem}")
        self.file = file


class WeightStore:
    """The versions of one job."""

    def __init__(
        self, job: JobDir, *, clock: Callable[[], float] = time.time, write_delta: WriteDelta | None = None
    ) -> None:
        """``write_delta`` adds to each version what changed since the one before."""
        self._job = job
        self._clock = clock
        self._write_delta = write_delta

    def path(self, version: int) -> Path:
        """The directory of ``version``, whether it exists or not."""
        return self._job.version(version)

    def has(self, version: int) -> bool:
        return self.path(version).is_dir()

    def write(self, version: int, epoch: int, step: int, save: Callable[[Path], None]) -> WeightsManifest:
        """Publish on disk everything that ``save`` writes into a given directory."""
        target = self.path(version)
        if os.path.lexists(target):
            raise VersionExists(f"{target} already exists; a version is written only once")
        with whole_directory(target, epoch=epoch, name=_rename_once) as temporary:
            save(temporary)
            if self._write_delta is not None and (before := self.versions()):
                label = str(EngineLabel(self._job.id, epoch, version))
                self._write_delta(self.path(before[-1]), self.manifest(before[-1]).label, temporary, label)
            manifest = WeightsManifest(
                job=self._job.id, version=version, epoch=epoch, step=step, files=_flush_and_hash(temporary)
            )
            write_flushed(temporary / MANIFEST_NAME, encode_manifest(manifest))
        return manifest

    def versions(self) -> list[int]:
        """The complete versions on disk, oldest first."""
        found = versions_in(self._job.weights)
        return [version for version in found if (self.path(version) / MANIFEST_NAME).is_file()]

    def newest_tokenizer(self) -> Path | None:
        """The newest version's directory that holds a tokenizer."""
        found = (self.path(version) for version in reversed(versions_in(self._job.weights)))
        return next((path for path in found if (path / _TOKENIZER_NAME).is_file()), None)

    def manifest(self, version: int) -> WeightsManifest:
        """The version's manifest; ``verify`` checks it against the files."""
        directory = self.path(version)
        try:
            data = (directory / MANIFEST_NAME).read_bytes()
        except FileNotFoundError as error:
            raise VersionNotFound(f"{directory} holds no complete version") from error
        try:
            return decode_manifest(data)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedVersion(directory, MANIFEST_NAME, f"unreadable: {error}") from error

    def verify(self, manifest: WeightsManifest) -> None:
        """Read every file of the version; raises ``DamagedVersion`` for the first that differs from ``manifest``."""
        directory = self.path(manifest.version)
        if self.manifest(manifest.version) != manifest:
            raise DamagedVersion(
                directory, MANIFEST_NAME, "describes different weights than the manifest to be checked"
            )
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
        """Remove every version outside ``keep`` and the leavings of dead writers; returns the removed versions.

        Versions newer than all of ``keep`` stay: a successor of the caller may have published them.
        """
        newest = max(keep, default=math.inf)
        removed = [version for version in self.versions() if version not in keep and version < newest]
        for version in removed:
            remove_directory(self.path(version))
        self._sweep()
        return removed

    def remove_unfinished(self, epoch: int) -> None:
        """Remove half-written files of trainers before ``epoch``: they have lost the job."""
        remove_unfinished(self._job.weights, epoch)

    def _sweep(self) -> None:
        if not self._job.weights.is_dir():
            return
        for entry in self._job.weights.iterdir():
            if entry.name.startswith(TEMPORARY_PREFIX):
                with contextlib.suppress(FileNotFoundError):  # its writer is alive, and was faster
                    # A long save touches only the file that it writes, not the directory.
                    times = [path.lstat().st_mtime for path in (entry, *entry.rglob("*"))]
                    if self._clock() - max(times) > _TEMPORARY_LIFETIME_S:
                        shutil.rmtree(entry, ignore_errors=True)


def _flush_and_hash(root: Path) -> tuple[WeightFile, ...]:
    files = []
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() or not path.is_file():
            raise InvalidValue(f"{name} is not a regular file; a version holds only regular files")
        if name == MANIFEST_NAME:
            raise InvalidValue(f"the name {MANIFEST_NAME} is taken by the manifest of the version")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files.append(WeightFile(path=name, size_bytes=path.stat().st_size, sha256=digest))
    return tuple(files)


def _files(root: Path) -> list[Path]:
    """Everything below ``root`` but directories, by name."""
    return sorted(path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())


def _problem(path: Path, expected: WeightFile) -> str | None:
    if path.is_symlink() or not path.is_file():
        return "is missing"
    size_bytes = path.stat().st_size
    if size_bytes != expected.size_bytes:
        return f"has {size_bytes} bytes instead of {expected.size_bytes}"
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
            return "has a different sha256 than the manifest"
    return None


def _rename_once(source: Path, target: Path) -> None:
    # A directory replaces an empty one without complaint, but a version is never empty: it holds its manifest.
    try:
        name_directory(source, target)
    except OSError as error:
        if os.path.lexists(target):
            raise VersionExists(f"{target} was written by another process in the meantime") from error
        raise
