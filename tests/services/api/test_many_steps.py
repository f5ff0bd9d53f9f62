"""A job of many steps is looked at without looking at all of them: counted in files, not in seconds."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gspo_core.log import layout
from gspo_core.position import Position
from gspo_core.replay.past import Past
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, Trajectory
from services.api.views.checkpoint_views import described_of, places_of
from services.api.views.history import GroupNotKept, TrainedHistory
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir, JobsDir

STEPS, JOB = 300, "job_a"


def group(number: int) -> Group:
    outcome = Outcome(StopReason.COMPLETED, 1.0)
    ids, mask, told = np.array([1, 2], np.int32), np.array([False, True]), np.array([0, -1], np.float32)
    segment = Segment(EpisodeKey(JOB, number, 0), 0, 0, 0, 0, 0, 1.0, "e", ids, mask, told, outcome=outcome)
    return Group(JOB, number, Split.TRAIN, 0, 1, (Trajectory((segment,)),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Half of the groups were dropped on the way, so that their numbers run ahead of the steps."""
    log = BatchLog(JobDir(tmp_path / JOB))
    for step in range(1, STEPS + 1):
        log.write(1, step, [group(2 * step)], {})
    return tmp_path / JOB


def test_a_group_is_found_by_halving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[int, int]] = []
    original = BatchLog.groups_of

    def counted(self: BatchLog, epoch: int, step: int) -> tuple[int, ...]:
        looked.append((epoch, step))
        return original(self, epoch, step)

    monkeypatch.setattr(BatchLog, "groups_of", counted)
    job: Any = SimpleNamespace(id=JOB, step=STEPS, epoch=1, spec_data={"groups_per_step": 1})
    for step in (1, 2, 150, 299, 300):
        looked.clear()
        position, found = TrainedHistory(JobsDir(folder.parent)).find(job, 2 * step)
        assert (position.step, found.group) == (step, 2 * step)
        assert len(looked) < 15
    with pytest.raises(GroupNotKept):
        TrainedHistory(JobsDir(folder.parent)).find(job, 7)


def test_a_directory_is_listed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    original = os.listdir

    def counted(place: Any) -> list[str]:
        listed.append(Path(place).name)
        return original(place)

    monkeypatch.setattr(os, "listdir", counted)
    past = Past(folder)
    assert len(past.batches) == STEPS
    past.batch(STEPS)
    assert past.checkpoints == []
    assert listed.count(layout.BATCHES) == 1
    assert len(listed) < 6


def test_only_the_checkpoints_of_a_page_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobDir(tmp_path / JOB)
    for step in range(1, 41):
        (job.checkpoints / layout.step_name(Position(1, step))).mkdir(parents=True)
    looked: list[int] = []
    original = CheckpointStore.describe

    def counted(self: CheckpointStore, at: Position) -> Any:
        looked.append(at.step)
        return original(self, at)

    monkeypatch.setattr(CheckpointStore, "describe", counted)
    places = places_of(job)
    assert [one.id for one in places[:2]] == [f"{JOB}/1/40", f"{JOB}/1/39"]
    assert [one.step for one in described_of(job, places[5:8])] == [35, 34, 33]
    assert looked == [35, 34, 33]


@pytest.mark.parametrize("name", ["ep000001-step000001", "ep1000000-step2345678"])
def test_written_names_are_parsed(name: str) -> None:
    at = layout.parse_step_name(name)
    assert at is not None
    assert layout.step_name(at) == name


@pytest.mark.parametrize(
    "name", ["ep0000001-step000001", "ep000001-step0000001", "ep00001-step000001", "ep000001-step1"]
)
def test_names_that_are_never_written_are_none(name: str) -> None:
    assert layout.parse_step_name(name) is None
