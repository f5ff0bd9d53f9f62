"""A backup of a place where files come and go is good to go on from, and comes back only where there are no jobs."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

import pytest

from services.files import backup
from services.files.backup import JobsAreThere, LaterLayout, main, restore, save

JOB = "jobs/j"


def fill(root: Path) -> None:
    for name in (f"{JOB}/job.json", f"{JOB}/batches/ep1-step1", f"{JOB}/metrics.jsonl", "keys/k.json", "audit.jsonl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"what is in {name}")


def checkpoint(root: Path, step: int) -> Path:
    directory = root / JOB / "checkpoints" / f"ep1-step{step}"
    (directory / "learner").mkdir(parents=True)
    for name in ("manifest.json", "learner/state.safetensors"):
        (directory / name).write_text(f"{name} of {step}")
    return directory


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return archive.getnames()


def test_a_backup_of_a_later_layout_is_refused_and_one_of_an_earlier_release_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, before = tmp_path / "here", tmp_path / "there", tmp_path / "before"
    fill(here)
    saved = io.BytesIO()
    with monkeypatch.context() as later:
        later.setattr(backup, "LAYOUT", backup.LAYOUT + 1)
        save(here, saved)
    with pytest.raises(
        LaterLayout, match=r"layout 2, this release reads up to 1: restore it with the release that made"
    ):
        restore(there, io.BytesIO(saved.getvalue()))
    assert contents(there) == {}
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w|gz") as archive:  # as earlier releases made them
        archive.add(here / JOB, JOB)
    restore(before, io.BytesIO(plain.getvalue()))
    assert set(contents(before)) == {name for name in contents(here) if name.startswith(JOB)}


def test_what_is_saved_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    fill(here)
    checkpoint(here, 2)
    (here / JOB / ".tmp-1").write_text("half")
    for name in ("secrets/api/gspo_api_keys", "redis/appendonly.aof", f"{JOB}/logs/kept"):
        (here / name).parent.mkdir(parents=True)
        (here / name).write_text("x")
    (here / "link").symlink_to("/etc/passwd")
    monkeypatch.setenv("GSPO_DATA_DIR", str(here))
    assert main([]) == 0
    saved = capsysbinary.readouterr().out
    monkeypatch.setenv("GSPO_DATA_DIR", str(there))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(saved)))
    assert main(["--restore"]) == 0
    for gone in ("secrets", "redis", "link", f"{JOB}/.tmp-1"):
        (shutil.rmtree if (here / gone).is_dir() else Path.unlink)(here / gone)
    assert contents(there) == contents(here)
    with pytest.raises(JobsAreThere):
        restore(there, io.BytesIO(saved))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_checkpoint_that_replaces_another_while_that_is_saved_is_there_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trainer does that keeps one: the new one is there before the old one goes."""
    fill(tmp_path)
    old, add = checkpoint(tmp_path, 2), backup._add

    def replaced(archive: tarfile.TarFile, path: Path, name: Path) -> bool:
        if old in path.parents and old.exists():
            checkpoint(tmp_path, 4)
            shutil.rmtree(old)
        return add(archive, path, name)

    monkeypatch.setattr(backup, "_add", replaced)
    data = io.BytesIO()
    save(tmp_path, data)
    saved = [name for name in names(data.getvalue()) if "checkpoints" in name]
    assert saved == [f"{JOB}/checkpoints/ep1-step4/{name}" for name in ("learner/state.safetensors", "manifest.json")]
    assert len(names(data.getvalue())) == 5 + 2


def step(number: int, epoch: int = 1) -> str:
    return f"ep{epoch:06d}-step{number:06d}"


@pytest.mark.parametrize("place", ["batches", "archive"])
def test_a_trainer_that_goes_on_meanwhile_leaves_no_gap_between_its_logs_and_its_checkpoint(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logs were read when the trainer writes two more and the checkpoint that needs none of them."""
    job, look = tmp_path / JOB, backup._names
    for folder in ("batches", "archive", "checkpoints"):
        (job / folder).mkdir(parents=True)
    for number in (1, 2):
        (job / "batches" / step(number)).touch()

    def goes_on(directory: Path) -> list[str]:
        if directory == job / "checkpoints" and not (directory / step(4)).exists():
            for number in (3, 4):
                (job / place / step(number)).touch()
            (directory / step(4)).mkdir()
            (directory / step(4) / "checkpoint.json").touch()
            (job / "batches" / step(5, epoch=2)).touch()  # of a trainer whose record of its epoch was not read
        return look(directory)

    monkeypatch.setattr(backup, "_names", goes_on)
    data = io.BytesIO()
    save(tmp_path, data)
    assert [name.removeprefix(f"{JOB}/") for name in names(data.getvalue())] == [
        *(f"batches/{step(number)}" for number in (1, 2)),
        f"checkpoints/{step(4)}/checkpoint.json",
        *(f"{place}/{step(number)}" for number in (3, 4)),
    ]


def test_a_link_in_the_place_of_a_later_log_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, look = tmp_path / JOB, backup._names
    (job / "batches").mkdir(parents=True)
    (job / "checkpoints" / step(2)).mkdir(parents=True)
    (elsewhere := tmp_path.parent / "elsewhere").touch()

    def goes_on(directory: Path) -> list[str]:
        if directory == job / "checkpoints" and not (job / "batches" / step(1)).is_symlink():
            (job / "batches" / step(1)).symlink_to(elsewhere)
            (job / "batches" / step(2)).touch()
        return look(directory)

    monkeypatch.setattr(backup, "_names", goes_on)
    assert list(backup.plain_files(tmp_path)) == [job / "batches" / step(2)]


def test_a_backup_forgets_the_names_of_directories_that_are_read(tmp_path: Path) -> None:
    (tmp_path / JOB / "batches").mkdir(parents=True)
    (tmp_path / JOB / "batches" / step(1)).touch()
    seen_in: dict[Path, set[str]] = {tmp_path: set()}
    assert len(list(backup._plain_files(tmp_path, seen_in, False))) == 1
    assert set(seen_in) == {tmp_path}


def test_a_log_that_is_archived_while_a_backup_is_made_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    logs, archive, look = tmp_path / JOB / "batches", tmp_path / JOB / "archive", backup._names

    def archived(directory: Path) -> list[str]:
        if directory == logs and not archive.joinpath("ep1-step1").exists():
            archive.mkdir(exist_ok=True)
            (logs / "ep1-step1").rename(archive / "ep1-step1")
        return look(directory)

    archive.mkdir()
    (archive / "ep1-step0").touch()
    monkeypatch.setattr(backup, "_names", archived)
    data = io.BytesIO()
    save(tmp_path, data)
    assert {f"{JOB}/archive/ep1-step0", f"{JOB}/archive/ep1-step1"} <= set(names(data.getvalue()))


def test_a_file_that_grows_is_saved_as_it_was_and_one_that_goes_while_it_is_read_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    growing, going = tmp_path / "audit.jsonl", tmp_path / JOB / "batches" / "ep1-step1"
    before = {path.name: path.read_bytes() for path in (growing, going)}
    addfile = tarfile.TarFile.addfile

    def meanwhile(self: tarfile.TarFile, member: tarfile.TarInfo, file: io.BufferedReader) -> None:
        if member.name == "audit.jsonl":
            with growing.open("a") as more:
                more.write("another line")
        if member.name.endswith("ep1-step1"):
            going.unlink()
        addfile(self, member, file)

    monkeypatch.setattr(tarfile.TarFile, "addfile", meanwhile)
    data = io.BytesIO()
    save(tmp_path, data)
    with tarfile.open(fileobj=io.BytesIO(data.getvalue())) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            if (name := Path(member.name).name) in before:
                assert file.read() == before.pop(name)
    assert before == {}


def test_an_archive_that_leads_out_is_refused(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        member = tarfile.TarInfo("../out")
        archive.addfile(member, io.BytesIO())
    data.seek(0)
    with pytest.raises(tarfile.TarError):
        restore(tmp_path / "there", data)
    assert not (tmp_path / "out").exists()
