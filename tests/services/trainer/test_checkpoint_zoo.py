"""Whatever has become of the files of a job, its trainer goes on from the right ones, and says what it passed over."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gspo_core import codec
from gspo_core.learner import Learner, check_state, state
from gspo_core.log import batches, checkpoints
from gspo_core.log.lineage import Lineage
from gspo_core.log.settings import Tuning
from gspo_core.position import Position
from services.files.batch_log import BatchLog, LoggedBatch, removable_batches
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.trainer.past.recovery import Recovered, recover
from services.trainer.past.replay import train_again
from services.trainer.telling.failure import AttemptFailed, JobFailure
from tests.core.learner_support import write_model
from tests.services.trainer.loop_kit import fingerprint, loop_spec
from tests.services.trainer.test_trainer_replay import group, logged, make_learner

STEPS = 4
NEWEST = "ep000001-step000004"
FILES = ("checkpoint.json", "learner/learner.json", "learner/rank-00000.safetensors")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[int, str]]:
    """A job's directory with four logged steps and checkpoints of the second and fourth; what each step had made."""
    job_dir = tmp_path_factory.mktemp("whole") / "job_a"
    log, store, learner, lineage = (
        BatchLog(JobDir(job_dir)),
        CheckpointStore(JobDir(job_dir)),
        make_learner(model_dir),
        Lineage(),
    )
    store.begin_epoch(1, Position(0, 0))
    made = {}
    for step in range(1, STEPS + 1):
        logged(log, 1, step, [group(step - 1, [1.0, 0.0, 0.5])])
        train_again(learner, lineage, log.read(1, step), tuning(model_dir))
        made[step] = fingerprint(learner)
        if step % 2 == 0:
            store.write(Position(1, step), lineage, learner.save_state)
    return job_dir, made


@pytest.fixture
def job_dir(whole: tuple[Path, Mapping[int, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "job_a"))


def tuning(model_dir: Path) -> Tuning:
    return Tuning(loop_spec(model_dir))


def recovered(job_dir: Path, model_dir: Path, epoch: int = 2) -> tuple[Recovered, Learner]:
    learner = make_learner(model_dir)
    return recover(
        learner, CheckpointStore(JobDir(job_dir)), BatchLog(JobDir(job_dir)), epoch, tuning(model_dir)
    ), learner


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[2 * len(data) // 3] ^= 1
    path.write_bytes(bytes(data))


def test_the_newest_one_is_loaded_where_nothing_is_wrong(
    whole: tuple[Path, Mapping[int, str]], job_dir: Path, model_dir: Path
) -> None:
    """What a dead writer left half-done beside it is not seen."""
    half = job_dir / "checkpoints" / ".tmp-ep000001-0123"
    shutil.copytree(job_dir / "checkpoints" / NEWEST, half)
    (half / "checkpoint.json").unlink()
    found, learner = recovered(job_dir, model_dir)
    assert (found.saved, found.reached, found.remarks) == (Position(1, 4), Position(1, 4), [])
    assert fingerprint(learner) == whole[1][4]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink], ids=["truncated", "flipped", "missing"])
def test_a_damaged_one_is_passed_over_and_the_logs_lead_to_the_same_weights(
    damage: Callable[[Path], None],
    file: str,
    whole: tuple[Path, Mapping[int, str]],
    job_dir: Path,
    model_dir: Path,
) -> None:
    damage(job_dir / "checkpoints" / NEWEST / file)
    found, learner = recovered(job_dir, model_dir)
    assert (found.saved, found.reached) == (Position(1, 2), Position(1, 4))
    assert [one.kind for one in found.remarks] == ["checkpoint_skipped"]
    assert NEWEST in found.remarks[0].message
    assert fingerprint(learner) == whole[1][4]
    assert list(found.lineage.owed()) == [4, 5, 6, 7]


def test_a_number_that_was_changed_is_damage_although_all_can_be_read(job_dir: Path, model_dir: Path) -> None:
    path = job_dir / "checkpoints" / NEWEST / "checkpoint.json"
    record = json.loads(path.read_text())
    record["lineage"]["num_dropped"] += 1
    path.write_text(json.dumps(record, indent=1))
    found, _ = recovered(job_dir, model_dir)
    assert (found.saved, found.lineage.num_dropped) == (Position(1, 2), 0)
    assert "sha256" in found.remarks[0].message


def test_what_stands_in_for_a_damaged_one_is_kept(
    whole: tuple[Path, Mapping[int, str]], job_dir: Path, model_dir: Path
) -> None:
    flipped(job_dir / "checkpoints" / NEWEST / FILES[2])
    store, log = CheckpointStore(JobDir(job_dir)), BatchLog(JobDir(job_dir))
    log.remove(removable_batches(log.steps(), store.collect(1, check_state), 0))
    assert log.steps() == [(1, 3), (1, 4)]
    found, learner = recovered(job_dir, model_dir)
    assert (found.saved, found.reached) == (Position(1, 2), Position(1, 4))
    assert fingerprint(learner) == whole[1][4]


@pytest.mark.parametrize("place", ["gspo_core.log.history._sha256", "gspo_core.learner.state._sha256"])
def test_what_cannot_be_read_just_now_is_not_passed_over(
    place: str, job_dir: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole: whoever went on without it would train anew what is in it, and remove it in the end."""

    def refused(path: Path) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(place, refused)
    with pytest.raises(AttemptFailed, match="Permission denied") as failed:
        recovered(job_dir, model_dir)
    assert failed.value.code == "data_unreadable"


def test_a_sector_that_is_lost_is_damage(
    whole: tuple[Path, Mapping[int, str]], job_dir: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = state._sha256

    def lost(path: Path) -> str:
        if NEWEST in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path)

    monkeypatch.setattr(state, "_sha256", lost)
    found, learner = recovered(job_dir, model_dir)
    assert (found.saved, found.reached) == (Position(1, 2), Position(1, 4))
    assert fingerprint(learner) == whole[1][4]


def test_a_zombie_may_save_and_collect_while_its_successor_looks(
    whole: tuple[Path, Mapping[int, str]], job_dir: Path, model_dir: Path
) -> None:
    """What was there when it looked is gone when it is loaded, and what took its place was not there then."""
    zombie, hidden = CheckpointStore(JobDir(job_dir)), job_dir / "hidden"
    (job_dir / "checkpoints" / NEWEST).rename(hidden)
    learner = make_learner(model_dir)
    prepare, seen = learner.prepare_state, list[str]()

    def late(directory: Path) -> Callable[[], None]:
        seen.append(directory.parent.name)
        if len(seen) == 1:
            hidden.rename(job_dir / "checkpoints" / NEWEST)
            zombie.collect(1, check_state)
        return prepare(directory)

    learner.prepare_state = late  # type: ignore[method-assign]
    found = recover(learner, CheckpointStore(JobDir(job_dir)), BatchLog(JobDir(job_dir)), 2, tuning(model_dir))
    assert seen == ["ep000001-step000002", NEWEST]
    assert (found.saved, found.reached) == (Position(1, 4), Position(1, 4))
    assert fingerprint(learner) == whole[1][4]


def test_a_record_of_an_epoch_that_is_lost_twice_ends_the_job_with_the_reason(job_dir: Path, model_dir: Path) -> None:
    for record in (job_dir / "checkpoints").glob("epoch*.json"):
        truncated(record)
    with pytest.raises(JobFailure, match="where epoch 1 forked off") as failed:
        recovered(job_dir, model_dir)
    assert failed.value.code == "data_damaged"


def test_a_renamed_one_is_passed_over(job_dir: Path, model_dir: Path) -> None:
    root = job_dir / "checkpoints"
    (root / NEWEST).rename(root / "ep000001-step000009")
    found, _ = recovered(job_dir, model_dir)
    assert found.saved == Position(1, 2)
    assert "renamed" in found.remarks[0].message


def test_all_of_them_are_damaged_and_the_logs_are_enough(
    whole: tuple[Path, Mapping[int, str]], job_dir: Path, model_dir: Path
) -> None:
    for path in (job_dir / "checkpoints").glob("ep*/learner/rank-*"):
        flipped(path)
    found, learner = recovered(job_dir, model_dir)
    assert (found.reached, len(found.remarks)) == (Position(1, 4), 2)
    assert fingerprint(learner) == whole[1][4]


def test_a_damaged_log_ends_what_is_trained_again_and_is_named(
    whole: tuple[Path, Mapping[int, str]], job_dir: Path, model_dir: Path
) -> None:
    flipped(job_dir / "checkpoints" / NEWEST / FILES[2])
    flipped(job_dir / "batches" / "ep000001-step000004")
    found, learner = recovered(job_dir, model_dir)
    assert found.reached == Position(1, 3)
    assert [one.kind for one in found.remarks] == ["checkpoint_skipped", "batch_log_damaged"]
    assert "ep000001-step000004" in found.remarks[1].message
    assert fingerprint(learner) == whole[1][3]


def test_what_an_older_epoch_saves_when_it_wakes_up_is_void(
    whole: tuple[Path, Mapping[int, str]], job_dir: Path, model_dir: Path
) -> None:
    """Epoch 2 had gone on from step 2 when epoch 1, stopped until then, saved its step 4."""
    CheckpointStore(JobDir(job_dir)).begin_epoch(2, Position(1, 2))
    found, learner = recovered(job_dir, model_dir, epoch=3)
    assert (found.saved, found.reached) == (Position(1, 2), Position(1, 2))
    assert "had already lost the job" in found.remarks[0].message
    assert fingerprint(learner) == whole[1][2]


def test_what_is_whole_and_does_not_fit_is_no_damage(job_dir: Path, model_dir: Path, tmp_path: Path) -> None:
    """Passing over it would quietly start again from the other model."""
    other = Path(shutil.copytree(model_dir, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"note": "another one"}))
    before = sorted(job_dir.rglob("*"))
    with pytest.raises(JobFailure, match=r"intact and does not fit the job: .* is a state of another model") as failed:
        recovered(job_dir, other)
    assert failed.value.code == "model_invalid"
    assert sorted(job_dir.rglob("*")) == before


# Releases


class OtherNumber:
    """Of a header: writes that the rest is of schema 99."""

    def __init__(self, header: struct.Struct) -> None:
        self._header = header

    def pack(self, magic: bytes, schema: int, *rest: int) -> bytes:
        return self._header.pack(magic, 99, *rest)


def test_a_checkpoint_of_the_previous_format_is_read(
    whole: tuple[Path, Mapping[int, str]], job_dir: Path, model_dir: Path
) -> None:
    path = job_dir / "checkpoints" / NEWEST
    lineage = json.loads((path / "checkpoint.json").read_text())["lineage"]
    (path / "checkpoint.json").unlink()
    (path / "lineage.json").write_text(json.dumps(lineage))
    found, learner = recovered(job_dir, model_dir)
    assert (found.saved, found.remarks) == (Position(1, 4), [])
    assert found.lineage.step == 4
    assert fingerprint(learner) == whole[1][4]


@pytest.mark.parametrize(
    ("module", "name", "value", "said"),
    [
        (checkpoints, "FORMAT", 3, "format 3"),
        (state, "FORMAT", 0, "format 0"),
        (batches, "_HEADER", OtherNumber(batches._HEADER), "schema 99"),
        (codec, "_PREFIX", OtherNumber(codec._PREFIX), "schema 99"),
    ],
    ids=["checkpoint", "learner state", "batch log", "segments in a batch log"],
)
def test_what_another_release_wrote_is_refused_by_name(
    module: object,
    name: str,
    value: object,
    said: str,
    job_dir: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passing over it would quietly start again from an older step. Nothing is removed."""
    with monkeypatch.context() as other_release:
        other_release.setattr(module, name, value)
        logged(BatchLog(JobDir(job_dir)), 1, 5, [group(4, [1.0, 0.0])])
        if module in (checkpoints, state):
            learner = make_learner(model_dir)
            CheckpointStore(JobDir(job_dir)).write(Position(1, 5), Lineage(step=5), learner.save_state)
    before = sorted(job_dir.rglob("*"))
    with pytest.raises(JobFailure, match=said) as refused:
        recovered(job_dir, model_dir)
    assert refused.value.code == "incompatible_release"
    assert sorted(job_dir.rglob("*")) == before


def test_a_long_way_is_saved_in_between(
    whole: tuple[Path, Mapping[int, str]], job_dir: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that is lost on the way has brought the next one further, whatever is wrong with the newest one."""
    store, log = CheckpointStore(JobDir(job_dir)), BatchLog(JobDir(job_dir))
    truncated(job_dir / "checkpoints" / NEWEST / "checkpoint.json")
    shutil.rmtree(job_dir / "checkpoints" / "ep000001-step000002")
    read = BatchLog.read

    def lost(self: BatchLog, epoch: int, step: int) -> LoggedBatch:
        if step == 4:
            raise KeyboardInterrupt
        return read(self, epoch, step)

    with monkeypatch.context() as patch:
        patch.setattr(BatchLog, "read", lost)
        with pytest.raises(KeyboardInterrupt):
            recover(make_learner(model_dir), store, log, 2, tuning(model_dir), checkpoint_every=3)
    heir = make_learner(model_dir)
    found = recover(heir, store, log, 3, tuning(model_dir), checkpoint_every=3)
    assert (found.saved, found.reached) == (Position(1, 3), Position(1, 4))
    assert fingerprint(heir) == whole[1][4]
    assert list(found.lineage.owed()) == [4, 5, 6, 7]


def test_what_is_kept_for_good_is_made_up_for(
    job_dir: Path, whole: tuple[Path, Mapping[int, str]], model_dir: Path
) -> None:
    """Its trainer may have died after the log of the step and before the checkpoint."""
    store, log = CheckpointStore(JobDir(job_dir)), BatchLog(JobDir(job_dir))
    shutil.rmtree(job_dir / "checkpoints" / NEWEST)
    recover(make_learner(model_dir), store, log, 2, tuning(model_dir), is_for_good=lambda step: step == 3)
    assert store.positions() == [Position(1, 2), Position(1, 3)]
    learner = make_learner(model_dir)
    learner.load_state(store.learner_dir(Position(1, 3)))
    assert fingerprint(learner) == whole[1][3]
