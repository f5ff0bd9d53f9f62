"""Where one thing that agents do meets another: retries and what is kept, takeovers and answers that are written on,
calls within a thought, late rewards of turns that nobody went on from, requests that take their time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gspo_core.chat import HermesCodec
from gspo_core.messages import Message
from services.episodes.matching import MAX_REPEAT_KEYS
from services.episodes.snapshots import TreeSnapshot
from services.gateway.agent.plan import LONG_BYTES, TurnPlanner
from services.gateway.dialects.anthropic_messages import AnthropicMessages
from services.gateway.dialects.openai_chat import OpenAIChat
from services.gateway.dialects.openai_responses import OpenAIResponses
from services.gateway.dialects.sent import MAX_PASSED_OVER
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.gateway.http.app import _question
from tests.services.gateway.gateway_kit import ADD, BabblingPolicy, Bench, read, request, said, take, user
from tests.services.gateway.test_gateway_episode import bench, refused
from tests.services.rollout.rollout_kit import Speech

HI = user("hi")
THOUGHT = '<think>Shall I? <tool_call>{"name": "add", "arguments": {"amount": 1}}</tool_call> no.</think>Forty-two.'


def taken_over(one: Bench, policy: BabblingPolicy) -> Bench:
    """By another gateway, from what is stored."""
    kept = one.records.snapshot
    assert kept is not None
    tree = TreeSnapshot.together([kept.data, *kept.parts])
    assert tree is not None
    two = Bench(one.codec, one.records, policy)
    two.episode.restore(one.records.segments(), tree, begins_again=False)
    return two


async def test_a_retry_writes_nothing(codec: HermesCodec) -> None:
    one = bench(codec, "Fine.")
    await one.ask(HI)
    await one.ask(HI, is_retry=True)
    before = one.records.num_kept_bytes
    for _ in range(20):
        await one.ask(HI, is_retry=True)
    assert one.records.num_kept_bytes == before
    assert one.episode.history.entries[0].num_repeats == 21


async def test_one_turn_has_so_many_keys(codec: HermesCodec) -> None:
    one = bench(codec, "Fine.")
    await one.ask(HI, repeat_key="0")
    for number in range(1, MAX_REPEAT_KEYS):
        await one.ask(HI, is_retry=True, repeat_key=str(number))
    assert (await refused(one.ask(HI, is_retry=True, repeat_key="more"))).param == "Idempotency-Key"
    assert (await one.ask(HI, repeat_key="7")).text == "Fine."


async def test_what_is_stored_counts_on_after_a_takeover(codec: HermesCodec) -> None:
    one = bench(codec, "Fine.")
    for number in range(10):
        await one.ask(HI, is_retry=True, repeat_key=str(number))
    kept = one.records.snapshot
    assert kept is not None
    stored = sum(map(len, (kept.data, *kept.parts)))
    assert taken_over(one, one.policy).episode._parts.num_bytes == stored


async def test_nothing_goes_on_from_an_answer_that_is_still_sampled(codec: HermesCodec) -> None:
    """A gateway that took the episode over had read the half of it that is stored."""
    speech = Speech(codec)
    whole = speech.say("I think that it is so, and so on and so on.")
    first = BabblingPolicy(codec, random.Random(0), [whole])
    first.silent_after = 1
    one = Bench(codec, policy=first, rollout={"group_size": 2, "chunk_tokens": 8})
    lost = await one.episode.ask(request(HI))
    async with asyncio.timeout(60):
        while not one.records.segments():
            await asyncio.sleep(0)
    lost.dropped()
    second = BabblingPolicy(codec, random.Random(0), [speech.say("other"), whole[8:], speech.say("third")])
    two = taken_over(one, second)
    await two.ask(HI, {"role": "assistant", "content": "mine"}, user("x"))
    second.gate = asyncio.Event()
    again = await two.episode.ask(replace(request(HI), is_retry=True))
    beside = await two.episode.ask(request(HI, {"role": "assistant", "content": "I think and I go on"}, user("y")))
    second.gate.set()
    assert (await take(again)).text == "I think that it is so, and so on and so on."
    await take(beside)
    assert not two.episode.failure.done()
    assert two.episode.history.entries[int(beside.id.rsplit("-", 1)[1])].parent is None


@pytest.mark.parametrize(("text", "finish"), [("A long answer.", "length"), ("A long", "stop")])
async def test_a_gateway_that_takes_over_says_how_the_last_tokens_ended_their_turn(
    codec: HermesCodec, text: str, finish: str
) -> None:
    """The other one died between storing them and storing that."""
    one, most = bench(codec, text), 6 + (finish == "stop")
    lost = await read(await one.episode.ask(request(HI, max_tokens=most)))
    kept = one.records.snapshot
    assert kept is not None
    assert [entry.finish for entry in TreeSnapshot.decode(kept.data).turns] == [""]
    assert not kept.parts
    two = taken_over(one, BabblingPolicy(codec, random.Random(0)))
    told = await two.ask(HI, max_tokens=most, is_retry=True)
    assert (lost.finish, told.finish) == (finish, finish)
    assert (told.id, told.text) == (lost.id, "A long")
    assert not two.policy.served


@pytest.mark.parametrize("chunk", [1, 8, 512])
async def test_a_call_within_a_thought_ends_no_turn(codec: HermesCodec, chunk: int) -> None:
    one = bench(codec, THOUGHT, rollout={"group_size": 2, "chunk_tokens": chunk})
    answer = await one.ask(HI, tools=(ADD,), single_call=True)
    assert (answer.text, answer.calls) == ("Forty-two.", ())


async def test_a_turn_is_paid_once_it_has_an_answer(codec: HermesCodec) -> None:
    """Its number is another turn's, should this gateway die now."""
    one = bench(codec, "Fine.")
    one.policy.gate = asyncio.Event()
    delivery = await one.episode.ask(request(HI))
    assert (await refused(one.episode.reward(0.5, delivery.id, pays=True))).param == "turn"
    one.policy.gate.set()
    await take(delivery)
    await one.episode.reward(0.5, delivery.id, pays=True)
    assert one.episode.history.had({0, 7}) == {0}


async def test_a_long_request_and_its_retry_are_one_turn(codec: HermesCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench(codec, "One.", "Two.", context_tokens=LONG_BYTES * 4)
    ask = request(user("x " * LONG_BYTES))
    is_encoding, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(self: TurnPlanner, asked: Any) -> None:
        """The first one alone: whoever came later would overtake it."""
        if not is_encoding.is_set():
            is_encoding.set()
            await may_go_on.wait()

    monkeypatch.setattr(TurnPlanner, "encoded", slow)
    first = asyncio.create_task(one.episode.ask(ask))
    await is_encoding.wait()
    second = asyncio.create_task(one.episode.ask(replace(ask, is_retry=True)))
    for _ in range(20):
        await asyncio.sleep(0)
    may_go_on.set()
    assert (await first).id == (await second).id
    assert one.episode._deciding == {}


@pytest.mark.parametrize("arguments", ['{"amount": "\\ud800"}', '{"input": "\\ud800"}'])
async def test_a_call_with_half_a_character_stays_text(codec: HermesCodec, arguments: str) -> None:
    """No dialect can send it: the turn could never be told."""
    speech = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    answer = await bench(codec, speech).ask(HI, tools=(ADD,))
    assert (answer.calls, answer.text) == ((), speech)
    for dialect, body in (
        (OpenAIChat(), {"model": "m", "messages": [HI]}),
        (OpenAIResponses(), {"model": "m", "input": [HI]}),
        (AnthropicMessages(), {"model": "m", "max_tokens": 5, "messages": [HI]}),
    ):
        given: Any = body
        assert msgspec.json.encode(dialect.whole(dialect.read(given, {}), "m", answer))


async def test_arguments_of_any_depth_are_read(codec: HermesCodec) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    history: Any = [
        HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    question = _question(OpenAIChat(), {"x-stainless-retry-count": "9" * 5000}, {}, {"model": "m", "messages": history})
    assert question.ask.is_retry
    assert (await refused(bench(codec).episode.ask(question.ask))).kind is RefusalKind.TOO_LONG


def test_so_many_fields_are_passed_over() -> None:
    messages: Any = [HI]
    body: Any = {"model": "m", "messages": messages, **{f"f{number}": 1 for number in range(MAX_PASSED_OVER)}}
    assert len(OpenAIChat().read(body, {}).unsupported) == MAX_PASSED_OVER
    with pytest.raises(Refusal, match="does not know"):
        OpenAIChat().read({**body, "more": 1}, {})


async def test_half_of_an_answer_that_was_begun_anew_is_no_quote(codec: HermesCodec) -> None:
    """What a turn says is looked for as it is now."""
    one = bench(codec, "We mended the parser, and more is to come.", "x", "y")
    system: Message = {"role": "system", "content": "Be brief."}
    first = await one.ask(system, user("Mend it."))
    await one.ask(system, user("short"))
    await one.ask(system, user(f"Before: {first.text}"))
    assert one.counters["drift/forks_sub_agent"] == one.counters["drift/forks_compacted"] == 1
    assert said(first)["content"] == first.text
