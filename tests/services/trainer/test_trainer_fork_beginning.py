"""What a fork begins with is trained again in a process of its own, whose end is told for what it was."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from gspo_core.learner import UnsupportedModel
from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.replay import state_process
from gspo_core.replay.past import DamagedPast, digests
from gspo_core.replay.state_process import DAMAGED, UNSUPPORTED
from gspo_core.spec import ParentSpec
from services.files.checkpoints import CheckpointStore
from services.files.disk_space import NoRoom
from services.files.job_dir import JobDir
from services.files.origin import bring
from services.trainer.past.origin import seed
from services.trainer.telling.failure import AttemptFailed, JobFailure
from tests.core.learner_support import write_model
from tests.core.past_kit import make_past, spec_of


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> JobDir:
    """Of four steps, with checkpoints after the second and the fourth."""
    folder = tmp_path_factory.mktemp("parent")
    make_past(folder / "job_parent", spec_of(write_model(folder / "model")), steps=4)
    return JobDir(folder / "job_parent")


@pytest.fixture
def job(parent: JobDir, tmp_path: Path) -> JobDir:
    child = JobDir(tmp_path / "job_child")
    bring(parent, child, ParentSpec(job=parent.id, step=3))
    return child


def ends_with(patch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """What trains again does this instead."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    patch.setattr(sys, "executable", str(program))


def seeded(job: JobDir, step: int = 3) -> list[Position]:
    checkpoints = CheckpointStore(job)
    seed(job, spec_of(Path("model"), parent={"job": "job_parent", "step": step}), checkpoints)
    return [one.position for one in checkpoints.newest_first()]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo step 3 trained again >&2; kill -9 $$", "SIGKILL"),
        ("echo torch.OutOfMemoryError: CUDA out of memory. >&2; exit 1", "CUDA out of memory"),
        ("exit 120", "exit status 120"),
        # What it got over is not what ended it.
        ("echo '[Errno 28] No space left on device' >&2; echo 'KeyError: weight' >&2; exit 1", "KeyError"),
    ],
)
def test_a_process_that_ends_early_fails_the_attempt_and_not_the_job(
    job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    ends_with(monkeypatch, tmp_path, script)
    with pytest.raises(AttemptFailed, match=message) as raised:
        seeded(job)
    assert raised.value.code == "process_lost"
    assert CheckpointStore(job).positions() == []


@pytest.mark.parametrize(
    "said",
    [
        "OSError: [Errno 28] No space left on device",
        "safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)",
    ],
)
def test_a_full_disk_is_told_as_one(job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    ends_with(monkeypatch, tmp_path, f"echo '{said}' >&2; exit 1")
    with pytest.raises(NoRoom, match="No space left"):
        seeded(job)


def test_states_are_written_where_there_is_room_for_them(
    job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where temporary files usually go there may be room for little. What a killed trainer leaves here is swept."""
    ends_with(monkeypatch, tmp_path, f'echo "$6 $TMPDIR" > {tmp_path}/said; exit 120')
    with pytest.raises(AttemptFailed):
        seeded(job)
    for place in (tmp_path / "said").read_text().split():
        assert Path(place).parents[1] == job.checkpoints
        assert Path(place).parent.name.startswith(".tmp-ep000000-")
    assert [*job.checkpoints.iterdir()] == []


@pytest.mark.usefixtures("warm_children")
def test_what_is_damaged_fails_the_job(job: JobDir) -> None:
    [log] = job.origin.batches.iterdir()
    data = log.read_bytes()
    log.unlink()  # a link to the parent's
    log.write_bytes(data[:-9])
    with pytest.raises(JobFailure, match="job_parent is damaged: DamagedPast") as raised:
        seeded(job)
    assert raised.value.code == "data_damaged"


@pytest.mark.parametrize(
    ("error", "end"),
    [(ValueError("an odd number"), DAMAGED), (DamagedPast("cut off"), DAMAGED), (UnsupportedModel("new"), UNSUPPORTED)],
)
def test_errors_that_last_are_told_from_those_that_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, end: int
) -> None:
    def arrive(*_: object) -> None:
        raise error

    monkeypatch.setattr(state_process, "arrive", arrive)
    assert state_process.main(["past", "3", "target"]) == end
    assert str(error) in capsys.readouterr().err


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "learner.json", "../checkpoint.json"])
def test_a_damaged_beginning_is_written_again(parent: JobDir, tmp_path: Path, file: str) -> None:
    """What it was brought is whole."""
    job = JobDir(tmp_path / "job_child")
    bring(parent, job, ParentSpec(job=parent.id, step=2))
    assert seeded(job, step=2) == [Position(0, 2)]
    state = CheckpointStore(job).learner_dir(Position(0, 2))
    before = digests(state.parent)
    changed(state / file)
    assert seeded(job, step=2) == [Position(0, 2)]
    assert digests(state.parent) == before


def test_an_intact_checkpoint_and_one_of_another_release_stay(parent: JobDir, tmp_path: Path) -> None:
    job, checkpoints = JobDir(tmp_path / "job_child"), CheckpointStore(JobDir(tmp_path / "job_child"))
    bring(parent, job, ParentSpec(job=parent.id, step=2))
    seeded(job, step=2)
    state = checkpoints.learner_dir(Position(0, 2))
    checkpoints.write(Position(1, 3), Lineage(step=3), lambda directory: shutil.copytree(state, directory))
    changed(state / "rank-00000.safetensors")
    before = digests(job.checkpoints)
    seeded(job, step=2)
    assert digests(job.checkpoints) == before
    manifest = json.loads((state / "learner.json").read_bytes())
    for at in checkpoints.positions():
        checkpoints.remove(at)

    def of_another_release(directory: Path) -> None:
        directory.mkdir()
        (directory / "learner.json").write_text(json.dumps(manifest | {"format": 99}))

    checkpoints.write(Position(0, 2), Lineage(step=2), of_another_release)
    before = digests(job.checkpoints)
    seeded(job, step=2)
    assert digests(job.checkpoints) == before


@pytest.mark.usefixtures("warm_children")
def test_a_model_that_is_gone_is_told_as_one(parent: JobDir, job: JobDir) -> None:
    model, away = parent.path.with_name("model"), parent.path.with_name("away")
    model.rename(away)
    try:
        with pytest.raises(UnsupportedModel, match="holds no config"):
            seeded(job)
    finally:
        away.rename(model)
    assert seeded(job) == [Position(0, 3)]
