"""Checkpoints of a job: learner state and lineage in one directory, ``checkpoints/ep<E>-step<S>``, written once.

The rule it keeps: what has its name is complete and on disk, and what is read is what was written: ``checkpoint.json``
carries its own sha256 and that of the learner's manifest, which carries those of the tensors. What is damaged is passed
over and told; what another release wrote is refused by name, because passing over it would start the job anew. Each
epoch leaves a write-once record of where it forked off, so that the age of a version of a dead epoch can be told.

    checkpoint.json   learner/learner.json   learner/rank-00000.safetensors      (format 1 had lineage.json alone)
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gspo_core.staleness import Position, in_history
from services.durable import (
    flush_tree,
    make_directory,
    name_directory,
    remove_unfinished,
    temporary_name,
    write_flushed,
    write_once,
)
from services.telemetry import get_logger
from services.trainer.lineage import Lineage

FORMAT = 2
_MANIFEST = "checkpoint.json"
_NAME = re.compile(r"ep(\d+)-step(\d+)")
_EPOCH_NAME = re.compile(r"epoch(\d+)(?:\.copy)?\.json")


# What is said of a file that is not there, or that the disk has lost. Any other error may be gone the next time.
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
# What a damaged manifest may raise.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)
_Signature = frozenset[tuple[str, int, int]]
"""Name, size and time of change of each file."""


class UnknownFormat(Exception):
    """A checkpoint that another release wrote and this one cannot read."""


class DamagedRecord(Exception):
    """Where an epoch forked off is known no more: what is void cannot be told from what holds."""


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
        self._checked: dict[Position, _Signature] = {}
        """What was found intact, and how its files looked then."""

    def write(self, position: Position, lineage: Lineage, save: Callable[[Path], None]) -> None:
        make_directory(self._root)
        temporary = self._temporary(position.epoch)
        temporary.mkdir()
        try:
            save(temporary / "learner")
            write_flushed(temporary / _MANIFEST, _manifest(position, lineage, temporary))
            flush_tree(temporary)
            name_directory(temporary, self._path(position))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def has(self, position: Position) -> bool:
        """Intact or not."""
        return self._path(position).exists()

    def newest_first(self, skipped: Callable[[Path, str], None] = _log_skipped) -> list[Checkpoint]:
        """Complete checkpoints; whether the tensors of one are intact shows when they are loaded.

        ``skipped`` is told which are damaged, and how. Raises UnknownFormat; and OSError where one cannot be looked at
        just now, which is no damage.
        """
        found = []
        for position in reversed(self._positions()):
            try:
                found.append(
                    Checkpoint(position, _read(self._path(position), position), self._path(position) / "learner")
                )
            except OSError as error:
                if error.errno not in LOST:
                    raise
                skipped(self._path(position), f"{type(error).__name__}: {error}")
            except _DAMAGE as error:
                skipped(self._path(position), f"{type(error).__name__}: {error}")
        return found

    def collect(self, keep: int, check: Callable[[Path], None] = lambda _: None) -> int:
        """Remove what is older than the newest ``keep`` intact ones of the run so far. Returns a step: batch logs after
        it are needed, whichever of these is lost. Where there are fewer, that is the first: nothing but the logs could
        stand in for another one.

        What a dead epoch wrote is none of them, however late it came: a zombie may call this too, and must not crowd
        out what its successor goes on from. ``check`` raises ValueError where the files of a learner's state are not
        what was written; it is asked once, unless they have changed.
        """
        forks, found = self.forks(), self._positions()
        living = [position for position in found if in_history(position, max(forks, default=0), forks)]
        intact = list(islice((one for one in reversed(living) if self._is_intact(one, check)), keep))
        if not intact:
            return 0
        first = living.index(intact[-1]) if len(intact) == keep else 0
        for position in set(found) - set(living[first:]):
            # Renamed first, so that one that is killed here leaves no half checkpoint under its name.
            doomed = self._temporary(position.epoch)
            with contextlib.suppress(FileNotFoundError):  # another trainer was faster
                self._path(position).rename(doomed)
                shutil.rmtree(doomed)
        return intact[-1].step if len(intact) == keep else 0

    def _is_intact(self, position: Position, check: Callable[[Path], None]) -> bool:
        path = self._path(position)
        try:
            _read(path, position)
            files = _signature(path)
            if self._checked.get(position) != files:
                check(path / "learner")
                self._checked[position] = files
        except (OSError, UnknownFormat, *_DAMAGE):
            return False
        return True

    def begin_epoch(self, epoch: int, parent: Position) -> None:
        """Record where ``epoch`` forks off; raises FileExistsError when another trainer has begun this epoch.

        What trainers of earlier epochs left half-written or half-removed goes: they lost the job with their lease.
        """
        make_directory(self._root)
        record: dict[str, Any] = {"epoch": parent.epoch, "step": parent.step}
        text = json.dumps({**record, "sha256": _digest(record)}).encode()
        first, copy = self._fork_records(epoch)
        write_once(first, [text], epoch=epoch)
        try:
            write_once(copy, [text], epoch=epoch)
        except OSError:  # who tries again must find the name free
            first.unlink()
            raise
        remove_unfinished(self._root, epoch)

    def forks(self) -> dict[int, Position]:
        """Where each epoch forked off; the first one is not in it. Raises DamagedRecord."""
        names = (_EPOCH_NAME.fullmatch(entry.name) for entry in self._entries())
        found = {epoch: self._fork(epoch) for epoch in sorted({int(match[1]) for match in names if match})}
        return {epoch: parent for epoch, parent in found.items() if parent.epoch < epoch}

    def _fork(self, epoch: int) -> Position:
        problems = []
        for path in self._fork_records(epoch):
            try:
                record = json.loads(path.read_bytes())
                if record.pop("sha256", None) not in (None, _digest(record)):  # earlier releases wrote none
                    raise ValueError("its sha256 does not match")
                return Position(int(record["epoch"]), int(record["step"]))
            except FileNotFoundError:
                problems.append(f"{path.name} is missing")
            except _DAMAGE as error:
                problems.append(f"{path.name} is damaged: {error}")
                get_logger().warning("record of an epoch is damaged", path=str(path), error=str(error))
        raise DamagedRecord(f"where epoch {epoch} forked off is known no more: {', '.join(problems)}")

    def _fork_records(self, epoch: int) -> tuple[Path, Path]:
        """What holds is there twice: the whole run hangs on these few bytes."""
        name = f"epoch{epoch:06d}"
        return self._root / f"{name}.json", self._root / f"{name}.copy.json"

    def _entries(self) -> list[Path]:
        return list(self._root.iterdir()) if self._root.is_dir() else []

    def _positions(self) -> list[Position]:
        names = (_NAME.fullmatch(entry.name) for entry in self._entries())
        found = [(int(match[1]), int(match[2])) for match in names if match]
        return [Position(epoch, step) for epoch, step in sorted(found)]

    def _path(self, position: Position) -> Path:
        return self._root / f"ep{position.epoch:06d}-step{position.step:06d}"

    def _temporary(self, epoch: int) -> Path:
        return self._root / temporary_name(epoch)


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


def _signature(path: Path) -> _Signature:
    files = [(one, one.stat()) for one in path.rglob("*")]
    return frozenset((str(one), stat.st_size, stat.st_mtime_ns) for one, stat in files)


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
