"""The checks can fail: each known way to build this wrongly is built here, and the suite notices.

A mutant is the real library of functions (or the real client) with one change. If the text that is to be changed is not
there any more, the test says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from gspo_core.types import Split
from services.state import functions
from services.state.functions import library
from services.state.keys import job_key
from services.state.queue import Append, Bus, Fenced, Gap
from services.state.refusals import Conflict
from services.state.server import RedisServer
from services.state.store import Claim, Store
from tests.services.state import test_bus, test_bus_failures, test_store_claims
from tests.services.state.test_bus_storms import append_through_faults

NOTICED = (AssertionError, Fenced, Gap, Conflict, pytest.fail.Exception)

Mutate = Callable[[str, str], Awaitable[None]]


@pytest.fixture
async def mutate(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> Mutate:
    """Puts ``new`` in the place of ``old`` in the functions of the server. The next test gets the real ones back."""
    source, digest = library()
    texts = [source.replace(digest, "f" * len(digest))]

    async def mutate(old: str, new: str) -> None:
        assert texts[-1].count(old) == 1, f"the library has changed: {old!r} is {texts[-1].count(old)} times in it"
        texts.append(texts[-1].replace(old, new))
        monkeypatch.setattr(functions, "library", lambda: (texts[-1], "mutant"))
        await bus.load_functions()

    return mutate


async def test_a_bare_xadd(redis_server: RedisServer, bus: Bus, claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    async def bare(self: Bus, job: str, token: str, appends: list[Append]) -> None:
        for item in appends:
            await self._redis.xadd(job_key(job, "segments"), {"d": item.payload})

    monkeypatch.setattr(Bus, "append", bare)
    with pytest.raises(AssertionError, match="401 segments instead of 400"):
        await append_through_faults(redis_server, bus, claim, 400, seed=1, rate=0.0)


async def test_an_append_that_is_not_deduplicated(
    redis_server: RedisServer, bus: Bus, claim: Claim, mutate: Mutate
) -> None:
    await mutate("  if append.index < state.segments then\n    local digest", "  if false then\n    local digest")
    await mutate("append.index > state.segments then", "false then")
    # Only the first append meets a fault, so what shows is neither a matter of chance nor of time.
    with pytest.raises(AssertionError, match="401 segments instead of 400"):
        await append_through_faults(redis_server, bus, claim, 400, seed=1, rate=0.0)


async def test_a_new_attempt_that_is_answered_as_a_resend(bus: Bus, claim: Claim, mutate: Mutate) -> None:
    reset = "state.attempt, state.segments, state.bytes, state.version = attempt, 0, 0, nil"
    await mutate(reset, "state.attempt = attempt")
    kept = "  drop_offer(K, episode)\n  local charged, stored = charge(state), stored_bytes(state)\n  -- How far"
    await mutate("  delete_segments(K, episode, state.segments)\n" + kept, kept)
    await mutate(
        '    local digest = fresh[name] or string.match(redis.call("HGET", K.index, name), "[^/]+$")\n'
        '    if digest ~= append.digest then\n      return nil, refuse("CONFLICT", "segment " .. name)\n    end\n',
        "",
    )
    with pytest.raises(NOTICED):
        await test_bus.test_a_new_attempt_leaves_no_segment_of_the_old_one(bus, claim)


async def test_a_worker_without_a_fence(bus: Bus, redis_client: Redis, claim: Claim, mutate: Mutate) -> None:
    await mutate('token == "" or state.token ~= token or append.attempt', "append.attempt")
    with pytest.raises(NOTICED):
        await test_bus_failures.test_the_episodes_of_a_silent_worker_go_to_another_and_it_is_fenced(
            redis_client, bus, claim
        )


async def test_a_trainer_without_a_fence(
    bus: Bus, store: Store, redis_client: Redis, claim: Claim, mutate: Mutate
) -> None:
    await mutate('return token ~= "" and redis.call("HGET", K.trainer, "token") == token', "return true")
    with pytest.raises(NOTICED):
        await test_store_claims.test_a_former_owner_can_change_nothing(store, bus, claim, redis_client, "commit")


async def test_counters_that_do_not_add_up(bus: Bus, redis_client: Redis, claim: Claim, mutate: Mutate) -> None:
    await mutate('      redis.call("HINCRBY", K.counters, reason, 1)\n', "")
    with pytest.raises(NOTICED):
        await test_bus.test_a_storm_of_everything_keeps_the_books(bus, claim, redis_client)


async def test_bytes_that_are_not_given_back(bus: Bus, claim: Claim, mutate: Mutate) -> None:
    await mutate("  account(K, -charged, -stored)\n", "")
    with pytest.raises(NOTICED):
        await test_bus.test_an_admitted_episode_is_never_refused_for_its_bytes(bus, claim)


# Who compares epochs instead of tokens lets two owners in when a server that went back in time hands one out twice.


async def check_that_an_epoch_issued_twice_lets_nobody_in(
    store: Store, bus: Bus, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = (f"{epoch}-of-{owner}" for epoch, owner in [(1, "first"), (2, "zombie"), (2, "heir")])
    monkeypatch.setattr("services.state.job_claims.uuid4", lambda: SimpleNamespace(hex=next(tokens)))
    job = (await store.jobs.create("{}")).id
    first = await store.jobs.claim("first")
    assert first is not None
    await store.jobs.release(job, first.token)
    kept = {name: await redis_client.dump(job_key(job, name)) for name in ("job", "trainer")}
    zombie = await store.jobs.claim("zombie")
    for name, dumped in kept.items():
        await redis_client.restore(job_key(job, name), 0, dumped, replace=True)
    heir = await store.jobs.claim("heir")
    assert zombie is not None
    assert heir is not None
    assert (zombie.epoch, heir.epoch) == (2, 2)
    await bus.dispatch(job, heir.token, 0, size=1, split=Split.TRAIN, task_index=0)
    with pytest.raises(Fenced):
        await bus.commit(job, zombie.token, 1, [0])
    assert await bus.open_groups(job) == [0]


async def test_an_epoch_issued_twice_lets_nobody_in(
    store: Store, bus: Bus, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_that_an_epoch_issued_twice_lets_nobody_in(store, bus, redis_client, monkeypatch)


async def test_an_epoch_compare(
    store: Store, bus: Bus, redis_client: Redis, mutate: Mutate, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mutate(
        'return token ~= "" and redis.call("HGET", K.trainer, "token") == token',
        'return token ~= "" and tonumber(string.match(token, "^%d+")) >= '
        'tonumber(string.match(redis.call("HGET", K.trainer, "token"), "^%d+") or 0)',
    )
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await check_that_an_epoch_issued_twice_lets_nobody_in(store, bus, redis_client, monkeypatch)
