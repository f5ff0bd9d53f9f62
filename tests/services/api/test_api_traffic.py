"""Keys that talk without an episode, over the API: made, listed with their use; what they said is read and erased."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest

from gspo_core.cli import main
from gspo_core.client import ApiError, Client
from gspo_core.codec import encode
from gspo_core.types import EpisodeKey, Segment
from services.state.functions import Functions
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from services.state.talks import Presented, Talks, TrafficRetention
from tests.services.api.api_kit import SPEC, ApiProcess, application, error_of, http_to

KEEP = TrafficRetention(1 << 20, 30.0)


@pytest.fixture
async def http(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, keys=["admin"]) as app, http_to(app, key="admin") as http:
        yield http


@pytest.fixture
async def job(store: Store) -> str:
    return (await store.jobs.create(json.dumps(SPEC))).id


def segment(job: str, trace: int, index: int = 0) -> bytes:
    ids = np.array([1, 2, 3], np.int32)
    mask, logprobs = np.array([False, True, True]), np.array([0.0, -1.0, -2.0], np.float32)
    return encode(
        Segment(
            key=EpisodeKey(job, trace, 0),
            attempt=0,
            branch=0,
            index=index,
            turn=index,
            version=4,
            temperature=1.0,
            engine_id="e",
            token_ids=ids,
            action_mask=mask,
            behavior_logprobs=logprobs,
        )
    )


async def test_a_key_is_shown_once_and_listed_with_what_it_used(
    http: httpx.AsyncClient, store: Store, job: str
) -> None:
    made = await http.post(f"/v1/jobs/{job}/talk_keys?label=site&days=7&turns=100&tokens=1000&seconds=2.5")
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    key = made.json()
    presented = Presented.read(key["key"])
    assert presented is not None
    assert (presented.job, presented.id) == (job, key["id"])
    talks = Talks(Functions(store._functions.redis))
    assert (await talks.use(presented, num_turns=2)).max_seconds == 2.5
    await talks.record(job, key["id"], 7, "ann", [segment(job, 7)], tokens=2, s=0.25, keep=KEEP)
    listed = await http.get(f"/v1/jobs/{job}/talk_keys")
    (shown,) = listed.json()["data"]
    assert {name: shown[name] for name in ("label", "max_turns", "num_turns", "num_tokens", "seconds")} == {
        **{"label": "site", "max_turns": 100, "num_turns": 2},
        **{"num_tokens": 2, "seconds": 0.25},
    }
    assert presented.digest not in listed.text
    assert key["key"] not in listed.text
    assert (await http.delete(f"/v1/jobs/{job}/talk_keys/{key['id']}")).status_code == 204
    again = await http.delete(f"/v1/jobs/{job}/talk_keys/{key['id']}")
    assert (again.status_code, error_of(again)["code"]) == (404, "key_not_found")
    assert len((await http.get(f"/v1/jobs/{job}/traces")).json()["data"]) == 1


async def test_what_was_said_is_listed_read_downloaded_and_erased(
    http: httpx.AsyncClient, store: Store, bus: Bus, job: str
) -> None:
    key = (await http.post(f"/v1/jobs/{job}/talk_keys")).json()["id"]
    talks = Talks(Functions(bus._redis))
    for trace, who in ((7, "ann"), (8, "bob"), (9, "ann")):
        for index in range(2):
            await talks.record(job, key, trace, who, [segment(job, trace, index)], tokens=2, s=0.0, keep=KEEP)
    traces = (await http.get(f"/v1/jobs/{job}/traces")).json()["data"]
    assert [(one["id"], one["user"], one["num_turns"], one["num_sampled"]) for one in traces] == [
        ("9", "ann", 2, 4),
        ("8", "bob", 2, 4),
        ("7", "ann", 2, 4),
    ]
    of_bob = (await http.get(f"/v1/jobs/{job}/traces?user=bob")).json()["data"]
    assert [one["id"] for one in of_bob] == ["8"]
    second = await http.get(f"/v1/jobs/{job}/traces?limit=1&after=9")
    assert ([one["id"] for one in second.json()["data"]], second.json()["has_more"]) == (["8"], True)
    for after in ("nonsense", "10"):
        refused = await http.get(f"/v1/jobs/{job}/traces?after={after}")
        assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid_cursor")
    one = (await http.get(f"/v1/jobs/{job}/traces/8?include=tokens")).json()
    assert (one["tokens"]["id"], one["tokens"]["version"]) == ([1, 2, 3] * 2, [4] * 6)
    assert [turn["turn"] for turn in one["turns"]] == [0, 1]
    lines = [json.loads(line) for line in (await http.get(f"/v1/jobs/{job}/traces.ndjson")).text.splitlines()]
    assert [(line["id"], len(line["tokens"]["id"])) for line in lines] == [("7", 6), ("8", 6), ("9", 6)]
    assert (await http.delete(f"/v1/jobs/{job}/traces?user=ann")).json()["num_segments"] == 4
    assert (await http.delete(f"/v1/jobs/{job}/traces/8")).json()["num_segments"] == 2
    missing = await http.get(f"/v1/jobs/{job}/traces/8")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "trace_not_found")
    assert (await http.delete(f"/v1/jobs/{job}/traces")).status_code == 422


async def test_a_job_that_is_over_gets_no_key(http: httpx.AsyncClient, store: Store, job: str) -> None:
    await store.jobs.set_desired_state(job, "cancelled")
    refused = await http.post(f"/v1/jobs/{job}/talk_keys")
    assert (refused.status_code, error_of(refused)["code"]) == (409, "job_over")
    assert (await http.get(f"/v1/jobs/{job}/talk_keys")).json()["data"] == []


async def test_redacted_turns_are_shown_as_the_texts_that_they_are(
    http: httpx.AsyncClient, store: Store, job: str
) -> None:
    key = (await http.post(f"/v1/jobs/{job}/talk_keys")).json()["id"]
    turn = {"turn": 0, "branch": 0, "read": "I am ##.", "said": "Yes.", "num_tokens": 9, "num_sampled": 4}
    payload = json.dumps({**turn, "versions": [3], "kind": "redacted"}).encode()
    await Talks(Functions(store._functions.redis)).record(job, key, 7, "", [payload], tokens=4, s=0.0, keep=KEEP)
    shown = (await http.get(f"/v1/jobs/{job}/traces/7?include=tokens")).json()
    assert (shown["is_redacted"], shown["num_turns"], shown["num_sampled"], shown["versions"]) == (True, 1, 4, [3])
    assert (shown["turns"][0]["said"], shown["tokens"]["id"]) == ("Yes.", [])


async def test_the_client_and_the_command_do_it(
    redis_server: RedisServer, store: Store, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = Talks(Functions(store._functions.redis))

    def keys(api: ApiProcess) -> str:
        with Client(api.url) as client:
            key = client.make_talk_key(job, label="site", turns=10)
            assert Presented.read(key["key"]) is not None
            assert [(one["label"], one["max_turns"]) for one in client.talk_keys(job)] == [("site", 10)]
            return key["id"]

    def read(api: ApiProcess, key: str) -> None:
        with Client(api.url) as client:
            assert [one["id"] for one in client.traces(job, user="ann")] == ["7"]
            detail = client.trace(job, "7", with_tokens=True)
            assert detail["tokens"] is not None
            assert detail["tokens"]["id"] == [1, 2, 3]
            assert main(["erase", job, "--user", "ann", "--url", api.url]) == 0
            said = capsys.readouterr().out
            assert "erased: 1 recorded segment of keys that just talk\n" in said
            assert "erased: 0 trained episodes in 0 batch logs\n" in said
            with pytest.raises(ApiError, match="group 0"):
                client.erase_episode(f"{job}/0/0")
            with pytest.raises(SystemExit):
                main(["erase", job, "--episode", "2", "--url", api.url])
            assert "an episode is GROUP/MEMBER, such as 2/0, and not 2" in capsys.readouterr().err
            assert main(["erase", job, "--trace", "8", "--url", api.url]) == 0
            assert list(client.traces(job)) == []
            client.revoke_talk_key(job, key)
            assert client.talk_keys(job) == []

    with ApiProcess(redis_server.url) as api:
        key = await asyncio.to_thread(keys, api)
        for trace, who in ((7, "ann"), (8, "bob")):
            await talks.record(job, key, trace, who, [segment(job, trace)], tokens=2, s=0.0, keep=KEEP)
        await asyncio.to_thread(read, api, key)
    assert capsys.readouterr().out.count("erased: 1 recorded segment\n") == 1


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "talk_keys", "jobs:write"),
        ("DELETE", "traces?user=x", "jobs:write"),
        ("GET", "traces", "episodes:read"),
        ("GET", "traces.ndjson", "episodes:read"),
    ],
)
def test_each_takes_its_scope(method: str, path: str, scope: str) -> None:
    from services.api.http.access import needed_scope

    assert needed_scope(method, f"/v1/jobs/job-1/{path.partition('?')[0]}") == scope
