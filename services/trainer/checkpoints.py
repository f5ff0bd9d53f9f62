"""Checkpoints of a job: learner state and lineage in one directory, ``checkpoints/ep<E>-step<S>``, written once.

The rule it keeps: what has its name is complete and on disk. Each epoch leaves a write-once record of where it forked
off, so that the age of a version of a dead epoch can always be told.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gspo_core.staleness import Position
from services.durable import (
    TEMPORARY_PREFIX,
    flush_directory,
    flush_tree,
    make_directory,
    write_flushed,
    write_once,
)
from services.trainer.lineage import Lineage

_NAME = re.compile(r"ep(\d+)-step(\d+)")
_EPOCH_NAME = re.compile(r"epoch(\d+)\.json")


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
        temporary = self._root / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
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
        return [self._read(position) for position in reversed(self._positions())]

    def collect(self, keep: int) -> None:
        """Remove all but the newest ``keep``."""
        for position in self._positions()[:-keep]:
            shutil.rmtree(self._path(position))

    def begin_epoch(self, epoch: int, parent: Position) -> None:
        """Record where ``epoch`` forks off; raises FileExistsError when another trainer has begun this epoch."""
        make_directory(self._root)
        record = json.dumps({"epoch": parent.epoch, "step": parent.step}).encode()
        write_once(self._root / f"epoch{epoch:06d}.json", [record])

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

    def _read(self, position: Position) -> Checkpoint:
        path = self._path(position)
        lineage = Lineage.from_dict(json.loads((path / "lineage.json").read_bytes()))
        return Checkpoint(position, lineage, path / "learner")
