"""Stands in for the Hugging Face hub: the answers that its client asks for, over repositories made of files.

It is as much of the hub as its documented HTTP API shows: repositories with commits, branches, digests of git and of
large files. The hub itself was never asked; what it answers otherwise is not known here.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SENT_S = 60.0
LARGE = (".safetensors", ".parquet", ".bin")


@dataclass
class Repository:
    files: Mapping[str, bytes]
    commit: str = "a" * 40
    branch: str = "main"
    spoilt: set[str] = field(default_factory=set)
    """Files that arrive with other bytes than the digest says."""
    missing: set[str] = field(default_factory=set)
    """Files that are listed and cannot be had. That is said when the weights are sent: clients ask for many at once,
    and leave when they learn it."""
    weights_are_sent: threading.Event = field(default_factory=threading.Event)
    sent: set[str] = field(default_factory=set)

    def knows(self, revision: str) -> bool:
        return revision in (self.commit, self.branch)


@dataclass
class Hub:
    """``repositories`` by kind and name: ``models/Qwen/Qwen3-0.6B``."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    url: str = ""
    asked: list[str] = field(default_factory=list)


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        the_hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    the_hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        self.the_hub.asked.append(f"{self.command} {self.path}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "api":
            self._describe(parts[1], parts[2], parts[3], parts[4:])
        else:
            kind, parts = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
            self._send_file(kind, *parts[:2], revision=parts[3], path="/".join(parts[4:]))

    def _find(self, kind: str, owner: str, name: str, revision: str) -> Repository | None:
        found = self.the_hub.repositories.get(f"{kind}/{owner}/{name}")
        if found is None or not found.knows(revision):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound" if found else "RepoNotFound"})
            return None
        return found

    def _describe(self, kind: str, owner: str, name: str, rest: list[str]) -> None:
        what, revision = (rest[0], "/".join(rest[1:])) if rest else ("revision", "main")
        found = self._find(kind, owner, name, revision)
        if found is None:
            return
        files = [_stated(path, data) for path, data in found.files.items()]
        if what == "tree":
            tree = [
                {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": one["blobId"]}
                | ({"lfs": {"oid": one["lfs"]["sha256"], **one["lfs"]}} if "lfs" in one else {})
                for one in files
            ]
            self._answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            return
        said = {"id": f"{owner}/{name}", "sha": found.commit, "siblings": files, "private": False, "tags": []}
        self._answer(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def _send_file(self, kind: str, owner: str, name: str, *, revision: str, path: str) -> None:
        found = self._find(kind, owner, name, revision)
        if found is None:
            return
        if path in found.missing:
            found.weights_are_sent.wait(SENT_S)
        if path not in found.files or path in found.missing:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = found.files[path]
        etag = hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else git_digest(data)
        if path in found.spoilt:
            data = bytes(len(data))
        self._answer(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": found.commit})
        if self.command == "GET":
            found.sent.add(path)
            if found.sent >= {name for name in found.files if name.endswith(".safetensors")}:
                found.weights_are_sent.set()

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _stated(path: str, data: bytes) -> dict[str, Any]:
    one: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git_digest(data)}
    if path.endswith(LARGE):
        one["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return one
