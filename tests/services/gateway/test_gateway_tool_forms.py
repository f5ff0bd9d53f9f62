"""Tools that are no functions to their client: calls are told in their form, and come back as what was sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, ToolCall
from services.gateway.dialects.dialect import Heading, ParsedRequest
from services.gateway.dialects.turns import Answer, Usage
from services.gateway.http.app import DIALECTS
from tests.services.gateway.speakers import events

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
RESPONSES_TOOLS: list[JSON] = [
    {"type": "custom", "name": "patch", "description": "Patches.", "format": GRAMMAR},
    {
        "type": "namespace",
        "name": "team",
        "tools": [
            {"type": "function", "name": "ask", "parameters": {"type": "object"}},
            {"type": "custom", "name": "tell"},
        ],
    },
]
CHAT_TOOLS: list[JSON] = [{"type": "custom", "custom": {"name": "patch", "description": "Patches.", "format": GRAMMAR}}]
NAMES = {"chat": ["patch"], "responses": ["patch", "team__ask", "team__tell"]}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}
ARGUMENTS = st.one_of(
    st.builds(lambda text: {"input": text}, st.text()),
    st.dictionaries(st.text(max_size=3), st.one_of(st.text(), st.integers(0, 9), st.none()), max_size=2),
)
CALLS = st.lists(st.tuples(st.integers(0, 2), ARGUMENTS), min_size=1, max_size=3)
BOTH = pytest.mark.parametrize("dialect", PATHS)


def asked(dialect: str, *more: JSON) -> ParsedRequest:
    said: list[JSON] = [{"role": "user", "content": "Go."}, *more]
    body: Any = {"model": "m", "tools": CHAT_TOOLS, "messages": said}
    if dialect == "responses":
        body = {"model": "m", "tools": RESPONSES_TOOLS, "input": said}
    return DIALECTS[PATHS[dialect]].read(body, {})


def answer_of(calls: list[ToolCall]) -> Answer:
    ids = tuple(f"call_0_0_{place}" for place in range(len(calls)))
    return Answer("turn-0-0", "", tuple(calls), ids, "tool_calls", Usage(1, 0, 1), (), 7)


def a_call(name: str, arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, CallStatus.OK, "", 0, 0)


@BOTH
def test_the_policy_is_offered_functions_and_told_of_the_grammar(dialect: str) -> None:
    question = asked(dialect)
    tools: Any = question.ask.tools
    assert [one["function"]["name"] for one in tools] == NAMES[dialect]
    assert tools[0]["function"]["parameters"]["required"] == ["input"]
    assert tools[0]["function"]["description"] == "Patches.\n\nThe input follows this grammar:\nstart: /.+/"
    assert question.ignored == (("tools.custom.format",) if dialect == "chat" else ("tools.format",))
    assert question.unsupported == ()


@BOTH
@given(drawn=CALLS)
def test_what_was_sampled_comes_back_as_it_was(dialect: str, drawn: list[tuple[int, Any]]) -> None:
    names = NAMES[dialect]
    calls = [a_call(names[number % len(names)], arguments) for number, arguments in drawn]
    question, spoken = asked(dialect), DIALECTS[PATHS[dialect]]
    whole: Any = spoken.whole(question, "m", answer_of(calls))
    told = [whole["choices"][0]["message"]] if dialect == "chat" else whole["output"]
    if dialect == "chat":
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "x"} for one in told[0]["tool_calls"]]
        told = [{name: value for name, value in told[0].items() if value is not None}]
    else:
        kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
        results = [{"type": kinds[one["type"]], "call_id": one["call_id"], "output": "x"} for one in told]
    again: Any = asked(dialect, *told, *results).ask.messages
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in again[1]["tool_calls"]] == [
        (call.name, call.arguments) for call in calls
    ]
    assert [one["tool_call_id"] for one in again[2:]] == [one["id"] for one in again[1]["tool_calls"]]


@BOTH
def test_calls_are_told_in_the_form_of_their_tool(dialect: str) -> None:
    calls = [a_call(name, {"input": "*** Begin"}) for name in NAMES[dialect]]
    question, spoken = asked(dialect), DIALECTS[PATHS[dialect]]
    whole: Any = spoken.whole(question, "m", answer_of(calls))
    writer = spoken.writer(question, Heading("turn-0-0", 7, "m", 1))
    stream = list(events((writer.begin() + writer.end(answer_of(calls))).decode()))
    if dialect == "chat":
        custom = {"name": "patch", "input": "*** Begin"}
        wanted = [{"id": "call_0_0_0", "type": "custom", "custom": custom}]
        deltas: Any = [
            choice["delta"] for _, one in stream for choice in _choices(one) if "tool_calls" in choice["delta"]
        ]
        assert whole["choices"][0]["message"]["tool_calls"] == wanted
        assert [one["tool_calls"] for one in deltas] == [[{"index": 0, **wanted[0]}]]
        return
    output = whole["output"]
    assert [(one["type"], one["name"], one.get("namespace")) for one in output] == [
        ("custom_tool_call", "patch", None),
        ("function_call", "ask", "team"),
        ("custom_tool_call", "tell", "team"),
    ]
    assert [one.get("input") for one in output] == ["*** Begin", None, "*** Begin"]
    assert [one["item"] for name, one in stream if name == "response.output_item.done"] == output
    said: Any = [one["input"] for name, one in stream if name == "response.custom_tool_call_input.done"]
    pieces: Any = [one["delta"] for name, one in stream if name == "response.custom_tool_call_input.delta"]
    assert said == pieces == ["*** Begin"] * 2


def _choices(event: Mapping[str, Any]) -> Any:
    return event["choices"]


@BOTH
def test_a_tool_of_one_text_can_be_asked_for(dialect: str) -> None:
    choice: Any = (
        {"type": "custom", "custom": {"name": "patch"}} if dialect == "chat" else {"type": "custom", "name": "patch"}
    )
    said: Any = [{"role": "user", "content": "Go."}]
    body: Any = {"model": "m", "tools": CHAT_TOOLS, "messages": said, "tool_choice": choice}
    if dialect == "responses":
        body = {"model": "m", "tools": RESPONSES_TOOLS, "input": said, "tool_choice": choice}
    asked_for = DIALECTS[PATHS[dialect]].read(body, {}).ask.choice
    assert (asked_for.mode, asked_for.name) == ("required", "patch")
