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

from services.durable import append_line
from services.trainer.checkpoints import CheckpointStore
from services.trainer.disk import PatientDisk
from tests.core.learner_support import write_model
from tests.services.loop_kit import Loop, a_loop, fingerprint, loop_spec, plain_loop, saved
from tests.services.test_trainer_loop import serve

DISK_BYTES = 6 * 2**20


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
    events = await loop.store.read_events(loop.job, "0", count=1000)
    return [event.data["message"] for event in events if event.type == "alert" and event.data["kind"] == kind]


@pytest.mark.parametrize("leave_bytes", [0, 150_000], ids=["nothing fits", "logs and weights fit"])
async def test_a_full_disk_is_waited_for(
    redis_client: Redis, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, leave_bytes: int
) -> None:
    monkeypatch.setattr("services.trainer.disk.RETRY_S", 0.05)
    spec = loop_spec(write_model(tmp_path / "model"), steps=3, checkpoints={"keep_versions": 1})
    async with a_loop(redis_client, small_disk / "jobs", spec, monkeypatch) as loop:
        serving = asyncio.create_task(serve(loop))
        async with asyncio.timeout(60):
            while (await loop.store.get_job(loop.job)).step < 1:
                await asyncio.sleep(0.01)
            ballast = fill(small_disk, leave_bytes=leave_bytes)
            while not await alerts(loop, "disk_full"):
                assert not serving.done(), serving.result()
                await asyncio.sleep(0.01)
            ballast.unlink()
            await serving
        assert await alerts(loop, "disk_has_room")
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(spec, tmp_path))
    assert CheckpointStore(loop.job_dir).newest_first()[0].position.step == spec.steps
    assert not list(loop.job_dir.rglob(".tmp-*")), "what did not fit was left behind"


async def test_another_failure_is_not_waited_for() -> None:
    told: list[str] = []

    async def tell(kind: str, _message: str) -> None:
        told.append(kind)

    def forbidden() -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.raises(PermissionError):
        await PatientDisk(tell).write("a file", forbidden)
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
