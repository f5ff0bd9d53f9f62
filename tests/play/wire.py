"""What went over the wire: each request as it reached the gateway, and the turn that answered it.

Rule: it reads along and changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.play.players.scenario import MARK

# The id of a turn stands at the beginning of its answer, in every dialect.
_NUM_READ = 4096
_TURN = re.compile(rb"turn-\d+-(\d+)")
_TEXTS = ("instructions", "system", "systemInstruction", "messages", "input", "contents")
_MOST = ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens")
_STOPS = ("stop", "stop_sequences", "stopSequences")
_MARK = re.compile(MARK)
_MESSAGE = re.compile(rb'"error":.{0,60}"message":"([^"]{1,80})')


@dataclass
class Request:
    sent: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)

    @property
    def turn(self) -> int | None:
        """Its number; None where there was no answer."""
        found = _TURN.search(bytes(self.answered))
        return None if found is None else int(found[1])

    @property
    def refused(self) -> str:
        """The beginning of why it was, for the last time; empty where it was answered."""
        found = _MESSAGE.search(bytes(self.answered))
        return "" if found is None or self.turn is not None else found[1].decode(errors="replace")

    @property
    def marks(self) -> list[str]:
        """Of the texts that agents wrote, in the order of the conversation."""
        body = self.body
        return [mark for name in _TEXTS for text in _strings(body.get(name)) for mark in marks_in(text)]

    @property
    def stops(self) -> Sequence[str]:
        given = next((self.options[name] for name in _STOPS if self.options.get(name)), ())
        return (given,) if isinstance(given, str) else given

    @property
    def max_tokens(self) -> int | None:
        return next((self.options[name] for name in _MOST if self.options.get(name) is not None), None)

    @property
    def options(self) -> dict[str, Any]:
        """Fields that stand at the top of a request, or one level deeper in Gemini's."""
        return {**self.body, **self.body.get("generationConfig", {})}

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.sent)
        return body


def marks_in(text: str) -> list[str]:
    return _MARK.findall(text)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


async def overheard(app: ASGIApp, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
    async def receive_too() -> Message:
        message = await receive()
        request.sent += message.get("body", b"")
        return message

    async def send_too(message: Message) -> None:
        request.answered += message.get("body", b"")[: _NUM_READ - len(request.answered)]
        await send(message)

    await app(scope, receive_too, send_too)
