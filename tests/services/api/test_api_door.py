"""What one caller may take of the API: requests over all its processes, guesses of keys, and open streams."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.spec import JobSpec
from services.api.http import brakes
from services.api.http.brakes import Brakes
from services.api.http.errors import RequestRefused
from services.api.http.limits import RateLimit, SharedRateLimit
from services.api.http.streams import Streams
from services.state.client import Away, AwayReason
from services.state.functions import Functions
from services.state.store import Store
from tests.patience import HANG_S
from tests.services.api.api_kit import SPEC, application, error_of, http_to

LONG, SHORT = "k" * 40, "letmein"


def replica(clock: list[float]) -> SharedRateLimit:
    return SharedRateLimit(RateLimit(lambda: clock[0], per_s=10.0, burst=30.0), lambda: 1000 + clock[0], handful=10)


async def test_processes_of_one_api_take_from_one_bucket(store: Store) -> None:
    clock = [0.0]
    replicas = [replica(clock) for _ in range(3)]
    waits = [await one.wait_s("a", store.functions) for _ in range(20) for one in replicas]
    assert waits.count(0) == 30
    assert set(waits) == {0, 1}
    assert await replicas[0].wait_s("b", store.functions) == 0
    clock[0] = 2.0  # 20 more
    waits = [await one.wait_s("a", store.functions) for _ in range(20) for one in replicas]
    assert waits.count(0) == 20


async def test_a_handful_of_requests_is_one_call_and_what_is_left_of_it_does_not_last(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    call = Functions.call

    async def counted(self: Functions, name: str, *given: Any) -> Any:
        calls.append(name)
        return await call(self, name, *given)

    monkeypatch.setattr(Functions, "call", counted)
    clock = [0.0]
    one, other = replica(clock), replica(clock)
    assert [await one.wait_s("a", store.functions) for _ in range(10)] == [0] * 10
    assert calls == ["take_requests"]
    assert await other.wait_s("a", store.functions) == 0
    clock[0] = 1.5
    assert await other.wait_s("a", store.functions) == 0
    assert len(calls) == 3


async def test_a_clock_that_is_ahead_does_not_stop_the_others(store: Store) -> None:
    clock = [0.0]
    ahead = SharedRateLimit(RateLimit(lambda: clock[0], per_s=10.0, burst=30.0), lambda: 5000.0, handful=30)
    assert await ahead.wait_s("a", store.functions) == 0
    right = replica(clock)
    assert await right.wait_s("a", store.functions) == 1
    clock[0] = 1.0
    assert await right.wait_s("a", store.functions) == 0


async def test_while_redis_is_away_each_process_counts_for_itself(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = 0

    async def away(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        raise Away(AwayReason.UNREACHABLE)

    monkeypatch.setattr(Functions, "call", away)
    limit = replica([0.0])
    assert [await limit.wait_s("a", store.functions) for _ in range(31)] == [0] * 30 + [1]
    assert num_calls == 1


def try_keys(held: Brakes, count: int, address: str = "10.0.0.9") -> None:
    for number in range(count):
        held.was_wrong(address, f"guess-{number}")


def test_who_shows_wrong_keys_is_slowed_down_and_allowed_again_in_time() -> None:
    clock = [0.0]
    held = Brakes(lambda: clock[0], attempts=3, per_s=0.5)
    try_keys(held, 2)
    assert held.wait_s("10.0.0.9", "another") == 0
    try_keys(held, 1)
    assert held.wait_s("10.0.0.9", "another") == 2
    assert held.wait_s("10.0.0.8", "another") == 0
    clock[0] = 2.0
    assert held.wait_s("10.0.0.9", "another") == 0


def test_one_id_is_not_guessed_at_from_many_addresses() -> None:
    held = Brakes(lambda: 0.0, attempts=3, per_s=0.5)
    for number in range(3):
        held.was_wrong(f"10.0.0.{number}", f"gspo_abc_{number}")
    assert held.wait_s("10.9.9.9", "gspo_abc_x") > 0
    assert held.wait_s("10.9.9.9", "gspo_def_x") == 0
    for number in range(3):
        held.was_wrong(f"2001:db8::{number}", f"{number}-different")
    assert held.wait_s("2001:db8::ffff", "more") > 0
    assert held.wait_s("2001:db8:1::ffff", "more") == 0


def test_what_is_remembered_of_guesses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brakes, "MAX_KEPT", 10)
    held = Brakes(lambda: 0.0)
    for number in range(100):
        held.was_wrong(f"10.0.{number}.1", f"{number:09}")
        held.was_right(f"right-{number}")
    assert len(held._wrong) == len(held._right) == 10


@pytest.mark.parametrize(("key", "status"), [(LONG, 200), (SHORT, 429)], ids=["cannot be guessed", "can be guessed"])
async def test_a_right_key_beside_a_guesser_gets_in_or_is_told_why_not(store: Store, key: str, status: int) -> None:
    async with application(store, keys=[key]) as app:
        for number in range(int(brakes.FREE_ATTEMPTS) + 1):
            async with http_to(app, key=f"{number}-wrong") as guesser:
                refused = await guesser.get("/v1/jobs")
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_wrong_keys")
        assert int(refused.headers["retry-after"]) >= 1
        async with http_to(app, key=key) as neighbour:
            answer = await neighbour.get("/v1/jobs")
    assert answer.status_code == status
    if status == 429:
        assert "wrong keys came from this address" in error_of(answer)["message"]


async def test_a_short_key_that_was_right_before_stays_right(store: Store) -> None:
    async with application(store, keys=[SHORT]) as app, http_to(app, key=SHORT) as neighbour:
        assert (await neighbour.get("/v1/jobs")).status_code == 200
        for number in range(int(brakes.FREE_ATTEMPTS) + 1):
            async with http_to(app, key=f"{number}-wrong") as guesser:
                await guesser.get("/v1/jobs")
        assert (await neighbour.get("/v1/jobs")).status_code == 200


def test_streams_are_bounded_for_each_caller_and_for_all() -> None:
    streams = Streams(most=3, most_of_one=2)
    with contextlib.ExitStack() as open_ones:
        for _ in range(2):
            open_ones.enter_context(streams.seat("a"))
        with pytest.raises(RequestRefused) as refused, streams.seat("a"):
            pass
        assert refused.value.status_code == 429
        with streams.seat("b"), pytest.raises(RequestRefused) as refused, streams.seat("c"):
            pass
        assert refused.value.status_code == 503
    with streams.seat("a"), streams.seat("a"):
        pass


async def test_a_stream_too_many_is_refused_in_the_one_shape_and_its_seat_is_free_afterwards(
    store: Store, redis_client: Redis
) -> None:
    job = await store.jobs.create(JobSpec.model_validate(SPEC))
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "0-1"}
    async with application(store, keys=[LONG]) as app, http_to(app, key=LONG) as http:
        app.state.context.__dict__["streams"] = Streams(most=5, most_of_one=1)
        first = asyncio.create_task(http.get(f"/v1/jobs/{job.id}/events", headers=headers))
        async with asyncio.timeout(HANG_S):
            while not app.state.context.streams._open:
                await asyncio.sleep(0.01)
        second = await http.get(f"/v1/jobs/{job.id}/events", headers=headers)
        assert (second.status_code, error_of(second)["code"]) == (429, "too_many_streams")
        assert second.headers["retry-after"] == "10"
        assert (await http.get(f"/v1/jobs/{job.id}/events")).status_code == 200  # a page takes no seat
        await store.jobs.set_desired_state(job.id, "cancelled")
        assert (await first).status_code == 200
        assert not app.state.context.streams._open
