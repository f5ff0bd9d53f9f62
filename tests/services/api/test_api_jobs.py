"""Jobs over HTTP, on a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo_core.spec import JobSpec
from services.state.fleet_records import EngineRecord, WorkerRecord
from services.state.jobs import JobStatus
from services.state.store import Claim, Store
from tests.core.test_model_files import write_files
from tests.patience import HANG_S
from tests.services.api.api_kit import JSON, SPEC, application, error_of, http_to


@pytest.fixture
async def http(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store) as app, http_to(app) as http:
        yield http


async def submit(http: httpx.AsyncClient, key: str | None = None, **changes: Any) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return await http.post("/v1/jobs", json=SPEC | changes, headers=headers)


# Submitting


async def test_a_submitted_job_is_queued_and_says_why_it_waits(http: httpx.AsyncClient):
    answer = await submit(http, name="first", metadata={"owner": "me"})
    job = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}" == job["links"]["self"]
    assert job["id"].startswith("job_")
    assert (job["object"], job["name"], job["status"], job["desired_state"]) == ("job", "first", "queued", "running")
    assert (job["step"], job["steps"], job["policy_version"], job["attempt"]) == (0, 200, None, 0)
    assert job["status_reason"]["code"] == "waiting_for_workers"
    assert job["created_at"].endswith("Z")
    assert job["metadata"] == {"owner": "me"}
    assert (await http.get(job["links"]["self"])).json() == job


async def test_the_stored_specification_spells_every_default_out(http: httpx.AsyncClient, store: Store):
    job = (await submit(http, objective={"minibatches": 1})).json()
    config = (await http.get(job["links"]["config"])).json()
    assert config["config"]["rollout"]["staleness_cap"] == 16
    assert config["config"]["sampling"]["temperature"] == 1.0
    assert config["warnings"][0].startswith("objective.minibatches")
    stored = JobSpec.model_validate_json((await store.jobs.get(job["id"])).spec)
    assert stored == JobSpec.model_validate(SPEC | {"objective": {"minibatches": 1}}).as_submitted()


async def test_dry_run_answers_like_a_submission_and_creates_nothing(http: httpx.AsyncClient):
    answer = await http.post("/v1/jobs?dry_run=true", json=SPEC | {"objective": {"clip": 0.2}})
    plan = answer.json()
    assert answer.status_code == 200
    assert (plan["object"], plan["valid"]) == ("job.plan", True)
    assert plan["config"]["steps"] == 200
    assert plan["estimate"] == {
        "episodes_per_step": 64,
        "max_episodes_in_flight": 320,
        "max_sampled_tokens_per_step": 64 * 8192,
        "log_bytes_per_sampled_token": 41,
        "max_log_bytes": 200 * 64 * (9 * 32768 + 512 * (2 * 16 + 8192 // 1024) + 16384),
        "max_archive_bytes": 0,
        "max_replayed_steps": 199,
        "max_checkpoints": 3,
    }
    kept = {"keep_batches": 10, "archive": "all"}
    archived = await http.post("/v1/jobs?dry_run=true", json=SPEC | {"checkpoints": kept | {"archive_bytes": 1000}})
    bounded = (10 + 2 * 20) * plan["estimate"]["max_log_bytes"] // 200 + 1000
    assert archived.json()["estimate"]["max_log_bytes"] == bounded
    assert archived.json()["estimate"]["max_archive_bytes"] == 1000
    roomy = await http.post("/v1/jobs?dry_run=true", json=SPEC | {"checkpoints": kept | {"archive_bytes": 10**15}})
    assert roomy.json()["estimate"]["max_archive_bytes"] == plan["estimate"]["max_log_bytes"]
    spaced = await http.post("/v1/jobs?dry_run=true", json=SPEC | {"checkpoints": kept | {"keep_every": 15}})
    assert spaced.json()["estimate"]["max_replayed_steps"] == 14
    assert spaced.json()["estimate"]["max_checkpoints"] == 3 + 13
    every = await http.post("/v1/jobs?dry_run=true", json=SPEC | {"checkpoints": {"keep": 100}})
    assert every.json()["estimate"]["max_replayed_steps"] == 19
    assert every.json()["estimate"]["max_checkpoints"] == 11
    assert plan["warnings"][0].startswith("objective.clip_low")
    assert (await http.get("/v1/jobs")).json()["data"] == []
    refused = await http.post("/v1/jobs?dry_run=true", json=SPEC | {"steps": 0})
    assert error_of(refused)["param"] == "steps"


async def test_dry_run_says_what_is_not_there_and_what_it_cannot_tell(http: httpx.AsyncClient, tmp_path: Path):
    """Nothing is loaded for it, and what is missing here may be there where jobs run."""

    async def plan(model: str, ref: str) -> tuple[list[str], list[str]]:
        spec = {"model": model, "environments": [{"ref": ref}]}
        found = (await http.post("/v1/jobs?dry_run=true", json=spec)).json()
        return found["warnings"], found["unchecked"]

    warnings, unchecked = await plan("models/nope", "environments.nope:Nope")
    assert "model: there is no directory models/nope where the API runs" in warnings
    assert "environments[0].ref: there is no module environments.nope where the API runs" in warnings
    assert [one.partition(":")[0] for one in unchecked] == ["model", "environments[0].ref"]
    write_files(tmp_path)
    (tmp_path / "world.py").write_text("import os\nos.abort()\nclass World: ...\n")
    for ref, warning in (
        ("environments.calculator:Calculator", None),
        ("environments.calculator:Abacus", "calculator.py defines no Abacus"),
        (f"{tmp_path}/world.py:World", None),
        (f"{tmp_path}/world.py:Nope", "world.py defines no Nope"),
        ("nothere.py:Nope", "there is no file nothere.py"),
    ):
        warnings, _ = await plan(str(tmp_path), ref)
        assert (warnings == []) if warning is None else (warning in warnings[0]), (ref, warnings)


async def test_what_is_wrong_is_named_all_of_it(http: httpx.AsyncClient):
    answer = await submit(http, sampling={"temprature": 1}, steps=0, environments=[])
    error = error_of(answer)
    assert answer.status_code == 422
    assert (error["type"], error["code"], error["param"]) == (
        *("invalid_request_error", "unknown_field", "sampling.temprature"),
    )
    assert error["message"] == "sampling.temprature is not a field; did you mean temperature?"
    assert {one["param"] for one in error["errors"]} == {"sampling.temprature", "steps", "environments"}


@pytest.mark.parametrize(
    ("body", "param"),
    [("[]", None), ("{}", "model"), ('"text"', None), ("null", None), ('{"model": 1}', "model")],
)
async def test_bodies_that_are_no_specification_are_422(http: httpx.AsyncClient, body: str, param: str | None):
    answer = await http.post("/v1/jobs", content=body, headers=JSON)
    assert answer.status_code == 422
    assert error_of(answer)["param"] == param


# Idempotency


async def test_one_key_makes_one_job(http: httpx.AsyncClient):
    first = await submit(http, "k1")
    second = await submit(http, "k1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert (await submit(http, "k2")).json()["id"] != first.json()["id"]
    assert len((await http.get("/v1/jobs")).json()["data"]) == 2


async def test_one_key_with_another_body_is_a_conflict_that_is_not_worth_repeating(http: httpx.AsyncClient):
    await submit(http, "k1")
    answer = await submit(http, "k1", steps=3)
    assert answer.status_code == 409
    assert error_of(answer)["code"] == "idempotency_conflict"
    assert answer.headers["x-should-retry"] == "false"


async def test_defaults_spelled_out_are_the_same_body(http: httpx.AsyncClient):
    first = await submit(http, "k1")
    second = await submit(http, "k1", steps=200)
    assert second.json()["id"] == first.json()["id"]


async def test_the_same_key_at_once_through_two_processes_makes_one_job(store: Store):
    async with (
        application(store) as one,
        application(store) as two,
        http_to(one) as http_one,
        http_to(two) as http_two,
    ):
        answers = await asyncio.gather(*(submit(http, "k1") for _ in range(25) for http in (http_one, http_two)))
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert sum("idempotent-replayed" in answer.headers for answer in answers) == 49
        assert len((await http_one.get("/v1/jobs")).json()["data"]) == 1


async def test_keys_of_different_credentials_do_not_meet(store: Store):
    async with application(store, keys=["one-key", "two-key"]) as app:
        async with http_to(app, key="one-key") as http:
            first = (await submit(http, "k1")).json()
        async with http_to(app, key="two-key") as http:
            second = (await submit(http, "k1")).json()
    assert first["id"] != second["id"]


@pytest.mark.parametrize("key", ["", " ", "k" * 256, "a b"])
async def test_keys_that_are_none_are_refused(http: httpx.AsyncClient, key: str):
    answer = await http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": key})
    assert answer.status_code == 422
    assert error_of(answer)["param"] == "idempotency-key"


# Lists


async def test_lists_page_by_cursor_in_both_orders(http: httpx.AsyncClient):
    ids = [(await submit(http, name=str(number))).json()["id"] for number in range(5)]
    assert ids == sorted(ids)
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        found, after = [], None
        for has_more in (True, True, False):
            params = {"limit": "2", "order": order} | ({"after": after} if after else {})
            page = (await http.get("/v1/jobs", params=params)).json()
            found += [job["id"] for job in page["data"]]
            assert page["has_more"] is has_more
            assert (page["object"], page["first_id"]) == ("list", page["data"][0]["id"])
            after = page["last_id"]
        assert found == expected
    before = (await http.get("/v1/jobs", params={"before": ids[2]})).json()
    assert [job["id"] for job in before["data"]] == ids[:2]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_lists_page_backwards_from_any_item(http: httpx.AsyncClient, order: str):
    ids = sorted([(await submit(http)).json()["id"] for _ in range(6)], reverse=order == "desc")
    found, before = [], ids[5]
    for has_more in (True, True, False):
        page = (await http.get("/v1/jobs", params={"limit": "2", "order": order, "before": before})).json()
        found = [job["id"] for job in page["data"]] + found
        assert page["has_more"] is has_more
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        before = page["first_id"]
    assert found == ids[:5]


async def test_an_exact_page_has_no_more(http: httpx.AsyncClient):
    await submit(http)
    page = (await http.get("/v1/jobs?limit=1")).json()
    assert page["has_more"] is False
    empty = (await http.get("/v1/jobs", params={"after": page["last_id"]})).json()
    assert empty == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


async def test_lists_by_status_look_beyond_their_first_page(http: httpx.AsyncClient):
    jobs = [(await submit(http)).json() for _ in range(105)]
    for job in jobs[102:]:
        await http.post(job["links"]["cancel"])
    page = (await http.get("/v1/jobs?status=cancelled&limit=2")).json()
    assert [job["id"] for job in page["data"]] == [job["id"] for job in jobs[102:104]]
    assert page["has_more"] is True
    rest = (await http.get("/v1/jobs", params={"status": "cancelled", "after": page["last_id"]})).json()
    assert [job["id"] for job in rest["data"]] == [jobs[104]["id"]]


async def test_lists_by_metadata_want_every_name_to_fit(http: httpx.AsyncClient):
    labels = [{"team": "search"}, {"team": "search", "run": "2"}, {"run": "2"}, {}]
    ids = [(await submit(http, metadata=one)).json()["id"] for one in labels]
    for query, expected in (
        ("metadata[team]=search", ids[:2]),
        ("metadata[team]=search&metadata[run]=2", ids[1:2]),
        ("metadata[run]=3", []),
        ("metadata[]=2", []),
    ):
        assert [job["id"] for job in (await http.get(f"/v1/jobs?{query}")).json()["data"]] == expected


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("metadata=search", 422, "unknown_parameter"),
        ("after=job_00000000000000000000000000", 400, "invalid_cursor"),
        ("before=x", 400, "invalid_cursor"),
        ("limit=0", 422, "validation_failed"),
        ("limit=101", 422, "validation_failed"),
        ("order=random", 422, "validation_failed"),
        ("status=lost", 422, "validation_failed"),
        ("limits=3", 422, "unknown_parameter"),
    ],
)
async def test_bad_parameters_of_lists_are_refused(http: httpx.AsyncClient, query: str, status: int, code: str):
    answer = await http.get(f"/v1/jobs?{query}")
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


# Cancelling


async def test_a_queued_job_is_cancelled_at_once_and_again_without_harm(http: httpx.AsyncClient):
    job = (await submit(http)).json()
    for _ in range(2):
        answer = await http.post(job["links"]["cancel"])
        assert answer.status_code == 200
        assert (answer.json()["status"], answer.json()["desired_state"]) == ("cancelled", "cancelled")
    assert answer.json()["finished_at"] is not None


async def test_a_running_job_is_asked_to_end(http: httpx.AsyncClient, store: Store):
    job = (await submit(http)).json()
    claim = await claimed(store)
    await store.jobs.set_status(claim.job_id, JobStatus.RUNNING, token=claim.token)
    answer = (await http.post(job["links"]["cancel"])).json()
    assert (answer["status"], answer["desired_state"]) == ("running", "cancelled")


async def test_a_job_that_is_over_cannot_be_cancelled(http: httpx.AsyncClient, store: Store):
    job = (await submit(http)).json()
    claim = await claimed(store)
    for status in (JobStatus.RUNNING, JobStatus.SUCCEEDED):
        await store.jobs.set_status(claim.job_id, status, token=claim.token)
    answer = await http.post(job["links"]["cancel"])
    assert answer.status_code == 409
    assert error_of(answer)["code"] == "invalid_transition"
    assert answer.headers["x-should-retry"] == "false"


async def claimed(store: Store) -> Claim:
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    return claim


# Metrics


async def test_metrics_are_rows_from_a_step_on(http: httpx.AsyncClient, store: Store):
    job = (await submit(http)).json()
    for step in range(1, 6):
        await store.metrics.add(job["id"], step, {"reward/mean": step / 10, "reward/std": 0.5, "gspo/loss": -1.0})
    url = job["links"]["metrics"]
    everything = (await http.get(url)).json()
    assert (everything["object"], everything["has_more"]) == ("job.metrics", False)
    assert everything["data"][2] == {"step": 3, "reward/mean": 0.3, "reward/std": 0.5, "gspo/loss": -1.0}
    some = (await http.get(url, params={"from_step": 2, "limit": 2, "names": "reward/*"})).json()
    assert some["has_more"] is True
    assert some["data"] == [
        {"step": 2, "reward/mean": 0.2, "reward/std": 0.5},
        {"step": 3, "reward/mean": 0.3, "reward/std": 0.5},
    ]
    unknown = await http.get(url, params={"names": "reward/mena"})
    assert (unknown.status_code, error_of(unknown)["code"]) == (400, "unknown_metric")
    assert "did you mean reward/mean" in error_of(unknown)["message"]


async def test_no_more_metrics_are_read_than_are_shown(
    http: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch
):
    job = (await http.post("/v1/jobs", json=SPEC)).json()
    for step in range(1, 8):
        late = {"eval/reward/mean": 0.5} if step == 6 else {}
        await store.metrics.add(job["id"], step, {"reward/mean": step / 10, **late})
    read, given = store.metrics.read, list[tuple[Any, ...]]()

    async def noted(*args: Any) -> Any:
        given.append(args[1:])
        return await read(*args)

    monkeypatch.setattr(store.metrics, "read", noted)
    url = job["links"]["metrics"]
    first = (await http.get(url, params={"limit": 1})).json()
    assert (first["data"], first["has_more"]) == ([{"step": 1, "reward/mean": 0.1}], True)
    last = (await http.get(url, params={"limit": 2, "from_step": 6, "names": "reward/mean"})).json()
    assert ([row["step"] for row in last["data"]], last["has_more"]) == ([6, 7], False)
    assert given == [(0, 2), (6, 3)]
    # a name that only a later step has is no mistake
    few = (await http.get(url, params={"limit": 2, "names": "eval/*,reward/mean"})).json()
    assert ([row["reward/mean"] for row in few["data"]], few["has_more"]) == ([0.1, 0.2], True)
    wrong = await http.get(url, params={"limit": 1, "names": "reward/meen"})
    assert (wrong.status_code, error_of(wrong)["code"]) == (400, "unknown_metric")


async def test_metrics_of_a_job_without_steps_are_empty(http: httpx.AsyncClient):
    job = (await submit(http)).json()
    assert (await http.get(job["links"]["metrics"], params={"names": "reward/mean"})).json()["data"] == []


# Workers


async def test_workers_and_engines_are_listed_with_whether_they_live(store: Store):
    await store.fleet.register_worker(WorkerRecord(id="rollout-1"))
    await store.fleet.register_worker(WorkerRecord(id="rollout-2"))
    await store.fleet.register_engine(EngineRecord(id="engine-1", url="http://127.0.0.1:1"))
    # Longer than this process ever stands still: what beats and who looks are both in it.
    async with application(store, lease_s=3.0) as app, http_to(app) as http:
        beating = asyncio.create_task(_beat(store, "rollout-1"))
        async with asyncio.timeout(HANG_S):
            while (found := await _alive(http)) != {"rollout-1": True, "rollout-2": False, "engine-1": False}:
                await asyncio.sleep(0.05)
        degraded = (await http.get("/readyz")).json()["degraded"]
        plan = (await http.post("/v1/jobs?dry_run=true", json=SPEC)).json()
        beating.cancel()
    assert plan["capacity"] == {"num_engines": 0, "num_workers": 1}
    assert list(found) == ["rollout-1", "rollout-2", "engine-1"]
    assert degraded == ["the rollout process rollout-2 has stopped", "the engine process engine-1 has stopped"]


async def _beat(store: Store, worker: str) -> None:
    while True:
        await store.fleet.register_worker(WorkerRecord(id=worker))
        await asyncio.sleep(0.05)


async def _alive(http: httpx.AsyncClient) -> dict[str, bool]:
    return {worker["id"]: worker["alive"] for worker in (await http.get("/v1/workers")).json()["data"]}


def an_8b(tmp_path: Path) -> dict[str, Any]:
    """A job of the shape of a model of 8B."""
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8}
    shape |= {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}
    write_files(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | shape | {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return SPEC | {"model": str(tmp_path)}


async def test_a_job_is_shown_with_its_plan_where_gpus_are_given(http: httpx.AsyncClient, tmp_path: Path) -> None:
    spec = an_8b(tmp_path)
    asked = (await http.post("/v1/jobs?dry_run=true&gpus=8xH100", json=spec)).json()["memory"]
    job = (await http.post("/v1/jobs", json=spec)).json()
    assert "memory" not in job
    path = f"/v1/jobs/{job['id']}"
    plain, planned = await http.get(path), await http.get(f"{path}?gpus=8xH100")
    assert "memory" not in plain.json()
    assert planned.json() == plain.json() | {"memory": asked}
    assert planned.headers["etag"] != plain.headers["etag"]
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    unknown = await http.get(f"{path}?gpus=8xH100")
    assert (unknown.status_code, error_of(unknown)["param"]) == (422, "model")


async def test_a_dry_run_plans_the_memory_of_gpus(http: httpx.AsyncClient, tmp_path: Path) -> None:
    spec = an_8b(tmp_path)
    plan = (await http.post("/v1/jobs?dry_run=true&gpus=8xH100", json=spec)).json()["memory"]
    assert (plan["fits"], plan["refusal"], plan["learner"]["activation_checkpointing"]) == (True, None, True)
    assert {"weights", "moments", "activations"} <= plan["phases"][1]["device_bytes"].keys()
    small = (await http.post("/v1/jobs?dry_run=true&gpus=H100", json=spec)).json()["memory"]
    assert not small["fits"]
    assert "ranks of this kind would do" in small["refusal"]
    assert (await http.post("/v1/jobs?dry_run=true", json=spec)).json()["memory"] is None
    refused = await http.post("/v1/jobs?dry_run=true&gpus=8xNothing", json=spec)
    assert (refused.status_code, error_of(refused)["param"]) == (422, "gpus")
