"""Agents fetch episodes over the API: who may, what they are told, and the answers where there is nothing to fetch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from gspo_core.client import ApiError, Client
from gspo_core.types import EpisodeKey, Split
from services.api.http.key_ring import KeyRing
from services.files.data_dir import KeysDir
from services.state.functions import Functions
from services.state.keys import job_key
from services.state.loans import ANY, Loans, LoanState
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import SPEC, ApiProcess, application, error_of, http_to

PULLING = SPEC | {"environments": [{"ref": "tests:agent", "agent": {"pull": True}}]}
TOLD = b'{"task": {"number": 1}, "base_url": "http://gateway/v1", "api_key": "ep_1", "model": "policy"}'


@pytest.fixture
async def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(KeysDir(tmp_path / "keys"))


@pytest.fixture
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


@pytest.fixture
async def http(store: Store, ring: KeyRing) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, keys=["admin"], ring=ring) as app, http_to(app, key="admin") as http:
        yield http


async def offered(
    store: Store,
    bus: Bus,
    *,
    num: int = 1,
    spec: dict = PULLING,  # type: ignore[type-arg]
    reward_range: tuple[float, float] = ANY,
) -> str:
    """A job with episodes that wait for agents."""
    job = (await store.jobs.create(json.dumps(spec), idempotency_key=None)).id
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await bus.dispatch(job, claim.token, 0, size=max(num, 1), split=Split.TRAIN, task_index=0)
    token = await bus.join("gateway-0")
    for lease in await bus.lease(job, "gateway-0", token, num):
        await Loans(Functions(bus._redis)).offer(lease.key, token, 0, TOLD, reward_range)
    return job


async def test_an_agent_fetches_keeps_and_finishes_an_episode(http: httpx.AsyncClient, store: Store, bus: Bus) -> None:
    job = await offered(store, bus)
    answer = await http.post(f"/v1/jobs/{job}/episodes:lease?lease_s=60")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    lease = answer.json()
    assert (lease["task"], lease["base_url"], lease["api_key"]) == ({"number": 1}, "http://gateway/v1", "ep_1")
    assert (lease["episode"], lease["lease_s"], lease["state"]) == (f"{job}/0/0", 60.0, "lent")
    path = f"/v1/jobs/{job}/leases/{lease['id']}"
    assert (await http.post(f"{path}/extend?lease_s=90")).json()["lease_s"] == 90
    for _ in range(2):
        assert (await http.post(f"{path}/finish?reward=0.5")).json()["state"] == "finished"
    (loan,) = (await Loans(store._functions).offers(job)).values()
    assert loan is not None
    assert (loan.key, loan.state, loan.reward, loan.beats) == (EpisodeKey(job, 0, 0), LoanState.FINISHED, 0.5, 1)
    over = await http.post(f"{path}/release")
    assert (over.status_code, error_of(over)["code"], over.headers["x-should-retry"]) == (409, "lease_over", "false")


async def test_a_reward_out_of_its_worlds_range_is_refused_and_the_lease_goes_on(
    http: httpx.AsyncClient, store: Store, bus: Bus
) -> None:
    job = await offered(store, bus, reward_range=(0.0, 1.0))
    lease = (await http.post(f"/v1/jobs/{job}/episodes:lease")).json()
    path = f"/v1/jobs/{job}/leases/{lease['id']}"
    refused = await http.post(f"{path}/finish?reward=1.5")
    assert (refused.status_code, error_of(refused)["code"], error_of(refused)["param"]) == (
        422,
        "validation_failed",
        "reward",
    )
    assert "1.5 is outside the reward_range (0.0, 1.0)" in error_of(refused)["message"]
    hardly = error_of(await http.post(f"{path}/finish?reward=1.0000001"))["message"]
    assert hardly.startswith("1.0000001 is outside")
    assert (await http.post(f"{path}/extend")).json()["state"] == "lent"
    assert (await http.post(f"{path}/finish?reward=1")).json()["state"] == "finished"


async def test_what_was_offered_and_lent_ends_with_its_job(http: httpx.AsyncClient, store: Store, bus: Bus) -> None:
    job = await offered(store, bus, num=2)
    lease = (await http.post(f"/v1/jobs/{job}/episodes:lease")).json()
    await store.jobs.set_status(job, "failed")
    over = await http.post(f"/v1/jobs/{job}/leases/{lease['id']}/extend")
    assert (over.status_code, error_of(over)["code"]) == (409, "lease_over")
    for name in ("offers", "offered", "loans"):
        assert not await bus._redis.exists(job_key(job, name))


async def test_the_same_key_is_the_same_lease_whoever_restarts(store: Store, bus: Bus, ring: KeyRing) -> None:
    job = await offered(store, bus, num=2)
    leases = []
    for _ in range(2):  # processes of the API
        async with application(store, keys=["admin"], ring=ring) as app, http_to(app, key="admin") as http:
            answer = await http.post(f"/v1/jobs/{job}/episodes:lease", headers={"Idempotency-Key": "mine"})
            leases.append(answer.json())
    assert leases[0] == leases[1]


async def test_where_nothing_waits_there_is_no_content_and_where_nothing_ever_will_a_reason(
    http: httpx.AsyncClient, store: Store, bus: Bus
) -> None:
    job = await offered(store, bus, num=0)
    assert (await http.post(f"/v1/jobs/{job}/episodes:lease?wait_s=0.3")).status_code == 204
    other = await offered(store, bus, num=0, spec=SPEC)
    refused = await http.post(f"/v1/jobs/{other}/episodes:lease")
    assert (refused.status_code, error_of(refused)["code"]) == (409, "agents_do_not_pull")
    missing = await http.post("/v1/jobs/job_none/episodes:lease")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "job_not_found")
    done = (await store.jobs.create("{}", idempotency_key=None)).id
    await http.post(f"/v1/jobs/{done}/cancel")
    refused = await http.post(f"/v1/jobs/{done}/episodes:lease")
    assert (refused.status_code, error_of(refused)["code"]) == (409, "job_over")


@pytest.mark.parametrize(("scope", "status"), [("episodes:play", 200), ("jobs:write", 403), ("episodes:read", 403)])
async def test_it_takes_a_key_that_may_play(
    http: httpx.AsyncClient, store: Store, bus: Bus, scope: str, status: int
) -> None:
    key = (await http.post(f"/v1/keys?scopes={scope}&owner=me")).json()["key"]
    header = {"Authorization": f"Bearer {key}"}
    maker = {"Authorization": f"Bearer {(await http.post('/v1/keys?owner=me')).json()['key']}"}
    job = (await http.post("/v1/jobs", json=PULLING, headers=maker)).json()["id"]
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await bus.dispatch(job, claim.token, 0, size=1, split=Split.TRAIN, task_index=0)
    token = await bus.join("gateway-0")
    (held,) = await bus.lease(job, "gateway-0", token, 1)
    await Loans(Functions(bus._redis)).offer(held.key, token, 0, TOLD)
    assert (await http.post(f"/v1/jobs/{job}/episodes:lease", headers=header)).status_code == status
    others = await offered(store, bus)
    assert (await http.post(f"/v1/jobs/{others}/episodes:lease", headers=header)).status_code in (403, 404)


async def test_the_client_does_it(api: ApiProcess, store: Store, bus: Bus) -> None:
    job = await offered(store, bus, num=2)

    def play() -> None:
        with Client(api.url) as client:
            first, second = (client.lease_episode(job, wait_s=0) for _ in range(2))
            assert first is not None
            assert second is not None
            assert client.lease_episode(job, wait_s=0) is None
            assert client.extend_lease(first, lease_s=30)["lease_s"] == 30
            assert client.finish_lease(first, 1.0)["state"] == "finished"
            assert client.release_lease(second)["state"] == "released"
            with pytest.raises(ApiError) as error:
                client.extend_lease(second)
            assert error.value.code == "lease_over"

    await asyncio.to_thread(play)
