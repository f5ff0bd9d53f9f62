"""Google's Gemini API, ``generateContent``.

Its paths say what other dialects have in their bodies: the model, and whether the answer is a stream. Names of fields
come in either spelling, ``functionCall`` and ``function_call``, and types of schemas in capitals.

A stream is whole answers, each with more parts, as events without names. Between them no comment may stand, because
Google's packages take each line for data; signs of life are empty lines. An error in the middle is a line of its own.

Rule: what a path says is read as fields of the request, and a body that says otherwise is refused. A model may have
slashes in its name. Only names that stand in the table of the dialect, where they stand in it, are spelled anew, and of
schemas only types: what is anybody's own, like the arguments of a call or names of properties, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gspo_core.json_value import JSON
from gspo_core.messages import ToolSchema
from services.gateway.dialects import asks
from services.gateway.dialects.dialect import Fault, Heading, ParsedRequest, StreamState, event, spans
from services.gateway.dialects.fields import GEMINI
from services.gateway.dialects.gemini_contents import read_contents, read_instructions
from services.gateway.dialects.sent import Fields, FieldValue, Reader
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
PREFIX = "/v1beta/models"
# The other version of the API, whose models share their path with OpenAI's.
PREFIXES = (PREFIX, "/v1/models")
WHOLE, STREAM, COUNT = "generateContent", "streamGenerateContent", "countTokens"
VERBS = (WHOLE, STREAM, COUNT)
# Keywords of schemas whose values are schemas: one, several, or some by their names.
_OF_ONE = frozenset({"items", "additionalProperties"})
_OF_SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_OF_NAMES = frozenset({"properties", "defs", "$defs"})


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


@dataclass(frozen=True, slots=True)
class GeminiPath:
    prefix: str
    model: str
    verb: str

    @property
    def known(self) -> str:
        """For logs: without the client's own words."""
        return f"{self.prefix}/{{model}}:{self.verb}"

    def fields(self) -> Mapping[str, JSON]:
        """Those that the path stands for."""
        return {"model": self.model, "stream": self.verb == STREAM}


def path_of(path: str) -> GeminiPath | None:
    """None where it is no path of a turn or a count."""
    prefix = next((one for one in PREFIXES if path.startswith(f"{one}/")), "")
    model, _, verb = path.removeprefix(f"{prefix}/").rpartition(":")
    return GeminiPath(prefix, model, verb) if prefix and model and verb in VERBS else None


def joined(body: JSON, fields: Mapping[str, JSON]) -> JSON:
    """The body with what its path says. Raises ``Refusal``."""
    if not isinstance(body, dict):
        return body  # whoever reads it says so
    for name, value in fields.items():
        said = body.get(name)
        if said is not None and said != value and said != f"models/{value}":
            raise FieldValue(said, name).fault("is not what the path of the request says")
    return {**body, **fields}


def in_camel_case(value: JSON, fields: Fields, place: str = "") -> JSON:
    """Known names of fields in one spelling. Raises ``Refusal`` where a field is there in both."""
    if isinstance(value, list):
        return [in_camel_case(one, fields, f"{place}[]") for one in value] if f"{place}[]" in fields else value
    if not isinstance(value, dict) or place not in fields:
        return value
    found: dict[str, JSON] = {}
    for name, inner in value.items():
        camel = _camel(name)
        spelled = camel if camel in fields[place] else name
        where = f"{place}.{spelled}".lstrip(".")
        if spelled in found:
            raise FieldValue(inner, where).fault("is there in two spellings")
        found[spelled] = in_camel_case(inner, fields, where)
    return found


def _camel(name: str) -> str:
    first, *more = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in more) if first else name


def as_json_schema(schema: JSON) -> JSON:
    """Translates a schema in Gemini's spelling."""
    if not isinstance(schema, dict):
        return schema
    return {name: _keyword(name, value) for name, value in schema.items()}


def _keyword(name: str, value: JSON) -> JSON:
    if name == "type":
        return _type(value)
    if name in _OF_ONE:
        return as_json_schema(value)
    if name in _OF_SEVERAL and isinstance(value, list):
        return [as_json_schema(one) for one in value]
    if name in _OF_NAMES and isinstance(value, dict):
        return {one: as_json_schema(inner) for one, inner in value.items()}
    return value


def _type(value: JSON) -> JSON:
    if isinstance(value, list):
        return [_type(one) for one in value]
    return value.lower() if isinstance(value, str) else value
