"""A method as a tool: its schema from type hints and docstring, its arguments from JSON, its result as text.

Rule: whatever a policy writes as arguments ends in a bound call or in an ``ArgumentError`` that names the parameter.
Text for the policy is short and free of tracebacks, addresses and paths, because it is training input.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import inspect
import json
import re
import types
import typing
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, TypeAlias

from gspo_core.env.docstrings import read_docstring
from gspo_core.env.hints import Hint, HintError, Read, description_in, hint_of, json_type
from gspo_core.env.pydantic_hints import default_in, field_in
from gspo_core.environment_contract import InvalidEnvironment
from gspo_core.json_value import JSON
from gspo_core.messages import Content, ParameterSchema, ToolSchema, is_parts

HIDDEN_PARAMETERS = frozenset({"self", "cls", "ctx"})

RESERVED_NAMES = frozenset(
    {
        *("tasks", "num_tasks", "eval_tasks", "num_eval_tasks", "reset", "get_reward", "done", "close", "limits"),
        *("snapshot", "restore", "on_message", "replayable", "reward_range", "end_state"),
    }
)
"""Never tools, like every name that begins with an underscore."""

# Long enough for a sentence that helps, short enough not to fill a context with one mistake.
MAX_ERROR_CHARS = 400

Bound: TypeAlias = dict[str, object]
"""The keywords of a call: each of the type that its hint says."""


def by_name(owner: str, functions: Iterable[FunctionType]) -> dict[str, FunctionType]:
    """Raises InvalidEnvironment where two have one name, since a policy would be offered one of them alone, and where
    one has a name that no tool has, since it would stand in the place of that member."""
    found: dict[str, FunctionType] = {}
    for function in functions:
        if function.__name__ in RESERVED_NAMES:
            raise InvalidEnvironment(f"{owner}: no tool can be named {function.__name__}")
        if function.__name__ in found:
            raise InvalidEnvironment(f"{owner}: two tools are named {function.__name__}")
        found[function.__name__] = function
    return found


class ArgumentError(Exception):
    """The arguments of a call do not fit the tool; the text is meant for the policy."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: ParameterSchema
    required: bool
    read: Read
    if_absent: Callable[[], object] | None
    """What the member gets when the policy leaves it out and the member's own default does not say."""
    unread: tuple[str, ...] = ()
    """Classes of its hint of which it gets no instance, but the JSON itself."""


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
        text = read_docstring(function)
        signature = inspect.signature(function)
        definitions: dict[str, ParameterSchema] = {}
        parameters = tuple(
            _parameter(parameter, function, text.parameters.get(parameter.name, ""), definitions)
            for parameter in signature.parameters.values()
            if parameter.name not in HIDDEN_PARAMETERS and parameter.kind not in (parameter.VAR_KEYWORD,)
        )
        arguments: ParameterSchema = {
            "type": "object",
            "properties": {parameter.name: {**parameter.schema} for parameter in parameters},
            "required": [parameter.name for parameter in parameters if parameter.required],
        }
        if definitions:
            arguments["$defs"] = definitions
        schema: ToolSchema = {
            "type": "function",
            "function": {"name": name, "description": text.description, "parameters": arguments},
        }
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        return cls(name, schema, parameters, inspect.Parameter.VAR_KEYWORD in kinds, "ctx" in signature.parameters)

    def bind(self, arguments: JSON) -> Bound:
        """The keyword arguments of the call. Raises ``ArgumentError``."""
        if isinstance(arguments, str):  # some models write the object as a string
            arguments = _decode_once_more(arguments)
        if not isinstance(arguments, dict):
            raise ArgumentError(f"arguments must be an object, not {json_type(arguments)}")
        known = {parameter.name for parameter in self.parameters}
        for name in arguments:
            if (name not in known and not self.open_ended) or name in HIDDEN_PARAMETERS:
                raise ArgumentError(f"{self.name} has no argument {name!r}; it takes {sorted(known)}")
        bound: Bound = {name: value for name, value in arguments.items() if name not in known}
        for parameter in self.parameters:
            if parameter.name in arguments:
                bound[parameter.name] = _read(parameter, arguments[parameter.name])
            elif parameter.required:
                raise ArgumentError(f"{self.name} needs the argument {parameter.name!r}")
            elif parameter.if_absent is not None:
                bound[parameter.name] = parameter.if_absent()
        return bound


def result_content(result: object) -> Content:
    """A result as the policy reads it: strings and content parts as they are, anything else as compact JSON."""
    if isinstance(result, str):
        return result
    if is_parts(result):
        return result
    return json.dumps(result, ensure_ascii=False, separators=(",", ":"), default=_plain_value)


def error_text(error: BaseException) -> str:
    """``error: Type: text`` without what a policy should never learn from."""
    return _clean(f"error: {type(error).__name__}: {error}" if str(error) else f"error: {type(error).__name__}")


def _plain_value(value: object) -> JSON:
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        plain: JSON = value.tolist()
        return plain
    if hasattr(value, "model_dump"):  # pydantic
        dumped: JSON = value.model_dump(mode="json")
        return dumped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        member: JSON = value.value
        return member
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID | Path):
        return str(value)
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


def _read(parameter: Parameter, value: JSON) -> object:
    try:
        return parameter.read(value, parameter.name)
    except HintError as error:
        raise ArgumentError(_clean(str(error))) from None
    except RecursionError:
        raise ArgumentError(f"{parameter.name} is nested too deeply") from None


def _none() -> None:
    return None


def _parameter(
    parameter: inspect.Parameter, function: FunctionType, text: str, definitions: dict[str, ParameterSchema]
) -> Parameter:
    """``definitions`` receives what its schema refers to."""
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
        raise InvalidEnvironment(
            f"{function.__qualname__}: tools are called by keyword, but {parameter.name!r} is positional only"
        )
    annotation = _resolve(parameter, function)
    field = field_in(parameter.default)
    if field is not None:  # `x: int = Field(3, ge=1)`: the function would get the Field itself
        annotation = Annotated[annotation, field]
    has_default = field is None and parameter.default is not parameter.empty
    if_absent: Callable[[], object] | None = None
    if not has_default and (absent := default_in(annotation)) is not None:
        has_default = True
        if_absent = partial(absent.get_default, call_default_factory=True)
    hint = _understood(annotation, parameter, function)
    schema: ParameterSchema = {**hint.schema}
    if text or description_in(annotation):
        schema["description"] = text or description_in(annotation)
    definitions |= hint.definitions
    if hint.accepts_none and not has_default:
        if_absent = _none
    required = not has_default and not hint.accepts_none
    return Parameter(parameter.name, schema, required, hint.read, None if required else if_absent, hint.unread)


def _resolve(parameter: inspect.Parameter, function: FunctionType) -> Any:
    """The type hint as an object, also where annotations are strings."""
    if parameter.annotation is parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        names = inspect.unwrap(function).__globals__
        return typing.get_type_hints(holder, globalns=names, include_extras=True)[parameter.name]
    except NameError as error:
        raise _unresolved(parameter, function, error) from None


def _understood(annotation: Any, parameter: inspect.Parameter, function: FunctionType) -> Hint:
    try:
        return hint_of(annotation)
    except NameError as error:
        raise _unresolved(parameter, function, error) from None
    except ModuleNotFoundError as error:
        raise InvalidEnvironment(
            f"{function.__qualname__}: the type hint of {parameter.name!r} needs {error.name}: import it in that module"
        ) from None
    except Exception as error:  # pydantic's and the author's own
        raise InvalidEnvironment(
            f"{function.__qualname__}: the type hint of {parameter.name!r} cannot be read from JSON: {error}"
        ) from None


def _unresolved(parameter: inspect.Parameter, function: FunctionType, error: NameError) -> InvalidEnvironment:
    return InvalidEnvironment(
        f"{function.__qualname__}: the type hint of {parameter.name!r} cannot be resolved ({error}); "
        "it must be importable when the environment runs, not only for type checkers"
    )
