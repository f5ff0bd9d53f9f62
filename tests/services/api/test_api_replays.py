"""Replays over HTTP: what the command answers, worked on once, apart, within bounds; a restart is told honestly."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gspo_core.cli import main
from gspo_core.log import layout
from services.api.routes.replays import _view
from services.api.views.replays import MAX_TOGETHER, MAX_WAITING, ReplayWork, _keep
from services.files.erasing import erase, of_member
from services.files.job_dir import JobDir
from services.files.replays import MOST_KEPT, AskedReplay, Replays
from services.state.jobs import JobStatus
from services.state.store import Store
from tests.core.learner_support import write_model
from tests.core.past_kit import GROUPS, MadePast, make_past, spec_of
from tests.patience import HANG_S
from tests.services.api.api_kit import application, error_of, http_to

# torch starts slowly on a busy machine
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("warm_children")]
DEADLINE_S = HANG_S
GROUP = 3 * GROUPS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    model = write_model(tmp_path_factory.mktemp("model"))
    return make_past(tmp_path_factory.mktemp("jobs") / "job_made", spec_of(model))


@pytest.fixture
async def app(store: Store, tmp_path: Path) -> AsyncIterator[FastAPI]:
    async with application(store, jobs_dir=tmp_path / "jobs") as app:
        yield app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with http_to(app) as http:
        yield http


@pytest.fixture
async def job(store: Store, tmp_path: Path, made: MadePast) -> str:
    """A job that took six steps, with what they left."""
    job = (await store.jobs.create(made.spec)).id
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    for status in (JobStatus.RUNNING, JobStatus.SUCCEEDED):
        await store.jobs.update_progress(job, claim.token, 6, 6)
        await store.jobs.set_status(job, status, token=claim.token)
    shutil.copytree(made.folder, tmp_path / "jobs" / job, dirs_exist_ok=True)
    return job


async def ask(http: httpx.AsyncClient, job: str, **question: Any) -> dict[str, Any]:
    answer = await http.post(f"/v1/jobs/{job}/replays", json=question)
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def until(http: httpx.AsyncClient, job: str, name: str, *wanted: str) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found: dict[str, Any] = (await http.get(f"/v1/jobs/{job}/replays/{name}")).json()
        if found["status"] in wanted:
            return found
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.02)


async def test_the_answer_is_that_of_the_command_and_outlives_the_process(
    http: httpx.AsyncClient, job: str, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"first": 3, "last": 4, "set": {"optimizer.lr": 2e-3}, "influence": True, "single": f"{GROUP}/1"}
    plan = (await http.post(f"/v1/jobs/{job}/replays?dry_run=true", json=question)).json()
    takes = {"from_checkpoint": 2, "replayed_steps": 0, "trained_steps": 2 * (2 + 2 * GROUPS)}
    assert plan == {"object": "job.replay.plan", **takes}
    assert (await http.get(f"/v1/jobs/{job}/replays")).json()["data"] == []

    begun, again = await asyncio.gather(ask(http, job, **question), ask(http, job, **question))
    assert begun["id"] == again["id"]
    assert begun | takes == begun
    found = await until(http, job, begun["id"], "done", "failed")
    capsys.readouterr()
    words = ["--set", "optimizer.lr=2e-3", "--influence", "--json", "--single", f"{GROUP}/1"]
    assert main(["replay", f"{tmp_path / 'jobs' / job}@3-4", *words]) == 0
    assert found["answer"] == json.loads(capsys.readouterr().out)
    assert found["done_steps"] == takes["trained_steps"]
    assert found["answer"]["is_same"]

    [listed] = (await http.get(f"/v1/jobs/{job}/replays")).json()["data"]
    assert (listed["id"], listed["status"], listed["single"]) == (begun["id"], "done", f"{GROUP}/1")
    assert (await ask(http, job, **question))["status"] == "done"
    async with application(store, jobs_dir=tmp_path / "jobs") as other, http_to(other) as later:
        assert (await later.get(f"/v1/jobs/{job}/replays/{begun['id']}")).json() == found
    assert (await http.delete(f"/v1/jobs/{job}/replays/{begun['id']}")).status_code == 204
    gone = await http.get(f"/v1/jobs/{job}/replays/{begun['id']}")
    assert (gone.status_code, error_of(gone)["code"]) == (404, "replay_not_found")


async def test_one_that_is_answered_is_told_alike_before_and_after_its_work_has_ended(
    app: FastAPI, http: httpx.AsyncClient, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def keep(*given: Any) -> None:
        _keep(*given)
        assert may_end.wait(DEADLINE_S)

    monkeypatch.setattr("services.api.views.replays._keep", keep)
    context = app.state.context
    try:
        name = (await ask(http, job, first=4))["id"]
        found = await until(http, job, name, "done")
        assert context.replays._works, "its work has not ended"
    finally:
        may_end.set()
    assert found["message"] is None
    while context.replays._works:
        await asyncio.sleep(0.01)
    assert (await http.get(f"/v1/jobs/{job}/replays/{name}")).json() == found
    directory = JobDir(tmp_path / "jobs" / job)
    kept = Replays(directory).read(name)
    assert kept is not None
    assert _view(context, directory, replace(kept, answered=None)).status == "done", "it was read before its end"


async def test_one_that_ends_with_its_process_is_told_as_interrupted_and_begins_anew(
    http: httpx.AsyncClient, job: str, store: Store, tmp_path: Path
) -> None:
    async with application(store, jobs_dir=tmp_path / "jobs") as other, http_to(other) as first:
        name = (await ask(first, job, first=2, last=6, influence=True))["id"]
        await until(first, job, name, "running")
        # Another process sees that somebody works on it, and does not begin it a second time.
        assert (await until(http, job, name, "running"))["done_steps"] is None
        assert (await ask(http, job, first=2, last=6, influence=True))["id"] == name
    assert (await until(http, job, name, "interrupted"))["answer"] is None
    assert (await ask(http, job, first=2, last=6, influence=True))["id"] == name
    assert (await until(http, job, name, "running"))["done_steps"] is not None


@pytest.mark.parametrize(
    ("question", "status", "said"),
    [
        ({"first": 9}, 409, "step 9 is not kept; kept are 1-6"),
        ({"first": 4, "set": {"optimizer.lrr": 1}}, 422, "optimizer.lrr is not a setting of a job"),
        ({"first": 4, "set": {"sampling.temperature": 1}}, 422, "no step that is trained again reads it"),
        ({"first": 4, "without": ["999"]}, 422, "group 999: not in the batch"),
        ({"first": 4, "single": "1/1"}, 422, "episode 1/1 is not in the batch"),
        ({"first": 4, "single": "1"}, 422, "single"),
        ({"first": 4, "last": 3}, 422, "the last step is not before the first"),
        ({"first": 1, "last": 2000}, 422, "at most 1000 steps"),
        ({"first": 0}, 422, "first"),
    ],
)
async def test_what_cannot_be_asked_is_refused_and_begins_nothing(
    http: httpx.AsyncClient, job: str, question: dict[str, Any], status: int, said: str
) -> None:
    answer = await http.post(f"/v1/jobs/{job}/replays", json=question)
    assert answer.status_code == status, answer.text
    assert said in error_of(answer)["message"]
    assert (await http.get(f"/v1/jobs/{job}/replays")).json()["data"] == []


async def test_a_model_too_large_for_this_machine_is_refused(
    http: httpx.AsyncClient, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.api.submission.replaying.MOST_MODEL_BYTES", 1000)
    answer = await http.post(f"/v1/jobs/{job}/replays", json={"first": 4})
    assert (answer.status_code, error_of(answer)["code"]) == (409, "replay_too_large")


async def test_only_so_many_wait(app: FastAPI, http: httpx.AsyncClient, job: str) -> None:
    async with app.state.context.replays._room:  # nobody's turn comes
        names = [
            (await ask(http, job, first=4, set={"optimizer.lr": 1e-3 * (1 + number)}))["id"]
            for number in range(MAX_TOGETHER + MAX_WAITING)
        ]
        answer = await http.post(f"/v1/jobs/{job}/replays", json={"first": 5})
        assert (answer.status_code, error_of(answer)["code"]) == (429, "too_many_replays")
        assert answer.headers["retry-after"] == "30"
        assert (await http.get(f"/v1/jobs/{job}/replays/{names[0]}")).json()["status"] == "waiting"
        for name in names:
            assert (await http.delete(f"/v1/jobs/{job}/replays/{name}")).status_code == 204
    await ask(http, job, first=5)


async def test_what_takes_too_long_is_stopped_and_fails_with_the_reason(
    app: FastAPI, http: httpx.AsyncClient, job: str
) -> None:
    app.state.context.replays._most_s = 0.01
    name = (await ask(http, job, first=4))["id"]
    assert "it took more than 0.01 s" in (await until(http, job, name, "failed"))["message"]
    async with app.state.context.replays._room:
        assert (await ask(http, job, first=4))["status"] == "waiting", "what failed may be asked again"


async def test_a_damaged_past_fails_by_name(http: httpx.AsyncClient, job: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs" / job / layout.BATCHES / "ep000001-step000005"
    path.write_bytes(path.read_bytes()[:-40] + b"x" + path.read_bytes()[-39:])
    name = (await ask(http, job, first=6))["id"]
    assert "batches/ep000001-step000005" in (await until(http, job, name, "failed"))["message"]


def test_an_answer_that_shows_an_erased_episode_goes_with_it(made: MadePast, tmp_path: Path) -> None:
    shutil.copytree(made.folder, tmp_path / "job_made")
    directory = JobDir(tmp_path / "job_made")
    store = Replays(directory)
    kinds: dict[str, str | None] = {"a" * 16: f"{GROUP}/1", "b" * 16: None, "c" * 16: f"{GROUP}/1"}
    asked = {name: {"question": {"first": 4, "last": 4, "single": single}} for name, single in kinds.items()}
    for name in ("a" * 16, "b" * 16):
        store.ask(name, asked[name])
        _keep(store, directory, AskedReplay(name, asked[name], None), {"answer": {}})
    assert sorted(store.names()) == ["a" * 16, "b" * 16]
    erase(directory, "job_made", of_member(GROUP, 1), {}, safe_until=None)
    assert store.names() == ["b" * 16]
    # One that was worked on meanwhile comes too late.
    store.ask("c" * 16, asked["c" * 16])
    _keep(store, directory, AskedReplay("c" * 16, asked["c" * 16], None), {"answer": {}})
    assert store.names() == ["b" * 16]


def test_of_a_job_the_newest_are_kept(tmp_path: Path) -> None:
    store = Replays(JobDir(tmp_path / "job_a"))
    names = [f"{number:016x}" for number in range(MOST_KEPT + 3)]
    for number, name in enumerate(names):
        store.ask(name, {"question": {"single": None}, "number": number})
        store.answer(name, {"message": "none"})
    assert sorted(store.names()) == names[3:]
    assert len(list((tmp_path / "job_a" / layout.REPLAYS).iterdir())) == 2 * MOST_KEPT


def test_an_answer_of_another_release_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Replays(JobDir(tmp_path / "job_a"))
    store.ask("a" * 16, {})
    with monkeypatch.context() as patch:
        patch.setattr("services.files.replays.FORMAT", 2)
        store.answer("a" * 16, {"answer": {"of": "a later release"}})
    found = store.read("a" * 16)
    assert found is not None
    assert found.answered is None
    store.answer("a" * 16, {"answer": {}})
    found = store.read("a" * 16)
    assert found is not None
    assert found.answered == {"answer": {}, "format": 1}


def test_only_one_process_holds_a_question(tmp_path: Path) -> None:
    first, second = (Replays(JobDir(tmp_path / "job_a")) for _ in range(2))
    first.ask("a" * 16, {})
    with first.held("a" * 16) as mine, second.held("a" * 16) as theirs:
        assert (mine, theirs, second.is_held("a" * 16)) == (True, False, True)
    assert not second.is_held("a" * 16)
    assert not second.is_held("b" * 16)


async def test_an_idle_one_works_on_nothing() -> None:
    work = ReplayWork()
    assert not work.is_full
    await work.close()
