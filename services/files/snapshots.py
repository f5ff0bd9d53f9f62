"""Snapshots of a data directory in a bucket, while everything runs, and back: to another installation, or to this one.

Rule: an object is named by the digest of its content and written before a snapshot names it, so a snapshot is whole or
not there, and a second one costs what is new. The order of ``backup`` makes each good to go on from. What is restored
is checked by its digest, and a job appears (``job.json``) when all else of it is there.

    objects/ab/ab12...   snapshots/20261123T094500.123456Z-3f2a.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import IO, Any

from gspo_core import __version__
from gspo_core.log import layout
from services.files.backup import JobsAreThere, LaterLayout, plain_files
from services.files.bucket import PIECE_BYTES, Bucket
from services.files.data_dir import LAYOUT, NOT_SAVED, SHARED, DataDir
from services.files.durable import TEMPORARY_PREFIX, flush_directory, make_directory, temporary_name, write_flushed
from services.files.job_records import DamagedRecord, JobRecords

SCHEMA = 1
STAMP = "%Y%m%dT%H%M%S.%fZ"
OBJECTS, SNAPSHOTS = "objects", "snapshots"
# In the data directory while jobs appear in it: those that came before a restore broke off are known by it.
BEGUN = TEMPORARY_PREFIX + "restoring"
AT_ONCE = 8
MAX_OPEN = 2 * AT_ONCE
# An object that no snapshot names may belong to one that is being made.
GRACE = timedelta(days=1)
# Two writes so close to each other may leave a file with one time; file systems differ.
TICK_NS = 2_000_000_000


class SnapshotDamaged(Exception):
    """An object or a snapshot has changed since it was saved; the message names it."""


class RestoreConflict(Exception):
    """Something else is where a restored file belongs."""


class GivenUp(Exception):
    """The caller that made the snapshot no longer wants it."""


@dataclass(frozen=True)
class Saved:
    """A file as it was saved."""

    size: int
    mtime_ns: int
    sha256: str

    @property
    def object_name(self) -> str:
        return f"{OBJECTS}/{self.sha256[:2]}/{self.sha256}"


Files = Mapping[str, Saved]


@dataclass(frozen=True)
class InstallationSnapshot:
    name: str
    made_at: str
    release: str
    files: Files
    """By path below the data directory."""
    models: Mapping[str, Files]
    """By absolute directory: models that jobs start from, and that are not among the plain files."""
    begun_ns: int | None = None
    """When its first file was looked at; None in snapshots of releases that did not say it."""
    follower: str | None = None
    """Which of those that save again and again made it; None of a single one."""

    @property
    def jobs(self) -> list[str]:
        parts = (PurePosixPath(path).parts for path in self.files)
        return sorted(one[1] for one in parts if one[0] == layout.JOBS and one[2:] == (layout.ACCEPTED,))

    @property
    def size_bytes(self) -> int:
        return sum(one.size for files in (self.files, *self.models.values()) for one in files.values())

    def digests(self) -> set[str]:
        return {one.sha256 for files in (self.files, *self.models.values()) for one in files.values()}


@dataclass
class Tally:
    """Counts the files and bytes that were sent or fetched."""

    num_files: int = 0
    num_bytes: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, size: int) -> None:
        with self._lock:
            self.num_files += 1
            self.num_bytes += size


# Save


def save(data_dir: Path, bucket: Bucket, tally: Tally) -> InstallationSnapshot:
    """Raises BucketRefused. ``tally`` counts what was not in the bucket yet."""
    snapshot = send(data_dir, bucket, newest(bucket), tally)
    name_it(bucket, snapshot)
    return snapshot


def send(
    data_dir: Path,
    bucket: Bucket,
    before: InstallationSnapshot | None,
    tally: Tally,
    *,
    also_there: Collection[str] = (),
    is_given_up: Callable[[], bool] = lambda: False,
) -> InstallationSnapshot:
    """A snapshot whose objects are in the bucket, and which is not there itself before ``name_it``.

    ``also_there``: digests of objects that ``before`` does not name. Raises BucketRefused, GivenUp.
    """
    begun_ns = time.time_ns()
    earlier: tuple[Files, Mapping[str, Files]] = (before.files, before.models) if before else ({}, {})
    known = (before.digests() if before else set()) | set(also_there)
    settled_ns = before.begun_ns - TICK_NS if before and before.begun_ns is not None else None
    sending = _Sending(bucket, known, tally, settled_ns, is_given_up)
    files = sending.all_of(data_dir, earlier[0], NOT_SAVED)
    models = {
        directory: sending.all_of(Path(directory), earlier[1].get(directory, {}), and_linked=True)
        for directory in _models_apart(data_dir)
    }
    made_at = datetime.now(UTC)
    name = f"{_stamp(made_at, before)}-{uuid.uuid4().hex[:8]}"
    return InstallationSnapshot(name, made_at.isoformat(timespec="seconds"), __version__, files, models, begun_ns)


def _stamp(made_at: datetime, before: InstallationSnapshot | None) -> str:
    """Behind that of ``before``, whose maker's clock may have been ahead of ours: names are in order."""
    stamp = made_at.strftime(STAMP)
    if before is not None and before.name > stamp:
        with contextlib.suppress(ValueError):
            last = datetime.strptime(before.name.rpartition("-")[0], STAMP).replace(tzinfo=UTC)
            return (last + timedelta(microseconds=1)).strftime(STAMP)
    return stamp


def name_it(bucket: Bucket, snapshot: InstallationSnapshot) -> None:
    """From now on it is there. Raises BucketRefused."""
    bucket.put(f"{SNAPSHOTS}/{snapshot.name}.json", _encode(snapshot))


def _models_apart(data_dir: Path) -> list[str]:
    """Directories of models that accepted jobs name, and that lie elsewhere or behind links."""
    root, found = data_dir.absolute(), set[str]()
    for job in DataDir(data_dir).jobs.accepted().values():
        try:
            model = Path(json.loads(JobRecords(job).accepted().spec)["model"])
        except (DamagedRecord, OSError, ValueError, KeyError, TypeError):
            continue  # it is saved as it is
        if model.is_absolute() and model.is_dir() and not _is_plain_below(root, model):
            found.add(str(model))
    return sorted(found)


def _is_plain_below(root: Path, model: Path) -> bool:
    if not model.is_relative_to(root):
        return False
    above = (path for path in (model, *model.parents) if path.is_relative_to(root) and path != root)
    return not any(path.is_symlink() for path in (*above, *model.rglob("*")))


@dataclass
class _Sending:
    bucket: Bucket
    known: set[str]
    tally: Tally
    settled_ns: int | None
    """A file that was written later may have changed since with the same size and time."""
    is_given_up: Callable[[], bool]

    def all_of(
        self, directory: Path, before: Files, without: Collection[str] = (), *, and_linked: bool = False
    ) -> dict[str, Saved]:
        """Files are opened in order, so that none that a later one needs can vanish unseen; some are sent at once."""
        saved: dict[str, Saved] = {}
        waiting: deque[tuple[str, Future[Saved]]] = deque()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for path in plain_files(directory, without, and_linked=and_linked):
                if self.is_given_up():
                    raise GivenUp
                name = path.relative_to(directory).as_posix()
                try:
                    if (same := self._unchanged(path, before.get(name))) is not None:
                        saved[name] = same
                        continue
                    file = path.open("rb")
                except FileNotFoundError:
                    continue
                waiting.append((name, pool.submit(self._send, file)))
                if len(waiting) == MAX_OPEN:
                    done, result = waiting.popleft()
                    saved[done] = result.result()
            saved.update((name, result.result()) for name, result in waiting)
        return saved

    def _unchanged(self, path: Path, before: Saved | None) -> Saved | None:
        if before is None or (self.settled_ns is not None and before.mtime_ns > self.settled_ns):
            return None
        about = path.stat()
        return before if (before.size, before.mtime_ns) == (about.st_size, about.st_mtime_ns) else None

    def _send(self, file: IO[bytes]) -> Saved:
        with file:
            about = os.fstat(file.fileno())
            digest = hashlib.sha256()
            for piece in _pieces(file, about.st_size):
                digest.update(piece)
            saved = Saved(about.st_size, about.st_mtime_ns, digest.hexdigest())
            if saved.sha256 not in self.known:
                pieces = _pieces(file, about.st_size)
                is_small = about.st_size <= PIECE_BYTES  # in one request
                self.bucket.put(saved.object_name, b"".join(pieces) if is_small else pieces)
                self.known.add(saved.sha256)
                self.tally.add(saved.size)
            return saved


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    """The first ``size`` bytes: a file that grows is cut where it was."""
    file.seek(0)
    while size and (piece := file.read(min(size, PIECE_BYTES))):
        size -= len(piece)
        yield piece


# List


def names(bucket: Bucket) -> list[str]:
    """Those of all snapshots, the oldest first."""
    found = (PurePosixPath(entry.name) for entry in bucket.entries(SNAPSHOTS))
    return sorted(path.stem for path in found if path.suffix == ".json")


def newest(bucket: Bucket) -> InstallationSnapshot | None:
    found = names(bucket)
    return read(bucket, found[-1]) if found else None


def read(bucket: Bucket, name: str) -> InstallationSnapshot:
    """Raises BucketRefused, Damaged, LaterLayout."""
    data = b"".join(bucket.get(f"{SNAPSHOTS}/{name}.json"))
    try:
        given: dict[str, Any] = json.loads(data)
        if given["schema"] > SCHEMA or given["layout"] > LAYOUT:
            raise LaterLayout(f"release {given['release']} made the snapshot {name}: restore it with that release")
        models = {directory: _files_from(files) for directory, files in given["models"].items()}
        files = _files_from(given["files"])
        return InstallationSnapshot(
            name, given["made_at"], given["release"], files, models, given.get("begun_ns"), given.get("follower")
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotDamaged(f"{bucket.address}: the snapshot {name} cannot be read ({error})") from error


def _files_from(given: Mapping[str, Any]) -> dict[str, Saved]:
    files = {path: Saved(*values) for path, values in given.items()}
    for path in files:
        parts = PurePosixPath(path).parts
        if PurePosixPath(path).is_absolute() or not parts or ".." in parts or parts[0] in NOT_SAVED:
            raise ValueError(f"{path} is no file of a snapshot")
    return files


def _encode(snapshot: InstallationSnapshot) -> bytes:
    def plain(files: Files) -> dict[str, list[int | str]]:
        return {path: [one.size, one.mtime_ns, one.sha256] for path, one in files.items()}

    record = {
        "schema": SCHEMA,
        "layout": LAYOUT,
        "release": snapshot.release,
        "made_at": snapshot.made_at,
        "begun_ns": snapshot.begun_ns,
        "follower": snapshot.follower,
        "files": plain(snapshot.files),
        "models": {directory: plain(files) for directory, files in snapshot.models.items()},
    }
    return json.dumps(record, indent=0).encode()


# Restore


def restore(
    data_dir: Path,
    bucket: Bucket,
    snapshot: InstallationSnapshot,
    tally: Tally,
    only: Collection[str] | None = None,
    *,
    with_models: bool = False,
) -> None:
    """All of it where there are no jobs, or the jobs ``only`` where these are not. May be repeated after a failure.

    ``with_models`` allows models to be written where they were, outside the data directory. Raises JobsAreThere,
    Conflict, Damaged, BucketRefused.
    """
    there = DataDir(data_dir).jobs.accepted()
    wanted = set(snapshot.jobs if only is None else only)
    if unknown := wanted - set(snapshot.jobs):
        raise RestoreConflict(f"the snapshot {snapshot.name} has no job {', '.join(sorted(unknown))}")
    begun, said = data_dir / BEGUN, json.dumps([snapshot.name, None if only is None else sorted(only)]).encode()
    is_again = begun.is_file() and begun.read_bytes() == said
    if is_again:
        there = {name: job for name, job in there.items() if not _is_as_saved(data_dir, job.path, snapshot.files)}
    if mixed := there.keys() & wanted if only is not None else there.keys():
        raise JobsAreThere(f"{data_dir} already holds {', '.join(sorted(mixed)[:3])}: two histories do not mix")
    files = {path: one for path, one in snapshot.files.items() if _is_wanted(path, only)}
    bringing = _Bringing(bucket, tally)
    for directory, model in snapshot.models.items():
        if with_models or _is_below(PurePosixPath(directory), data_dir.absolute()):
            bringing.all_of(Path(directory), model)
    last = {path for path in files if PurePosixPath(path).name == layout.ACCEPTED}
    bringing.all_of(data_dir, {path: one for path, one in files.items() if path not in last})
    if not is_again:
        begun.unlink(missing_ok=True)
        write_flushed(begun, said)
    bringing.all_of(data_dir, {path: files[path] for path in last})
    begun.unlink()


def _is_below(directory: PurePosixPath, data_dir: Path) -> bool:
    """Also where it leads; a path that goes up may lead elsewhere."""
    return ".." not in directory.parts and directory.is_relative_to(data_dir)


def _is_as_saved(data_dir: Path, job: Path, files: Files) -> bool:
    """Compares names and sizes, and the record of its acceptance."""
    below = job.relative_to(data_dir)
    saved = {path: one for path, one in files.items() if PurePosixPath(path).is_relative_to(below.as_posix())}
    accepted = saved.get((below / layout.ACCEPTED).as_posix())
    there = {path.relative_to(data_dir).as_posix(): path.stat().st_size for path in plain_files(job)}
    return (
        accepted is not None
        and there == {path: one.size for path, one in saved.items()}
        and _digest_of(job / layout.ACCEPTED) == accepted.sha256
    )


def _is_wanted(path: str, only: Collection[str] | None) -> bool:
    """With single jobs come environments and models, but nothing that is the other installation's own."""
    folder, *below = PurePosixPath(path).parts
    return only is None or (below[0] in only if folder == layout.JOBS else folder in SHARED)


@dataclass
class _Bringing:
    bucket: Bucket
    tally: Tally
    _made: set[Path] = field(default_factory=set)

    def all_of(self, directory: Path, files: Files) -> None:
        for path in sorted({(directory / name).parent for name in files} - self._made):
            make_directory(path)
            self._made.add(path)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(self._bring, directory / name, one) for name, one in files.items()]:
                done.result()
        for path in {(directory / name).parent for name in files}:
            flush_directory(path)

    def _bring(self, path: Path, saved: Saved) -> None:
        if path.exists():
            if _digest_of(path) != saved.sha256:
                raise RestoreConflict(f"{path} is there and differs from the snapshot: move it away")
            return
        temporary = path.with_name(temporary_name())
        digest = hashlib.sha256()
        try:
            with temporary.open("xb") as file:
                for piece in self.bucket.get(saved.object_name):
                    digest.update(piece)
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != saved.sha256:
                raise SnapshotDamaged(
                    f"{self.bucket.address}: {saved.object_name} is not what was saved; {path} needs it"
                )
            os.utime(temporary, ns=(saved.mtime_ns, saved.mtime_ns))
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        self.tally.add(saved.size)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Prune


def unnamed(bucket: Bucket, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> set[str]:
    """Digests of objects that a snapshot may rely on although none names them: no pruning removes them for long."""
    young = (entry for entry in bucket.entries(OBJECTS) if now() - entry.written_at < GRACE / 2)
    return {PurePosixPath(entry.name).name for entry in young}


def prune(bucket: Bucket, keep: int, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Tally:
    """Remove all but the newest ``keep`` snapshots, and the objects that none of these names."""
    assert keep >= 1
    found = names(bucket)
    needed = set().union(*(read(bucket, name).digests() for name in found[-keep:]))
    bucket.remove([f"{SNAPSHOTS}/{name}.json" for name in found[:-keep]])
    tally, doomed = Tally(), list[str]()
    for entry in bucket.entries(OBJECTS):
        if PurePosixPath(entry.name).name not in needed and now() - entry.written_at > GRACE:
            doomed.append(entry.name)
            tally.add(entry.size_bytes)
    bucket.remove(doomed)
    return tally
