"""What checkpoints ask of the place where they lie: one contract, for a directory and for a store of objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from services.files.checkpoint_storage import CheckpointStorage, DirectoryStorage
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from tests.services.files.object_storage import ObjectStorage

NAME = "ep000001-step000002"


@pytest.fixture(params=["directory", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStorage:
    if request.param == "objects":
        return ObjectStorage(tmp_path / "scratch")
    return DirectoryStorage(tmp_path / "job_a" / "checkpoints")


def fill(directory: Path) -> None:
    (directory / "learner").mkdir()
    (directory / "learner" / "state").write_bytes(b"12345")
    (directory / "note").write_bytes(b"note")


def test_what_was_put_is_fetched_read_and_described(storage: CheckpointStorage) -> None:
    assert storage.names() == []
    storage.put(NAME, 1, fill)
    assert storage.names() == [NAME]
    assert (storage.fetch(NAME) / "learner" / "state").read_bytes() == b"12345"
    assert storage.read(f"{NAME}/note") == b"note"
    assert {(one.path, one.size_bytes) for one in storage.describe(NAME).files} == {("learner/state", 5), ("note", 4)}
    assert storage.describe(NAME) == storage.describe(NAME)


def test_what_is_not_there_is_said_to_be_missing(storage: CheckpointStorage) -> None:
    storage.put(NAME, 1, fill)
    looks: list[Callable[[], object]] = [
        lambda: storage.read("other"),
        lambda: storage.read(f"{NAME}/other"),
        lambda: storage.describe("other"),
    ]
    for look in looks:
        with pytest.raises(FileNotFoundError):
            look()


def test_what_could_not_be_filled_is_not_there(storage: CheckpointStorage) -> None:
    def torn(directory: Path) -> None:
        fill(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        storage.put(NAME, 1, torn)
    assert storage.names() == []


def test_a_small_file_is_written_once(storage: CheckpointStorage) -> None:
    storage.write_once("epoch", b"first", 1)
    with pytest.raises(FileExistsError):
        storage.write_once("epoch", b"second", 1)
    assert storage.read("epoch") == b"first"
    storage.remove("epoch")
    storage.write_once("epoch", b"second", 1)


def test_what_is_removed_is_gone_and_may_be_removed_twice(storage: CheckpointStorage) -> None:
    storage.put(NAME, 1, fill)
    for _ in range(2):
        storage.remove(NAME, 1)
        storage.remove_unfinished(2)
        assert storage.names() == []


def test_a_run_is_kept_and_found_in_either(storage: CheckpointStorage, tmp_path: Path) -> None:
    store = CheckpointStore(JobDir(tmp_path / "job_a"), storage)

    def save(directory: Path) -> None:
        directory.mkdir()
        (directory / "learner.json").write_text("{}")

    store.begin_epoch(1, Position(0, 0))
    for step in (1, 2, 3):
        store.write(Position(1, step), Lineage(step=step), save)
    assert store.collect(2) == 2
    store.begin_epoch(2, Position(1, 3))
    with pytest.raises(FileExistsError):
        store.begin_epoch(2, Position(1, 2))
    assert store.forks() == {1: Position(0, 0), 2: Position(1, 3)}
    newest, older = store.newest_first()
    assert (newest.position, newest.lineage.step, older.position) == (Position(1, 3), 3, Position(1, 2))
    assert (newest.learner_dir / "learner.json").read_text() == "{}"
    store.remove(Position(1, 3))
    assert store.positions() == [Position(1, 2)]
    assert not store.has(Position(1, 3))
