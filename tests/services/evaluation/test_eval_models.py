"""Which files `gspo eval` finds behind a name: a directory, a fetched model, a checkpoint of a job."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gspo_core.evaluation.policy import PolicyUnusable
from services.evaluation import models
from services.evaluation.models import find_model
from services.files.data_dir import FETCHED, HubKind, HubName

JOB = "job_01HZX5T8PZ8QJ5S7V9W3R2K4M6"


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GSPO_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(models, "POLL_S", 0.0)
    return tmp_path / "data"


class Installation(BaseHTTPRequestHandler):
    """Has one job with two checkpoints, and exports one while it is asked a second time."""

    asked: list[str]
    exports: Iterator[dict[str, Any]]

    def do_GET(self) -> None:
        self.asked.append(f"GET {self.path.partition('?')[0]}")
        if self.path.endswith("/config"):
            return self.say({"config": {"chat": {"thinking": "template"}}, "warnings": []})
        if "/checkpoints?" in self.path:
            rows = [self.checkpoint(f"{JOB}/1/{step}") for step in (40, 20)]
            return self.say({"object": "list", "data": rows, "has_more": False, "first_id": None, "last_id": None})
        return self.say(self.checkpoint(self.path.removeprefix("/v1/checkpoints/")))

    def do_POST(self) -> None:
        self.asked.append(f"POST {self.path}")
        self.say(self.checkpoint(self.path.removeprefix("/v1/checkpoints/").removesuffix("/export")), 202)

    def checkpoint(self, id: str) -> dict[str, Any]:
        return {"object": "checkpoint", "id": id, "files": [], "export": next(self.exports)}

    def say(self, answer: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


def an_export(status: str, path: str | None = None, message: str | None = None) -> dict[str, Any]:
    return {"object": "checkpoint.export", "status": status, "path": path, "message": message}


class Serving:
    def __init__(self, *exports: dict[str, Any]) -> None:
        """In the order in which they are told; the first ones stand in the list of checkpoints."""
        self.asked: list[str] = []
        handler = type("Handler", (Installation,), {"asked": self.asked, "exports": iter(exports)})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Serving:
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


NONE, READY = an_export("none"), an_export("ready", f"jobs/{JOB}/exports/ep000001-step000040")


def test_the_newest_checkpoint_of_a_job_is_exported_and_spoken_to_as_its_job_says(data_dir: Path) -> None:
    (data_dir / READY["path"]).mkdir(parents=True)
    with Serving(NONE, NONE, an_export("exporting"), an_export("exporting"), READY) as api:
        found = find_model(JOB, api.url)
    assert (found.directory, found.chat) == (data_dir / READY["path"], {"thinking": "template"})
    newest = f"/v1/checkpoints/{JOB}/1/40"
    assert api.asked[1:] == [f"GET /v1/jobs/{JOB}/checkpoints", f"POST {newest}/export", *[f"GET {newest}"] * 2]


def test_a_checkpoint_can_be_named(data_dir: Path) -> None:
    (data_dir / READY["path"]).mkdir(parents=True)
    with Serving(READY) as api:
        find_model(f"{JOB}/1/20", api.url)
    assert api.asked[-1] == f"POST /v1/checkpoints/{JOB}/1/20/export"


def test_a_checkpoint_that_this_machine_does_not_see_says_where_it_lies(data_dir: Path) -> None:
    with (
        Serving(READY) as api,
        pytest.raises(PolicyUnusable, match=f"lies in {READY['path']} of .*GSPO_DATA_DIR") as told,
    ):
        find_model(f"{JOB}/1/40", api.url)
    assert f"gspo export {JOB}/1/40 --to DIR --url {api.url} fetches it" in str(told.value)


def test_an_export_that_fails_says_why() -> None:
    failed = an_export("failed", message="the disk is full")
    with Serving(failed) as api, pytest.raises(PolicyUnusable, match="cannot be exported: the disk is full"):
        find_model(f"{JOB}/1/40", api.url)


def test_where_no_installation_answers_the_address_is_named() -> None:
    with pytest.raises(PolicyUnusable, match=r"http://127\.0\.0\.1:9 cannot be asked"):
        find_model(JOB, "http://127.0.0.1:9")


def test_a_directory_and_a_fetched_model_are_found(data_dir: Path, tmp_path: Path) -> None:
    assert find_model(str(tmp_path), "").directory == tmp_path
    name = HubName.parse("Owner/Name")
    assert name is not None
    fetched = models._data_dir().hub.directory(HubKind.MODEL, name, "a" * 40)
    fetched.mkdir(parents=True)
    (fetched / FETCHED).touch()
    assert find_model("Owner/Name", "").directory == fetched
