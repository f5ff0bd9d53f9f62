"""The data between a chat codec and an environment: messages, tool schemas and parsed assistant turns.

Rule: a parsed turn keeps every attempt to call a tool, also the failed ones, each with its status and the tokens that
it covers. This module neither parses nor runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NotRequired, Required, TypeAlias, TypedDict, TypeGuard

from gspo_core.json_value import JSON


class ContentPart(TypedDict, total=False):
    type: Required[str]
    """The codecs here render ``text`` alone."""
    text: str


Content: TypeAlias = str | list[ContentPart]

_MEDIA = {
    **{kind: {kind, "url", "path", "base64", "data", "source"} for kind in ("image", "audio", "video")},
    **{f"{kind}_url": {f"{kind}_url"} for kind in ("image", "audio", "video")},
    "input_image": {"image_url"},
    "input_audio": {"input_audio"},
}
"""The keys under which a part other than text holds its content, for transformers, OpenAI, Anthropic and MCP."""
_ABOUT_PARTS = {
    *("type", "detail", "format", "mimeType", "mime_type", "annotations", "meta", "_meta", "cache_control"),
    *("min_pixels", "max_pixels", "resized_height", "resized_width", "fps", "nframes"),
}


class CalledFunction(TypedDict):
    name: str | None
    arguments: JSON
    """An object, or its JSON text, as some clients send it."""


class MessageCall(TypedDict, total=False):
    """One call in an assistant message. Some clients leave out ``function`` and put its fields here."""

    id: str
    type: str
    function: CalledFunction
    name: str | None
    arguments: JSON


class Message(TypedDict, total=False):
    role: Required[str]
    content: Content | None
    reasoning_content: str
    tool_calls: Sequence[MessageCall]
    """In messages of an assistant."""
    tool_call_id: str
    """In answers of a tool, like ``name``."""
    name: str


_Keywords = TypedDict(
    "_Keywords",
    {
        "$ref": str,
        "$defs": "dict[str, ParameterSchema]",
        "prefixItems": "list[ParameterSchema]",
        "minItems": int,
        "maxItems": int,
        "uniqueItems": bool,
        "additionalProperties": "ParameterSchema",
        "anyOf": "list[ParameterSchema]",
        "oneOf": "list[ParameterSchema]",
    },
    total=False,
)


class ParameterSchema(_Keywords, total=False):
    """JSON schema, as far as type hints become one. A model of pydantic may say more."""

    type: str | list[str]
    description: str
    properties: dict[str, ParameterSchema]
    required: list[str]
    items: ParameterSchema
    format: str
    enum: list[JSON]
    nullable: bool
    """In the words of transformers."""


class _FunctionSchema(TypedDict):
    name: str
    description: NotRequired[str]
    parameters: NotRequired[ParameterSchema]


_Return = TypedDict("_Return", {"return": ParameterSchema}, total=False)


class FunctionSchema(_FunctionSchema, _Return):
    """``return`` is what transformers adds to the schema of a function."""


class ToolSchema(TypedDict):
    type: Literal["function"]
    function: FunctionSchema


class CallStatus(StrEnum):
    """The fate of one attempt to call a tool."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED_BLOCK = "unclosed_block"
    MISSING_NAME = "missing_name"
    MALFORMED_STRUCTURE = "malformed_structure"
    UNKNOWN_TOOL = "unknown_tool"


class ForkReason(StrEnum):
    """Why a conversation cannot go on behind what was sampled, so that it starts a new branch."""

    ASSISTANT_MESSAGE = "assistant_message"
    """The new messages hold words of the assistant that were not sampled."""
    SAMPLED_AFTER_END = "sampled_after_end"
    """Tokens were sampled behind the end of the turn."""
    THINKING_STRIPPED = "thinking_stripped"
    """The format removes earlier reasoning when a new question comes, and the job asks to follow it."""
    HISTORY_REWRITTEN = "history_rewritten"
    """The model's template writes earlier messages in another way once these follow."""
    TURN_REWRITTEN = "turn_rewritten"
    """The template says something else for the turn than what was sampled."""
    TEMPLATE_REFUSED = "template_refused"
    """The template does not accept the conversation in this form."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One attempt to call a tool."""

    name: str | None
    """None where the attempt names no tool."""
    arguments: JSON
    """Whatever JSON value the policy wrote, not necessarily an object; ``{}`` where it wrote none."""
    status: CallStatus
    raw: str
    """The text between the opening and the closing token."""
    start: int
    end: int
    """Half-open range of sampled tokens, delimiters included, counted in the turn."""
    is_final: bool = field(default=False, compare=False)
    """Whatever is sampled behind it, it stays this call. Some syntaxes never say so."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One assistant turn as read from the sampled ids."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    complete: bool = True
    """The policy ended the turn itself: a stop token was sampled and no reasoning is left open."""
    reasoning: str = ""
    num_thought_tokens: int = 0
    """Ids up to the end of the reasoning."""
    may_be_thought: bool = False
    """Its calls stand in reasoning whose end was not sampled: should that still come, they are a part of it."""

    @property
    def has_parse_error(self) -> bool:
        """An attempt could not be read as a call at all (a call of an unknown tool can be read)."""
        readable = {CallStatus.OK, CallStatus.UNKNOWN_TOOL}
        return any(call.status not in readable for call in self.calls)


def is_parts(value: object) -> TypeGuard[list[ContentPart]]:
    """Whether it is content in parts. Data may have a ``type`` as well, so each is in the very form of a part."""
    return isinstance(value, list) and bool(value) and all(isinstance(part, dict) and _is_part(part) for part in value)


def _is_part(given: Mapping[str, JSON]) -> bool:
    kind, shown = given.get("type"), {name for name in given if name not in _ABOUT_PARTS and given[name] is not None}
    if kind == "text":
        return shown == {"text"} and isinstance(given["text"], str)
    return isinstance(kind, str) and len(shown) == 1 and shown <= _MEDIA.get(kind, set())


def other_parts(message: Message) -> list[str]:
    """The types of the content parts that are not text."""
    content = message.get("content")
    parts: Sequence[object] = content if isinstance(content, list) else ()
    types = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in parts}
    return sorted(types - {"text"})
