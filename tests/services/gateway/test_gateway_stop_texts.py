"""Stop texts: sampled and trained, not told, and known again where a client writes them back or goes on behind them."""

from __future__ import annotations

import asyncio
import random
from functools import lru_cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.chat.template import TemplateCodec
from gspo_core.chat.turns import TaggedCalls, read_hermes
from gspo_core.messages import Message
from gspo_core.starter.tokenizer import chat_template
from services.episodes.matching import Rewritten, TurnEntry, added
from services.episodes.reading import before_stop_text, stop_text_end
from services.episodes.snapshots import TreeSnapshot
from services.gateway.dialects.turns import Answer
from tests.core.qwen_vocabulary import qwen_vocabulary_or_skip
from tests.services.gateway.gateway_kit import ADD, BabblingPolicy, Bench, judge, read, request, said, take, user
from tests.services.rollout.rollout_kit import Speech, stitched

HI = user("hi")
CODE = "</code>"


def bench(codec: HermesCodec, *speeches: str, **order: Any) -> Bench:
    speech = Speech(codec)
    policy = BabblingPolicy(codec, random.Random(0), [speech.say(text) for text in speeches])
    return Bench(codec, policy=policy, **order)


@lru_cache(maxsize=1)
def _real_codec() -> HermesCodec:
    return HermesCodec(load_tokenizer(qwen_vocabulary_or_skip()))


def chunks(number: int) -> dict[str, Any]:
    return {"rollout": {"group_size": 2, "chunk_tokens": number}}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def stored(one: Bench, turn: int = 0) -> str:
    return one.codec.tokenizer.decode(list(one.tree.turns[turn].sampled))


@pytest.mark.parametrize("chunk", [1, 3, 32])
async def test_a_stop_text_ends_the_turn_and_is_an_action_that_is_not_told(codec: HermesCodec, chunk: int) -> None:
    one = bench(codec, "think STOP: more", "Fine.", **chunks(chunk))
    first = await one.ask(HI, stop=("nothing", "STOP:"))
    assert (first.text, first.finish, first.stop_text) == ("think", "stop", "STOP:")
    assert stored(one) == "think STOP:"
    record = one.records.segments()
    judge(record, one.policy.served)
    assert sum(segment.num_actions for segment in record) == len(one.tree.turns[0].sampled)
    assert first.usage.num_sampled_tokens == len(one.tree.turns[0].sampled)
    one.policy._rest.clear()
    assert (await one.ask(HI, said(first), user("next"))).text == "Fine."
    assert "drift/forks" not in one.counters
    assert "drift/answer_extended" not in one.counters
    judge(one.records.segments(), one.policy.served)
    assert (
        codec.tokenizer.decode(stitched(one.records.segments())).count("STOP:<|im_end|>\n<|im_start|>user\nnext") == 1
    )


@pytest.mark.parametrize(
    ("written", "behind"),
    [
        ("x = 1</code>", ""),
        ("x = 1\n</code>", ""),
        ("x = 1</code>\nCalling tools:\n[]", "\nCalling tools:\n[]"),
        ("x = 1 and so on", " and so on"),
        ("x = 1</code><tool_call>", "<tool_call>"),
    ],
)
async def test_an_answer_that_is_written_back_with_more_goes_on_behind_the_stored_ids(
    codec: HermesCodec, written: str, behind: str
) -> None:
    one = bench(codec, "x = 1\n</code> and more", "Fine.")
    first = await one.ask(HI, stop=(CODE,))
    assert first.text == "x = 1"
    one.policy._rest.clear()
    second = await one.ask(HI, assistant(written), user("next"))
    assert second.text == "Fine."
    assert "drift/forks" not in one.counters
    assert one.counters["drift/answer_extended"] == 1
    record = one.records.segments()
    judge(record, one.policy.served)
    prompt, turn = codec.render([HI]), list(one.tree.turns[0].sampled)
    rest = codec.tokenizer.encode(behind)
    bridge = codec.bridge(prompt, [*turn, *rest], [user("next")])
    assert one.policy.served[-1].prompt == [*prompt, *turn, *rest, *bridge]
    assert {segment.branch for segment in record} == {0}
    assert not next(segment for segment in record if segment.turn == 1).action_mask[: len(rest)].any()


async def test_an_agent_that_writes_its_stop_text_back_at_each_step_has_one_branch(codec: HermesCodec) -> None:
    """As smolagents' CodeAgent does, with its own words behind."""
    one = bench(codec, *(f"Thought {number}\n<code>\nprint({number})\n</code>" for number in range(6)))
    messages: list[Message] = [HI]
    for number in range(6):
        answer = await one.ask(*messages, stop=("Observation:", CODE))
        assert answer.text == f"Thought {number}\n<code>\nprint({number})"
        written = f"{answer.text}{CODE}\nCalling tools:\n[{number}]"
        messages += [assistant(written), user(f"Observation:\n{number}")]
    assert "drift/forks" not in one.counters
    assert "tokens/rendered_again" not in one.counters
    assert one.counters["drift/answer_extended"] == 5
    record = one.records.segments()
    judge(record, one.policy.served)
    assert {segment.branch for segment in record} == {0}
    text = codec.tokenizer.decode(stitched(record))
    assert text.count("\n</code>\nCalling tools:\n[3]<|im_end|>\n<|im_start|>user\nObservation:\n3") == 1


async def test_it_goes_on_by_a_models_own_template_too() -> None:
    tokenizer = load_tokenizer(qwen_vocabulary_or_skip())
    codec: Any = TemplateCodec(tokenizer, chat_template(), TaggedCalls(tokenizer, read_hermes))
    one = bench(codec, "x = 1\n</code> and more", "Fine.", "Well.")
    first = await one.ask(HI, stop=(CODE,))
    one.policy._rest.clear()
    written = assistant(f"{first.text}{CODE}\nCalling <tool_call>")
    second = await one.ask(HI, written, user("next"))
    await one.ask(HI, written, user("next"), said(second), user("more"))
    assert "drift/forks" not in one.counters
    assert one.counters["drift/answer_extended"] == 1
    judge(one.records.segments(), one.policy.served)
    text = codec.tokenizer.decode(one.policy.served[-1].prompt)
    assert text.count("x = 1\n</code>\nCalling <tool_call><|im_end|>") == 1
    assert tokenizer.token_id("<tool_call>") not in one.policy.served[-1].prompt


async def test_words_behind_an_answer_that_was_cut_off_go_on_behind_it(codec: HermesCodec) -> None:
    one = bench(codec, "A long answer.", "Fine.")
    first = await one.ask(HI, max_tokens=6)
    one.policy._rest.clear()
    await one.ask(HI, assistant(first.text + " story"), user("go on"))
    assert "drift/forks" not in one.counters
    assert one.counters["drift/answer_extended"] == 1
    judge(one.records.segments(), one.policy.served)
    assert "A long story<|im_end|>" in codec.tokenizer.decode(one.policy.served[-1].prompt)


@pytest.mark.parametrize("written", ["One. And more", "On", "made up"])
async def test_words_that_cannot_stand_behind_the_stored_ids_begin_a_branch(codec: HermesCodec, written: str) -> None:
    """The policy ended the turn itself, or the answer is no beginning of them."""
    one = bench(codec, "One.", "Fine.")
    await one.ask(HI)
    await one.ask(HI, assistant(written), user("next"))
    assert one.counters[f"drift/forks_{Rewritten.EDITED_HISTORY}"] == one.counters["drift/forks"] == 1
    assert "drift/answer_extended" not in one.counters


async def test_a_stop_text_alone_is_a_turn_and_known_by_it(codec: HermesCodec) -> None:
    one = bench(codec, CODE, "Fine.", "Well.")
    first = await one.ask(HI, stop=(CODE,))
    assert (first.text, first.stop_text, stored(one)) == ("", CODE, CODE)
    await one.ask(HI, assistant(CODE), user("next"))
    assert "drift/forks" not in one.counters
    await one.ask(HI, assistant("made up"), user("next"))
    assert one.counters["drift/forks"] == 1


async def test_of_two_answers_that_a_message_begins_with_the_longer_one_goes_on(codec: HermesCodec) -> None:
    one = bench(codec, "a STOP", "a b STOP", "Fine.")
    for _ in range(2):
        await one.ask(HI, stop=("STOP",))
    await one.ask(HI, assistant("a b STOP c"), user("next"))
    assert one.episode.history.entries[2].parent == 1
    judge(one.records.segments(), one.policy.served)


async def test_behind_calls_there_can_be_nothing_but_the_stop_text(codec: HermesCodec) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'
    for more, num_forks in (("Observation:", 0), ("Observation: 5", 1)):
        one = bench(codec, f"So.{call}\nObservation: made up", "Fine.")
        first = await one.ask(HI, tools=(ADD,), stop=("Observation:",))
        assert (first.text, len(first.calls), first.stop_text) == ("So.", 1, "Observation:")
        one.policy._rest.clear()
        message = said(first)
        message["content"] = f"So.{more}"
        await one.ask(HI, message, user("next"), tools=(ADD,))
        assert one.counters.get("drift/forks", 0) == num_forks
        judge(one.records.segments(), one.policy.served)


@pytest.mark.parametrize(
    ("speech", "stop", "text", "reasoning"),
    [
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "</tool_call>", "", ""),
        ("<think>Hm. STOP</think>x", "STOP", "", "Hm."),
        ("<think>Hm.</think>x STOP", "STOP", "x", "Hm."),
        ("x<tool_call>", "tool_call>", "x<", ""),
        ("x y", " ", "x", ""),
    ],
)
async def test_what_is_told_ends_before_the_stop_text_wherever_it_stands(
    codec: HermesCodec, speech: str, stop: str, text: str, reasoning: str
) -> None:
    for chunk in (1, 32):
        one = bench(codec, speech, **chunks(chunk))
        answer = await take(await one.episode.ask(request(HI, tools=(ADD,), stop=(stop,))))
        told = answer.text.removeprefix('<tool_call>{"name": "add", "arguments": {}}')
        assert (told, answer.reasoning, answer.calls, answer.stop_text) == (text, reasoning, (), stop)
        judge(one.records.segments(), one.policy.served)


async def test_pieces_grow_where_a_text_may_end_the_turn(codec: HermesCodec) -> None:
    one = bench(codec, "x" * 4000, sampling={"max_new_tokens": 4096})
    await one.ask(HI, stop=("END",))
    assert [len(served.ids) for served in one.policy.served] == [32, 32, 64, 128, 256, 512, 1024, 1024, 929]


async def test_what_is_sampled_in_vain_behind_stop_texts(codec: HermesCodec) -> None:
    """Engines are not told them. `docs/agents.md` states these numbers."""
    kept = in_vain = most = 0
    for length in range(40, 2040, 50):
        one = bench(codec, "x" * (length - 3) + "END" + "y" * 4096, sampling={"max_new_tokens": 4096})
        await one.ask(HI, stop=("END",))
        assert len(one.tree.turns[0].sampled) == length
        more = sum(len(served.ids) for served in one.policy.served) - length
        assert more <= max(length, 32)
        kept, in_vain, most = kept + length, in_vain + more, max(most, more)
    assert (round(in_vain / kept, 2), most) == (0.35, 1008)


async def test_a_turn_that_a_text_ended_is_kept_in_one_with_its_last_tokens(codec: HermesCodec) -> None:
    """So another gateway does not go on behind the stop text, and tells the same."""
    one = bench(codec, "think STOP: more", **chunks(4))
    delivery = await one.episode.ask(request(HI, stop=("STOP:",)))
    first = await read(delivery)
    one.policy._rest.clear()
    one.policy.speeches.append(one.speech.say("Fine."))
    again = Bench(codec, one.records, one.policy)
    kept = one.records.snapshot
    tree = TreeSnapshot.together([kept.data, *kept.parts])
    assert tree is not None
    again.episode.restore(one.records.segments(), tree, begins_again=False)
    second = await again.ask(HI, stop=("STOP:",), is_retry=True)
    assert second == first
    await again.ask(HI, assistant("think STOP: 5"), user("next"))
    assert "drift/forks" not in again.counters
    judge(again.records.segments(), one.policy.served)


async def test_turns_of_an_earlier_release_are_read_and_gone_on_from(codec: HermesCodec) -> None:
    """Their tokens hold no stop text, at most its beginning."""
    one = bench(codec, "think ST", "Fine.")
    await one.ask(HI, max_tokens=len(codec.tokenizer.encode("think ST")))
    entry = one.episode.history.entries[0]
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(entry))[:-1]
    entry = msgspec.convert(old, TurnEntry, builtin_types=(bytes,))
    entry.finish, entry.stop_text, entry.overlap, entry.answer = "stop", "STOP:", "ST", b""
    one.policy._rest.clear()
    again = Bench(codec, one.records, one.policy)
    again.episode.restore(one.records.segments(), TreeSnapshot([entry], []), begins_again=True)
    first = await again.ask(HI, max_tokens=len(codec.tokenizer.encode("think ST")))
    assert (first.id, first.text, first.stop_text) == ("turn-0-0", "think", "STOP:")
    await again.ask(HI, said(first), user("next"))
    assert "drift/forks" not in again.counters


async def test_nothing_is_told_before_it_is_stored(codec: HermesCodec) -> None:
    """Also to a request that joins while a piece of the turn is being stored."""
    one = bench(codec, "Hello, this is an answer.", **chunks(8))
    storing, gate, append = asyncio.Event(), asyncio.Event(), one.records.append

    async def slowly(*given: Any) -> None:
        storing.set()
        await gate.wait()
        await append(*given)

    one.records.append = slowly
    first = await one.episode.ask(request(HI))
    await storing.wait()
    joined = aiter(await one.episode.ask(request(HI, is_retry=True)))
    early = asyncio.ensure_future(anext(joined))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not early.done()
    gate.set()
    assert not isinstance(await early, Answer)
    assert (await read(first)).text == "Hello, this is an answer."


def test_only_what_is_not_stored_is_added() -> None:
    assert added("</code> x", "a\n</code>\n", CODE) == " x"
    assert added("</code>\nx", "a\n</code>\n", CODE) == "x"
    assert added("</code>", "a\n</code>\n\n", CODE) == ""
    assert added("\nObservation: 5", "a\nObservation: ", "\nObservation: ") == "5"
    assert added("\n\nx", "a\n\n", "\n\n") == "x"
    assert added(" x", "a ", "") == "x"


@given(
    text=st.text(st.sampled_from("ab<>/数🦊 \n"), max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab<>/数🦊 \n"), min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=300)
def test_the_turn_is_the_shortest_that_holds_a_stop_text_and_its_beginning_is_told(text: str, stops: list[str]) -> None:
    codec = _real_codec()
    ids, decode = codec.tokenizer.encode(text), codec.tokenizer.decode
    found = stop_text_end(codec, ids, stops)
    lengths = [n for n in range(len(ids) + 1) if any(stop in decode(ids[:n]) for stop in stops)]
    assert (found is None) == (not lengths)
    if found is not None:
        length, stop_text = found
        assert length == lengths[0]
        kept = decode(ids[:length])
        told = decode(before_stop_text(codec, ids[:length], stop_text))
        assert told == kept[: kept.index(stop_text)]
        assert not any(stop in told for stop in stops)
