"""The batch log: what each step trained on, payload included, as one file ``batches/ep<E>-step<S>`` per step.

The rule kept here: a file that has its name is complete, flushed to disk, checked by a sha256 and never written
again. Together with the checkpoints it is the truth of a run: a step can be trained again from its file alone. This
module does not know which epochs are void, nor what the ``extra`` mapping means that travels with a batch (drops,
live settings).

Layout: 8 bytes magic, uint32 schema number, uint64 length of the index (little-endian), the index as JSON, the
encoded segments one after another in the order of the index, and the sha256 of all that.

``services.batch_view`` shows them.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gspo_core import codec
from gspo_core.staleness import Position, in_history
from gspo_core.types import Group, InvalidValue, Split, Trajectory
from services.durable import make_directory, remove_unfinished, write_once

SCHEMA = 1
_MAGIC = b"GSPOBLOG"
_HEADER = struct.Struct("<8sIQ")
_DIGEST_BYTES = hashlib.sha256().digest_size
_FILE_NAME = re.compile(r"ep([0-9]{6,})-step([0-9]{6,})")


class BatchLogExists(Exception):
    """The batch of this epoch and step was written before. A second writer must stop: its epoch is void."""


class BatchLogNotFound(Exception):
    """There is no batch of this epoch and step."""


class DamagedBatchLog(Exception):
    """A batch log is not what was written; the message says where the damage shows."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class UnknownLogSchema(DamagedBatchLog):
    """A batch log that another release wrote, or segments in it, and this one cannot read."""


@dataclass(frozen=True, eq=False)
class LoggedBatch:
    """The content of one file."""

    epoch: int
    step: int
    groups: tuple[Group, ...]
    extra: Mapping[str, Any]


class BatchLog:
    """The batch logs of the job whose directory is ``job_dir``."""

    def __init__(self, job_dir: Path) -> None:
        self._root = job_dir / "batches"

    def path(self, epoch: int, step: int) -> Path:
        return self._root / f"ep{epoch:06d}-step{step:06d}"

    def write(self, epoch: int, step: int, groups: Sequence[Group], extra: Mapping[str, Any]) -> Path:
        """Write the batch of ``step``; when this returns, it survives a crash of the machine."""
        path = self.path(epoch, step)
        make_directory(self._root)
        try:
            write_once(path, _pieces(epoch, step, groups, extra), epoch=epoch)
        except FileExistsError as error:
            raise BatchLogExists(f"{path} exists; batch logs are written once") from error
        return path

    def read(self, epoch: int, step: int) -> LoggedBatch:
        """The batch of ``step``, checked."""
        path = self.path(epoch, step)
        if not path.is_file():
            raise BatchLogNotFound(f"there is no {path}")
        return read_batch(path)

    def groups_of(self, epoch: int, step: int) -> tuple[int, ...]:
        """The numbers of the groups of a batch, for finding one: only the index is read, and it is not checked."""
        path = self.path(epoch, step)
        try:
            with path.open("rb") as file:
                _, schema, length = _HEADER.unpack(file.read(_HEADER.size))
                groups = json.loads(file.read(length))["groups"] if schema == SCHEMA else []
            return tuple(int(group["group"]) for group in groups)
        except FileNotFoundError:
            raise BatchLogNotFound(f"there is no {path}") from None
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise DamagedBatchLog(path, f"the index cannot be read: {error}") from error

    def steps(self) -> list[tuple[int, int]]:
        """The (epoch, step) of every file, in order."""
        names = (_FILE_NAME.fullmatch(path.name) for path in batch_files(self._root))
        return sorted((int(match[1]), int(match[2])) for match in names if match)

    def remove_unfinished(self, epoch: int) -> None:
        """For who has taken the job over as ``epoch``: those before it have lost it."""
        remove_unfinished(self._root, epoch)

    def remove(self, positions: Collection[tuple[int, int]]) -> None:
        """By name, and not all but some: what is written meanwhile stays."""
        for epoch, step in positions:
            self.path(epoch, step).unlink(missing_ok=True)  # another trainer may be faster


def batch_files(directory: Path) -> list[Path]:
    """The batch logs in ``directory``, by name."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _FILE_NAME.fullmatch(path.name))


def batches_after(
    start: Position, found: Collection[tuple[int, int]], newest_epoch: int, forks: Mapping[int, Position]
) -> list[Position]:
    """Of the batches ``found``, those that whoever follows ``newest_epoch`` trains again after ``start``, in order.

    ``newest_epoch`` is the last one that was begun and ``forks`` where each epoch forked off. What an epoch wrote
    beyond the place where its successor forked off is void, however late a zombie wrote it: those groups were trained
    otherwise. The row ends at the first step that is missing.
    """
    valid = {
        step: Position(epoch, step)
        for epoch, step in sorted(found)
        if in_history(Position(epoch, step), newest_epoch, forks)
    }
    row: list[Position] = []
    while (step := start.step + 1 + len(row)) in valid:
        row.append(valid[step])
    return row


def spent(found: Collection[tuple[int, int]], after_step: int, num_newest: int) -> set[tuple[int, int]]:
    """Of the batches ``found``, those that no replay from ``after_step`` needs, but for the newest ones."""
    older = sorted(found)[: max(0, len(found) - num_newest)]
    return {position for position in older if position[1] <= after_step}


class _IndexedGroup(msgspec.Struct, forbid_unknown_fields=True):
    job: str
    group: int
    split: Split
    task_index: int
    size: int
    trajectories: list[list[int]]
    """Per trajectory the lengths of its segments in bytes."""


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    epoch: int
    step: int
    groups: list[_IndexedGroup]
    extra: dict[str, Any]


def read_batch(path: Path) -> LoggedBatch:
    """The content of the file at ``path``; raises ``DamagedBatchLog`` unless it is exactly what was written."""
    data = path.read_bytes()
    index, start = _checked_index(path, data)
    name = _FILE_NAME.fullmatch(path.name)
    if name and (int(name[1]), int(name[2])) != (index.epoch, index.step):
        raise DamagedBatchLog(path, f"holds epoch {index.epoch} step {index.step}: it was renamed")
    end = len(data) - _DIGEST_BYTES
    lengths = [length for group in index.groups for lengths in group.trajectories for length in lengths]
    if any(length < 0 for length in lengths) or start + sum(lengths) != end:
        raise DamagedBatchLog(path, f"the index describes {sum(lengths)} bytes of segments, there are {end - start}")
    payloads = _cut(data, start, lengths)
    try:
        groups = tuple(_group(indexed, payloads) for indexed in index.groups)
    except codec.UnknownSchema as error:
        raise UnknownLogSchema(path, str(error)) from error
    except (codec.SegmentRejected, InvalidValue) as error:
        raise DamagedBatchLog(path, f"{type(error).__name__}: {error}") from error
    return LoggedBatch(epoch=index.epoch, step=index.step, groups=groups, extra=index.extra)


def _pieces(epoch: int, step: int, groups: Sequence[Group], extra: Mapping[str, Any]) -> Iterator[bytes]:
    digest = hashlib.sha256()
    payload: list[bytes] = []
    indexed = [_indexed(group, payload) for group in groups]
    index = _index_bytes(_Index(epoch=epoch, step=step, groups=indexed, extra=_checked_extra(extra)))
    for piece in (_HEADER.pack(_MAGIC, SCHEMA, len(index)), index, *payload):
        digest.update(piece)
        yield piece
    yield digest.digest()


def _indexed(group: Group, payload: list[bytes]) -> _IndexedGroup:
    """The index entry of ``group``; its encoded segments go to the end of ``payload``."""
    trajectories = []
    for trajectory in group.trajectories:
        encoded = [codec.encode(segment) for segment in trajectory.segments]
        payload.extend(encoded)
        trajectories.append([len(data) for data in encoded])
    return _IndexedGroup(group.job, group.group, group.split, group.task_index, group.size, trajectories)


def _checked_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` as a plain dict; refuses what JSON would give back as something else."""
    plain = dict(extra)
    try:
        read_back = json.loads(json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"the extra mapping of a batch log is no JSON: {error}") from error
    if read_back != plain:
        raise InvalidValue("the extra mapping of a batch log would be read back differently: use string keys and lists")
    return plain


def _index_bytes(index: _Index) -> bytes:
    # The standard library's JSON keeps integers of any size and floats to the last bit.
    return json.dumps(msgspec.to_builtins(index), allow_nan=False, separators=(",", ":")).encode()


def _checked_index(path: Path, data: bytes) -> tuple[_Index, int]:
    """The index and where the segments start, after the whole file was checked against its sha256."""
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise DamagedBatchLog(path, "is no batch log")
    if len(data) < _HEADER.size + _DIGEST_BYTES:
        raise DamagedBatchLog(path, f"is cut off after {len(data)} bytes")
    _, schema, index_length = _HEADER.unpack_from(data)
    if schema != SCHEMA:
        raise UnknownLogSchema(path, f"has schema {schema}; this release reads schema {SCHEMA}")
    body = memoryview(data)[:-_DIGEST_BYTES]
    if hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:
        raise DamagedBatchLog(path, "the sha256 does not match: the file is cut off or its bytes were changed")
    start = _HEADER.size + index_length
    if start > len(body):
        raise DamagedBatchLog(path, f"promises an index of {index_length} bytes and is shorter than that")
    try:
        return msgspec.convert(json.loads(data[_HEADER.size : start]), _Index), start
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DamagedBatchLog(path, f"the index cannot be read: {error}") from error


def _cut(data: bytes, start: int, lengths: Sequence[int]) -> Iterator[bytes]:
    # Copies, so that one segment that somebody keeps does not hold the whole file in memory.
    for length in lengths:
        yield data[start : start + length]
        start += length


def _group(indexed: _IndexedGroup, payloads: Iterator[bytes]) -> Group:
    return Group(
        job=indexed.job,
        group=indexed.group,
        split=indexed.split,
        task_index=indexed.task_index,
        size=indexed.size,
        trajectories=tuple(
            Trajectory(tuple(codec.decode(next(payloads)) for _ in lengths)) for lengths in indexed.trajectories
        ),
    )
