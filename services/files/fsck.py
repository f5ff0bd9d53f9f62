"""Looks through a data directory for what is damaged, half-written, or referred to by nothing.

Rule: it reads, and changes nothing but what ``mend`` is asked to; that removes only what no reader looks at and no
living process can be writing. What is damaged stays, since a part of it may be worth having. It needs no Redis, and
judges nothing that only Redis knows.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from services.files.audit_log import AuditLog
from services.files.batch_log import DamagedBatchLog, read_batch
from services.files.checkpoints import CheckpointStore
from services.files.data_dir import UPLOADS, DataDir
from services.files.durable import TEMPORARY_PREFIX
from services.files.job_dir import JobDir, positions_in, step_name
from services.files.job_records import DamagedRecord, JobRecords
from services.files.weights import DamagedVersion, VersionNotFound, WeightStore

Kind: TypeAlias = Literal["damaged", "half-written", "unreferenced", "unknown"]
# Writing one file never takes so long; a download may.
YOUNG_S = 86_400.0
_TRAINER = re.compile(re.escape(TEMPORARY_PREFIX) + r"ep(\d+)-")
_WITNESS = ".ranks-"
_REMOVED = re.compile(r"[0-9a-f]{64}")
_DAMAGE = (DamagedRecord, DamagedVersion, DamagedBatchLog, VersionNotFound, ValueError, KeyError, TypeError, OSError)


@dataclass(frozen=True, slots=True)
class Found:
    kind: Kind
    path: Path
    what: str
    """What it is, and what follows from it."""
    can_be_removed: bool = False


class Fsck:
    """``check_learner`` raises for a learner's state that is not what was written; ``now``: Unix seconds."""

    def __init__(
        self,
        data_dir: DataDir,
        check_learner: Callable[[Path], None],
        uploads: Callable[[], set[str]],
        now: Callable[[], float] = time.time,
    ) -> None:
        """``uploads``: digests that registered environments name."""
        self._data_dir, self._check_learner, self._uploads, self._now = data_dir, check_learner, uploads, now

    def look(self) -> Iterator[Found]:
        root = self._data_dir
        for path in sorted(root.jobs.path.iterdir()) if root.jobs.path.is_dir() else ():
            if path.is_dir() and not path.name.startswith(TEMPORARY_PREFIX):
                yield from self._job(JobDir(path))
        yield from self._unreferenced_uploads()
        for place in (root.path, root.jobs.path, root.environments.path, root.keys.path):
            yield from self._half_written(place, deep=place in (root.environments.path, root.keys.path))
        if not AuditLog(root.audit).files() and root.keys.path.is_dir():
            yield Found("unknown", root.audit, "keys were made here, and no audit says by whom")

    def mend(self, found: Found) -> None:
        """Remove it. Raises ValueError for what is not to be removed."""
        if not found.can_be_removed:
            raise ValueError(f"{found.path} may not be removed")
        if found.path.is_dir() and not found.path.is_symlink():
            shutil.rmtree(found.path)
        else:
            found.path.unlink(missing_ok=True)

    # Jobs

    def _job(self, job: JobDir) -> Iterator[Found]:
        if not job.accepted.is_file():
            young = self._is_young(job.path)
            what = "a job may be being accepted here" if young else "no accepted job; nothing looks into it"
            yield Found("unknown" if young else "unreferenced", job.path, what, not young and _was_only_prepared(job))
            return
        records, epoch = JobRecords(job), 0
        for name, read in (("specification", lambda: _accepted(records)), ("state", records.newest_status)):
            if problem := _problem(read):
                yield Found("damaged", job.path, f"its {name} cannot be read, so it is not given back: {problem}")
        if not _problem(records.highest_epoch):
            epoch = records.highest_epoch()
        yield from self._weights(job, records)
        yield from self._checkpoints(job)
        for folder in (job.batches, job.archive):
            for at in positions_in(folder):
                path = folder / step_name(at)
                if problem := _problem(lambda path=path: read_batch(path)):  # type: ignore[misc]
                    yield Found("damaged", path, f"recovery and replays stop before step {at.step}: {problem}")
        yield from self._half_written(job.path, deep=True, epoch=epoch)

    def _weights(self, job: JobDir, records: JobRecords) -> Iterator[Found]:
        store = WeightStore(job)
        try:
            published = {one.version for one in records.versions()}
        except _DAMAGE as error:
            yield Found("damaged", job.version_records, f"a record of a version cannot be read: {error}")
            return
        for version in store.versions():
            path = store.path(version)
            if problem := _problem(lambda version=version: store.verify(store.manifest(version))):  # type: ignore[misc]
                yield Found("damaged", path, f"no engine loads it: {problem}")
            elif version not in published:
                # Its trainer may have died before it published it, or be about to publish it.
                yield Found("unreferenced", path, "written and never published; the next trainer removes it")

    def _checkpoints(self, job: JobDir) -> Iterator[Found]:
        store, skipped = CheckpointStore(job), list[tuple[str, str]]()
        try:
            intact = store.newest_first(lambda name, problem: skipped.append((name, problem)))
        except (ValueError, OSError) as error:
            yield Found("unknown", job.checkpoints, f"its checkpoints could not be looked at: {error}")
            return
        for name, problem in skipped:
            yield Found("damaged", job.checkpoints / name, f"passed over when a trainer resumes: {problem}")
        for one in intact:
            if problem := _problem(lambda one=one: self._check_learner(one.learner_dir)):  # type: ignore[misc]
                yield Found("damaged", job.checkpoints / one.name, f"passed over when a trainer resumes: {problem}")

    # The rest

    def _unreferenced_uploads(self) -> Iterator[Found]:
        folder = self._data_dir.environments.path / UPLOADS
        if not folder.is_dir():
            return
        try:
            named = self._uploads()
        except _DAMAGE as error:
            yield Found("damaged", self._data_dir.environments.path, f"a registration cannot be read: {error}")
            return
        for path in sorted(folder.iterdir()):
            if _REMOVED.fullmatch(path.name) and path.name not in named and not self._is_young(path):
                # A job that is pinned to a removed version may still need it.
                yield Found("unreferenced", path, "an upload that no registered environment names")

    def _half_written(self, place: Path, *, deep: bool, epoch: int = 0) -> Iterator[Found]:
        for path in _temporary(place, deep=deep):
            trainer = _TRAINER.match(path.name)
            writer = f"the trainer of epoch {int(trainer[1])}" if trainer else "a process that did not end it"
            is_over = not self._is_young(path) or (trainer is not None and int(trainer[1]) < epoch)
            what = f"left half-written, or half-removed, by {writer}" if is_over else f"{writer} may be at it"
            yield Found("half-written" if is_over else "unknown", path, what, can_be_removed=is_over)

    def _is_young(self, path: Path) -> bool:
        try:
            return self._now() - path.stat().st_mtime < YOUNG_S
        except FileNotFoundError:
            return True


def _was_only_prepared(job: JobDir) -> bool:
    """It holds copies and links of another job's files, brought before it was to be accepted."""
    brought = {job.origin.path.name, job.recorded.path.name}
    names = os.listdir(job.path)
    return bool(names) and all(name in brought or name.startswith(TEMPORARY_PREFIX) for name in names)


def _accepted(records: JobRecords) -> None:
    """Raises what is wrong with the specification. Its digest is that of its text."""
    job = records.accepted()
    if hashlib.sha256(job.spec.encode()).hexdigest() != job.digest:
        raise DamagedRecord("it is not the one that was accepted")


def _temporary(place: Path, *, deep: bool) -> Iterator[Path]:
    if not place.is_dir():
        return
    for directory, folders, files in os.walk(place):
        names = [name for name in (*folders, *files) if name.startswith((TEMPORARY_PREFIX, _WITNESS))]
        yield from (Path(directory) / name for name in sorted(names))
        folders[:] = [name for name in folders if name not in names] if deep else []


def _problem(read: Callable[[], object]) -> str:
    """Empty if it can be read."""
    try:
        read()
    except _DAMAGE as error:
        return f"{type(error).__name__}: {error}"
    return ""
