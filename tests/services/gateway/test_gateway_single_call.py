"""Where only one call is asked for, an answer holds no second one, in whatever syntax the policy writes them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from gspo_core.chat import (
    HermesCodec,
    LlamaCalls,
    TaggedCalls,
    TemplateCodec,
    read_glm_xml,
    read_hermes,
    read_qwen_xml,
)
from services.episodes.snapshots import TreeSnapshot
from tests.services.gateway.gateway_kit import (
    ADD,
    BabblingPolicy,
    Bench,
    judge,
    read,
    request,
    result,
    said,
    user,
)
from tests.services.rollout.rollout_kit import Speech

HI = user("hi")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = '<tool_call>{"name": "add", "arguments": {"amount": %d}}</tool_call>'
TAGGED: dict[str, tuple[Any, str]] = {
    "hermes": (read_hermes, HERMES),
    "qwen_xml": (
        read_qwen_xml,
        "<tool_call>\n<function=add>\n<parameter=amount>\n%d\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm_xml": (read_glm_xml, "<tool_call>add\n<arg_key>amount</arg_key><arg_value>%d</arg_value></tool_call>"),
}
LLAMA = '{"name": "add", "parameters": {"amount": %d}}'


def bench(codec: Any, text: str, *more: str, chunk: int = 512) -> Bench:
    speech = Speech(codec)
    policy = BabblingPolicy(codec, random.Random(0), [speech.say(one) for one in (text, *more)])
    return Bench(codec, policy=policy, rollout={"group_size": 2, "chunk_tokens": chunk})


def speaking(codec: HermesCodec, syntax: str) -> tuple[TemplateCodec, str]:
    """A codec of this syntax, and a call in it."""
    tokenizer = codec.tokenizer
    if syntax == "llama_json":
        return TemplateCodec(tokenizer, TEMPLATE, LlamaCalls(tokenizer)), LLAMA
    read_body, call = TAGGED[syntax]
    return TemplateCodec(tokenizer, TEMPLATE, TaggedCalls(tokenizer, read_body)), call


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("syntax", [*TAGGED, "llama_json"])
async def test_a_turn_ends_behind_its_first_call(codec: HermesCodec, syntax: str, chunk: int) -> None:
    """What was sampled behind it is no part of the episode, but for the separator, with which the call ends."""
    spoken, call = speaking(codec, syntax)
    between = "; " if syntax == "llama_json" else "\n"
    one = bench(spoken, between.join(call % number for number in (1, 2, 3)), chunk=chunk)
    answer = await one.ask(HI, tools=(ADD,), single_call=True)
    assert [found.arguments for found in answer.calls] == [{"amount": 1}]
    assert (answer.text, answer.finish) == ("", "tool_calls")
    sampled = one.tree.turns[0].sampled
    assert codec.tokenizer.decode(sampled).rstrip("; \n") == call % 1
    assert not set(sampled) & set(spoken.stop_ids)
    judge(one.records.segments(), one.policy.served)


@pytest.mark.parametrize("chunk", [1, 512])
@pytest.mark.parametrize("syntax", [*TAGGED, "llama_json"])
async def test_an_end_behind_one_call_is_the_policys_own(codec: HermesCodec, syntax: str, chunk: int) -> None:
    spoken, call = speaking(codec, syntax)
    one = bench(spoken, call % 1, chunk=chunk)
    answer = await one.ask(HI, tools=(ADD,), single_call=True)
    assert [found.arguments for found in answer.calls] == [{"amount": 1}]
    assert one.tree.turns[0].sampled[-1] in spoken.stop_ids


@pytest.mark.parametrize("chunk", [1, 512])
@pytest.mark.parametrize("odd", ["<tool_call>nonsense</tool_call>", '<tool_call>{"name": "fly"}</tool_call>'])
async def test_what_is_told_as_text_is_not_the_first_call(codec: HermesCodec, odd: str, chunk: int) -> None:
    one = bench(codec, f"{odd}{HERMES % 1}{odd}{HERMES % 2}", chunk=chunk)
    answer = await one.ask(HI, tools=(ADD,), single_call=True)
    assert [found.arguments for found in answer.calls] == [{"amount": 1}]
    assert answer.text == odd
    judge(one.records.segments(), one.policy.served)


@pytest.mark.parametrize("chunk", [1, 512])
async def test_calls_that_may_have_been_thoughts_are_one_call_and_text(codec: HermesCodec, chunk: int) -> None:
    """The end of the thought could have come until the policy ended its turn: nothing of it is cut off."""
    one = bench(codec, f"<think>So: {HERMES % 1}{HERMES % 2}", "fine", chunk=chunk)
    answer = await one.ask(HI, tools=(ADD,), single_call=True)
    assert [found.arguments for found in answer.calls] == [{"amount": 1}]
    assert answer.text.strip() == HERMES % 2
    again = await one.ask(HI, tools=(ADD,), single_call=True, is_retry=True)
    assert (again.calls, again.text) == (answer.calls, answer.text)
    more = await one.ask(HI, said(answer), result(answer, "1"), tools=(ADD,), single_call=True)
    assert more.text == "fine"
    assert "drift/forks" not in one.counters
    judge(one.records.segments(), one.policy.served)


async def test_another_gateway_knows_that_a_turn_ended_behind_its_first_call(codec: HermesCodec) -> None:
    one = bench(codec, f"{HERMES % 1}{HERMES % 2}", chunk=1)
    first = await read(await one.episode.ask(request(HI, tools=(ADD,), single_call=True)))
    num_served = len(one.policy.served)
    again = Bench(codec, one.records, one.policy)
    kept = one.records.snapshot
    tree = TreeSnapshot.together([kept.data, *kept.parts])
    assert tree is not None
    again.episode.restore(one.records.segments(), tree, begins_again=False)
    second = await again.ask(HI, tools=(ADD,), single_call=True, is_retry=True)
    assert (second, len(one.policy.served)) == (first, num_served)


async def test_the_time_of_what_is_cut_off_as_a_whole_is_told_with_the_next_tokens(codec: HermesCodec) -> None:
    one = bench(codec, f"{HERMES % 1}{HERMES % 2}", "fine", chunk=1)
    meter = one.episode._meter
    meter._clock = itertools.count(meter._since).__next__  # a second at each look
    answer = await one.ask(HI, tools=(ADD,), single_call=True)
    one.policy._rest.clear()
    await one.ask(HI, said(answer), result(answer, "1"), tools=(ADD,))
    left_s = meter.take().engine_s
    told_s = sum(segment.spent.engine_s for segment in one.records.segments() if segment.spent is not None)
    assert told_s + left_s == pytest.approx(meter.timings.engine_s)
