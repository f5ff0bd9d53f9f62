"""A job that is over can be removed, with all of it, and with nothing of others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from gspo_core.position import Position
from services.api.routes.jobs import parent_of
from services.files.job_dir import JobDir, JobsDir, step_name
from services.state.functions import Functions
from services.state.jobs import IllegalTransition, JobInUse, JobNotFound, JobRecord
from services.state.store import Store
from tests.services.api.api_kit import SPEC, application, http_to
from tests.services.api.test_cli_reading import trained


@pytest.fixture
async def http(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store) as app, http_to(app) as http:
        yield http


async def submitted(http: httpx.AsyncClient, **changes: object) -> str:
    answer = await http.post("/v1/jobs", json=SPEC | changes)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def test_a_job_that_is_over_is_removed_with_all_of_it(
    http: httpx.AsyncClient, store: Store, redis_client: Redis
) -> None:
    job, other = await submitted(http), await submitted(http)
    await trained(store, job, [0.25, 0.5])
    refused = await http.delete(f"/v1/jobs/{job}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_not_over")
    await store.jobs.set_status(job, "succeeded")
    assert (await http.delete(f"/v1/jobs/{job}")).status_code == 204
    for path in ("", "/metrics", "/events", "/config"):
        assert (await http.get(f"/v1/jobs/{job}{path}")).status_code == 404
    assert [one["id"] for one in (await http.get("/v1/jobs")).json()["data"]] == [other]
    assert [key async for key in redis_client.scan_iter(f"*{job}*")] == []
    assert (await http.delete(f"/v1/jobs/{job}")).status_code == 404


async def test_a_job_that_another_was_made_from_stays(http: httpx.AsyncClient, store: Store) -> None:
    job = await submitted(http)
    await store.jobs.set_desired_state(job, "cancelled")
    spec = SPEC | {"parent": {"job": job, "step": 1, "same_batches": False}}
    child = await store.jobs.create(httpx.Response(200, json=spec).text)
    refused = await http.delete(f"/v1/jobs/{job}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_in_use")
    assert child.id in refused.json()["error"]["message"]


async def test_what_another_job_has_its_model_from_stays(store: Store, tmp_path: Path) -> None:
    """Also where a link leads to it. The files of a job that is over may go; the job that made them may not."""
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        maker, at = await submitted(http), Position(1, 10)
        await store.jobs.set_desired_state(maker, "cancelled")
        made = JobDir(tmp_path / "jobs" / maker)
        (made.checkpoints / step_name(at)).mkdir(parents=True)
        made.export(at).mkdir(parents=True)
        (tmp_path / "link").symlink_to(made.export(at))
        child = (await store.jobs.create(json.dumps(SPEC | {"model": str(tmp_path / "link")}))).id
        for path, code in ((f"checkpoints/{maker}/1/10", "checkpoint_in_use"), (f"jobs/{maker}", "job_in_use")):
            refused = await http.delete(f"/v1/{path}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, code)
            assert child in refused.json()["error"]["message"]
        await store.jobs.set_desired_state(child, "cancelled")
        assert (await http.delete(f"/v1/jobs/{maker}")).status_code == 409
        assert (await http.delete(f"/v1/checkpoints/{maker}/1/10")).status_code == 204
        assert (await http.delete(f"/v1/jobs/{child}")).status_code == 204
        assert (await http.delete(f"/v1/jobs/{maker}")).status_code == 204


@pytest.mark.every_server
async def test_nothing_brings_a_removed_job_back(redis_client: Redis, tmp_path: Path) -> None:
    """Not a server that is wiped, nor the key that it was submitted under; what was cut off before is finished."""
    store = Store(redis_client, jobs_dir=JobsDir(tmp_path))
    await store.load_functions()
    job = await store.jobs.create("{}", idempotency_key="k")
    kept = await store.jobs.create("{}")
    with pytest.raises(IllegalTransition):
        await store.jobs.remove(job.id)
    for one in (job, kept):
        await store.jobs.set_desired_state(one.id, "cancelled")
    left = tmp_path / ".removed-job_before"
    left.mkdir()
    await store.jobs.remove(job.id)
    assert not (tmp_path / job.id).exists()
    assert not left.exists()
    await redis_client.flushall()
    await store.load_functions()
    assert [one.id for one in await store.jobs.page(10)] == [kept.id]
    with pytest.raises(JobNotFound):
        await store.jobs.remove(job.id)
    again = await store.jobs.create("{}", idempotency_key="k")
    assert again.id != job.id


@pytest.fixture
async def over(redis_client: Redis, tmp_path: Path) -> tuple[Store, str]:
    """A job that is over, in a directory."""
    store = Store(redis_client, jobs_dir=JobsDir(tmp_path))
    await store.load_functions()
    job = (await store.jobs.create("{}", idempotency_key="k")).id
    await store.jobs.set_desired_state(job, "cancelled")
    return store, job


@pytest.mark.parametrize("cut", ["files", "release_key", "withdraw_job", "remove_job"])
async def test_a_removal_that_was_cut_off_is_finished_by_the_next(
    over: tuple[Store, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    store, job = over
    functions = store.jobs._functions

    async def call(name: str, *given: object) -> object:
        if name == cut:
            raise ConnectionAbortedError
        return await Functions.call(functions, name, *given)  # type: ignore[arg-type]

    def fails(self: JobsDir, job: str) -> None:
        raise ConnectionAbortedError

    with monkeypatch.context() as patch:
        patch.setattr(functions, "call", call)
        if cut == "files":
            patch.setattr(JobsDir, "remove", fails)
        with pytest.raises(ConnectionAbortedError):
            await store.jobs.remove(job)
    assert (await store.jobs.get(job)).id == job  # to be removed again
    with pytest.raises(JobNotFound):
        async with store.jobs.used(job):
            pass
    await store.jobs.remove(job)
    with pytest.raises(JobNotFound):
        await store.jobs.get(job)
    assert await store.jobs.page(10) == []
    assert JobsDir(tmp_path).is_empty()
    assert (await store.jobs.create("{}", idempotency_key="k")).id != job


async def test_what_a_reader_saved_of_a_job_that_is_being_removed_goes_with_it(
    over: tuple[Store, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, job = over
    await store.environments.describe(job, 0, {"tools": []})
    functions = store.jobs._functions

    async def call(name: str, *given: object) -> object:
        if name == "remove_job":
            assert await store.environments.get(job, 0) == {"tools": []}
            assert (tmp_path / job).exists()
        return await Functions.call(functions, name, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(functions, "call", call)
    await store.jobs.remove(job)
    assert JobsDir(tmp_path).is_empty()


async def test_a_job_that_another_is_just_made_from_stays(over: tuple[Store, str]) -> None:
    store, job = over
    async with store.jobs.used(job):
        with pytest.raises(JobInUse, match="just being made"):
            await store.jobs.remove(job, made_from=parent_of)
    await store.jobs.remove(job, made_from=parent_of)


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
async def test_a_child_that_is_made_while_children_are_looked_for_is_found(
    over: tuple[Store, str], monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    store, job = over
    looked, children = store.jobs._all, list[str]()

    async def make() -> None:
        children.append((await store.jobs.create(json.dumps({"parent": {"job": job, "step": 1}}))).id)

    use = store.jobs.used(job)
    if begins == "before":
        await use.__aenter__()

    async def all_jobs() -> AsyncIterator[JobRecord]:
        async for record in looked():
            yield record
        if not children:
            if begins == "meanwhile":
                await use.__aenter__()
            await make()
            await use.__aexit__(None, None, None)

    monkeypatch.setattr(store.jobs, "_all", all_jobs)
    with pytest.raises(JobInUse, match="was made from it"):
        await store.jobs.remove(job, made_from=parent_of)
    await store.jobs.set_desired_state(children[0], "cancelled")
    await store.jobs.remove(children[0], made_from=parent_of)
    await store.jobs.remove(job, made_from=parent_of)


async def test_a_list_goes_on_behind_a_job_that_was_removed(store: Store) -> None:
    ids = [(await store.jobs.create("{}")).id for _ in range(5)]
    await store.jobs.set_desired_state(ids[1], "cancelled")
    await store.jobs.remove(ids[1])
    assert [job.id for job in await store.jobs.page(2, ids[1])] == ids[2:4]
    assert [job.id for job in await store.jobs.page(3)] == [ids[0], *ids[2:4]]


async def test_whoever_repeats_a_request_while_its_job_is_removed_gets_a_new_one(
    over: tuple[Store, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment of the removal: what the request has written of the old one is gone, too."""
    store, job = over
    functions = store.jobs._functions
    made = list[str]()

    async def call(name: str, *given: object) -> object:
        answer = await Functions.call(functions, name, *given)  # type: ignore[arg-type]
        if name == "begin_removal" and not made:
            made.append("")
            made[0] = (await store.jobs.create("{}", idempotency_key="k")).id
        return answer

    monkeypatch.setattr(functions, "call", call)
    await store.jobs.remove(job)
    assert made[0] != job
    assert [one.id for one in await store.jobs.page(10)] == made
    assert not (tmp_path / job).exists()
    assert (await store.jobs.create("{}", idempotency_key="k")).id == made[0]


async def test_a_job_that_is_just_being_made_is_worth_asking_again(http: httpx.AsyncClient, store: Store) -> None:
    job = await submitted(http)
    await store.jobs.set_desired_state(job, "cancelled")
    async with store.jobs.used(job):
        refused = await http.delete(f"/v1/jobs/{job}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "in_progress")
    assert refused.headers.get("x-should-retry") != "false"
    assert (await http.delete(f"/v1/jobs/{job}")).status_code == 204


async def test_all_jobs_are_removed_as_they_are_listed(http: httpx.AsyncClient, store: Store) -> None:
    for _ in range(5):
        await store.jobs.set_desired_state(await submitted(http), "cancelled")
    after, num_removed = "", 0
    while (listed := (await http.get(f"/v1/jobs?limit=2{after}")).json())["data"]:
        for one in listed["data"]:
            num_removed += (await http.delete(f"/v1/jobs/{one['id']}")).status_code == 204
        after = f"&after={listed['last_id']}"
    assert num_removed == 5
