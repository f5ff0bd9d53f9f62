"""A batch log: what one step trained on, payload included, as one run of bytes.

The rule: bytes are believed only after their sha256 matches, so a step can be trained again from them alone. This
module does not interpret the ``extra`` mapping that travels with a batch (drops, staleness, live settings).

Layout: 8 bytes magic, uint32 schema number, uint64 length of the index (little-endian), the index as JSON, the
encoded segments one after another in the order of the index, and the sha256 of all that.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import msgspec

from gspo_core import codec
from gspo_core.invariants import InvalidValue
from gspo_core.json_value import JSON
from gspo_core.position import Position
from gspo_core.types import Group, Split, Trajectory

# 2: ``extra`` says what computed the step, or which groups came late. A log that does not is written as 1, as releases
# before wrote it. 3: episodes of it were erased, so it must not be trained again.
SCHEMA = 3
_READABLE = (1, 2, SCHEMA)
_MAGIC = b"GSPOBLOG"
_HEADER = struct.Struct("<8sIQ")
HEADER_BYTES = _HEADER.size
_DIGEST_BYTES = hashlib.sha256().digest_size


class DamagedBatch(ValueError):
    """The bytes are not those of a batch log as it was written."""


class UnknownBatchSchema(DamagedBatch):
    """Another release wrote the log, or a segment in it, and this release cannot read it."""


class LoggedSettings(TypedDict, total=False):
    version: int
    values: dict[str, JSON]


class Computed(TypedDict):
    """What trained a step: with the same, the same bits come out."""

    device: str
    threads: int
    num_ranks: int
    torch: str
    """Its version."""


class BatchExtra(TypedDict, total=False):
    """What the trainer knew when it took the batch. Logs of earlier releases lack some of it."""

    version: int | None
    num_dispatched: int
    dropped: dict[str, list[int]]
    """Groups that were dropped since the step before, by reason."""
    staleness: dict[str, int]
    """By version, in steps."""
    settings: LoggedSettings
    computed: Computed
    dealing: Literal["groups"]
    """How the batch was dealt to its updates. Logs of earlier releases lack it: sequence by sequence."""
    late: list[int]
    """Groups that waited for rewards and are trained whatever their age."""
    late_cap: int
    """As how old their tokens count at most."""
    erased: list[list[int]]
    """Group and member of each episode whose text is gone."""
    rescored: list[list[int]]
    """Group and member of each episode whose reward has changed since it was played."""
    recorded: list[int]
    """Epoch and step of the batch of another job that this one is."""


@dataclass(frozen=True, eq=False)
class LoggedBatch:
    """What one step was trained on."""

    epoch: int
    step: int
    groups: tuple[Group, ...]
    extra: BatchExtra

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.step)

    @property
    def erased(self) -> frozenset[tuple[int, int]]:
        """Group and member of the episodes whose tokens were erased after training."""
        return frozenset((group, member) for group, member in self.extra.get("erased", ()))

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]


class ErasedStep(ValueError):
    """The step was trained on episodes that were erased since. The message names them."""


def require_whole(batch: LoggedBatch) -> None:
    """Raises ErasedStep."""
    present = {(one.key.group, one.key.member) for one in batch.trajectories}
    if gone := sorted(batch.erased & present):
        names = ", ".join(f"{group}/{member}" for group, member in gone)
        raise ErasedStep(f"step {batch.step} was trained on episodes that were erased since: {names}")


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
    """A ``BatchExtra``, unchecked: logs of other releases stay readable."""


def encode_batch(position: Position, groups: Sequence[Group], extra: BatchExtra) -> Iterator[bytes]:
    """The bytes of a log, in pieces. Raises InvalidValue where JSON would change ``extra``."""
    digest = hashlib.sha256()
    payload: list[bytes] = []
    indexed = [_indexed(group, payload) for group in groups]
    index = _index_bytes(_Index(position.epoch, position.step, indexed, {**_checked_extra(extra)}))
    schema = SCHEMA if extra.get("erased") else 2 if {"computed", "late"} & extra.keys() else 1
    for piece in (_HEADER.pack(_MAGIC, schema, len(index)), index, *payload):
        digest.update(piece)
        yield piece
    yield digest.digest()


def decode_batch(data: bytes) -> LoggedBatch:
    """Raises DamagedBatch, UnknownBatchSchema."""
    index, start = _checked_index(data)
    end = len(data) - _DIGEST_BYTES
    lengths = [length for group in index.groups for lengths in group.trajectories for length in lengths]
    if any(length < 0 for length in lengths) or start + sum(lengths) != end:
        raise DamagedBatch(f"the index describes {sum(lengths)} bytes of segments, there are {end - start}")
    payloads = _cut(data, start, lengths)
    try:
        groups = tuple(_group(indexed, payloads) for indexed in index.groups)
    except codec.UnknownSchema as error:
        raise UnknownBatchSchema(str(error)) from error
    except (codec.SegmentRejected, InvalidValue) as error:
        raise DamagedBatch(f"{type(error).__name__}: {error}") from error
    return LoggedBatch(epoch=index.epoch, step=index.step, groups=groups, extra=cast(BatchExtra, index.extra))


def index_length(header: bytes) -> int:
    """How many bytes of index follow the first ``HEADER_BYTES`` of a log; 0 for a schema that is not ours. Raises
    DamagedBatch."""
    try:
        _, schema, length = _HEADER.unpack(header)
    except struct.error as error:
        raise DamagedBatch(f"the index cannot be read: {error}") from error
    return int(length) if schema in _READABLE else 0


def has_erased(header: bytes) -> bool:
    """Whether the first ``HEADER_BYTES`` are those of a log with erased episodes. It is not checked."""
    return len(header) == HEADER_BYTES and _HEADER.unpack(header)[:2] == (_MAGIC, SCHEMA)


def group_numbers(index: bytes) -> tuple[int, ...]:
    """The numbers of a batch's groups, from its index alone, which is not checked against the sha256. Raises
    DamagedBatch."""
    try:
        return tuple(int(group["group"]) for group in json.loads(index)["groups"]) if index else ()
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedBatch(f"the index cannot be read: {error}") from error


def _indexed(group: Group, payload: list[bytes]) -> _IndexedGroup:
    """The index entry of ``group``; its encoded segments go to the end of ``payload``."""
    trajectories = []
    for trajectory in group.trajectories:
        encoded = [codec.encode(segment) for segment in trajectory.segments]
        payload.extend(encoded)
        trajectories.append([len(data) for data in encoded])
    return _IndexedGroup(group.job, group.group, group.split, group.task_index, group.size, trajectories)


def _checked_extra(extra: BatchExtra) -> BatchExtra:
    """``extra`` as a plain dict; refuses what JSON would give back as something else."""
    plain: BatchExtra = {**extra}
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


def _checked_index(data: bytes) -> tuple[_Index, int]:
    """The index and where the segments start, after all of ``data`` was checked against its sha256."""
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise DamagedBatch("is no batch log")
    if len(data) < HEADER_BYTES + _DIGEST_BYTES:
        raise DamagedBatch(f"is cut off after {len(data)} bytes")
    _, schema, length = _HEADER.unpack_from(data)
    if schema not in _READABLE:
        raise UnknownBatchSchema(f"has schema {schema}; this release reads schemas 1 to {SCHEMA}")
    body = memoryview(data)[:-_DIGEST_BYTES]
    if hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:
        raise DamagedBatch("the sha256 does not match: the file is cut off or its bytes were changed")
    start = HEADER_BYTES + length
    if start > len(body):
        raise DamagedBatch(f"promises an index of {length} bytes and is shorter than that")
    try:
        index = msgspec.convert(json.loads(data[HEADER_BYTES:start]), _Index)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DamagedBatch(f"the index cannot be read: {error}") from error
    if bool(index.extra.get("erased")) != (schema == SCHEMA):
        raise DamagedBatch(f"has schema {schema}, and says otherwise whether episodes of it were erased")
    return index, start


def _cut(data: bytes, start: int, lengths: Sequence[int]) -> Iterator[bytes]:
    # Copies, so that keeping one segment does not keep the whole file in memory.
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
