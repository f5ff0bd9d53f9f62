"""Checkpoints over HTTP: looked at, exported by a process apart, removed unless a job would go on from them."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo_core.position import Position
from services.files.checkpoints import CheckpointStore
from services.files.export import ExportFailed
from services.files.export_claim import STALE_S, ExportClaim
from services.files.job_dir import JobDir, step_name
from services.state.jobs import DesiredState, WentBack
from services.state.store import Store
from tests.patience import HANG_S
from tests.services.api.api_kit import SPEC, application, error_of, http_to


@pytest.fixture
async def http(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        yield http


@pytest.fixture
async def job(http: httpx.AsyncClient) -> str:
    return str((await http.post("/v1/jobs", json=SPEC)).json()["id"])


def write(jobs_dir: Path, job: str, step: int) -> Path:
    path = JobDir(jobs_dir / job).checkpoints / step_name(Position(1, step))
    (path / "learner").mkdir(parents=True)
    (path / "learner" / "rank-00000.safetensors").write_bytes(b"x" * 100)
    (path / "manifest.json").write_bytes(b"{}")
    return path


async def test_a_checkpoint_shows_its_files_and_is_removed_whole(
    http: httpx.AsyncClient, store: Store, job: str, tmp_path: Path
):
    old, new = (write(tmp_path / "jobs", job, step) for step in (10, 20))
    JobDir(tmp_path / "jobs" / job).export(Position(1, 10)).mkdir(parents=True)
    listed = (await http.get(f"/v1/jobs/{job}/checkpoints")).json()["data"]
    assert [one["id"] for one in listed] == [f"{job}/1/20", f"{job}/1/10"]
    detail = (await http.get(f"/v1/checkpoints/{job}/1/10")).json()
    assert detail["files"] == [
        {"path": "learner/rank-00000.safetensors", "size_bytes": 100},
        {"path": "manifest.json", "size_bytes": 2},
    ]
    assert detail["export"].pop("written_at") is not None
    assert detail["export"] == {
        "object": "checkpoint.export",
        "status": "ready",
        "path": f"jobs/{job}/exports/{old.name}",
        "message": None,
        "files": [],
    }
    again = await http.post(f"/v1/checkpoints/{job}/1/10/export")
    assert (again.status_code, again.json()["export"]["status"]) == (202, "ready")

    held = await http.delete(f"/v1/checkpoints/{job}/1/20")
    assert (held.status_code, error_of(held)["code"]) == (409, "checkpoint_in_use")
    assert (await http.delete(f"/v1/checkpoints/{job}/1/10")).status_code == 204
    assert (old.exists(), new.exists()) == (False, True)
    assert list((tmp_path / "jobs" / job / "exports").iterdir()) == []
    await store.jobs.set_desired_state(job, DesiredState.CANCELLED)
    assert (await http.delete(f"/v1/checkpoints/{job}/1/20")).status_code == 204
    for method, path in (("GET", ""), ("POST", "/export"), ("DELETE", "")):
        gone = await http.request(method, f"/v1/checkpoints/{job}/1/20{path}")
        assert (gone.status_code, error_of(gone)["code"]) == (404, "checkpoint_not_found")


@pytest.mark.parametrize("is_written_down", [True, False])
async def test_of_a_job_that_went_back_the_checkpoint_stays_that_it_resumes_from(
    http: httpx.AsyncClient, store: Store, job: str, tmp_path: Path, is_written_down: bool
):
    """Who asked for it may have died before it was written down."""
    old, void = (write(tmp_path / "jobs", job, step) for step in (10, 20))
    await store.jobs.set_desired_state(job, DesiredState.CANCELLED)
    back = WentBack(2, Position(1, 10))
    await store.jobs.reopen(await store.jobs.get(job), epoch=1, settings={}, went_back=back)
    if is_written_down:
        CheckpointStore(JobDir(tmp_path / "jobs" / job)).go_back(*back)
        for path in (f"/v1/jobs/{job}/checkpoints", f"/v1/fine_tuning/jobs/{job}/checkpoints"):
            listed = (await http.get(path)).json()["data"]
            assert [one["id"] for one in listed] == [f"{job}/1/10", f"{job}/1/20"]
    held = await http.delete(f"/v1/checkpoints/{job}/1/10")
    assert (held.status_code, error_of(held)["code"]) == (409, "checkpoint_in_use")
    assert (await http.delete(f"/v1/checkpoints/{job}/1/20")).status_code == 204
    assert (old.exists(), void.exists()) == (True, False)


async def test_the_list_of_checkpoints_looks_at_no_logs(http: httpx.AsyncClient, job: str, tmp_path: Path):
    """There may be a million of them; here their folder is one that cannot be listed."""
    write(tmp_path / "jobs", job, 20)
    JobDir(tmp_path / "jobs" / job).batches.write_text("no folder")
    listed = await http.get(f"/v1/jobs/{job}/checkpoints")
    assert [one["id"] for one in listed.json()["data"]] == [f"{job}/1/20"]


async def test_what_a_job_has_left_is_not_kept_for_it(http: httpx.AsyncClient, job: str, tmp_path: Path):
    """Also where there is nothing else: it goes on from its logs."""
    void = write(tmp_path / "jobs", job, 20)
    CheckpointStore(JobDir(tmp_path / "jobs" / job)).go_back(2, Position(1, 5))
    assert (await http.delete(f"/v1/checkpoints/{job}/1/20")).status_code == 204
    assert not void.exists()


async def test_where_no_record_says_what_was_left_the_newest_name_stays(
    http: httpx.AsyncClient, job: str, tmp_path: Path
):
    old, new = (write(tmp_path / "jobs", job, step) for step in (10, 20))
    new.rename(new.with_name(step_name(Position(2, 20))))
    held = await http.delete(f"/v1/checkpoints/{job}/2/20")
    assert (held.status_code, error_of(held)["code"]) == (409, "checkpoint_in_use")
    assert (await http.delete(f"/v1/checkpoints/{job}/1/10")).status_code == 204
    assert not old.exists()


async def test_an_export_that_fails_says_why(http: httpx.AsyncClient, job: str, tmp_path: Path):
    """By the real process, of a checkpoint whose model is not there."""
    write(tmp_path / "jobs", job, 10)
    begun: dict[str, Any] = (await http.post(f"/v1/checkpoints/{job}/1/10/export")).json()["export"]
    assert begun["status"] == "exporting"
    deadline = time.monotonic() + 90
    while begun["status"] == "exporting" and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        begun = (await http.get(f"/v1/checkpoints/{job}/1/10")).json()["export"]
    assert begun["status"] == "failed"
    assert begun["message"]
    assert begun["path"] is None


async def shown(http: httpx.AsyncClient, where: str, status: str) -> dict[str, Any]:
    """Its export, once it has this status."""
    async with asyncio.timeout(HANG_S):
        while True:
            export: dict[str, Any] = (await http.get(where)).json()["export"]
            if export["status"] == status:
                return export
            await asyncio.sleep(0.01)


async def none_is_under_way() -> None:
    """What an export leaves is there once its task is over, a moment after its directory."""
    async with asyncio.timeout(HANG_S):
        while any(task.get_name().startswith("export ") for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("why", ["", "no room"])
async def test_every_process_of_the_api_knows_what_another_exports(
    http: httpx.AsyncClient, store: Store, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
):
    write(tmp_path / "jobs", job, 10)
    where, may_end, num_begun = f"/v1/checkpoints/{job}/1/10", threading.Event(), 0

    def export(job_dir: JobDir, epoch: int, step: int, target: Path) -> Path:
        nonlocal num_begun
        num_begun += 1
        may_end.wait(HANG_S)
        if why:
            raise ExportFailed(why)
        target.mkdir()
        return target

    monkeypatch.setattr("services.files.export.export_checkpoint", export)
    monkeypatch.setattr("services.api.views.exports.BEAT_S", 0.01)
    async with application(store, jobs_dir=tmp_path / "jobs") as other, http_to(other) as elsewhere:
        assert (await http.post(f"{where}/export")).json()["export"]["status"] == "exporting"
        while not num_begun:
            await asyncio.sleep(0.01)
        assert (await elsewhere.get(where)).json()["export"]["status"] == "exporting"
        if not why:
            await elsewhere.post(f"{where}/export")
        may_end.set()
        said = [await shown(one, where, "failed" if why else "ready") for one in (http, elsewhere)]
        assert [one["message"] for one in said] == [why or None] * 2
        assert num_begun == 1


async def test_an_export_whose_process_was_killed_is_begun_again(
    http: httpx.AsyncClient, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path / "jobs", job, 10)
    export = JobDir(tmp_path / "jobs" / job).export(Position(1, 10))
    monkeypatch.setattr("services.files.export.export_checkpoint", lambda *_: export.mkdir())
    monkeypatch.setattr("services.api.views.exports.BEAT_S", 0.01)
    clock = [time.time()]
    killed = ExportClaim(export, lambda: clock[0] - STALE_S + 0.5)
    assert killed.take()
    where = f"/v1/checkpoints/{job}/1/10"
    assert (await http.get(where)).json()["export"]["status"] == "exporting"
    await http.post(f"{where}/export")
    await shown(http, where, "ready")
    await none_is_under_way()
    assert [one.name for one in export.parent.iterdir()] == [export.name]


async def test_an_export_of_a_job_that_was_removed_meanwhile_leaves_nothing(
    http: httpx.AsyncClient, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path / "jobs", job, 10)
    has_ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def export(job_dir: JobDir, *_: object) -> None:
        shutil.rmtree(job_dir.path)
        loop.call_soon_threadsafe(has_ended.set)
        raise ExportFailed("its files are gone")

    monkeypatch.setattr("services.files.export.export_checkpoint", export)
    await http.post(f"/v1/checkpoints/{job}/1/10/export")
    await has_ended.wait()
    await none_is_under_way()
    assert not (tmp_path / "jobs" / job).exists()


def test_a_claim_is_its_holders_until_it_is_stale(tmp_path: Path):
    now = [1000.0]
    first, second = (ExportClaim(tmp_path / "exports" / "one", lambda: now[0]) for _ in range(2))
    assert first.take()
    assert not second.take()
    now[0] += STALE_S - 1
    first.beat()
    now[0] += STALE_S - 1
    assert not second.take()
    now[0] += 1
    assert second.take()
    first.leave("too late")  # which ends no claim of another
    assert second.is_held
    second.leave("why")
    assert (second.is_held, first.failure) == (False, "why")
    assert first.take()
    assert first.failure is None


async def test_checkpoints_that_their_trainer_removes_meanwhile_break_no_list(
    http: httpx.AsyncClient, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A name is seen, and what it named is gone when it is looked at: a checkpoint, and a file of another one."""
    kept, gone = (write(tmp_path / "jobs", job, step) for step in (10, 20))
    seen, walked = list(kept.parent.iterdir()), list(os.walk(kept))
    shutil.rmtree(gone)
    (kept / "learner" / "rank-00000.safetensors").unlink()
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(seen))
    monkeypatch.setattr(Path, "rglob", lambda self, _: (Path(folder, one) for folder, _, all in walked for one in all))
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    monkeypatch.setattr(os, "walk", lambda path: walked if path == kept else [])
    answer = await http.get(f"/v1/jobs/{job}/checkpoints")
    assert [(one["id"], one["size_bytes"]) for one in answer.json()["data"]] == [(f"{job}/1/10", 2)]
    detail = (await http.get(f"/v1/checkpoints/{job}/1/10")).json()
    assert [one["path"] for one in detail["files"]] == ["manifest.json"]
