"""A job that names a model of the hub is pinned to the commit that was fetched."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.files.data_dir import FETCHED, HubDir, HubKind, HubName
from services.state.store import Store
from tests.services.api.api_kit import SPEC, application, http_to

QWEN = HubName("Qwen", "Qwen3-0.6B")
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
async def http(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        yield http


def write_model(directory: Path) -> None:
    """As much of one as can be seen without loading it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    for name in ("tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")


def fetched(tmp_path: Path, commit: str, age_s: float) -> Path:
    directory = HubDir(tmp_path / "hub").directory(HubKind.MODEL, QWEN, commit)
    write_model(directory)
    (directory / FETCHED).write_text(json.dumps({"commit": commit}))
    stamp = (directory / FETCHED).stat().st_mtime - age_s
    os.utime(directory / FETCHED, (stamp, stamp))
    return directory


async def model_of(http: httpx.AsyncClient, name: str, **headers: str) -> str:
    answer = await http.post("/v1/jobs", json=SPEC | {"model": name}, headers=headers)
    assert answer.status_code == 201, answer.text
    return str((await http.get(f"/v1/jobs/{answer.json()['id']}/config")).json()["config"]["model"])


async def test_a_name_becomes_the_commit_that_was_fetched_last(http: httpx.AsyncClient, tmp_path: Path) -> None:
    old, new = fetched(tmp_path, OLD, 100.0), fetched(tmp_path, NEW, 10.0)
    assert await model_of(http, "Qwen/Qwen3-0.6B") == str(new)
    assert await model_of(http, f"Qwen/Qwen3-0.6B@{OLD}") == str(old)
    plan = (await http.post("/v1/jobs?dry_run=true", json=SPEC | {"model": "Qwen/Qwen3-0.6B"})).json()
    assert (plan["config"]["model"], plan["warnings"]) == (str(new), [])


async def test_a_repetition_is_the_same_job_although_a_newer_commit_came(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    old = fetched(tmp_path, OLD, 100.0)
    first = await model_of(http, "Qwen/Qwen3-0.6B", **{"Idempotency-Key": "k"})
    fetched(tmp_path, NEW, 10.0)
    assert first == str(old) == await model_of(http, "Qwen/Qwen3-0.6B", **{"Idempotency-Key": "k"})


async def test_what_was_never_fetched_stays_as_it_is_and_the_plan_says_how_to_fetch_it(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    unfinished = fetched(tmp_path, OLD, 1.0)
    (unfinished / FETCHED).unlink()
    assert await model_of(http, "Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    plan = (await http.post("/v1/jobs?dry_run=true", json=SPEC | {"model": "Qwen/Qwen3-0.6B"})).json()
    assert any("`gspo fetch Qwen/Qwen3-0.6B`" in one for one in plan["warnings"])
    assert await model_of(http, "./models/mine") == "./models/mine"


async def test_a_directory_of_that_name_wins(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(tmp_path, NEW, 1.0)
    write_model(tmp_path / "Qwen" / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    assert await model_of(http, "Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
