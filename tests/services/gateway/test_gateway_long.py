"""Long requests: encoded beside the event loop, and decided on it, after everything that came meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gspo_core.chat import HermesCodec
from gspo_core.types import StopReason
from services.gateway.agent.plan import LONG_BYTES, may_be_too_long, num_beyond
from services.gateway.dialects.turns import Refusal, RefusalKind
from tests.services.gateway.gateway_kit import Bench, judge, request, said, take, user
from tests.services.rollout.rollout_kit import until

LONG = "x" * (LONG_BYTES + 1)


class Watched:
    """A codec that says in which thread it encodes, and waits there until it may go on."""

    def __init__(self, codec: HermesCodec) -> None:
        self._codec = codec
        self.calls: list[tuple[str, bool]] = []
        """What was encoded, and whether beside the event loop."""
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def render(self, *given: Any, **named: Any) -> Any:
        return self._watched("render", *given, **named)

    def bridge(self, *given: Any, **named: Any) -> Any:
        return self._watched("bridge", *given, **named)

    def _watched(self, name: str, *given: Any, **named: Any) -> Any:
        is_beside = threading.current_thread() is not threading.main_thread()
        self.calls.append((name, is_beside))
        if is_beside:
            self.may_go_on.wait()
        return getattr(self._codec, name)(*given, **named)


def bench_of(codec: HermesCodec) -> tuple[Bench, Watched]:
    watched = Watched(codec)
    return Bench(watched, context_tokens=1_000_000), watched  # type: ignore[arg-type]


async def test_what_is_long_is_encoded_beside_the_event_loop_and_what_is_short_on_it(codec: HermesCodec):
    bench, watched = bench_of(codec)
    answer = await bench.ask(user(LONG))
    await bench.ask(user(LONG), said(answer), user("short"))
    await bench.ask(user("short"))
    ask = request(user("of another length"), user(LONG))
    assert await bench.episode.count_tokens(ask) > LONG_BYTES
    assert watched.calls == [("render", True), ("bridge", True), ("render", False), ("render", True)]
    judge(bench.records.segments(), bench.policy.served)


async def test_its_ids_are_those_that_it_would_have_been_encoded_to_on_the_loop(
    codec: HermesCodec, monkeypatch: pytest.MonkeyPatch
):
    prompts = []
    for limit in (LONG_BYTES, 1 << 30):
        monkeypatch.setattr("services.gateway.agent.plan.LONG_BYTES", limit)
        bench, _ = bench_of(codec)
        answer = await bench.ask(user(LONG))
        await bench.ask(user(LONG), said(answer), user("and?"))
        prompts.append([one.prompt for one in bench.policy.served])
    assert prompts[0] == prompts[1]


async def test_what_a_turn_goes_on_from_is_decided_when_it_has_been_encoded(codec: HermesCodec):
    """Two equal long questions behind one answer: the second one to come through forks, whichever was encoded first."""
    bench, watched = bench_of(codec)
    answer = await bench.ask(user(LONG))
    watched.may_go_on.clear()
    both = [
        asyncio.create_task(bench.ask(user(LONG), said(answer), user(text))) for text in ("one way", "the other way")
    ]
    await until(lambda: len(watched.calls) == 3)
    assert len(bench.episode.history.entries) == 1
    watched.may_go_on.set()
    await asyncio.gather(*both)
    entries = bench.episode.history.entries
    assert [entries[number].parent for number in (1, 2)] == [0, 0]
    assert [bool(entries[number].reason) for number in (1, 2)] == [False, True]
    judge(bench.records.segments(), bench.policy.served)


async def test_the_same_long_request_twice_at_once_is_one_turn(codec: HermesCodec):
    bench, watched = bench_of(codec)
    watched.may_go_on.clear()
    ask = request(user(LONG), repeat_key="once")
    both = [asyncio.create_task(bench.episode.ask(ask)) for _ in range(2)]
    await until(lambda: bool(watched.calls))
    watched.may_go_on.set()
    first, second = [await take(one) for one in await asyncio.gather(*both)]
    assert first == second
    assert len(bench.episode.history.entries) == 1
    assert watched.calls == [("render", True)]


async def test_an_episode_that_ends_meanwhile_begins_no_turn(codec: HermesCodec):
    bench, watched = bench_of(codec)
    watched.may_go_on.clear()
    asking = asyncio.create_task(bench.episode.ask(request(user(LONG))))
    await until(lambda: bool(watched.calls))
    await bench.episode.seal()
    watched.may_go_on.set()
    with pytest.raises(Refusal) as refusal:
        await asking
    assert refusal.value.kind is RefusalKind.ENDED
    assert not bench.episode.history.entries


async def test_what_cannot_fit_is_refused_before_it_is_encoded_as_a_whole(codec: HermesCodec):
    watched = Watched(codec)
    bench = Bench(watched, context_tokens=1_000)  # type: ignore[arg-type]
    for ask in (
        request(user("one two " * 30_000)),
        request(*[user("one two " * 100) for _ in range(300)]),
        request(user("short"), tools=(described("one two " * 30_000),)),
        request(user("short"), {"role": "assistant", "content": "one two " * 30_000}, user("short")),
        request(user("short"), asked({"at": "one two " * 30_000}), user("short")),
    ):
        with pytest.raises(Refusal, match=r"has more than \d+ tokens"):
            await bench.episode.count_tokens(ask)
        assert bench.episode.stopped is None  # who only counts has met no limit

        with pytest.raises(Refusal, match=r"has more than \d+ tokens; it must have fewer than 1000") as refusal:
            await bench.episode.ask(ask)
        assert refusal.value.kind is RefusalKind.TOO_LONG
        assert bench.episode.stopped is StopReason.CONTEXT_OVERFLOW  # so that an agent that fails then has played
        bench = Bench(watched, context_tokens=1_000)  # type: ignore[arg-type]
    assert watched.calls == []
    assert not bench.episode.history.entries


async def test_what_cannot_fit_is_refused_by_a_limit_that_was_met_before_it(codec: HermesCodec):
    bench = Bench(codec, context_tokens=1_000, limits={"max_turns": 1})
    await bench.ask(user("a"))
    with pytest.raises(Refusal, match="max_turns") as refusal:
        await bench.ask(user("one two " * 30_000))
    assert (refusal.value.kind, bench.episode.stopped) == (RefusalKind.OVER_BUDGET, StopReason.MAX_TURNS)


def test_nobody_is_refused_who_might_fit():
    """A text of few tokens that are long, and words of the assistant's, which a template may leave out, where they are
    not many times what fits."""
    few = request(user(" " * 1_000_000))
    assert may_be_too_long(few, 10_000)
    assert num_beyond(few, lambda text: [0] * (len(text) // 64 + 1), 10_000) is None
    for times, is_refused in ((30, False), (50, True)):
        assistant: Any = {"role": "assistant", "content": "one two " * times * 500}
        left_out = request(user("a"), assistant, user("b"))
        assert may_be_too_long(left_out, 5_000)
        assert (num_beyond(left_out, lambda text: [0] * (len(text) // 2), 5_000) is not None) == is_refused
    assert num_beyond(request(user("a" + " \n" * 100_000)), list, 10_000) is None  # some templates strip it
    assert num_beyond(request(user("one two " * 100_000)), list, 10_000)


async def test_tools_and_arguments_are_encoded_beside_the_event_loop_too(codec: HermesCodec):
    bench, watched = bench_of(codec)
    await bench.episode.ask(request(user("a"), tools=(described(LONG),)))
    await bench.episode.ask(
        request(user("a"), asked({"at": LONG}), {"role": "tool", "content": "b", "tool_call_id": "1"})
    )
    assert watched.calls == [("render", True), ("render", True)]


def asked(arguments: Any) -> Any:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def described(text: str) -> Any:
    return {
        "type": "function",
        "function": {"name": "look", "description": text, "parameters": {"type": "object", "properties": {}}},
    }
