"""Google's Gemini API, ``generateContent``.

A stream is whole answers, each with more parts, as events without names. Between them no comment may stand, because
Google's packages take each line for data; signs of life are empty lines. An error in the middle is a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gspo_core.json_value import JSON
from gspo_core.messages import ToolSchema
from services.gateway.dialects import asks
from services.gateway.dialects.dialect import Heading, ParsedRequest, StreamState, spans
from services.gateway.dialects.faults import Fault
from services.gateway.dialects.fields import GEMINI
from services.gateway.dialects.gemini_contents import read_contents, read_instructions
from services.gateway.dialects.gemini_schema import as_json_schema
from services.gateway.dialects.sent import FieldValue, Reader
from services.gateway.dialects.spelling import in_camel_case
from services.gateway.dialects.sse import event
from services.gateway.dialects.turns import AUTO, Answer, Finish, Piece, ToolChoice, Usage

# By the status, and by the code where one status has several.
_STATUSES: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
_CODES: Mapping[str, str] = {"rollout_stopped": "FAILED_PRECONDITION"}
_FINISH: Mapping[Finish, str] = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
_MODES: Mapping[JSON, ToolChoice] = {
    "AUTO": AUTO,
    "MODE_UNSPECIFIED": AUTO,
    "NONE": ToolChoice("none"),
    "ANY": ToolChoice("required"),
}
_COUNTED = "generateContentRequest"
# Google's JavaScript package looks for the end of an event behind anything but these.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
_NOTHING: JSON = {"text": ""}


class Gemini:
    """Reads bodies with what their path says: the fields ``model`` and ``stream``."""

    def __init__(self, *, counts: bool = False) -> None:
        """``counts``: the size of a prompt is asked for, which may stand one level deeper."""
        self._counts = counts

    def read(self, body: JSON, headers: Mapping[str, str]) -> ParsedRequest:
        if self._counts and isinstance(body, dict) and isinstance(inner := body.get(_COUNTED), dict):
            rest = {name: value for name, value in body.items() if name != _COUNTED}
            body = {**inner, **rest}
        reader, sent = Reader(GEMINI), FieldValue(in_camel_case(body, GEMINI))
        taken = reader.take(sent)
        system, contents, sent_tools = taken.get("systemInstruction"), taken.need("contents"), taken.get("tools")
        tools = asks.distinct(_tools(reader, sent_tools)) if sent_tools else []
        read = read_contents(reader, contents)
        if read[-1]["role"] == "assistant":
            raise contents.fault("end with words of the model, and the policy begins its turns itself")
        instructions = [] if system is None else read_instructions(reader, system)
        config = reader.take(taken.get("generationConfig") or FieldValue({}, "generationConfig"))
        max_tokens = config.get("maxOutputTokens")
        ask = asks.make_ask(
            [*instructions, *read],
            tools,
            _choice(reader, taken.get("toolConfig"), tools),
            None if max_tokens is None else max_tokens.count(),
            asks.read_stop(config.get("stopSequences")),
            headers,
            config.get("seed"),
        )
        stream = taken.get("stream")
        is_stream = stream is not None and stream.flag()
        return ParsedRequest(
            ask, taken.need("model").name(), is_stream, reader.ignored, sent.object(), reader.unsupported
        )

    def whole(self, question: ParsedRequest, model: str, answer: Answer) -> JSON:
        piece = Piece(answer.before, answer.reasoning, answer.named_calls, answer.behind)
        return _last(answer.id, model, _parts(piece), answer)

    def writer(self, question: ParsedRequest, heading: Heading) -> GeminiWriter:
        return GeminiWriter(heading)

    def fault(self, fault: Fault) -> tuple[int, JSON]:
        message = fault.message
        if fault.code == "context_length_exceeded":
            message = f"The input token count exceeds the maximum number of tokens allowed: {message}"
        status = _CODES.get(fault.code) or _STATUSES.get(fault.status, "INVALID_ARGUMENT")
        return fault.status, {"error": {"code": fault.status, "message": message, "status": status}}


class GeminiWriter:
    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._told = StreamState()

    def begin(self) -> bytes:
        """Nothing: packages that keep a conversation drop an answer of which a chunk has no parts."""
        return b""

    def piece(self, piece: Piece) -> bytes:
        self._told.add(piece)
        parts = _parts(piece)
        return _event(_chunk(self._heading.id, self._heading.model, parts)) if parts else b""

    def alive(self) -> bytes:
        return b"\n\n"

    def end(self, answer: Answer) -> bytes:
        return _event(_last(self._heading.id, self._heading.model, _parts(self._told.rest(answer)), answer))

    def fail(self, fault: Fault) -> bytes:
        return msgspec.json.encode(Gemini().fault(fault)[1]) + b"\n\n"


def _event(chunk: JSON) -> bytes:
    data = event(chunk)
    for end, escaped in _LINE_ENDS:
        data = data.replace(end, escaped)
    return data


def _tools(reader: Reader, sent: FieldValue) -> Iterator[tuple[FieldValue, ToolSchema]]:
    for one in sent.items():
        functions = reader.take(one).get("functionDeclarations")
        for function in functions.items() if functions is not None else ():
            yield function, _tool(reader, function)


def _tool(reader: Reader, sent: FieldValue) -> ToolSchema:
    taken = reader.take(sent)
    own, schema = taken.get("parameters"), taken.get("parametersJsonSchema")
    if own is not None and schema is not None:
        raise schema.fault("stands beside parameters, which say the same")
    if own is not None:
        schema = FieldValue(as_json_schema(own.value), own.place)
    return asks.tool(taken.need("name"), taken.get("description"), schema)


def _choice(reader: Reader, sent: FieldValue | None, tools: Sequence[ToolSchema]) -> ToolChoice:
    config = None if sent is None else reader.take(sent).get("functionCallingConfig")
    if config is None:
        return AUTO
    taken = reader.take(config)
    mode, names = taken.get("mode"), taken.get("allowedFunctionNames")
    if mode is not None and mode.text() not in _MODES:
        raise mode.fault("must be AUTO, ANY or NONE")
    choice = AUTO if mode is None else _MODES[mode.value]
    allowed = [] if names is None else [one.name() for one in names.items()]
    if names is not None and allowed and choice.mode != "required":
        raise names.fault("goes with the mode ANY alone")
    if names is not None and len(set(allowed)) > 1 and set(allowed) != {one["function"]["name"] for one in tools}:
        raise names.fault("must name one function, or all: offer those alone that may be called")
    if len(set(allowed)) == 1:
        choice = ToolChoice("required", allowed[0])
    return asks.choose(config, choice, tools)


def _parts(piece: Piece) -> list[JSON]:
    parts: list[JSON] = []
    if piece.reasoning:
        parts.append({"text": piece.reasoning, "thought": True})
    if piece.text:
        parts.append({"text": piece.text})
    for call_id, call in piece.calls:
        parts.append({"functionCall": {"id": call_id, "name": call.name, "args": call.arguments}})
    if piece.behind:
        parts.append({"text": piece.behind})
    return parts


def _chunk(turn: str, model: str, parts: list[JSON], end: Mapping[str, JSON] | None = None) -> dict[str, JSON]:
    candidate: dict[str, JSON] = {"content": {"role": "model", "parts": parts}, "index": 0, **(end or {})}
    return {"responseId": turn, "modelVersion": model, "candidates": [candidate]}


def _last(turn: str, model: str, parts: list[JSON], answer: Answer) -> JSON:
    return {
        **_chunk(turn, model, parts or [_NOTHING], {"finishReason": _FINISH[answer.finish]}),
        "usageMetadata": _usage(answer.usage),
        "policy_version": spans(answer.versions),
    }


def _usage(usage: Usage) -> JSON:
    return {
        "promptTokenCount": usage.num_prompt_tokens,
        "cachedContentTokenCount": usage.num_stored_tokens,
        "candidatesTokenCount": usage.num_sampled_tokens - usage.num_reasoning_tokens,
        "thoughtsTokenCount": usage.num_reasoning_tokens,
        "totalTokenCount": usage.num_prompt_tokens + usage.num_sampled_tokens,
    }
