"""The small files of a checkpoint store as bytes: a checkpoint's manifest, and where each epoch forked off.

The rule: each carries its own sha256; a manifest carries that of the learner's manifest too, which carries those of
the tensors. ``DAMAGE`` names the errors that decoding raises for bytes that are not what was written.
"""

from __future__ import annotations

import hashlib
import json
from typing import NotRequired, TypedDict

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position

FORMAT = 2
# Format of a fork's record, which states its number only if it is another one.
FORK_FORMAT = 1
DAMAGE = (ValueError, KeyError, TypeError, AttributeError)


class UnknownCheckpointFormat(Exception):
    """Another release wrote the checkpoint, or where an epoch forked off, and this one cannot read it."""


class ForkRecord(TypedDict):
    epoch: int
    step: int


class CheckpointRecord(TypedDict):
    format: int
    epoch: int
    step: int
    lineage: dict[str, int | list[int]]
    learner: str | None
    sha256: NotRequired[str]


def encode_checkpoint(position: Position, lineage: Lineage, learner: str | None) -> bytes:
    """``learner``: the sha256 of the learner's manifest, None where it wrote none."""
    record: CheckpointRecord = {
        "format": FORMAT,
        "epoch": position.epoch,
        "step": position.step,
        "lineage": lineage.to_dict(),
        "learner": learner,
    }
    return json.dumps({**record, "sha256": _digest(record)}, indent=1).encode()


def decode_checkpoint(data: bytes, position: Position, learner: str | None) -> Lineage:
    """The lineage in the manifest of the checkpoint at ``position``, whose learner's manifest has the sha256
    ``learner``. Raises one of DAMAGE, UnknownCheckpointFormat."""
    record: CheckpointRecord = json.loads(data)
    if record.pop("sha256") != _digest(record):
        raise ValueError("the sha256 of checkpoint.json does not match: it is cut off or was changed")
    if record["format"] != FORMAT:
        raise UnknownCheckpointFormat(
            f"has the format {record['format']}, this release reads 1 and {FORMAT}: "
            "go on with the release that wrote it"
        )
    if (record["epoch"], record["step"]) != position:
        raise ValueError(f"it holds epoch {record['epoch']} step {record['step']}: it was renamed")
    if record["learner"] != learner:
        raise ValueError("the learner's manifest is not the one that was written")
    return Lineage.from_dict(record["lineage"])


def decode_lineage(data: bytes) -> Lineage:
    """All that checkpoints of format 1 held. Raises one of DAMAGE."""
    return Lineage.from_dict(json.loads(data))


def encode_fork(parent: Position) -> bytes:
    """``parent``: where an epoch forked off."""
    record: ForkRecord = {"epoch": parent.epoch, "step": parent.step}
    return json.dumps({**record, "sha256": _digest(record)}).encode()


def decode_fork(data: bytes) -> Position:
    """Raises one of DAMAGE, UnknownCheckpointFormat."""
    record = json.loads(data)
    if record.pop("sha256", None) not in (None, _digest(record)):  # earlier releases wrote none
        raise ValueError("its sha256 does not match")
    if (number := record.get("format", FORK_FORMAT)) != FORK_FORMAT:
        raise UnknownCheckpointFormat(
            f"the record of where an epoch forked off has the format {number}, this release reads {FORK_FORMAT}: go on "
            "with the release that wrote it"
        )
    return Position(int(record["epoch"]), int(record["step"]))


def _digest(record: CheckpointRecord | ForkRecord) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
