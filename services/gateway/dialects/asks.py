"""Makes the ask of a request: messages in one canonical form, and the digest by which equal requests are known.

Rule: two requests that mean the same turn have equal asks, in whatever dialect they came. Texts that a harness puts
into its instructions and that differ from one request to the next, a nonce or a checksum, are dropped before anything
is compared or rendered, or each turn of such an agent would be a new branch that reads everything again. Nothing is
dropped in silence: the answer names it, and it is counted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import msgspec

from gspo_core import strict_json
from gspo_core.json_value import JSON
from gspo_core.messages import Message, MessageCall, ParameterSchema, ToolSchema
from services.gateway.dialects.sent import FieldValue, Reader
from services.gateway.dialects.turns import AUTO, ToolChoice, TurnRequest

MAX_KEY_CHARS = 256
# Each is looked for in all that is sampled.
MAX_STOPS = 16
# What is told, and counted, of texts that are left out: this and their name.
VOLATILE = "volatile."
TEXT_TYPES = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text", "reasoning.text"})
_VOLATILE_TEXTS: Mapping[str, re.Pattern[str]] = {
    # Claude Code: "x-anthropic-billing-header: cc_version=...; cc_entrypoint=...; cch=NONCE;", a block of its own.
    "claude_code_billing": re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE),
}


def make_ask(
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    choice: ToolChoice,
    max_tokens: int | None,
    stop: Sequence[str],
    headers: Mapping[str, str],
    seed: FieldValue | None = None,
    *,
    single_call: bool = False,
) -> TurnRequest:
    count = headers.get("x-stainless-retry-count", "0")
    return with_digest(
        TurnRequest(
            messages=tuple(messages),
            tools=tuple(tools),
            choice=choice,
            max_tokens=max_tokens,
            stop=tuple(stop),
            repeat_key=_repeat_key(headers),
            is_retry=count.isdecimal() and bool(count.strip("0")),
            seed=None if seed is None else seed.seed(),
            single_call=single_call,
        )
    )


def with_digest(ask: TurnRequest) -> TurnRequest:
    """That of what ``ask`` says."""
    # Without a seed as before there were seeds: digests are kept over releases.
    seeds = [] if ask.seed is None else [ask.seed]
    singles = ["single call"] if ask.single_call else []
    said = [ask.messages, ask.tools, ask.choice, ask.max_tokens, ask.stop, *seeds, *singles]
    canonical = msgspec.json.encode(said, order="sorted")
    return replace(ask, digest=hashlib.sha256(canonical).hexdigest(), num_bytes=len(canonical))


def _repeat_key(headers: Mapping[str, str]) -> str:
    key = headers.get("idempotency-key", "")
    if len(key) > MAX_KEY_CHARS:
        raise FieldValue(None, "Idempotency-Key").fault(f"may have at most {MAX_KEY_CHARS} characters")
    return key


def read_text(reader: Reader, content: FieldValue) -> str:
    """A text, or parts of text, which are one text."""
    if isinstance(content.value, str):
        return content.value
    return "".join(read_part(reader, part) for part in content.items())


def read_instructions(reader: Reader, content: FieldValue) -> str:
    """As ``read_text``, without what differs from one request to the next."""
    whole = isinstance(content.value, str)
    return stable(reader, [content.text()] if whole else [read_part(reader, part) for part in content.items()])


def stable(reader: Reader, texts: Iterable[str]) -> str:
    """Instructions without what differs from one request to the next, which is noted."""
    kept = list[str]()
    for text in texts:
        text, names = without_volatile(text)
        kept.append(text)
        for name in names:
            reader.ignore(f"{VOLATILE}{name}")
    return "".join(kept)


def without_volatile(text: str) -> tuple[str, list[str]]:
    """``text`` as it means the same in every request, and the names of what is left out."""
    names = list[str]()
    for name, pattern in _VOLATILE_TEXTS.items():
        text, count = pattern.subn("", text)
        if count:
            names.append(name)
    return text, names


def read_part(reader: Reader, part: FieldValue) -> str:
    kind = part.object().get("type")
    if not isinstance(kind, str) or kind not in TEXT_TYPES:
        raise part.fault(f"is of type {kind}, and the policy reads text only")
    taken = reader.take(part)
    taken.need("type")
    text = taken.need("text").text()
    taken.end("a part of text")
    return text


def is_single(parallel_tool_calls: FieldValue | None) -> bool:
    return parallel_tool_calls is not None and not parallel_tool_calls.flag()


def read_stop(stop: FieldValue | None) -> list[str]:
    if stop is None:
        return []
    texts = [stop.name()] if isinstance(stop.value, str) else [one.name() for one in stop.items()]
    if len(texts) > MAX_STOPS:
        raise stop.fault(f"may hold at most {MAX_STOPS} texts")
    return texts


def call(call_id: FieldValue, name: FieldValue, arguments: JSON) -> MessageCall:
    return {"id": call_id.name(), "type": "function", "function": {"name": name.name(), "arguments": arguments}}


def parsed(arguments: FieldValue) -> JSON:
    """The object that the text of arguments holds; any other text as it is, since a policy may have written it."""
    text = arguments.text()
    try:
        value = strict_json.parse(text)
    except strict_json.TextRejected:
        return text
    is_sayable = not strict_json.has_half_a_character(text.encode(), value)
    return value if isinstance(value, dict) and is_sayable else text


def tool(name: FieldValue, description: FieldValue | None, parameters: FieldValue | None) -> ToolSchema:
    schema: ToolSchema = {"type": "function", "function": {"name": name.name()}}
    if description is not None:
        schema["function"]["description"] = description.text()
    if parameters is not None:
        schema["function"]["parameters"] = cast(ParameterSchema, parameters.object())
    return schema


def choose(sent: FieldValue, choice: ToolChoice, tools: Sequence[ToolSchema]) -> ToolChoice:
    """``choice`` if it can be had with these tools. Raises ``Refusal``."""
    if choice.mode != "required":
        return choice if tools else AUTO
    if not tools:
        raise sent.fault("asks for a call, and there are no tools")
    if choice.name and choice.name not in (tool["function"]["name"] for tool in tools):
        raise sent.fault(f"names {choice.name}, which is none of the tools")
    return choice


def distinct(tools: Iterable[tuple[FieldValue, ToolSchema]]) -> list[ToolSchema]:
    seen: dict[str, ToolSchema] = {}
    for sent, schema in tools:
        name = schema["function"]["name"]
        if name in seen:
            raise sent.fault(f"is a second tool named {name}")
        seen[name] = schema
    return list(seen.values())


def not_empty(messages: list[Message], sent: FieldValue) -> list[Message]:
    if not messages:
        raise sent.fault("must hold at least one message")
    return messages
