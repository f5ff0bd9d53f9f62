from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.staleness import token_staleness
from services.files.checkpoints import CheckpointStore, LostForkRecord
from services.files.job_dir import JobDir


@given(st.permutations(range(12)), st.integers(0, 12))
def test_a_lineage_owes_what_was_dispatched_and_not_settled(order: list[int], count: int) -> None:
    lineage = Lineage(num_dispatched=12)
    for group in order[:count]:
        lineage.settle([group])
    assert list(lineage.owed()) == sorted(order[count:])
    assert Lineage.from_dict(lineage.to_dict()) == lineage
    if count == 12:
        assert lineage.settled == set()


def save(text: str) -> object:
    def write(directory: Path) -> None:
        directory.mkdir()
        (directory / "learner.json").write_text(text)

    return write


def test_the_newest_checkpoint_comes_first_and_older_ones_are_collected(tmp_path: Path) -> None:
    store = CheckpointStore(JobDir(tmp_path))
    store.begin_epoch(1, Position(0, 0))
    store.begin_epoch(2, Position(1, 10))
    for epoch, step in ((1, 5), (1, 10), (2, 12)):
        store.write(Position(epoch, step), Lineage(step=step), save(f"{epoch}/{step}"))  # type: ignore[arg-type]
    assert [one.position for one in store.newest_first()] == [Position(2, 12), Position(1, 10), Position(1, 5)]
    store.collect(keep=2)
    newest, _ = store.newest_first()
    assert newest.lineage.step == 12
    assert (newest.learner_dir / "learner.json").read_text() == "2/12"


def test_only_intact_ones_count_among_those_that_are_kept(tmp_path: Path) -> None:
    """Else a damaged one would push out what the job can go on from."""
    store, root = CheckpointStore(JobDir(tmp_path)), tmp_path / "checkpoints"
    store.begin_epoch(1, Position(0, 0))
    for step in (1, 2, 3, 4, 5):
        store.write(Position(1, step), Lineage(step=step), save("state"))  # type: ignore[arg-type]
    (root / "ep000001-step000005" / "checkpoint.json").write_text("")
    torn, asked = {"ep000001-step000003"}, list[str]()

    def check(learner_dir: Path) -> None:
        asked.append(learner_dir.parent.name)
        if learner_dir.parent.name in torn:
            raise ValueError("other tensors than were written")

    assert store.collect(2, check) == 2, "the logs after it are needed"
    assert [one.name for one in sorted(root.glob("ep0*-*"))] == [f"ep000001-step{step:06d}" for step in (2, 3, 4, 5)]
    asked.clear()
    assert store.collect(2, check) == 2
    assert asked == ["ep000001-step000003"], "what was found intact and looks the same is not read again"
    assert store.collect(3, check) == 0, "with less than was wanted all logs are kept"
    (root / "ep000001-step000002" / "learner" / "more").touch()
    asked.clear()
    store.collect(2, check)
    assert "ep000001-step000002" in asked


def test_a_zombie_that_saves_late_does_not_crowd_out_what_its_successor_goes_on_from(tmp_path: Path) -> None:
    zombie, successor = CheckpointStore(JobDir(tmp_path)), CheckpointStore(JobDir(tmp_path))
    zombie.begin_epoch(1, Position(0, 0))
    zombie.write(Position(1, 10), Lineage(step=10), save("state"))  # type: ignore[arg-type]
    successor.begin_epoch(2, Position(1, 10))
    for step in (12, 14):
        zombie.write(Position(1, step), Lineage(step=step), save("state"))  # type: ignore[arg-type]
    zombie.collect(keep=1)
    assert [one.position for one in successor.newest_first()] == [Position(1, 10)]


def test_a_checkpoint_that_could_not_be_written_is_not_seen(tmp_path: Path) -> None:
    def torn(directory: Path) -> None:
        directory.mkdir()
        (directory / "half").write_text("x")
        raise OSError("disk full")

    store = CheckpointStore(JobDir(tmp_path))
    with pytest.raises(OSError, match="disk full"):
        store.write(Position(1, 1), Lineage(), torn)
    assert store.newest_first() == []


def test_a_checkpoint_whose_lineage_is_damaged_is_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(JobDir(tmp_path))
    for step in (1, 2, 3):
        store.write(Position(1, step), Lineage(step=step), save("state"))  # type: ignore[arg-type]
    (tmp_path / "checkpoints" / "ep000001-step000003" / "checkpoint.json").write_text("")
    (tmp_path / "checkpoints" / "ep000001-step000002" / "checkpoint.json").unlink()
    assert [one.position for one in store.newest_first()] == [Position(1, 1)]


def test_a_trainer_killed_while_it_collects_or_writes_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here both die in the middle; the trainer of the next epoch clears what they left."""
    store, root = CheckpointStore(JobDir(tmp_path)), tmp_path / "checkpoints"
    store.begin_epoch(1, Position(0, 0))
    for step in (1, 2):
        store.write(Position(1, step), Lineage(step=step), save("state"))  # type: ignore[arg-type]

    def dies(directory: Path, **_: object) -> None:
        (Path(directory) / "checkpoint.json").unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("services.files.durable.shutil.rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            store.collect(keep=1)
        with pytest.raises(KeyboardInterrupt):
            store.write(Position(1, 3), Lineage(step=3), dies)
    assert [one.position for one in store.newest_first()] == [Position(1, 2)]
    assert len(list(root.iterdir())) == 5, "a trainer does not clear what another of its epoch may be writing"
    store.begin_epoch(2, Position(1, 2))
    records = {f"epoch{epoch:06d}{kind}.json" for epoch in (1, 2) for kind in ("", ".copy")}
    assert {path.name for path in root.iterdir()} == {"ep000001-step000002", *records}


def test_an_epoch_is_begun_once(tmp_path: Path) -> None:
    store = CheckpointStore(JobDir(tmp_path))
    store.begin_epoch(3, Position(2, 40))
    with pytest.raises(FileExistsError):
        CheckpointStore(JobDir(tmp_path)).begin_epoch(3, Position(2, 20))
    assert store.forks() == {3: Position(2, 40)}


def test_where_an_epoch_forked_off_survives_the_loss_of_one_file_and_is_never_misread(tmp_path: Path) -> None:
    store, root = CheckpointStore(JobDir(tmp_path)), tmp_path / "checkpoints"
    store.begin_epoch(3, Position(2, 40))
    records = sorted(root.glob("epoch*.json"))
    assert len(records) == 2
    for record in records:
        text = record.read_text()
        for damaged in ("", text[:-3], text.replace("40", "41"), "5", "[]"):
            record.write_text(damaged)
            assert store.forks() == {3: Position(2, 40)}
        record.unlink()
        assert store.forks() == {3: Position(2, 40)}
        record.write_text(text)
    for record in records:
        record.write_text(text.replace("40", "41"))
    with pytest.raises(LostForkRecord, match="epoch 3"):
        store.forks()
    records[1].write_text('{"epoch": 2, "step": 40}')  # as the release before wrote it
    assert store.forks() == {3: Position(2, 40)}


def test_tokens_of_a_rolled_back_version_count_from_the_fork(tmp_path: Path) -> None:
    store = CheckpointStore(JobDir(tmp_path))
    store.begin_epoch(1, Position(0, 0))
    store.begin_epoch(2, Position(1, 20))
    versions = {37: Position(1, 37), 38: Position(2, 21)}
    ages = token_staleness(np.array([37, 38], np.int32), versions, Position(2, 25), store.forks())
    assert ages.tolist() == [5, 4]
