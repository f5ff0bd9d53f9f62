"""Whatever a caller sends is acted on or refused by name: over every operation of the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.api.app import create_app
from services.api.http.key_ring import KeyRing
from services.files.data_dir import KeysDir
from services.state.store import Store
from tests.services.api.api_kit import SPEC, application, error_of, http_to

METHODS = ("get", "post", "put", "patch", "delete")
IDS = {"epoch": "1", "step": "1", "group": "0", "member": "0", "version": "1"}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    document = create_app(None).openapi()  # type: ignore[arg-type]
    for path, methods in document["paths"].items():
        for method in METHODS:
            if method in methods:
                yield method.upper(), path, methods[method]


OPERATIONS = list(operations())
WITH_JSON = [one for one in OPERATIONS if "application/json" in one[2].get("requestBody", {}).get("content", {})]
WITHOUT_BODY = [one for one in OPERATIONS if "requestBody" not in one[2]]


def each(chosen: list[tuple[str, str, dict[str, Any]]]) -> pytest.MarkDecorator:
    ids = [f"{method} {path}" for method, path, _ in chosen]
    return pytest.mark.parametrize(("method", "path", "operation"), chosen, ids=ids)


@pytest.fixture
async def app(store: Store, tmp_path: Path) -> AsyncIterator[FastAPI]:
    ring = KeyRing(KeysDir(tmp_path / "keys"))
    async with application(store, jobs_dir=tmp_path / "jobs", ring=ring) as app:
        yield app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with http_to(app) as http:
        yield http


async def address(http: httpx.AsyncClient, path: str) -> str:
    """With a job that exists, since those of others answer 404 before anything else."""
    job = (await http.post("/v1/jobs", json=SPEC)).json()["id"]
    filled = path.replace("/jobs/{id}", f"/jobs/{job}").replace("{job}", job)
    return re.sub(r"{(\w+)}", lambda match: IDS.get(match[1], "x"), filled)


def test_the_document_has_operations_of_each_kind() -> None:
    assert len(OPERATIONS) > 50
    assert len(WITH_JSON) >= 5
    assert len(WITHOUT_BODY) > 40


@each(WITHOUT_BODY)
async def test_an_operation_that_takes_no_body_refuses_one(
    http: httpx.AsyncClient, method: str, path: str, operation: dict[str, Any]
) -> None:
    answer = await http.request(method, await address(http, path), json={"days": 1})
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "unexpected_body")
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "query":
            assert parameter["name"] in error["message"]


@each(OPERATIONS)
async def test_an_unknown_parameter_is_refused_by_its_name(
    http: httpx.AsyncClient, method: str, path: str, operation: dict[str, Any]
) -> None:
    answer = await http.request(method, await address(http, path), params={"nonesuch": "1"})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (422, "unknown_parameter", "nonesuch")
    assert "nonesuch" in error["message"]


def names_of(operation: dict[str, Any]) -> list[str]:
    return [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]


@each([one for one in OPERATIONS if names_of(one[2])])
async def test_a_parameter_that_is_given_twice_is_refused_by_its_name(
    http: httpx.AsyncClient, method: str, path: str, operation: dict[str, Any]
) -> None:
    for name in names_of(operation):
        answer = await http.request(method, await address(http, path), params=[(name, "1"), (name, "2")])
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (422, "validation_failed", name)
        assert "given 2 times" in error["message"]


async def test_a_label_that_is_asked_for_twice_is_refused(http: httpx.AsyncClient) -> None:
    asked = [("metadata[team]", "search"), ("metadata[team]", "code"), ("metadata[tier]", "1")]
    answer = await http.get("/v1/jobs", params=asked)
    assert error_of(answer)["param"] == "metadata[team]"
    assert (await http.get("/v1/jobs", params=asked[1:])).status_code == 200


@each(WITH_JSON)
async def test_an_unknown_key_of_a_body_is_refused_by_its_name(
    http: httpx.AsyncClient, method: str, path: str, operation: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"nonesuch": 1}
    if "fine_tuning" in path:  # a body whose fields are there is translated first
        given |= {"model": "m", "training_file": "env:environments.calculator:Calculator"}
    answer = await http.request(method, await address(http, path), json=given)
    error = error_of(answer)
    assert answer.status_code == 422, answer.text
    named = [one["param"] for one in error.get("errors") or [error]]
    assert "nonesuch" in [str(name).rpartition(".")[2] for name in named], answer.text


async def test_an_empty_object_says_as_little_as_no_body(http: httpx.AsyncClient) -> None:
    job = (await http.post("/v1/jobs", json=SPEC)).json()["id"]
    assert (await http.post(f"/v1/jobs/{job}/pause", json={})).status_code == 200
    assert (await http.post(f"/v1/jobs/{job}/resume")).status_code == 200
    assert (await http.post(f"/v1/jobs/{job}/cancel?mode=drain&checkpoint=true")).status_code == 200


async def test_a_key_is_not_made_wider_than_it_was_asked_for(http: httpx.AsyncClient) -> None:
    asked = {"scopes": ["jobs:read"], "owner": "bob", "days": 1}
    error = error_of(await http.post("/v1/keys", json=asked))
    assert error["code"] == "unexpected_body"
    assert "query parameters are scopes, owner, days" in error["message"]
    assert (await http.get("/v1/keys")).json()["data"] == []


async def test_the_first_key_of_an_open_api_locks_nobody_out(app: FastAPI, http: httpx.AsyncClient) -> None:
    for query in ("", "?scopes=jobs:read,jobs:write", "?scopes=admin&days=1"):
        answer = await http.post(f"/v1/keys{query}")
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (409, "would_lock_out")
        assert "POST /v1/keys?scopes=admin" in error["message"]
    assert (await http.get("/v1/jobs")).status_code == 200
    admin = (await http.post("/v1/keys?scopes=admin")).json()["key"]
    assert (await http.get("/v1/jobs")).status_code == 401
    async with http_to(app, key=admin) as with_key:
        assert (await with_key.post("/v1/keys?owner=bob&days=1")).status_code == 201
