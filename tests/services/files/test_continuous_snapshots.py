"""Snapshots one after the other: each sends what is new, and none is lost to a kill, a store that is away, or another
installation."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gspo_core.cli import main
from services.files import continuous_snapshots, snapshots
from services.files.bucket import Bucket, BucketRefused
from services.files.continuous_snapshots import ContinuousSnapshots, OtherFollower, OtherInstallation, Round
from services.files.data_dir import DataDir
from services.files.durable import temporary_name
from services.files.snapshots import GivenUp, InstallationSnapshot, Tally, names, newest, restore
from services.launch import snapshot as command
from tests.patience import HANG_S

JOB = "job_a"


def write(path: Path, content: str | bytes) -> None:
    """As the service does: nobody sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(temporary_name())
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.replace(path)


def batch(root: Path, number: int) -> Path:
    return root / "jobs" / JOB / "batches" / f"ep000001-step{number:06d}"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return installation(tmp_path / "here")


def installation(root: Path) -> Path:
    write(DataDir(root).installation, json.dumps({"id": "ours"}))
    record = {"schema": 1, "spec": json.dumps({"model": "hub/m"}), "digest": JOB, "created_at": "", "owner": ""}
    write(root / "jobs" / JOB / "job.json", json.dumps(record))
    write(batch(root, 1), "tokens of step 1")
    settle(root)
    return root


def settle(root: Path) -> None:
    """All of it was written a minute ago."""
    then = time.time() - 60
    for path in root.rglob("*"):
        os.utime(path, (then, then))


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket.at(f"file://{tmp_path}/bucket")


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def back(bucket: Bucket, there: Path) -> dict[str, bytes]:
    snapshot = newest(bucket)
    assert snapshot is not None
    restore(there, bucket, snapshot, Tally())
    return contents(there)


def made(saving: ContinuousSnapshots) -> Round:
    done = saving.round()
    assert done is not None
    return done


def test_a_round_sends_what_is_new_and_one_without_news_reads_and_writes_nothing(
    here: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = ContinuousSnapshots(here, bucket)
    assert made(saving).tally.num_files == 3
    with monkeypatch.context() as forbidden:
        for owner, name in ((Bucket, "put"), (Bucket, "get"), (snapshots._Sending, "_send")):
            forbidden.setattr(owner, name, None)
        assert saving.round() is None
        settle(here)  # other times, the same contents
        forbidden.undo()
        assert saving.round() is None
    assert len(names(bucket)) == 1
    write(batch(here, 2), "tokens of step 2")
    assert made(saving).tally.num_files == 1
    batch(here, 1).unlink()
    assert made(saving).tally.num_files == 0  # what goes away is news, too
    assert back(bucket, tmp_path / "there") == contents(here)


def test_a_file_that_changes_with_the_same_size_and_time_is_seen(here: Path, bucket: Bucket) -> None:
    """Clocks of file systems tick, and some seldom."""
    saving = ContinuousSnapshots(here, bucket)
    write(batch(here, 2), "state 1")
    at = batch(here, 2).stat().st_mtime_ns
    made(saving)
    write(batch(here, 2), "state 2")
    os.utime(batch(here, 2), ns=(at, at))
    assert made(saving).tally.num_files == 1


def test_what_a_round_sent_before_it_broke_off_is_not_sent_again(
    here: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2, 20):
        write(batch(here, number), f"tokens of step {number}")
    put, num_put = Bucket.put, 0

    def break_off(self: Bucket, name: str, pieces: Iterator[bytes] | bytes) -> None:
        nonlocal num_put
        num_put += 1
        if num_put == 12:
            raise BucketRefused("cut off")
        put(self, name, pieces)

    saving = ContinuousSnapshots(here, bucket)
    with monkeypatch.context() as broken:
        broken.setattr(Bucket, "put", break_off)
        with pytest.raises(BucketRefused, match="cut off"):
            saving.round()
    assert names(bucket) == []
    num_sent = len(list(bucket.entries(snapshots.OBJECTS)))
    assert num_sent >= 11
    assert made(ContinuousSnapshots(here, bucket)).tally.num_files == len(contents(here)) - num_sent
    assert back(bucket, tmp_path / "there") == contents(here)


def test_neither_an_empty_directory_nor_another_installation_becomes_the_newest(
    here: Path, bucket: Bucket, tmp_path: Path
) -> None:
    made(saving := ContinuousSnapshots(here, bucket))
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(OtherInstallation, match="restore it, or name another place"):
        ContinuousSnapshots(empty, bucket).round()
    write(DataDir(empty).installation, json.dumps({"id": "theirs"}))
    with pytest.raises(OtherInstallation, match="another installation"):
        ContinuousSnapshots(empty, bucket).round()
    here.rename(tmp_path / "gone")
    with pytest.raises(OtherInstallation, match="restore it"):
        saving.round()
    assert len(names(bucket)) == 1
    assert back(bucket, here) == contents(tmp_path / "gone")
    assert saving.round() is None


def test_of_two_that_save_to_one_place_the_later_one_goes_on(here: Path, bucket: Bucket) -> None:
    made(first := ContinuousSnapshots(here, bucket))
    second = ContinuousSnapshots(here, bucket)
    assert second.round() is None
    write(batch(here, 2), "tokens of step 2")
    made(first)
    with pytest.raises(OtherFollower, match="one for each place"):
        second.round()
    third = ContinuousSnapshots(here, bucket)
    write(batch(here, 3), "tokens of step 3")
    made(third)
    with pytest.raises(OtherFollower, match="one for each place"):
        first.round()
    snapshots.save(here, bucket, Tally())
    write(batch(here, 4), "tokens of step 4")
    assert made(third).tally.num_files == 1  # a single one in between is no matter


def test_the_last_snapshot_is_the_newest_on_a_machine_whose_clock_is_behind(
    here: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(ContinuousSnapshots(here, bucket))

    class Behind(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(minutes=5)

    monkeypatch.setattr(snapshots, "datetime", Behind)
    saving = ContinuousSnapshots(here, bucket)
    for number in (2, 3):
        write(batch(here, number), f"tokens of step {number}")
        assert newest(bucket) != made(saving).snapshot == newest(bucket)


def test_of_old_snapshots_so_many_stay(here: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = ContinuousSnapshots(here, bucket, keep=2)
    for number in range(2, 6):
        write(batch(here, number), f"tokens of step {number}")
        made(saving)
    assert len(names(bucket)) == 4  # within an hour
    monkeypatch.setattr(continuous_snapshots, "PRUNE_EVERY_S", 0)
    write(batch(here, 6), "tokens of step 6")
    done = made(saving)
    assert names(bucket)[-1] == done.snapshot.name
    assert len(names(bucket)) == 2


def test_a_round_that_is_given_up_leaves_no_snapshot(here: Path, bucket: Bucket) -> None:
    saving = ContinuousSnapshots(here, bucket)
    saving.give_up()
    with pytest.raises(GivenUp):
        saving.round()
    assert names(bucket) == []


class Scripted(ContinuousSnapshots):
    """Rounds are what is given, and nothing new afterwards."""

    def __init__(self, *rounds: Callable[[], None]) -> None:
        self.num_rounds = 0
        self._rounds = list(rounds)

    def round(self) -> Round | None:
        self.num_rounds += 1
        if self._rounds:
            self._rounds.pop(0)()
        return Round(InstallationSnapshot("s", "", "", {}, {}), Tally(), 0.0)


def refuse() -> None:
    raise BucketRefused("the store is away")


async def test_who_is_told_to_stop_ends_the_round_that_is_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    begun, go_on, stop = threading.Event(), threading.Event(), asyncio.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(HANG_S)

    saving = Scripted(slow)
    running = asyncio.create_task(command._rounds(saving, 3600, stop, None))
    await asyncio.to_thread(begun.wait, HANG_S)
    stop.set()
    await asyncio.sleep(0.05)
    assert not running.done()
    go_on.set()
    await running
    assert saving.num_rounds == 1
    assert capsys.readouterr().out.startswith("s: 0 job(s)")


async def test_a_store_that_is_away_is_waited_for_unless_it_was_never_there(capsys: pytest.CaptureFixture[str]) -> None:
    stop = asyncio.Event()
    with pytest.raises(BucketRefused):
        await command._rounds(Scripted(refuse), 0, stop, None)
    loop = asyncio.get_running_loop()
    saving = Scripted(lambda: None, refuse, refuse, lambda: None, lambda: loop.call_soon_threadsafe(stop.set) and None)
    await command._rounds(saving, 0, stop, None)
    assert saving.num_rounds >= 5
    assert capsys.readouterr().err.count("the store is away; again in 0 s") == 2


def follower(here: Path, address: str, every_s: float) -> subprocess.Popen[str]:
    words = ["save", address, "--follow", "--every", str(every_s), "--data-dir", str(here)]
    return subprocess.Popen(
        [sys.executable, "-m", "services.launch.snapshot", *words], stdout=subprocess.PIPE, text=True, bufsize=1
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_it_leaves_at_once_when_it_is_told_to(here: Path, bucket: Bucket, tmp_path: Path) -> None:
    with follower(here, bucket.address, 3600) as process:
        assert "1 job(s)" in line(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        assert line(process) == ""  # nothing but what it sent is said there
    assert back(bucket, tmp_path / "there") == contents(here)


class Writer(threading.Thread):
    """A job that runs: logs that are renamed into place, one that grows, and old logs that go away."""

    def __init__(self, root: Path, pace_s: float) -> None:
        super().__init__()
        self.root, self.pace_s, self.over = root, pace_s, threading.Event()
        self.complete_ns: dict[str, int] = {}
        self.removed: set[str] = set()

    def run(self) -> None:
        number = 1
        while not self.over.wait(self.pace_s):
            number += 1
            path = batch(self.root, number)
            write(path, f"{number}".encode() * 5000)
            self.complete_ns[path.relative_to(self.root).as_posix()] = time.time_ns()
            with (self.root / "jobs" / JOB / "metrics.jsonl").open("a") as file:
                file.write(f'{{"step": {number}}}\n')
            if number > 200:
                old = batch(self.root, number - 200)
                old.unlink()
                self.removed.add(old.relative_to(self.root).as_posix())


def killed_again_and_again(here: Path, there: Path, address: str, *, pace_s: float, lives: int) -> None:
    """Whenever that is: the newest snapshot is whole, and has all that was complete when its round began."""
    bucket, chance = Bucket.at(address), random.Random(1)
    writer = Writer(here, pace_s)
    writer.start()
    try:
        for _ in range(lives):
            before = len(names(bucket))
            with follower(here, address, 0.02) as process:
                assert line(process)
                time.sleep(chance.random())
                process.kill()
            assert len(names(bucket)) > before
    finally:
        writer.over.set()
        writer.join()
    snapshot = newest(bucket)
    assert snapshot is not None
    assert snapshot.begun_ns is not None
    found = back(bucket, there)
    metrics = f"jobs/{JOB}/metrics.jsonl"
    assert (here / metrics).read_bytes().startswith(found.pop(metrics))
    for name, content in found.items():
        number = name.rpartition("step")[2].lstrip("0")
        is_log = name in writer.complete_ns
        assert content == (number.encode() * 5000 if is_log else (here / name).read_bytes())
    due = {name for name, at in writer.complete_ns.items() if at < snapshot.begun_ns}
    assert due
    assert due - writer.removed <= found.keys()


def test_who_is_killed_at_any_moment_leaves_the_newest_snapshot_whole(
    here: Path, bucket: Bucket, tmp_path: Path
) -> None:
    killed_again_and_again(here, tmp_path / "there", bucket.address, pace_s=0.005, lives=6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--every", "5"], "belong to --follow"),
        (["--follow", "--keep", "0"], "--keep: at least 1"),
        (["--follow", "--every", "-1"], "--every: at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], said: str, here: Path, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", "save", bucket.address, "--data-dir", str(here), *words]) == 1
    assert said in capsys.readouterr().err
    assert names(bucket) == []
