"""What a conversation says, whatever spelling a client sends it in: the digests by which histories are compared.

Rule: ids of calls never count, only which call a result answers; of an assistant's message its words and calls count,
not its reasoning nor the blanks around it, because clients drop these. Everything else counts to the letter.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b

from gspo_core.chat.text import text_of
from gspo_core.json_value import JSON
from gspo_core.messages import Message, MessageCall, ToolSchema

_SIZE = 16
# Writing more at once holds the interpreter, so that nobody is answered meanwhile.
_PIECE_CHARS = 256 << 10
_INSTRUCTED = b"instructions"
# From here on JavaScript writes numbers without a fraction as it writes others.
_FIRST_WITH_EXPONENT = 1e21
_write = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def of_tools(tools: Sequence[ToolSchema]) -> bytes:
    return _digest(tools)


def of_messages(messages: Sequence[Message]) -> list[bytes]:
    """Digests each message where it stands.

    Raises ``NotText`` and, for arguments of calls in no known form, ``ValueError``.
    """
    return [_digest(said) for said in _all_said(messages)]


def prefixes(said: Sequence[bytes], root: bytes) -> list[bytes]:
    """The digest of each beginning of a conversation whose messages these are, from the empty one (``root``) to the
    whole."""
    chain = [root]
    for one in said:
        chain.append(blake2b(chain[-1] + one, digest_size=_SIZE).digest())
    return chain


def of_key(repeat_key: str) -> str:
    """Digests a key that a client chose, which may have any length."""
    return blake2b(repeat_key.encode("utf-8", "surrogatepass"), digest_size=_SIZE).hexdigest() if repeat_key else ""


def of_message(message: Message) -> bytes:
    """Digests one message by itself."""
    return of_messages([message])[0]


def num_opening(messages: Sequence[Message]) -> int:
    """The messages that a conversation is begun with: the instructions, and the first that is none."""
    found = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages) - 1)
    return found + 1


def of_opening(messages: Sequence[Message], said: Sequence[bytes]) -> bytes:
    """``said``: the digest of each message."""
    return prefixes(said[: num_opening(messages)], b"")[-1]


def of_instructions(messages: Sequence[Message], said: Sequence[bytes]) -> bytes:
    """Digests the instructions, which end at the first message that is none."""
    place = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return prefixes(said[:place], _INSTRUCTED)[-1]


def of_answer(text: str, calls: Sequence[tuple[str | None, JSON]]) -> bytes:
    """Digests an assistant's message; equal to ``of_message`` of the message that says the same."""
    return _digest(["assistant", text.strip(), [[name, arguments] for name, arguments in calls]])


def as_javascript_writes(value: JSON) -> JSON:
    """What becomes of a value that is read there and written again: 1.0 is 1, and of a large integer the digits go
    that 64 bits have no room for."""
    try:
        return _written(value)
    except RecursionError:  # nobody there reads it either
        return value


def _written(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {name: _written(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_written(one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        return value
    is_whole = abs(number) < _FIRST_WITH_EXPONENT and number.is_integer()
    return int(Decimal(repr(number))) if is_whole else number


def of_beginning(message: Message, num_chars: int) -> tuple[bytes, str]:
    """Digests an assistant's message up to so many characters of its text, with all its calls, and returns the text
    behind them too. Equal to ``of_answer`` of an answer of so many characters that it begins with."""
    text = text_of(message).strip()
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return _digest(["assistant", text[:num_chars], calls]), text[num_chars:]


def _all_said(messages: Sequence[Message]) -> Iterator[list[JSON]]:
    asked: dict[str, int] = {}
    for message in messages:
        role, text = message["role"], text_of(message)
        if role == "assistant":
            calls = message.get("tool_calls") or ()
            asked = {call["id"]: number for number, call in enumerate(calls) if "id" in call}
            yield [role, text.strip(), [_call(call) for call in calls]]
        elif role == "tool":
            call_id = message.get("tool_call_id", "")
            yield [role, text, asked.get(call_id, call_id)]
        else:
            yield [role, text]


def _call(call: MessageCall) -> JSON:
    function: Mapping[str, JSON] = call.get("function") or call  # type: ignore[assignment]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # as it stands, then
            arguments = json.loads(arguments) if arguments else {}
    return [function.get("name"), arguments]


def _digest(values: Sequence[object]) -> bytes:
    """Digests what ``_write`` makes of them, texts piece by piece."""
    found = blake2b(b"[", digest_size=_SIZE)
    for number, value in enumerate(values):
        found.update(b"," if number else b"")
        if not isinstance(value, str) or len(value) <= _PIECE_CHARS:
            found.update(_bytes_of(value))
            continue
        found.update(b'"')
        for begin in range(0, len(value), _PIECE_CHARS):
            found.update(_bytes_of(value[begin : begin + _PIECE_CHARS])[1:-1])
        found.update(b'"')
    found.update(b"]")
    return found.digest()


def _bytes_of(value: object) -> bytes:
    return _write(value).encode("utf-8", "surrogatepass")
