"""A step can be trained again from its file alone, and a file is what was written or an error."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gspo_core import codec
from gspo_core.invariants import InvalidValue
from gspo_core.log.history import batches_after
from gspo_core.position import Position
from gspo_core.spec import EnvironmentSpec, JobSpec
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, Trajectory
from services.files.batch_log import (
    BatchLog,
    BatchLogExists,
    BatchLogNotFound,
    DamagedBatchLog,
    read_batch,
    removable_batches,
)
from services.files.batch_view import main
from services.files.job_dir import JobDir
from services.files.job_records import AcceptedJob, JobRecords
from tests.services.files.file_events import recorded

JOB = "job-1"
EXTRA = {"drops": [{"group": 7, "reason": "stale"}], "learning_rate": 1e-6 / 3, "big": 2**80, "none": None, "日": "本"}


def trajectory(group: int, member: int, *, num_segments: int = 2, reward: float = 1.0) -> Trajectory:
    rng = np.random.default_rng(100 * group + member)
    pieces = []
    for index in range(num_segments):
        n = int(rng.integers(2, 40))
        mask = rng.random(n) < 0.6
        pieces.append(
            Segment(
                key=EpisodeKey(JOB, group, member),
                attempt=member % 2,
                branch=0,
                index=index,
                turn=index,
                version=3 + index,
                temperature=0.7,
                engine_id="engine-0",
                token_ids=rng.integers(0, 500, n),
                action_mask=mask,
                behavior_logprobs=np.where(mask, -rng.exponential(size=n), 0),
                turn_reward=0.5,
                outcome=Outcome(StopReason.COMPLETED, reward, {"exact": reward}) if index == num_segments - 1 else None,
            )
        )
    return Trajectory(tuple(pieces))


def groups() -> list[Group]:
    return [
        Group(JOB, 4, Split.TRAIN, 11, 3, tuple(trajectory(4, member, num_segments=member + 1) for member in range(3))),
        # ragged: members 0 and 2 failed
        Group(JOB, 2, Split.EVAL, 12, 3, (trajectory(2, 1, reward=0.25),)),
        Group(JOB, 9, Split.TRAIN, 13, 2, ()),
    ]


def content(batch: list[Group] | tuple[Group, ...]) -> list[Any]:
    """Everything that a group holds, comparable."""
    return [
        (one.job, one.group, one.split, one.task_index, one.size, [trajectory.segments for trajectory in one])
        for one in batch
    ]


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    return tmp_path / JOB


@pytest.fixture
def log(job_dir: Path) -> BatchLog:
    return BatchLog(JobDir(job_dir))


class TestWriteAndRead:
    def test_gives_back_groups_in_order_with_everything_in_them(self, log: BatchLog, job_dir: Path) -> None:
        path = log.write(2, 17, groups(), EXTRA)
        assert path == job_dir / "batches" / "ep000002-step000017"
        batch = log.read(2, 17)
        assert (batch.epoch, batch.step, batch.extra) == (2, 17, EXTRA)
        assert content(batch.groups) == content(groups())

    def test_a_batch_may_be_empty(self, log: BatchLog) -> None:
        log.write(0, 1, [], {})
        batch = log.read(0, 1)
        assert (batch.groups, batch.extra) == ((), {})

    def test_equal_batches_have_equal_files(self, log: BatchLog, tmp_path: Path) -> None:
        other = BatchLog(JobDir(tmp_path / "other"))
        assert log.write(0, 1, groups(), EXTRA).read_bytes() == other.write(0, 1, groups(), EXTRA).read_bytes()

    def test_a_segment_does_not_hold_the_whole_file_in_memory(self, log: BatchLog) -> None:
        log.write(0, 1, groups(), {})
        segment = log.read(0, 1).groups[0].trajectories[0].segments[0]
        base: Any = segment.token_ids
        while isinstance(base, np.ndarray):
            base = base.base
        assert memoryview(base).nbytes < 1000

    def test_steps_are_listed_in_order(self, log: BatchLog, job_dir: Path) -> None:
        assert log.steps() == []
        for epoch, step in [(1, 9), (0, 10), (0, 9), (1, 1_000_000), (0, 2)]:
            log.write(epoch, step, [], {})
        (job_dir / "batches" / ".tmp-abc").write_bytes(b"half")
        (job_dir / "batches" / "notes").write_bytes(b"")
        assert log.steps() == [(0, 2), (0, 9), (0, 10), (1, 9), (1, 1_000_000)]

    def test_what_is_not_there(self, log: BatchLog) -> None:
        with pytest.raises(BatchLogNotFound):
            log.read(0, 1)

    def test_only_what_is_named_is_removed(self, log: BatchLog) -> None:
        for step in range(5):
            log.write(0, step, [], {})
        log.remove([(0, 0), (0, 1), (0, 2), (1, 3)])
        assert log.steps() == [(0, 3), (0, 4)]

    @pytest.mark.parametrize(
        "extra",
        [
            *({1: "x"}, {"a": {2: 0}}, {"a": float("nan")}, {"a": float("inf")}, {"a": (1, 2)}),
            *({"a": np.float32(1)}, {"a": b"x"}, {"a": {1, 2}}),
        ],
    )
    def test_refuses_an_extra_that_json_would_change(self, log: BatchLog, job_dir: Path, extra: Any) -> None:
        with pytest.raises(InvalidValue, match="extra mapping"):
            log.write(0, 1, [], extra)
        assert log.steps() == []
        assert list((job_dir / "batches").iterdir()) == []


class TestWriteOnce:
    def test_the_first_writer_wins(self, log: BatchLog) -> None:
        path = log.write(0, 1, groups(), {})
        before = path.read_bytes()
        with pytest.raises(BatchLogExists):
            log.write(0, 1, [], {})
        assert path.read_bytes() == before

    def test_of_many_writers_one_wins_and_its_file_is_whole(self, job_dir: Path) -> None:
        start = threading.Barrier(8)
        won: list[int] = []
        lost: list[int] = []

        def write(writer: int) -> None:
            start.wait()
            try:
                BatchLog(JobDir(job_dir)).write(0, 1, groups(), {"writer": writer})
                won.append(writer)
            except BatchLogExists:
                lost.append(writer)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 7)
        assert BatchLog(JobDir(job_dir)).read(0, 1).extra == {"writer": won[0]}
        assert [path.name for path in (job_dir / "batches").iterdir()] == ["ep000000-step000001"]

    def test_is_flushed_before_it_has_its_name_and_the_name_before_it_returns(
        self, log: BatchLog, job_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log.write(0, 1, [], {})
        with recorded(monkeypatch, job_dir) as events:
            log.write(0, 2, groups(), {})
        assert events == [("flush", "batches/*"), ("name", "batches/ep000000-step000002"), ("flush", "batches")]

    def test_killed_before_the_name_exists_nothing_is_seen(self, job_dir: Path) -> None:
        code = (
            "import os, sys, signal\n"
            "from pathlib import Path\n"
            "from services.files.batch_log import BatchLog\n"
            "from services.files.job_dir import JobDir\n"
            "os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "BatchLog(JobDir(Path(sys.argv[1]))).write(0, 1, [], {})\n"
        )
        assert subprocess.run([sys.executable, "-c", code, str(job_dir)], check=False).returncode == -9
        log = BatchLog(JobDir(job_dir))
        assert len(list((job_dir / "batches").iterdir())) == 1
        assert log.steps() == []
        log.write(0, 1, groups(), {})
        assert len(log.read(0, 1).groups) == 3


class TestDamage:
    @pytest.fixture
    def path(self, log: BatchLog) -> Path:
        return log.write(0, 1, groups(), EXTRA)

    def test_cut_off_anywhere(self, path: Path) -> None:
        data = path.read_bytes()
        for length in (*range(64), *range(64, len(data), 17), len(data) - 1):
            path.write_bytes(data[:length])
            with pytest.raises(DamagedBatchLog):
                read_batch(path)

    def test_any_flipped_bit(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        rng = random.Random(1)
        for place in (*range(20), *rng.sample(range(20, len(data)), 200), len(data) - 1):
            bit = 1 << rng.randrange(8)
            data[place] ^= bit
            path.write_bytes(data)
            with pytest.raises(DamagedBatchLog):
                read_batch(path)
            data[place] ^= bit
        path.write_bytes(data)
        assert content(read_batch(path).groups) == content(groups())

    def test_something_appended(self, path: Path) -> None:
        path.write_bytes(path.read_bytes() + b"\0")
        with pytest.raises(DamagedBatchLog, match="sha256"):
            read_batch(path)

    def test_another_file_under_its_name(self, path: Path, log: BatchLog) -> None:
        os.rename(path, log.path(0, 2))
        with pytest.raises(DamagedBatchLog, match="renamed"):
            log.read(0, 2)

    def test_a_copy_under_a_free_name_can_be_read(self, path: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        copy.write_bytes(path.read_bytes())
        assert read_batch(copy).step == 1

    def sealed(self, index: bytes, payload: bytes = b"", *, length: int | None = None, schema: int = 1) -> bytes:
        """What a faulty writer could leave: the sha256 is right all the same."""
        header = b"GSPOBLOG" + struct.pack("<IQ", schema, len(index) if length is None else length)
        body = header + index + payload
        return body + hashlib.sha256(body).digest()

    @pytest.mark.parametrize(
        "index",
        [
            b"",
            b"{",
            b"[]",
            b"\xff",
            b"[" * 100_000,
            b'{"epoch": 0, "step": 1, "groups": []}',
            b'{"epoch": 0, "step": 1.5, "groups": [], "extra": {}}',
            b'{"epoch": 0, "step": 1, "groups": [], "extra": {}, "more": 1}',
            b'{"epoch": 0, "step": 1, "groups": [7], "extra": {}}',
        ],
    )
    def test_an_index_that_cannot_be_read(self, path: Path, index: bytes) -> None:
        path.write_bytes(self.sealed(index))
        with pytest.raises(DamagedBatchLog, match="index"):
            read_batch(path)

    def indexed(self, **changes: Any) -> bytes:
        group = {"job": JOB, "group": 1, "split": "train", "task_index": 0, "size": 1, "trajectories": []}
        return json.dumps({"epoch": 0, "step": 1, "groups": [group | changes], "extra": {}}).encode()

    @pytest.mark.parametrize("lengths", [[5], [2**62], [10, -6], [-1], [3]])
    def test_lengths_that_are_not_those_of_the_segments(self, path: Path, lengths: list[int]) -> None:
        path.write_bytes(self.sealed(self.indexed(trajectories=[lengths]), b"abcd"))
        with pytest.raises(DamagedBatchLog, match="the index describes"):
            read_batch(path)

    def test_segments_that_are_none(self, path: Path) -> None:
        path.write_bytes(self.sealed(self.indexed(trajectories=[[4]]), b"abcd"))
        with pytest.raises(DamagedBatchLog, match="BadMagic"):
            read_batch(path)

    @pytest.mark.parametrize("changes", [{"job": "job-2"}, {"group": 5}, {"size": 0}, {"split": "test"}])
    def test_groups_that_contradict_their_segments(self, path: Path, changes: dict[str, Any]) -> None:
        payload = [codec.encode(segment) for segment in trajectory(1, 0).segments]
        lengths = [len(data) for data in payload]
        path.write_bytes(self.sealed(self.indexed(trajectories=[lengths]), b"".join(payload)))
        assert len(read_batch(path).groups) == 1
        path.write_bytes(self.sealed(self.indexed(trajectories=[lengths], **changes), b"".join(payload)))
        with pytest.raises(DamagedBatchLog):
            read_batch(path)

    def test_an_index_longer_than_the_file(self, path: Path) -> None:
        path.write_bytes(self.sealed(self.indexed(), length=2**63))
        with pytest.raises(DamagedBatchLog, match="shorter"):
            read_batch(path)

    def test_another_schema(self, path: Path) -> None:
        path.write_bytes(self.sealed(self.indexed(), schema=4))
        with pytest.raises(DamagedBatchLog, match="schema 4"):
            read_batch(path)

    def test_another_kind_of_file(self, path: Path) -> None:
        path.write_bytes(b"\x80\x04pickle" * 20)
        with pytest.raises(DamagedBatchLog, match="no batch log"):
            read_batch(path)


class TestCommand:
    def test_lists_a_job(self, log: BatchLog, job_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        log.write(0, 1, groups(), {})
        log.write(0, 2, [], {})
        assert main([str(job_dir)]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("ep000000-step000001")
        assert "groups 3  episodes 4" in first
        assert "versions 3, 4, 5" in first
        assert "mean reward 0.812" in first
        assert "episodes 0" in second

    def test_a_damaged_file_is_listed_as_such_and_fails(
        self, log: BatchLog, job_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        log.write(0, 1, groups(), {})
        path = log.write(0, 2, groups(), {})
        path.write_bytes(path.read_bytes()[:-1])
        assert main([str(job_dir / "batches")]) == 1
        first, second = capsys.readouterr().out.splitlines()
        assert "DAMAGED" not in first
        assert "DAMAGED" in second

    def test_shows_one_file(self, log: BatchLog) -> None:
        """Through the door that a person uses."""
        path = log.write(0, 1, groups(), EXTRA)
        command = [sys.executable, "-m", "services.files.batch_view", str(path)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "epoch 0  step 1  groups 3" in shown
        assert '"reason": "stale"' in shown
        assert "group 4  train  task 11  size 3" in shown
        assert "job-1/4/2  attempt 0  completed  reward 1.0" in shown
        segment = groups()[0].trajectories[2].segments[2]
        line = next(line for line in shown.splitlines() if "segment 2" in line)
        assert f"version 5  fresh  tokens {segment.num_tokens}  actions {segment.num_actions}" in line

    @pytest.mark.parametrize("content", [None, b"damaged"])
    def test_what_cannot_be_shown_is_an_error_on_stderr(
        self, tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "file"
        if content is not None:
            path.write_bytes(content)
        assert main([str(path)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert str(path) in captured.err

    def test_shows_every_token_with_what_it_was_trained_with(
        self, log: BatchLog, job_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = log.write(0, 1, groups(), {"staleness": {"3": 2, "4": 1, "5": 0}})
        spec = JobSpec(model="m", environments=[EnvironmentSpec(ref="a:B")])
        JobRecords(JobDir(job_dir)).accept(AcceptedJob(spec.model_dump_json(), "digest", "now"))
        assert main([str(path), "--json", "--only", "4/2"]) == 0
        (record,) = map(json.loads, capsys.readouterr().out.splitlines())
        logged = groups()[0].trajectories[2]
        (branch,) = logged.branches
        assert record["episode"] == "job-1/4/2"
        assert record["branches"][0]["token_ids"] == branch.token_ids.tolist()
        assert record["branches"][0]["action_mask"] == branch.action_mask.tolist()
        assert record["branches"][0]["behavior_logprobs"] == branch.behavior_logprobs.tolist()
        assert record["branches"][0]["versions"] == branch.versions.tolist()
        assert record["branches"][0]["staleness"] == [5 - version for version in branch.versions.tolist()]
        assert record["turn_rewards"] == {"0": 0.5, "1": 0.5, "2": 0.5}
        # All members of the group had the same reward.
        assert record["advantage"] == 0.0

    def test_tokens_are_decoded_where_a_tokenizer_is_at_hand(
        self, log: BatchLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = log.write(0, 1, groups(), {})
        words = {f"word{number}": number for number in range(500)}
        Tokenizer(WordLevel(words, unk_token="word0")).save(str(tmp_path / "tokenizer.json"))
        assert main([str(path), "--tokens", "--only", "4/1", "--model", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert "group 2 " not in shown
        token = groups()[0].trajectories[1].segments[0].token_ids[0]
        row = next(line.split() for line in shown.splitlines() if line.split()[:1] == ["0"])
        assert row[2] == str(token)
        assert row[-1] == f"'word{token}'"
        assert main([str(path), "--tokens"]) == 0
        assert "word" not in capsys.readouterr().out

    def test_a_tokenizer_that_is_not_there_is_an_error(
        self, log: BatchLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([str(log.write(0, 1, groups(), {})), "--model", str(tmp_path / "nowhere")]) == 1
        assert "tokenizer.json" in capsys.readouterr().err


class TestReplay:
    # Epoch 1 came to step 9 and forked off nothing; 2 forked off it at 6 and came to 8; 3 forked off 2 at 7.
    FORKS: ClassVar = {1: Position(0, 0), 2: Position(1, 6), 3: Position(2, 7)}
    FOUND: ClassVar = [(1, step) for step in range(1, 10)] + [(2, 7), (2, 8)]

    def steps(self, start: Position, newest_epoch: int, found: list[tuple[int, int]] | None = None) -> list[Any]:
        row = batches_after(start, found or self.FOUND, newest_epoch, self.FORKS)
        return [(position.epoch, position.step) for position in row]

    def test_what_a_dead_epoch_wrote_beyond_its_successors_fork_is_void(self) -> None:
        assert self.steps(Position(1, 4), 1) == [(1, 5), (1, 6), (1, 7), (1, 8), (1, 9)]
        assert self.steps(Position(1, 4), 2) == [(1, 5), (1, 6), (2, 7), (2, 8)]
        assert self.steps(Position(1, 4), 3) == [(1, 5), (1, 6), (2, 7)]
        # A zombie of epoch 1 wakes up, much later.
        assert self.steps(Position(1, 4), 3, [*self.FOUND, (1, 10), (2, 9)]) == [(1, 5), (1, 6), (2, 7)]

    def test_nothing_is_replayed_over_a_gap(self) -> None:
        found = [position for position in self.FOUND if position != (1, 6)]
        assert self.steps(Position(1, 4), 3, found) == [(1, 5)]
        assert self.steps(Position(2, 7), 3) == []

    def test_an_epoch_that_was_claimed_later_does_not_count_yet(self) -> None:
        assert self.steps(Position(1, 8), 1, [*self.FOUND, (4, 9)]) == [(1, 9)]

    def test_kept_is_what_a_replay_needs_and_the_newest(self) -> None:
        def kept(after_step: int, num_newest: int) -> set[tuple[int, int]]:
            return {*self.FOUND} - removable_batches(self.FOUND, after_step, num_newest)

        assert kept(7, 1) == {(1, 8), (1, 9), (2, 8)}
        assert kept(8, 3) == {(1, 9), (2, 7), (2, 8)}
        assert kept(9, 0) == set()
        assert removable_batches([], 1, 5) == set()
