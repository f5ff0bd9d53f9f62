"""What of a job's files is its history: where epochs forked off, which checkpoints and batches hold.

The rule: what an epoch wrote beyond the place where its successor forked off is void, however late it was written.
Callers bring names and a way to read one; where the bytes lie is theirs to know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping

from gspo_core.log import checkpoints
from gspo_core.log.checkpoints import DAMAGE, UnknownCheckpointFormat
from gspo_core.log.layout import (
    CHECKPOINT_MANIFEST,
    LEARNER_MANIFEST,
    LINEAGE_OF_FORMAT_1,
    epoch_of_fork_record,
    fork_records,
    step_name,
)
from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.staleness import in_history

Read = Callable[[str], bytes]
"""The bytes under a name below the checkpoints. Raises FileNotFoundError, OSError."""


class LostForkRecord(Exception):
    """The fork record of an epoch is lost, so valid and void batches cannot be told apart."""


def batches_after(
    start: Position, found: Collection[tuple[int, int]], newest_epoch: int, forks: Mapping[int, Position]
) -> list[Position]:
    """The batches of ``found`` that a run of ``newest_epoch`` trains again after ``start``, in order.

    ``newest_epoch`` is the last that began, and ``forks`` says where each epoch forked off. Batches of an epoch beyond
    the fork of its successor are void, however late a zombie wrote them: those groups were trained otherwise. The
    sequence ends at the first missing step.
    """
    positions = (Position(epoch, step) for epoch, step in sorted(found))
    valid = {at.step: at for at in positions if in_history(at, newest_epoch, forks)}
    row: list[Position] = []
    while (step := start.step + 1 + len(row)) in valid:
        row.append(valid[step])
    return row


def forks_among(
    names: Iterable[str], read: Read, damaged: Callable[[str, str], None] = lambda name, problem: None
) -> dict[int, Position]:
    """Where each epoch but the first forked off, from the names below the checkpoints. Raises LostForkRecord,
    UnknownCheckpointFormat.

    ``damaged`` is told of a record that is not what was written, while its copy is.
    """
    epochs = {epoch for name in names if (epoch := epoch_of_fork_record(name)) is not None}
    found = {epoch: _fork(epoch, read, damaged) for epoch in sorted(epochs)}
    return {epoch: parent for epoch, parent in found.items() if parent.epoch < epoch}


def _fork(epoch: int, read: Read, damaged: Callable[[str, str], None]) -> Position:
    problems = []
    for name in fork_records(epoch):
        try:
            return checkpoints.decode_fork(read(name))
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except DAMAGE as error:
            problems.append(f"{name} is damaged: {error}")
            damaged(name, str(error))
    raise LostForkRecord(f"it is no longer known where epoch {epoch} forked off: {', '.join(problems)}")


def lineage_of(position: Position, read: Read) -> Lineage:
    """The lineage in the checkpoint at ``position``. Raises UnknownCheckpointFormat, OSError, one of DAMAGE."""
    name = step_name(position)
    try:
        manifest = read(f"{name}/{CHECKPOINT_MANIFEST}")
    except FileNotFoundError:
        try:
            older = read(f"{name}/{LINEAGE_OF_FORMAT_1}")
        except FileNotFoundError:
            pass
        else:
            return checkpoints.decode_lineage(older)
        raise
    try:
        return checkpoints.decode_checkpoint(manifest, position, _learner_digest(name, read))
    except UnknownCheckpointFormat as error:
        raise UnknownCheckpointFormat(f"{name} {error}") from None


def _learner_digest(name: str, read: Read) -> str | None:
    try:
        return _sha256(read(f"{name}/{LEARNER_MANIFEST}"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
