"""A job that keeps all of its logs compresses the old ones: every byte comes back, and the bound holds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from gspo_core.log.archive import pack, plain, plain_size
from gspo_core.log.batches import DamagedBatch, UnknownBatchSchema
from gspo_core.position import Position
from gspo_core.replay.past import Past
from services.files import batch_archive
from services.files.batch_archive import LogHistory, archived
from services.files.batch_log import BatchLog, batch_files, read_batch
from services.files.erasing import erase, erase_old, of_member
from services.files.job_dir import JobDir, positions_in
from tests.core.logged import groups

ONE_EPOCH = LogHistory(1, {1: Position(0, 0)})
MUCH = 1 << 30


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    job = JobDir(tmp_path / "job")
    for step in range(1, 7):
        BatchLog(job).write(1, step, groups(), {"version": step})
    return job


def put(job: JobDir, *steps: int, history: LogHistory = ONE_EPOCH, most_bytes: int = MUCH) -> None:
    log = BatchLog(job)
    log.remove(archived(job, {Position(history.epoch, step) for step in steps}, history, most_bytes))


def test_an_archived_log_reads_as_it_was(job: JobDir) -> None:
    log = BatchLog(job)
    before, sizes = [log.read(1, step) for step in range(1, 7)], [log.size(1, step) for step in range(1, 7)]
    data = job.batch(Position(1, 2)).read_bytes()
    put(job, 1, 2, 3)
    assert [at.step for at in log.written()] == [4, 5, 6]
    assert log.steps() == [(1, step) for step in range(1, 7)]
    assert plain(job.archived(Position(1, 2)).read_bytes()) == data
    for step, one in enumerate(before, start=1):
        again = log.read(1, step)
        assert (again.extra, [group.group for group in again.groups]) == (
            one.extra,
            [group.group for group in one.groups],
        )
        assert log.groups_of(1, step) == tuple(group.group for group in groups())
    assert [log.size(1, step) for step in range(1, 7)] == sizes
    assert [read_batch(path).step for path in batch_files(job.path)] == [1, 2, 3, 4, 5, 6]
    assert job.archived(Position(1, 2)).stat().st_size < len(data)


def test_an_archived_log_is_as_old_as_it_was(job: JobDir) -> None:
    """What is older than is to be kept is erased there too."""
    at = Position(1, 1)
    os.utime(job.batch(at), (1e9, 1e9))
    put(job, 1)
    assert job.archived(at).stat().st_mtime == 1e9
    assert not erase_old(job, "job-1", safe_until=None, before=1e9).erased
    assert erase_old(job, "job-1", safe_until=None, before=1e9 + 1).erased
    assert job.archived(at).stat().st_mtime == 1e9


def test_once_a_log_does_not_fit_none_follows(job: JobDir) -> None:
    """What is there begins with the first step and has no gaps, so that all of it can be trained again."""
    put(job, 1)
    each = job.archived(Position(1, 1)).stat().st_size
    put(job, 2, 3, most_bytes=5 * each // 2)
    put(job, 4, 5, most_bytes=MUCH)
    assert [at.step for at in positions_in(job.archive)] == [1, 2]
    assert [at.step for at in BatchLog(job).steps()] == [1, 2, 6]


def test_a_fork_begins_with_its_own_first_step(job: JobDir) -> None:
    put(job, 1, 2, 3, 4, history=LogHistory(1, {}, begun_after=2))
    assert [at.step for at in positions_in(job.archive)] == [3, 4]


def test_void_logs_are_removed_and_not_archived(job: JobDir) -> None:
    history = LogHistory(2, {2: Position(1, 2)})
    BatchLog(job).write(2, 3, groups(), {})
    log = BatchLog(job)
    log.remove(archived(job, set(log.written()), history, MUCH))
    assert positions_in(job.archive) == [(1, 1), (1, 2), (2, 3)]
    assert log.written() == []


def test_a_full_disk_loses_nothing(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write = batch_archive.write_once

    def full(path: Path, pieces: tuple[bytes]) -> None:
        if path.name.endswith("2"):
            raise OSError(28, os.strerror(28), str(path))
        write(path, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(batch_archive, "write_once", full)
        put(job, 1, 2, 3)
    assert [at.step for at in positions_in(job.archive)] == [1]
    assert [at.step for at in BatchLog(job).written()] == [2, 3, 4, 5, 6]
    put(job, 2, 3)
    assert [at.step for at in positions_in(job.archive)] == [1, 2, 3]


def test_a_trainer_that_died_between_the_two_files_is_followed(job: JobDir) -> None:
    """The log is in the archive and still in its old place; or what is in the archive is damaged."""
    archived(job, {Position(1, 1), Position(1, 2)}, ONE_EPOCH, MUCH)
    assert len(BatchLog(job).steps()) == 6
    path = job.archived(Position(1, 2))
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    put(job, 1, 2)
    assert path.read_bytes() == data
    assert [at.step for at in BatchLog(job).written()] == [3, 4, 5, 6]


def test_an_episode_is_erased_in_the_archive_too(job: JobDir) -> None:
    put(job, 1, 2)
    names = {one.key.job for group in groups() for one in group}
    [name] = names
    found = erase(job, name, of_member(4, 1), {}, safe_until=None)
    assert sorted(one.step for one in found.erased) == [1, 2, 3, 4, 5, 6]
    log, past = BatchLog(job), Past(job.path)
    for step in range(1, 7):
        assert log.read(1, step).erased == {(4, 1)}
        assert not past.is_whole(step)
        [gone] = [one for one in log.read(1, step).trajectories if (one.key.group, one.key.member) == (4, 1)]
        assert not any(segment.token_ids.any() for segment in gone.segments)
    assert [at.step for at in positions_in(job.archive)] == [1, 2]
    assert job.archived(Position(1, 1)).read_bytes()[:8] == b"GSPOARCH"


def test_an_episode_that_is_erased_while_its_log_is_archived_is_gone(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever archives has read the log; then it is erased; then the archive is written."""
    write = batch_archive.write_once
    [name] = {one.key.job for group in groups() for one in group}

    def late(path: Path, pieces: tuple[bytes]) -> None:
        erase(job, name, of_member(4, 1), {}, safe_until=None)
        write(path, pieces)

    monkeypatch.setattr(batch_archive, "write_once", late)
    put(job, 1)
    assert BatchLog(job).read(1, 1).erased == {(4, 1)}


@pytest.mark.parametrize("seed", range(50))
def test_a_byte_that_differs_is_refused(job: JobDir, seed: int) -> None:
    packed, chance = bytearray(pack(job.batch(Position(1, 1)).read_bytes())), random.Random(seed)
    packed[chance.randrange(len(packed))] ^= 1 << chance.randrange(8)
    path = job.batch(Position(1, 1))
    path.write_bytes(packed)
    with pytest.raises(Exception, match=r".") as raised:
        read_batch(path)
    assert type(raised.value).__name__ in ("DamagedBatchLog", "UnknownLogSchema")


def test_a_length_that_was_changed_costs_no_memory() -> None:
    packed = pack(bytes(10_000_000))
    assert plain_size(packed) == 10_000_000
    for length in (3, 2**63):
        changed = packed[:12] + length.to_bytes(8, "little") + packed[20:]
        with pytest.raises(DamagedBatch, match=r"has not the|cannot have"):
            plain(changed)
    with pytest.raises(UnknownBatchSchema, match="archived with the number 9"):
        plain(packed[:8] + (9).to_bytes(4, "little") + packed[12:])
