"""A method as a tool: its schema from type hints and docstring, its arguments from JSON, its result as text.

Rule: whatever a policy writes as arguments ends in a bound call or in an ``ArgumentError`` that names the parameter.
Text for the policy is short and free of tracebacks, addresses and paths, because it is training input.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

from gspo_core.env.contract import InvalidEnvironment
from gspo_core.json_value import JSON
from gspo_core.messages import Content, ParameterSchema, ToolSchema

HIDDEN_PARAMETERS = frozenset({"self", "cls", "ctx"})

# Long enough for a sentence that helps, short enough not to fill a context with one mistake.
MAX_ERROR_CHARS = 400

_JSON_TYPES: dict[type, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    type(None): "null",
}
_ARGUMENT_LINE = re.compile(r"^(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SECTION_LINE = re.compile(r"^(Returns?|Raises|Yields?|Examples?|Notes?|Attributes|See Also)\s*:\s*$")


Choice: TypeAlias = JSON | enum.Enum
Bound: TypeAlias = dict[str, Choice]
"""The keywords of a call."""
Choices: TypeAlias = Mapping[JSON, Choice]


class ArgumentError(Exception):
    """The arguments of a call do not fit the tool; the text is meant for the policy."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: ParameterSchema
    required: bool
    accepts_none: bool
    none_if_absent: bool
    """Optional and without a default: the member gets None when the policy leaves it out."""
    choices: Choices | None = None
    """JSON value to Python value, for enumerations and literals."""


@dataclass(frozen=True)
class Tool:
    """One public method of an environment."""

    name: str
    schema: ToolSchema
    parameters: tuple[Parameter, ...]
    open_ended: bool
    """It takes any further keyword."""
    wants_ctx: bool

    @classmethod
    def of(cls, name: str, function: FunctionType) -> Tool:
        description, texts = _read_docstring(function)
        signature = inspect.signature(function)
        parameters = tuple(
            _parameter(parameter, function, texts.get(parameter.name, ""))
            for parameter in signature.parameters.values()
            if parameter.name not in HIDDEN_PARAMETERS and parameter.kind not in (parameter.VAR_KEYWORD,)
        )
        schema: ToolSchema = {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {parameter.name: {**parameter.schema} for parameter in parameters},
                    "required": [parameter.name for parameter in parameters if parameter.required],
                },
            },
        }
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        return cls(name, schema, parameters, inspect.Parameter.VAR_KEYWORD in kinds, "ctx" in signature.parameters)

    def bind(self, arguments: JSON) -> Bound:
        """The keyword arguments of the call. Raises ``ArgumentError``."""
        if isinstance(arguments, str):  # some models write the object as a string
            arguments = _decode_once_more(arguments)
        if not isinstance(arguments, dict):
            raise ArgumentError(f"arguments must be an object, not {_json_type(arguments)}")
        known = {parameter.name for parameter in self.parameters}
        for name in arguments:
            if (name not in known and not self.open_ended) or name in HIDDEN_PARAMETERS:
                raise ArgumentError(f"{self.name} has no argument {name!r}; it takes {sorted(known)}")
        bound: Bound = {name: value for name, value in arguments.items() if name not in known}
        for parameter in self.parameters:
            if parameter.name in arguments:
                bound[parameter.name] = _convert(parameter, arguments[parameter.name])
            elif parameter.required:
                raise ArgumentError(f"{self.name} needs the argument {parameter.name!r}")
            elif parameter.none_if_absent:
                bound[parameter.name] = None
        return bound


def result_content(result: object) -> Content:
    """A result as the policy reads it: strings and content parts as they are, anything else as compact JSON."""
    if isinstance(result, str):
        return result
    if isinstance(result, list) and result and all(isinstance(part, dict) and "type" in part for part in result):
        return result
    return json.dumps(result, ensure_ascii=False, separators=(",", ":"), default=_plain_value)


def error_text(error: BaseException) -> str:
    """``error: Type: text`` without what a policy should never learn from."""
    return _clean(f"error: {type(error).__name__}: {error}" if str(error) else f"error: {type(error).__name__}")


def _plain_value(value: object) -> JSON:
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        plain: JSON = value.tolist()
        return plain
    raise TypeError(f"the result contains a value of type {type(value).__name__}, which is not JSON")


def _clean(text: str) -> str:
    lines = [line for line in text.splitlines() if "For further information visit" not in line]
    text = " ".join(line.strip() for line in lines if line.strip())
    text = re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x", text)
    text = re.sub(r"(?<![\w:/.])/(?:[\w.\-]+/)+([\w.\-]+)", r"\1", text)  # the last part of a path is enough
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 1] + "…"


def _decode_once_more(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
        json.dumps(value, allow_nan=False)  # not-a-number would become the reward, and the episode have none
    except (ValueError, RecursionError):
        return text
    return value


def _json_type(value: Choice) -> str:
    return _JSON_TYPES.get(type(value), type(value).__name__)


def _convert(parameter: Parameter, value: JSON) -> Choice:
    if value is None and parameter.accepts_none:
        return None
    if parameter.choices is not None:
        for choice, member in parameter.choices.items():
            if choice == value and type(choice) is type(value):
                return member
        raise ArgumentError(f"{parameter.name} must be one of {list(parameter.choices)}, not {value!r}")
    wanted = parameter.schema.get("type")
    if wanted is None:
        return value
    wanted = [wanted] if isinstance(wanted, str) else wanted
    given = _json_type(value)
    if given in wanted:
        return value
    if type(value) is int and "number" in wanted:
        return float(value)
    if type(value) is float and "integer" in wanted and value.is_integer():
        return int(value)
    raise ArgumentError(f"{parameter.name} must be {' or '.join(wanted)}, not {given}")


def _parameter(parameter: inspect.Parameter, function: FunctionType, text: str) -> Parameter:
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
        raise InvalidEnvironment(
            f"{function.__qualname__}: tools are called by keyword, but {parameter.name!r} is positional only"
        )
    schema, accepts_none, choices = _annotation_schema(_resolve(parameter, function))
    if text:
        schema["description"] = text
    has_default = parameter.default is not parameter.empty
    return Parameter(
        name=parameter.name,
        schema=schema,
        required=not has_default and not accepts_none,
        accepts_none=accepts_none,
        none_if_absent=accepts_none and not has_default,
        choices=choices,
    )


def _resolve(parameter: inspect.Parameter, function: FunctionType) -> Any:
    """The type hint as an object, also where annotations are strings."""
    if parameter.annotation is parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, globalns=inspect.unwrap(function).__globals__)[parameter.name]
    except NameError as error:
        raise InvalidEnvironment(
            f"{function.__qualname__}: the type hint of {parameter.name!r} cannot be resolved ({error}); "
            "it must be importable when the environment runs, not only for type checkers"
        ) from None


def _annotation_schema(hint: Any) -> tuple[ParameterSchema, bool, Choices | None]:
    """JSON schema of a type hint, whether None is accepted, and its choices if it is an enumeration."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _annotation_schema(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _union_schema(arguments)
    if origin is typing.Literal:
        return _choices_schema({value: value for value in arguments})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choices_schema({member.value: member for member in hint})
    name = _JSON_TYPES.get(origin or hint)
    if name is None:
        return {}, False, None
    schema: ParameterSchema = {"type": name}
    if name == "array" and arguments and (items := _annotation_schema(arguments[0])[0]):
        schema["items"] = items
    if name == "object" and len(arguments) == 2 and (values := _annotation_schema(arguments[1])[0]):
        schema["additionalProperties"] = values
    return schema, False, None


def _union_schema(arguments: tuple[Any, ...]) -> tuple[ParameterSchema, bool, Choices | None]:
    members = [argument for argument in arguments if argument is not type(None)]
    optional = len(members) < len(arguments)
    if len(members) == 1:
        schema, inner, choices = _annotation_schema(members[0])
        return schema, optional or inner, choices
    schemas = [_annotation_schema(member)[0] for member in members]
    if all(list(schema) == ["type"] and isinstance(schema["type"], str) for schema in schemas):
        return {"type": [str(schema["type"]) for schema in schemas]}, optional, None
    return {"anyOf": schemas}, optional, None


def _choices_schema(choices: Choices) -> tuple[ParameterSchema, bool, Choices]:
    names = list(dict.fromkeys(_json_type(value) for value in choices if value is not None))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(choices)}, None in choices, choices


def _read_docstring(function: FunctionType) -> tuple[str, dict[str, str]]:
    """Description (up to the first blank line) and the texts of the Google-style ``Args:`` section."""
    lines = (inspect.getdoc(function) or "").splitlines()
    description: list[str] = []
    for line in lines:
        if not line.strip() or line.strip() in ("Args:", "Arguments:"):
            break
        description.append(line.strip())
    return " ".join(description), _argument_texts(lines)


def _argument_texts(lines: list[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    header = next((i for i, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:")), None)
    if header is None:
        return texts
    depth = len(lines[header]) - len(lines[header].lstrip())
    name, name_depth = "", None
    for line in lines[header + 1 :]:
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if indent <= depth or _SECTION_LINE.match(line.strip()):
            break
        found = _ARGUMENT_LINE.match(line.strip())
        if found and (name_depth is None or indent <= name_depth):
            name, name_depth = found[1].lstrip("*"), indent
            texts[name] = found[2].strip()
        elif name:
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return texts
