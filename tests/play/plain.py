"""Plays by hand in each dialect without any package: what the wire says, and nothing around it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import httpx

from services.gateway.dialects.turns import ToolChoice
from tests.patience import HANG_S
from tests.play.players.scenario import LOOKUP, NOTE, Call, Said, Wire
from tests.services.gateway.fake_turns import KEY
from tests.services.gateway.speakers import SPEAKERS

TOOLS = [{"type": "function", "function": LOOKUP}, {"type": "function", "function": NOTE}]
CHOICES = {"auto": ToolChoice(), "none": ToolChoice("none"), "required": ToolChoice("required")}
TRIES = 5


class Plain:
    """A conversation in the words of all dialects, which its speaker writes in its own."""

    def __init__(self, dialect: str, call: Call, system: str) -> None:
        self._speaker = SPEAKERS[dialect]
        self._call = call
        self._messages: list[Any] = [{"role": "system", "content": system}]
        self.has_stop = self._speaker.has_stop
        self.other_tools = False

    def user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def results(self, results: Sequence[tuple[str, str]]) -> None:
        self._messages += [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results]

    def ask(self, *, stream: bool, choice: str, max_tokens: int | None, stop: Sequence[str]) -> Said:
        chosen = CHOICES.get(choice) or ToolChoice("required", choice)
        tools: Any = TOOLS[:1] if self.other_tools else TOOLS
        body: Wire = self._speaker.body(self._messages, tools, max_tokens, stop, chosen)
        if stream:
            body["stream"] = True
            body |= {"stream_options": {"include_usage": True}} if "chat" in self._speaker.path else {}
        answer = self._post(body)
        said = self._speaker.read_stream(answer) if stream else self._speaker.read(json.loads(answer))
        message: Wire = {"role": "assistant", "content": said.text}
        if said.calls:
            functions = [(call_id, {"name": name, "arguments": value}) for call_id, name, value in said.calls]
            message["tool_calls"] = [{"id": one, "type": "function", "function": two} for one, two in functions]
        if said.text or said.calls:  # some clients leave out what says nothing
            self._messages.append(message)
        return Said(said.text, [(call_id, name) for call_id, name, _ in said.calls])

    def _post(self, body: Wire) -> str:
        """Again where it is told to, or got no answer, and says so; as packages do, which leave the rest to others."""
        names = {name: value.replace(KEY, self._call.api_key) for name, value in self._speaker.headers.items()}
        url = self._call.base_url.removesuffix("/v1") + self._speaker.url(body)
        for number in range(TRIES):
            headers = {**names, "x-stainless-retry-count": str(number)}
            try:
                with httpx.stream("POST", url, json=body, headers=headers, timeout=HANG_S, trust_env=False) as answer:
                    text = _whole(answer)
            except httpx.TransportError:
                continue
            if answer.status_code != 503:
                assert answer.status_code == 200, text
                return text
        raise AssertionError("no answer")

    def copy(self) -> Plain:
        other = copy.copy(self)
        other._messages = copy.deepcopy(self._messages)
        return other

    def write_back(self, words: str) -> None:
        self._messages[-1]["content"] += words

    def compacted(self, summary: str) -> Plain:
        other = self.copy()
        last = [one for one in self._messages if one["role"] == "assistant"][-1:]
        other._messages = [self._messages[0], {"role": "user", "content": summary}, *copy.deepcopy(last)]
        return other


def _whole(answer: httpx.Response) -> str:
    try:
        answer.read()
    except httpx.TransportError as error:
        raise ConnectionError("the answer broke off") from error
    return answer.text
