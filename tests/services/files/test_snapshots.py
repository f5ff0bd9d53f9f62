"""Snapshots in a bucket: what is new is sent, what is damaged or in the way is refused, a job comes back alone."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gspo_core.cli import main
from services.files import erasing, snapshots
from services.files.backup import JobsAreThere, LaterLayout
from services.files.bucket import Bucket, BucketRefused
from services.files.snapshots import RestoreConflict, SnapshotDamaged, Tally, newest, prune, restore, save

A, B = "job_a", "job_b"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def accept(root: Path, job: str, model: str = "hub/model") -> None:
    record = {"schema": 1, "spec": json.dumps({"model": model}), "digest": job, "created_at": "", "owner": ""}
    write(root / "jobs" / job / "job.json", json.dumps(record))
    write(root / "jobs" / job / "batches" / "ep000001-step000001", f"tokens of {job}")
    write(root / "jobs" / job / "checkpoints" / "ep000001-step000001" / "learner" / "state", f"moments of {job}")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    root = tmp_path / "here"
    for job in (A, B):
        accept(root, job)
    for name in ("environments/shop/00000001.json", "audit.jsonl", "keys/k.json", "redis/log", "secrets/api/key"):
        write(root / name, f"what is in {name}")
    write(root / "jobs" / A / ".tmp-1", "half")
    return root


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket.at(f"file://{tmp_path}/bucket")


def contents(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def saved_of(root: Path) -> dict[str, str]:
    own = ("redis/", "secrets/")
    return {name: text for name, text in contents(root).items() if not name.startswith(own) and ".tmp-" not in name}


def test_what_is_saved_comes_back_and_a_second_snapshot_sends_what_is_new(
    here: Path, bucket: Bucket, tmp_path: Path
) -> None:
    first, second = Tally(), Tally()
    save(here, bucket, first)
    assert first.num_files == len(saved_of(here))
    write(here / "jobs" / A / "batches" / "ep000001-step000002", "news")
    with (here / "audit.jsonl").open("a") as file:
        file.write("more")
    snapshot = save(here, bucket, second)
    assert second.num_files == 2
    assert newest(bucket) == snapshot
    assert snapshot.jobs == [A, B]
    restore(tmp_path / "there", bucket, snapshot, Tally())
    assert contents(tmp_path / "there") == saved_of(here)


def test_a_file_that_grows_is_cut_where_it_was(
    here: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is that of what is sent, although it grows in between."""
    metrics = here / "jobs" / A / "metrics.jsonl"
    write(metrics, "first\n")
    put = Bucket.put

    def grow(self: Bucket, name: str, pieces: Iterator[bytes] | bytes) -> None:
        with metrics.open("a") as file:
            file.write("more\n")
        put(self, name, pieces)

    monkeypatch.setattr(Bucket, "put", grow)
    restore(tmp_path / "there", bucket, save(here, bucket, Tally()), Tally())
    found = (tmp_path / "there" / "jobs" / A / "metrics.jsonl").read_text()
    assert found.startswith("first\n")
    assert metrics.read_text().startswith(found)


def test_one_job_comes_back_beside_others_with_what_it_needs(here: Path, bucket: Bucket, tmp_path: Path) -> None:
    there = tmp_path / "there"
    accept(there, "job_c")
    write(there / "audit.jsonl", "its own")
    restore(there, bucket, save(here, bucket, Tally()), Tally(), [A])
    found = contents(there)
    assert {name: text for name, text in found.items() if A in name} == {
        name: text for name, text in saved_of(here).items() if A in name
    }
    assert found["audit.jsonl"] == "its own"
    assert "environments/shop/00000001.json" in found
    assert not [name for name in found if B in name or name.startswith("keys/")]


def test_two_histories_do_not_mix(here: Path, bucket: Bucket, tmp_path: Path) -> None:
    snapshot = save(here, bucket, Tally())
    with pytest.raises(JobsAreThere, match="job_a"):
        restore(here, bucket, snapshot, Tally())
    with pytest.raises(JobsAreThere, match="job_b"):
        restore(here, bucket, snapshot, Tally(), [B])
    with pytest.raises(RestoreConflict, match="has no job job_x"):
        restore(tmp_path / "there", bucket, snapshot, Tally(), ["job_x"])
    write(tmp_path / "there" / "environments" / "shop" / "00000001.json", "another shop")
    with pytest.raises(RestoreConflict, match=r"00000001\.json is there and differs"):
        restore(tmp_path / "there", bucket, snapshot, Tally(), [A])
    assert not (tmp_path / "there" / "jobs" / A / "job.json").exists()


def test_a_changed_byte_is_refused_and_the_job_does_not_appear(here: Path, bucket: Bucket, tmp_path: Path) -> None:
    snapshot = save(here, bucket, Tally())
    saved = snapshot.files[f"jobs/{A}/batches/ep000001-step000001"]
    damaged = tmp_path / "bucket" / saved.object_name
    good = damaged.read_bytes()
    damaged.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    there = tmp_path / "there"
    with pytest.raises(SnapshotDamaged, match=saved.sha256):
        restore(there, bucket, snapshot, Tally())
    assert not list(there.glob("jobs/*/job.json"))
    assert not list(there.rglob(".tmp-*"))
    damaged.write_bytes(good)
    restore(there, bucket, snapshot, Tally())
    assert contents(there) == saved_of(here)


def test_a_restore_that_broke_off_is_gone_on_with(
    here: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, num_read = save(here, bucket, Tally()), 0
    get = Bucket.get

    def break_off(self: Bucket, name: str) -> Iterator[bytes]:
        nonlocal num_read
        num_read += 1
        if num_read == 4:
            raise BucketRefused("cut off")
        return get(self, name)

    with monkeypatch.context() as broken:
        broken.setattr(Bucket, "get", break_off)
        with pytest.raises(BucketRefused, match="cut off"):
            restore(tmp_path / "there", bucket, snapshot, Tally())
    again = Tally()
    restore(tmp_path / "there", bucket, snapshot, again)
    assert again.num_files < len(snapshot.files)
    assert contents(tmp_path / "there") == saved_of(here)


@pytest.mark.parametrize("only", [None, [A, B]])
def test_a_restore_that_broke_off_at_the_last_job_is_gone_on_with(
    here: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: list[str] | None
) -> None:
    snapshot, there, get = save(here, bucket, Tally()), tmp_path / "there", Bucket.get
    missing = snapshot.files[f"jobs/{B}/job.json"].object_name

    def break_off(self: Bucket, name: str) -> Iterator[bytes]:
        if name == missing:
            raise BucketRefused("cut off")
        return get(self, name)

    with monkeypatch.context() as broken:
        broken.setattr(Bucket, "get", break_off)
        with pytest.raises(BucketRefused, match="cut off"):
            restore(there, bucket, snapshot, Tally(), only)
    assert (there / "jobs" / A / "job.json").exists()
    other = save(here, bucket, Tally())
    with pytest.raises(JobsAreThere, match=A):
        restore(there, bucket, other, Tally(), only)
    write(there / "jobs" / A / "batches" / "ep000002-step000002", "it has gone on since")
    with pytest.raises(JobsAreThere, match=A):
        restore(there, bucket, snapshot, Tally(), only)
    (there / "jobs" / A / "batches" / "ep000002-step000002").unlink()
    restore(there, bucket, snapshot, Tally(), only)
    assert {name for name in contents(there) if name.startswith("jobs/")} == {
        name for name in saved_of(here) if name.startswith("jobs/")
    }
    with pytest.raises(JobsAreThere, match=A):
        restore(there, bucket, snapshot, Tally(), only)


def test_a_model_of_links_in_the_data_directory_comes_back_with_it(bucket: Bucket, tmp_path: Path) -> None:
    here, model = tmp_path / "here", tmp_path / "here" / "models" / "m"
    write(model / "config.json", "{}")
    write(tmp_path / "blob", "weights")
    (model / "model.safetensors").symlink_to(tmp_path / "blob")
    accept(here, A, str(model))
    snapshot = save(here, bucket, Tally())
    shutil.rmtree(here)
    restore(here, bucket, snapshot, Tally())
    assert (model / "model.safetensors").read_text() == "weights"


@pytest.mark.parametrize("tick_ns", [1, 100, 1_000_000_000])
def test_an_erased_log_is_sent_again_even_if_it_is_as_long_as_before(
    here: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tick_ns: int
) -> None:
    utime = os.utime

    def coarse(path: int, *, ns: tuple[int, int]) -> None:
        utime(path, ns=(ns[0], ns[1] // tick_ns * tick_ns))

    log = here / "jobs" / A / "batches" / "ep000001-step000001"
    old = int(time.time()) - 3600
    os.utime(log, (old, old))
    save(here, bucket, Tally())
    monkeypatch.setattr(os, "utime", coarse)
    erasing._replace(log, log.read_bytes()[::-1])
    monkeypatch.undo()
    restore(tmp_path / "there", bucket, save(here, bucket, Tally()), Tally())
    assert contents(tmp_path / "there") == saved_of(here)
    assert abs(log.stat().st_mtime - old) <= 2


@pytest.mark.parametrize("place", ["models", "here/models", "here/linked"])
def test_a_model_of_links_is_saved_with_what_they_name(bucket: Bucket, tmp_path: Path, place: str) -> None:
    """As the cache of a model hub has them."""
    here, blob, model = tmp_path / "here", tmp_path / "blobs" / "ab12", tmp_path / place / "m"
    write(blob, "{}")
    if place == "here/linked":
        write(tmp_path / "elsewhere" / "m" / "config.json", "{}")
        here.mkdir()
        (here / "linked").symlink_to(tmp_path / "elsewhere")
    else:
        model.mkdir(parents=True)
        (model / "config.json").symlink_to(blob)
        (model / "gone.json").symlink_to(tmp_path / "nowhere")
    accept(here, A, str(model))
    snapshot = save(here, bucket, Tally())
    assert list(snapshot.models) == [str(model)]
    for folder in {model.parent, tmp_path / "elsewhere", tmp_path / "blobs"}:
        shutil.rmtree(folder, ignore_errors=True)
    (here / "linked").unlink(missing_ok=True)
    restore(tmp_path / "there", bucket, snapshot, Tally(), with_models=True)
    assert (model / "config.json").read_text() == "{}"


def test_models_elsewhere_are_written_where_they_were_if_that_is_asked_for(bucket: Bucket, tmp_path: Path) -> None:
    here, model = tmp_path / "here", tmp_path / "models" / "m"
    write(model / "config.json", "{}")
    accept(here, A, str(model))
    snapshot = save(here, bucket, Tally())
    (model / "config.json").unlink()
    restore(tmp_path / "there", bucket, snapshot, Tally())
    assert not (model / "config.json").exists()
    restore(tmp_path / "elsewhere", bucket, snapshot, Tally(), with_models=True)
    assert (model / "config.json").read_text() == "{}"


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "secrets/api/key", "jobs/../../x"])
def test_a_snapshot_cannot_name_a_file_elsewhere(here: Path, bucket: Bucket, path: str) -> None:
    name = save(here, bucket, Tally()).name
    place = f"{snapshots.SNAPSHOTS}/{name}.json"
    record = json.loads(b"".join(bucket.get(place)))
    record["files"][path] = [1, 1, "0" * 64]
    bucket.put(place, json.dumps(record).encode())
    with pytest.raises(SnapshotDamaged, match="no file of a snapshot"):
        newest(bucket)


def test_a_model_is_elsewhere_where_its_path_only_begins_with_the_data_directory(
    bucket: Bucket, tmp_path: Path
) -> None:
    """Jobs may name such paths: their snapshots are good, and it is written only if that is asked for."""
    here, there, model = tmp_path / "here", tmp_path / "there", tmp_path / "m"
    write(model / "config.json", "{}")
    there.mkdir()
    accept(here, A, f"{there}/../m")
    snapshot = snapshots.read(bucket, save(here, bucket, Tally()).name)
    (model / "config.json").unlink()
    restore(there, bucket, snapshot, Tally())
    assert not (model / "config.json").exists()
    there.rename(tmp_path / "other")
    there.mkdir()
    restore(there, bucket, snapshot, Tally(), with_models=True)
    assert (model / "config.json").read_text() == "{}"


def test_a_snapshot_of_a_later_release_is_refused(here: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(snapshots, "LAYOUT", snapshots.LAYOUT + 1)
        save(here, bucket, Tally())
    with pytest.raises(LaterLayout, match="restore it with that release"):
        newest(bucket)


def test_pruning_keeps_what_is_named_and_what_may_be_on_its_way(here: Path, bucket: Bucket, tmp_path: Path) -> None:
    save(here, bucket, Tally())
    for path in (here / "jobs" / B).rglob("*"):
        if path.is_file():
            path.unlink()
    kept = save(here, bucket, Tally())
    assert prune(bucket, 1).num_files == 0
    assert snapshots.names(bucket) == [kept.name]
    removed = prune(bucket, 1, lambda: datetime.now(UTC) + timedelta(days=2))
    assert removed.num_files == 3
    restore(tmp_path / "there", bucket, kept, Tally())
    assert contents(tmp_path / "there") == saved_of(here)


def test_the_command_saves_lists_and_restores(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address, there = f"file://{tmp_path}/bucket", tmp_path / "there"
    assert main(["snapshot", "save", address, "--data-dir", str(here)]) == 0
    assert main(["snapshot", "list", address]) == 0
    assert main(["snapshot", "restore", address, "--data-dir", str(there), "--job", A]) == 0
    said = capsys.readouterr().out
    assert f"{A} {B}" in said
    assert "restart one that runs" in said
    assert (there / "jobs" / A / "job.json").exists()
    assert main(["snapshot", "restore", address, "--data-dir", str(there), "--job", A]) == 1
    assert "two histories do not mix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ftp://x/y", "begins with one of"),
        ("bucket", "begins with one of"),
        ("file:///proc/x", "file:///proc/x"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused_in_words(
    address: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", "save", address, "--data-dir", str(here)]) == 1
    assert said in capsys.readouterr().err
