"""Two gateways behind one address: the one that was asked passes on what the other one is to answer, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.middleware import Middleware

from gspo_core.messages import Message
from gspo_core.types import EpisodeKey
from services.episodes.keys import Keys
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.gateway.http.app import DIALECTS
from services.gateway.http.forwarding import FORWARDED_BY, RECEIPT, SEARCH_S, ForwardingMiddleware, between_gateways
from services.process.ports import free_port
from tests.patience import HANG_S
from tests.services.gateway.fake_turns import KEY, FakeTurns, Gateway, Scripted, serving, texts
from tests.services.gateway.speakers import SPEAKERS, Speaker
from tests.services.rollout.rollout_kit import until

EPISODE = EpisodeKey("job-1", 0, 0)
HI: Message = {"role": "user", "content": "hi"}
NOWHERE = "http://127.0.0.1:1"
BEARER = {"Authorization": f"Bearer {KEY}"}


@dataclass
class Book:
    """Where the episode is said to be."""

    http: httpx.AsyncClient
    address: str = ""
    next_address: str = ""
    """Where it is once it was forgotten."""
    forgotten: list[EpisodeKey] = field(default_factory=list)
    num_looks: int = 1 << 30
    """After so many it is over."""

    async def is_over(self, key: EpisodeKey) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0

    async def address_of(self, key: EpisodeKey) -> str:
        return self.address

    def forget(self, key: EpisodeKey) -> None:
        self.forgotten.append(key)
        self.address = self.next_address or self.address


def absent(key: str) -> EpisodeKey:
    if key != KEY:
        raise Refusal(RefusalKind.UNKNOWN_KEY, "no")
    return EPISODE


def forwarding(book: Book, is_absent: Callable[[str], EpisodeKey | None] = absent, **more: Any) -> Middleware:
    more = {"leaving": asyncio.Event()} | more
    more = {"keys": Keys(bytes(32))} | more
    return Middleware(ForwardingMiddleware, name="near", absent=is_absent, neighbours=book, http=book.http, **more)


@contextlib.asynccontextmanager
async def pair(far: FakeTurns, **more: Any) -> AsyncIterator[tuple[Gateway, FakeTurns, Book]]:
    """The gateway that is asked, whose own turns nobody may see, in front of the one that holds the episode."""
    near = FakeTurns([])
    async with (
        between_gateways() as http,
        serving(far) as holder,
        serving(near, forwarding=forwarding(book := Book(http), **more)) as asked,
    ):
        book.address = holder.url
        yield asked, near, book


def asked(speaker: Speaker, *, stream: bool) -> dict[str, Any]:
    return {"json": {**speaker.body([HI]), "stream": stream}, "headers": {**BEARER, **speaker.headers}}


@pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_comes_through_as_it_was_given_and_is_delivered_once(speaker: Speaker, stream: bool) -> None:
    far = FakeTurns([Scripted("Hello there", pieces=texts(["Hel", "lo"]))])
    async with pair(far) as (gateway, near, _):
        answer = await gateway.http.post(speaker.url({"stream": stream}), **asked(speaker, stream=stream))
        said = speaker.read_stream(answer.text) if stream else speaker.read(answer.json())
        assert (answer.status_code, said.text) == (200, "Hello there")
        assert "x-gspo-turn" not in answer.headers
        await until(lambda: "delivered" in far.answerings[0].fate)
        assert far.answerings[0].fate.count("delivered") == 1
        assert not near.asks


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_job_left_out_is_named_here_and_through_a_neighbour(stream: bool) -> None:
    speaker, scripted = SPEAKERS["chat"], Scripted("Hello", left_out=("clock", "nonce"))
    async with serving(FakeTurns([scripted])) as alone, pair(FakeTurns([scripted])) as (gateway, _, _):
        for one in (alone, gateway):
            answer = await one.http.post(speaker.path, **asked(speaker, stream=stream))
            assert answer.headers["x-gspo-ignored"].split(",")[-2:] == ["volatile.clock", "volatile.nonce"]


async def test_an_answer_whose_client_is_gone_is_not_delivered() -> None:
    gate = asyncio.Event()
    far = FakeTurns([Scripted("Hello there", pieces=texts(["Hel"]), gate=gate)])
    speaker = SPEAKERS["chat"]
    async with pair(far) as (gateway, _, _):
        async with gateway.http.stream("POST", speaker.path, **asked(speaker, stream=True)) as answer:
            await anext(answer.aiter_raw())
        await until(lambda: "dropped" in far.answerings[0].fate)
        gate.set()
        assert "delivered" not in far.answerings[0].fate


async def test_what_a_neighbour_never_confirms_was_not_delivered() -> None:
    far = FakeTurns([Scripted("Hello"), Scripted("Hello")])
    speaker = SPEAKERS["chat"]
    async with serving(far) as holder:
        options = asked(speaker, stream=False)
        options["headers"] = passed_on = {**BEARER, FORWARDED_BY: "near"}
        turn = (await holder.http.post(speaker.path, **options)).headers["x-gspo-turn"]
        assert far.answerings[0].fate == []
        no = {"turn": turn, "delivered": False}
        assert (await holder.http.post(RECEIPT, json=no, headers=passed_on)).status_code == 200
        assert far.answerings[0].fate == ["dropped"]
        yes = {"turn": turn, "delivered": True}
        assert (await holder.http.post(RECEIPT, json=yes, headers=passed_on)).status_code == 200
        assert far.answerings[0].fate == ["dropped"]
        stranger = {"Authorization": "Bearer ep_other", FORWARDED_BY: "near"}
        assert (await holder.http.post(RECEIPT, json=yes, headers=stranger)).status_code == 401


async def test_who_is_no_gateway_cannot_say_that_it_is_one() -> None:
    """Else its turn would wait for a receipt, count as not delivered, and not be trained."""
    speaker, others = SPEAKERS["chat"], Keys(b"1" * 32).vouch("near")
    for said in ("near", "gw_", others, others.replace("gw_", "ep_", 1)):
        here = FakeTurns([Scripted("Hello")])
        async with between_gateways() as http, serving(here, forwarding=forwarding(Book(http), lambda _: None)) as one:
            options = asked(speaker, stream=False)
            options["headers"] = {**options["headers"], FORWARDED_BY: said}
            answer = await one.http.post(speaker.path, **options)
            assert (answer.status_code, "x-gspo-turn" in answer.headers) == (200, False)
            await until(lambda turns=here: "delivered" in turns.answerings[0].fate)
            receipt = {"turn": here.answerings[0].id, "delivered": False}
            assert (await one.http.post(RECEIPT, json=receipt, headers=options["headers"])).status_code == 404


@pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)
async def test_a_refusal_comes_through_in_its_own_shape(speaker: Speaker) -> None:
    far = FakeTurns([Refusal(RefusalKind.OVER_BUDGET, "rollout stopped: max_turns")])
    async with pair(far) as (gateway, _, _):
        answer = await gateway.http.post(speaker.url({}), **asked(speaker, stream=False))
        assert answer.status_code == 400
        assert "rollout stopped: max_turns" in speaker.error(answer.json())


@pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)
async def test_a_neighbour_that_does_not_answer_is_forgotten_and_the_client_told_to_ask_again(speaker: Speaker) -> None:
    too_long = itertools.count(0.0, SEARCH_S + 1).__next__
    async with pair(FakeTurns([]), clock=too_long) as (gateway, near, book):
        book.address = f"http://127.0.0.1:{free_port()}"
        answer = await gateway.http.post(speaker.url({"stream": True}), **asked(speaker, stream=True))
        assert (answer.status_code in (503, 529), "retry-after" in answer.headers) == (True, True)
        assert speaker.error(answer.json())
        assert book.forgotten == [EPISODE]
        assert not near.asks


async def test_an_episode_whose_gateway_died_is_looked_for_until_another_one_holds_it() -> None:
    """The request was not begun to be sent, so nothing of it is lost."""
    far, speaker = FakeTurns([Scripted("Hello")]), SPEAKERS["chat"]
    async with pair(far) as (gateway, near, book):
        book.next_address, book.address = book.address, f"http://127.0.0.1:{free_port()}"
        answer = await gateway.http.post(speaker.url({}), **asked(speaker, stream=False))
        assert speaker.read(answer.json()).text == "Hello"
        assert book.forgotten == [EPISODE]
        assert not near.asks


async def test_other_routes_of_an_episode_are_passed_on_too() -> None:
    far = FakeTurns([])
    async with pair(far) as (gateway, _, _):
        posted = await gateway.http.post("/v1/episode/reward", json={"reward": 0.5, "token": "a"}, headers=BEARER)
        assert posted.json()["reward"] == 0.5
        assert (await gateway.http.get("/v1/models", headers=BEARER)).json()["data"][0]["id"] == "policy"
    assert far.rewards == [(0.5, "", "a")]


async def test_nothing_is_passed_on_without_a_right_key_nor_twice() -> None:
    far, near = FakeTurns([]), FakeTurns([])
    async with between_gateways() as http, serving(near, forwarding=forwarding(Book(http, NOWHERE))) as gateway:
        wrong = await gateway.http.get("/v1/models", headers={"Authorization": "Bearer ep_wrong"})
        assert wrong.status_code == 401
        again = await gateway.http.get("/v1/models", headers={**BEARER, FORWARDED_BY: Keys(bytes(32)).vouch("far")})
        assert again.status_code == 200
        health = await gateway.http.get("/healthz")
        assert health.status_code == 200
    assert not far.asks


async def test_two_that_each_take_the_other_for_the_holder_do_not_go_round_in_circles() -> None:
    one, other = FakeTurns([]), FakeTurns([])
    async with (
        between_gateways() as http,
        serving(one, forwarding=forwarding(one_book := Book(http))) as first,
        serving(other, forwarding=forwarding(other_book := Book(http))) as second,
    ):
        one_book.address, other_book.address = second.url, first.url
        answer = await first.http.post("/v1/chat/completions", **asked(SPEAKERS["chat"], stream=False))
        assert answer.status_code == 200
    assert (len(one.asks), len(other.asks)) == (0, 1)


async def test_an_episode_that_appears_here_while_it_is_looked_for_is_answered_here() -> None:
    near, is_here = FakeTurns([]), asyncio.Event()

    def sought(key: str) -> EpisodeKey | None:
        return None if is_here.is_set() else absent(key)

    async with between_gateways() as http, serving(near, forwarding=forwarding(Book(http), sought)) as gateway:
        asking = asyncio.create_task(gateway.http.get("/v1/models", headers=BEARER))
        await asyncio.sleep(0)
        is_here.set()
        assert (await asking).status_code == 200


@pytest.mark.parametrize("path", ["chat", "messages", "gemini"])
async def test_an_episode_that_is_over_is_said_to_be_where_it_never_was(path: str) -> None:
    """Else its agent would ask for days: this gateway does not know that it has ended."""
    speaker = SPEAKERS[path]
    async with between_gateways() as http, asyncio.timeout(HANG_S):
        book = Book(http, num_looks=1)
        near = FakeTurns([])
        async with serving(near, forwarding=forwarding(book, clock=lambda: 0.0)) as gateway:
            answer = await gateway.http.post(speaker.path, **asked(speaker, stream=False))
            assert answer.status_code == 409
            assert "has ended" in answer.text
            assert near.asks == []
            book.num_looks = 0
            paid = await gateway.http.post("/v1/episode/reward", headers=BEARER, json={"reward": 1.0})
            assert paid.status_code == 200  # whoever is asked knows better


async def test_a_gateway_that_leaves_looks_for_no_episode_that_nobody_holds() -> None:
    """A client that asks again finds the one that takes its place; and whoever waits here holds up the leaving."""
    is_sought, leaving = asyncio.Event(), asyncio.Event()

    def sought(key: str) -> EpisodeKey:
        is_sought.set()
        return absent(key)

    async with between_gateways() as http, asyncio.timeout(HANG_S):
        endless = forwarding(Book(http), sought, leaving=leaving, clock=lambda: 0.0)
        async with serving(FakeTurns([]), forwarding=endless) as gateway:
            asking = asyncio.create_task(gateway.http.get("/v1/models", headers=BEARER))
            await is_sought.wait()
            leaving.set()
            assert (await asking).status_code == 200  # what the route itself says


def test_every_dialect_is_spoken() -> None:
    assert {one.path for one in SPEAKERS.values()} == set(DIALECTS)
