"""A request for an export waits for a trainer, and not for ever; an export beside training gives way to it."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from services.files.checkpoints import CheckpointStore
from services.files.export import ExportFailed, ExportStopped, export_checkpoint
from services.files.export_claim import PATIENCE_S, STALE_S, ExportClaim, ExportRequest, requested_in
from services.files.job_dir import JobDir, JobsDir
from tests.patience import HANG_S

AT = Position(2, 7)


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    job = JobDir(tmp_path / "jobs" / "job_a")
    job.accepted.parent.mkdir(parents=True)
    job.accepted.touch()
    CheckpointStore(job).write(AT, Lineage(step=7), lambda folder: folder.mkdir())
    return job


def test_a_request_waits_until_it_is_given_up_and_can_be_asked_anew(job: JobDir) -> None:
    now = [1000.0]
    request = ExportRequest(job.export(AT), lambda: now[0])
    assert (request.exists, request.is_open, request.given_up) == (False, False, None)
    request.ask()
    assert (request.is_open, request.waits_for, request.given_up) == (True, "it waits for a trainer", None)
    now[0] += PATIENCE_S - 1
    request.decline("there is no directory m")
    assert request.waits_for.endswith("cannot: there is no directory m")
    now[0] += 1  # what a trainer that cannot do it says is no patience
    assert not request.is_open
    assert request.given_up == "no trainer has begun it for 10 minutes; one that looked cannot: there is no directory m"
    request.ask()
    assert (request.is_open, request.waits_for) == (True, "it waits for a trainer")
    now[0] += PATIENCE_S - 1
    request.renew()
    now[0] += PATIENCE_S - 1
    assert request.is_open
    now[0] += 1
    assert request.given_up == "no trainer has begun it for 10 minutes: see that one runs (gspo workers)"
    request.withdraw()
    request.decline("too late")
    request.renew()
    assert (request.exists, list(job.exports.iterdir())) == (False, [])


def test_a_full_disk_holds_no_claim_and_prolongs_no_request(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    request = ExportRequest(job.export(AT), lambda: now[0])
    request.ask()

    def full(*_: object) -> int:
        if request.exists:
            os.utime(job.exports / f".requested-{job.export(AT).name}", (now[0], now[0]))
        raise OSError(errno.ENOSPC, "no room")

    class Full:
        """A file that was opened, and takes nothing."""

        def __init__(self, path: Path, mode: str) -> None:
            self._file = open(path, mode)  # noqa: SIM115 - what `Path.open` returns
            self.read, self.flush, self.write = self._file.read, full, full

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

    claim = ExportClaim(job.export(AT))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode="r", **_: Full(path, mode))
        with pytest.raises(OSError, match="no room"):
            claim.take()
        now[0] += PATIENCE_S
        request.decline("no room")
    assert not claim.is_held
    assert not request.is_open


def test_requests_are_found_among_accepted_jobs_alone(job: JobDir) -> None:
    jobs = JobsDir(job.path.parent)
    ExportRequest(job.export(AT)).ask()
    ExportClaim(job.export(Position(1, 3))).take()
    other = jobs.job("job_b")
    other.exports.mkdir(parents=True)
    ExportRequest(other.export(AT)).ask()
    jobs.job("job_c").path.mkdir()
    (jobs.path / "a file").touch()
    assert list(requested_in(jobs)) == [(job, AT)]
    jobs.remove(job.id)
    assert list(requested_in(jobs)) == []
    with pytest.raises(FileNotFoundError):  # nor does it come back with a request
        ExportRequest(job.export(AT)).ask()


def test_a_claim_that_nobody_wants_any_more_is_given_back_with_what_was_known(job: JobDir) -> None:
    claim = ExportClaim(job.export(AT))
    assert claim.take()
    claim.leave("why")
    assert not claim.take(lambda: False)
    assert (claim.is_held, claim.failure) == (False, "why")


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """In place of the interpreter."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr("services.files.export.sys", SimpleNamespace(executable=str(path)))


def test_an_export_that_was_killed_says_what_to_do_and_leaves_nothing(
    job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first to be killed, sees no GPU, and takes few threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    told = tmp_path / "told"
    script = (
        f'echo $(cat /proc/self/oom_score_adj) $(nice) $OMP_NUM_THREADS "$CUDA_VISIBLE_DEVICES". > {told}; kill -9 $$'
    )
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises(ExportFailed, match="want of memory: give the container that exports more memory"):
        export_checkpoint(job, 2, 7, job.export(AT))
    assert told.read_text() == f"1000 {min(os.nice(0) + 10, 19)} 2 .\n"
    assert list(job.exports.iterdir()) == []


def test_an_export_can_be_stopped(job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    stand_in(tmp_path, monkeypatch, f"echo $$ > {pid}; exec sleep {10 * HANG_S}")
    with pytest.raises(ExportStopped):
        export_checkpoint(job, 2, 7, job.export(AT), lambda: not pid.exists())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert list(job.exports.iterdir()) == []


def test_an_export_of_a_job_that_is_removed_meanwhile_does_not_bring_it_back(
    job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = tmp_path / "may end"
    stand_in(tmp_path, monkeypatch, f"while [ ! -e '{may_end}' ]; do sleep 0.01; done")
    raised: list[BaseException] = []

    def export() -> None:
        try:
            export_checkpoint(job, 2, 7, job.export(AT))
        except OSError as error:
            raised.append(error)

    exporting = threading.Thread(target=export)
    exporting.start()
    deadline = time.monotonic() + HANG_S
    while not (job.exports.is_dir() and list(job.exports.iterdir())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    JobsDir(job.path.parent).remove(job.id)
    may_end.touch()
    exporting.join(HANG_S)
    assert [type(one) for one in raised] == [FileNotFoundError]
    assert list(job.path.parent.iterdir()) == []


def test_whether_a_holder_has_died_is_told_from_one_look(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two its holder may end well."""
    claim, mine = (ExportClaim(job.export(AT), clock=lambda: now[0]) for _ in range(2))
    now = [1000.0]
    assert not claim.is_abandoned
    assert mine.take()
    now[0] += STALE_S
    assert claim.is_abandoned
    looks: list[Path] = []
    monkeypatch.setattr(Path, "stat", lambda path, **_: (looks.append(path), os.stat(path))[1])
    assert claim.is_abandoned
    assert len(looks) == 1
