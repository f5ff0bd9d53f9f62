"""A policy behind any API that speaks OpenAI's chat completions.

Rule: the API gets only what the user asked for: no sampling parameter is sent unless it was given. A request that may
succeed later is sent again for a while; one that never will ends the evaluation. A turn that the API cut off is cut
off, not complete.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httpx

from gspo_core.chat.text import strict_json
from gspo_core.env import Llm, ParsedTurn, Start, ToolCall, ToolSchema
from gspo_core.evaluation.policy import PolicyFailed, PolicyTurn, PolicyUnusable
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, Message, MessageCall
from gspo_core.spec import EpisodeLimits
from gspo_core.types import StopReason

_AGAIN = frozenset({408, 409, 425, 429})
_NEVER = frozenset({401, 403, 404, 405})
_PAUSE_S = (0.5, 30.0)
_EXCERPT_CHARS = 300
_IS_JSON = {"Content-Type": "application/json"}
# In the words of several APIs, our own gateway among them.
_TOO_LONG = ("context_length_exceeded", "context length", "context window", "maximum context", "too many tokens")


@dataclass(frozen=True, slots=True)
class Api:
    """An address, and what every request to it carries."""

    base_url: str
    """Ends before `/chat/completions`."""
    model: str
    key: str | None = field(default=None, repr=False)
    body: Mapping[str, JSON] = field(default_factory=dict)
    """Further fields of each request, such as a temperature."""
    patience_s: float = 300.0
    """How long a request is sent again before its episode has failed."""


class ChatCompletions:
    """Ask within its ``client``, which the caller closes."""

    def __init__(self, api: Api, client: httpx.AsyncClient, clock: Callable[[], float]) -> None:
        self._api = api
        self._client = client
        self._clock = clock
        self._jitter = random.Random(0)

    def converse(self, name: str, seed: int, limits: EpisodeLimits) -> _Conversation:
        return _Conversation(self, limits)

    def llm(self, name: str) -> Llm:
        return Llm(self._api.base_url, self._api.key or "none", self._api.model, name)

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Mapping[str, Any] | StopReason:
        """The answer's JSON, or why the conversation is too long."""
        told = {"tools": list(tools)} if tools else {}
        body = {"model": self._api.model, "messages": list(messages), **told, **self._api.body}
        content = _utf8(body)
        began, pause_s = self._clock(), _PAUSE_S[0]
        while True:
            wait_s = pause_s
            try:
                url = f"{self._api.base_url}/chat/completions"
                answer = await self._client.post(url, content=content, headers=_IS_JSON)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except httpx.RequestError as error:  # what came cannot be unpacked
                raise PolicyFailed(f"policy: {type(error).__name__}: {error}") from None
            else:
                if answer.is_success:
                    return _object(answer)
                problem = f"status {answer.status_code}: {answer.text[:_EXCERPT_CHARS]}"
                if answer.status_code == 400 and any(words in answer.text.lower() for words in _TOO_LONG):
                    return StopReason.CONTEXT_OVERFLOW
                if answer.status_code in _NEVER:
                    raise PolicyUnusable(f"{self._api.base_url} answers {problem}")
                if not _may_succeed_later(answer):
                    raise PolicyFailed(f"policy: {problem}")
                wait_s = max(pause_s, _retry_after_s(answer))
            if self._clock() - began + wait_s > self._api.patience_s:
                raise PolicyFailed(f"policy: no answer for {self._api.patience_s:g}s: {problem}")
            # Apart from each other, or all come again at once.
            await asyncio.sleep(wait_s * self._jitter.uniform(1.0, 1.25))
            pause_s = min(2 * pause_s, _PAUSE_S[1])


class _Conversation:
    def __init__(self, policy: ChatCompletions, limits: EpisodeLimits) -> None:
        self._policy = policy
        self._messages: list[Message] = []
        self._tools: Sequence[ToolSchema] = ()

    def begin(self, start: Start) -> StopReason | None:
        self._messages, self._tools = list(start.messages), start.tools
        return None

    async def answer(self, max_tokens: int) -> PolicyTurn | StopReason:
        answer = await self._policy.complete(self._messages, self._tools)
        if isinstance(answer, StopReason):
            return answer
        return read_answer(answer, {tool["function"]["name"] for tool in self._tools})

    def read(self, turn: PolicyTurn, messages: Sequence[Message]) -> StopReason | None:
        # Some refuse to be shown earlier reasoning.
        said = {key: value for key, value in turn.message.items() if key != "reasoning_content"}
        ids = iter([call["id"] for call in turn.message.get("tool_calls", ())])
        self._messages.append(cast(Message, said))
        for message in messages:
            if message["role"] == "tool":
                answered: Message = {"role": "tool", "tool_call_id": next(ids, "call"), "content": message["content"]}
                self._messages.append(answered)
            else:
                self._messages.append(message)
        return None


def read_answer(answer: Mapping[str, Any], tools: set[str]) -> PolicyTurn:
    """The first choice of a chat completion. Raises ``PolicyFailed``."""
    try:
        choice = answer["choices"][0]
        given, finish = choice["message"], choice.get("finish_reason")
        text, thought = _said(given.get("content"))
        calls = [_message_call(number, call) for number, call in enumerate(given.get("tool_calls") or ())]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise PolicyFailed(f"policy: its answer is no chat completion: {type(error).__name__}: {error}") from None
    if finish == "content_filter":
        raise PolicyFailed("policy: its answer was withheld by a content filter")
    reasoning = given.get("reasoning_content") or given.get("reasoning") or thought
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = str(reasoning)
    if calls:
        message["tool_calls"] = calls
    parsed = ParsedTurn(
        text, tuple(_read_call(call, tools) for call in calls), complete=finish != "length", reasoning=str(reasoning)
    )
    tokens = (answer.get("usage") or {}).get("completion_tokens")
    stop = StopReason.MAX_TOKENS if finish == "length" else None
    return PolicyTurn(parsed, message, tokens if isinstance(tokens, int) else None, stop)


def _said(content: object) -> tuple[str, str]:
    """The text of a content, and what was thought where it is a list of parts. Raises ``PolicyFailed``."""
    if content is None or isinstance(content, str):
        return content or "", ""
    text, thought = "", ""
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": "text", "text": str(piece)}:
                text += piece
            case {"type": "thinking", "thinking": str() | list() as pieces}:
                thought += _said(pieces)[0]
            case _:
                raise PolicyFailed(f"policy: its content is no text: {str(part)[:_EXCERPT_CHARS]}")
    return text, thought


def _message_call(number: int, call: Mapping[str, Any]) -> MessageCall:
    function = call["function"]
    name, arguments = function["name"], function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": str(call.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": str(name), "arguments": text},
    }


def _read_call(call: MessageCall, tools: set[str]) -> ToolCall:
    name, text = call["function"]["name"], str(call["function"]["arguments"])
    try:
        arguments = strict_json(text)
    except ValueError:
        return ToolCall(name, {}, CallStatus.INVALID_JSON, text, 0, 1)
    return ToolCall(name, arguments, CallStatus.OK if name in tools else CallStatus.UNKNOWN_TOOL, text, 0, 1)


def _object(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        found = json.loads(_utf8(answer.json()))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PolicyFailed(f"policy: its answer is not JSON: {answer.text[:_EXCERPT_CHARS]}")
    return found


def _utf8(value: object) -> bytes:
    """As JSON, with a question mark for half of a surrogate pair: APIs and tools write such, which UTF-8 cannot."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _may_succeed_later(answer: httpx.Response) -> bool:
    said = answer.headers.get("x-should-retry")
    return said != "false" and (said == "true" or answer.status_code >= 500 or answer.status_code in _AGAIN)


def _retry_after_s(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("retry-after", "0")))
    except ValueError:  # a date
        return 0.0


async def only_model(base_url: str, client: httpx.AsyncClient) -> str:
    """The one model that an API has. Raises ``PolicyUnusable``."""
    try:
        answer = await client.get(f"{base_url}/models")
        names = [str(one["id"]) for one in answer.json()["data"]] if answer.is_success else []
        problem = f"status {answer.status_code}: {answer.text[:_EXCERPT_CHARS]}"
    except (httpx.RequestError, ValueError, KeyError, TypeError) as error:
        raise PolicyUnusable(f"{base_url}/models cannot be read: {type(error).__name__}: {error}") from None
    if len(names) == 1:
        return names[0]
    has = f"has {len(names)} models, such as {', '.join(names[:3])}" if names else f"names no model ({problem})"
    raise PolicyUnusable(f"{base_url} {has}: write {base_url}#MODEL")
