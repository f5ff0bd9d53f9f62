"""What Redis holds of processes: written as before, read whoever wrote it, and never a reason to crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from services.state.fleet_records import (
    EngineRecord,
    EngineReport,
    EngineState,
    ProcessRecord,
    TrainerRecord,
    UnreadableRecord,
    WorkerRecord,
)
from services.state.keys import service_key
from services.state.store import Claim, Store
from tests.services.api.api_kit import application, http_to

URL = "http://10.0.0.7:30000"
# Exactly what the release before wrote.
ENGINE = {
    "id": URL,
    "url": URL,
    "model_path": "/models/m",
    "weight_version": "job_a/1/7",
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
}
REPORT = {
    "state": "ready",
    "label": "job_a/1/7",
    "reason": "",
    "num_switches": 3,
    "paused_s": 1.5,
    "last_paused_s": 0.5,
    "tokens_prefilled_again": 40,
    "tokens_lost": 0,
}
TRAINER = {
    "id": "trainer-0",
    "kind": "trainer",
    "host": "h",
    "pid": 7,
    "device": "cuda",
    "num_gpus": 2,
    "threads": 4,
    "torch": "2.13.0",
    "num_ranks": 2,
}
WORKER: dict[str, Any] = {
    "id": "rollout-0",
    "kind": "rollout",
    "host": "h",
    "address": "",
    "pid": 8,
    "draining": False,
    "jobs": ["job_a"],
    "num_episodes": 3,
    "max_episodes": 64,
    "environment_capacity": {"job_a": 8},
    "engine_requests": {URL: 2},
    "ill_environments": {"job_a": {"x:Y": "gone"}},
    "counters": {"episodes/finished": 12, "time/engine_s": 30.0},
}


@pytest.mark.parametrize(
    ("kind", "written"), [(EngineRecord, ENGINE), (TrainerRecord, TRAINER), (WorkerRecord, WORKER)]
)
def test_the_wire_format_is_that_of_the_release_before(kind: type[ProcessRecord], written: dict[str, Any]) -> None:
    assert json.loads(kind.from_json(json.dumps(written).encode()).to_json()) == written
    newer = json.dumps(written | {"of_a_later_release": {"x": 1}}).encode()
    assert json.loads(kind.from_json(newer).to_json()) == written


def test_a_report_is_written_as_before_and_every_state_of_an_engine_can_be_said() -> None:
    assert json.loads(EngineReport.from_json(json.dumps(REPORT).encode()).to_json()) == REPORT | {"context_tokens": 0}
    assert EngineReport.from_json(json.dumps(REPORT | {"context_tokens": 4090}).encode()).context_tokens == 4090
    for state in EngineState:
        assert EngineReport.from_json(EngineReport(state).to_json()).state is state
    asked = {state for state in EngineState if state.may_be_asked}
    assert asked == set(EngineState) - {EngineState.JOINING, EngineState.DIRTY, EngineState.GONE}


def test_what_the_server_counts_and_others_say_is_not_written_with_an_engine() -> None:
    report = EngineReport(EngineState.DIRTY)
    record = EngineRecord(id=URL, beats=9, job="job_a", draining=True, report=report)
    assert json.loads(record.to_json()).keys() == ENGINE.keys()


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"id": ""}', b'{"id": 3}', b'{"id": "e", "url": 3}', b"\xff"])
def test_what_is_no_record_is_unreadable(text: bytes) -> None:
    with pytest.raises(UnreadableRecord):
        EngineRecord.from_json(text)


async def put(redis: Redis, kind: str, name: str, text: bytes | dict[str, Any]) -> None:
    await redis.hset(service_key(f"{kind}s"), name, text if isinstance(text, bytes) else json.dumps(text))  # type: ignore[arg-type]


async def test_records_of_the_release_before_are_read_beside_garbage_which_is_told_once(
    store: Store, redis_client: Redis, claim: Claim
) -> None:
    await put(redis_client, "engine", URL, ENGINE | {"of_a_later_release": 1})
    assert await store.fleet.bind(claim.job_id, claim.token, URL)
    await redis_client.hset(service_key("engine_states"), URL, json.dumps(REPORT))
    await put(redis_client, "trainer", "trainer-0", TRAINER)
    await put(redis_client, "worker", "rollout-0", WORKER)
    for kind in ("engine", "trainer", "worker"):
        await put(redis_client, kind, "broken", b"\x80not json")
    with capture_logs() as logs:
        for _ in range(3):
            (engine,) = await store.fleet.engines()
            found = await store.fleet.everyone()
            assert (found.engines, found.trainers) == ([engine], await store.fleet.trainers())
            assert found.workers == await store.fleet.workers()
    assert (engine.job, engine.state, engine.label) == (claim.job_id, EngineState.READY, "job_a/1/7")
    assert engine.report is not None
    assert engine.report.num_switches == 3
    assert [one.device for one in found.trainers] == ["cuda"]
    assert [one.counters for one in found.workers] == [WORKER["counters"]]
    assert [one["name"] for one in logs] == ["b'broken'"]


async def test_a_state_of_a_later_release_leaves_an_engine_without_a_report(
    store: Store, redis_client: Redis, claim: Claim
) -> None:
    await store.fleet.register_engine(EngineRecord(id=URL, url=URL))
    await store.fleet.bind(claim.job_id, claim.token, URL)
    await redis_client.hset(service_key("engine_states"), URL, json.dumps(REPORT | {"state": "hibernating"}))
    with capture_logs() as logs:
        (engine,) = await store.fleet.engines()
    assert (engine.job, engine.report) == (claim.job_id, None)
    assert "hibernating" in logs[0]["error"]


async def test_the_api_shows_an_engine_with_its_report_among_its_fields(
    store: Store, redis_client: Redis, claim: Claim, tmp_path: Path
) -> None:
    await put(redis_client, "engine", URL, ENGINE)
    await put(redis_client, "engine", "broken", b"{}")
    await store.fleet.bind(claim.job_id, claim.token, URL)
    await redis_client.hset(service_key("engine_states"), URL, json.dumps(REPORT))
    await put(redis_client, "trainer", "trainer-0", TRAINER)
    await put(redis_client, "worker", "rollout-0", WORKER)
    async with application(store) as app, http_to(app) as http:
        shown = {one["id"]: one for one in (await http.get("/v1/workers")).json()["data"]}
    of_all = {"object": "worker", "alive": True, "draining": False, "beats": 0}
    drain = {"links": {"drain": "/v1/engines/http%3A%2F%2F10.0.0.7%3A30000/drain"}}
    reported = REPORT | {"context_tokens": 0}
    assert shown.pop(URL) == of_all | ENGINE | reported | {"role": "engine", "job": claim.job_id} | drain
    for record, role in ((TRAINER, "trainer"), (WORKER, "rollout")):
        links = {"links": {"drain": f"/v1/workers/{record['id']}/drain"}}
        assert shown.pop(record["id"]) == of_all | record | {"role": role} | links
    assert not shown
