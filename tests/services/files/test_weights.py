"""A version of the weights is complete, checked and never changes, whoever dies while writing it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_core.invariants import InvalidValue
from gspo_core.versions import WeightsManifest
from services.files.job_dir import JobDir
from services.files.weights import MANIFEST_NAME, DamagedVersion, VersionExists, VersionNotFound, WeightStore
from tests.services.files.file_events import recorded

CONTENT = {"config.json": b'{"layers": 2}', "model.safetensors": bytes(range(256)) * 40, "extra/tokenizer.json": b"{}"}


def save(directory: Path) -> None:
    for name, content in CONTENT.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "job-1"


@pytest.fixture
def store(job_dir: Path) -> WeightStore:
    return WeightStore(JobDir(job_dir))


class TestWrite:
    def test_publishes_what_was_saved(self, store: WeightStore, job_dir: Path) -> None:
        manifest = store.write(3, 1, 2, save)
        assert (manifest.job, manifest.version, manifest.epoch, manifest.step) == ("job-1", 3, 1, 2)
        assert manifest.label == "job-1/1/3"
        assert {file.path: file.size_bytes for file in manifest.files} == {
            name: len(content) for name, content in CONTENT.items()
        }
        assert store.path(3) == job_dir / "weights" / "v3"
        for name, content in CONTENT.items():
            assert (store.path(3) / name).read_bytes() == content
        assert store.manifest(3) == manifest
        assert store.versions() == [3]
        store.verify(manifest)

    def test_a_number_is_used_once(self, store: WeightStore) -> None:
        store.write(0, 0, 0, save)
        before = sorted(store.path(0).rglob("*"))
        with pytest.raises(VersionExists):
            store.write(0, 1, 7, save)
        assert sorted(store.path(0).rglob("*")) == before
        assert store.manifest(0).epoch == 0

    def test_the_first_of_two_writers_wins(self, store: WeightStore, job_dir: Path) -> None:
        """Both pass the look at the beginning; the rename decides."""

        def save_late(directory: Path) -> None:
            save(directory)
            WeightStore(JobDir(job_dir)).write(0, 0, 0, save)

        with pytest.raises(VersionExists):
            store.write(0, 1, 0, save_late)
        assert store.manifest(0).epoch == 0
        assert [path.name for path in (job_dir / "weights").iterdir()] == ["v0"]

    def test_of_many_writers_one_wins(self, job_dir: Path) -> None:
        start = threading.Barrier(8)
        won: list[int] = []
        lost: list[int] = []

        def write(epoch: int) -> None:
            start.wait()
            try:
                WeightStore(JobDir(job_dir)).write(0, epoch, 0, save)
                won.append(epoch)
            except VersionExists:
                lost.append(epoch)

        writers = [threading.Thread(target=write, args=(epoch,)) for epoch in range(8)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert (len(won), len(lost)) == (1, 7)
        assert WeightStore(JobDir(job_dir)).manifest(0).epoch == won[0]

    def test_a_failed_save_leaves_nothing(self, store: WeightStore, job_dir: Path) -> None:
        def fail(directory: Path) -> None:
            save(directory)
            raise RuntimeError("no space left")

        with pytest.raises(RuntimeError, match="no space left"):
            store.write(0, 0, 0, fail)
        assert store.versions() == []
        assert list((job_dir / "weights").iterdir()) == []
        store.write(0, 0, 0, save)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda directory: None,
            lambda directory: (directory / MANIFEST_NAME).write_bytes(b"{}"),
            lambda directory: (directory / "link").symlink_to("/etc/passwd"),
            lambda directory: (directory / "dangling").symlink_to("nowhere"),
            lambda directory: os.mkfifo(directory / "pipe"),
        ],
        ids=["nothing", "manifest", "link", "dangling", "pipe"],
    )
    def test_refuses_what_is_no_set_of_plain_files(
        self, store: WeightStore, job_dir: Path, spoil: Callable[[Path], None]
    ) -> None:
        with pytest.raises(InvalidValue):
            store.write(0, 0, 0, spoil)
        assert list((job_dir / "weights").iterdir()) == []

    def test_flushes_everything_before_the_name_and_the_name_at_the_end(
        self, store: WeightStore, job_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.write(0, 0, 0, save)
        with recorded(monkeypatch, job_dir) as events:
            store.write(1, 0, 1, save)
        named = events.index(("name", "weights/v1"))
        flushed = {path for kind, path in events[:named] if kind == "flush"}
        files = {f"weights/*/{name}" for name in (*CONTENT, MANIFEST_NAME)}
        assert flushed == files | {"weights/*", "weights/*/extra"}
        # a directory after the files in it, the version's name last of all
        flushes = [path for kind, path in events if kind == "flush"]
        assert flushes.index("weights/*") > max(flushes.index(file) for file in files)
        assert events[named + 1 :] == [("flush", "weights")]

    def test_the_first_write_flushes_the_new_directories_too(
        self, store: WeightStore, job_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with recorded(monkeypatch, tmp_path) as events:
            store.write(0, 0, 0, save)
        assert events[:3] == [("flush", "."), ("flush", "jobs"), ("flush", "jobs/job-1")]


WRITER = """
import sys
from pathlib import Path
from services.files.job_dir import JobDir
from services.files.weights import WeightStore

def save(directory):
    (directory / "config.json").write_bytes(b"{}")
    print("half", flush=True)
    if sys.argv[2] == "stall":
        sys.stdin.read()
    (directory / "model.safetensors").write_bytes(bytes(100))

WeightStore(JobDir(Path(sys.argv[1]))).write(5, 0, 1, save)
print("done", flush=True)
"""


class TestKilledWriter:
    @pytest.fixture
    def torn(self, job_dir: Path) -> Path:
        """A job whose trainer was killed in the middle of a save."""
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(job_dir), "stall"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"half\n"
            writer.send_signal(signal.SIGKILL)
        return job_dir

    def test_what_it_left_is_invisible_and_blocks_nobody(self, torn: Path) -> None:
        store = WeightStore(JobDir(torn))
        assert len(list((torn / "weights").iterdir())) == 1
        assert store.versions() == []
        with pytest.raises(VersionNotFound):
            store.manifest(5)
        store.verify(store.write(5, 1, 1, save))
        assert store.versions() == [5]

    def test_what_it_left_is_swept_when_it_is_old_but_not_before(self, torn: Path) -> None:
        WeightStore(JobDir(torn)).collect(set())
        assert len(list((torn / "weights").iterdir())) == 1
        in_two_hours = WeightStore(JobDir(torn), clock=lambda: time.time() + 7200)
        assert in_two_hours.collect(set()) == []
        assert list((torn / "weights").iterdir()) == []

    def test_a_long_save_is_not_swept_while_it_still_writes(self, job_dir: Path) -> None:
        temporary = job_dir / "weights" / ".tmp-slow" / "deep"
        temporary.mkdir(parents=True)
        (temporary / "model.safetensors").write_bytes(b"x")
        for old in (temporary, temporary.parent):
            os.utime(old, (0, 0))
        WeightStore(JobDir(job_dir)).collect(set())
        assert (temporary / "model.safetensors").exists()

    @pytest.mark.parametrize("vanishes", [".tmp-zombie", ".tmp-zombie/part"])
    def test_what_vanishes_while_it_is_swept_is_swept(
        self, job_dir: Path, monkeypatch: pytest.MonkeyPatch, vanishes: str
    ) -> None:
        """A trainer that lost the job may wake, and write."""
        (job_dir / "weights" / ".tmp-zombie" / "part").mkdir(parents=True)
        lstat = Path.lstat

        def vanish(path: Path) -> os.stat_result:
            if path.name == ".tmp-zombie":
                shutil.rmtree(job_dir / "weights" / vanishes, ignore_errors=True)
            return lstat(path)

        monkeypatch.setattr(Path, "lstat", vanish)
        WeightStore(JobDir(job_dir)).collect(set())

    def test_killed_at_any_moment_a_version_is_whole_or_absent(self, job_dir: Path) -> None:
        """Kill after ever longer delays, until the writer gets through."""
        store, delay_s = WeightStore(JobDir(job_dir)), 0.0
        while not store.versions():
            with subprocess.Popen([sys.executable, "-c", WRITER, str(job_dir), "go"], stdout=subprocess.PIPE) as writer:
                assert writer.stdout is not None
                writer.stdout.readline()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    writer.wait(delay_s)
                writer.kill()
            delay_s += 0.002
        assert store.versions() == [5]
        store.verify(store.manifest(5))


class TestVerify:
    @pytest.fixture
    def manifest(self, store: WeightStore) -> WeightsManifest:
        return store.write(0, 0, 0, save)

    @settings(max_examples=30)
    @given(data=st.data())
    def test_finds_any_flipped_bit(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        store = WeightStore(JobDir(tmp_path_factory.mktemp("job")))
        manifest = store.write(0, 0, 0, save)
        name = data.draw(st.sampled_from(sorted(CONTENT)))
        content = bytearray(CONTENT[name])
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        (store.path(0) / name).write_bytes(content)
        with pytest.raises(DamagedVersion) as caught:
            store.verify(manifest)
        assert caught.value.file == name

    @pytest.mark.parametrize("name", sorted(CONTENT))
    def test_names_a_file_that_is_cut_off_grown_or_missing(
        self, store: WeightStore, manifest: WeightsManifest, name: str
    ) -> None:
        path = store.path(0) / name
        for content in (CONTENT[name][:-1], CONTENT[name] + b"\0", b""):
            path.write_bytes(content)
            with pytest.raises(DamagedVersion, match="bytes instead of"):
                store.verify(manifest)
        path.unlink()
        with pytest.raises(DamagedVersion, match="is missing") as caught:
            store.verify(manifest)
        assert caught.value.file == name

    def test_names_the_first_of_several(self, store: WeightStore, manifest: WeightsManifest) -> None:
        for name in CONTENT:
            (store.path(0) / name).unlink()
        with pytest.raises(DamagedVersion) as caught:
            store.verify(manifest)
        assert caught.value.file == "config.json"

    def test_a_link_in_place_of_a_file_is_not_followed(
        self, store: WeightStore, manifest: WeightsManifest, tmp_path: Path
    ) -> None:
        path = store.path(0) / "config.json"
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DamagedVersion, match="is missing"):
            store.verify(manifest)

    def test_a_stranger_among_the_files(self, store: WeightStore, manifest: WeightsManifest) -> None:
        (store.path(0) / "model-00002.safetensors").write_bytes(b"x")
        with pytest.raises(DamagedVersion) as caught:
            store.verify(manifest)
        assert caught.value.file == "model-00002.safetensors"

    def test_a_manifest_of_other_weights(self, store: WeightStore, manifest: WeightsManifest) -> None:
        other = WeightsManifest("job-1", 0, 1, 0, manifest.files)
        with pytest.raises(DamagedVersion) as caught:
            store.verify(other)
        assert caught.value.file == MANIFEST_NAME

    def test_a_manifest_of_another_release(self, store: WeightStore, manifest: WeightsManifest) -> None:
        path = store.path(0) / MANIFEST_NAME
        path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 2'))
        with pytest.raises(DamagedVersion, match="format 2"):
            store.manifest(0)

    def test_a_version_that_is_not_there(self, store: WeightStore, manifest: WeightsManifest) -> None:
        with pytest.raises(VersionNotFound):
            store.verify(WeightsManifest("job-1", 1, 0, 0, manifest.files))

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'{"format": 1}',
            b'{"format": 2}',
            b"\xff",
            b'{"format": 1, "job": "job-1", "version": 0, "epoch": 0, "step": 0, "files": [{"path": "../x", '
            b'"size_bytes": 1, "sha256": "' + b"0" * 64 + b'"}]}',
            b'{"format": 1, "job": "job-1", "version": "0", "epoch": 0, "step": 0, "files": [{"path": "x", '
            b'"size_bytes": 1, "sha256": "' + b"0" * 64 + b'"}]}',
        ],
    )
    def test_a_manifest_that_cannot_be_read(
        self, store: WeightStore, manifest: WeightsManifest, content: bytes
    ) -> None:
        (store.path(0) / MANIFEST_NAME).write_bytes(content)
        with pytest.raises(DamagedVersion) as caught:
            store.manifest(0)
        assert caught.value.file == MANIFEST_NAME


class TestCollect:
    def test_keeps_what_is_to_be_kept(self, store: WeightStore, job_dir: Path) -> None:
        for version in (0, 1, 2, 9, 10, 11):
            store.write(version, 0, version, save)
        assert store.versions() == [0, 1, 2, 9, 10, 11]
        assert store.collect({1, 10, 11, 99}) == [0, 2, 9]
        assert store.versions() == [1, 10, 11]
        assert sorted(path.name for path in (job_dir / "weights").iterdir()) == ["v1", "v10", "v11"]
        store.verify(store.manifest(10))

    def test_a_zombie_does_not_remove_what_its_successor_published(self, store: WeightStore) -> None:
        for version in range(5):
            store.write(version, 1 if version < 3 else 2, version, save)
        assert store.collect({1, 2}) == [0]  # by who was stopped after it had published version 2
        assert store.versions() == [1, 2, 3, 4]

    def test_of_a_job_without_versions(self, store: WeightStore) -> None:
        assert store.collect({1}) == []
        assert store.versions() == []

    def test_what_has_no_version_number_is_left_alone(self, store: WeightStore, job_dir: Path) -> None:
        store.write(0, 0, 0, save)
        for name in ("v", "v01", "v-1", "v1.bak", "notes"):
            (job_dir / "weights" / name).mkdir()
        assert store.versions() == [0]
        store.collect(set())
        assert len(list((job_dir / "weights").iterdir())) == 5

    def test_a_version_that_cannot_be_removed_whole_is_not_seen_half(
        self, store: WeightStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.write(0, 0, 0, save)

        def die(path: Path) -> None:
            (path / "config.json").unlink()
            raise KeyboardInterrupt

        monkeypatch.setattr("services.files.durable.shutil.rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            store.collect(set())
        assert store.versions() == []
