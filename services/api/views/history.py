"""The batches that a job was trained on, read from its logs for the viewer.

One rule: only files of the job's lineage are shown, as ``gspo_core.replay.past`` finds them: batches that an epoch
logged beyond the point where a later one forked off are in no weights of today. Reading costs a thread and a bounded
cache, and changes nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gspo_core.position import Position
from gspo_core.types import EpisodeKey, Group
from services.files.batch_log import BatchLog, BatchLogNotFound, DamagedBatchLog, LoggedBatch
from services.files.job_dir import JobDir, JobsDir
from services.state.jobs import JobRecord
from services.state.keys import check_job_id

Value = TypeVar("Value")

CACHE_BYTES = 64 << 20
CACHED_INDEXES = 50_000


class GroupNotKept(LookupError):
    """No batch log of the job holds this group."""

    def __init__(self, job: str, group: int) -> None:
        super().__init__(
            f"group {group} of {job} is neither open nor in a batch log: it never existed, it was dropped, it was an "
            "evaluation, or its log is no longer kept"
        )


class EpisodeNotKept(LookupError):
    """The group is kept, but has no such member."""

    def __init__(self, key: EpisodeKey) -> None:
        super().__init__(f"group {key.group} of {key.job} has no episode {key.member}: given up, or never there")


class EpisodeForgotten(LookupError):
    """Only its numbers are left, which are its group's."""

    def __init__(self, key: EpisodeKey) -> None:
        super().__init__(
            f"episode {key} was erased: nothing that was read or said in it is kept. What it counts for in its step "
            f"is in GET /v1/groups/{key.job}/{key.group}"
        )


class TrainedHistory:
    """The batch logs of the jobs in ``jobs_dir``. Blocking: call it in a thread."""

    def __init__(self, jobs_dir: JobsDir) -> None:
        self._jobs_dir = jobs_dir
        self._batches = _Cache[LoggedBatch](CACHE_BYTES)
        self._indexes = _Cache[tuple[int, ...]](CACHED_INDEXES)

    @property
    def jobs_dir(self) -> JobsDir:
        return self._jobs_dir

    def job_dir(self, job: str) -> JobDir:
        return self._jobs_dir.job(check_job_id(job))

    def positions(self, job: JobRecord) -> list[Position]:
        """The batches of the job's lineage, the newest first. Raises DamagedBatchLog."""
        from gspo_core.replay.past import Past, PastError  # few requests look at what was trained

        place = self.job_dir(job.id)
        try:
            found = Past(place.path).batches.values()
        except PastError as error:
            raise DamagedBatchLog(place.checkpoints, str(error)) from error
        # The step in training is logged before it counts.
        return sorted((at for at in found if at.step <= job.step or at.epoch == job.epoch), key=lambda at: -at.step)

    def batch(self, job: JobRecord, position: Position) -> LoggedBatch:
        """Raises BatchLogNotFound, DamagedBatchLog."""
        log = BatchLog(self.job_dir(job.id))
        path = log.path(position.epoch, position.step)
        return self._batches.get(_bytes_of(path), lambda: _read(log, position), lambda _: log.size(*position))

    def groups_of(self, job: JobRecord, position: Position) -> tuple[int, ...]:
        log = BatchLog(self.job_dir(job.id))
        path = log.path(position.epoch, position.step)
        return self._indexes.get(path, lambda: log.groups_of(position.epoch, position.step), len)

    def trained(self, job: JobRecord, position: Position) -> dict[tuple[int, int], NDArray[np.float32]]:
        """Log-probs of the sampled tokens when they were trained, by group and member; empty if unknown."""
        from services.files.trained_log import TrainedLog  # few episodes are read token by token

        return TrainedLog(self.job_dir(job.id)).read(position.epoch, position.step)

    def find(self, job: JobRecord, group: int) -> tuple[Position, Group]:
        """The batch that trained a group. Raises GroupNotKept."""
        positions = self.positions(job)[::-1]
        near = self._near(job, positions, group)
        for place in sorted(range(len(positions)), key=lambda place: abs(place - near)):
            position = positions[place]
            try:
                if group in self.groups_of(job, position):
                    found = [one for one in self.batch(job, position).groups if one.group == group]
                    return position, found[0]
            except (BatchLogNotFound, DamagedBatchLog):
                continue
        raise GroupNotKept(job.id, group)

    def _near(self, job: JobRecord, positions: Sequence[Position], group: int) -> int:
        """Groups are trained roughly in the order of their numbers, so halving leads near the step of one, however many
        groups were dropped on the way."""
        begin, end = 0, len(positions)
        while begin < end:
            middle = (begin + end) // 2
            try:
                numbers = self.groups_of(job, positions[middle])
            except (BatchLogNotFound, DamagedBatchLog):
                numbers = ()
            if group in numbers:
                return middle
            if numbers and max(numbers) < group:
                begin = middle + 1
            else:
                end = middle
        return begin


def _read(log: BatchLog, position: Position) -> LoggedBatch:
    try:
        return log.read(position.epoch, position.step)
    except FileNotFoundError:  # removed between two looks at it
        raise BatchLogNotFound(f"{log.path(position.epoch, position.step)} no longer exists") from None


def _bytes_of(path: Path) -> Hashable:
    """Names these very bytes: a log of which episodes are erased becomes another file of the same name."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return path
    return path, found.st_ino, found.st_mtime_ns


class _Cache(Generic[Value]):
    """Keeps the most recently used, up to a total cost."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._spent = 0
        self._held: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value], cost_of: Callable[[Value], int]) -> Value:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key][0]
        value = make()
        cost = cost_of(value)
        with self._lock:
            if key not in self._held:
                self._held[key] = (value, cost)
                self._spent += cost
            while self._spent > self._budget and len(self._held) > 1:
                _, (_, freed) = self._held.popitem(last=False)
                self._spent -= freed
        return value
