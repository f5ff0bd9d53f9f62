"""Keys that just talk: conversations are recorded as traces, token by token, and a key is counted and revoked."""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.codec import decode
from gspo_core.types import Segment
from services.episodes import matching
from services.episodes.metering import Counters
from services.gateway.agent.door import Entrances
from services.gateway.agent.plan import LONG_BYTES, TurnPlanner, is_long
from services.gateway.agent.talk_jobs import TalkJob, TalkJobs
from services.gateway.agent.talking import Talking
from services.gateway.agent.traffic import NoRedactor, forget, forget_for_ever, load_redactor
from services.gateway.dialects.turns import Answer, Refusal, RefusalKind, TurnRequest
from services.state.client import Away, AwayReason, NotPermitted
from services.state.functions import Functions
from services.state.keys import job_key
from services.state.refusals import Damaged
from services.state.retry import Backoff, Retrier
from services.state.store import Store
from services.state.talks import MOST_AT_ONCE, Presented, TalkKeyRecord, Talks, TrafficRetention
from tests.services.gateway.agent_kit import door
from tests.services.gateway.gateway_kit import BabblingPolicy, judge, request, said, take, user
from tests.services.rollout.rollout_kit import Speech, spec, until

HI = user("hi")
NOW = 1_700_000_000.0
KEEP = TrafficRetention(1 << 20, 30.0)


class FakeJobs:
    """One job, whose policy is scripted."""

    def __init__(self, job: TalkJob) -> None:
        self.job = job
        self.counters = Counters()
        self.clock = lambda: 0.0
        self.retrier = Retrier(self.counters, random.Random(0), Backoff(first_s=0.001, max_s=0.002))

    async def get(self, job: str) -> TalkJob:
        if job != self.job.id:
            raise Refusal(RefusalKind.UNKNOWN_KEY, "no such job")
        return self.job

    async def close(self) -> None:
        pass


@dataclass
class Place:
    job: str
    talks: Talks
    policy: BabblingPolicy
    talking: Talking
    redis: Redis
    jobs: Any

    async def key(self, **given: Any) -> str:
        shown: dict[str, Any] = {"label": "", "created_at": "2026-01-01T00:00:00Z", "expires_at": None}
        limits: dict[str, Any] = {"max_turns": None, "max_tokens": None, "max_seconds": None}
        return await self.talks.make(self.job, TalkKeyRecord(**({"id": "0123456789ab"} | shown | limits | given)))

    async def say(self, key: str, *messages: Any, who: str = "", **fields: Any) -> Answer:
        return await take(await self.talking.ask(key, replace(request(*messages, **fields), user=who)))

    async def traces(self) -> dict[int, list[Segment]]:
        found: dict[int, list[Segment]] = {}
        for entry in await self.talks.traffic(self.job):
            found.setdefault(entry.trace, []).append(decode(entry.payload))
        return found


@pytest.fixture
async def place(redis_client: Redis, store: Store, codec: HermesCodec) -> Place:
    job = (await store.jobs.create(json.dumps({"model": "m"}))).id
    speech = Speech(codec)
    policy = BabblingPolicy(codec, random.Random(0), [speech.say(f"Answer {number}.") for number in range(20)])
    talk_job: Any = TalkJob(job, spec(), codec, 4096, policy, asyncio.Event())  # type: ignore[arg-type]
    talks = Talks(Functions(redis_client))
    jobs: Any = FakeJobs(talk_job)
    talking = Talking(talks, jobs, KEEP, lambda: NOW)
    return Place(job, talks, policy, talking, redis_client, jobs)


async def refused(asking: Any) -> RefusalKind:
    with pytest.raises(Refusal) as refusal:
        await asking
    return refusal.value.kind


async def test_conversations_are_recorded_as_traces_to_the_token(place: Place) -> None:
    key = await place.key()
    first = await place.say(key, HI, who="ann")
    other = await place.say(key, user("good day"), who="bob")
    await place.say(key, HI, said(first), user("and?"))
    assert (first.text, other.text) == ("Answer 0.", "Answer 1.")
    entries = await place.talks.traffic(place.job)
    assert {(entry.user, entry.trace) for entry in entries} == set(
        zip(["ann", "bob"], await place.traces(), strict=True)
    )
    ann, bob = (await place.traces()).values()
    judge(ann, place.policy.served)
    judge(bob, place.policy.served)
    assert [{one.turn for one in record} for record in (ann, bob)] == [{0, 1}, {0}]
    assert {one.branch for one in ann} == {0}
    (shown,) = await place.talks.all(place.job)
    sampled = sum(one.num_actions for record in (ann, bob) for one in record)
    assert (shown.num_turns, shown.num_tokens) == (3, sampled)


async def test_an_answer_names_the_trace_that_keeps_it(place: Place) -> None:
    key = await place.key()
    named = []
    for asked in (request(HI), request(user("good day")), request(HI, is_retry=True)):
        delivery = await place.talking.ask(key, asked)
        named.append(delivery.trace)
        answer = await take(delivery)
    follow_up = await place.talking.ask(key, request(HI, said(answer), user("and?")))
    await take(follow_up)
    first, other = map(str, await place.traces())
    assert [*named, follow_up.trace] == [first, other, first, first]


async def test_those_who_begin_alike_share_a_trace_unless_each_is_named(place: Place) -> None:
    key = await place.key()

    async def trace_of(who: str) -> str:
        delivery = await place.talking.ask(key, replace(request(HI), user=who))
        await take(delivery)
        return delivery.trace

    unnamed = [await trace_of(""), await trace_of("")]
    ann, bob, ann_again = [await trace_of(who) for who in ("ann", "bob", "ann")]
    assert unnamed[0] == unnamed[1]
    assert ann == ann_again
    assert len({unnamed[0], ann, bob}) == 3


async def test_nothing_of_it_is_in_the_queue(place: Place) -> None:
    await place.say(await place.key(), HI)
    for name in ("groups", "episodes", "segments", "queue"):
        assert not await place.redis.exists(job_key(place.job, name))


async def test_a_retry_is_the_same_turn_and_an_equal_request_another_one(place: Place) -> None:
    key = await place.key()
    first = await place.say(key, HI)
    assert (await place.say(key, HI, is_retry=True)).id == first.id
    assert (await place.say(key, HI)).id != first.id
    assert len(await place.traces()) == 1


@pytest.mark.parametrize(("limit", "detail"), [("max_turns", "turns"), ("max_tokens", "tokens")])
async def test_a_key_that_is_used_up_is_refused_by_the_name_of_what_it_has_used(
    place: Place, limit: str, detail: str
) -> None:
    key = await place.key(**{limit: 1})
    await place.say(key, HI)
    with pytest.raises(Refusal, match=f"has used up its {detail}") as refusal:
        await place.say(key, HI)
    assert refusal.value.kind is RefusalKind.OVER_BUDGET
    assert await refused(place.talking.count_tokens(key, request(HI))) is RefusalKind.OVER_BUDGET


async def test_keys_that_are_none_expired_or_revoked_are_refused(place: Place) -> None:
    key = await place.key()
    await place.say(key, HI)
    assert await refused(place.say(key + "x", HI)) is RefusalKind.UNKNOWN_KEY
    assert await refused(place.talking.model_names("tk_what")) is RefusalKind.UNKNOWN_KEY
    late = await place.key(id="fedcba987654", expires_at=NOW - 1)
    assert await refused(place.say(late, HI)) is RefusalKind.UNKNOWN_KEY
    assert await place.talks.revoke(place.job, "0123456789ab")
    assert not await place.talks.revoke(place.job, "0123456789ab")
    assert await refused(place.say(key, HI)) is RefusalKind.UNKNOWN_KEY
    assert len(await place.traces()) == 1


async def test_a_key_that_is_revoked_while_it_is_answered_is_said_to_be(place: Place) -> None:
    """Not told to ask again: what it is refused for stays."""
    key = await place.key()
    gate = place.policy.gate = asyncio.Event()
    asking = asyncio.create_task(place.say(key, HI))
    while not place.policy.asked:
        await asyncio.sleep(0)
    await place.talks.revoke(place.job, "0123456789ab")
    gate.set()
    assert await refused(asking) is RefusalKind.UNKNOWN_KEY
    assert await place.traces() == {}


async def test_there_is_no_episode_to_reward_or_finish(place: Place) -> None:
    key = await place.key()
    entrances = Entrances(door(), place.talking)
    assert await refused(entrances.reward(key, 1.0)) is RefusalKind.INVALID
    assert await refused(entrances.finish(key)) is RefusalKind.INVALID
    assert await refused(entrances.finish("ep_what")) is RefusalKind.UNKNOWN_KEY
    assert await entrances.model_names(key) == ("policy",)


async def test_what_two_users_say_alike_is_kept_as_of_each(place: Place) -> None:
    """So that what the one says later does not stand under the other's name, whom nobody can erase then."""
    key = await place.key()
    first = await place.say(key, HI, who="ann")
    second = await place.say(key, HI, who="bob")
    await place.say(key, HI, said(second), user("my number is 4111"), who="bob")
    assert first.id == second.id  # of two conversations
    kept = await place.talks.traffic(place.job)
    users = {entry.trace: entry.user for entry in kept}
    assert sorted(users.values()) == ["ann", "bob"]
    await place.talks.erase(place.job, "u", "bob")
    assert {entry.user for entry in await place.talks.traffic(place.job)} == {"ann"}


async def test_what_is_kept_is_bounded_the_oldest_goes_first_and_users_are_erased(place: Place) -> None:
    key = await place.key()
    for number in range(6):
        await place.say(key, user(f"question {number}"), who="ann" if number % 2 else "bob")
    entries = await place.talks.traffic(place.job)
    assert await place.talks.erase(place.job, "u", "ann") == sum(entry.user == "ann" for entry in entries)
    assert {entry.user for entry in await place.talks.traffic(place.job)} == {"bob"}
    left = [entry for entry in entries if entry.user == "bob"]
    assert await place.talks.erase(place.job, "t", str(left[0].trace)) >= 1
    left = await place.talks.traffic(place.job)
    assert int(await place.redis.hget(job_key(place.job, "talk_used"), "bytes")) == sum(
        len(one.payload) for one in left
    )
    bound = len(left[-1].payload) + 1
    await place.talks.record(
        place.job, "0123456789ab", 7, "", [b"x"], tokens=0, s=0.0, keep=TrafficRetention(bound, 30.0)
    )
    kept = await place.talks.traffic(place.job)
    assert kept[-1].payload == b"x"
    assert sum(len(one.payload) for one in kept) <= bound


async def test_old_traffic_goes_where_nobody_talks_any_more(place: Place) -> None:
    """Entries of forty days ago, of a job whose key is silent; a younger one and another job's stay."""
    key = await place.key()
    await place.say(key, HI)
    *_, young = await place.talks.traffic(place.job)
    traffic, day_ms = job_key(place.job, "traffic"), 86_400_000
    old = {b"k": b"0123456789ab", b"t": b"7", b"u": b"", b"d": b"old"}
    await place.redis.delete(traffic)
    for number in range(MOST_AT_ONCE + 2):
        await place.redis.xadd(traffic, old, id=f"{young.at_ms - 40 * day_ms}-{number + 1}")
    fields = {b"k": young.key.encode(), b"t": str(young.trace).encode(), b"u": b"", b"d": young.payload}
    await place.redis.xadd(traffic, fields, id=young.id)
    await place.redis.hset(job_key(place.job, "talk_used"), "bytes", len(young.payload) + 3 * (MOST_AT_ONCE + 2))
    assert await forget(place.talks, TrafficRetention(1 << 20, 41.0)) == 0
    assert await forget(place.talks, KEEP) == MOST_AT_ONCE + 2
    assert await place.talks.traffic(place.job) == [young]
    assert int(await place.redis.hget(job_key(place.job, "talk_used"), "bytes")) == len(young.payload)


async def test_traffic_that_cannot_be_read_holds_up_no_other_jobs(place: Place, store: Store) -> None:
    """Nor does it end the gateway."""
    old = f"{NOW * 1000:.0f}-1"
    other = (await store.jobs.create(json.dumps({"model": "m"}))).id
    await place.redis.xadd(job_key(place.job, "traffic"), {b"k": b"0123456789ab"}, id=old)
    await place.redis.xadd(job_key(other, "traffic"), {b"k": b"a", b"t": b"7", b"u": b"", b"d": b"old"}, id=old)
    assert await forget(place.talks, TrafficRetention(1 << 20, 1 / 86_400)) == 1
    assert await place.talks.traffic(other) == []


async def test_it_goes_again_and_again_also_after_redis_was_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def fails(talks: Talks, keep: TrafficRetention) -> int:
        nonlocal tries
        tries += 1
        if tries == 3:
            raise asyncio.CancelledError
        raise Away(AwayReason.LOADING)

    monkeypatch.setattr("services.gateway.agent.traffic.forget", fails)
    with pytest.raises(asyncio.CancelledError):
        await forget_for_ever(place.talks, KEEP, every_s=0.0)
    assert tries == 3


async def test_a_retry_uses_nothing_up(place: Place) -> None:
    key = await place.key(max_turns=2)
    first = await place.say(key, HI, repeat_key="one")
    assert (await place.say(key, HI, repeat_key="one")).id == first.id
    assert (await place.say(key, HI, is_retry=True)).id == first.id
    await place.say(key, HI, said(first), user("and?"))
    assert (await place.talks.all(place.job))[0].num_turns == 2
    assert (await place.say(key, HI, is_retry=True)).id == first.id  # also when all is used up
    assert await refused(place.say(key, HI)) is RefusalKind.OVER_BUDGET


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (request(HI, max_tokens=0), RefusalKind.INVALID),
        (request(HI, {"role": "assistant", "content": "me"}), RefusalKind.INVALID),
        (request(user("too long " * 9000)), RefusalKind.TOO_LONG),
        (replace(request(user("too long " * 9000)), num_bytes=50), RefusalKind.TOO_LONG),
    ],
    ids=["no tokens", "own words last", "too long by far", "too long"],
)
async def test_a_request_that_is_refused_uses_nothing_up(
    place: Place, monkeypatch: pytest.MonkeyPatch, asked: TurnRequest, kind: RefusalKind
) -> None:
    key = await place.key(max_turns=1)
    sent_again(monkeypatch, by_the_client=True)
    for _ in range(3):
        assert await refused(place.talking.ask(key, asked)) is kind
    assert (await place.talks.all(place.job))[0].num_turns == 0
    await place.say(key, HI)
    assert await refused(place.talking.ask(key, asked)) is RefusalKind.OVER_BUDGET
    assert (await place.talks.all(place.job))[0].num_turns == 1


@pytest.mark.parametrize("error", [Away(AwayReason.UNREACHABLE), NotPermitted("no permissions"), Damaged("a record")])
async def test_a_refusal_is_told_also_where_its_turn_cannot_be_given_back(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fails(*given: Any) -> None:
        raise error

    monkeypatch.setattr(Talks, "give_back", fails)
    own_words_last = {"role": "assistant", "content": "me"}
    assert await refused(place.say(await place.key(), HI, own_words_last)) is RefusalKind.INVALID


async def test_a_request_that_is_too_long_holds_no_turn_while_it_is_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, may_go_on, encoded = asyncio.Event(), asyncio.Event(), TurnPlanner.encoded

    async def slow(self: TurnPlanner, ask: Any) -> Any:
        if is_long(ask):
            is_reading.set()
            await may_go_on.wait()
        return await encoded(self, ask)

    monkeypatch.setattr(TurnPlanner, "encoded", slow)
    key = await place.key(max_turns=1)
    long = replace(request(user("too long " * 900)), num_bytes=LONG_BYTES + 1)
    doomed = asyncio.create_task(place.talking.ask(key, long))
    await is_reading.wait()
    await place.say(key, HI)
    may_go_on.set()
    assert await refused(doomed) is RefusalKind.OVER_BUDGET  # by now


async def test_a_charge_whose_reply_is_lost_uses_nothing_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    key, use = await place.key(max_turns=1), Talks.use

    async def lost(*given: Any, num_turns: int = 0, **named: Any) -> TalkKeyRecord:
        found = await use(*given, num_turns=num_turns, **named)
        if num_turns:
            raise Away(AwayReason.UNREACHABLE)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Talks, "use", lost)
        assert await refused(place.say(key, HI)) is RefusalKind.AWAY
    await place.talking.close()  # what is given back still is
    assert (await place.talks.all(place.job))[0].num_turns == 0
    await place.say(key, HI)


async def test_a_client_that_leaves_before_its_turn_begins_uses_nothing_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, use, is_used, may_go_on = await place.key(max_turns=1), Talks.use, asyncio.Event(), asyncio.Event()

    async def slow(*given: Any, num_turns: int = 0, **named: Any) -> TalkKeyRecord:
        found = await use(*given, num_turns=num_turns, **named)
        if num_turns:
            is_used.set()
            await may_go_on.wait()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Talks, "use", slow)
        asking = asyncio.create_task(place.talking.ask(key, request(HI)))
        await is_used.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await place.talking.close()
    assert (await place.talks.all(place.job))[0].num_turns == 0
    await place.say(key, HI)


async def test_turns_that_were_given_back_first_are_not_used_up_any_more(place: Place) -> None:
    key = await place.key()
    presented = Presented.read(key)
    assert presented is not None
    for _ in range(2):  # also where one of the calls is sent again
        await place.talks.give_back(presented, 1, "first")
        assert (await place.talks.use(presented, num_turns=1, token="first")).num_turns == 0
    assert (await place.talks.use(presented, num_turns=1, token="second")).num_turns == 1


@pytest.mark.parametrize("fields", [{"repeat_key": "same"}, {}])
@pytest.mark.parametrize("num_bytes", [50, LONG_BYTES + 1])
async def test_a_request_and_its_retry_at_once_are_one_turn(
    place: Place, monkeypatch: pytest.MonkeyPatch, num_bytes: int, fields: dict[str, Any]
) -> None:
    """Long ones too, which are encoded before they have a turn."""
    asked = replace(request(HI, **fields), num_bytes=num_bytes)
    is_encoding, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(self: TurnPlanner, ask: Any) -> None:
        """The first one alone."""
        if not is_encoding.is_set():
            is_encoding.set()
            await may_go_on.wait()

    monkeypatch.setattr(TurnPlanner, "encoded", slow)
    key = await place.key()
    first = asyncio.create_task(place.talking.ask(key, asked))
    if num_bytes > LONG_BYTES:
        await is_encoding.wait()
    second = asyncio.create_task(place.talking.ask(key, asked if fields else replace(asked, is_retry=True)))
    await until(lambda: second.done() or num_in_turn(place) == 2)
    may_go_on.set()
    deliveries = [await first, await second]
    answers = [await take(one) for one in deliveries]
    assert {one.trace for one in deliveries} == {*map(str, await place.traces())}
    assert (len({one.id for one in answers}), len(await place.traces())) == (1, 1)
    assert (await place.talks.all(place.job))[0].num_turns == 1
    assert place.talking._deciding == {}


def num_in_turn(place: Place) -> int:
    return sum(number for _, number in place.talking._deciding.values())


async def test_equal_requests_at_once_use_their_turns_up_but_for_the_one_that_was_lost(place: Place) -> None:
    key = await place.key(max_turns=2)
    lost = await place.talking.ask(key, request(HI))
    await lost.whole()
    lost.dropped()
    said_again = await asyncio.gather(*[place.say(key, HI) for _ in range(5)], return_exceptions=True)
    answers = [one for one in said_again if isinstance(one, Answer)]
    assert lost.id in {one.id for one in answers}
    assert len(answers) == 2
    assert (await place.talks.all(place.job))[0].num_turns == 2


async def test_conversations_that_are_being_answered_stay_and_another_is_told_to_ask_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.agent.talking.MAX_CONVERSATIONS", 2)
    key = await place.key()
    place.policy.gate = asyncio.Event()
    under_way = [await place.talking.ask(key, request(user(text))) for text in ("one", "two")]
    assert await refused(place.talking.ask(key, request(HI))) is RefusalKind.AWAY
    place.policy.gate.set()
    assert [(await take(one)).text for one in under_way] == ["Answer 0.", "Answer 1."]
    await place.say(key, HI)
    assert len(await place.traces()) == 3
    assert len(place.talking._conversations) == 2


async def test_a_key_has_its_share_of_conversations_also_while_those_of_another_are_all_being_answered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.agent.talking.MAX_CONVERSATIONS", 4)
    busy, other = await place.key(), await place.key(id="fedcba987654")
    gate = place.policy.gate = asyncio.Event()
    under_way = [await place.talking.ask(busy, request(user(f"question {number}"))) for number in range(4)]
    under_way += [await place.talking.ask(other, request(user(text))) for text in ("one", "two")]
    for key in (busy, other):
        assert await refused(place.talking.ask(key, request(HI))) is RefusalKind.AWAY
    gate.set()
    for delivery in under_way:
        await take(delivery)
    await place.say(busy, HI)
    assert len(place.talking._conversations) == 4


@pytest.mark.parametrize("num_bytes", [50, LONG_BYTES + 1])
async def test_of_the_idle_conversations_the_one_that_was_silent_longest_makes_room(
    place: Place, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr("services.gateway.agent.talking.MAX_CONVERSATIONS", 3)
    key = await place.key()
    gate = place.policy.gate = asyncio.Event()
    busy = await place.talking.ask(key, request(user("busy")))
    await until(lambda: len(gate._waiters) == 1)
    place.policy.gate = None
    first, second = [await place.say(key, user(text)) for text in ("first", "second")]
    await place.say(key, user("first"), said(first), user("and?"))
    await take(await place.talking.ask(key, replace(request(HI), num_bytes=num_bytes)))
    gate.set()
    assert (await take(busy)).text == "Answer 4."
    await place.say(key, user("second"), said(second), user("and?"))
    turns = [[one.turn for one in record] for record in (await place.traces()).values()]
    assert sorted(sorted({*numbers}) for numbers in turns) == [[0], [0], [0], [0], [0, 1]]


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"num_bytes": 50}, {}])
async def test_a_refused_request_lets_no_conversation_go_and_leaves_none(
    place: Place, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    """One that may not be, and two that are too long, of which one is read beside the loop."""
    monkeypatch.setattr("services.gateway.agent.talking.MAX_CONVERSATIONS", 2)
    key = await place.key()
    await place.say(key, HI)
    await place.say(key, user("good day"))
    kept = list(place.talking._conversations)
    await refused(place.talking.ask(key, replace(request(user("too long " * 9000)), **wrong)))
    assert list(place.talking._conversations) == kept


async def test_a_conversation_that_could_not_be_stored_is_let_go_and_goes_on_as_another(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await place.key()
    first = await place.say(key, HI)
    with monkeypatch.context() as patched:
        patched.setattr(Talks, "record", failing)
        assert await refused(place.say(key, HI, said(first), user("and?"))) is RefusalKind.AWAY
    await until(lambda: not place.talking._conversations)
    again = await place.say(key, HI, said(first), user("and?"))
    await place.say(key, HI, said(first), user("and?"), said(again), user("so?"))
    assert [{one.turn for one in record} for record in (await place.traces()).values()] == [{0}, {0, 1}]


async def failing(*given: Any, **named: Any) -> None:
    raise Damaged("a record cannot be read")


async def test_turns_beside_one_that_could_not_be_stored_are_not_sampled_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await place.key()
    place.policy.gate, place.policy.silent_after = asyncio.Event(), 1
    monkeypatch.setattr(Talks, "record", failing)
    lost, beside = [await place.talking.ask(key, request(HI, max_tokens=number)) for number in (1000, 999)]
    (conversation,) = place.talking._conversations.values()
    place.policy.gate.set()
    assert await refused(lost.whole()) is RefusalKind.AWAY
    assert await refused(beside.whole()) is RefusalKind.AWAY
    await until(lambda: not conversation.episode._tasks)


async def test_all_conversations_are_looked_at_once_for_a_request(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await place.key()
    first = await place.say(key, HI)
    for number in range(3):
        await place.say(key, user(f"question {number}"))
    knows, looked_at = TurnPlanner.knows, list[TurnPlanner]()

    def counts(self: TurnPlanner, request: Any) -> bool:
        looked_at.append(self)
        return knows(self, request)

    monkeypatch.setattr(TurnPlanner, "knows", counts)
    await place.say(key, HI, said(first), user("and?"))
    found = next(reversed(place.talking._conversations.values()))  # it goes on there
    assert looked_at[-1] is found.episode._plan
    assert len(looked_at) == len(set(looked_at)) == 4
    looked_at.clear()
    assert (await place.say(key, HI, is_retry=True)).id == first.id
    assert not looked_at  # a retry is known without
    await place.say(key, user("another"))
    assert len(looked_at) == len(set(looked_at)) == 4


async def test_a_request_is_digested_once_however_many_conversations_it_is_looked_for_in(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long ones would hold the event loop for each of them."""
    key = await place.key()
    digested = list[int]()

    def counts(made: Callable[..., Any]) -> Callable[..., Any]:
        def counted(said: Any, *given: Any) -> Any:
            digested.append(len(said))
            return made(said, *given)

        return counted

    for name in ("of_messages", "prefixes"):
        monkeypatch.setattr(matching, name, counts(getattr(matching, name)))
    sizes = list[int]()
    for number in range(4):
        await place.say(key, HI, who=f"user {number}")
        digested.clear()
        # It begins as all of them do, and is known to none.
        await place.say(key, HI, {"role": "assistant", "content": f"x{number}"}, user("and?"))
        sizes.append(sum(digested))
    assert sizes == sizes[:1] * 4


def sent_again(monkeypatch: pytest.MonkeyPatch, *, by_the_client: bool) -> None:
    """Replies are lost: the client of Redis sends each call again, or we do."""
    fcall, lost = Functions._fcall, set[Any]()

    async def loses(self: Functions, name: str, keys: Any, args: Any) -> Any:
        reply = await fcall(self, name, keys, args)
        if by_the_client:
            return await fcall(self, name, keys, args)
        if name == "record_traffic" and args not in lost:
            lost.add(args)
            raise Away(AwayReason.UNREACHABLE)
        return reply

    monkeypatch.setattr(Functions, "_fcall", loses)


@pytest.mark.parametrize("by_the_client", [True, False])
async def test_what_is_sent_again_after_a_lost_reply_counts_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, by_the_client: bool
) -> None:
    key = await place.key(max_turns=2)
    sent_again(monkeypatch, by_the_client=by_the_client)
    first = await place.say(key, HI)
    await place.say(key, HI, said(first), user("and?"))
    (record,) = (await place.traces()).values()
    judge(record, place.policy.served)
    (shown,) = await place.talks.all(place.job)
    assert (shown.num_turns, shown.num_tokens) == (2, sum(one.num_actions for one in record))
    assert await refused(place.say(key, HI)) is RefusalKind.OVER_BUDGET


async def test_calls_are_told_apart_by_their_place_in_a_trace(place: Place) -> None:
    """Also when the key was revoked between a call and its repetition."""
    await place.key()
    for trace, index in ((7, 0), (7, 1), (70, 1), (7, 0)):
        await place.talks.record(place.job, "0123456789ab", trace, "", [b"x"], tokens=1, s=0.0, keep=KEEP, index=index)
    assert [entry.trace for entry in await place.talks.traffic(place.job)] == [7, 7, 70]
    await place.talks.revoke(place.job, "0123456789ab")
    await place.talks.record(place.job, "0123456789ab", 70, "", [b"x"], tokens=1, s=0.0, keep=KEEP, index=1)
    assert len(await place.talks.traffic(place.job)) == 3


async def test_calls_are_told_apart_as_long_as_their_job_runs(place: Place, store: Store) -> None:
    await place.say(await place.key(), HI)
    assert await place.redis.exists(job_key(place.job, "talk_calls"))
    await store.jobs.set_status(place.job, "cancelled")
    assert not await place.redis.exists(job_key(place.job, "talk_calls"))
    assert len(await place.traces()) == 1


@pytest.fixture
async def loaded(
    place: Place, store: Store, codec: HermesCodec, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TalkJobs]:
    """Jobs as a gateway loads them; no engine serves any, so turns wait."""
    monkeypatch.setattr("services.gateway.agent.talk_jobs.read_spec", lambda text: spec())
    monkeypatch.setattr("services.gateway.agent.talk_jobs.read_model", lambda path, chat: (codec, 4096, 1000))
    none: Any = None
    jobs = TalkJobs(store, (), none, time.monotonic, random.Random(0))
    place.talking = Talking(place.talks, jobs, KEEP, lambda: NOW)
    yield jobs
    await place.talking.close()


async def end(place: Place, store: Store, way: str) -> None:
    if way == "over":
        await store.jobs.set_status(place.job, "cancelled")
    else:
        await place.redis.delete(job_key(place.job, "job"))


@pytest.mark.parametrize("way", ["over", "gone"])
async def test_a_job_that_has_ended_is_left_also_if_nobody_asks_for_it_again(
    place: Place, loaded: TalkJobs, store: Store, way: str
) -> None:
    key = await place.key()
    waiting = await place.talking.ask(key, request(HI))
    await place.talking.leave_ended()
    assert (set(loaded._jobs), set(loaded._tasks)) == ({place.job}, {"", place.job})
    watching = loaded._tasks[place.job]
    await end(place, store, way)
    await place.talking.leave_ended()
    assert (set(loaded._jobs), set(loaded._tasks), watching.done()) == (set(), {""}, True)
    assert not place.talking._conversations
    assert await refused(waiting.whole()) is RefusalKind.AWAY


@pytest.mark.parametrize(("way", "kind"), [("over", RefusalKind.ENDED), ("gone", RefusalKind.UNKNOWN_KEY)])
async def test_a_job_that_has_ended_is_left_when_it_is_asked_for(
    place: Place, loaded: TalkJobs, store: Store, way: str, kind: RefusalKind
) -> None:
    key = await place.key()
    waiting = await place.talking.ask(key, request(HI))
    await end(place, store, way)
    assert await refused(place.talking.ask(key, request(HI))) is kind
    assert (set(loaded._jobs), set(loaded._tasks)) == (set(), {""})
    await place.talking.leave_ended()
    assert not place.talking._conversations
    assert await refused(waiting.whole()) is RefusalKind.AWAY


async def test_jobs_that_have_ended_are_looked_for_again_also_after_redis_was_away(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    async def fails(talking: Talking) -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            raise asyncio.CancelledError
        raise Away(AwayReason.LOADING)

    monkeypatch.setattr(Talking, "leave_ended", fails)
    with pytest.raises(asyncio.CancelledError):
        await place.talking.leave_ended_for_ever(every_s=0.0)
    assert tries == 3


def without_numbers(text: str) -> str:
    if "boom" in text:
        raise ValueError("no")
    return "".join("#" if letter.isdigit() else letter for letter in text)


async def test_redacted_traffic_holds_texts_of_whole_turns_and_no_ids(place: Place) -> None:
    name = f"{__name__}:without_numbers"
    place.talking = Talking(place.talks, place.jobs, KEEP, lambda: NOW, redact=load_redactor(name))
    key = await place.key()
    first = await place.say(key, user("I am 42."), stop=["."])
    assert first.text == "Answer 0"
    await place.say(key, user("I am 42."), said(first), user("and you are 7?"))
    turns = [json.loads(entry.payload) for entry in await place.talks.traffic(place.job)]
    assert [turn["turn"] for turn in turns] == [0, 1]
    assert "I am ##." in turns[0]["read"]
    assert [turn["said"].startswith("Answer #") for turn in turns] == [True, True]
    assert "and you are #?" in turns[1]["read"]
    assert set(turns[0]) == {"turn", "branch", "read", "said", "num_tokens", "num_sampled", "versions", "kind"}


async def stored_in(redis: Redis) -> bytes:
    """All values, as Redis would write them, but not compressed."""
    await redis.config_set("rdbcompression", "no")
    found = [await redis.dump(key) or b"" async for key in redis.scan_iter()]
    await redis.config_set("rdbcompression", "yes")
    return b"".join(found)


@pytest.mark.parametrize("is_redacted", [True, False])
async def test_what_is_redacted_stands_nowhere_in_redis(place: Place, codec: HermesCodec, is_redacted: bool) -> None:
    """Not in the turns, nor in what is kept to find and to repeat them; without a redactor the ids are found."""
    redact = load_redactor(f"{__name__}:without_numbers") if is_redacted else None
    place.talking = Talking(place.talks, place.jobs, KEEP, lambda: NOW, redact=redact)
    key = await place.key()
    numbers = "31415926535", "27182818284"
    words = user(f"It is {numbers[0]}."), user(f"No, it is {numbers[1]}.")
    first = await place.say(key, words[0], who="somebody")
    await place.say(key, words[0], said(first), words[1], who="somebody")
    found = await stored_in(place.redis)
    assert b"somebody" in found
    assert [number.encode() in found for number in numbers] == [False, False]
    ids = [array("i", codec.tokenizer.encode(number)).tobytes() for number in numbers]
    assert [tokens in found for tokens in ids] == [not is_redacted] * 2


async def test_where_the_redactor_fails_nothing_is_stored_or_answered(place: Place) -> None:
    redact = load_redactor(f"{__name__}:without_numbers")
    place.talking = Talking(place.talks, place.jobs, KEEP, lambda: NOW, redact=redact)
    key = await place.key()
    assert await refused(place.say(key, user("boom"))) is RefusalKind.AWAY
    assert await place.talks.traffic(place.job) == []


@pytest.mark.parametrize("reference", ["no_such_module:f", "json:no_such_function", "math:pi"])
def test_a_redactor_that_is_none_is_named(reference: str) -> None:
    with pytest.raises(NoRedactor, match=reference):
        load_redactor(reference)
