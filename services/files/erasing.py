"""Erases trained episodes in the files of a job, and in what its forks were brought of it.

Rule: a log is replaced whole and durably, so a reader has the old one or the new one, and by one process at a time, so
that none restores what another has just erased. All answers of replays that show tokens go with it: they can be asked
for again. A log that recovery may still train from is not touched. Weights, bundles and backups are out of reach here;
what was found is always told.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gspo_core.log import layout
from gspo_core.log.archive import pack
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.erasing import Member, users_of, without_texts
from gspo_core.log.trained import decode_trained, encode_trained
from gspo_core.position import Position
from gspo_core.replay.past import Past, PastError
from gspo_core.types import EpisodeKey, Trajectory
from services.files.batch_log import DamagedBatchLog, read_batch
from services.files.durable import flush_directory, temporary_name
from services.files.job_dir import JobDir, positions_in, step_name
from services.files.job_records import DamagedRecord, JobRecords
from services.files.replays import Replays

Wanted = Callable[[Trajectory], bool]
# The first that the file system tells.
MOMENTS_NS = (1, 1_000, 1_000_000, 2_000_000_000)


@dataclass(frozen=True, slots=True)
class EnteredStep:
    """An episode, and a step that it was trained in (or was to be: ``epoch`` may be one that was lost)."""

    episode: EpisodeKey
    epoch: int
    step: int
    job: str
    """Whose directory holds it: that of the episode, or of a fork that was brought it."""


@dataclass(frozen=True, slots=True)
class Erasure:
    erased: tuple[EnteredStep, ...]
    not_yet: tuple[EnteredStep, ...]
    """In steps that may have to be trained again after a loss."""
    unreadable: tuple[str, ...]
    """Logs that are damaged, or of another release: what they hold is not known."""


def of_user(user: str) -> Wanted:
    return lambda episode: user in users_of(episode)


def of_member(group: int, member: int) -> Wanted:
    return lambda episode: (episode.key.group, episode.key.member) == (group, member)


def erase(job: JobDir, name: str, wanted: Wanted, others: Mapping[str, JobDir], *, safe_until: int | None) -> Erasure:
    """``safe_until``: steps after it may have to be trained again; None: no step. ``others``: all jobs by name; some of
    them may have been brought logs of this one, and trained on them. Blocking: it reads every batch log."""

    def is_doomed(one: Trajectory) -> bool:
        return one.key.job == name and wanted(one)

    found = _Found([], [], [])
    _in_folder(job.path, name, is_doomed, found, safe_until)
    for other, place in others.items():
        brought = list(_brought(place, name))
        for folder in brought:
            _in_folder(folder, other, is_doomed, found, None)
        if brought and other != name:
            _in_folder(place.path, other, is_doomed, found, saved_step(place))
    # After the logs: an answer that is written meanwhile looks into them (`services.api.views.replays`).
    for holder in {name: job, **{one.job: others[one.job] for one in found.erased if one.job != name}}.values():
        Replays(holder).remove_shown()
    return Erasure(tuple(found.erased), tuple(found.not_yet), tuple(found.unreadable))


def has_log(job: JobDir, since: float, before: float) -> bool:
    """In its directory, written since the one and before the other (Unix seconds)."""
    folders = (folder / kind for folder in (job.path, *_brought(job)) for kind in (layout.BATCHES, layout.ARCHIVE))
    paths = (folder / step_name(at) for folder in folders for at in positions_in(folder))
    return any(_is_before(path, before) and not _is_before(path, since) for path in paths)


def erase_old(job: JobDir, name: str, *, safe_until: int | None, before: float) -> Erasure:
    """Erases all that a job's directory holds in logs written before (Unix seconds), whichever job played it: logs
    copied from another job may be younger there, or already removed. ``safe_until`` as for ``erase``, for copied logs
    too: the job may not have been fed them yet. Blocking: it reads every such batch log."""
    found = _Found([], [], [], before)
    for folder in (job.path, *_brought(job)):
        _in_folder(folder, name, _everybody, found, safe_until)
    Replays(job).remove_shown()
    return Erasure(tuple(found.erased), tuple(found.not_yet), tuple(found.unreadable))


def saved_step(place: JobDir) -> int:
    """Up to it no step is trained again by itself."""
    try:
        return max((at.step for at in Past(place.path).checkpoints), default=0)
    except PastError:
        return 0


def _everybody(_: Trajectory) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Found:
    erased: list[EnteredStep]
    not_yet: list[EnteredStep]
    unreadable: list[str]
    before: float = math.inf


def _is_before(path: Path, unix_s: float) -> bool:
    try:
        return path.stat().st_mtime < unix_s
    except FileNotFoundError:  # removed since it was listed
        return False


def _brought(place: JobDir, job: str | None = None) -> Iterator[Path]:
    """What a job was brought of ``job`` (None: of any), itself or by way of its parent."""
    if place.recorded.path.is_dir():
        yield place.recorded.path
    while place.origin.path.is_dir():
        parent, place = _parent_of(place), place.origin
        if job is None or parent in (job, None):
            yield place.path


def _parent_of(place: JobDir) -> str | None:
    """None: unknown."""
    try:
        parent = json.loads(JobRecords(place).accepted().spec).get("parent")
    except (FileNotFoundError, DamagedRecord, ValueError):
        return None
    return str(parent["job"]) if isinstance(parent, dict) and "job" in parent else None


def _in_folder(folder: Path, holder: str, is_doomed: Wanted, found: _Found, safe_until: int | None) -> None:
    # In this order: a log goes from the one into the other meanwhile (`batch_archive`).
    for kind in (layout.BATCHES, layout.ARCHIVE):
        for at in positions_in(folder / kind):
            path = folder / kind / step_name(at)
            if not _is_before(path, found.before):
                continue
            with contextlib.suppress(FileNotFoundError), _alone(path):  # it may be removed meanwhile
                _in_log(path, at, holder, is_doomed, found, is_safe=safe_until is None or at.step <= safe_until)


def _in_log(path: Path, at: Position, holder: str, is_doomed: Wanted, found: _Found, *, is_safe: bool) -> None:
    try:
        batch = read_batch(path)
    except DamagedBatchLog as error:
        found.unreadable.append(str(error))
        return
    keys = [one.key for one in batch.trajectories if is_doomed(one) and not _is_erased(batch, one)]
    entered = [EnteredStep(key, *at, holder) for key in keys]
    if not is_safe:
        found.not_yet.extend(entered)
    elif keys:
        members = {(key.group, key.member) for key in keys}
        log = b"".join(without_texts(batch, members))
        _replace(path, pack(log) if path.parent.name == layout.ARCHIVE else log)
        _forget_logprobs(path.parents[1], at, members)
        found.erased.extend(one for one in entered if one not in found.erased)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps every other thread and process from erasing in this log until the block ends. Raises FileNotFoundError."""
    while True:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else it was replaced meanwhile
                yield
                return


def _is_erased(batch: LoggedBatch, one: Trajectory) -> bool:
    return (one.key.group, one.key.member) in batch.erased


def _forget_logprobs(folder: Path, at: Position, members: set[Member]) -> None:
    path = folder / layout.TRAINED / step_name(at)
    with contextlib.suppress(FileNotFoundError):
        known = decode_trained(path.read_bytes())
        kept = {EpisodeKey("-", *member): values for member, values in known.items() if member not in members}
        _replace(path, encode_trained(kept))


def _replace(path: Path, data: bytes) -> None:
    """Replaces a file that is otherwise written once. Its time moves by a moment only, but it moves: `snapshots`, which
    compares sizes and times, sees that the file has changed."""
    written, temporary = path.stat(), path.with_name(temporary_name())
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            for moment_ns in MOMENTS_NS:
                os.utime(file.fileno(), ns=(written.st_atime_ns, written.st_mtime_ns + moment_ns))
                if os.fstat(file.fileno()).st_mtime_ns != written.st_mtime_ns:
                    break
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
