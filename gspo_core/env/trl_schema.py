"""The schema that a function has in TRL's prompts: what `transformers.utils.get_json_schema` (5.23) makes of it.

Rule: what that function can describe is described in the same words and order, so that prompts have the same tokens.
Where it would refuse (a parameter without description or hint, a class of one's own), the place is left open instead:
`gspo env validate` names what is missing. transformers is neither imported nor needed.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from types import FunctionType
from typing import Any

from gspo_core.env.hints import json_type
from gspo_core.json_value import JSON
from gspo_core.messages import FunctionSchema, ParameterSchema, ToolSchema

_END = r"[\n\s]*(?:{}|\Z)"
_DESCRIPTION = re.compile(r"^(.*?)" + _END.format("Args:|Returns:|Raises:"), re.DOTALL)
_ARGUMENTS = re.compile(r"\n\s*Args:\n(.*?)" + _END.format("Returns:|Raises:"), re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)" + _END.format("Raises:"), re.DOTALL)
# A name, and its text up to the next name that is not indented deeper.
_ARGUMENT = re.compile(r"(?:^|\n)([ \t]*)(\w+):\s*(.*?)\s*(?=\n(?!\1[ \t])[ \t]*\w+:|\Z)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_SCALARS = (int, float, str, bool, type(None))
_CONTAINERS = (list, tuple, dict)


class _Unknown(Exception):
    """A hint that has no schema there."""


def trl_schema(name: str, function: FunctionType, hidden: frozenset[str]) -> ToolSchema:
    """``hidden``: parameters that the policy does not see."""
    text = (inspect.getdoc(function) or "").strip()
    hints = _hints(function)
    texts = _argument_texts(text)
    properties: dict[str, ParameterSchema] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in hidden or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        properties[parameter.name] = _described(_schema_or_open(hints.get(parameter.name)), texts.get(parameter.name))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: ParameterSchema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    described = _DESCRIPTION.search(text)
    schema: FunctionSchema = {"name": name, "description": described[1].strip() if described else ""}
    schema["parameters"] = parameters
    returned = _returned(hints, text)
    if returned is not None:
        schema["return"] = returned
    return {"type": "function", "function": schema}


def _hints(function: FunctionType) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError:  # `Tool.of` has refused what of it the policy sees
        return {}


def _returned(hints: dict[str, Any], text: str) -> ParameterSchema | None:
    if "return" not in hints:
        return None
    try:
        schema = _schema(hints["return"])
    except _Unknown:
        return None
    found = _RETURNS.search(text)
    if found is not None:
        schema["description"] = found[1].strip()
    return schema


def _argument_texts(text: str) -> dict[str, str]:
    found = _ARGUMENTS.search(text)
    if found is None:
        return {}
    lines = "\n".join(line for line in found[1].split("\n") if line.strip())
    return {name: re.sub(r"\s*\n+\s*", " ", words.strip()) for _, name, words in _ARGUMENT.findall(lines)}


def _described(schema: ParameterSchema, text: str | None) -> ParameterSchema:
    if text is None:
        return schema
    choices = _CHOICES.search(text)
    if choices is not None:
        values: list[JSON] = json.loads(choices[1])
        schema["enum"] = [value.strip() if isinstance(value, str) else value for value in values]
        text = text[: choices.start()].strip()
    schema["description"] = text
    return schema


def _schema_or_open(hint: Any) -> ParameterSchema:
    try:
        return _schema(hint) if hint is not None else {}
    except _Unknown:
        return {}


def _schema(hint: Any) -> ParameterSchema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _values([member.value for member in hint])
    if origin is None:
        if hint is Any:
            return {}
        if hint in _SCALARS or hint in _CONTAINERS:
            return {"type": _name(hint)}
        raise _Unknown
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is typing.Literal:
        return _values(list(arguments))
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is tuple and len(arguments) > 1 and Ellipsis not in arguments:
        return {"type": "array", "prefixItems": [_schema(argument) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    raise _Unknown


def _union(arguments: tuple[Any, ...]) -> ParameterSchema:
    schemas = [_schema(argument) for argument in arguments if argument is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(list(one) == ["type"] and isinstance(one["type"], str) for one in schemas):
        names = sorted({str(one["type"]) for one in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    if type(None) in arguments:
        schema["nullable"] = True
    return schema


def _values(values: list[Any]) -> ParameterSchema:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise _Unknown
    names = list(dict.fromkeys(json_type(value) for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _name(kind: type) -> str:
    return json_type(None if kind is type(None) else kind())
