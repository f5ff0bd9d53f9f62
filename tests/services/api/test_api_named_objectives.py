"""A new job is stored with its objective's name, which brings that name's defaults; an older one stays what it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo_core.spec import JobSpec
from services.state.store import Store
from tests.services.api.api_kit import SPEC, application, http_to


@pytest.fixture
async def http(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        yield http


async def submitted(http: httpx.AsyncClient, key: str | None = None, **changes: Any) -> tuple[str, JobSpec]:
    headers = {"Idempotency-Key": key} if key else {}
    answer = await http.post("/v1/jobs", json=SPEC | changes, headers=headers)
    assert answer.status_code == 201, answer.text
    job = str(answer.json()["id"])
    config = (await http.get(f"/v1/jobs/{job}/config")).json()["config"]
    return job, JobSpec.model_validate(config)


async def test_a_job_that_names_no_objective_is_called_gspo(http: httpx.AsyncClient) -> None:
    _, spec = await submitted(http)
    assert spec.objective.name == "gspo"
    assert (spec.optimizer.max_grad_growth, spec.training_optimizer.max_grad_growth) == (None, 1)
    _, other = await submitted(http, objective={"loss": "cispo", "clip": 0.2})
    assert other.objective.name is None


async def test_what_a_job_would_be_has_the_name(http: httpx.AsyncClient) -> None:
    plan = (await http.post("/v1/jobs?dry_run=true", json=SPEC)).json()
    assert plan["config"]["objective"]["name"] == "gspo"


async def test_a_repetition_of_a_job_of_an_earlier_release_is_that_job(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(JobSpec, "as_submitted", lambda spec: spec)
        job, spec = await submitted(http, "k")
    assert spec.objective.name is None
    assert await submitted(http, "k") == (job, spec)
    assert await submitted(http, "k", objective={"name": "gspo"}) == (job, spec)


OLD = {"rollout": {"group_size": 2, "max_staleness": 16}}


def scaling(said: bool | None) -> dict[str, Any]:
    return OLD | {"optimizer": {"signal_scaling": said}}


@pytest.mark.parametrize("said", [None, False, True])
async def test_a_job_on_old_data_is_stored_with_what_it_is_trained_with(
    http: httpx.AsyncClient, said: bool | None
) -> None:
    planned = (await http.post("/v1/jobs?dry_run=true", json=SPEC | scaling(said))).json()["config"]
    job, spec = await submitted(http, "k", **scaling(said))
    assert spec.optimizer.signal_scaling == (said is not False)
    assert planned == spec.model_dump(mode="json")
    assert await submitted(http, "k", **scaling(said)) == (job, spec)
    again, same = await submitted(http, **spec.model_dump(mode="json", exclude={"name"}))
    assert again != job
    assert same.optimizer == spec.optimizer


async def status_of_repetition(http: httpx.AsyncClient, said: bool | None) -> int:
    answer = await http.post("/v1/jobs", json=SPEC | scaling(said), headers={"Idempotency-Key": "k"})
    return answer.status_code


@pytest.mark.parametrize(("first", "others"), [(True, {None: 201, False: 409}), (False, {None: 409, True: 409})])
async def test_a_repetition_that_says_another_scaling_is_refused(
    http: httpx.AsyncClient, first: bool, others: dict[bool | None, int]
) -> None:
    """Who says nothing is given true, and says the same as who said true."""
    await submitted(http, "k", **scaling(first))
    assert {said: await status_of_repetition(http, said) for said in others} == others


async def test_a_repetition_of_a_job_that_was_stored_without_a_scaling_is_that_job(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier releases gave none, and stored none where a job said false."""
    with monkeypatch.context() as earlier:
        earlier.setattr(JobSpec, "as_submitted", lambda spec: spec)
        job, spec = await submitted(http, "k", **OLD)
    assert spec.optimizer.signal_scaling is None
    assert await submitted(http, "k", **OLD) == (job, spec)
    assert await submitted(http, "k", **scaling(False)) == (job, spec)
    assert await status_of_repetition(http, True) == 409
