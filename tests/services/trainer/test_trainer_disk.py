"""A full disk is told and waited for: the job goes on when there is room, and has lost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.files.checkpoints import CheckpointStore
from services.files.durable import append_line
from services.files.job_dir import JobDir, JobsDir
from services.files.job_records import JobRecords
from services.state.queue import Bus
from services.state.store import Store
from services.trainer.telling.disk_waits import DiskWaits
from services.trainer.telling.event_file import EventFile
from services.trainer.telling.run_phase import RunPhase
from services.trainer.worker import TrainerWorker
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import Loop, a_loop, fingerprint, loop_spec, plain_loop, saved
from tests.services.trainer.test_trainer_loop import serve
from tests.services.trainer.test_trainer_reports import records
from tests.services.trainer.trainer_kit import InProcess

DISK_BYTES = 6 * 2**20
SPEC = '{"model": "m", "environments": [{"ref": "made:Up"}]}'


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own. Mounting takes the rights of root."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path, *, leave_bytes: int = 0) -> Path:
    """Until nothing more fits."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(max(0, file.tell() - leave_bytes))
    return ballast


async def alerts(loop: Loop, kind: str) -> list[str]:
    events = await loop.store.events.read(loop.job, "0", count=1000)
    return [event.data["message"] for event in events if event.type == "alert" and event.data["kind"] == kind]


@pytest.mark.parametrize("leave_bytes", [0, 150_000], ids=["nothing fits", "logs and weights fit"])
async def test_a_full_disk_is_waited_for(
    redis_client: Redis, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, leave_bytes: int
) -> None:
    monkeypatch.setattr("services.trainer.telling.disk_waits.RETRY_S", 0.05)
    spec = loop_spec(write_model(tmp_path / "model"), steps=3, checkpoints={"keep_versions": 1})
    async with a_loop(redis_client, small_disk / "jobs", spec, monkeypatch) as loop:
        serving = asyncio.create_task(serve(loop))
        async with asyncio.timeout(HANG_S):
            while (await loop.store.jobs.get(loop.job)).step < 1:
                await asyncio.sleep(0.01)
            ballast = fill(small_disk, leave_bytes=leave_bytes)
            while not await alerts(loop, "disk_full"):
                assert not serving.done(), serving.result()
                await asyncio.sleep(0.01)
            ballast.unlink()
            await serving
        assert await alerts(loop, "disk_has_room")
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(spec, tmp_path))
    assert CheckpointStore(JobDir(loop.job_dir)).newest_first()[0].position.step == spec.steps
    assert not list(loop.job_dir.rglob(".tmp-*")), "what did not fit was left behind"


async def test_another_failure_is_not_waited_for() -> None:
    told: list[str] = []

    async def tell(kind: str, _message: str) -> None:
        told.append(kind)

    def forbidden() -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.raises(PermissionError):
        await DiskWaits(tell).write("a file", forbidden)
    assert told == []


def test_a_line_that_does_not_fit_leaves_no_half_line(small_disk: Path) -> None:
    path = small_disk / "lines"
    append_line(path, b"first")
    ballast = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, bytes(10_000))
    ballast.unlink()
    append_line(path, b"second")
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_record_for_tensorboard_that_does_not_fit_leaves_nothing_behind(small_disk: Path) -> None:
    """Readers take what follows half a record for damage."""
    events = EventFile(small_disk, "epoch000001")
    many = {f"metric/{number}": 1.0 for number in range(1000)}
    for step in (1, 2):
        ballast = fill(small_disk)
        with pytest.raises(OSError, match="No space left"):
            events.add(step, many)
        ballast.unlink()
        events.add(step, many)
    assert len(list(records(small_disk / "events.out.tfevents.epoch000001"))) == 3


async def test_a_job_is_claimed_when_there_is_room_to_write_that_down(
    redis_client: Redis, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.files.disk_space.RETRY_S", 0.05)
    store = Store(redis_client, jobs_dir=JobsDir(small_disk / "jobs"), waits_for_room=True)
    await store.load_functions()
    job = (await store.jobs.create("{}")).id
    ballast = fill(small_disk)
    claiming = asyncio.create_task(store.jobs.claim("trainer"))
    async with asyncio.timeout(HANG_S):
        while (await store.jobs.get(job)).status != "starting":
            assert not claiming.done(), claiming.result()
            await asyncio.sleep(0.01)
        ballast.unlink()
        claim = await claiming
    assert claim is not None
    assert JobRecords(JobDir(small_disk / "jobs" / job)).newest_status()[1]["status"] == "starting"


async def test_a_disk_that_is_full_at_the_wrong_moment_is_no_reason_for_a_job_to_end(
    redis_client: Redis, small_disk: Path
) -> None:
    """Whatever write of a run it is that nobody waits for: the job is left to the next trainer."""
    store = Store(redis_client, jobs_dir=JobsDir(small_disk / "jobs"))
    await store.load_functions()
    job = (await store.jobs.create(SPEC)).id

    class Run:
        phase = RunPhase()

        async def run(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    stop = asyncio.Event()
    attempts = InProcess(store, lambda claim, spec: Run())  # type: ignore[arg-type, return-value]
    worker = TrainerWorker(store, Bus(redis_client), "trainer", attempts)
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await worker._serve(claim, stop, asyncio.Event())
    assert (await store.jobs.get(job)).status == "starting"


async def test_what_a_dead_trainer_left_half_written_goes(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(write_model(tmp_path / "model"), steps=1)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        dead = "weights/.tmp-dead/part", "checkpoints/.tmp-ep000000-dead/part", "batches/.tmp-ep000000-dead"
        alive = "weights/.tmp-ep000002-heir/part", "checkpoints/.tmp-ep000002-heir/part", "batches/.tmp-ep000002-heir"
        for name in (*dead, *alive):
            (loop.job_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (loop.job_dir / name).touch()
        await serve(loop)
    left = [path for path in loop.job_dir.rglob("*") if path.is_file() and ".tmp-" in str(path)]
    assert sorted(left) == sorted(loop.job_dir / name for name in alive), "a later trainer writes these"
