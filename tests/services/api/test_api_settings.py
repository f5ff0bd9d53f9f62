"""Changing a job over HTTP, and how its end is asked for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gspo_core.spec import JobSpec
from services.state.job_table import JobTable
from services.state.store import Claim, JobStatus, Store
from tests.services.api.api_kit import SPEC, application, error_of, http_to


@pytest.fixture
async def http(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store) as app, http_to(app) as http:
        yield http


@pytest.fixture
async def claim(http: httpx.AsyncClient, store: Store) -> Claim:
    assert (await http.post("/v1/jobs", json=SPEC)).status_code == 201
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    return claim


def path(claim: Claim) -> str:
    return f"/v1/jobs/{claim.job_id}"


async def test_changes_add_up_and_are_shown(http: httpx.AsyncClient, claim: Claim) -> None:
    await http.patch(path(claim), json={"optimizer": {"lr": 0.5}})
    answer = await http.patch(path(claim), json={"optimizer": {"lr": 0.25}, "steps": 400})
    assert answer.status_code == 200
    assert answer.json()["settings"] == {"optimizer.lr": 0.25, "steps": 400}
    assert answer.json()["steps"] == 400


async def test_a_number_as_gate_takes_the_lower_end_of_before_away(http: httpx.AsyncClient, claim: Claim) -> None:
    await http.patch(path(claim), json={"objective": {"geometric_gate": [0.9, 1.02]}})
    answer = await http.patch(path(claim), json={"objective": {"geometric_gate": 1.5}})
    assert answer.status_code == 200, answer.text
    assert answer.json()["settings"] == {"objective.geometric_gate": 1.5, "objective.geometric_gate_low": None}


async def test_a_repeated_change_changes_nothing(http: httpx.AsyncClient, store: Store, claim: Claim) -> None:
    for _ in range(3):
        assert (await http.patch(path(claim), json={"optimizer": {"lr": 0.5}})).status_code == 200
    assert (await store.jobs.get(claim.job_id)).settings_version == 1


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"groups_per_step": 3}, "not_live", "groups_per_step"),
        ({"sampling": {"temperature": 2}}, "not_live", "sampling.temperature"),
        ({"optimizer": {"lr": -1}}, "validation_failed", "optimizer.lr"),
        ({"learning_rate": 1}, "unknown_field", "learning_rate"),
        ({"steps": 3}, "validation_failed", "steps"),
        ({}, "missing_field", None),
    ],
)
async def test_what_cannot_change_is_refused_with_its_name(
    http: httpx.AsyncClient, store: Store, claim: Claim, changes: dict[str, Any], code: str, param: str | None
) -> None:
    await store.jobs.update_progress(claim.job_id, claim.token, 4, 4)
    answer = await http.patch(path(claim), json=changes)
    assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (422, code, param)
    assert (await store.jobs.get(claim.job_id)).settings_version == 0


async def test_a_job_that_is_over_cannot_be_changed(http: httpx.AsyncClient, store: Store, claim: Claim) -> None:
    await store.jobs.set_status(claim.job_id, "failed", token=claim.token)
    answer = await http.patch(path(claim), json={"optimizer": {"lr": 0.5}})
    assert (answer.status_code, error_of(answer)["code"]) == (409, "invalid_transition")


async def test_two_who_change_different_things_at_once_both_get_their_way(
    http: httpx.AsyncClient, store: Store, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, others = JobTable.change_settings, [{"steps": 300}]

    async def slower(self: Store, job: str, seen: int, values: Any, changes: Any) -> Any:
        while others:
            other = others.pop()
            await original(self, job, seen, other, other)
        return await original(self, job, seen, values, changes)

    monkeypatch.setattr(JobTable, "change_settings", slower)
    answer = await http.patch(path(claim), json={"optimizer": {"lr": 0.5}})
    assert answer.json()["settings"] == {"optimizer.lr": 0.5, "steps": 300}


@pytest.mark.parametrize(
    ("query", "manner"),
    [
        ("", "now"),
        ("?checkpoint=true", "now+checkpoint"),
        ("?mode=drain", "drain"),
        ("?mode=drain&checkpoint=true", "drain+checkpoint"),
    ],
)
async def test_the_end_is_asked_for_as_it_is_wanted(
    http: httpx.AsyncClient, store: Store, claim: Claim, query: str, manner: str
) -> None:
    assert (await http.post(f"{path(claim)}/cancel{query}")).status_code == 200
    assert (await store.jobs.get(claim.job_id)).cancel_manner == manner


async def test_attempts_are_shown_with_what_ended_them(http: httpx.AsyncClient, store: Store, claim: Claim) -> None:
    await store.jobs.release(claim.job_id, claim.token)
    (attempt,) = (await http.get(path(claim))).json()["attempts"]
    assert (attempt["trainer"], attempt["code"]) == ("trainer", "handed_over")


async def test_who_has_looked_before_somebody_else_has_changed_it_is_told(
    http: httpx.AsyncClient, store: Store, claim: Claim
) -> None:
    seen = (await http.get(path(claim))).headers["etag"]
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)  # no change of its settings
    mine = await http.patch(path(claim), json={"optimizer": {"lr": 0.5}}, headers={"If-Match": seen})
    assert mine.status_code == 200
    again = await http.patch(path(claim), json={"optimizer": {"lr": 0.5}}, headers={"If-Match": seen})
    assert again.status_code == 200  # its answer may have been lost
    late = await http.patch(path(claim), json={"optimizer": {"lr": 0.1}}, headers={"If-Match": seen})
    assert (late.status_code, error_of(late)["code"]) == (412, "precondition_failed")
    assert (await store.jobs.get(claim.job_id)).settings == {"optimizer.lr": 0.5}
    for tags in (mine.headers["etag"], f'"x", {mine.headers["etag"]}', "*"):
        answer = await http.patch(path(claim), json={"optimizer": {"lr": 0.25}}, headers={"If-Match": tags})
        assert answer.status_code == 200


async def test_what_has_not_changed_is_not_sent_again(http: httpx.AsyncClient, store: Store, claim: Claim) -> None:
    tag = (await http.get(path(claim))).headers["etag"]
    same = await http.get(path(claim), headers={"If-None-Match": tag})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    other = await http.get(path(claim), headers={"If-None-Match": tag})
    assert (other.status_code, other.json()["status"]) == (200, "running")
    assert other.headers["etag"] != tag


async def test_a_job_of_another_release_is_shown_and_breaks_no_other_answer(http: httpx.AsyncClient, store: Store):
    """Its specification says what this release does not know."""
    spec = JobSpec.model_validate(SPEC).model_dump(mode="json") | {"of_another_release": 1}
    claim = await store.jobs.claim("trainer") if await store.jobs.create(json.dumps(spec)) else None
    assert claim is not None
    await store.jobs.set_status(claim.job_id, JobStatus.RUNNING, token=claim.token)
    assert (await http.get(path(claim))).json()["status"] == "running"
    shown = (await http.get(f"{path(claim)}/config")).json()
    assert shown["config"] == spec
    assert "another release" in shown["warnings"][0]
    assert f'job_id="{claim.job_id}"' in (await http.get("/metrics")).text
    pushed = {"group": 0, "member": 0, "token_ids": [1], "mask": [True], "logprobs": [-1], "policy_versions": 0}
    for answer in (
        await http.patch(path(claim), json={"steps": 400}),
        await http.post(f"{path(claim)}/trajectories", json={"trajectories": [pushed]}),
    ):
        assert (answer.status_code, error_of(answer)["code"]) == (422, "validation_failed")
        assert "another release" in error_of(answer)["message"]
    assert (await http.post(f"{path(claim)}/cancel")).status_code == 200
