"""What is kept of trained tokens for people to look at: exact when whole, as good as none when not."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from gspo_core.types import EpisodeKey
from services.files.job_dir import JobDir
from services.files.trained_log import TrainedLog

LOGPROBS = {
    EpisodeKey("job-1", 7, 0): np.array([-0.5, np.nan, -1.25], np.float32),
    EpisodeKey("job-1", 7, 2): np.zeros(0, np.float32),
    EpisodeKey("job-1", 9, 1): np.array([-3.0], np.float32),
}


def test_what_was_written_is_read_bit_by_bit(tmp_path: Path) -> None:
    log = TrainedLog(JobDir(tmp_path))
    log.write(2, 31, LOGPROBS)
    found = log.read(2, 31)
    assert list(found) == [(7, 0), (7, 2), (9, 1)]
    assert all(found[key.group, key.member].tobytes() == values.tobytes() for key, values in LOGPROBS.items())


def test_what_is_missing_cut_or_damaged_is_nothing(tmp_path: Path) -> None:
    log = TrainedLog(JobDir(tmp_path))
    assert log.read(1, 1) == {}
    log.write(1, 1, LOGPROBS)
    whole = log.path(1, 1).read_bytes()
    for place in range(len(whole)):
        log.path(1, 1).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert log.read(1, 1) == {}
        log.path(1, 1).write_bytes(whole[:place])
        assert log.read(1, 1) == {}


def test_a_second_write_changes_nothing(tmp_path: Path) -> None:
    log = TrainedLog(JobDir(tmp_path))
    log.write(1, 1, LOGPROBS)
    log.write(1, 1, {})
    assert len(log.read(1, 1)) == 3


def test_only_what_is_named_is_removed(tmp_path: Path) -> None:
    log = TrainedLog(JobDir(tmp_path))
    for step in (1, 2, 3):
        log.write(1, step, LOGPROBS)
    log.remove([(1, 1), (1, 3), (2, 2)])
    assert [step for step in (1, 2, 3) if log.read(1, step)] == [2]


def test_what_a_killed_trainer_left_half_written_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = TrainedLog(JobDir(tmp_path))
    log.write(1, 1, LOGPROBS)
    with monkeypatch.context() as killed:
        killed.setattr("os.fsync", interrupted)
        killed.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process tidies nothing
        with pytest.raises(KeyboardInterrupt):
            log.write(2, 2, LOGPROBS)
    names = [path.name for path in log.path(1, 1).parent.iterdir()]
    assert len(names) == 2
    log.remove_unfinished(2)
    assert sorted(path.name for path in log.path(1, 1).parent.iterdir()) == sorted(names), "it is that trainer's own"
    log.remove_unfinished(3)
    assert [path.name for path in log.path(1, 1).parent.iterdir()] == [log.path(1, 1).name]


def interrupted(_: int) -> NoReturn:
    raise KeyboardInterrupt
