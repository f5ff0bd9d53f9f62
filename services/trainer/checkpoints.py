"""Checkpoints of a job: learner state and lineage in one directory, ``checkpoints/ep<E>-step<S>``, written once.

The rule it keeps: what has its name is complete and on disk, and what is read is what was written: ``checkpoint.json``
carries its own sha256 and that of the learner's manifest, which carries those of the tensors. What is damaged is passed
over and told; what another release wrote is refused by name, because passing over it would start the job anew. Each
epoch leaves a write-once record of where it forked off, so that the age of a version of a dead epoch can be told.

    checkpoint.json   learner/learner.json   learner/rank-00000.safetensors      (format 1 had lineage.json alone)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_core.staleness import Position, in_history
from services.durable import (
    TEMPORARY_PREFIX,
    flush_directory,
    flush_tree,
    make_directory,
    write_flushed,
    write_once,
)
from services.telemetry import get_logger
from services.trainer.lineage import Lineage

FORMAT = 2
_MANIFEST = "checkpoint.json"
_NAME = re.compile(r"ep(\d+)-step(\d+)")
_EPOCH_NAME = re.compile(r"epoch(\d+)\.json")
_LEFT_NAME = re.compile(re.escape(TEMPORARY_PREFIX) + r"ep(\d+)-")


class UnknownFormat(Exception):
    """A checkpoint that another release wrote and this one cannot read."""


@dataclass(frozen=True)
class Checkpoint:
    position: Position
    lineage: Lineage
    learner_dir: Path


def _log_skipped(path: Path, problem: str) -> None:
    get_logger().warning("checkpoint skipped", path=str(path), error=problem)


class CheckpointStore:
    def __init__(self, job_dir: Path) -> None:
        self._root = job_dir / "checkpoints"

    def write(self, position: Position, lineage: Lineage, save: Callable[[Path], None]) -> None:
        make_directory(self._root)
        temporary = self._temporary(position.epoch)
        temporary.mkdir()
        try:
            save(temporary / "learner")
            write_flushed(temporary / _MANIFEST, _manifest(position, lineage, temporary))
            flush_tree(temporary)
            temporary.rename(self._path(position))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        flush_directory(self._root)

    def has(self, position: Position) -> bool:
        """Intact or not."""
        return self._path(position).exists()

    def newest_first(self, skipped: Callable[[Path, str], None] = _log_skipped) -> list[Checkpoint]:
        """Complete checkpoints; whether the tensors of one are intact shows when they are loaded.

        ``skipped`` is told which are damaged, and how. Raises UnknownFormat.
        """
        found = []
        for position in reversed(self._positions()):
            try:
                found.append(
                    Checkpoint(position, _read(self._path(position), position), self._path(position) / "learner")
                )
            except (OSError, ValueError, KeyError, TypeError) as error:
                skipped(self._path(position), f"{type(error).__name__}: {error}")
        return found

    def collect(self, keep: int) -> None:
        """Remove all but the newest ``keep`` of the run so far.

        What a dead epoch wrote is none of them, however late it came: a zombie may call this too, and must not crowd
        out what its successor goes on from.
        """
        forks = self.forks()
        newest_epoch = max(forks, default=0)
        living = [position for position in self._positions() if in_history(position, newest_epoch, forks)]
        if not living:
            return
        for position in set(self._positions()) - set(living[-keep:]):
            # Renamed first, so that one that is killed here leaves no half checkpoint under its name.
            doomed = self._temporary(position.epoch)
            with contextlib.suppress(FileNotFoundError):  # another trainer was faster
                self._path(position).rename(doomed)
                shutil.rmtree(doomed)

    def begin_epoch(self, epoch: int, parent: Position) -> None:
        """Record where ``epoch`` forks off; raises FileExistsError when another trainer has begun this epoch.

        What trainers of earlier epochs left half-written or half-removed goes: they lost the job with their lease.
        """
        make_directory(self._root)
        record = json.dumps({"epoch": parent.epoch, "step": parent.step}).encode()
        write_once(self._root / f"epoch{epoch:06d}.json", [record])
        for entry in self._entries():
            left = _LEFT_NAME.match(entry.name)
            if left and int(left[1]) < epoch:
                shutil.rmtree(entry, ignore_errors=True)

    def forks(self) -> dict[int, Position]:
        """Where each epoch forked off; the first one is not in it."""
        found = ((_EPOCH_NAME.fullmatch(entry.name), entry) for entry in self._entries())
        records = {int(match[1]): json.loads(entry.read_bytes()) for match, entry in found if match}
        return {epoch: Position(**record) for epoch, record in records.items() if record["epoch"] < epoch}

    def _entries(self) -> list[Path]:
        return list(self._root.iterdir()) if self._root.is_dir() else []

    def _positions(self) -> list[Position]:
        names = (_NAME.fullmatch(entry.name) for entry in self._entries())
        found = [(int(match[1]), int(match[2])) for match in names if match]
        return [Position(epoch, step) for epoch, step in sorted(found)]

    def _path(self, position: Position) -> Path:
        return self._root / f"ep{position.epoch:06d}-step{position.step:06d}"

    def _temporary(self, epoch: int) -> Path:
        return self._root / f"{TEMPORARY_PREFIX}ep{epoch:06d}-{uuid.uuid4().hex}"


def _manifest(position: Position, lineage: Lineage, directory: Path) -> bytes:
    record = {
        "format": FORMAT,
        "epoch": position.epoch,
        "step": position.step,
        "lineage": lineage.to_dict(),
        "learner": _sha256(directory / "learner" / "learner.json"),
    }
    return json.dumps({**record, "sha256": _digest(record)}, indent=1).encode()


def _read(path: Path, position: Position) -> Lineage:
    """What the checkpoint says of its groups. Raises ValueError and the like where it is not what was written."""
    if (path / "lineage.json").is_file() and not (path / _MANIFEST).exists():  # format 1
        return Lineage.from_dict(json.loads((path / "lineage.json").read_bytes()))
    record: dict[str, Any] = json.loads((path / _MANIFEST).read_bytes())
    if record.pop("sha256") != _digest(record):
        raise ValueError(f"the sha256 of {_MANIFEST} does not match: it is cut off or was changed")
    if record["format"] != FORMAT:
        raise UnknownFormat(
            f"{path} has the format {record['format']}, this release reads 1 and {FORMAT}: go on with the release that "
            "wrote it"
        )
    if (record["epoch"], record["step"]) != (position.epoch, position.step):
        raise ValueError(f"it holds epoch {record['epoch']} step {record['step']}: it was renamed")
    if record["learner"] != _sha256(path / "learner" / "learner.json"):
        raise ValueError("the learner's manifest is not the one that was written")
    return Lineage.from_dict(record["lineage"])


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
