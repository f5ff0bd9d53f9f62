"""A write that fails at any of its flushes leaves nothing behind that looks whole, or stands in the way of the next."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from services.files.batch_log import BatchLog
from services.files.bucket import Bucket
from services.files.bucket_models import fetch_from
from services.files.checkpoints import CheckpointStore
from services.files.data_dir import HubKind
from services.files.durable import whole_directory
from services.files.job_dir import JobDir
from services.files.job_records import JobRecords
from services.files.trained_log import TrainedLog
from services.files.weights import WeightStore
from tests.services.files.file_events import recorded
from tests.services.trainer.trainer_kit import group

Write = Callable[[Path], object]


def save(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "learner.json").write_text("{}")


WRITES: dict[str, tuple[Write, Callable[[Path], bool]]] = {
    "a batch": (
        lambda job_dir: BatchLog(JobDir(job_dir)).write(1, 1, [group(0, [1.0])], {"dropped": {}}),
        lambda job_dir: BatchLog(JobDir(job_dir)).read(1, 1).step == 1,
    ),
    "a checkpoint": (
        lambda job_dir: CheckpointStore(JobDir(job_dir)).write(Position(1, 2), Lineage(step=2), save),
        lambda job_dir: [one.lineage.step for one in CheckpointStore(JobDir(job_dir)).newest_first()] == [2],
    ),
    "an epoch": (
        lambda job_dir: CheckpointStore(JobDir(job_dir)).begin_epoch(2, Position(1, 7)),
        lambda job_dir: CheckpointStore(JobDir(job_dir)).forks() == {2: Position(1, 7)},
    ),
    "weights": (
        lambda job_dir: WeightStore(JobDir(job_dir)).write(3, 1, 2, save),
        lambda job_dir: WeightStore(JobDir(job_dir)).verify(WeightStore(JobDir(job_dir)).manifest(3)) is None,
    ),
    "what was trained": (
        lambda job_dir: TrainedLog(JobDir(job_dir)).write(1, 1, {}),
        lambda job_dir: TrainedLog(JobDir(job_dir)).path(1, 1).exists(),
    ),
    "a state": (
        lambda job_dir: JobRecords(JobDir(job_dir)).write_status(1, {"status": "queued"}),
        lambda job_dir: JobRecords(JobDir(job_dir)).newest_status() == (1, {"status": "queued"}),
    ),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_disk_that_is_full_at_any_flush_costs_only_another_try(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems say only then that there is no room, of names as of contents."""
    write, is_there = WRITES[what]
    flush, calls, faulty = os.fsync, 0, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == faulty:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    while calls >= faulty:  # the last one before had been reached
        faulty, calls = faulty + 1, 0
        job_dir = tmp_path / f"job_{faulty}"
        with contextlib.suppress(OSError):
            write(job_dir)
        if calls >= faulty:
            write(job_dir)
        assert is_there(job_dir)
        assert not list(job_dir.rglob(".tmp-*"))
    assert faulty > 3


def _a_bucket(folder: Path) -> None:
    (bucket := folder / "bucket").mkdir()
    (bucket / "config.json").write_text("{}")
    (bucket / "model.safetensors").write_bytes(b"weights")
    fetch_from(Bucket.at(f"file://{bucket}"), HubKind.MODEL, folder / "model")


def _a_tree(folder: Path) -> None:
    with whole_directory(folder / "tree") as directory:
        (directory / "below").mkdir()
        (directory / "below" / "file").write_bytes(b"content")
        (directory / "link").symlink_to("nowhere")


@pytest.mark.parametrize(
    ("write", "named", "files"),
    [
        (_a_bucket, "model", {"*/config.json", "*/model.safetensors"}),
        (_a_tree, "tree", {"*/below/file"}),
    ],
)
def test_contents_are_flushed_before_a_directory_has_its_name(
    write: Write, named: str, files: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(monkeypatch, tmp_path.parent) as events:
        write(tmp_path)
    at = events.index(("name", f"{tmp_path.name}/{named}"))
    flushed = [path.removeprefix(f"{tmp_path.name}/") for kind, path in events[:at] if kind == "flush"]
    assert files <= set(flushed)
    assert flushed[-1] == "*", "its names, after what they name"
