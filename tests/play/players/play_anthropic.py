"""The `anthropic` package plays, whole and as streams, with its own retries.

python play_anthropic.py AT_ONCE
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import anthropic
from scenario import LOOKUP, NOTE, ByHand, Call, Report, Said, serve


def tool(one: dict[str, Any]) -> dict[str, Any]:
    return {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}


class Messages:
    """Blocks go back as the package gave them."""

    has_stop = True

    def __init__(self, client: anthropic.Anthropic, system: str) -> None:
        self._client = client
        self._system = system
        self._messages: list[Any] = []
        self.other_tools = False

    def user(self, text: str) -> None:
        if self._messages and self._messages[-1]["role"] == "user":  # the results of tools
            block = {"type": "text", "text": text}
            self._messages[-1] = {"role": "user", "content": [*self._messages[-1]["content"], block]}
        else:
            self._messages.append({"role": "user", "content": text})

    def results(self, results: Sequence[tuple[str, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": one, "content": text} for one, text in results]
        self._messages.append({"role": "user", "content": blocks})

    def ask(self, *, stream: bool, choice: str, max_tokens: int | None, stop: Sequence[str]) -> Said:
        more: dict[str, Any] = {"stop_sequences": list(stop)} if stop else {}
        if choice in ("none", "required"):
            more["tool_choice"] = {"type": "any" if choice == "required" else "none"}
        elif choice != "auto":
            more["tool_choice"] = {"type": "tool", "name": choice}
        given: dict[str, Any] = {
            "model": "policy",
            "max_tokens": max_tokens or 512,
            "system": self._system,
            "messages": self._messages,
            "tools": [tool(one) for one in ((LOOKUP,) if self.other_tools else (LOOKUP, NOTE))],
            **more,
        }
        message = self._streamed(given) if stream else self._client.messages.create(**given)
        self._messages.append({"role": "assistant", "content": message.content})
        text = "".join(one.text for one in message.content if one.type == "text")
        return Said(text, [(one.id, one.name) for one in message.content if one.type == "tool_use"])

    def _streamed(self, given: dict[str, Any]) -> Any:
        with self._client.messages.stream(**given) as stream:
            return stream.get_final_message()

    def copy(self) -> Messages:
        other = copy.copy(self)
        other._messages = list(self._messages)
        return other

    def compacted(self, summary: str) -> Messages:
        other = self.copy()
        other._messages = [{"role": "user", "content": summary}, self._messages[-1]]
        return other


def play(call: Call) -> Report:
    base_url = call.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base_url, api_key=call.api_key, timeout=300) as client:
        return ByHand(call, lambda system: Messages(client, system)).play()


if __name__ == "__main__":
    serve(play, int(sys.argv[1]))
