"""What a forked job is brought of its parent: ``origin/`` in its directory, laid out as the parent's own.

The rule: once it is there, the child needs its parent no more, and the parent's files are never written: files are
linked where the disk can (both are written once), else copied. It trains nothing: what leads from a checkpoint to the
step is brought as batch logs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gspo_core.log import layout
from gspo_core.log.batches import ErasedStep, LoggedBatch, require_whole
from gspo_core.log.changes import ImpossibleChange, Without, lessened, missing
from gspo_core.position import Position
from gspo_core.replay.past import NotKept, Past, PastError
from gspo_core.spec import ParentSpec
from services.files.durable import whole_directory
from services.files.job_dir import JobDir, step_name
from services.files.recording import Rewards, changed_log, require_known

__all__ = ["ForkOrigin", "PastError", "bring", "plan"]


MAX_TRIES = 5


@dataclass(frozen=True, slots=True)
class ForkOrigin:
    """What it takes to begin a child after ``step`` steps of its parent."""

    step: int
    start: Position | None
    """The checkpoint that it comes from, which may be of its parent's parent; None: the base model."""
    num_replayed: int
    """Steps that are trained again before the child begins."""
    ahead: tuple[int, ...]
    """Steps whose batches the child may be fed."""


def plan(
    parent: JobDir,
    step: int,
    last: int | None = None,
    without: Without | None = None,
    *,
    same_batches: bool = False,
    rewards: Rewards | None = None,
) -> ForkOrigin:
    """``last``, ``without``: of the batches that the child may be fed, and with ``same_batches`` is; ``rewards``: of
    episodes in those that it is fed.

    Raises PastError, ImpossibleChange, NoSuchEpisode.
    """
    past = Past(parent.path)
    start, num_replayed = past.journey_to(step)
    ahead = list[int]()
    while step + 1 + len(ahead) in past.batches and step + len(ahead) != last:
        ahead.append(step + 1 + len(ahead))
    if last is not None and step + len(ahead) < last:
        raise NotKept(f"step {step + len(ahead) + 1}: its batch is not kept, so no fork is fed those up to step {last}")
    if without:
        batches = [past.batch(number) for number in ahead]
        if absent := [*missing(without, batches)]:
            raise ImpossibleChange(f"{', '.join(absent)}: not in the batches that it would be fed")
        for batch in batches:
            lessened(batch, without)
    for number in ahead if same_batches else ():
        if not past.is_whole(number):
            _require_whole(lessened(past.batch(number), without or Without()))
    require_known(rewards or {}, past, ahead if same_batches else (), without)
    return ForkOrigin(step, start, num_replayed, tuple(ahead))


def _require_whole(batch: LoggedBatch) -> None:
    """Raises NotKept."""
    try:
        require_whole(batch)
    except ErasedStep as error:
        before = f", or be fed the batches up to step {batch.step - 1}"
        raise NotKept(f"{error}: a fork can leave them out{before}") from None


def bring(parent: JobDir, child: JobDir, at: ParentSpec, rewards: Rewards | None = None) -> ForkOrigin:
    """``rewards``: of episodes in the batches that the child is fed, in place of those recorded. Raises PastError,
    NoSuchEpisode, ImpossibleChange, OSError."""
    for _ in range(MAX_TRIES):
        # A parent that runs archives logs and removes checkpoints meanwhile: what is there then leads there too.
        with contextlib.suppress(FileNotFoundError):
            return _bring(parent, child, at, rewards or {})
    raise NotKept(
        f"step {at.step}: files on the way to it were removed, {MAX_TRIES} times while they were being linked"
    )


def _bring(parent: JobDir, child: JobDir, at: ParentSpec, rewards: Rewards) -> ForkOrigin:
    without = Without.parse(at.without)
    found = plan(parent, at.step, at.last, without, same_batches=at.same_batches, rewards=rewards)
    past = Past(parent.path)
    start, way = past.way_to(at.step)
    fed = found.ahead if at.same_batches else ()
    with whole_directory(child.origin.path) as target:
        for name in _names(parent, past, start, [*way, *fed]):
            _link(parent.path / name, target / name)
        _require_there(parent, start)
        for number in fed if rewards or without else ():
            if (log := changed_log(past, number, rewards, without)) is not None:
                _replace(target / past.batch_name(number), log)
    return found


def _names(parent: JobDir, past: Past, start: Position | None, steps: list[int]) -> Iterator[str]:
    yield layout.ACCEPTED
    for path in sorted(parent.checkpoints.iterdir() if parent.checkpoints.is_dir() else ()):
        if layout.epoch_of_fork_record(path.name) is not None:
            yield f"{layout.CHECKPOINTS}/{path.name}"
    if start is not None:
        root = parent.checkpoints / step_name(start)
        for path in sorted(root.rglob("*")):
            if path.is_file():
                yield path.relative_to(parent.path).as_posix()
    elif past.origin is not None:  # the parent is a fork, and goes back to its own beginning
        for path in sorted(past.origin.folder.rglob("*")):
            if path.is_file():
                yield path.relative_to(parent.path).as_posix()
    yield from map(past.batch_name, steps)


def _require_there(parent: JobDir, start: Position | None) -> None:
    """A checkpoint is renamed before it is removed: under its name still, it was listed whole. Raises
    FileNotFoundError."""
    if start is not None:
        (parent.checkpoints / step_name(start)).stat()


def _replace(path: Path, log: bytes) -> None:
    """The file is the parent's own, where it is a link. It is as old as before."""
    written = path.stat()
    path.unlink()
    path.write_bytes(log)
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # another disk, or one without links
        os.link(source, target)
        return
    shutil.copy2(source, target)
