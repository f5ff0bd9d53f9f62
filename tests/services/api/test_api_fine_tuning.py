"""The routes for OpenAI's client: translated, refused where the words mean something else, and driven by the client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.state.jobs import JobStatus
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import ApiProcess, application, error_of, http_to

PYTHON = Path(os.environ.get("GSPO_TEST_OPENAI", Path(__file__).parents[3] / ".make" / "openai" / "bin" / "python"))
KEY = "a-key-for-openai"
JOBS = "/v1/fine_tuning/jobs"
BODY: dict[str, Any] = {"model": "m", "training_file": "env:environments.calculator:Calculator"}


@pytest.fixture
async def http(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        yield http


async def test_a_job_is_the_same_in_both_languages(http: httpx.AsyncClient):
    method = {"type": "reinforcement", "reinforcement": {"hyperparameters": {"batch_size": 4, "learning_rate": 1e-5}}}
    more = {"suffix": "mine", "metadata": {"a": "b"}, "seed": 3, "method": method, "steps": 9}
    answer = await http.post(JOBS, json=BODY | more)
    job = answer.json()
    assert answer.status_code == 200, answer.text
    assert (job["object"], job["status"], job["seed"]) == ("fine_tuning.job", "queued", 3)
    assert (job["training_file"], job["result_files"]) == (BODY["training_file"], [])
    assert isinstance(job["created_at"], int)
    native = (await http.get(f"/v1/jobs/{job['id']}/config")).json()["config"]
    assert (native["name"], native["metadata"], native["seed"], native["steps"]) == ("mine", {"a": "b"}, 3, 9)
    assert (native["groups_per_step"], native["optimizer"]["lr"]) == (4, 1e-5)
    assert native["environments"][0]["ref"] == "environments.calculator:Calculator"


async def test_an_environment_may_be_said_at_more_length_beside_its_name(http: httpx.AsyncClient):
    ref = BODY["training_file"].removeprefix("env:")
    answer = await http.post(JOBS, json=BODY | {"environments": [{"ref": ref, "limits": {"max_turns": 3}}]})
    native = (await http.get(f"/v1/jobs/{answer.json()['id']}/config")).json()["config"]
    assert native["environments"][0]["limits"]["max_turns"] == 3


async def test_what_would_mean_something_else_here_is_refused(http: httpx.AsyncClient):
    grader = {"type": "reinforcement", "reinforcement": {"grader": {"type": "string_check"}}}
    for changes, param in (
        ({"training_file": "file-abc"}, "training_file"),
        ({"method": grader}, "method"),
        ({"method": {"type": "dpo"}}, "method"),
        ({"hyperparameters": {"batch_size": "many"}}, "groups_per_step"),
        ({"training_file": "env:unregistered"}, "environments[0].ref"),
        ({"model": ""}, "model"),
        ({"nonsense": [1]}, "nonsense"),
        ({"validation_file": "file-abc"}, "validation_file"),
        ({"integrations": [{"type": "wandb"}]}, "integrations"),
        ({"hyperparameters": {"n_epochs": 2}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"learning_rate_multiplier": 0.5}}, "hyperparameters.learning_rate_multiplier"),
        (of_method(compute_multiplier=2), "method.reinforcement.hyperparameters.compute_multiplier"),
        (of_method(eval_samples=2), "method.reinforcement.hyperparameters.eval_samples"),
        (of_method(reasoning_effort="high"), "method.reinforcement.hyperparameters.reasoning_effort"),
        (of_method(foo=1), "method.reinforcement.hyperparameters.foo"),
        ({"method": {"type": "reinforcement", "reinforcement": {"response_format": {}}}}, "method.reinforcement"),
        ({"method": {"type": "reinforcement", "dpo": {}}}, "method.dpo"),
        ({"groups_per_step": 4, "hyperparameters": {"batch_size": 8}}, "hyperparameters.batch_size"),
        ({"optimizer": {"lr": 1e-5}, **of_method(learning_rate=2e-5)}, "learning_rate"),
        ({"environments": [{"ref": "environments.gsm8k:GSM8K"}]}, "training_file"),
        ({"seed": True}, "seed"),
        ({"method": {"type": "reinforcement", "reinforcement": {"hyperparameters": []}}}, "hyperparameters"),
    ):
        answer = await http.post(JOBS, json=BODY | changes)
        error = error_of(answer)
        assert answer.status_code == 422
        assert param in error["param"], (changes, error)
        assert error["code"] != "unknown_field" or error["param"] in error["message"]
    assert (await http.get(JOBS)).json()["data"] == []


def of_method(**numbers: Any) -> dict[str, Any]:
    return {"method": {"type": "reinforcement", "reinforcement": {"hyperparameters": numbers}}}


async def test_what_says_nothing_is_no_contradiction(http: httpx.AsyncClient):
    """The client writes out what it was not given, as null or `auto`."""
    numbers = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": None, "eval_interval": 3}
    more = {"integrations": None, "validation_file": None, "groups_per_step": 4, **of_method(batch_size=4)}
    answer = await http.post(JOBS, json=BODY | more | {"hyperparameters": numbers})
    assert answer.status_code == 200, answer.text
    native = (await http.get(f"/v1/jobs/{answer.json()['id']}/config")).json()["config"]
    assert (native["groups_per_step"], native["evaluation"]["every"]) == (4, 3)


async def test_statuses_are_those_that_the_client_knows_and_paused(http: httpx.AsyncClient, store: Store):
    job = (await http.post(JOBS, json=BODY)).json()["id"]
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    for status, shown in (
        *((JobStatus.RUNNING, "running"), (JobStatus.PAUSING, "running"), (JobStatus.PAUSED, "paused")),
        *((JobStatus.RESUMING, "running"), (JobStatus.RUNNING, "running"), (JobStatus.FAILED, "failed")),
    ):
        await store.jobs.set_status(job, status, token=claim.token)
        found = (await http.get(f"{JOBS}/{job}")).json()
        assert found["status"] == shown
    assert found["error"]["code"]
    assert isinstance(found["finished_at"], int)


async def test_events_page_by_the_last_id_until_there_are_no_more(http: httpx.AsyncClient, store: Store):
    job = (await http.post(JOBS, json=BODY)).json()["id"]
    for step in range(24):
        await store.events.add(job, "step", {"step": step, "reward/mean": 0.5})
    seen: list[dict[str, Any]] = []
    after = None
    while True:
        params = {"limit": "10"} | ({"after": after} if after else {})
        page = (await http.get(f"{JOBS}/{job}/events", params=params)).json()
        seen += page["data"]
        if not page["has_more"]:
            break
        after = seen[-1]["id"]
    assert [one["data"].get("step") for one in seen] == [None, *range(24)]
    assert (seen[1]["type"], seen[1]["level"], seen[1]["object"]) == ("metrics", "info", "fine_tuning.job.event")


async def test_what_the_client_sends_again_by_itself_makes_no_second_job(http: httpx.AsyncClient):
    async def post(count: int, **changes: Any) -> str:
        answer = await http.post(JOBS, json=BODY | changes, headers={"x-stainless-retry-count": str(count)})
        return str(answer.json()["id"])

    first = await post(0)
    assert await post(1) == await post(2) == first
    assert await post(1, seed=1) != first  # another body
    other = await post(0)  # a person who wants a second one
    assert other != first
    assert await post(1) == other
    assert len((await http.get(JOBS)).json()["data"]) == 3


@pytest.mark.third_party
@pytest.mark.skipif(not PYTHON.exists(), reason="the openai client is not installed: make test-openai")
async def test_the_page_runs(redis_server: RedisServer, store: Store, tmp_path: Path):
    """What docs/api.md shows of that client, for an environment that is registered as the page says."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    (program,) = re.findall(r"```python\n(import openai.*?)```", page, re.DOTALL)
    sums = {"name": "sums", "source": {"type": "reference", "ref": "environments.calculator:Calculator"}}
    with ApiProcess(redis_server.url) as api:
        registered = await asyncio.to_thread(httpx.post, f"{api.url}/v1/environments", json=sums)
        assert registered.status_code == 201, registered.text
        (tmp_path / "typed.py").write_text(program.replace("http://127.0.0.1:8000", api.url))
        await asyncio.to_thread(subprocess.run, [PYTHON, "-I", tmp_path / "typed.py"], timeout=100, check=True)
        (job,) = (await asyncio.to_thread(httpx.get, f"{api.url}/v1/jobs")).json()["data"]
    assert job["steps"] == 100


@pytest.mark.third_party
@pytest.mark.skipif(not PYTHON.exists(), reason="the openai client is not installed: make test-openai")
async def test_the_unmodified_client_drives_jobs_from_end_to_end(redis_server: RedisServer, store: Store):
    script = Path(__file__).with_name("openai_session.py")
    with ApiProcess(redis_server.url, GSPO_API_KEYS=KEY) as api:
        done = await asyncio.to_thread(
            subprocess.run,
            [PYTHON, "-I", script, f"{api.url}/v1", KEY, "m"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert not [line for line in api.log() if "request failed" in line]
    said = json.loads(done.stdout)
    assert said.pop("client")
    assert said == {
        "created": [
            *("fine_tuning.job", "queued", 7, {"team": "a"}, 11),
            "env:environments.calculator:Calculator",
        ],
        "replayed": True,
        "listed": [False, True],
        "by_label": True,
        "retrieved": True,
        "paused": "queued",
        "resumed": "queued",
        "cancelled": "cancelled",
        "events": ["message"] * 4,
        "checkpoints": [],
        "models": [],
        "not_found": ["job_not_found", "not_found_error", True],
        "refused": ["validation_failed", "training_file"],
        "conflict": "invalid_transition",
        "wrong_key": "invalid_key",
    }
