"""What belongs to somebody else is not there: every route that names a job or an environment, and every list."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gspo_core.position import Position
from services.api.http.key_ring import SCOPES, KeyRing
from services.files.data_dir import KeysDir
from services.files.job_dir import JobDir, step_name
from services.state.fleet_records import EngineRecord, EngineReport, EngineState, WorkerRecord
from services.state.queue import Bus
from services.state.store import Store
from tests.core.test_model_files import write_files
from tests.services.api.api_kit import SPEC, application, error_of, http_to
from tests.services.api.recorded_job import RecordedJob, record_job, write_model

ADMIN = "the-operator"
ALL_BUT_ADMIN = [scope for scope in SCOPES if scope != "admin"]
PUSHED = {"group": 0, "member": 0, "token_ids": [1], "mask": [True], "logprobs": [-1], "policy_versions": 0}
# What a route needs to be asked for something that is there; the others need nothing.
BODIES: dict[str, dict[str, Any]] = {
    "PATCH /v1/jobs/{id}": {"optimizer": {"lr": 1e-6}},
    "POST /v1/jobs/{id}/fork": {"step": 0},
    "POST /v1/jobs/{id}/retrain": {},
    "POST /v1/jobs/{id}/replays": {"first": 1},
    "POST /v1/jobs/{id}/trajectories": {"trajectories": [PUSHED]},
    "POST /v1/jobs/{id}/environments/{index}/description": {"num_tasks": {"train": 5}},
    "POST /v1/environments/{environment}/try": {"turns": [{"text": "42"}]},
}
NAMES = {
    **{"epoch": "1", "step": "1", "group": "0", "member": "0", "index": "0", "file": "config.json"},
    **{"lease": "0" * 32, "trace": "0" * 32, "key": "0" * 12, "replay": "0" * 16},
}
# Nobody has talked.
ABSENT = {"GET /v1/jobs/{id}/traces/{trace}": 404, "GET /v1/jobs/{id}/replays/{replay}": 404}
# Of the whole installation, for admins only: `test_api_keys.py`.
OF_NOBODY = {"worker", "engine", "key"}


@pytest.fixture
async def app(store: Store, tmp_path: Path) -> AsyncIterator[FastAPI]:
    async with application(
        store, jobs_dir=tmp_path / "jobs", keys=[ADMIN], ring=KeyRing(KeysDir(tmp_path / "keys")), may_upload=True
    ) as app:
        yield app


@pytest.fixture
async def job(store: Store, bus: Bus, tmp_path: Path) -> RecordedJob:
    """A job of nobody in particular, with everything that a job can have."""
    job = await record_job(store, bus, tmp_path / "jobs", write_model(tmp_path / "model"), num_steps=1)
    path = JobDir(tmp_path / "jobs" / job.id).checkpoints / step_name(Position(1, 1))
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(b"{}")
    export = JobDir(tmp_path / "jobs" / job.id).export(Position(1, 1))
    export.mkdir(parents=True)
    (export / "config.json").write_bytes(b"{}")
    return job


def routes(app: FastAPI, *parameters: str) -> list[tuple[str, str]]:
    """Method and path of those whose path names one of the parameters."""
    return [
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if any(f"{{{name}}}" in path for name in parameters)
    ]


def filled(path: str, **names: str) -> str:
    for name, value in (NAMES | names).items():
        path = path.replace(f"{{{name}}}", value)
    assert "{" not in path, path
    return path


async def ask(app: FastAPI, method: str, path: str, key: str, body: Any = None) -> httpx.Response:
    async with http_to(app, key=key) as http:
        return await http.request(method, path, **({} if body is None else {"json": body}))


async def key_of(app: FastAPI, owner: str, *scopes: str) -> str:
    params = f"owner={owner}&scopes={','.join(scopes or ALL_BUT_ADMIN)}"
    return str((await ask(app, "POST", f"/v1/keys?{params}", ADMIN)).json()["key"])


def test_every_parameter_of_a_path_is_known_here(app: FastAPI):
    known = {"id", "job", "environment"} | OF_NOBODY | NAMES.keys()
    for path in app.openapi()["paths"]:
        assert {part.strip("{}") for part in path.split("/") if part.startswith("{")} <= known, path


async def test_every_route_of_a_job_is_as_if_it_were_not_there_for_others(
    app: FastAPI, store: Store, bus: Bus, job: RecordedJob
):
    stranger = await key_of(app, "stranger")
    before = (await store.jobs.get(job.id), await store.events.read(job.id, count=1000), await bus.counters(job.id))
    tried = routes(app, "id", "job")
    assert len(tried) >= 28
    for method, path in tried:
        body = BODIES.get(f"{method} {path}")
        theirs = await ask(app, method, filled(path, id=job.id, job=job.id), stranger, body)
        absent = await ask(app, method, filled(path, id="job_absent", job="job_absent"), stranger, body)
        assert (theirs.status_code, error_of(theirs)["code"]) == (404, "job_not_found"), (method, path)
        assert error_of(theirs)["message"].replace(job.id, "job_absent") == error_of(absent)["message"], (method, path)
        allowed = await ask(app, method, filled(path, id=job.id, job=job.id), ADMIN) if method == "GET" else None
        expected = ABSENT.get(f"{method} {path}", 200)
        assert allowed is None or allowed.status_code == expected, (path, allowed.text)
    assert before == (
        *(await store.jobs.get(job.id), await store.events.read(job.id, count=1000), await bus.counters(job.id)),
    )


async def test_every_route_of_an_environment_is_as_if_it_were_not_there_for_others(app: FastAPI, tmp_path: Path):
    owner, stranger = await key_of(app, "owner"), await key_of(app, "stranger")
    body = {"name": "sums", "source": {"type": "reference", "ref": "environments.calculator:Calculator"}}
    assert (await ask(app, "POST", "/v1/environments", owner, body)).status_code == 201
    tried = routes(app, "environment")
    assert len(tried) >= 6
    for method, path in tried:
        for reference in ("sums@1", "absent@1"):
            given = BODIES.get(f"{method} {path}")
            answer = await ask(app, method, filled(path, environment=reference), stranger, given)
            assert (answer.status_code, error_of(answer)["code"]) == (404, "environment_not_found"), (method, path)
    assert (await ask(app, "GET", "/v1/environments/sums@1", owner)).status_code == 200


async def test_no_list_shows_what_belongs_to_others(app: FastAPI, job: RecordedJob):
    owner, stranger = await key_of(app, "owner"), await key_of(app, "stranger")
    body = {"name": "sums", "source": {"type": "reference", "ref": "environments.calculator:Calculator"}}
    await ask(app, "POST", "/v1/environments", owner, body)
    mine = (await ask(app, "POST", "/v1/jobs", owner, SPEC)).json()["id"]
    lists = ("/v1/jobs", "/v1/environments", "/v1/fine_tuning/jobs", "/v1/models")
    for path in lists:
        assert (await ask(app, "GET", path, stranger)).json()["data"] == [], path
    seen = [[one["id"] for one in (await ask(app, "GET", path, owner)).json()["data"]] for path in lists]
    assert seen == [[mine], ["sums@1"], [mine], []]
    for_admins = [{one["id"] for one in (await ask(app, "GET", path, ADMIN)).json()["data"]} for path in lists]
    assert for_admins == [{job.id, mine}, {"sums@1"}, {job.id, mine}, {f"{job.id}@latest"}]


async def test_processes_name_no_job_of_others(app: FastAPI, store: Store):
    owner, stranger = await key_of(app, "owner"), await key_of(app, "stranger")
    mine, theirs = [(await ask(app, "POST", "/v1/jobs", key, SPEC)).json()["id"] for key in (owner, stranger)]
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    assert claim.job_id == mine
    ill = {job: {"a:B": f"ValueError: the password of {job}"} for job in (mine, theirs)}
    worker = WorkerRecord(
        id="w", jobs=(mine, theirs), environment_capacity={mine: 2, theirs: 3}, ill_environments=ill, num_episodes=5
    )
    await store.fleet.register_worker(worker)
    label = f"{mine}/1/7"
    engine = EngineRecord(id="http://e", url="http://e", model_path=f"/jobs/{mine}/weights", weight_version=label)
    await store.fleet.register_engine(engine)
    assert await store.fleet.bind(mine, claim.token, engine.id)
    await store.fleet.mark(mine, claim.token, engine.id, EngineReport(EngineState.READY, label, f"took {label}"))

    async def seen(key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        answer = await ask(app, "GET", "/v1/workers", key)
        for job in {ADMIN: (), owner: (theirs,), stranger: (mine,)}[key]:
            assert job not in answer.text
        by_id = {one["id"]: one for one in answer.json()["data"]}
        return by_id["w"], by_id["http://e"]

    worker_seen, engine_seen = await seen(stranger)
    assert (worker_seen["jobs"], worker_seen["environment_capacity"]) == ([theirs], {theirs: 3})
    assert (worker_seen["ill_environments"], worker_seen["num_episodes"]) == ({theirs: ill[theirs]}, 5)
    assert (engine_seen["job"], engine_seen["label"], engine_seen["state"]) == (None, "", "ready")
    for key, jobs in ((owner, [mine]), (ADMIN, [mine, theirs])):
        worker_seen, engine_seen = await seen(key)
        assert worker_seen["jobs"] == jobs
        assert (engine_seen["job"], engine_seen["label"], engine_seen["reason"]) == (mine, label, f"took {label}")


@pytest.mark.parametrize("query", ["", "?dry_run=true"])
async def test_what_the_job_of_another_has_made_is_no_model(app: FastAPI, tmp_path: Path, query: str):
    owner, stranger = await key_of(app, "owner"), await key_of(app, "stranger")
    job = (await ask(app, "POST", "/v1/jobs", owner, SPEC)).json()["id"]
    models = [tmp_path / "jobs" / name / "exports" / "ep1-step5" for name in (job, "job_absent")]
    for model in models:
        model.mkdir(parents=True)
        write_files(model)
    link = tmp_path / "link"
    link.symlink_to(models[0])
    for model in (*models, link, tmp_path / "jobs" / job / "nothing"):
        refused = await ask(app, "POST", f"/v1/jobs{query}", stranger, SPEC | {"model": str(model)})
        assert (refused.status_code, error_of(refused)["code"]) == (422, "model_invalid"), model
        assert error_of(refused)["message"] == f"there is no directory {model} (where rollout workers run)"
    for key in (owner, ADMIN):
        taken = await ask(app, "POST", f"/v1/jobs{query}", key, SPEC | {"model": str(models[0])})
        assert taken.status_code in (200, 201), taken.text
