"""What a run says of itself reaches the store, the job's files and whoever listens; a listener costs no step."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gspo_core.versions import StepReport, WeightFile, WeightsManifest
from services.files.job_dir import JobDir
from services.state.refusals import Fenced
from services.state.store import Claim, Store
from services.trainer.telling.event_file import EventFile, crc32c
from services.trainer.telling.reports import Reports, disk_metrics
from tests.services.trainer.test_trainer_alarms import HEALTHY


class Listener:
    def __init__(self, error: Exception | None = None) -> None:
        self.told: list[tuple[int, Mapping[str, float]]] = []
        self._error = error

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        self.told.append((step, scalars))
        if self._error:
            raise self._error


def records(path: Path) -> Iterator[bytes]:
    """Read by the description of the format: length, its checksum, data, its checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        for start, end in ((0, 8), (12, 12 + length)):
            (stored,) = struct.unpack("<I", data[end : end + 4])
            crc = (stored - 0xA282EAD8) & 0xFFFFFFFF
            assert crc32c(data[start:end]) == (crc >> 17 | crc << 15) & 0xFFFFFFFF
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_the_checksum_is_the_one_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_scalars_are_framed_records_of_events(tmp_path: Path) -> None:
    file = EventFile(tmp_path, "a", now=lambda: 12.5)
    file.add(300, {"reward/mean": 0.5})
    file.add(301, {"reward/mean": 0.75})
    first, *events = records(tmp_path / "events.out.tfevents.a")
    time_and_step = b"\x09" + struct.pack("<d", 12.5) + b"\x10"
    assert first == time_and_step + b"\x00\x1a\x0dbrain.Event:2"
    value = b"\x0a\x0breward/mean\x15" + struct.pack("<f", 0.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    assert events[0] == time_and_step + b"\xac\x02\x2a" + bytes([len(summary)]) + summary
    assert len(events) == 2


READER = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
read.Reload()
print(json.dumps({name: [[one.step, one.value] for one in read.Scalars(name)] for name in read.Tags()["scalars"]}))
"""


@pytest.mark.third_party
def test_tensorboard_reads_them(tmp_path: Path) -> None:
    """Two trainers had the job; the second was killed while it wrote."""
    board, python = tmp_path / "board", tmp_path / "venv" / "bin" / "python"
    for epoch, steps in (("epoch000001", range(1, 200)), ("epoch000002", range(200, 300))):
        file = EventFile(board, epoch)
        for step in steps:
            file.add(step, {"reward/mean": step / 8, "gspo/clip_frac": 0.5})
    with (board / "events.out.tfevents.epoch000002").open("ab") as torn:
        torn.write(b"\x18\x00\x00")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "tensorboard==2.21.0"], check=True)
    answer = subprocess.run([python, "-c", READER, board], check=True, capture_output=True, text=True).stdout
    assert json.loads(answer) == {
        "reward/mean": [[step, step / 8] for step in range(1, 300)],
        "gspo/clip_frac": [[step, 0.5] for step in range(1, 300)],
    }


async def test_a_step_reaches_everybody(store: Store, claim: Claim, tmp_path: Path) -> None:
    listener = Listener()
    reports = Reports(store, claim, JobDir(tmp_path), [listener])
    await reports.step(StepReport(1, 1, 1, HEALTHY), [])
    await reports.evaluation(1, {"eval/reward/mean": 0.25})
    (row,) = await store.metrics.read(claim.job_id)
    assert row == {"step": 1, **HEALTHY, "eval/reward/mean": 0.25}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "version": 1, "epoch": 1, **HEALTHY},
        {"step": 1, "epoch": 1, "eval/reward/mean": 0.25},
    ]
    assert listener.told == [(1, HEALTHY), (1, {"eval/reward/mean": 0.25})]
    (board,) = (tmp_path / "tensorboard").iterdir()
    assert len(list(records(board))) == 3
    assert [one.type for one in await store.events.read(claim.job_id)][-1] == "step"


async def test_an_alarm_is_an_event_with_its_numbers_and_advice(store: Store, claim: Claim, tmp_path: Path) -> None:
    reports = Reports(store, claim, JobDir(tmp_path))
    await reports.step(StepReport(1, 1, 1, {**HEALTHY, "disk/free_bytes": 1e9}), [])
    (alert,) = [one.data for one in await store.events.read(claim.job_id) if one.type == "alert"]
    assert (alert["kind"], alert["step"], alert["value"]) == ("disk_nearly_full", 1, 1e9)
    assert alert["bound"] == 8e9
    assert "keep fewer checkpoints" in alert["advice"]


async def test_a_listener_that_fails_costs_no_step_and_hears_nothing_more(
    store: Store, claim: Claim, tmp_path: Path
) -> None:
    broken, sound = Listener(RuntimeError("no network")), Listener()
    reports = Reports(store, claim, JobDir(tmp_path), [broken, sound])
    for step in (1, 2):
        await reports.step(StepReport(step, step, 1, HEALTHY), [])
    assert (len(broken.told), len(sound.told)) == (1, 2)


async def test_a_disk_that_was_full_for_a_moment_costs_a_listener_that_step_alone(
    store: Store, claim: Claim, tmp_path: Path
) -> None:
    listener = Listener(OSError(errno.ENOSPC, "No space left on device"))
    reports = Reports(store, claim, JobDir(tmp_path), [listener])
    for step in (1, 2):
        await reports.step(StepReport(step, step, 1, HEALTHY), [])
    assert [step for step, _ in listener.told] == [1, 2]


async def test_who_lost_the_job_writes_no_file(store: Store, claim: Claim, tmp_path: Path) -> None:
    await store.jobs.release(claim.job_id, claim.token)
    assert await store.jobs.claim("heir") is not None
    with pytest.raises(Fenced):
        await Reports(store, claim, JobDir(tmp_path)).step(StepReport(1, 1, 1, HEALTHY), [])
    assert os.listdir(tmp_path) == []


def test_what_is_said_of_the_disk(tmp_path: Path) -> None:
    files = (WeightFile("a", 3, "0" * 64), WeightFile("b", 4, "0" * 64))
    told = disk_metrics(tmp_path, WeightsManifest("job_a", 0, 1, 0, files))
    assert told["disk/version_bytes"] == 7
    assert 0 < told["disk/free_bytes"] <= told["disk/total_bytes"]
