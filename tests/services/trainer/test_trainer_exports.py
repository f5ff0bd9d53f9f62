"""A trainer writes the exports that an API without torch has left to it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from services.api.views.exports import Exports
from services.files.checkpoints import CheckpointStore
from services.files.export import ExportFailed, ExportStopped
from services.files.export_claim import BEAT_S, DIED, PATIENCE_S, ExportClaim, ExportRequest
from services.files.job_dir import JobDir, JobsDir
from services.files.job_records import AcceptedJob, JobRecords
from services.process.cancelling import cancel_all
from services.process.settings import Settings
from services.state.fleet_records import TrainerRecord
from services.state.server import RedisServer
from services.state.store import Claim, Store
from services.trainer import exporting
from services.trainer.building import make_learner
from services.trainer.exporting import ExportErrands
from services.trainer.serving import serve
from services.trainer.telling.attempt_messages import AttemptEnd
from tests.core.learner_support import make_sequences, with_behavior, write_model
from tests.core.test_model_files import write_files
from tests.patience import HANG_S
from tests.services.api.api_kit import SPEC, application, http_to

AT = Position(1, 10)
Export = Callable[[JobDir, int, int, Path, Callable[[], bool]], Path]


class Idle:
    """Attempts none of which begins."""

    def is_ready(self) -> bool:
        return False

    async def run(self, claim: Claim, spec: JobSpec, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "LOOK_S", 0.01)


@pytest.fixture
def jobs(tmp_path: Path) -> JobsDir:
    return JobsDir(tmp_path / "jobs")


@pytest.fixture
def job(jobs: JobsDir, tmp_path: Path) -> JobDir:
    model = tmp_path / "model"
    model.mkdir()
    write_files(model)
    return accepted(jobs.job("job_a"), model)


def accepted(job: JobDir, model: Path) -> JobDir:
    """With a checkpoint, and an export that is asked for."""
    spec = JobSpec.model_validate(SPEC | {"model": str(model)})
    JobRecords(job).accept(AcceptedJob(spec.model_dump_json(), "", "now"))
    CheckpointStore(job).write(AT, Lineage(step=10), lambda folder: folder.mkdir())
    ExportRequest(job.export(AT)).ask()
    return job


@pytest.fixture
def doing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Export], None]:
    """Has something else done where a checkpoint would be exported."""
    return lambda export: monkeypatch.setattr(exporting, "export_checkpoint", export)


def write(_job: JobDir, _epoch: int, _step: int, target: Path, _goes_on: Callable[[], bool]) -> Path:
    target.mkdir()
    return target


def names(job: JobDir) -> list[str]:
    return sorted(path.name for path in job.exports.iterdir())


def test_a_request_is_answered_and_gone(job: JobDir, jobs: JobsDir, doing: Callable[[Export], None]) -> None:
    doing(write)
    ExportErrands(jobs).look()
    assert names(job) == [job.export(AT).name]
    ExportRequest(job.export(AT)).ask()  # as somebody may who has not seen the directory yet
    ExportErrands(jobs).look()
    assert names(job) == [job.export(AT).name]


@pytest.mark.usefixtures("redis_client")
async def test_a_trainer_sees_to_requests_while_it_has_no_job(
    job: JobDir, tmp_path: Path, redis_server: RedisServer, doing: Callable[[Export], None]
) -> None:
    doing(write)
    stop = asyncio.Event()
    settings = Settings(redis_url=redis_server.url, data_dir=tmp_path)
    trainer = asyncio.create_task(serve(settings, stop, Idle(), {"device": "cpu", "num_ranks": 1}))
    async with asyncio.timeout(HANG_S):
        while names(job) != [job.export(AT).name]:
            assert not trainer.done()
            await asyncio.sleep(0.01)
        stop.set()
        await trainer


def test_a_failure_is_told_and_the_request_is_gone(job: JobDir, jobs: JobsDir, doing: Callable[[Export], None]) -> None:
    def fail(*_: Any) -> Path:
        raise ExportFailed("the checkpoint is damaged")

    doing(fail)
    ExportErrands(jobs).look()
    claim, request = ExportClaim(job.export(AT)), ExportRequest(job.export(AT))
    assert (claim.failure, claim.is_held, request.exists) == ("the checkpoint is damaged", False, False)


def test_a_failure_that_a_full_disk_cannot_hold_is_not_tried_without_end(
    job: JobDir, jobs: JobsDir, doing: Callable[[Export], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Path:
        raise OSError(errno.ENOSPC, "no room")

    doing(full)
    monkeypatch.setattr(ExportClaim, "tell", full)
    ExportErrands(jobs).look()
    assert names(job) == []


def test_a_trainer_that_died_over_it_is_not_followed_by_the_next(
    job: JobDir, jobs: JobsDir, doing: Callable[[Export], None]
) -> None:
    """An export that ends its trainer, as for want of memory, would end each."""

    def begun(*_: Any) -> Path:
        raise AssertionError("it would die, too")

    doing(begun)
    claim = ExportClaim(job.export(AT), lambda: 0.0)  # touched long ago
    assert claim.take()
    ExportErrands(jobs).look()
    assert names(job) == [f".failed-{job.export(AT).name}"]
    assert ExportClaim(job.export(AT)).failure == DIED


def test_of_two_trainers_one_writes_it(job: JobDir, jobs: JobsDir, doing: Callable[[Export], None]) -> None:
    num_begun = 0

    def export(job: JobDir, epoch: int, step: int, target: Path, goes_on: Callable[[], bool]) -> Path:
        nonlocal num_begun
        num_begun += 1
        ExportErrands(jobs).look()  # the other one, in the middle of it
        assert goes_on()
        return write(job, epoch, step, target, goes_on)

    doing(export)
    ExportErrands(jobs).look()
    assert (num_begun, names(job)) == (1, [job.export(AT).name])


def test_a_trainer_without_the_model_leaves_it_to_another_and_says_why(
    job: JobDir, jobs: JobsDir, tmp_path: Path, doing: Callable[[Export], None]
) -> None:
    doing(write)
    request = ExportRequest(job.export(AT))
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    ExportErrands(jobs).look()
    assert request.waits_for.endswith(f"one that looked cannot: there is no directory {tmp_path / 'model'}")
    assert not ExportClaim(job.export(AT)).is_held
    (tmp_path / "elsewhere").rename(tmp_path / "model")
    ExportErrands(jobs).look()
    assert names(job) == [job.export(AT).name]


def test_what_was_given_up_is_not_answered(job: JobDir, jobs: JobsDir, doing: Callable[[Export], None]) -> None:
    doing(write)
    late = ExportRequest(job.export(AT), lambda: 0.0)
    late.renew()
    ExportErrands(jobs).look()
    assert not job.export(AT).is_dir()
    assert PATIENCE_S < 24 * 3600  # so that 1970 is long ago


def test_what_waits_behind_another_export_is_not_given_up(
    job: JobDir, jobs: JobsDir, tmp_path: Path, doing: Callable[[Export], None]
) -> None:
    second = accepted(jobs.job("job_b"), tmp_path / "model")
    now, touched = [0.0], list[float]()

    def export(job: JobDir, epoch: int, step: int, target: Path, goes_on: Callable[[], bool]) -> Path:
        if job.id != second.id:
            (waiting,) = second.exports.iterdir()
            soon = time.time() - PATIENCE_S / 2
            os.utime(waiting, (soon, soon))
            now[0] += BEAT_S
            assert goes_on()
            touched.append(waiting.stat().st_mtime - soon)
        return write(job, epoch, step, target, goes_on)

    doing(export)
    ExportErrands(jobs, lambda: now[0]).look()
    assert touched[0] > PATIENCE_S / 3
    assert second.export(AT).is_dir()


def test_what_is_asked_for_during_another_export_is_not_given_up(
    job: JobDir, jobs: JobsDir, tmp_path: Path, doing: Callable[[Export], None]
) -> None:
    now, touched = [0.0], list[float]()

    def export(job: JobDir, epoch: int, step: int, target: Path, goes_on: Callable[[], bool]) -> Path:
        (waiting,) = accepted(jobs.job("job_b"), tmp_path / "model").exports.iterdir()
        soon = time.time() - PATIENCE_S / 2
        os.utime(waiting, (soon, soon))
        now[0] += exporting.LOOK_BESIDE_S
        assert goes_on()
        touched.append(waiting.stat().st_mtime - soon)
        return write(job, epoch, step, target, goes_on)

    doing(export)
    ExportErrands(jobs, lambda: now[0]).look()
    assert touched[0] > PATIENCE_S / 3


async def test_a_trainer_that_ends_leaves_the_request_to_the_next(
    job: JobDir, jobs: JobsDir, doing: Callable[[Export], None]
) -> None:
    has_begun, has_ended = threading.Event(), threading.Event()

    def export(_job: JobDir, _epoch: int, _step: int, _target: Path, goes_on: Callable[[], bool]) -> Path:
        has_begun.set()
        while goes_on():
            has_ended.wait(0.01)
        has_ended.set()
        raise ExportStopped("stopped")

    doing(export)
    running = asyncio.create_task(ExportErrands(jobs).run())
    await asyncio.to_thread(has_begun.wait, HANG_S)
    await cancel_all([running])
    request, claim = ExportRequest(job.export(AT)), ExportClaim(job.export(AT))
    await asyncio.to_thread(has_ended.wait, HANG_S)
    async with asyncio.timeout(HANG_S):
        while claim.is_held:
            await asyncio.sleep(0.01)
    assert (request.is_open, claim.failure) == (True, None)
    doing(write)
    ExportErrands(jobs).look()
    assert names(job) == [job.export(AT).name]


async def test_a_trainer_that_ends_gives_up_its_claim_before_its_thread_does(
    job: JobDir, jobs: JobsDir, doing: Callable[[Export], None]
) -> None:
    """Its process may end first; a claim that is left would count as a death."""
    begun, may_end = threading.Event(), threading.Event()

    def stuck(_job: JobDir, _epoch: int, _step: int, _target: Path, _goes_on: Callable[[], bool]) -> Path:
        begun.set()
        may_end.wait(HANG_S)
        raise ExportStopped("nobody waits")

    doing(stuck)
    errands = asyncio.create_task(ExportErrands(jobs).run())
    try:
        assert await asyncio.to_thread(begun.wait, HANG_S)
        claim = ExportClaim(job.export(AT))
        assert claim.is_held
        await cancel_all([errands])
        assert not claim.is_held
        assert ExportRequest(job.export(AT)).is_open
    finally:
        may_end.set()


def test_an_export_that_nobody_wants_any_more_is_stopped(
    job: JobDir, jobs: JobsDir, doing: Callable[[Export], None]
) -> None:
    """Its checkpoint is removed, at the last moment too."""

    def removed_in_time(job: JobDir, epoch: int, step: int, target: Path, goes_on: Callable[[], bool]) -> Path:
        ExportRequest(target).withdraw()
        assert not goes_on()
        raise ExportStopped("stopped")

    def removed_late(job: JobDir, epoch: int, step: int, target: Path, goes_on: Callable[[], bool]) -> Path:
        ExportRequest(target).withdraw()
        CheckpointStore(job).remove(AT)
        return write(job, epoch, step, target, goes_on)

    for one in (removed_in_time, removed_late):
        ExportRequest(job.export(AT)).ask()
        doing(one)
        ExportErrands(jobs).look()
        assert names(job) == []


async def test_trouble_with_files_ends_no_trainer(
    job: JobDir, jobs: JobsDir, doing: Callable[[Export], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(job: JobDir, *_: Any) -> Path:
        shutil.rmtree(job.path)
        raise FileNotFoundError(job.path)

    doing(remove)
    looks = 0
    right_one = exporting.requested_in

    def failing(jobs: JobsDir) -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError(errno.ESTALE, "stale")
        return right_one(jobs)

    monkeypatch.setattr(exporting, "requested_in", failing)
    running = asyncio.create_task(ExportErrands(jobs).run())
    async with asyncio.timeout(HANG_S):
        while job.path.exists() or looks < 4:
            await asyncio.sleep(0.01)
    assert not running.done()
    await cancel_all([running])
    assert list(jobs.path.iterdir()) == []


async def export_of(http: httpx.AsyncClient, where: str, **until: str) -> dict[str, Any]:
    """Its export, once it says so."""
    async with asyncio.timeout(HANG_S):
        while True:
            export: dict[str, Any] = (await http.get(where)).json()["export"]
            if until.items() <= export.items():
                return export
            await asyncio.sleep(0.01)


async def test_an_api_without_torch_has_a_trainer_export(
    store: Store, jobs: JobsDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real process: bit for bit what the trainer would have written, also of a job with several ranks."""
    monkeypatch.setattr("services.files.export.find_spec", lambda name: None)
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    async with application(store, jobs_dir=jobs.path) as app, http_to(app) as http:
        created = await http.post("/v1/jobs", json=SPEC | {"model": str(model), "resources": {"device": "cpu"}})
        job = jobs.job(str(created.json()["id"]))
        spec = JobSpec.model_validate_json((await store.jobs.get(job.id)).spec)
        of_ranks = spec.model_dump(mode="json") | {"learner": {"context_parallel": 2, "replicas": 2}}
        JobRecords(job).accept(AcceptedJob(json.dumps(of_ranks), "", "now"))
        learner, sequences = make_learner(spec), make_sequences(6)
        with_behavior(learner, sequences)
        learner.step(sequences)
        CheckpointStore(job).write(AT, Lineage(step=10), learner.save_state)
        learner.save_weights(tmp_path / "expected")

        where = f"/v1/checkpoints/{job.id}/1/10"
        begun = (await http.post(f"{where}/export")).json()["export"]
        waits = "it waits for a trainer"
        assert (begun["status"], begun["message"]) == ("exporting", f"{waits}; none is running at the moment")
        await store.fleet.register_trainer(TrainerRecord(id="trainer-0"))
        assert (await export_of(http, where, status="exporting"))["message"] == waits
        monkeypatch.undo()  # the trainer has torch
        monkeypatch.setattr(exporting, "LOOK_S", 0.01)
        running = asyncio.create_task(ExportErrands(jobs).run())
        assert (await export_of(http, where, status="ready"))["path"] == f"jobs/{job.id}/exports/{job.export(AT).name}"
        async with asyncio.timeout(HANG_S):
            while len(names(job)) > 1:  # what it leaves is there a moment longer
                await asyncio.sleep(0.01)
        await cancel_all([running])
    for path in (tmp_path / "expected").iterdir():
        assert (job.export(AT) / path.name).read_bytes() == path.read_bytes()


def test_what_became_ready_between_two_looks_is_no_failure(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ExportRequest(job.export(AT)).withdraw()
    job.export(AT).mkdir()
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    assert Exports().view(job, AT).status == "ready"


async def test_an_api_without_torch_tells_what_became_of_a_request(
    store: Store, jobs: JobsDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given up by all, asked anew, failed, and removed with its checkpoint."""
    monkeypatch.setattr("services.files.export.find_spec", lambda name: None)
    async with application(store, jobs_dir=jobs.path) as app, http_to(app) as http:
        created = await http.post("/v1/jobs", json=SPEC)
        job, where = jobs.job(str(created.json()["id"])), f"/v1/checkpoints/{created.json()['id']}/1/10"
        accepted(job, Path("m"))
        CheckpointStore(job).write(Position(1, 20), Lineage(step=20), lambda folder: folder.mkdir())
        ExportRequest(job.export(AT), lambda: 0.0).renew()
        assert (await export_of(http, where, status="failed"))["message"].startswith("no trainer has begun it for")
        assert (await http.post(f"{where}/export")).json()["export"]["status"] == "exporting"
        claim = ExportClaim(job.export(AT))
        claim.tell("why")
        ExportRequest(job.export(AT)).withdraw()
        assert (await export_of(http, where, status="failed"))["message"] == "why"
        assert (await http.post(f"{where}/export")).json()["export"]["status"] == "exporting"
        assert (await http.delete(where)).status_code == 204
        assert names(job) == []
