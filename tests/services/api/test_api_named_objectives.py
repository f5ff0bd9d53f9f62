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
        earlier.setattr(JobSpec, "named", lambda spec: spec)
        job, spec = await submitted(http, "k")
    assert spec.objective.name is None
    assert await submitted(http, "k") == (job, spec)
    assert await submitted(http, "k", objective={"name": "gspo"}) == (job, spec)
