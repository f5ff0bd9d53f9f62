"""Requests that hold every field that is acted on, in each dialect, with drawn texts, names and ids.

Rule: each object that the table of fields has a place for stands in them, so that any field can be put into it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.play.requirements.asking import CHAT, GEMINI, MESSAGES, RESPONSES, Body
from tests.play.requirements.texts import sentence

MOST_TOKENS = 6
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}


def _name(rng: random.Random, what: str) -> str:
    return f"{what}_{rng.getrandbits(32):08x}"


def _seed(rng: random.Random) -> int:
    return rng.getrandbits(62)


def chat(rng: random.Random) -> Body:
    function, custom = _name(rng, "function"), _name(rng, "custom")
    ids = _name(rng, "call"), _name(rng, "call")
    calls = [
        {"id": ids[0], "type": "function", "function": {"name": function, "arguments": '{"query": "a"}'}},
        {"id": ids[1], "type": "custom", "custom": {"name": custom, "input": sentence(rng)}},
    ]
    part = {"type": "text", "text": sentence(rng)}
    spoken = {"role": "assistant", "content": sentence(rng), "reasoning_content": sentence(rng), "tool_calls": calls}
    details = [{"type": "reasoning.text", "text": sentence(rng)}]
    named = ("function", function) if rng.random() < 0.5 else ("custom", custom)
    return {
        "model": "policy",
        "messages": [
            {"role": "user", "content": [part]},
            spoken,
            {"role": "tool", "tool_call_id": ids[0], "content": sentence(rng), "name": function},
            {"role": "tool", "tool_call_id": ids[1], "content": sentence(rng)},
            {"role": "assistant", "content": sentence(rng), "reasoning_details": details},
            {"role": "user", "content": sentence(rng)},
            {"role": "assistant", "content": sentence(rng), "reasoning": sentence(rng)},
            {"role": "user", "content": sentence(rng)},
        ],
        "tools": [
            {"type": "function", "function": {"name": function, "description": sentence(rng), "parameters": SCHEMA}},
            {"type": "custom", "custom": {"name": custom, "description": sentence(rng), "format": {"type": "text"}}},
        ],
        "max_tokens": MOST_TOKENS,
        "max_completion_tokens": MOST_TOKENS,
        "stop": [_name(rng, "stop")],
        "stream": False,
        "stream_options": {"include_usage": True},
        "tool_choice": {"type": named[0], named[0]: {"name": named[1]}},
        "parallel_tool_calls": False,
        "seed": _seed(rng),
    }


def responses(rng: random.Random) -> Body:
    function, custom, space = _name(rng, "function"), _name(rng, "custom"), _name(rng, "space")
    ids = _name(rng, "call"), _name(rng, "call")
    of_function = {"type": "function", "name": function, "description": sentence(rng), "parameters": SCHEMA}
    of_custom = {"type": "custom", "name": custom, "description": sentence(rng), "format": {"type": "text"}}
    call = {"type": "function_call", "call_id": ids[0], "name": function, "namespace": space, "arguments": "{}"}
    return {
        "model": "policy",
        "instructions": sentence(rng),
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": sentence(rng)}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": sentence(rng)}]},
            call,
            {
                "type": "function_call_output",
                "call_id": ids[0],
                "output": [{"type": "input_text", "text": sentence(rng)}],
                "name": function,
            },
            {"type": "custom_tool_call", "call_id": ids[1], "name": custom, "input": sentence(rng)},
            {"type": "custom_tool_call_output", "call_id": ids[1], "output": sentence(rng)},
            {"type": "message", "role": "user", "content": sentence(rng)},
        ],
        "tools": [
            of_function,
            of_custom,
            {"type": "namespace", "name": space, "tools": [{**of_function}, {**of_custom}]},
        ],
        "max_output_tokens": MOST_TOKENS,
        "stream": False,
        "text": {},
        "tool_choice": {"type": "function", "name": function},
        "parallel_tool_calls": False,
        "seed": _seed(rng),
    }


def messages(rng: random.Random) -> Body:
    name, call = _name(rng, "function"), _name(rng, "call")
    result = {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": sentence(rng)}]}
    return {
        "model": "policy",
        "max_tokens": MOST_TOKENS,
        "system": [{"type": "text", "text": sentence(rng)}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": sentence(rng)}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": sentence(rng)},
                    {"type": "text", "text": sentence(rng)},
                    {"type": "tool_use", "id": call, "name": name, "input": {"query": sentence(rng)}},
                ],
            },
            {"role": "user", "content": [result, {"type": "text", "text": sentence(rng)}]},
        ],
        "tools": [{"type": "custom", "name": name, "description": sentence(rng), "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": name, "disable_parallel_tool_use": True},
        "stop_sequences": [_name(rng, "stop")],
        "output_config": {},
        "stream": False,
        "seed": _seed(rng),
    }


def gemini(rng: random.Random) -> Body:
    name, other, call = _name(rng, "function"), _name(rng, "function"), _name(rng, "call")
    schema = {"type": "OBJECT", "properties": {"query": {"type": "STRING"}}}
    answered = {"functionResponse": {"id": call, "name": name, "response": {"output": sentence(rng)}}}
    return {
        "model": "policy",
        "stream": False,
        "systemInstruction": {"parts": [{"text": sentence(rng)}]},
        "contents": [
            {"role": "user", "parts": [{"text": sentence(rng)}]},
            {
                "role": "model",
                "parts": [
                    {"text": sentence(rng), "thought": True},
                    {"text": sentence(rng)},
                    {"functionCall": {"id": call, "name": name, "args": {"query": sentence(rng)}}},
                ],
            },
            {"role": "user", "parts": [answered]},
            {"role": "model", "parts": [{"text": sentence(rng)}]},
            {"role": "user", "parts": [{"text": sentence(rng)}]},
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {"name": name, "description": sentence(rng), "parameters": schema},
                    {"name": other, "description": sentence(rng), "parametersJsonSchema": SCHEMA},
                ]
            }
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": [name]}},
        "generationConfig": {"maxOutputTokens": MOST_TOKENS, "stopSequences": [_name(rng, "stop")], "seed": _seed(rng)},
    }


WHOLE: Mapping[str, Callable[[random.Random], Body]] = {
    CHAT: chat,
    RESPONSES: responses,
    MESSAGES: messages,
    GEMINI: gemini,
}


def objects_at(whole: Any, place: str) -> list[Body]:
    """All objects of a body that stand at a place of the table."""
    found = [whole]
    for step in filter(None, place.split(".")):
        name = step.removesuffix("[]")
        found = [one[name] for one in found if isinstance(one, dict) and name in one]
        if step.endswith("[]"):
            found = [inner for one in found if isinstance(one, list) for inner in one]
    return [one for one in found if isinstance(one, dict)]
