"""Reads reasoning, text and calls from the ids of one sampled turn, in the syntaxes that models were trained to write.

Rule: text is read from ids, never the other way round, and a call inside the reasoning does not count. Every attempt at
a call is kept with its status and the tokens it covers; none is repaired or run. The tool's runner checks arguments;
only a syntax without types (XML) consults schemas, to interpret values.
The codecs handle the conversation around the turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol, TypeAlias, cast

from gspo_core.chat.text import strict_json, strict_json_at, to_json
from gspo_core.chat.tokenizer import Tokenizer, require_token
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, Message, ParsedTurn, ToolCall, ToolSchema

Reading: TypeAlias = tuple[str | None, JSON, CallStatus]
"""Name, arguments and status of one attempt."""


class CallReader(Protocol):
    """One syntax of tool calls."""

    @property
    def opening_id(self) -> int | None:
        """The token that always begins a call, if the syntax has one."""
        ...

    def begin(self, ids: Sequence[int], start: int, tools: Sequence[ToolSchema] = ()) -> int:
        """Index of the first attempt at or after ``start``; ``len(ids)`` if there is none."""
        ...

    def read(self, ids: Sequence[int], begin: int, tools: Sequence[ToolSchema]) -> Iterator[ToolCall]:
        """The attempts from ``begin`` on. ``ids`` is the turn without its stop token."""
        ...

    def opening(self, name: str = "") -> Sequence[str | int]:
        """Texts and ids that begin a call, of the tool ``name`` if one is given, for the policy to go on from.

        Empty where the syntax has no beginning that the policy could be given."""
        ...


class NoCalls:
    """For models not known to write tool calls: all output is text."""

    opening_id = None

    def begin(self, ids: Sequence[int], start: int, tools: Sequence[ToolSchema] = ()) -> int:
        return len(ids)

    def read(self, ids: Sequence[int], begin: int, tools: Sequence[ToolSchema]) -> Iterator[ToolCall]:
        yield from ()

    def opening(self, name: str = "") -> Sequence[str | int]:
        return ()


class TaggedCalls:
    """Calls between the tokens ``<tool_call>`` and ``</tool_call>``; ``read_body`` reads their content."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        read_body: Callable[[str, Sequence[ToolSchema]], Reading],
        open_body: Callable[[str], str] | None = None,
    ) -> None:
        """``open_body``: how the content of a call of this tool, or of any for an empty name, begins."""
        self._tokenizer = tokenizer
        self._read_body = read_body
        self._open_body = open_body
        self.opening_id: int = require_token(tokenizer, "<tool_call>", "this syntax of tool calls")
        self._closing_id = require_token(tokenizer, "</tool_call>", "this syntax of tool calls")

    def begin(self, ids: Sequence[int], start: int, tools: Sequence[ToolSchema] = ()) -> int:
        return _find(ids, self.opening_id, start)

    def read(self, ids: Sequence[int], begin: int, tools: Sequence[ToolSchema]) -> Iterator[ToolCall]:
        position = begin
        while (position := self.begin(ids, position)) < len(ids):
            close = _find(ids, self._closing_id, position + 1)
            is_open, end = close == len(ids), min(close + 1, len(ids))
            raw = self._tokenizer.decode(ids[position + 1 : close])
            unclosed: Reading = (None, {}, CallStatus.UNCLOSED_BLOCK)
            name, arguments, status = unclosed if is_open else self._read_body(raw, tools)
            yield ToolCall(name, arguments, status, raw, position, end, is_final=not is_open)
            position = end

    def opening(self, name: str = "") -> Sequence[str | int]:
        return () if self._open_body is None else (self.opening_id, self._open_body(name))


def _find(ids: Sequence[int], token: int, start: int) -> int:
    """Index of ``token`` at or after ``start``; ``len(ids)`` if absent."""
    try:
        return ids.index(token, start)
    except ValueError:
        return len(ids)


class LlamaCalls:
    """Llama 3: the whole turn is a call, ``{"name": ..., "parameters": {...}}``, or several separated by ``;``.

    Only its shape marks a call: an object with the name of a tool, or with any name and parameters. Another is an
    answer in JSON, and then text may go on behind it; unreadable text that starts like a call is an attempt.
    """

    opening_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tag = tokenizer.token_id("<|python_tag|>")

    def begin(self, ids: Sequence[int], start: int, tools: Sequence[ToolSchema] = ()) -> int:
        if self._tag is not None and self._tag in ids[start:]:
            return ids.index(self._tag, start)
        names = {one["function"]["name"] for one in tools}
        return start if _is_llama_attempt(self._tokenizer.decode(ids[start:]), names) else len(ids)

    def read(self, ids: Sequence[int], begin: int, tools: Sequence[ToolSchema]) -> Iterator[ToolCall]:
        if begin == len(ids):
            return
        body = begin + (ids[begin] == self._tag)
        text = self._tokenizer.decode(ids[body:])
        position, start = 0, begin
        while True:
            (name, arguments, status), stop = _read_llama(text, position)
            end = len(ids) if stop >= len(text) else self._token_behind(ids, body, stop)
            yield ToolCall(name, arguments, status, text[position:stop].strip(), start, end)
            if end == len(ids):
                return
            position, start = stop + 1, end

    def opening(self, name: str = "") -> Sequence[str | int]:
        return (f'{{"name": {to_json(name)}, "parameters":' if name else '{"name":',)

    def _token_behind(self, ids: Sequence[int], body: int, num_chars: int) -> int:
        """The first token that begins after ``num_chars`` characters and the separator that follows."""
        low, high = body, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self._tokenizer.decode(ids[body:middle])) <= num_chars:
                low = middle + 1
            else:
                high = middle
        return low


def read_hermes(raw: str, tools: Sequence[ToolSchema]) -> Reading:
    """``{"name": ..., "arguments": {...}}``."""
    try:
        value = strict_json(raw)
    except ValueError:
        return None, {}, CallStatus.INVALID_JSON
    return _named(value, "arguments")


def open_hermes(name: str) -> str:
    """It ends where a token does: the blank before a value is part of the value's first token."""
    return f'\n{{"name": {to_json(name)}, "arguments":' if name else "\n"


def read_qwen_xml(raw: str, tools: Sequence[ToolSchema]) -> Reading:
    """``<function=NAME> <parameter=KEY> value </parameter> ... </function>``, as Qwen3-Coder and Qwen3.5 write it."""
    function = _XML_FUNCTION.fullmatch(raw)
    if function is None:
        return None, {}, CallStatus.MALFORMED_STRUCTURE
    name, body = function[1].strip(), function[2]
    types = _parameter_types(name, tools)
    arguments: dict[str, JSON] = {}
    position = 0
    for parameter in _XML_PARAMETER.finditer(body):
        key = parameter[1].strip()
        if body[position : parameter.start()].strip() or key in arguments:
            return name or None, arguments, CallStatus.MALFORMED_STRUCTURE
        arguments[key] = _typed(parameter[2], types.get(key, ()))
        position = parameter.end()
    if body[position:].strip():
        return name or None, arguments, CallStatus.MALFORMED_STRUCTURE
    return (name, arguments, CallStatus.OK) if name else (None, arguments, CallStatus.MISSING_NAME)


def open_qwen_xml(name: str) -> str:
    return f"\n<function={name}>\n" if name else "\n<function="


def read_glm_xml(raw: str, tools: Sequence[ToolSchema]) -> Reading:
    """``NAME <arg_key>KEY</arg_key> <arg_value>value</arg_value> ...``, as GLM-4.5 and later write it."""
    name, key, rest = raw.partition("<arg_key>")
    name, body = name.strip(), key + rest
    types = _parameter_types(name, tools)
    arguments: dict[str, JSON] = {}
    position = 0
    for pair in _GLM_ARGUMENT.finditer(body):
        argument = pair[1].strip()
        if body[position : pair.start()].strip() or argument in arguments:
            return name or None, arguments, CallStatus.MALFORMED_STRUCTURE
        arguments[argument] = _typed(pair[2], types.get(argument, ()))
        position = pair.end()
    if body[position:].strip() or "\n" in name:
        return name or None, arguments, CallStatus.MALFORMED_STRUCTURE
    return (name, arguments, CallStatus.OK) if name else (None, arguments, CallStatus.MISSING_NAME)


def open_glm_xml(name: str) -> str:
    return f"{name}\n" if name else ""


_LLAMA_CALL = re.compile(r'\s*\{\s*"(name|parameters|arguments|function)"\s*:')
_LLAMA_KEYS = frozenset({"name", "parameters", "arguments", "function", "type"})
_XML_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
# One newline on each side belongs to the syntax, the rest to the value.
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _named(value: JSON, *argument_keys: str) -> Reading:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None, {}, CallStatus.MISSING_NAME
    return name, next((value[key] for key in argument_keys if key in value), {}), CallStatus.OK


def _is_llama_attempt(text: str, names: Collection[str]) -> bool:
    """Whatever names a tool is one. Else it has a name and arguments, in a string by mistake, or only arguments."""
    if not _LLAMA_CALL.match(text):
        return False
    try:
        value, _ = strict_json_at(text, text.index("{"))
    except ValueError:
        return True
    if not isinstance(value, dict):
        return False
    inner = value.get("function")
    named = [value.get("name"), inner.get("name") if isinstance(inner, dict) else None]
    if any(isinstance(name, str) and name in names for name in named):
        return True
    if not any(isinstance(value.get(key), dict | str) for key in ("parameters", "arguments")):
        return False
    return isinstance(value.get("name"), str) or value.keys() <= _LLAMA_KEYS


def _read_llama(text: str, position: int) -> tuple[Reading, int]:
    """One attempt and its end: the ``;`` before the next one, or the end of the text."""
    begin = position + len(text[position:]) - len(text[position:].lstrip())
    try:
        value, end = strict_json_at(text, begin)
    except ValueError:
        return (None, {}, CallStatus.INVALID_JSON), len(text)
    rest = text[end:].lstrip()
    if rest and not rest.startswith(";"):
        return (None, {}, CallStatus.INVALID_JSON), len(text)
    if not rest[1:].strip():
        return _named(value, "parameters", "arguments"), len(text)
    return _named(value, "parameters", "arguments"), text.index(";", end)


def _parameter_types(name: str, tools: Sequence[ToolSchema]) -> dict[str, list[str]]:
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = cast("dict[str, JSON]", tool["function"].get("parameters") or {})  # as its author wrote it
            properties = parameters.get("properties")
            found = properties.items() if isinstance(properties, dict) else ()
            return {key: _types_of(one, parameters) for key, one in found}
    return {}


def _types_of(schema: JSON, whole: JSON, followed: set[str] | None = None) -> list[str]:
    """Those that it names. What is no object names none: ``true`` is a schema too, which anything satisfies.

    ``whole``: where its references lead. One that leads nowhere, or was ``followed`` before, is taken for an object."""
    followed = set() if followed is None else followed
    if not isinstance(schema, dict):
        return []
    if "type" in schema:
        return [one for one in _several(schema["type"]) if isinstance(one, str)]
    if isinstance(reference := schema.get("$ref"), str):
        found = None if reference in followed else _referenced(reference, whole)
        followed.add(reference)
        return ["object"] if found is None else _types_of(found, whole, followed)
    for one in _several(schema.get("allOf")):
        if types := _types_of(one, whole, followed):
            return types
    choices = [one for name in ("anyOf", "oneOf") for one in _several(schema.get(name)) if isinstance(one, dict)]
    return [name for one in choices for name in _types_of(one, whole, followed) or ["object"]]


def _referenced(reference: str, whole: JSON) -> JSON:
    """What a JSON pointer within the schema names; None where that is nothing."""
    found = whole
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if reference.startswith("#/") else None


def _several(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else [value]


def _typed(text: str, types: Collection[str]) -> JSON:
    """The text as a value of the parameter's types, as far as they are known; itself if it does not convert."""
    plain = text.strip()
    if "null" in types and plain in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    if plain in _PYTHON_WORDS:  # templates write these in Python spelling
        return _PYTHON_WORDS[plain]
    try:
        return strict_json(plain)
    except ValueError:
        return text


_PYTHON_WORDS: dict[str, bool | None] = {"True": True, "False": False, "None": None}


class TurnReader:
    """One per codec; stateless."""

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: Sequence[int], calls: CallReader, *, opens_thought: bool = False
    ) -> None:
        """``opens_thought``: the generation prompt ends inside a think block."""
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_ids)
        self._calls = calls
        self.opens_thought = opens_thought
        self.think, self.think_end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")

    def read(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSchema] | None = None,
        *,
        opens_thought: bool | None = None,
    ) -> ParsedTurn:
        """Parse a turn. With ``tools``, calls to others get the status ``unknown_tool``."""
        ids = self._without_stop(sampled_ids)
        complete = len(ids) < len(sampled_ids)
        opens_thought = self.opens_thought if opens_thought is None else opens_thought
        thought, begin, is_open = self._split_thought(ids, opens_thought)
        first_call = self._calls.begin(ids, begin, tools or ())
        text = "" if is_open else self._tokenizer.decode(ids[begin:first_call]).strip()
        calls = () if is_open else tuple(self._read_calls(ids, first_call, tools))
        # A call ended the reasoning; if its own end comes later, the call was a part of it.
        may_be_thought = (opens_thought or self.think in ids[:begin]) and self.think_end not in ids[:begin]
        if may_be_thought:
            calls = tuple(replace(call, is_final=False) for call in calls)
        reasoning = self._tokenizer.decode(thought).strip()
        return ParsedTurn(text, calls, complete and not is_open, reasoning, begin, may_be_thought)

    def message(self, sampled_ids: Sequence[int], turn: ParsedTurn, *, as_text: bool = False) -> Message:
        """The turn as a history message; ``as_text`` writes its calls as sampled."""
        message: Message = {"role": "assistant"}
        if as_text:
            ids = self._without_stop(sampled_ids)
            message["content"] = self._tokenizer.decode(ids[self._split_thought(ids, self.opens_thought)[1] :]).strip()
        else:
            message["content"] = turn.text
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls and not as_text:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        return message

    def opening(self, name: str = "") -> Sequence[str | int]:
        """Texts and ids that begin a turn which is a call; empty where the syntax has no beginning of one."""
        call = self._calls.opening(name)
        if call and self.opens_thought and self.think_end is not None:
            return ("\n", self.think_end, "\n\n", *call)
        return call

    def end_of_open_thought(self, sampled_ids: Sequence[int]) -> list[int]:
        """The token that closes the reasoning where the turn broke off in it; empty elsewhere."""
        is_open = self._split_thought(self._without_stop(sampled_ids), self.opens_thought)[2]
        return [self.think_end] if is_open and self.think_end is not None else []

    def is_thinking(self, prefix_ids: Sequence[int], sampled_ids: Sequence[int], header_id: int) -> bool:
        """Whether a think block is open after these ids; ``header_id`` begins a message."""
        for token in chain(reversed(sampled_ids), reversed(prefix_ids)):
            if token in (self.think_end, self._calls.opening_id, header_id):
                return False
            if token == self.think:
                return True
        return False

    def _without_stop(self, sampled_ids: Sequence[int]) -> list[int]:
        ids = list(sampled_ids)
        for stop in self._stop_ids:
            if stop in ids:
                del ids[ids.index(stop) :]
        return ids

    def _split_thought(self, ids: Sequence[int], opens_thought: bool) -> tuple[Sequence[int], int, bool]:
        """The reasoning, the start of the rest, and whether the reasoning is still open. Reasoning comes first: a
        think block after other text is text."""
        opening = ids.index(self.think) if self.think in ids else -1
        is_first = opening >= 0 and not self._tokenizer.decode(ids[:opening]).strip()
        begin = opening + 1 if is_first else 0
        if self.think_end is None or not (opens_thought or is_first):
            return [], 0, False
        if self.think_end in ids[begin:]:
            end = ids.index(self.think_end, begin)
            return ids[begin:end], end + 1, False
        if self._calls.opening_id is not None and self._calls.opening_id in ids[begin:]:  # a call closes the reasoning
            end = ids.index(self._calls.opening_id, begin)
            return ids[begin:end], end, False
        return ids[begin:], len(ids), True

    def _read_calls(self, ids: Sequence[int], begin: int, tools: Sequence[ToolSchema] | None) -> Iterator[ToolCall]:
        names = None if tools is None else {tool["function"]["name"] for tool in tools}
        for call in self._calls.read(ids, begin, tools or ()):
            is_foreign = call.status is CallStatus.OK and names is not None and call.name not in names
            yield replace(call, status=CallStatus.UNKNOWN_TOOL) if is_foreign else call


def can_be_written(turn: ParsedTurn) -> bool:
    """Whether its calls can be rendered as calls again: each names a tool and passes an object."""
    readable = (CallStatus.OK, CallStatus.UNKNOWN_TOOL)
    return all(call.status in readable and isinstance(call.arguments, dict) for call in turn.calls)
