"""The files of an export over HTTP: whole or from where a download broke off, nothing else of the disk, and only for
keys that may have one written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from gspo_core.position import Position
from services.api.http.access import needed_scope
from services.api.http.file_download import PIECE_BYTES
from services.files.job_dir import JobDir
from services.state.store import Store
from tests.services.api.api_kit import SPEC, application, error_of, http_to
from tests.services.api.test_api_checkpoints import write

WEIGHTS = bytes(range(256)) * 9000  # more than two pieces
AT = Position(1, 20)


@pytest.fixture
async def app(store: Store, tmp_path: Path) -> AsyncIterator[FastAPI]:
    async with application(store, jobs_dir=tmp_path / "jobs") as app:
        yield app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with http_to(app) as http:
        yield http


@pytest.fixture
async def files(http: httpx.AsyncClient, tmp_path: Path) -> str:
    """Where the files of a ready export are found."""
    job = str((await http.post("/v1/jobs", json=SPEC)).json()["id"])
    write(tmp_path / "jobs", job, AT.step)
    export = JobDir(tmp_path / "jobs" / job).export(AT)
    (export / "adapter").mkdir(parents=True)
    (export / "model.safetensors").write_bytes(WEIGHTS)
    (export / "adapter" / "adapter config.json").write_bytes(b"{}")
    (export / "empty").touch()
    (tmp_path / "secret").write_text("secret")
    (export / "link").symlink_to(tmp_path / "secret")
    (export / "around").symlink_to(tmp_path)
    return f"/v1/checkpoints/{job}/{AT.epoch}/{AT.step}/export/files"


async def test_each_listed_file_is_given_whole(http: httpx.AsyncClient, files: str):
    assert len(WEIGHTS) > 2 * PIECE_BYTES
    listed = (await http.get(files.removesuffix("/export/files"))).json()["export"]["files"]
    sizes = {"adapter/adapter config.json": 2, "empty": 0, "model.safetensors": len(WEIGHTS)}
    assert {one["path"]: one["size_bytes"] for one in listed} == sizes
    for path, size in sizes.items():
        answer = await http.get(f"{files}/{path}")
        assert (answer.status_code, answer.headers["content-length"], len(answer.content)) == (200, str(size), size)
        assert answer.headers["cache-control"] == "private, no-cache"
    assert (await http.get(f"{files}/model.safetensors")).content == WEIGHTS


@pytest.mark.parametrize(
    "path", ["", "link", "around/secret", "..%2f..%2f..%2fsecret", "adapter", "model.safetensors/"]
)
async def test_nothing_else_is_given(http: httpx.AsyncClient, files: str, path: str):
    refused = await http.get(f"{files}/{path}")
    assert refused.status_code == 404
    assert b"secret\n" not in refused.content


async def test_a_download_goes_on_where_it_broke_off(http: httpx.AsyncClient, files: str, tmp_path: Path):
    url = f"{files}/model.safetensors"
    tag = (await http.get(url)).headers["etag"]
    rest = await http.get(url, headers={"Range": "bytes=1000000-", "If-Range": tag})
    assert (rest.status_code, rest.content) == (206, WEIGHTS[1000000:])
    assert rest.headers["content-range"] == f"bytes 1000000-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"
    for asked in ("bytes=5-9", "bytes=-5", "bytes=0-4,8-", "lines=1-", f"bytes={'9' * 30}-"):
        whole = await http.get(url, headers={"Range": asked})
        assert (whole.status_code, whole.content) == (200, WEIGHTS), asked
    beyond = await http.get(url, headers={"Range": f"bytes={len(WEIGHTS)}-"})
    assert (beyond.status_code, error_of(beyond)["code"]) == (416, "range_not_satisfiable")
    assert beyond.headers["content-range"] == f"bytes */{len(WEIGHTS)}"

    [file] = (tmp_path / "jobs").glob("*/exports/*/model.safetensors")
    file.write_bytes(WEIGHTS[::-1] + b"more")
    other = await http.get(url, headers={"Range": "bytes=1000000-", "If-Range": tag})
    assert (other.status_code, other.content) == (200, WEIGHTS[::-1] + b"more")


async def test_what_is_not_ready_has_no_files(http: httpx.AsyncClient, files: str, tmp_path: Path):
    [export] = (tmp_path / "jobs").glob("*/exports/*")
    export.rename(export.with_name(f".tmp-{export.name}"))
    refused = await http.get(f"{files}/model.safetensors")
    assert (refused.status_code, error_of(refused)["code"]) == (404, "export_file_not_found")
    assert (await http.get(files.removesuffix("/export/files"))).json()["export"]["files"] == []


async def test_a_download_needs_a_seat(
    app: FastAPI, http: httpx.AsyncClient, files: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(app.state.context.streams, "_most", 0)
    refused = await http.get(f"{files}/model.safetensors")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "too_many_streams")


def test_weights_take_the_scope_that_writes_them():
    below = "/v1/checkpoints/job_1/1/20"
    assert needed_scope("GET", below) == "jobs:read"
    assert needed_scope("GET", f"{below}/export/files/model.safetensors") == "jobs:write"
    assert needed_scope("POST", f"{below}/export") == "jobs:write"
