"""Keys with scopes and owners: what each opens, when it ends, and what is written down of its use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.api.http.access import LOCAL, Access
from services.api.http.audit import Audit
from services.api.http.key_ring import SCOPES, KeyRing
from services.api.http.limits import RateLimit
from services.api.http.streams import EVENTS, BoundedStream, KeyEnded
from services.api.routes.episodes import NDJSON
from services.files.audit_log import AuditLog
from services.files.data_dir import KeysDir
from services.state.queue import Bus
from services.state.store import Store
from tests.patience import HANG_S
from tests.services.api.api_kit import SPEC, application, error_of, http_to
from tests.services.api.recorded_job import RecordedJob, record_job, write_model

ADMIN = "the-operator"


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(KeysDir(tmp_path / "keys"))


@pytest.fixture
async def app(store: Store, tmp_path: Path, ring: KeyRing) -> AsyncIterator[FastAPI]:
    audit = Audit(AuditLog(tmp_path / "audit.jsonl").append)
    async with application(store, jobs_dir=tmp_path / "jobs", keys=[ADMIN], ring=ring, audit=audit) as app:
        yield app


@pytest.fixture
async def job(store: Store, bus: Bus, tmp_path: Path) -> RecordedJob:
    return await record_job(store, bus, tmp_path / "jobs", write_model(tmp_path / "model"), num_steps=1)


async def ask(app: FastAPI, method: str, path: str, key: str, **options: Any) -> httpx.Response:
    async with http_to(app, key=key) as http:
        return await http.request(method, path, **options)


async def make(app: FastAPI, **query: str) -> dict[str, Any]:
    answer = await ask(app, "POST", "/v1/keys", ADMIN, params=query)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


ROUTES = (
    ("GET", "/v1/jobs", "jobs:read"),
    ("GET", "/v1/jobs/{job}", "jobs:read"),
    ("GET", "/v1/jobs/{job}/events", "jobs:read"),
    ("GET", "/v1/jobs/{job}/metrics", "jobs:read"),
    ("GET", "/v1/jobs/{job}/config", "jobs:read"),
    ("GET", "/v1/jobs/{job}/versions", "jobs:read"),
    ("GET", "/v1/jobs/{job}/checkpoints", "jobs:read"),
    ("GET", "/v1/jobs/{job}/environments", "jobs:read"),
    ("GET", "/v1/workers", "jobs:read"),
    ("GET", "/v1/capabilities", "jobs:read"),
    ("POST", "/v1/jobs?dry_run=true", "jobs:write"),
    ("POST", "/v1/jobs/{job}/pause", "jobs:write"),
    ("POST", "/v1/jobs/{job}/resume", "jobs:write"),
    ("POST", "/v1/jobs/{job}/cancel", "jobs:write"),
    ("GET", "/v1/jobs/{job}/groups", "episodes:read"),
    ("GET", "/v1/jobs/{job}/episodes", "episodes:read"),
    ("GET", "/v1/jobs/{job}/episodes.jsonl", "episodes:read"),
    ("PATCH", "/v1/jobs/{job}", "jobs:write"),
    ("GET", "/v1/groups/{job}/0", "episodes:read"),
    ("GET", "/v1/episodes/{job}/0/0/events", "episodes:read"),
    ("GET", "/v1/episodes/{job}/0/0", "episodes:read"),
    ("GET", "/v1/environments", "jobs:read"),
    ("GET", "/v1/environments/nothing", "jobs:read"),
    ("GET", "/v1/environments/nothing/tasks", "jobs:read"),
    ("GET", "/v1/environments/nothing/schema", "jobs:read"),
    ("POST", "/v1/environments", "envs:write"),
    ("DELETE", "/v1/environments/nothing@1", "envs:write"),
    ("POST", "/v1/environments/nothing/validate", "envs:write"),
    ("POST", "/v1/environments/nothing/try", "envs:write"),
    ("POST", "/v1/environments/uploads?name=a&ref=a.py:A", "env:upload"),
    ("GET", "/v1/checkpoints/{job}/1/1", "jobs:read"),
    ("POST", "/v1/checkpoints/{job}/1/1/export", "jobs:write"),
    ("GET", "/v1/checkpoints/{job}/1/1/export/files/config.json", "jobs:write"),
    ("DELETE", "/v1/checkpoints/{job}/1/1", "jobs:write"),
    ("GET", "/v1/models", "jobs:read"),
    ("POST", "/v1/fine_tuning/jobs", "jobs:write"),
    ("GET", "/v1/fine_tuning/jobs", "jobs:read"),
    ("GET", "/v1/fine_tuning/jobs/{job}", "jobs:read"),
    ("GET", "/v1/fine_tuning/jobs/{job}/events", "jobs:read"),
    ("GET", "/v1/fine_tuning/jobs/{job}/checkpoints", "jobs:read"),
    ("POST", "/v1/fine_tuning/jobs/{job}/pause", "jobs:write"),
    ("POST", "/v1/fine_tuning/jobs/{job}/resume", "jobs:write"),
    ("POST", "/v1/fine_tuning/jobs/{job}/cancel", "jobs:write"),
    ("POST", "/v1/jobs/{job}/trajectories", "jobs:write"),
    ("POST", "/v1/jobs/{job}/fork", "jobs:write"),
    ("POST", "/v1/jobs/{job}/retrain", "jobs:write"),
    ("POST", "/v1/jobs/{job}/replays", "jobs:write"),
    ("GET", "/v1/jobs/{job}/replays", "episodes:read"),
    ("GET", f"/v1/jobs/{{job}}/replays/{16 * '0'}", "episodes:read"),
    ("DELETE", f"/v1/jobs/{{job}}/replays/{16 * '0'}", "jobs:write"),
    ("POST", "/v1/jobs/{job}/episodes:lease", "episodes:play"),
    *(
        ("POST", f"/v1/jobs/{{job}}/leases/{32 * '0'}/{end}", "episodes:play")
        for end in ("extend", "finish", "release")
    ),
    ("POST", "/v1/jobs/{job}/talk_keys", "jobs:write"),
    ("GET", "/v1/jobs/{job}/talk_keys", "jobs:read"),
    ("DELETE", f"/v1/jobs/{{job}}/talk_keys/{12 * '0'}", "jobs:write"),
    ("GET", "/v1/jobs/{job}/traces", "episodes:read"),
    ("GET", "/v1/jobs/{job}/traces.ndjson", "episodes:read"),
    ("GET", "/v1/jobs/{job}/traces/7", "episodes:read"),
    ("DELETE", "/v1/jobs/{job}/traces?user=ann", "jobs:write"),
    ("DELETE", "/v1/jobs/{job}/traces/7", "jobs:write"),
    ("DELETE", "/v1/jobs/{job}/episodes?user=ann", "jobs:write"),
    ("DELETE", "/v1/episodes/{job}/999/0", "jobs:write"),
    ("DELETE", "/v1/jobs/{job}", "jobs:write"),
    ("POST", "/v1/jobs/{job}/environments/0/description", "jobs:write"),
    ("POST", "/v1/workers/nobody/drain", "admin"),
    ("POST", "/v1/engines/nobody/drain", "admin"),
    ("DELETE", "/v1/engines/nobody/drain", "admin"),
    ("GET", "/v1/keys", "admin"),
    ("POST", "/v1/keys", "admin"),
    ("DELETE", "/v1/keys/nothing", "admin"),
)


# What a key that may is told of what is not there, or of a request without a body.
NOT_THERE = (
    "group_not_found",
    *("replay_not_found", "export_file_not_found"),
    *("job_not_found", "key_not_found", "environment_not_found", "checkpoint_not_found", "invalid_transition"),
    *("worker_not_found", "engine_not_found", "uploads_disabled", "unsupported_media_type", "missing_field"),
    *("job_over", "agents_do_not_pull", "lease_over", "trace_not_found", "job_not_over"),
)


async def test_no_way_of_writing_an_address_gives_weights_to_a_key_that_reads(app: FastAPI):
    made = await make(app, owner="alice", scopes="jobs:read")
    for step in ("1", "1%0A", "%0A1", "1%20", "01"):
        for file in ("config.json", "a%0Ab", "%0A"):
            refused = await ask(app, "GET", f"/v1/checkpoints/job_1/1/{step}/export/files/{file}", made["key"])
            assert error_of(refused)["code"] == "scope_required", (step, file)


def test_the_table_of_scopes_names_every_route(app: FastAPI):
    named = {(method, path.partition("?")[0]) for method, path, _ in ROUTES}
    there = {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if path.startswith("/v1")
    }
    assert len(named) == len(there)


async def test_every_route_opens_for_its_scope_and_for_no_other(app: FastAPI, job: RecordedJob, store: Store):
    for scope in SCOPES:
        made = await make(app, scopes=scope)
        for method, path, needed in ROUTES:
            body = {"json": SPEC} if "dry_run" in path else {}
            answer = await ask(app, method, path.format(job=job.id), made["key"], **body)
            if scope in (needed, "admin"):
                # Jobs of others are not there for who is no admin.
                assert answer.status_code < 300 or error_of(answer)["code"] in NOT_THERE
            else:
                assert (answer.status_code, error_of(answer)["code"]) == (403, "scope_required"), (scope, path)


async def test_a_job_is_there_for_its_owner_and_for_admins_only(app: FastAPI):
    mine, same, other = [await make(app, owner=owner) for owner in ("alice", "alice", "bob")]
    job = (await ask(app, "POST", "/v1/jobs", mine["key"], json=SPEC)).json()["id"]
    for key in (mine["key"], same["key"], ADMIN):
        assert (await ask(app, "GET", f"/v1/jobs/{job}", key)).status_code == 200
        assert [one["id"] for one in (await ask(app, "GET", "/v1/jobs", key)).json()["data"]] == [job]
    for method, path in (
        *(("GET", f"/v1/jobs/{job}"), ("GET", f"/v1/jobs/{job}/events"), ("POST", f"/v1/jobs/{job}/cancel")),
        *(("GET", f"/v1/groups/{job}/0"), ("GET", f"/v1/episodes/{job}/0/0"), ("GET", f"/v1/jobs/{job}/groups")),
    ):
        answer = await ask(app, method, path, other["key"])
        absent = await ask(app, method, path.replace(job, "job_nothing"), other["key"])
        assert answer.status_code == absent.status_code == 404
        assert error_of(answer)["message"].replace(job, "") == error_of(absent)["message"].replace("job_nothing", "")
    assert (await ask(app, "GET", "/v1/jobs", other["key"])).json()["data"] == []


async def test_a_revoked_key_and_one_that_has_expired_open_nothing(app: FastAPI, ring: KeyRing, tmp_path: Path):
    made = await make(app)
    assert (await ask(app, "GET", "/v1/jobs", made["key"])).status_code == 200
    assert (await ask(app, "DELETE", f"/v1/keys/{made['id']}", ADMIN)).status_code == 204
    assert error_of(await ask(app, "GET", "/v1/jobs", made["key"]))["code"] == "invalid_key"
    clock = [1000.0]
    timed = KeyRing(KeysDir(tmp_path / "timed"), now=lambda: clock[0])
    _, key = timed.issue("", ["jobs:read"], lifetime_s=60.0)
    assert timed.find(key) is not None
    clock[0] = 1061.0
    assert timed.find(key) is None


@pytest.mark.parametrize("ends", ["revoked", "expired"])
async def test_a_stream_ends_with_its_key_and_no_other_does(
    app: FastAPI, ring: KeyRing, store: Store, monkeypatch: pytest.MonkeyPatch, ends: str
):
    monkeypatch.setattr("services.api.http.streams.LOOK_S", 0.0)
    made = await make(app, owner="alice", days="1")
    job = (await ask(app, "POST", "/v1/jobs", made["key"], json=SPEC)).json()["id"]
    stream = {"headers": {"Accept": "text/event-stream"}}
    async with asyncio.timeout(HANG_S):
        cut, whole = [
            asyncio.create_task(ask(app, "GET", f"/v1/jobs/{job}/events?after=0", key, **stream))
            for key in (made["key"], ADMIN)
        ]
        while app.state.context.streams._open.total() < 2:
            await asyncio.sleep(0.01)
        if ends == "revoked":
            await ask(app, "DELETE", f"/v1/keys/{made['id']}", ADMIN)
        else:
            monkeypatch.setattr(ring, "_now", lambda: time.time() + 100_000)
        await store.events.add(job, "log", {"message": "said later"})
        assert "said later" not in (await cut).text
        await store.jobs.set_desired_state(job, "cancelled")
        assert "said later" in (await whole).text


@pytest.mark.parametrize(("media_type", "breaks_off"), [(NDJSON, True), (EVENTS, False)])
async def test_a_download_breaks_off_with_its_key_and_a_stream_of_events_ends(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, media_type: str, breaks_off: bool
):
    """A shorter download must not look whole; clients open a stream of events again, and are told then."""
    clock, answers = [0.0], iter([True, True, False])
    monkeypatch.setattr("services.api.http.streams.time", SimpleNamespace(monotonic=lambda: clock[0]))
    sent: list[dict[str, Any]] = []

    async def pieces() -> AsyncIterator[str]:
        for number in range(5):
            clock[0] = number * 0.6
            yield str(number)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    async def never() -> dict[str, Any]:
        raise AssertionError("nobody asks for what a caller sends")

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "app": app, "caller": LOCAL}
    answer = BoundedStream(pieces(), media_type=media_type)
    with pytest.raises(KeyEnded) if breaks_off else contextlib.nullcontext():
        await answer({**scope, "is_admitted": lambda: next(answers)}, never, send)
    # Looked at 0 s, 1.2 s and 2.4 s.
    assert b"".join(message.get("body", b"") for message in sent) == b"0123"
    assert sent[-1].get("more_body", False) is breaks_off


def test_the_first_key_ends_what_callers_without_one_have_open(ring: KeyRing):
    access = Access((), ring)
    assert access.admits(LOCAL)
    ring.issue("alice", ["admin"])
    assert not access.admits(LOCAL)


async def test_another_process_sees_a_new_key_and_its_revocation(ring: KeyRing, tmp_path: Path):
    other = KeyRing(KeysDir(tmp_path / "keys"))
    assert other.valid() == {}
    record, key = ring.issue("alice", ["jobs:read"])
    assert other.find(key) == record
    ring.revoke(record.id)
    assert other.find(key) is None


def test_a_revocation_within_the_same_tick_of_the_file_system_is_seen(ring: KeyRing, tmp_path: Path):
    other = KeyRing(KeysDir(tmp_path / "keys"))
    record, key = ring.issue("alice", ["jobs:read"])
    times = (tmp_path / "keys").stat()
    assert other.find(key) == record
    ring.revoke(record.id)
    os.utime(tmp_path / "keys", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert other.find(key) is None


async def test_keys_are_listed_page_by_page(app: FastAPI):
    made = [(await make(app, owner=f"owner-{number}"))["id"] for number in range(5)]
    found: list[str] = []
    after = ""
    for has_more in (True, True, False):
        listed = (await ask(app, "GET", f"/v1/keys?limit=2{after}", ADMIN)).json()
        assert listed["has_more"] is has_more
        found += [one["id"] for one in listed["data"]]
        after = f"&after={listed['last_id']}"
    assert sorted(found) == sorted(made)
    assert error_of(await ask(app, "GET", "/v1/keys?after=nothing", ADMIN))["code"] == "invalid_cursor"


@pytest.mark.parametrize("days", ["nan", "inf", "-inf", "0", "1e999"])
async def test_a_lifetime_that_is_none_is_refused(app: FastAPI, days: str):
    answer = await ask(app, "POST", "/v1/keys", ADMIN, params={"days": days})
    assert (answer.status_code, error_of(answer)["param"]) == (422, "days")


@pytest.mark.parametrize("spoil", [str.upper, lambda key: key[:-1], lambda key: key + "x", lambda key: key[:-1] + "?"])
def test_keys_that_are_nearly_right_are_wrong(ring: KeyRing, spoil: Any):
    _, key = ring.issue("alice", ["jobs:read"])
    assert ring.find(spoil(key)) is None


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def test_no_secret_is_ever_written_down(app: FastAPI, tmp_path: Path):
    made = await make(app, owner="alice")
    secret = made["key"].rpartition("_")[2]
    await ask(app, "POST", "/v1/jobs", made["key"], json=SPEC)
    kept = everything_in(tmp_path)
    assert b"alice" in kept
    assert secret.encode() not in kept
    assert ADMIN.encode() not in kept
    listed = (await ask(app, "GET", "/v1/keys", ADMIN)).text
    assert made["id"] in listed
    assert secret not in listed


async def test_every_write_is_in_the_audit_with_who_and_how_it_ended(app: FastAPI, tmp_path: Path):
    made = await make(app, owner="alice")
    answer = await ask(app, "POST", "/v1/jobs", made["key"], json=SPEC)
    await ask(app, "GET", "/v1/jobs", made["key"])
    await ask(app, "DELETE", "/v1/keys/x", made["key"])
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(one["method"], one["path"], one["status"]) for one in lines] == [
        ("POST", "/v1/keys", 201),
        ("POST", "/v1/jobs", 201),
        ("DELETE", "/v1/keys/x", 403),
    ]
    assert (lines[1]["key"], lines[1]["owner"]) == (made["id"], "alice")
    assert lines[1]["request_id"] == answer.headers["x-request-id"]


async def test_the_audit_says_what_was_changed_and_no_secret(app: FastAPI, tmp_path: Path):
    made = await make(app, owner="alice", scopes="jobs:read,jobs:write")
    job = (await ask(app, "POST", "/v1/jobs", made["key"], json=SPEC)).json()["id"]
    await ask(app, "PATCH", f"/v1/jobs/{job}", made["key"], json={"optimizer": {"lr": 5e-7}})
    await ask(app, "POST", f"/v1/jobs/{job}/pause", made["key"])
    await ask(app, "POST", f"/v1/jobs/{job}/pause", made["key"])
    await ask(app, "DELETE", f"/v1/keys/{made['id']}", ADMIN)
    text = (tmp_path / "audit.jsonl").read_text()
    scopes = ["jobs:read", "jobs:write"]
    said = {"owner": "alice", "scopes": scopes, "expires_at": None}
    assert [json.loads(line)["changes"] for line in text.splitlines()] == [
        [{"what": "key", "name": made["id"], "new": {"owner": "alice", "scopes": scopes}}],
        [{"what": "job", "name": job, "new": {"owner": "alice", "model": "m"}}],
        [{"what": "job", "name": job, "old": {"optimizer.lr": 1e-06}, "new": {"optimizer.lr": 5e-07}}],
        [
            {
                "what": "job",
                "name": job,
                "old": {"desired_state": "running"},
                "new": {"desired_state": "paused"},
            }
        ],
        [],
        [{"what": "key", "name": made["id"], "old": {name: said[name] for name in ("owner", "scopes")}}],
    ]
    assert made["key"] not in text
    assert made["key"].rpartition("_")[2] not in text


async def test_a_job_of_the_other_face_is_in_the_audit_like_any(app: FastAPI, tmp_path: Path):
    made = await make(app, owner="alice", scopes="jobs:read,jobs:write")
    given = {"model": "m", "training_file": "env:environments.calculator:Calculator"}
    answer = await ask(app, "POST", "/v1/fine_tuning/jobs", made["key"], json=given)
    assert answer.status_code == 200, answer.text
    *_, line = (tmp_path / "audit.jsonl").read_text().splitlines()
    new = {"owner": "alice", "model": "m"}
    assert json.loads(line)["changes"] == [{"what": "job", "name": answer.json()["id"], "new": new}]
    headers = {"authorization": f"Bearer {made['key']}", "x-stainless-retry-count": "1"}
    async with http_to(app) as http:
        again = await http.post("/v1/fine_tuning/jobs", json=given, headers=headers)
    assert again.json()["id"] == answer.json()["id"]
    *_, line = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["changes"] == []


def test_who_asks_too_often_is_told_when_to_come_back_and_holds_up_nobody():
    clock = [0.0]
    limit = RateLimit(lambda: clock[0], per_s=2.0, burst=3.0)
    assert [limit.wait_s("a") for _ in range(4)] == [0, 0, 0, 1]
    assert limit.wait_s("b") == 0
    clock[0] = 0.5
    assert [limit.wait_s("a") for _ in range(2)] == [0, 1]


async def test_a_wild_loop_is_stopped_with_429(store: Store, ring: KeyRing, monkeypatch: pytest.MonkeyPatch):
    async def seven(*given: Any) -> int:
        return 7

    monkeypatch.setattr("services.api.http.limits.SharedRateLimit.wait_s", seven)
    async with application(store, keys=[ADMIN], ring=ring) as app:
        answer = await ask(app, "GET", "/v1/jobs", ADMIN)
    assert (answer.status_code, error_of(answer)["code"]) == (429, "too_many_requests")
    assert answer.headers["retry-after"] == "7"


async def test_the_first_key_closes_an_open_api(store: Store, ring: KeyRing):
    async with application(store, ring=ring) as app, http_to(app) as http:
        made = (await http.post("/v1/keys?scopes=admin")).json()
        assert (await http.get("/v1/jobs")).status_code == 401
        assert (await ask(app, "GET", "/v1/jobs", made["key"])).status_code == 200


async def test_an_unknown_scope_is_named(app: FastAPI):
    answer = await ask(app, "POST", "/v1/keys", ADMIN, params={"scopes": "jobs:read,everything"})
    assert (answer.status_code, error_of(answer)["param"]) == (422, "scopes")
    assert "everything" in error_of(answer)["message"]
