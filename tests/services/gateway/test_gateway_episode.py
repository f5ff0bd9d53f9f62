"""Turns of an agent: which request is which turn, what is stored for it, and what the agent is told."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import groupby
from typing import Any, NoReturn

import pytest

from gspo_core.chat import HermesCodec
from gspo_core.messages import Message
from gspo_core.types import StopReason
from services.engines.protocol import ContextFull
from services.episodes.matching import Rewritten
from services.episodes.policy import Span
from services.gateway.agent import budget
from services.gateway.dialects.asks import parsed
from services.gateway.dialects.sent import FieldValue
from services.gateway.dialects.turns import Answer, Refusal, RefusalKind, ToolChoice
from services.state.fleet_records import WorkerRecord
from tests.services.gateway.gateway_kit import (
    ADD,
    BabblingPolicy,
    Bench,
    HeldRecords,
    judge,
    read,
    request,
    result,
    said,
    take,
    user,
)
from tests.services.rollout.rollout_kit import ScriptedPolicy, Speech, stitched, until

HI = user("hi")


def bench(codec: HermesCodec, *speeches: str, **order: Any) -> Bench:
    speech = Speech(codec)
    policy = BabblingPolicy(codec, random.Random(0), [speech.say(text) for text in speeches])
    return Bench(codec, policy=policy, **order)


def calling(codec: HermesCodec, *amounts: int, **order: Any) -> Bench:
    speech = Speech(codec)
    speeches = [speech.call("add", amount=amount) for amount in amounts]
    return Bench(codec, policy=BabblingPolicy(codec, random.Random(0), [*speeches, speech.say("done")]), **order)


async def on_and_on(one: Bench, messages: list[Message]) -> None:
    while True:
        answer = await one.ask(*messages, tools=(ADD,))
        messages += [said(answer), result(answer, "2") if answer.calls else user("x")]


async def refused(asking: Any) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        await asking
    return refusal.value


async def test_a_conversation_goes_on_behind_the_sampled_ids(codec: HermesCodec) -> None:
    one = bench(codec, "Hello.", "Fine.")
    first = await one.ask(HI)
    second = await one.ask(HI, said(first), user("how are you?"))
    assert (first.text, second.text, second.finish) == ("Hello.", "Fine.", "stop")
    record = one.records.segments()
    judge(record, one.policy.served)
    assert {segment.branch for segment in record} == {0}
    assert [segment.turn for segment in record if segment.turn]
    assert "drift/forks" not in one.counters
    assert second.usage.num_stored_tokens == first.usage.num_prompt_tokens + first.usage.num_sampled_tokens


async def test_open_requests_and_repeated_ones_are_counted(codec: HermesCodec) -> None:
    one = bench(codec, "Hello.")
    first = await one.episode.ask(request(HI, repeat_key="a"))
    second = await one.episode.ask(request(HI, repeat_key="a"))
    assert open_requests(one) == 2
    assert (await take(first)).id == (await take(second)).id
    assert open_requests(one) == 0
    assert (one.counters["turns/asked"], one.counters["turns/repeated"]) == (1, 1)


def open_requests(one: Bench) -> int:
    """As the record of a gateway with these counters has it."""
    return WorkerRecord(id="g", counters=dict(one.counters)).open_requests


async def test_calls_and_their_results_go_on_whatever_ids_and_spelling_the_client_uses(codec: HermesCodec) -> None:
    one = calling(codec, 2)
    first = await one.ask(HI, tools=(ADD,))
    assert (first.finish, first.text, first.calls[0].arguments) == ("tool_calls", "", {"amount": 2})
    message = said(first)
    message["tool_calls"] = [
        {"id": "theirs", "function": {"name": "add", "arguments": json.dumps({"amount": 2}, indent=1)}}
    ]
    message["content"] = None
    answer = {"role": "tool", "tool_call_id": "theirs", "content": "2"}
    second = await one.ask(HI, message, answer, tools=(ADD,))  # type: ignore[arg-type]
    assert second.text == "done"
    assert "drift/forks" not in one.counters
    judge(one.records.segments(), one.policy.served)


async def test_what_cannot_be_read_as_a_call_stays_in_the_text(codec: HermesCodec) -> None:
    speech = Speech(codec)
    one = Bench(codec, policy=BabblingPolicy(codec, random.Random(0), [speech.raw_call("nonsense"), speech.say("ok")]))
    first = await one.ask(HI, tools=(ADD,))
    assert (first.text, first.calls, first.finish) == ("<tool_call>nonsense</tool_call>", (), "stop")
    await one.ask(HI, said(first), user("again"), tools=(ADD,))
    assert "drift/forks" not in one.counters


MUST, MUST_ADD = ToolChoice("required"), ToolChoice("required", "add")


@pytest.mark.parametrize(
    ("choice", "sampled"),
    [
        (MUST, '{"name": "add", "arguments": {"amount": 2}}\n</tool_call>'),
        (MUST_ADD, ' {"amount": 2}}\n</tool_call>'),
    ],
)
async def test_a_required_call_is_begun_with_ids_that_are_not_sampled(
    codec: HermesCodec, choice: ToolChoice, sampled: str
) -> None:
    one = bench(codec, sampled, "done")
    first = await one.ask(HI, tools=(ADD,), choice=choice)
    assert (first.text, [(call.name, call.arguments) for call in first.calls]) == ("", [("add", {"amount": 2})])
    second = await one.ask(HI, said(first), result(first, "2"), tools=(ADD,))
    assert second.text == "done"
    assert "drift/forks" not in one.counters
    record = one.records.segments()
    judge(record, one.policy.served)
    ids, masks = stitched(record), stitched(record, "action_mask")
    prompt = codec.render([HI], [ADD])
    begun = codec.call_opening(choice.name)
    assert ids[: len(prompt) + len(begun)] == [*prompt, *begun]
    assert masks.index(True) == len(prompt) + len(begun)
    assert first.usage.num_sampled_tokens == len(Speech(codec).say(sampled))
    assert second.usage.num_stored_tokens == first.usage.num_prompt_tokens + first.usage.num_sampled_tokens


async def test_what_was_begun_and_is_no_call_is_text(codec: HermesCodec) -> None:
    one = bench(codec, "well", "fine")
    first = await one.ask(HI, tools=(ADD,), choice=MUST)
    assert (first.text, first.calls, first.finish) == ("<tool_call>\nwell", (), "stop")
    await one.ask(HI, said(first), user("again"), tools=(ADD,))
    assert "drift/forks" not in one.counters


async def test_the_same_conversation_with_another_choice_is_another_sample(codec: HermesCodec) -> None:
    one = bench(codec, " {}}\n</tool_call>", "no", ' {"amount": 3}}\n</tool_call>')
    await one.ask(HI, tools=(ADD,), choice=MUST_ADD)
    plain = await one.ask(HI, tools=(ADD,))
    third = await one.ask(HI, said(plain), user("add"), tools=(ADD,), choice=MUST_ADD)
    assert (plain.text, third.calls[0].arguments) == ("no", {"amount": 3})
    assert one.counters[f"drift/forks_{Rewritten.RESAMPLED}"] == one.counters["drift/forks"] == 1
    judge(one.records.segments(), one.policy.served)
    assert one.policy.served[1].prompt == codec.render([HI], [ADD])


async def test_where_no_calls_are_wanted_they_are_told_as_text(codec: HermesCodec) -> None:
    one = calling(codec, 2)
    first = await one.ask(HI, tools=(ADD,), choice=ToolChoice("none"))
    written = '<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'
    assert (first.text, first.calls, first.finish) == (written, (), "stop")
    second = await one.ask(HI, said(first), user("well?"), tools=(ADD,))
    assert second.text == "done"
    assert "drift/forks" not in one.counters
    assert one.episode.num_calls == 0


async def test_a_model_whose_calls_have_no_beginning_is_not_asked_for_one(
    codec: HermesCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench(codec, "fine")
    monkeypatch.setattr(codec, "call_opening", lambda name="": [])
    refusal = await refused(one.episode.ask(request(HI, tools=(ADD,), choice=MUST)))
    assert (refusal.kind, refusal.param) == (RefusalKind.INVALID, "tool_choice")
    assert one.records.payloads == []


@pytest.mark.parametrize("said_nothing", ["", "\n\n", "<think>Hm.</think>"])
async def test_an_answer_of_nothing_may_be_left_out(codec: HermesCodec, said_nothing: str) -> None:
    """Packages drop an empty message; what was sampled for it stays, and the conversation goes on behind it."""
    one = bench(codec, said_nothing, "", "Yes.", "Fine.")
    await one.ask(HI)
    await one.ask(HI, user("so?"))
    third = await one.ask(HI, user("so?"), user("and?"))
    assert third.text == "Yes."
    await one.ask(HI, user("so?"), user("and?"), said(third), user("well"))
    assert "drift/forks" not in one.counters
    record = one.records.segments()
    judge(record, one.policy.served)
    assert {segment.branch for segment in record} == {0}


async def test_an_answer_of_something_is_not_left_out_in_silence(codec: HermesCodec) -> None:
    one = bench(codec, "Well.", "Yes.")
    await one.ask(HI)
    await one.ask(HI, user("so?"))
    assert one.counters[f"drift/forks_{Rewritten.EDITED_HISTORY}"] == one.counters["drift/forks"] == 1


async def test_versions_of_a_turn_are_told_as_spans(codec: HermesCodec) -> None:
    one = bench(codec, "Hello, you.", rollout={"group_size": 2, "chunk_tokens": 4})
    answer = await one.ask(HI)
    record = one.records.segments()
    versions = [segment.version for segment in record for _ in range(segment.num_actions)]
    told = [span.version for span in answer.versions for _ in range(span.start, span.end)]
    assert told == versions
    assert len(set(versions)) > 1
    assert answer.versions[0] == Span(0, answer.versions[0].end, versions[0])
    assert [span.version for span in answer.versions] == [version for version, _ in groupby(versions)]


async def test_the_same_request_again_is_another_sample(codec: HermesCodec) -> None:
    one = bench(codec, "One.", "Two.")
    first, second = await one.ask(HI), await one.ask(HI)
    assert (first.text, second.text) == ("One.", "Two.")
    assert first.id != second.id
    assert one.counters[f"drift/forks_{Rewritten.RESAMPLED}"] == 1
    record = one.records.segments()
    judge(record, one.policy.served)
    assert {segment.branch for segment in record} == {0, 1}
    assert "tokens/rendered_again" not in one.counters


async def test_equal_requests_at_once_are_so_many_samples(codec: HermesCodec) -> None:
    one = Bench(codec)
    answers = await asyncio.gather(*(one.ask(HI) for _ in range(5)))
    assert len({answer.id for answer in answers}) == 5
    chosen = answers[3]
    await one.ask(HI, said(chosen), user("go on"))
    record = one.records.segments()
    judge(record, one.policy.served)
    assert one.counters["drift/forks"] == 4
    assert one.episode.history.entries[5].parent == int(chosen.id.rsplit("-", 1)[1])


async def test_an_edited_history_forks_from_the_stored_ids(codec: HermesCodec) -> None:
    one = bench(codec, "One.", "Two.", "Three.")
    first = await one.ask(HI)
    await one.ask(HI, said(first), user("a"))
    third = await one.ask(HI, said(first), user("b"))
    assert one.counters[f"drift/forks_{Rewritten.EDITED_HISTORY}"] == 1
    record = one.records.segments()
    judge(record, one.policy.served)
    stored = one.tree.turns[0]
    begin = next(segment for segment in record if segment.turn == 2)
    assert begin.token_ids.tolist()[: stored.end] == stored.branch.ids[: stored.end]
    assert third.usage.num_stored_tokens == stored.end
    assert not begin.action_mask[: stored.end].any()


async def test_words_put_into_the_policys_mouth_are_rendered_and_not_trained(codec: HermesCodec) -> None:
    one = bench(codec, "One.", "Two.")
    first = await one.ask(HI)
    await one.ask(HI, said(first), user("a"), {"role": "assistant", "content": "made up"}, user("b"))
    assert one.counters["drift/forks_assistant_message"] == 1
    assert one.counters["tokens/rendered_again"] > 0
    judge(one.records.segments(), one.policy.served)


QUOTED = 'The page says <tool_call>{"name": "add"}</tool_call> and <think>x</think>.'


def num_controls(codec: HermesCodec, ids: list[int]) -> int:
    found = {codec.tokenizer.token_id(token) for token in ("<tool_call>", "</tool_call>", "<think>", "</think>")}
    return sum(one in found for one in ids)


async def test_words_put_into_the_policys_mouth_are_plain_text(codec: HermesCodec) -> None:
    """What an agent quotes there would else be read as the policy's own call, or its thought."""
    one = bench(codec, "One.", "<tool_call>odd</tool_call>", "Two.", "Three.")
    first = await one.ask(HI)
    second = await one.ask(HI, said(first), user("a"))
    await one.ask(
        HI, said(first), user("a"), said(second), user("b"), {"role": "assistant", "content": QUOTED}, user("c")
    )
    prompt = one.policy.served[-1].prompt
    assert one.counters["drift/forks_assistant_message"] == 1
    assert QUOTED in codec.tokenizer.decode(prompt)
    assert num_controls(codec, prompt) == 2  # of the policy's own words
    summary = user("in short: much")
    await one.ask(summary, {"role": "assistant", "content": QUOTED}, user("d"), said(second), user("c"))
    prompt = one.policy.served[-1].prompt
    assert QUOTED in codec.tokenizer.decode(prompt)
    assert num_controls(codec, prompt) == 2
    judge(one.records.segments(), one.policy.served)


async def test_words_behind_an_own_answer_are_plain_text_where_it_is_rendered_anew(codec: HermesCodec) -> None:
    one = bench(codec, "<tool_call>odd STOP", "Two.", "Three.")
    first = await one.ask(HI, stop=("STOP",))
    written: Message = {"role": "assistant", "content": f"{first.text} STOP {QUOTED}"}
    await one.ask(HI, written, user("a"))
    assert num_controls(codec, one.policy.served[-1].prompt) == 1
    await one.ask(HI, written, user("a"), {"role": "assistant", "content": "made up"}, user("b"))
    prompt = one.policy.served[-1].prompt
    assert one.counters["drift/forks"] == 1
    assert f"<tool_call>odd STOP {QUOTED}<|im_end|>" in codec.tokenizer.decode(prompt)
    assert num_controls(codec, prompt) == 1
    judge(one.records.segments(), one.policy.served)


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([{"role": "system", "content": "You are another."}, user("x")], (), Rewritten.SUB_AGENT),
        ([user("so far: greetings"), user("how are you?")], (), Rewritten.COMPACTED),
        ([HI], (ADD,), Rewritten.TOOLS_CHANGED),
        ([HI, user("changed")], (), Rewritten.EDITED_HISTORY),
        ([{"role": "system", "content": "You are another."}, HI], (), Rewritten.SUB_AGENT),
    ],
)
async def test_another_conversation_names_its_reason(
    codec: HermesCodec, messages: Any, tools: Any, reason: str
) -> None:
    one = bench(codec, "Hello.", "Fine.", "x")
    first = await one.ask(HI)
    await one.ask(HI, said(first), user("how are you?"))
    await one.ask(*messages, tools=tools)
    assert one.counters[f"drift/forks_{reason}"] == 1
    judge(one.records.segments(), one.policy.served)


async def test_a_sub_agent_that_is_called_again_is_one_again(codec: HermesCodec) -> None:
    """Its instructions are the same each time; what it is asked is not."""
    one = bench(codec, "Hello.", "a", "b", "c")
    await one.ask(HI)
    helper: Message = {"role": "system", "content": "You help."}
    first = await one.ask(helper, user("with a"))
    await one.ask(helper, user("with b"))
    assert one.counters[f"drift/forks_{Rewritten.SUB_AGENT}"] == one.counters["drift/forks"] == 2
    await one.ask(helper, user("with a"), said(first) | {"content": "z"}, user("more"))
    assert one.counters[f"drift/forks_{Rewritten.EDITED_HISTORY}"] == 1


async def test_one_key_is_one_turn_also_while_it_is_sampled(codec: HermesCodec) -> None:
    one = bench(codec, "One.", "Two.")
    one.policy.gate = asyncio.Event()
    deliveries = [await one.episode.ask(request(HI, repeat_key="k")) for _ in range(3)]
    reading = asyncio.gather(*map(take, deliveries))
    one.policy.gate.set()
    answers = await reading
    again = await one.ask(HI, repeat_key="k")
    assert {answer.id for answer in [*answers, again]} == {answers[0].id}
    assert (await refused(one.ask(user("other"), repeat_key="k"))).kind is RefusalKind.INVALID


async def test_a_retry_joins_the_turn_in_flight_and_gets_a_delivered_one_again(codec: HermesCodec) -> None:
    one = bench(codec, "One.", "Two.")
    one.policy.gate = asyncio.Event()
    lost = await one.episode.ask(request(HI))
    joined = await one.episode.ask(request(HI, is_retry=True))
    one.policy.gate.set()
    first = await take(joined)
    lost.dropped()
    assert lost.id == joined.id
    assert (await one.ask(HI, is_retry=True)).id == first.id
    assert (await one.ask(HI)).text == "Two."


async def test_an_answer_that_was_not_delivered_is_given_to_the_next_equal_request(codec: HermesCodec) -> None:
    one = bench(codec, "One.", "Two.")
    broken = await one.episode.ask(request(HI))
    await read(broken)
    broken.dropped()
    assert (await one.ask(HI)).id == broken.id
    assert (await one.ask(HI)).text == "Two."
    assert len(one.policy.served) == 2


async def test_sampling_goes_on_when_the_client_is_gone(codec: HermesCodec) -> None:
    one = bench(codec, "One.")
    one.policy.gate = asyncio.Event()
    broken = await one.episode.ask(request(HI))
    broken.dropped()
    one.policy.gate.set()
    await until(lambda: one.tree.num_sampled == len(one.speech.say("One.")))
    assert (await one.ask(HI)).text == "One."


async def test_max_tokens_bounds_a_turn_and_the_conversation_goes_on(codec: HermesCodec) -> None:
    one = bench(codec, "A long answer.", "Fine.")
    first = await one.ask(HI, max_tokens=6)
    assert (first.text, first.finish, first.usage.num_sampled_tokens) == ("A long", "length", 6)
    one.policy._rest.clear()
    assert (await one.ask(HI, said(first), user("go on"))).text == "Fine."
    assert "drift/forks" not in one.counters
    judge(one.records.segments(), one.policy.served)


async def test_pieces_come_while_the_policy_samples(codec: HermesCodec) -> None:
    one = bench(codec, "Hello, this is a long answer.", rollout={"group_size": 2, "chunk_tokens": 5})
    items = [item async for item in await one.episode.ask(request(HI))]
    assert len(items) > 2
    assert isinstance(items[-1], Answer)
    assert "".join(item.text for item in items[:-1] if not isinstance(item, Answer)) in items[-1].text


@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        ({"max_turns": 1}, StopReason.MAX_TURNS),
        ({"max_tool_calls": 1}, StopReason.MAX_TOOL_CALLS),
        ({"max_episode_tokens": 10}, StopReason.MAX_TOKENS),
    ],
)
async def test_a_limit_refuses_the_next_request_by_name(
    codec: HermesCodec, limits: dict[str, int], stop: StopReason
) -> None:
    one = calling(codec, 2, 3, limits=limits)
    refusal = await refused(on_and_on(one, [HI]))
    assert (refusal.kind, refusal.message) == (RefusalKind.OVER_BUDGET, f"rollout stopped: {stop}")
    assert one.episode.stopped is stop


async def test_a_conversation_too_long_is_refused_and_a_shorter_one_goes_on(codec: HermesCodec) -> None:
    one = bench(codec, "One.", "Two.", limits={"max_context_tokens": 100})
    assert (await refused(one.ask(user("x" * 200)))).kind is RefusalKind.TOO_LONG
    assert one.episode.stopped is StopReason.CONTEXT_OVERFLOW
    assert (await one.ask(HI)).text == "One."
    assert one.episode.stopped is None


async def test_what_no_segment_could_hold_is_refused_before_anything_is_sampled(codec: HermesCodec) -> None:
    one = bench(codec, "One.", "Two.", context_tokens=2_000_000)
    refusal = await refused(one.ask(user("x" * 500_000)))
    assert refusal.kind is RefusalKind.TOO_LONG
    assert "new tokens; it must have fewer than 464209" in refusal.message
    assert one.episode.stopped is StopReason.CONTEXT_OVERFLOW
    assert not one.policy.served
    assert (await one.ask(HI)).text == "One."
    assert not one.episode.failure.done()


async def test_a_conversation_may_be_longer_than_a_segment(codec: HermesCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SEGMENT_TOKENS", 100)
    one = bench(codec, *["y" * 80] * 3)
    messages = [user("x" * 60)]
    for _ in range(3):
        answer = await one.ask(*messages)
        assert answer.text == "y" * 80
        messages = [*messages, said(answer), user("z" * 40)]
    assert max(segment.num_tokens for segment in one.records.segments()) <= 100
    assert (await refused(one.ask(*messages[:-2], user("more")))).kind is RefusalKind.TOO_LONG  # it forks


async def test_a_turn_that_fills_the_context_of_the_engines_ends_with_what_was_sampled(codec: HermesCodec) -> None:
    async def is_full(_ids: list[int]) -> NoReturn:
        raise ContextFull("http://e: as long as any that it samples")

    one = Bench(codec, policy=ScriptedPolicy([Speech(codec).say("One.")[:-1], is_full]))
    answer = await one.ask(HI)
    assert (answer.text, answer.finish) == ("One.", "length")
    assert one.episode.stopped is StopReason.CONTEXT_OVERFLOW


async def test_parallel_turns_never_exceed_the_episodes_tokens(codec: HermesCodec) -> None:
    one = Bench(codec, limits={"max_episode_tokens": 40}, rollout={"group_size": 2, "chunk_tokens": 7})
    await asyncio.gather(*(one.ask(user(str(number))) for number in range(6)), return_exceptions=True)
    assert one.tree.num_sampled <= 40
    judge(one.records.segments(), one.policy.served)


def helpers(codec: HermesCodec, *speeches: str, max_tokens: int) -> Bench:
    """Two of the turns side by side may come to all tokens of the episode."""
    limits = {"max_episode_tokens": 2 * max_tokens}
    one = bench(codec, *speeches, limits=limits, rollout={"group_size": 2, "chunk_tokens": max_tokens})
    one.policy.gate = asyncio.Event()
    return one


async def test_a_turn_waits_for_tokens_that_others_may_need_and_gets_those_that_they_did_not(
    codec: HermesCodec,
) -> None:
    one = helpers(codec, *["Fine."] * 5, max_tokens=16)
    deliveries = [await one.episode.ask(request(user(str(number)))) for number in range(5)]
    await until(lambda: len(one.policy.asked) == 2)
    one.policy.gate.set()
    answers = [await take(delivery) for delivery in deliveries]
    assert [(answer.text, answer.finish) for answer in answers] == [("Fine.", "stop")] * 5
    assert max(most for most in one.policy.asked) <= 16
    assert one.episode.stopped is None
    assert one.tree.num_sampled == 5 * len(one.speech.say("Fine."))


async def test_tokens_that_were_sampled_meanwhile_end_a_turn_that_waited_for_them(codec: HermesCodec) -> None:
    one = helpers(codec, *["word " * 40] * 2, max_tokens=8)
    deliveries = [await one.episode.ask(request(user(str(number)))) for number in range(3)]
    await until(lambda: len(one.policy.asked) == 2)
    one.policy.gate.set()
    answers = [await take(delivery) for delivery in deliveries]
    assert [(answer.usage.num_sampled_tokens, answer.finish) for answer in answers] == [
        (8, "length"),
        (8, "length"),
        (0, "length"),
    ]
    assert one.episode.stopped is StopReason.MAX_TOKENS


@pytest.mark.parametrize("end", ["seal", "abandon"])
async def test_a_turn_that_waits_for_tokens_ends_with_the_episode(codec: HermesCodec, end: str) -> None:
    one = helpers(codec, max_tokens=8)
    deliveries = [await one.episode.ask(request(user(str(number)))) for number in range(3)]
    await until(lambda: len(one.policy.asked) == 2)
    await getattr(one.episode, end)()
    for delivery in deliveries:
        assert (await refused(read(delivery))).kind is (RefusalKind.ENDED if end == "seal" else RefusalKind.AWAY)


async def test_a_turn_that_waits_for_tokens_of_one_that_fails_is_told_so(codec: HermesCodec) -> None:
    one = helpers(codec, max_tokens=8)
    deliveries = [await one.episode.ask(request(user(str(number)))) for number in range(3)]
    await until(lambda: len(one.policy.asked) == 2)
    assert isinstance(one.records, HeldRecords)
    one.records.token = "another"
    one.policy.gate.set()
    for delivery in deliveries:
        assert (await refused(read(delivery))).kind is RefusalKind.AWAY
    await one.episode.abandon()


@pytest.mark.parametrize("messages", [[], [HI, {"role": "assistant", "content": "prefill"}]])
async def test_a_request_without_a_question_is_refused(codec: HermesCodec, messages: Any) -> None:
    refusal = await refused(Bench(codec).ask(*messages))
    assert (refusal.kind, refusal.param) == (RefusalKind.INVALID, "messages")


async def test_counting_tokens_samples_and_records_nothing(codec: HermesCodec) -> None:
    one = bench(codec, "Hello.", "Fine.")
    first = await one.ask(HI)
    ask = request(HI, said(first), user("how are you?"))
    count = await one.episode.count_tokens(ask)
    assert len(one.policy.served) == 1
    assert (await take(await one.episode.ask(ask))).usage.num_prompt_tokens == count


async def test_after_the_end_every_request_is_refused_and_nothing_more_is_stored(codec: HermesCodec) -> None:
    one = bench(codec, "One.")
    one.policy.gate = asyncio.Event()
    waiting = await one.episode.ask(request(HI))
    await one.episode.seal()
    one.policy.gate.set()
    assert (await refused(read(waiting))).kind is RefusalKind.ENDED
    assert (await refused(one.ask(HI))).kind is RefusalKind.ENDED
    assert not one.records.payloads


async def test_a_lost_lease_ends_the_attempt_and_the_client_may_ask_elsewhere(codec: HermesCodec) -> None:
    one = bench(codec, "One.")
    one.policy.gate = asyncio.Event()
    waiting = await one.episode.ask(request(HI))
    assert isinstance(one.records, HeldRecords)
    one.records.token = "another"
    one.policy.gate.set()
    assert (await refused(read(waiting))).may_retry
    assert type(one.episode.failure.result()).__name__ == "Fenced"
    assert (await refused(one.ask(HI))).may_retry


async def test_rewards_are_kept_once_for_each_token(codec: HermesCodec) -> None:
    one = bench(codec, "One.")
    first = await one.ask(HI)
    for _ in range(2):
        await one.episode.reward(0.25, first.id, "t", pays=True)
        await one.episode.reward(1.0, token="f", pays=True)
    await one.episode.reward(2.0, pays=True)
    assert (one.episode.rewards.final, one.episode.rewards.by_turn()) == (2.0, {0: 0.25})
    for bad in [
        one.episode.reward(0.5, token="f", pays=True),
        one.episode.reward(1.0, "turn-0-9", pays=True),
        one.episode.reward(float("nan"), pays=True),
    ]:
        assert (await refused(bad)).kind is RefusalKind.INVALID


async def test_a_turn_is_stored_in_one_with_its_first_tokens(codec: HermesCodec) -> None:
    """So nothing is stored before it is sampled, and the next request waits for no storing of its own."""
    one = bench(codec, "a speech of so many tokens", rollout={"group_size": 2, "chunk_tokens": 10})
    delivery = await one.episode.ask(request(HI))
    assert one.records.calls == []
    await read(delivery)
    first, *rest = one.records.calls
    assert (first[-1], first.count("turns")) == ("turns", 1)
    assert len(rest) > 0
    assert all("turns" not in call for call in rest)
    await delivery.delivered()
    assert one.records.calls[-1] == ["turns"]


async def test_an_episode_of_more_turns_than_can_be_kept_is_refused(
    codec: HermesCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.episodes.snapshots.MAX_SNAPSHOT_BYTES", 3000)
    one = Bench(codec)
    refusal = await refused(on_and_on(one, [HI]))
    assert refusal.kind is RefusalKind.OVER_BUDGET
    assert "too many turns to keep" in refusal.message
    assert len(one.episode.history.entries) > 1
    judge(one.records.segments(), one.policy.served)


async def test_a_turn_ends_with_its_first_call_where_only_one_was_asked_for(codec: HermesCodec) -> None:
    """What was sampled behind it is no part of the episode; an end that the policy chose itself is."""
    call = '<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'
    for said_text, num_ends in ((f"{call}\n{call}", 0), (call, 1)):
        one = bench(codec, said_text)
        answer = await one.ask(HI, tools=(ADD,), single_call=True)
        assert [dict(one.arguments) for one in answer.calls] == [{"amount": 2}]  # type: ignore[arg-type]
        assert answer.finish == "tool_calls"
        sampled = one.tree.turns[0].sampled
        assert sum(token in codec.stop_ids for token in sampled) == num_ends
        text = codec.tokenizer.decode([token for token in sampled if token not in codec.stop_ids])
        assert text.strip() == call
    both = await bench(codec, f"{call}\n{call}").ask(HI, tools=(ADD,))
    assert len(both.calls) == 2


async def test_samples_that_an_agent_did_not_go_on_from_are_not_trained(codec: HermesCodec) -> None:
    one = bench(codec, "One.", "Two.", "Three.", "Four.", "Five.")
    first, second, third = [await one.ask(HI) for _ in range(3)]
    await one.ask(HI, said(second), user("more"))
    history = one.episode.history
    had = history.had()
    assert had == {0, 1, 2, 3}
    assert history.rejected(had) == {0, 2}
    assert history.rejected(had, paid=[2]) == {0}
    assert (first.text, second.text, third.text) == ("One.", "Two.", "Three.")
    alone = bench(codec, "One.", "Two.")
    await alone.ask(HI)
    await alone.ask(HI)
    history, had = alone.episode.history, alone.episode.history.had()
    assert history.rejected(had) == set()  # nobody knows which was chosen
    assert history.rejected(had, paid=[1]) == {0}
    assert history.rejected(had, paid=[0, 1]) == set()


async def test_what_is_not_acted_on_is_refused_unless_the_job_has_it_said(codec: HermesCodec) -> None:
    fault = Refusal(RefusalKind.INVALID, "n must be 1", param="n")
    says = {"environments": [{"ref": "tests:Counter", "agent": {"pull": True, "unsupported": "say"}}]}
    strict, lenient = bench(codec, "One."), bench(codec, "One.", **says)
    for call in (strict.ask(HI, unsupported=(fault,)), _counted(strict, fault)):
        assert (await refused(call)).param == "n"
    assert (await lenient.ask(HI, unsupported=(fault,))).text == "One."
    assert lenient.counters["fields/passed_over"] == 1
    assert not strict.policy.served


@pytest.mark.parametrize(
    ("written", "sent_back"),
    [
        ("1.0", "1"),
        ("1e3", "1000"),
        ("-0.0", "0"),
        ("12345678901234567890", "12345678901234567000"),
        ("1e21", "1e+21"),
        ("0.5", "0.5"),
        ("1e-7", "1e-7"),
        ('[1.0, {"a": 2.0}]', '[1, {"a": 2}]'),
        (f"1{'0' * 400}", f"1{'0' * 400}"),
    ],
)
async def test_a_call_goes_on_whose_numbers_javascript_has_written_again(
    codec: HermesCodec, written: str, sent_back: str
) -> None:
    one, answer = await _called(codec, f'{{"amount": {written}}}')
    assert answer.calls
    sent: Any = [HI, _call_of(answer, f'{{"amount": {sent_back}}}'), result(answer, "done")]
    later = await one.ask(*sent, tools=(ADD,))
    assert later.usage.num_stored_tokens >= answer.usage.num_prompt_tokens + answer.usage.num_sampled_tokens
    assert (await one.ask(*sent, said(later), user("more"), tools=(ADD,))).text == "done"
    assert "drift/forks" not in one.counters
    assert codec.tokenizer.decode(one.policy.served[-1].prompt).count(written) == 1


@pytest.mark.parametrize("other", ["true", '"1"', "1.5", "9007199254740992", "2"])
async def test_a_call_with_another_value_is_another_call(codec: HermesCodec, other: str) -> None:
    number = "9007199254740993" if other.startswith("9") else "1.0"
    one, answer = await _called(codec, f'{{"amount": {number}}}')
    edited = str(int(other) - 2) if other.startswith("9") else other
    await one.ask(HI, _call_of(answer, f'{{"amount": {edited}}}'), result(answer, "done"), tools=(ADD,))
    assert one.counters["drift/forks"] == 1


async def test_of_two_calls_that_are_one_to_javascript_the_one_is_meant_that_is_said(codec: HermesCodec) -> None:
    speech = Speech(codec)
    calls = [speech.call("add", amount=2**53 + more) for more in (0, 1)]
    one = Bench(codec, policy=BabblingPolicy(codec, random.Random(0), [*calls, speech.say("done")]))
    first, second = [await one.ask(HI, tools=(ADD,)) for _ in calls]
    await one.ask(HI, said(first), result(first, "ok"), tools=(ADD,))
    history = one.episode.history
    assert history.rejected(history.had()) == {1}
    assert str(2**53) in codec.tokenizer.decode(one.policy.served[-1].prompt)
    assert second.calls != first.calls


async def test_arguments_that_are_nested_deeply_are_compared_all_the_same(codec: HermesCodec) -> None:
    deep = f'{{"amount": {"[" * 700}1.0{"]" * 700}}}'
    one, answer = await _called(codec, '{"amount": 1}')
    for arguments in (deep, deep.replace("1.0", "1")):
        call = _call_of(answer, arguments)
        assert (await one.ask(HI, call, result(answer, "ok"), tools=(ADD,))).text is not None


async def _called(codec: HermesCodec, arguments: str) -> tuple[Bench, Answer]:
    """An episode whose first answer is a call with these arguments."""
    speech = Speech(codec)
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    call = [*codec.tokenizer.encode_whole(text), codec.stop_ids[0]]
    policy = BabblingPolicy(codec, random.Random(0), [call, *[speech.say("done") for _ in range(3)]])
    one = Bench(codec, policy=policy)
    answer = await one.ask(HI, tools=(ADD,))
    return one, answer


def _call_of(answer: Answer, arguments: str) -> Message:
    """As a dialect reads a call that comes back."""
    function: Any = {"name": "add", "arguments": parsed(FieldValue(arguments, "arguments"))}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": answer.call_ids[0], "type": "function", "function": function}],
    }


async def test_what_a_job_calls_volatile_is_read_by_nobody_and_begins_no_branch(codec: HermesCodec) -> None:
    agent = {"pull": True, "volatile": {"clock": "It is *.", "nonce": "<n>*</n>"}}
    one = bench(codec, "One.", "Two.", "Three.", environments=[{"ref": "tests:Counter", "agent": agent}])

    def at(hour: int) -> list[Message]:
        return [{"role": "system", "content": f"Help.\nIt is {hour}.\nBe kind."}, user(f"<n>{hour}</n>hello")]

    answer = await one.ask(*at(1))
    delivery = await one.episode.ask(request(*at(2), said(answer), user("It is 7. more")))
    second = await delivery.whole()
    assert delivery.left_out == ("clock", "nonce")
    read = codec.tokenizer.decode(one.policy.served[0].prompt)
    assert "Help.\nBe kind." in read
    assert "It is" not in read
    assert "<n>" not in read
    assert one.counters["drift/left_out"] == 2
    assert second.usage.num_stored_tokens > 0
    history = [*at(4), said(answer), user(" more")]
    assert await one.episode.count_tokens(request(*history)) == second.usage.num_prompt_tokens
    assert (await one.ask(*at(5), said(answer), user(" more"), is_retry=True)).id == second.id
    assert "drift/forks" not in one.counters


async def _counted(one: Bench, fault: Refusal) -> int:
    return await one.episode.count_tokens(request(HI, unsupported=(fault,)))


@pytest.mark.parametrize("with_others", [False, True])
async def test_a_call_of_a_tool_that_was_not_offered_is_seen_as_it_was_written(
    codec: HermesCodec, with_others: bool
) -> None:
    """An answer of nothing tells an agent nothing, and some take it for a broken one and ask again."""
    speech = Speech(codec)
    wrong, right = speech.call("fly", amount=1), speech.call("add", amount=2)
    said_ids = [*wrong[:-1], *right] if with_others else wrong
    one = Bench(codec, policy=BabblingPolicy(codec, random.Random(0), [said_ids, speech.say("done")]))
    answer = await one.ask(HI, tools=(ADD,))
    assert answer.text.startswith("<tool_call>")
    assert '"fly"' in answer.text
    assert [call.name for call in answer.calls] == ["add"] * with_others
    results: list[Message] = [{"role": "tool", "tool_call_id": call_id, "content": "2"} for call_id in answer.call_ids]
    await one.ask(HI, said(answer), *results, user("go on"), tools=(ADD,))
    assert "drift/forks" not in one.counters


async def test_the_tokens_of_a_thought_are_counted_also_of_one_that_was_not_ended(codec: HermesCodec) -> None:
    speech = Speech(codec)
    thought = codec.tokenizer.encode_whole("<think>Let me see.</think>")
    said_ids = [*thought, *speech.say("Yes.")]
    policy = BabblingPolicy(codec, random.Random(0), [said_ids, thought[:-1], speech.say("No <think>.")])
    bench = Bench(codec, policy=policy)
    answers = [await bench.ask(user(text), max_tokens=most) for text, most in (("a", None), ("b", len(thought) - 1))]
    answers.append(await bench.ask(user("c")))
    assert [one.usage.num_reasoning_tokens for one in answers] == [len(thought), len(thought) - 1, 0]
    assert [one.reasoning for one in answers] == ["Let me see.", "Let me see.", ""]
