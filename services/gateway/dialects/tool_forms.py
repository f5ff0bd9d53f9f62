"""Tools that are no functions to their client, and are functions to the policy: of one text, or of a namespace.

Rule: a call is told in the form in which its tool was offered, and comes back as what the policy wrote, whatever that
was: what is no single text is told as the JSON of all arguments, and the id of the call says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from gspo_core import strict_json
from gspo_core.json_value import JSON
from gspo_core.messages import ToolSchema
from services.gateway.dialects import asks
from services.gateway.dialects.sent import FieldValue, Reader, ReadFields

INPUT = "input"
_PARAMETERS: JSON = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
_WHOLE = "_whole"


@dataclass(frozen=True, slots=True)
class Form:
    """How a client names a tool."""

    name: str
    namespace: str = ""
    is_text: bool = False
    """A call of it is one text."""

    @property
    def full_name(self) -> str:
        """As the policy knows it."""
        return joined(self.namespace, self.name)


Forms = Mapping[str, Form]
"""By the name that the policy knows."""


def joined(namespace: str, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def form_of(forms: Forms, name: str | None) -> Form:
    return forms.get(name or "", Form(name or ""))


def text_tool(reader: Reader, taken: ReadFields, form: Form) -> ToolSchema:
    """A grammar is told in words; nothing is held to it, which the answer says."""
    description, shape = taken.get("description"), taken.get("format")
    words = "" if description is None else description.text()
    if shape is not None and shape.object().get("type") != "text":
        reader.ignore(shape.place)
        grammar = shape.object().get("definition") or shape.object().get("grammar")
        words = f"{words}\n\nThe input follows this grammar:\n{grammar}".strip()
    tool = asks.tool(FieldValue(form.full_name), None, FieldValue(_PARAMETERS))
    return {**tool, "function": {**tool["function"], "description": words}}


def told_id(call_id: str, arguments: JSON, form: Form) -> str:
    return f"{call_id}{_WHOLE}" if form.is_text and not _is_one_text(arguments) else call_id


def told_text(arguments: JSON) -> str:
    if _is_one_text(arguments):
        assert isinstance(arguments, dict)
        return str(arguments[INPUT])
    return msgspec.json.encode(arguments).decode()


def arguments_of(call_id: FieldValue, text: FieldValue) -> JSON:
    """The inverse of ``told_text``."""
    if call_id.text().endswith(_WHOLE):
        try:
            return strict_json.parse(text.text())
        except strict_json.TextRejected:
            pass  # a client that changed it
    return {INPUT: text.text()}


def _is_one_text(arguments: JSON) -> bool:
    return isinstance(arguments, dict) and arguments.keys() == {INPUT} and isinstance(arguments[INPUT], str)
