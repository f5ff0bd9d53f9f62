"""The files of an export over HTTP: whole or from where a download broke off, nothing else of the disk, and only for
keys that may have one written."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import threading
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gspo_core.position import Position
from services.api.http.access import LOCAL, needed_scope
from services.api.http.errors import RequestRefused
from services.api.http.file_download import PIECE_BYTES, FileDownload
from services.api.http.streams import KeyEnded
from services.files.job_dir import JobDir
from services.state.store import Store
from tests.patience import HANG_S
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
    (tmp_path / "secret").write_text("the content")
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
        assert answer.headers["cache-control"] == "private, no-cache, no-transform"
    assert (await http.get(f"{files}/model.safetensors")).content == WEIGHTS


@pytest.mark.parametrize(
    "path", ["", "link", "around/secret", "..%2f..%2f..%2fsecret", "adapter", "model.safetensors/"]
)
async def test_nothing_else_is_given(http: httpx.AsyncClient, files: str, path: str):
    refused = await http.get(f"{files}/{path}")
    assert refused.status_code == 404
    assert b"the content" not in refused.content


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
    assert needed_scope("GET", f"{below}%0A/export/files/model.safetensors".replace("%0A", "\n")) == "jobs:write"
    assert needed_scope("POST", f"{below}/export") == "jobs:write"


async def test_a_folder_that_cannot_be_read_is_told(
    http: httpx.AsyncClient, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As root, who runs tests too, reads everything, the system is asked to refuse."""
    [adapter] = (tmp_path / "jobs").glob("*/exports/*/adapter")
    scandir = os.scandir

    def refusing(path: str) -> object:
        if Path(path) == adapter:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    export = (await http.get(files.removesuffix("/export/files"))).json()["export"]
    assert (export["status"], export["files"], export["written_at"]) == ("ready", [], None)
    assert export["message"].startswith("its files cannot be listed: Permission denied, jobs/")
    assert export["message"].endswith("/adapter")


async def test_an_export_says_when_it_was_written(http: httpx.AsyncClient, files: str, tmp_path: Path):
    checkpoint = files.removesuffix("/export/files")
    said = (await http.get(checkpoint)).json()["export"]["written_at"]
    [export] = (tmp_path / "jobs").glob("*/exports/*")
    assert datetime.fromisoformat(said) == datetime.fromtimestamp(export.stat().st_mtime, UTC)
    os.utime(export, (0, 1.5))
    assert (await http.get(checkpoint)).json()["export"]["written_at"] == "1970-01-01T00:00:01.500000+00:00"


class Caller:
    """Of one download, who does something when its first piece has come."""

    def __init__(self, app: FastAPI, then: Callable[[], object] = lambda: None) -> None:
        self._then = then
        self.is_admitted = True
        self.has_left = asyncio.Event()
        self.got = b""
        self.was_told_the_end = False
        state = {"app": app, "caller": LOCAL, "is_admitted": lambda: self.is_admitted}
        self.scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "headers": [], **state}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.got += message.get("body", b"")
        if message.get("body") and len(self.got) == PIECE_BYTES:
            self._then()
            await asyncio.sleep(0)
        self.was_told_the_end = message["type"] == "http.response.body" and not message.get("more_body")

    async def receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The files that are opened to be given."""
    found: list[Any] = []
    open_it = Path.open

    def noted(path: Path, mode: str = "r", **options: Any) -> object:
        file = open_it(path, mode, **options)
        if mode == "rb":
            found.append(file)
        return file

    monkeypatch.setattr(Path, "open", noted)
    return found


MISSING = RequestRefused(404, "export_file_not_found", "it is not there")


async def closed(files: Sequence[Any]) -> None:
    async with asyncio.timeout(HANG_S):
        while not all(file.closed for file in files):
            await asyncio.sleep(0.01)


async def test_a_file_that_is_removed_or_replaced_meanwhile_is_given_to_its_end(
    app: FastAPI, tmp_path: Path, opened: list[Any]
):
    file = tmp_path / "file"
    other = tmp_path / "other"
    for change in (file.unlink, lambda: other.replace(file)):
        file.write_bytes(WEIGHTS)
        other.write_bytes(b"another one")
        caller = Caller(app, change)
        await FileDownload(file, "text/plain", MISSING)(caller.scope, caller.receive, caller.send)
        assert (caller.got, caller.was_told_the_end) == (WEIGHTS, True)
    await closed(opened)


async def test_what_is_written_to_it_meanwhile_is_none_of_the_answer(app: FastAPI, tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(WEIGHTS)

    def write_more() -> None:
        with file.open("ab") as out:
            out.write(b"more")

    caller = Caller(app, write_more)
    await FileDownload(file, "text/plain", MISSING)(caller.scope, caller.receive, caller.send)
    assert (caller.got, caller.was_told_the_end) == (WEIGHTS, True)


async def test_a_file_that_is_gone_when_it_is_opened_was_never_there(app: FastAPI, tmp_path: Path):
    caller = Caller(app)
    with pytest.raises(RequestRefused) as refused:
        await FileDownload(tmp_path / "none", "text/plain", MISSING)(caller.scope, caller.receive, caller.send)
    assert (refused.value, caller.got) == (MISSING, b"")


async def test_a_download_breaks_off_with_its_key(
    app: FastAPI, tmp_path: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("services.api.http.streams.LOOK_S", 0.0)
    (tmp_path / "file").write_bytes(WEIGHTS)
    caller = Caller(app, lambda: setattr(caller, "is_admitted", False))
    with pytest.raises(KeyEnded):
        await FileDownload(tmp_path / "file", "text/plain", MISSING)(caller.scope, caller.receive, caller.send)
    assert (len(caller.got), caller.was_told_the_end) == (PIECE_BYTES, False)
    await closed(opened)


async def test_a_caller_that_leaves_frees_its_seat_and_the_file(app: FastAPI, tmp_path: Path, opened: list[Any]):
    (tmp_path / "file").write_bytes(WEIGHTS)
    caller = Caller(app, lambda: caller.has_left.set())
    await FileDownload(tmp_path / "file", "text/plain", MISSING)(caller.scope, caller.receive, caller.send)
    assert not caller.was_told_the_end
    assert app.state.context.streams._open.total() == 0
    await closed(opened)


async def test_a_disk_that_hangs_does_not_hold_the_process(
    app: FastAPI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The caller leaves while a piece is being read: nobody waits for that piece, and the file is closed after it."""
    is_reading, goes_on = threading.Event(), threading.Event()

    class Hanging(io.BytesIO):
        was_closed_in_mid_read = False

        def fileno(self) -> int:
            return fd

        def read(self, size: int | None = -1) -> bytes:
            is_reading.set()
            goes_on.wait(HANG_S)
            self.was_closed_in_mid_read = self.closed
            return b""

    (tmp_path / "file").write_bytes(WEIGHTS)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        hanging = Hanging()
        monkeypatch.setattr(Path, "open", lambda path, mode: hanging)
        caller = Caller(app)
        download = FileDownload(tmp_path / "file", "text/plain", MISSING)
        given = asyncio.create_task(download(caller.scope, caller.receive, caller.send))
        async with asyncio.timeout(HANG_S):
            await asyncio.to_thread(is_reading.wait)
            caller.has_left.set()
            await given
        goes_on.set()
        await closed([hanging])
    finally:
        goes_on.set()
        os.close(fd)
