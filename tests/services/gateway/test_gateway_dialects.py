"""One table of cases, played in every dialect, whole and as a stream: equal asks, equal answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo_core.messages import Message, ParameterSchema, ToolSchema
from services.gateway.dialects.dialect import Heading
from services.gateway.dialects.turns import AUTO, Answer, Piece, ToolChoice, Usage
from services.gateway.http.app import DIALECTS
from tests.services.gateway.fake_turns import MODEL, FakeTurns, Scripted, call, schema, serving, texts
from tests.services.gateway.speakers import SPEAKERS, Said, Speaker, Wire

ADD: ToolSchema = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": cast(ParameterSchema, schema("add", "a", "b")),
    },
}
NOW: ToolSchema = {
    "type": "function",
    "function": {"name": "now", "parameters": cast(ParameterSchema, schema("now"))},
}
USER: Message = {"role": "user", "content": "What is 2 + 3?"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}


def called(*calls: tuple[str, str, Any], text: str | None = None, reasoning: str = "") -> Message:
    message: Message = {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ],
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def result(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


@dataclass(frozen=True)
class Case:
    name: str
    scripted: Scripted
    messages: Sequence[Message] = (USER,)
    tools: Sequence[ToolSchema] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choice: ToolChoice = AUTO
    seed: int | None = None

    def sent(self, speaker: Speaker, body: Wire) -> Wire:
        """``body``, with the seed."""
        return body if self.seed is None else speaker.with_option(body, "seed", self.seed)


CASES = (
    Case("a question", Scripted("5")),
    Case("a system message", Scripted("5"), (SYSTEM, USER)),
    Case("what the assistant said before", Scripted("7"), (USER, {"role": "assistant", "content": "5"}, USER)),
    Case("a seed", Scripted("5"), seed=7),
    Case("another seed", Scripted("5"), seed=-(2**63)),
    Case("the seed nought", Scripted("5"), seed=0),
    Case("a bound of tokens", Scripted("The answ", finish="length"), max_tokens=4),
    Case("a text that stops", Scripted("5", stop_text="\n\n"), stop=("\n\n", "END")),
    Case("a call", Scripted(calls=(call("add", {"a": 2, "b": 3}),)), tools=(ADD, NOW)),
    Case("text and a call", Scripted("Let me see.", (call("add", {"a": 2, "b": 3}),)), tools=(ADD,)),
    Case("parallel calls", Scripted(calls=(call("add", {"a": 2, "b": 3}), call("now", {}))), tools=(ADD, NOW)),
    Case(
        "a call that was asked for",
        Scripted(calls=(call("now", {}),)),
        tools=(ADD, NOW),
        choice=ToolChoice("required"),
    ),
    Case(
        "a call of a tool that was named",
        Scripted(calls=(call("now", {}),)),
        tools=(ADD, NOW),
        choice=ToolChoice("required", "now"),
    ),
    Case("no calls wanted", Scripted("<tool_call>"), tools=(ADD, NOW), choice=ToolChoice("none")),
    Case("equal calls", Scripted(calls=(call("now", {}), call("now", {}))), tools=(NOW,)),
    Case(
        "results of parallel calls",
        Scripted("5"),
        (USER, called(("c1", "add", {"a": 2, "b": 3}), ("c2", "now", {})), result("c1", "5"), result("c2", "noon")),
        (ADD, NOW),
    ),
    Case(
        "several rounds of calls and a question",
        Scripted("Done."),
        (
            SYSTEM,
            USER,
            called(("c1", "add", {"a": 1}), text="First."),
            result("c1", "one"),
            called(("c2", "add", {"a": 2}), reasoning="Now the second."),
            result("c2", ""),
            called(("c3", "add", {}), ("c4", "add", {}), text="Two more.", reasoning="And the others."),
            result("c3", "three"),
            result("c4", "four"),
            {"role": "assistant", "content": "Both."},
            {"role": "user", "content": "Sure?"},
        ),
        (ADD,),
    ),
    Case("arguments that are a text", Scripted(calls=(call("add", "2 and 3"),)), tools=(ADD,)),
    Case("arguments that are a list", Scripted(calls=(call("add", [1, None, {"a": 1.5}]),)), tools=(ADD,)),
    Case("reasoning", Scripted("5", reasoning="2 and 3 make 5.")),
    Case("reasoning and a call", Scripted(calls=(call("now", {}),), reasoning="What time?"), tools=(NOW,)),
    Case("reasoning that was cut off", Scripted(reasoning="Well, if", finish="length"), max_tokens=3),
    Case("nothing", Scripted("")),
    Case("a call that was cut off behind another", Scripted("x", (call("now", {}),), finish="length"), tools=(NOW,)),
    Case(
        "added tokens and other writing",
        Scripted('<|im_end|>\u2028 é 数 😀\u0000\t"\\'),
        ({"role": "user", "content": "\u2029<tool_call>😀"},),
    ),
    Case("pieces that reach the end", Scripted("one two", pieces=texts(["one", " ", "two"]))),
    Case("pieces that do not", Scripted("one two", (call("now", {}),), pieces=texts(["one"])), tools=(NOW,)),
    Case(
        "pieces of reasoning and text",
        Scripted("one two", reasoning="a b", pieces=(*texts(["a", " b"], reasoning=True), *texts(["one", " tw"]))),
    ),
    Case("text behind a call", Scripted("one two", (call("now", {}),), num_behind=4), tools=(NOW,)),
    Case("text behind a call alone", Scripted("two", (call("now", {}),), num_behind=3, finish="length"), tools=(NOW,)),
    Case(
        "calls that are told before the end",
        Scripted(
            "one two",
            (call("add", {"a": 1}), call("now", {}), call("now", {})),
            pieces=(
                Piece("one", calls=(("call_{}_0", call("add", {"a": 1})),)),
                Piece(calls=(("call_{}_1", call("now", {})),)),
            ),
            num_behind=4,
        ),
        tools=(ADD, NOW),
    ),
    Case("pieces of reasoning alone", Scripted("x", reasoning="a b", pieces=texts(["a"], reasoning=True))),
)


def expected(scripted: Scripted, number: int = 0) -> Said:
    answer = scripted.answer(number)
    calls = [
        (call_id, one.name or "", one.arguments) for call_id, one in zip(answer.call_ids, answer.calls, strict=True)
    ]
    usage, versions = answer.usage, [{"start": 0, "end": 2, "version": 4}, {"start": 2, "end": 3, "version": 5}]
    counts = (usage.num_prompt_tokens, usage.num_stored_tokens, usage.num_sampled_tokens)
    return Said(
        answer.id, MODEL, answer.text, answer.reasoning, calls, answer.finish, answer.stop_text, *counts, versions
    )


@pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)
async def test_every_case_is_the_same_ask_and_the_same_answer(speaker: Speaker):
    cases = [case for case in CASES if speaker.has_stop or not case.stop]
    turns = FakeTurns([case.scripted for case in cases for _ in range(2)])
    async with serving(turns) as gateway:
        for number, case in enumerate(cases):
            body = case.sent(speaker, speaker.body(case.messages, case.tools, case.max_tokens, case.stop, case.choice))
            whole = await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)
            assert whole.status_code == 200, (case.name, whole.text)
            assert "x-gspo-ignored" not in whole.headers
            assert forget_stop(speaker.read(whole.json())) == forget_stop(expected(case.scripted, 2 * number)), (
                case.name
            )
            usage = {"stream_options": {"include_usage": True}} if "chat" in speaker.path else {}
            streamed = {**body, "stream": True, **usage}
            stream = await gateway.http.post(speaker.url(streamed), json=streamed, headers=speaker.headers)
            assert stream.headers["content-type"].startswith("text/event-stream")
            said = speaker.read_stream(stream.text)
            assert forget_stop(said) == forget_stop(expected(case.scripted, 2 * number + 1)), case.name
            first, second = turns.asks[-2:]
            assert first == second
            assert list(first.messages) == list(case.messages), case.name
            assert list(first.tools) == list(case.tools)
            assert (first.choice, first.seed) == (case.choice, case.seed)
            assert (first.stop, first.repeat_key, first.is_retry) == (case.stop, "", False)
            if "messages" not in speaker.path:
                assert first.max_tokens == case.max_tokens
    assert [one.fate for one in turns.answerings] == [["delivered", "dropped"]] * (2 * len(cases))


def forget_stop(said: Said) -> Said:
    """One dialect does not name the text that stopped a turn; those that do have their own test below."""
    said.stop_text = ""
    return said


async def test_equal_asks_have_equal_digests_in_every_dialect_and_others_do_not():
    turns = FakeTurns()
    cases = [case for case in CASES if not case.stop]
    async with serving(turns) as gateway:
        digests: dict[str, set[str]] = {}
        for case in cases:
            for speaker in SPEAKERS.values():
                body = speaker.body(case.messages, case.tools, case.max_tokens or 1000, choice=case.choice)
                await gateway.http.post(
                    speaker.url(case.sent(speaker, body)), json=case.sent(speaker, body), headers=speaker.headers
                )
                asked = str((case.messages, case.tools, case.max_tokens, case.choice, case.seed))
                digests.setdefault(asked, set()).add(turns.asks[-1].digest)
    assert all(len(found) == 1 for found in digests.values())
    assert len(set().union(*digests.values())) == len(digests)


def test_digests_of_requests_without_a_seed_are_those_that_earlier_releases_have_stored():
    asked = DIALECTS[SPEAKERS["chat"].path].read(SPEAKERS["chat"].body([USER]), {}).ask
    assert asked.digest == "e033857daafdefa0cdb749b36ca41f8ac2d45b1cd16737cefd03174a4b7d7539"


def test_the_order_of_keys_makes_no_other_ask():
    def digest(arguments: str, parameters: Any) -> str:
        history = called(("c1", "add", arguments))
        tool: ToolSchema = {"type": "function", "function": {"name": "add", "parameters": parameters}}
        body = SPEAKERS["chat"].body([USER, history, result("c1", "5")], [tool])
        return DIALECTS[SPEAKERS["chat"].path].read(body, {}).ask.digest

    first = digest('{"a": 1, "b": 2}', {"type": "object", "title": "x"})
    assert digest('{"b": 2, "a": 1}', {"title": "x", "type": "object"}) == first
    assert digest('{"b": 1, "a": 2}', {"title": "x", "type": "object"}) != first


@pytest.mark.parametrize("name", ["chat", "messages"])
async def test_the_text_that_stopped_a_turn_is_named_where_the_dialect_can(name: str):
    speaker = SPEAKERS[name]
    turns = FakeTurns([Scripted("5", stop_text="END")] * 2)
    async with serving(turns) as gateway:
        body = speaker.body([USER], stop=["END"])
        whole = await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)
        stream = await gateway.http.post(
            speaker.url({**body, "stream": True}), json={**body, "stream": True}, headers=speaker.headers
        )
    assert speaker.read(whole.json()).stop_text == speaker.read_stream(stream.text).stop_text == "END"


async def test_usage_is_streamed_only_when_it_is_asked_for():
    speaker = SPEAKERS["chat"]
    async with serving(FakeTurns()) as gateway:
        body = {**speaker.body([USER]), "stream": True}
        plain = await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)
        body["stream_options"] = {"include_usage": True}
        counted = await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)
    assert '"usage"' not in plain.text
    assert counted.text.count('"usage":null') == counted.text.count('"usage"') - 1


ANSWERS = st.builds(
    Scripted,
    text=st.text(st.characters(codec="utf-8"), max_size=12),
    calls=st.lists(
        st.builds(
            call,
            st.sampled_from(["add", "now"]),
            st.recursive(
                st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=4),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                max_leaves=5,
            ),
        ),
        max_size=3,
    ).map(tuple),
    reasoning=st.text(st.characters(codec="utf-8"), max_size=12),
    finish=st.sampled_from(["stop", "length"]),
    usage=st.builds(Usage, st.integers(9, 99), st.integers(0, 9), st.integers(1, 9)),
)


@given(
    scripted=ANSWERS,
    cuts=st.lists(st.integers(0, 12), max_size=4),
    num_behind=st.integers(0, 12),
    num_early=st.integers(0, 3),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("name", SPEAKERS)
def test_a_stream_cut_anywhere_tells_what_the_whole_answer_tells(
    name: str, scripted: Scripted, cuts: list[int], num_behind: int, num_early: int
):
    speaker = SPEAKERS[name]
    if scripted.calls:
        scripted = replace(scripted, num_behind=min(num_behind, len(scripted.text)))
    dialect, answer = DIALECTS[speaker.path], scripted.answer(0)
    if answer.calls and answer.finish == "stop":
        answer = replace(scripted, finish="tool_calls").answer(0)
    body = {**speaker.body([USER]), **({"stream_options": {"include_usage": True}} if name == "chat" else {})}
    question = dialect.read(body, {})
    writer = dialect.writer(question, Heading(answer.id, answer.created_at, MODEL, answer.usage.num_prompt_tokens))
    stream = writer.begin()
    for piece in pieces_of(answer, cuts, num_early):
        stream += writer.piece(piece) + writer.alive()
    stream += writer.end(answer)
    whole: Any = dialect.whole(question, MODEL, answer)
    assert speaker.read_stream(stream.decode()) == speaker.read(whole)


def pieces_of(answer: Answer, cuts: list[int], num_early: int) -> list[Piece]:
    """The pieces of an answer cut at these places; the last text and later calls are left to the end."""
    early = answer.named_calls[:num_early]
    ends = sorted({cut for cut in cuts if cut < len(answer.before)})
    if early:
        ends.append(len(answer.before))
    begins = [0, *ends]
    pieces = [Piece(text=answer.text[a:b]) for a, b in zip(begins, ends, strict=False)]
    thoughts = [Piece(reasoning=one) for one in answer.reasoning[: cuts[0] if cuts else 0]]
    if pieces:
        thoughts = [Piece(reasoning=one) for one in answer.reasoning]
    return [*thoughts, *pieces, *(Piece(calls=(one,)) for one in early)]
