"""Checkpoints of a job: learner state and lineage in one directory, ``checkpoints/ep<E>-step<S>``, written once.

The rule it keeps: what has its name is complete and on disk. Each epoch leaves a write-once record of where it forked
off, so that the age of a version of a dead epoch can always be told.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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

_NAME = re.compile(r"ep(\d+)-step(\d+)")
_EPOCH_NAME = re.compile(r"epoch(\d+)\.json")
_LEFT_NAME = re.compile(re.escape(TEMPORARY_PREFIX) + r"ep(\d+)-")


@dataclass(frozen=True)
class Checkpoint:
    position: Position
    lineage: Lineage
    learner_dir: Path


class CheckpointStore:
    def __init__(self, job_dir: Path) -> None:
        self._root = job_dir / "checkpoints"

    def write(self, position: Position, lineage: Lineage, save: Callable[[Path], None]) -> None:
        make_directory(self._root)
        temporary = self._temporary(position.epoch)
        temporary.mkdir()
        try:
            save(temporary / "learner")
            write_flushed(temporary / "lineage.json", json.dumps(lineage.to_dict()).encode())
            flush_tree(temporary)
            temporary.rename(self._path(position))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        flush_directory(self._root)

    def newest_first(self) -> list[Checkpoint]:
        """Complete checkpoints; whether a learner state is intact shows when it is loaded."""
        found = (self._read(position) for position in reversed(self._positions()))
        return [checkpoint for checkpoint in found if checkpoint is not None]

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

    def _read(self, position: Position) -> Checkpoint | None:
        path = self._path(position)
        try:
            lineage = Lineage.from_dict(json.loads((path / "lineage.json").read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            get_logger().warning("checkpoint skipped", path=str(path), error=repr(error))
            return None
        return Checkpoint(position, lineage, path / "learner")
