"""Calls are told while the policy goes on: what a stream says early is what the whole answer says."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.messages import Message
from services.episodes.fingerprints import of_answer, of_message
from services.episodes.reading import certain, read
from services.gateway.dialects.turns import Answer, Piece, ToolChoice
from services.gateway.http.app import DIALECTS
from tests.core.qwen_vocabulary import qwen_vocabulary_or_skip
from tests.services.gateway.fake_turns import MODEL, Scripted
from tests.services.gateway.fake_turns import call as named
from tests.services.gateway.gateway_kit import ADD, BabblingPolicy, Bench, judge, request, result, take, user
from tests.services.gateway.gateway_kit import said as sent_back
from tests.services.gateway.speakers import SPEAKERS
from tests.services.rollout.rollout_kit import Speech

HI = user("hi")


def call(amount: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"amount": {amount}}}}}\n</tool_call>'


def bench(codec: HermesCodec, speech: str, chunk: int = 1) -> Bench:
    policy = BabblingPolicy(codec, random.Random(0), [Speech(codec).say(speech)])
    return Bench(codec, policy=policy, rollout={"group_size": 2, "chunk_tokens": chunk})


async def told(one: Bench, **fields: object) -> tuple[list[Piece], Answer]:
    items = [item async for item in await one.episode.ask(request(HI, tools=(ADD,), **fields))]
    answer = items.pop()
    assert isinstance(answer, Answer)
    return [item for item in items if isinstance(item, Piece)], answer


async def test_a_call_is_told_once_its_end_was_sampled(codec: HermesCodec) -> None:
    one = bench(codec, f"So. {call(1)}\n{call(2)}")
    sampled, calls = [], []
    async for item in await one.episode.ask(request(HI, tools=(ADD,))):
        if isinstance(item, Piece):
            calls += item.calls
            sampled += [codec.tokenizer.decode(one.tree.turns[0].sampled)] * len(item.calls)
        else:
            answer = item
    assert [text.count("</tool_call>") for text in sampled] == [1, 2]
    assert sampled[0].endswith("</tool_call>")
    assert tuple(calls) == answer.named_calls
    assert [call_id for call_id, _ in calls] == ["call_0_0_0", "call_0_0_1"]
    judge(one.records.segments(), one.policy.served)


async def test_what_is_no_call_is_never_begun_as_one(codec: HermesCodec) -> None:
    """What cannot be read stands before or behind the calls, wherever it was sampled."""
    odd = "<tool_call>nonsense</tool_call>"
    pieces, answer = await told(bench(codec, f"So. {odd}{call(1)}{odd}{call(2)}"))
    assert "".join(piece.text for piece in pieces) == answer.before == f"So.\n{odd}"
    assert answer.behind == f"\n{odd}"
    assert answer.text == f"So.\n{odd}\n{odd}"
    assert [one for piece in pieces for one in piece.calls] == list(answer.named_calls)
    pieces, answer = await told(bench(codec, f"So. {odd}"))
    assert not any(piece.calls for piece in pieces)
    assert (answer.calls, answer.num_behind) == ((), 0)


async def test_words_between_calls_and_behind_them_are_told(codec: HermesCodec) -> None:
    """Blanks alone are none."""
    pieces, answer = await told(bench(codec, f"So. {call(1)}\n\nThen this: {call(2)} \n{call(3)}\nDone?\n"))
    assert "".join(piece.text for piece in pieces) == answer.before == "So."
    assert answer.behind == "\nThen this:\nDone?"
    assert [one.arguments for one in answer.calls] == [{"amount": 1}, {"amount": 2}, {"amount": 3}]
    _, answer = await told(bench(codec, f"{call(1)}\nDone."))
    assert (answer.before, answer.behind, answer.text) == ("", "Done.", "Done.")
    _, answer = await told(bench(codec, f"So. {call(1)}\n{call(2)}\n"))
    assert (answer.text, answer.num_behind) == ("So.", 0)
    odd = "<tool_call>nonsense</tool_call>"
    pieces, answer = await told(bench(codec, f"So. {odd} or {call(1)}"))
    assert "".join(piece.text for piece in pieces) == answer.text == f"So.\n{odd}\nor"


async def test_words_behind_calls_are_told_where_no_calls_are_wanted(codec: HermesCodec) -> None:
    _, answer = await told(bench(codec, f"So. {call(1)} Done."), choice=ToolChoice("none"))
    assert (answer.text, answer.calls) == (f"So.\n{call(1)}\nDone.", ())


def _sent_back(path: str, body: Any) -> list[Any]:
    """A whole answer, and the result of its only call, as a client writes them into its next request."""
    if path.endswith("chat/completions"):
        message = body["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        return [message, {"role": "tool", "tool_call_id": call_id, "content": "2"}]
    if path.endswith("responses"):
        (call_id,) = (item["call_id"] for item in body["output"] if item["type"] == "function_call")
        return [*body["output"], {"type": "function_call_output", "call_id": call_id, "output": "2"}]
    if path.endswith("messages"):
        blocks = [{name: one[name] for name in one.keys() - {"citations", "caller"}} for one in body["content"]]
        (call_id,) = (one["id"] for one in blocks if one["type"] == "tool_use")
        results = [{"type": "tool_result", "tool_use_id": call_id, "content": "2"}]
        return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    result = {"functionResponse": {"name": "add", "response": {"result": "2"}}}
    return [body["candidates"][0]["content"], {"role": "user", "parts": [result]}]


HISTORIES = {"chat": "messages", "responses": "input", "messages": "messages", "gemini": "contents"}


@pytest.mark.parametrize("stop", [(), ("Observation:",)])
@pytest.mark.parametrize("text", ["So. CALL\nDone.", "CALL Done.", "So. CALL", "So. CALL\nDone. Observation: 3"])
@pytest.mark.parametrize("name", HISTORIES)
async def test_a_conversation_goes_on_behind_words_behind_a_call(
    codec: HermesCodec, name: str, text: str, stop: tuple[str, ...]
) -> None:
    speaker = SPEAKERS[name]
    dialect = DIALECTS[speaker.path]
    one = bench(codec, text.replace("CALL", call(1)), chunk=512)
    one.policy.speeches.append(Speech(codec).say("fine"))
    stop = stop if speaker.has_stop else ()
    body = speaker.body([HI], (ADD,), 200, stop)
    question = dialect.read(body, {})
    answer = await take(await one.episode.ask(question.ask))
    assert len(answer.calls) == 1
    sent_back = _sent_back(speaker.path, dialect.whole(question, MODEL, answer))
    more = dialect.read({**body, HISTORIES[name]: [*body[HISTORIES[name]], *sent_back]}, {})
    assert (await take(await one.episode.ask(more.ask))).text == "fine"
    assert "drift/forks" not in one.counters
    judge(one.records.segments(), one.policy.served)


def _joined(answer: Answer, between: str, behind: str | None = None) -> Message:
    behind = answer.behind.strip() if behind is None else behind
    return {**sent_back(answer), "content": f"{answer.before}{between}{behind}"}


@pytest.mark.parametrize("between", ["", " ", "\n", "\n\n\n"])
@pytest.mark.parametrize("begun", ["So. ", ""])
async def test_texts_around_a_call_are_known_however_a_client_joins_them(
    codec: HermesCodec, begun: str, between: str
) -> None:
    """pydantic-ai puts an empty line between those of a stream."""
    one = bench(codec, f"{begun}{call(1)}\nDone.", chunk=512)
    one.policy.speeches += [Speech(codec).say("fine"), Speech(codec).say("well")]
    answer = await one.ask(HI, tools=(ADD,))
    history = [HI, _joined(answer, between), result(answer, "2")]
    fine = await one.ask(*history, tools=(ADD,))
    assert (await one.ask(*history, sent_back(fine), user("and?"), tools=(ADD,))).text == "well"
    assert "drift/forks" not in one.counters
    judge(one.records.segments(), one.policy.served)


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: _joined(answer, " ", "Done!"),
        lambda answer: _joined(answer, " and "),
        lambda answer: {**sent_back(answer), "content": answer.before},
        lambda answer: {
            **_joined(answer, "\n\n"),
            "tool_calls": [{"id": answer.call_ids[0], "function": {"name": "add", "arguments": {"amount": 2}}}],
        },
    ],
)
async def test_other_texts_around_a_call_or_another_call_are_an_edited_history(codec: HermesCodec, change: Any) -> None:
    one = bench(codec, f"So. {call(1)}\nDone.", chunk=512)
    one.policy.speeches.append(Speech(codec).say("fine"))
    answer = await one.ask(HI, tools=(ADD,))
    await one.ask(HI, change(answer), result(answer, "2"), tools=(ADD,))
    assert one.counters["drift/forks_edited_history"] == one.counters["drift/forks"] == 1


async def test_where_no_calls_are_wanted_none_is_told(codec: HermesCodec) -> None:
    pieces, answer = await told(bench(codec, f"So. {call(1)}"), choice=ToolChoice("none"))
    assert not any(piece.calls for piece in pieces)
    assert answer.calls == ()


async def test_a_call_within_reasoning_is_not_told(codec: HermesCodec) -> None:
    """It ends the reasoning only if the reasoning has no end of its own later."""
    pieces, answer = await told(bench(codec, f"<think>Hm. {call(1)} no.</think>{call(2)}"))
    assert [one for piece in pieces for one in piece.calls] == list(answer.named_calls)
    assert [one.arguments for one in answer.calls] == [{"amount": 2}]


@lru_cache(maxsize=2)
def _codec(opens_thought: bool) -> HermesCodec:
    codec = HermesCodec(load_tokenizer(qwen_vocabulary_or_skip()))
    codec._turn_reader.opens_thought = opens_thought
    return codec


PARTS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|im_end|>",
        "So: ",
        "\n",
        " ",
        "{",
        "数🦊",
        "word",
        "\ufffd",
    ),
    *(call(7), call(7).replace("add", "fly"), call(7).replace("}}", "}"), '<tool_call>{"name": "add"}</tool_call>'),
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
)


@pytest.mark.parametrize("opens_thought", [False, True])
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=9),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    gives=st.booleans(),
)
@example(parts=["<think>", "So: ", "\ufffd", "</think>", "word", "word"], cuts=[*range(40)], gives=True)
@settings(deadline=None, max_examples=400)
def test_what_is_certain_stays_so(opens_thought: bool, parts: list[str], cuts: list[int], gives: bool) -> None:
    """Any tokens, cut anywhere: what is told early is how the whole answer begins."""
    codec = _codec(opens_thought)
    ids = codec.tokenizer.encode_whole("".join(parts))
    whole = read(codec, ids, (ADD,), gives_calls=gives)
    before = whole.text[: len(whole.text) - whole.num_behind]
    for cut in cuts:
        early = certain(codec, ids[:cut], (ADD,), gives_calls=gives)
        assert whole.calls[: len(early.calls)] == early.calls
        assert whole.reasoning.startswith(early.reasoning)
        assert (before if whole.calls else whole.text).startswith(early.text)
        if early.text:  # which stands behind all that was thought
            assert early.reasoning == whole.reasoning
        if early.calls:
            assert (early.text, early.reasoning) == (before, whole.reasoning)


def test_text_behind_calls_that_comes_back_is_the_same_message() -> None:
    scripted = Scripted("one two", (named("now", {}),), num_behind=4)
    answer = scripted.answer(0)
    responses, messages = (DIALECTS[SPEAKERS[name].path] for name in ("responses", "messages"))
    question = responses.read(SPEAKERS["responses"].body([HI]), {})
    output: Any = responses.whole(question, MODEL, answer)
    assert [item["type"] for item in output["output"]] == ["message", "function_call", "message"]
    result = {"type": "function_call_output", "call_id": answer.call_ids[0], "output": "noon"}
    back = responses.read({"model": MODEL, "input": [{"role": "user", "content": "hi"}, *output["output"], result]}, {})
    content: Any = messages.whole(question, MODEL, answer)
    assert [block["type"] for block in content["content"]] == ["text", "tool_use", "text"]
    kept = [{name: one[name] for name in one.keys() - {"citations", "caller"}} for one in content["content"]]
    results = [{"type": "tool_result", "tool_use_id": answer.call_ids[0], "content": "noon"}]
    said = [("user", "hi"), ("assistant", kept), ("user", results)]
    turns = [{"role": role, "content": one} for role, one in said]
    also = messages.read({"model": MODEL, "max_tokens": 9, "messages": turns}, {})
    for asked in (back.ask, also.ask):
        assert [message["role"] for message in asked.messages] == ["user", "assistant", "tool"]
        assert of_message(asked.messages[1]) == of_answer(answer.text, [("now", {})])
