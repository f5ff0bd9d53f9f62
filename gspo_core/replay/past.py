"""A job's past, as its directory holds it or a bundle that was unpacked.

The rule: it reads and never writes, and what is not in the history of the job's newest epoch is not there. Names come
from ``gspo_core.log.layout``, meaning from ``gspo_core.log``; a file that is not what was written is refused by name.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from gspo_core.log import layout
from gspo_core.log.archive import plain, plain_beginning
from gspo_core.log.batches import (
    HEADER_BYTES,
    DamagedBatch,
    ErasedStep,
    LoggedBatch,
    decode_batch,
    has_erased,
    require_whole,
)
from gspo_core.log.checkpoints import DAMAGE, UnknownCheckpointFormat
from gspo_core.log.history import LostForkRecord, forks_among, lineage_of
from gspo_core.log.lineage import Lineage
from gspo_core.log.manifests import decode_row
from gspo_core.log.records import AcceptedJob, DamagedRecord, VersionRecord, decode_record
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from gspo_core.staleness import UnknownVersion, in_history
from gspo_core.versions import WeightsManifest


class PastError(Exception):
    """The past cannot be read, or does not reach there; the message says why."""


class NotKept(PastError):
    """The step was never taken, or the files for training it again are no longer kept."""


class DamagedPast(PastError):
    """A file was changed since it was written."""


class Past:
    """``model``: where the base model lies now, if not where the job says."""

    def __init__(self, folder: Path, model: Path | None = None) -> None:
        self.folder = folder
        self._model = model
        self._listed: dict[str, list[Position]] = {}

    @cached_property
    def accepted(self) -> AcceptedJob:
        try:
            fields = decode_record((self.folder / layout.ACCEPTED).read_bytes())
            return AcceptedJob(**fields)  # type: ignore[arg-type]
        except FileNotFoundError:
            raise PastError(f"{self.folder} holds no job: there is no {layout.ACCEPTED}") from None
        except (DamagedRecord, TypeError) as error:
            raise DamagedPast(f"{self.folder / layout.ACCEPTED}: {error}") from error

    @cached_property
    def spec(self) -> JobSpec:
        """As it was submitted."""
        try:
            spec = self.accepted.job_spec
        except ValidationError as error:
            raise PastError(f"this release cannot read the job's specification: {error}") from error
        return spec if self._model is None else spec.model_copy(update={"model": str(self._model)})

    @cached_property
    def origin(self) -> Past | None:
        """What a fork was brought of its parent."""
        folder = self.folder / layout.ORIGIN
        return Past(folder, self._model) if folder.is_dir() else None

    @property
    def begun_after(self) -> int:
        """The step of its parent that a fork begins after; 0 for any other job."""
        return self.spec.parent.step if self.spec.parent is not None and self.origin is not None else 0

    @cached_property
    def forks(self) -> dict[int, Position]:
        try:
            return forks_among(self._names(layout.CHECKPOINTS), self._read_checkpoint_file)
        except (LostForkRecord, UnknownCheckpointFormat) as error:
            raise DamagedPast(str(error)) from error

    @cached_property
    def newest_epoch(self) -> int:
        kinds = (layout.CHECKPOINTS, layout.BATCHES, layout.ARCHIVE)
        positions = [at for kind in kinds for at in self._positions(kind)]
        return max(self.forks, default=max((at.epoch for at in positions), default=1))

    @cached_property
    def batches(self) -> dict[int, Position]:
        """Where the batch of each step of the history lies. Raises DamagedPast."""
        found = sorted({*self._positions(layout.BATCHES), *self._positions(layout.ARCHIVE)})
        try:
            newest = self.newest_epoch
            # What the newest epoch wrote holds, and that is most of it.
            return {at.step: at for at in found if at.epoch == newest or in_history(at, newest, self.forks)}
        except UnknownVersion as error:
            raise DamagedPast(str(error)) from error

    def batch(self, step: int) -> LoggedBatch:
        """Raises NotKept, DamagedPast."""
        data, name = self.batch_bytes(step), self.batch_name(step)
        try:
            batch = decode_batch(data)
        except DamagedBatch as error:
            raise DamagedPast(f"{name}: {error}") from error
        if batch.position != self.batches[step]:
            raise DamagedPast(f"{name}: holds epoch {batch.epoch} step {batch.step}: the file was renamed")
        return batch

    def whole_batch(self, step: int) -> LoggedBatch:
        """To be trained again. Raises NotKept, also where an episode of it was erased, and DamagedPast."""
        batch = self.batch(step)
        try:
            require_whole(batch)
        except ErasedStep as error:
            raise NotKept(f"{error}: it cannot be trained again") from None
        return batch

    def is_whole(self, step: int) -> bool:
        """By the beginning of its log alone."""
        try:
            with (self.folder / self.batch_name(step)).open("rb") as file:
                return not has_erased(plain_beginning(file, HEADER_BYTES))
        except (FileNotFoundError, DamagedBatch):  # reading it will report that
            return True

    def batch_name(self, step: int) -> str:
        """The file, which may be archived. Raises NotKept."""
        if step not in self.batches:
            raise NotKept(f"the batch log of step {step} is not kept; kept are {spans(self.batches)}")
        name = layout.step_name(self.batches[step])
        written = f"{layout.BATCHES}/{name}"
        return written if (self.folder / written).is_file() else f"{layout.ARCHIVE}/{name}"

    def batch_bytes(self, step: int) -> bytes:
        """The log as it was written. Raises NotKept, DamagedPast."""
        name = self.batch_name(step)
        try:
            return plain((self.folder / name).read_bytes())
        except FileNotFoundError:
            raise NotKept(f"the batch log of step {step} was removed just now") from None
        except DamagedBatch as error:
            raise DamagedPast(f"{name}: {error}") from error

    @cached_property
    def checkpoints(self) -> list[Position]:
        """Those of the history, in order; intact or not."""
        found = sorted(self._positions(layout.CHECKPOINTS), key=lambda at: (at.step, at.epoch))
        return [at for at in found if in_history(at, self.newest_epoch, self.forks)]

    def lineage(self, checkpoint: Position) -> Lineage:
        """Raises DamagedPast."""
        try:
            return lineage_of(checkpoint, self._read_checkpoint_file)
        except (OSError, UnknownCheckpointFormat, *DAMAGE) as error:
            raise DamagedPast(f"{layout.step_name(checkpoint)}: {error}") from error

    def learner_dir(self, checkpoint: Position) -> Path:
        return self.folder / layout.CHECKPOINTS / layout.step_name(checkpoint) / layout.LEARNER

    def way_to(self, step: int, before: Position | None = None) -> tuple[Position | None, list[int]]:
        """The newest checkpoint from which logs lead to ``step``, and the steps of those logs. None: the base model, or
        for a fork the step of its parent that it began after.

        ``before``: only checkpoints older than this one. Raises NotKept.
        """
        usable = [at for at in self.checkpoints if at.step <= step and (before is None or at.step < before.step)]
        erased = set[int]()
        for start in [*reversed(usable), None]:
            first = start.step if start is not None else self.begun_after
            # Their number first: a step that was never taken may have any number.
            if not 0 <= step - first <= len(self.batches):
                continue
            steps = list(range(first + 1, step + 1))
            if all(number in self.batches for number in steps):
                if gone := [number for number in steps if not self.is_whole(number)]:
                    erased.update(gone)
                    continue
                return start, steps
        why = f"; episodes of the steps {spans(erased)} were erased, so these cannot be trained again" if erased else ""
        raise NotKept(
            f"nothing that is kept leads to step {step}; there is a way to {spans(self._reached(erased))}{why}"
        )

    def journey_to(self, step: int) -> tuple[Position | None, int]:
        """The checkpoint that a journey to ``step`` begins with, and how many steps are trained again on it.

        A fork that has no checkpoint of its own begins with its parent's. Raises NotKept.
        """
        start, steps = self.way_to(step)
        if start is not None or self.origin is None:
            return start, len(steps)
        start, num_before = self.origin.journey_to(self.begun_after)
        return start, num_before + len(steps)

    def _reached(self, erased: Collection[int]) -> set[int]:
        """The steps that something leads to."""
        found = {self.begun_after, *(at.step for at in self.checkpoints)}
        for step in sorted(self.batches):
            if step - 1 in found and step not in erased:
                found.add(step)
        return found

    def place_of(self, step: int) -> Position:
        """Where the history stands after ``step`` steps. Raises NotKept."""
        if not step:
            return Position(0, 0)
        found = [at for at in (self.batches.get(step), *self.checkpoints) if at is not None and at.step == step]
        if not found:
            raise NotKept(f"neither a batch log nor a checkpoint of step {step} is kept")
        return max(found)

    def published(self, step: int) -> list[WeightsManifest]:
        """Every version of the history that was published after ``step`` steps, by number.

        Numbers grow with epochs, and with steps within an epoch: few of the records are read.
        """
        names, begin = self._version_names, 0
        found = list[WeightsManifest]()
        while begin < len(names):
            epoch = self._version(names[begin]).epoch
            end = bisect_right(names, epoch, lo=begin, key=lambda name: self._version(name).epoch)
            at = bisect_left(names, step, lo=begin, hi=end, key=lambda name: self._version(name).step)
            while at < end and self._version(names[at]).step == step:
                found.append(self._version(names[at]))
                at += 1
            begin = end
        return [one for one in found if in_history(Position(one.epoch, one.step), self.newest_epoch, self.forks)]

    def versions(self) -> Iterator[WeightsManifest]:
        """Every one that was recorded, also beyond the history."""
        return map(self._version, self._version_names)

    def weights(self, version: int) -> Path | None:
        """None if the version is no longer on disk."""
        path = self.folder / layout.WEIGHTS / layout.version_name(version)
        return path if (path / layout.WEIGHTS_MANIFEST).is_file() else None

    @cached_property
    def _version_names(self) -> list[str]:
        return sorted(name for name in self._names(layout.VERSIONS) if layout.NUMBERED_NAME.fullmatch(name))

    def _version(self, name: str) -> WeightsManifest:
        try:
            fields = decode_record((self.folder / layout.VERSIONS / name).read_bytes())
            return decode_row(VersionRecord(**fields).manifest)  # type: ignore[arg-type]
        except (DamagedRecord, TypeError, ValueError, KeyError) as error:
            raise DamagedPast(f"{layout.VERSIONS}/{name}: {error}") from error

    def fork_record_names(self) -> list[str]:
        """Names of all records of where an epoch forked off."""
        found = (name for name in self._names(layout.CHECKPOINTS) if layout.epoch_of_fork_record(name) is not None)
        return [f"{layout.CHECKPOINTS}/{name}" for name in sorted(found)]

    def _names(self, folder: str) -> list[str]:
        place = self.folder / folder
        return os.listdir(place) if place.is_dir() else []

    def _positions(self, folder: str) -> list[Position]:
        """Read once: a job has as many as steps."""
        if folder not in self._listed:
            found = (layout.parse_step_name(name) for name in self._names(folder))
            self._listed[folder] = [at for at in found if at is not None]
        return self._listed[folder]

    def _read_checkpoint_file(self, name: str) -> bytes:
        return (self.folder / layout.CHECKPOINTS / name).read_bytes()


def kept_range(past: Past, first: int | None, last: int | None) -> range:
    """The steps asked for; what is left out is the first, or the last, that is kept. Raises NotKept."""
    steps = sorted(past.batches)
    begin, end = first or (steps[0] if steps else 1), last or (steps[-1] if steps else 0)
    if begin not in past.batches or end < begin:
        raise NotKept(f"steps {begin} to {end}: kept are the batch logs of {spans(steps)}")
    return range(begin, end + 1)


def spans(steps: Iterable[int]) -> str:
    """``1-4, 7`` for people."""
    parts: list[list[int]] = []
    for number in sorted(steps):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in parts) or "no step"


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file below ``folder``, by its path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
