"""The `openai` package plays: both of its dialects, whole and as streams, with its own retries.

python play_openai.py AT_ONCE
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import openai
from scenario import LOOKUP, NOTE, ByHand, Call, Report, Said, serve


class Chat:
    """Messages go back as the package gave them."""

    has_stop = True

    def __init__(self, client: openai.OpenAI, system: str) -> None:
        self._client = client
        self._messages: list[Any] = [{"role": "system", "content": system}]
        self.other_tools = False

    def user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def results(self, results: Sequence[tuple[str, str]]) -> None:
        self._messages += [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results]

    def ask(self, *, stream: bool, choice: str, max_tokens: int | None, stop: Sequence[str]) -> Said:
        tools = [{"type": "function", "function": one} for one in ((LOOKUP,) if self.other_tools else (LOOKUP, NOTE))]
        named = choice not in ("auto", "none", "required")
        more: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": choice}} if named else choice}
        if choice == "auto":
            more = {}
        if max_tokens is not None:
            more["max_completion_tokens"] = max_tokens
        if stop:
            more["stop"] = list(stop)
        given: dict[str, Any] = {"model": "policy", "messages": self._messages, "tools": tools, **more}
        message = self._streamed(given) if stream else self._client.chat.completions.create(**given).choices[0].message
        self._messages.append(message)
        calls = message["tool_calls"] if isinstance(message, dict) and "tool_calls" in message else None
        if not isinstance(message, dict):
            return Said(message.content or "", [(one.id, one.function.name) for one in message.tool_calls or ()])
        return Said(message["content"] or "", [(one["id"], one["function"]["name"]) for one in calls or ()])

    def _streamed(self, given: dict[str, Any]) -> Any:
        """As the package's own examples put the pieces together."""
        text, calls, is_whole = "", dict[int, Any](), False
        for chunk in self._client.chat.completions.create(**given, stream=True):
            if not chunk.choices:
                continue
            delta = chunk.choices[0].delta
            is_whole |= chunk.choices[0].finish_reason is not None
            text += delta.content or ""
            for one in delta.tool_calls or ():
                known = calls.setdefault(
                    one.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                known["id"] += one.id or ""
                known["function"]["name"] += one.function.name or ""
                known["function"]["arguments"] += one.function.arguments or ""
        if not is_whole:
            raise ConnectionError("the stream broke off")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        return message | ({"tool_calls": list(calls.values())} if calls else {})

    def copy(self) -> Chat:
        other = copy.copy(self)
        other._messages = list(self._messages)
        return other

    def compacted(self, summary: str) -> Chat:
        other = self.copy()
        other._messages = [self._messages[0], {"role": "user", "content": summary}, self._messages[-1]]
        return other


class Responses:
    """Items go back as the package gave them."""

    has_stop = False

    def __init__(self, client: openai.OpenAI, system: str) -> None:
        self._client = client
        self._system = system
        self._items: list[Any] = []
        self._num_last = 0
        self.other_tools = False

    def user(self, text: str) -> None:
        self._items.append({"role": "user", "content": text})

    def results(self, results: Sequence[tuple[str, str]]) -> None:
        self._items += [{"type": "function_call_output", "call_id": one, "output": text} for one, text in results]

    def ask(self, *, stream: bool, choice: str, max_tokens: int | None, stop: Sequence[str]) -> Said:
        tools = [{"type": "function", **one} for one in ((LOOKUP,) if self.other_tools else (LOOKUP, NOTE))]
        named = choice not in ("auto", "none", "required")
        more: dict[str, Any] = {"tool_choice": {"type": "function", "name": choice} if named else choice}
        if choice == "auto":
            more = {}
        if max_tokens is not None:
            more["max_output_tokens"] = max_tokens
        given: dict[str, Any] = {"model": "policy", "instructions": self._system, "input": self._items, "tools": tools}
        response = self._streamed(given | more) if stream else self._client.responses.create(**given, **more)
        self._items = [*self._items, *response.output]
        self._num_last = len(response.output)
        calls = [(one.call_id, one.name) for one in response.output if one.type == "function_call"]
        return Said(response.output_text, calls)

    def _streamed(self, given: dict[str, Any]) -> Any:
        last = None
        for event in self._client.responses.create(**given, stream=True):
            if event.type in ("response.completed", "response.incomplete"):
                last = event.response
        assert last is not None
        return last

    def copy(self) -> Responses:
        other = copy.copy(self)
        other._items = list(self._items)
        return other

    def compacted(self, summary: str) -> Responses:
        """Right behind an answer."""
        other = self.copy()
        other._items = [{"role": "user", "content": summary}, *self._items[len(self._items) - self._num_last :]]
        return other


def play(call: Call) -> Report:
    with openai.OpenAI(base_url=call.base_url, api_key=call.api_key, timeout=300) as client:
        kind: Any = Chat if call.task["number"] % 2 else Responses
        return ByHand(call, lambda system: kind(client, system)).play()


if __name__ == "__main__":
    serve(play, int(sys.argv[1]))
