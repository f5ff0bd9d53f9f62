"""A request for a turn in any dialect, and what its answer says: the same conversation, the same numbers.

Rule: it knows the dialects from their public shapes, and takes nothing from the gateway's own code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, RESPONSES, MESSAGES, GEMINI = DIALECTS = ("chat", "responses", "messages", "gemini")
PATHS: Mapping[str, str] = {
    CHAT: "/v1/chat/completions",
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
    GEMINI: "/v1beta/models/policy:generateContent",
}
STREAM_PATH = "/v1beta/models/policy:streamGenerateContent?alt=sse"
KEY_HEADERS: Mapping[str, str] = {MESSAGES: "x-api-key", GEMINI: "x-goog-api-key"}
"""Where clients of a dialect put their key, if not into ``authorization``."""
IGNORED = "x-gspo-ignored"
MOST_TOKENS = 48
TIMEOUT_S = 120.0

Said = tuple[str, str]
"""The role (system, user or assistant) and the text."""
Body = dict[str, Any]


@dataclass(frozen=True)
class Function:
    """A tool without a dialect."""

    name: str
    description: str = ""


def body(dialect: str, said: Sequence[Said], tools: Sequence[Function] = (), most: int = MOST_TOKENS) -> Body:
    return {CHAT: _chat, RESPONSES: _responses, MESSAGES: _messages, GEMINI: _gemini}[dialect](said, tools, most)


def _parameters() -> Body:
    return {"type": "object", "properties": {"query": {"type": "string"}}}


def _chat(said: Sequence[Said], tools: Sequence[Function], most: int) -> Body:
    offered = [{"type": "function", "function": {**_named(one), "parameters": _parameters()}} for one in tools]
    asked = {
        "model": "policy",
        "max_tokens": most,
        "messages": [{"role": role, "content": text} for role, text in said],
    }
    return asked | ({"tools": offered} if tools else {})


def _responses(said: Sequence[Said], tools: Sequence[Function], most: int) -> Body:
    offered = [{"type": "function", **_named(one), "parameters": _parameters()} for one in tools]
    given = [{"role": role, "content": text} for role, text in said]
    return {"model": "policy", "max_output_tokens": most, "input": given} | ({"tools": offered} if tools else {})


def _messages(said: Sequence[Said], tools: Sequence[Function], most: int) -> Body:
    offered = [{**_named(one), "input_schema": _parameters()} for one in tools]
    system = [{"type": "text", "text": text} for role, text in said if role == "system"]
    given = [{"role": role, "content": text} for role, text in said if role != "system"]
    asked = {"model": "policy", "max_tokens": most, "messages": given}
    return asked | ({"system": system} if system else {}) | ({"tools": offered} if tools else {})


def _gemini(said: Sequence[Said], tools: Sequence[Function], most: int) -> Body:
    roles = {"user": "user", "assistant": "model"}
    offered = [{**_named(one), "parametersJsonSchema": _parameters()} for one in tools]
    system = [{"text": text} for role, text in said if role == "system"]
    given = [{"role": roles[role], "parts": [{"text": text}]} for role, text in said if role != "system"]
    asked = {"contents": given, "generationConfig": {"maxOutputTokens": most}}
    more = {"systemInstruction": {"parts": system}} if system else {}
    return asked | more | ({"tools": [{"functionDeclarations": offered}]} if tools else {})


def _named(one: Function) -> Body:
    return {"name": one.name, "description": one.description}


@dataclass(frozen=True)
class Answered:
    """What came of a request."""

    status: int
    fault: str = ""
    """Of one that was refused: all that its answer says."""
    ignored: tuple[str, ...] = ()
    trace: str = ""
    id: str = ""
    text: str = ""
    calls: tuple[str, ...] = ()
    """Names of the tools that are called."""
    prompt: int = 0
    cached: int = 0
    """Of the prompt: tokens that were stored before."""
    sampled: int = 0
    versions: tuple[tuple[int, int, int], ...] = ()
    """Start, end and version."""
    told: Body = field(default_factory=dict)

    @property
    def is_answer(self) -> bool:
        return self.status == 200

    @property
    def turn(self) -> int:
        return int(self.id.rpartition("-")[2])


class Asker:
    """Somebody with a key. Threads may share it."""

    def __init__(self, http: httpx.Client, url: str, key: str) -> None:
        """``url``: of the gateway, without a version."""
        self._http, self._url, self.key = http, url.removesuffix("/v1"), key

    def ask(self, dialect: str, asked: Body, headers: Mapping[str, str] | None = None) -> Answered:
        """For a turn, as a whole."""
        answer = self.post(PATHS[dialect], asked, self.of(dialect) | dict(headers or {}))
        return read(dialect, answer)

    def of(self, dialect: str) -> dict[str, str]:
        """The key, where clients of the dialect put it."""
        header = KEY_HEADERS.get(dialect)
        return {"authorization": f"Bearer {self.key}"} if header is None else {header: self.key}

    def post(self, path: str, asked: Any, headers: Mapping[str, str]) -> httpx.Response:
        return self._http.post(f"{self._url}{path}", json=asked, headers=dict(headers), timeout=TIMEOUT_S)

    def get(self, path: str, headers: Mapping[str, str]) -> httpx.Response:
        return self._http.get(f"{self._url}{path}", headers=dict(headers), timeout=TIMEOUT_S)

    def streamed(self, dialect: str, asked: Body) -> tuple[httpx.Response, list[Body]]:
        """The events of an answer."""
        path = STREAM_PATH if dialect == GEMINI else PATHS[dialect]
        asked = asked if dialect == GEMINI else asked | {"stream": True}
        answer = self.post(path, asked, self.of(dialect))
        return answer, events(answer.text)


def events(text: str) -> list[Body]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read(dialect: str, answer: httpx.Response) -> Answered:
    ignored = tuple(filter(None, answer.headers.get(IGNORED, "").split(",")))
    if answer.status_code != 200:
        return Answered(answer.status_code, fault=answer.text, ignored=ignored)
    if "text/event-stream" in answer.headers["content-type"]:
        return Answered(200, ignored=ignored, told={"events": events(answer.text)})
    told = answer.json()
    taken = {CHAT: _of_chat, RESPONSES: _of_responses, MESSAGES: _of_messages, GEMINI: _of_gemini}[dialect](told)
    return Answered(
        200, ignored=ignored, trace=answer.headers.get("x-gspo-trace", ""), versions=spans(told), told=told, **taken
    )


def spans(told: Body) -> tuple[tuple[int, int, int], ...]:
    return tuple((one["start"], one["end"], one["version"]) for one in told["policy_version"])


def _of_chat(told: Body) -> Body:
    message, usage = told["choices"][0]["message"], told["usage"]
    calls = [(one.get("function") or one.get("custom"))["name"] for one in message.get("tool_calls", ())]
    return {"id": told["id"], "text": message["content"] or "", "calls": tuple(calls), **of_chat_usage(usage)}


def of_chat_usage(usage: Body) -> Body:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"prompt": usage["prompt_tokens"], "cached": cached, "sampled": usage["completion_tokens"]}


def _of_responses(told: Body) -> Body:
    said = [part["text"] for item in told["output"] if item["type"] == "message" for part in item["content"]]
    calls = [item["name"] for item in told["output"] if item["type"] in ("function_call", "custom_tool_call")]
    return {"id": told["id"], "text": "".join(said), "calls": tuple(calls), **of_responses_usage(told["usage"])}


def of_responses_usage(usage: Body) -> Body:
    cached = usage["input_tokens_details"]["cached_tokens"]
    return {"prompt": usage["input_tokens"], "cached": cached, "sampled": usage["output_tokens"]}


def _of_messages(told: Body) -> Body:
    said = "".join(one["text"] for one in told["content"] if one["type"] == "text")
    calls = tuple(one["name"] for one in told["content"] if one["type"] == "tool_use")
    return {"id": told["id"], "text": said, "calls": calls, **of_messages_usage(told["usage"])}


def of_messages_usage(usage: Body) -> Body:
    cached = usage["cache_read_input_tokens"]
    return {"prompt": usage["input_tokens"] + cached, "cached": cached, "sampled": usage["output_tokens"]}


def _of_gemini(told: Body) -> Body:
    parts = told["candidates"][0]["content"]["parts"]
    said = "".join(one["text"] for one in parts if "text" in one and not one.get("thought"))
    calls = tuple(one["functionCall"]["name"] for one in parts if "functionCall" in one)
    return {"id": told["responseId"], "text": said, "calls": calls, **of_gemini_usage(told["usageMetadata"])}


def of_gemini_usage(usage: Body) -> Body:
    sampled = usage["candidatesTokenCount"] + usage["thoughtsTokenCount"]
    return {"prompt": usage["promptTokenCount"], "cached": usage["cachedContentTokenCount"], "sampled": sampled}
