"""Nothing that an agent sends is passed over in silence: each field of the table, and fields that are in none."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gspo_core.json_value import JSON
from services.gateway.dialects.anthropic_messages import AnthropicMessages
from services.gateway.dialects.dialect import HISTORIES, ParsedRequest
from services.gateway.dialects.fields import ANTHROPIC_MESSAGES, GEMINI, OPENAI_CHAT, OPENAI_RESPONSES
from services.gateway.dialects.sent import Decided, Fields, Harmless, Only, Read, Rule
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.gateway.http.app import DIALECTS
from tests.services.gateway.fake_turns import FakeTurns, serving
from tests.services.gateway.speakers import SPEAKERS, Wire

TABLES: dict[str, Fields] = {
    "chat": OPENAI_CHAT,
    "responses": OPENAI_RESPONSES,
    "messages": ANTHROPIC_MESSAGES,
    "gemini": GEMINI,
}
# A request of each dialect that has an object at every place of its table.
_CALL: Wire = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
_TOOL: Wire = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
FULL: dict[str, Wire] = {
    "chat": {
        "model": "policy",
        "stream_options": {},
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "tools": [{"type": "function", "function": {**_TOOL}}],
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "one"}],
                "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
                "tool_calls": [_CALL],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "two", "name": "add"},
        ],
    },
    "responses": {
        "model": "policy",
        "text": {},
        "tool_choice": {"type": "function", "name": "add"},
        "tools": [{"type": "function", **_TOOL}],
        "input": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "two"}]},
        ],
    },
    "messages": {
        "model": "policy",
        "max_tokens": 10,
        "output_config": {},
        "tool_choice": {"type": "any"},
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "two"}]},
                ],
            },
        ],
    },
}
FULL["gemini"] = {
    "model": "policy",
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}},
    "generationConfig": {"maxOutputTokens": 10},
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "tools": [{"functionDeclarations": [{"name": "add", "parameters": {"type": "OBJECT"}}]}],
    "contents": [
        {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"output": "two"}}}]},
    ],
}
# Another one, for places of which a request has either.
_TEXT_TOOL: Wire = {"name": "patch", "description": "Patches.", "format": {"type": "text"}}
FULL_TOO: dict[str, Wire] = {
    "chat": {
        "model": "policy",
        "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
        "tools": [{"type": "custom", "custom": _TEXT_TOOL}],
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "x"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "two"},
        ],
    },
    "responses": {
        "model": "policy",
        "tools": [{"type": "namespace", "name": "more", "tools": [{"type": "function", **_TOOL}]}],
        "input": [{"role": "user", "content": "one"}],
    },
    "messages": {"model": "policy", "messages": []},
    "gemini": {"model": "policy", "contents": [{"parts": [{"text": "one"}]}]},
}
ROWS = [
    pytest.param(dialect, place, name, rule, id=f"{dialect}-{place}-{name}")
    for dialect, table in TABLES.items()
    for place, fields in table.items()
    for name, rule in fields.items()
]


def objects(value: JSON, place: str = "") -> Iterator[tuple[str, dict[str, JSON]]]:
    """Every object of a request, with its place."""
    if isinstance(value, dict):
        yield place, value
        for name, inner in value.items():
            yield from objects(inner, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from objects(inner, f"{place}[{index}]")


def with_field(dialect: str, place: str, name: str, value: Any) -> tuple[Wire, str]:
    """The full request with a field more, and the place of that field."""
    for body in copy.deepcopy((FULL[dialect], FULL_TOO[dialect])):
        for found, one in objects(body):
            if re.sub(r"\[\d+\]", "[]", found) == place:
                one[name] = value
                return body, f"{found}.{name}".lstrip(".")
    raise AssertionError(f"the full request has nothing at {place}")


def read(dialect: str, body: Wire) -> tuple[str, ...]:
    """The ignored fields of a request, for a job that has nothing passed over."""
    question = DIALECTS[SPEAKERS[dialect].path].read(body, {})
    if question.unsupported:
        raise question.unsupported[0]
    return question.ignored


@pytest.mark.parametrize("dialect", TABLES)
def test_the_full_request_has_an_object_at_every_place_and_is_read(dialect: str):
    assert read(dialect, FULL[dialect]) == ()
    assert dialect == "messages" or read(dialect, FULL_TOO[dialect]) == ()
    found = {re.sub(r"\[\d+\]", "[]", place) for body in (FULL, FULL_TOO) for place, _ in objects(body[dialect])}
    assert found >= set(TABLES[dialect])


@pytest.mark.parametrize(("dialect", "place", "name", "rule"), ROWS)
def test_each_field_does_what_the_table_says(dialect: str, place: str, name: str, rule: Rule):
    if isinstance(rule, Read):
        return  # the conformance cases
    body, where = with_field(dialect, place, name, {"something": "else"})
    if isinstance(rule, Only):
        with pytest.raises(Refusal) as refused:
            read(dialect, body)
        assert (refused.value.kind, refused.value.param) == (RefusalKind.INVALID, where)
        assert refused.value.message.startswith(f"{where} ")
        for value in (*rule.values, None):
            assert read(dialect, with_field(dialect, place, name, value)[0]) == ()
    elif isinstance(rule, Decided):
        assert read(dialect, body) == (re.sub(r"\[\d+\]", "", where),)
        for value in (*rule.idle, None):
            assert read(dialect, with_field(dialect, place, name, value)[0]) == ()
    else:
        assert isinstance(rule, Harmless)
        assert read(dialect, body) == ()


@pytest.mark.parametrize(("dialect", "place"), [(dialect, place) for dialect in TABLES for place in TABLES[dialect]])
def test_a_field_that_is_in_no_table_is_refused_by_its_name(dialect: str, place: str):
    for value in (1, None):
        body, where = with_field(dialect, place, "unheard_of", value)
        with pytest.raises(Refusal, match="does not know") as refused:
            read(dialect, body)
        assert refused.value.param == where


@pytest.mark.parametrize(("dialect", "place", "name", "rule"), ROWS)
def test_a_job_may_have_said_what_is_not_acted_on_but_for_what_answers_need(
    dialect: str, place: str, name: str, rule: Rule
):
    body, where = with_field(dialect, place, name, {"something": "else"})
    if not isinstance(rule, Only):
        return
    dialects = DIALECTS[SPEAKERS[dialect].path]
    if rule.is_vital or place.startswith(("messages", "input", "system", "contents")):
        with pytest.raises(Refusal):
            dialects.read(body, {})
    else:
        question = dialects.read(body, {})
        assert [(one.kind, one.param) for one in question.unsupported] == [(RefusalKind.INVALID, where)]
        fulls = [one for one in (FULL[dialect], FULL_TOO[dialect]) if any(one.get(name) for name in HISTORIES)]
        assert question.ask in [dialects.read(one, {}).ask for one in fulls]


def test_an_answer_of_no_use_is_no_answer_also_where_much_is_passed_over():
    """Whoever sends these has not sent the conversation, or reads the answer elsewhere."""
    vital = {name for table in TABLES.values() for name, rule in table[""].items() if getattr(rule, "is_vital", False)}
    assert vital == {
        *("previous_response_id", "conversation", "prompt", "background", "background_options"),
        *("functions", "function_call", "cachedContent"),
    }


_CHAT_TOOLS: Wire = {"tools": [{"type": "function", "function": {**_TOOL}}]}
MISFITS: tuple[tuple[str, Wire, str], ...] = (
    ("chat", {"model": None}, "model"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": "hello"}, "messages"),
    ("chat", {"messages": [1]}, "messages[0]"),
    ("chat", {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": "x", "tool_calls": [_CALL]}]}, "messages[0].tool_calls"),
    ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ("chat", {"tools": [{"type": "custom"}]}, "tools[0].custom"),
    ("chat", {"tools": [{"type": "function", "custom": {}, "function": {**_TOOL}}]}, "tools[0].custom"),
    ("chat", {"tools": [{"type": "grep"}]}, "tools[0]"),
    ("responses", {"tools": [{"type": "function", **_TOOL, "format": {"type": "text"}}]}, "tools[0].format"),
    ("responses", {"tools": [{"type": "custom", "name": "p", "parameters": {}}]}, "tools[0].parameters"),
    (
        "responses",
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]},
        "tools[0].tools[0]",
    ),
    (
        "responses",
        {"tools": [{"type": "namespace", "name": "n", "tools": [], "parameters": {}}]},
        "tools[0].parameters",
    ),
    ("chat", {"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools[1]"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("chat", {"max_tokens": True}, "max_tokens"),
    *(("chat", {"seed": one}, "seed") for one in (True, 1.0, "7", 2**63, -(2**63) - 1)),
    ("responses", {"seed": "7"}, "seed"),
    ("messages", {"seed": "7"}, "seed"),
    ("chat", {"stop": ["a", ""]}, "stop[1]"),
    ("chat", {"stop": ["a"] * 17}, "stop"),
    ("chat", {"stream": "yes"}, "stream"),
    ("chat", {"n": True}, "n"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ("chat", {**_CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    ("chat", {**_CHAT_TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ("chat", {**_CHAT_TOOLS, "tool_choice": 1}, "tool_choice"),
    ("chat", {**_CHAT_TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ("responses", {"tool_choice": "required"}, "tool_choice"),
    ("responses", {"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ("responses", {"input": []}, "input"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ("responses", {"input": [{"type": "custom_tool_call", "call_id": "x"}]}, "input[0].name"),
    ("responses", {"input": [{"type": "local_shell_call", "call_id": "x"}]}, "input[0]"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ("responses", {"input": [{"role": "user", "content": "x", "call_id": "c"}]}, "input[0].call_id"),
    ("responses", {"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ("responses", {"tools": [{"type": "local_shell"}]}, "tools[0]"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"store": True}, "store"),
    ("messages", {"max_tokens": None}, "max_tokens"),
    ("messages", {"messages": []}, "messages"),
    ("messages", {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("messages", {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "messages"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "name": "y"}]}]},
        "messages[0].content[0].name",
    ),
    ("messages", {"tools": [{"name": "bash"}]}, "tools[0].input_schema"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ("messages", {"tool_choice": {"type": []}}, "tool_choice.type"),
    (
        "messages",
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use",
    ),
    ("chat", {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ("responses", {"instructions": [{"type": "input_text", "text": "Be brief."}]}, "instructions"),
    ("responses", {"instructions": [{"role": "system", "content": "Be brief."}]}, "instructions"),
    ("responses", {"input": [{"role": "user", "content": [{"type": ["input_text"]}]}]}, "input[0].content[0]"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]}, "messages[0].content[0]"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]}, "messages[0].content[0]"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0].content[0]"),
    ("messages", {"system": [{"type": ["text"], "text": "x"}]}, "system[0]"),
    (
        "responses",
        {"tools": [{"type": "namespace", "name": "n", "description": 1, "tools": []}]},
        "tools[0].description",
    ),
)


@pytest.mark.parametrize(("dialect", "changes", "param"), MISFITS)
def test_what_cannot_be_acted_on_is_refused_by_the_place_where_it_stands(dialect: str, changes: Wire, param: str):
    body = SPEAKERS[dialect].body([{"role": "user", "content": "x"}]) | changes
    with pytest.raises(Refusal) as refused:
        read(dialect, body)
    assert (refused.value.kind, refused.value.param) == (RefusalKind.INVALID, param), refused.value.message


def test_who_asks_for_the_size_of_a_prompt_names_no_bound():
    body = SPEAKERS["messages"].body([{"role": "user", "content": "x"}])
    del body["max_tokens"]
    assert AnthropicMessages(counts=True).read(body, {}).ask.max_tokens is None


async def test_the_client_is_told_what_the_job_decides_and_which_model_answers():
    async with serving(FakeTurns()) as gateway:
        for name, speaker in SPEAKERS.items():
            body = speaker.with_option(speaker.body([{"role": "user", "content": "x"}]), "temperature", 0.5)
            body = speaker.with_option(body, "topP" if name == "gemini" else "top_p", None)
            ignored = "generationConfig.temperature" if name == "gemini" else "temperature"
            model = "modelVersion" if name == "gemini" else "model"
            plain = await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)
            assert plain.headers["x-gspo-ignored"] == ignored, name
            base = await gateway.http.post(
                speaker.url({**body, "model": "base"}), json={**body, "model": "base"}, headers=speaker.headers
            )
            assert (base.headers["x-gspo-ignored"], base.json()[model]) == (ignored, "base")
            other = {**body, "model": "gpt-5", "stream": True}
            foreign = await gateway.http.post(speaker.url(other), json=other, headers=speaker.headers)
            assert foreign.headers["x-gspo-ignored"] == f"{ignored},model"
            assert f'"{model}":"policy"' in foreign.text
            assert "gpt-5" not in foreign.text


async def test_names_of_speakers_are_ignored_but_not_in_silence():
    message = {"role": "user", "content": "x", "name": "Ann"}
    async with serving(FakeTurns()) as gateway:
        body = SPEAKERS["chat"].body([]) | {"messages": [message]}
        answer = await gateway.http.post(SPEAKERS["chat"].path, json=body, headers=SPEAKERS["chat"].headers)
    assert answer.headers["x-gspo-ignored"] == "messages.name"


NONCE = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};"


def asked(dialect: str, changes: Wire) -> ParsedRequest:
    speaker = SPEAKERS[dialect]
    body = speaker.body([{"role": "user", "content": "x"}]) | changes
    question = DIALECTS[speaker.path].read(body, {})
    if question.unsupported:
        raise question.unsupported[0]
    return question


def test_texts_that_differ_in_each_request_are_left_out_and_named():
    """As Claude Code sends them: every turn would be a branch."""
    rules = {"type": "text", "text": "You help."}
    blocks = [[{"type": "text", "text": NONCE.format(nonce)}, rules] for nonce in ("1f3", "a07")]
    first, second = (asked("messages", {"system": one}) for one in blocks)
    assert first.ask == second.ask == asked("messages", {"system": [rules]}).ask
    assert "volatile.claude_code_billing" in first.ignored
    inside = asked("messages", {"system": f"{NONCE.format(1)}\nYou help."})
    assert inside.ask == first.ask
    quoted = {"messages": [{"role": "user", "content": NONCE.format(1)}]}
    assert NONCE.format(1) in str(asked("messages", quoted).ask.messages)


def test_tools_of_a_provider_are_left_out_and_named():
    own = {"name": "add", "input_schema": {"type": "object"}}
    found = asked("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, own]})
    assert [one["function"]["name"] for one in found.ask.tools] == ["add"]
    assert "tools.web_search_20250305" in found.ignored
    searched = asked("responses", {"tools": [{"type": "web_search"}]})
    assert (searched.ask.tools, searched.ignored) == ((), ("tools.web_search",))


def test_what_is_said_of_tools_together_is_shown_to_nobody_and_named():
    together: Wire = {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "ask"}]}
    described = asked("responses", {"tools": [together | {"description": "Of the team."}]})
    assert described.ignored == ("tools.namespace.description",)
    plain = asked("responses", {"tools": [together | {"description": ""}]})
    assert (plain.ask.digest, plain.ignored) == (described.ask.digest, ())


@pytest.mark.parametrize(
    ("dialect", "changes"),
    [
        ("chat", {"parallel_tool_calls": False}),
        ("responses", {"parallel_tool_calls": False}),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
def test_one_call_a_turn_can_be_asked_for(dialect: str, changes: Wire):
    tools = {
        "chat": [{"type": "function", "function": {"name": "add"}}],
        "responses": [{"type": "function", "name": "add"}],
        "messages": [{"name": "add", "input_schema": {"type": "object"}}],
    }[dialect]
    several, single = asked(dialect, {"tools": tools}), asked(dialect, {"tools": tools} | changes)
    assert (several.ask.single_call, single.ask.single_call) == (False, True)
    assert several.ask.digest != single.ask.digest
    assert asked(dialect, changes).ask.digest == asked(dialect, {}).ask.digest  # without tools it asks for nothing
    keeps = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    assert asked("messages", keeps).ask == asked("messages", {}).ask
