"""Type hints as JSON schema, and JSON as what the hints say: enumerations, dataclasses, typed dicts, containers, dates.

Rule: a hint gives a schema and a reader that agree: what the schema allows is read, and what is read is of the hint's
type. It needs the standard library alone. What only pydantic understands goes to it (`pydantic_hints`), the whole hint
at once, and only where its author has pydantic. A class that neither knows is any JSON, and is named in ``unread``.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import inspect
import numbers
import pathlib
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from gspo_core.env.pydantic_hints import Adapter, is_needed, is_typed_dict
from gspo_core.json_value import JSON
from gspo_core.messages import ParameterSchema

T = TypeVar("T")
Read: TypeAlias = Callable[[JSON, str], object]
"""From a JSON value and its place (``order.items[2]``), for the error."""

_NAMES: dict[type, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    type(None): "null",
}
_SEQUENCES: dict[object, Callable[[Iterable[object]], object]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
    collections.abc.Set: frozenset,
}
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_TEXTS: dict[type, tuple[str, Callable[[str], object]]] = {
    datetime.datetime: ("date-time", datetime.datetime.fromisoformat),
    datetime.date: ("date", datetime.date.fromisoformat),
    datetime.time: ("time", datetime.time.fromisoformat),
    uuid.UUID: ("uuid", uuid.UUID),
    pathlib.Path: ("path", pathlib.Path),
}


class HintError(Exception):
    """A JSON value is not what the hint says; the text is meant for the policy."""


@dataclass(frozen=True, slots=True)
class Hint:
    schema: ParameterSchema
    read: Read
    accepts_none: bool = False
    definitions: Mapping[str, ParameterSchema] = field(default_factory=dict)
    """What ``$ref`` in the schema means, for a class that holds itself."""
    unread: tuple[str, ...] = ()
    """Classes in it of which no instance is made: whatever JSON stands there is handed over."""


def hint_of(hint: Any) -> Hint:
    """Raises ``TypeError`` for what can never be read from JSON."""
    if is_needed(hint):
        return _by_pydantic(hint)
    return _Reading().hint(hint)


def json_type(value: object) -> str:
    return _NAMES.get(type(value), type(value).__name__)


def description_in(hint: Any) -> str:
    """What ``Annotated`` says in words: a text, or ``Doc``."""
    if typing.get_origin(hint) is not typing.Annotated:
        return ""
    for note in hint.__metadata__:
        text = note if isinstance(note, str) else getattr(note, "documentation", None)
        if isinstance(text, str):
            return text.strip()
    return ""


def _by_pydantic(hint: Any) -> Hint:
    adapter = Adapter(hint)

    def read(value: JSON, place: str) -> object:
        try:
            return adapter.read(value)
        except ValueError as error:
            raise HintError(adapter.problem(error, place)) from None

    return Hint(adapter.schema, read, adapter.accepts_none, adapter.definitions)


class _Reading:
    """One hint with all that it holds; knows the classes that it is within, so that one which holds itself ends."""

    def __init__(self) -> None:
        self._within: list[type] = []
        self._definitions: dict[str, ParameterSchema] = {}
        self._readers: dict[type, Read] = {}
        self._unread: dict[str, None] = {}

    def hint(self, hint: Any) -> Hint:
        found = self._hint(hint)
        return Hint(found.schema, found.read, found.accepts_none, self._definitions, tuple(self._unread))

    def _hint(self, hint: Any) -> Hint:
        hint = getattr(hint, "__value__", hint)  # `type Name = ...`
        supertype = getattr(hint, "__supertype__", None)  # NewType
        if supertype is not None:
            return self._hint(supertype)
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Annotated, typing.Required, typing.NotRequired, typing.Final):
            return self._described(arguments[0], description_in(hint))
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments)
        if origin is typing.Literal:
            return _choices({one.value if isinstance(one, enum.Enum) else one: one for one in arguments})
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _choices({member.value: member for member in hint})
        return self._container(origin or hint, arguments) or self._class(hint) or self._plain(hint)

    def _described(self, hint: Any, text: str) -> Hint:
        found = self._hint(hint)
        return dataclasses.replace(found, schema={**found.schema, "description": text}) if text else found

    def _union(self, arguments: tuple[Any, ...]) -> Hint:
        members = [self._hint(argument) for argument in arguments if argument is not type(None)]
        optional = len(members) < len(arguments)
        if len(members) == 1:
            (only,) = members
            return Hint(only.schema, _or_none(only.read) if optional else only.read, optional or only.accepts_none)
        schemas = [member.schema for member in members]
        schema: ParameterSchema = {"anyOf": schemas}
        if all(list(one) == ["type"] and isinstance(one["type"], str) for one in schemas):
            schema = {"type": [str(one["type"]) for one in schemas]}
        read = _first_that_reads([member.read for member in members], schema)
        return Hint(schema, _or_none(read) if optional else read, optional)

    def _container(self, kind: Any, arguments: tuple[Any, ...]) -> Hint | None:
        if kind is tuple and arguments and arguments[-1] is not Ellipsis:
            return self._row(arguments, 0, tuple)
        if kind is tuple:
            return self._many(tuple, arguments)
        if kind in _SEQUENCES:
            return self._many(_SEQUENCES[kind], arguments)
        return self._mapping(arguments) if kind in _OBJECTS else None

    def _many(self, make: Callable[[Iterable[object]], object], arguments: tuple[Any, ...]) -> Hint:
        item = self._hint(arguments[0]) if arguments else _ANYTHING
        schema: ParameterSchema = {"type": "array"}
        if item.schema:
            schema["items"] = item.schema
        if make in (set, frozenset):
            schema["uniqueItems"] = True

        def read(value: JSON, place: str) -> object:
            items = _of_type(value, list, place)
            found = [item.read(one, f"{place}[{number}]") for number, one in enumerate(items)]
            try:
                return make(found)
            except TypeError:
                raise HintError(f"{place} holds what cannot be in a set") from None

        return Hint(schema, read)

    def _row(self, arguments: Sequence[Any], num_optional: int, make: Callable[[Sequence[object]], object]) -> Hint:
        """A tuple with a type for each place; the last ones may be left out."""
        places = [self._hint(argument) for argument in arguments]
        least, most = len(places) - num_optional, len(places)
        schema: ParameterSchema = {"type": "array", "prefixItems": [one.schema for one in places]}
        schema |= {"minItems": least, "maxItems": most}

        def read(value: JSON, place: str) -> object:
            items = _of_type(value, list, place)
            if not least <= len(items) <= most:
                number = str(most) if least == most else f"{least} to {most}"
                raise HintError(f"{place} must have {number} items, not {len(items)}")
            given = zip(places, items, strict=False)
            return make([one.read(item, f"{place}[{index}]") for index, (one, item) in enumerate(given)])

        return Hint(schema, read)

    def _named_row(self, cls: Any) -> Hint:
        hints = typing.get_type_hints(cls, include_extras=True)
        arguments = [hints.get(name, Any) for name in cls._fields]
        return self._row(arguments, len(cls._field_defaults), lambda items: cls(*items))

    def _mapping(self, arguments: tuple[Any, ...]) -> Hint:
        key, item = (self._hint(one) for one in arguments) if len(arguments) == 2 else (_ANYTHING, _ANYTHING)
        schema: ParameterSchema = {"type": "object"}
        if item.schema:
            schema["additionalProperties"] = item.schema

        def read(value: JSON, place: str) -> object:
            given = _of_type(value, dict, place)
            return {_key(key, name, place): item.read(one, f"{place}.{name}") for name, one in given.items()}

        return Hint(schema, read)

    def _class(self, cls: Any) -> Hint | None:
        """A dataclass, a typed dict, or a named tuple."""
        if not isinstance(cls, type):
            return None
        if issubclass(cls, tuple) and hasattr(cls, "_make"):
            return self._named_row(cls)
        if not dataclasses.is_dataclass(cls) and not is_typed_dict(cls):
            return None
        if cls in self._within:
            self._definitions.setdefault(cls.__name__, {})
            return Hint({"$ref": f"#/$defs/{cls.__name__}"}, lambda value, place: self._readers[cls](value, place))
        self._within.append(cls)
        members = {name: (self._hint(hint), required) for name, hint, required in _members(cls)}
        self._within.pop()
        schema: ParameterSchema = {"type": "object"}
        schema["properties"] = {name: member.schema for name, (member, _) in members.items()}
        schema["required"] = [name for name, (_, required) in members.items() if required]
        if (text := _own_docstring(cls)) is not None:
            schema = {"description": text, **schema}

        def read(value: JSON, place: str) -> object:
            return _made(
                dict if is_typed_dict(cls) else cls, _read_members(members, _of_type(value, dict, place), place), place
            )

        self._readers[cls] = read
        if cls.__name__ in self._definitions:
            self._definitions[cls.__name__] = schema
            return Hint({"$ref": f"#/$defs/{cls.__name__}"}, read)
        return Hint(schema, read)

    def _plain(self, hint: Any) -> Hint:
        if hint in _TEXTS:
            return _text(hint)
        if hint in _NAMES:
            return Hint({"type": _NAMES[hint]}, _reader_of(_NAMES[hint]), hint is type(None))
        kind = typing.get_origin(hint) or hint
        if isinstance(kind, type) and kind not in _OPEN:
            self._unread[kind.__qualname__] = None
        return _ANYTHING


def _read_members(members: Mapping[str, tuple[Hint, bool]], given: Mapping[str, JSON], place: str) -> dict[str, object]:
    for name in given:
        if name not in members:
            raise HintError(f"{place} has no {name!r}; it takes {sorted(members)}")
    for name, (_, required) in members.items():
        if required and name not in given:
            raise HintError(f"{place} needs {name!r}")
    return {name: members[name][0].read(value, f"{place}.{name}") for name, value in given.items()}


def _made(make: Callable[..., object], found: Mapping[str, object], place: str) -> object:
    try:
        return make(**found)
    except (ValueError, TypeError, AssertionError) as error:  # a __post_init__ that checks
        raise HintError(f"{place}: {error}") from None


def _members(cls: Any) -> Iterable[tuple[str, Any, bool]]:
    """Name, hint, and whether it has to be given."""
    hints = typing.get_type_hints(cls, include_extras=True)
    if dataclasses.is_dataclass(cls):
        absent = dataclasses.MISSING
        for one in dataclasses.fields(cls):
            if one.init:
                yield one.name, hints[one.name], one.default is absent and one.default_factory is absent
        return
    for name, hint in hints.items():
        # Where annotations are strings, the class itself does not know them as NotRequired.
        said = typing.get_origin(hint)
        is_wrapped = said in (typing.Required, typing.NotRequired)
        yield name, hint, said is typing.Required if is_wrapped else name in cls.__required_keys__


def _own_docstring(cls: type) -> str | None:
    text = inspect.cleandoc(cls.__doc__) if cls.__doc__ else ""
    return None if not text or text.startswith((f"{cls.__name__}(", "dict() ->")) else text


def _choices(choices: Mapping[Any, object]) -> Hint:
    names = list(dict.fromkeys(json_type(value) for value in choices if value is not None))
    schema: ParameterSchema = {"type": names[0] if len(names) == 1 else names, "enum": list(choices)}

    def read(value: JSON, place: str) -> object:
        for choice, member in choices.items():
            if choice == value and type(choice) is type(value):
                return member
        raise HintError(f"{place} must be one of {list(choices)}, not {value!r}")

    return Hint(schema, read, None in choices)


def _text(kind: type) -> Hint:
    form, parse = _TEXTS[kind]

    def read(value: JSON, place: str) -> object:
        try:
            return parse(_of_type(value, str, place))
        except ValueError:
            raise HintError(f"{place} must be a {form}, not {value!r}") from None

    return Hint({"type": "string", "format": form}, read)


def _reader_of(wanted: str) -> Read:
    def read(value: JSON, place: str) -> object:
        if json_type(value) == wanted:
            return value
        if type(value) is int and wanted == "number":
            return _float(value, place)
        if type(value) is float and wanted == "integer" and value.is_integer():
            return int(value)
        raise HintError(f"{place} must be {wanted}, not {json_type(value)}")

    return read


def _float(value: int, place: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise HintError(f"{place} is too large") from None


def _or_none(read: Read) -> Read:
    return lambda value, place: None if value is None else read(value, place)


def _first_that_reads(reads: Sequence[Read], schema: ParameterSchema) -> Read:
    """The member of the value's own type first: 3 is the integer of ``float | int``."""

    def read(value: JSON, place: str) -> object:
        found: list[object] = []
        problems: list[str] = []
        for one in reads:
            try:
                found.append(one(value, place))
            except HintError as error:
                problems.append(str(error))
        for candidate in found:
            if type(candidate) is type(value):
                return candidate
        if found:
            return found[0]
        names = schema.get("type")
        if isinstance(names, list):
            raise HintError(f"{place} must be {' or '.join(names)}, not {json_type(value)}")
        raise HintError("; or ".join(dict.fromkeys(problems)))

    return read


def _of_type(value: JSON, wanted: type[T], place: str) -> T:
    if type(value) is not wanted:
        raise HintError(f"{place} must be {_NAMES[wanted]}, not {json_type(value)}")
    return value


def _key(key: Hint, name: str, place: str) -> object:
    """Names in JSON are texts; a key of another kind is read from its text."""
    if key.schema.get("type") in ("integer", "number"):
        try:
            return int(name) if key.schema["type"] == "integer" else float(name)
        except ValueError:
            raise HintError(f"{place}: the name {name!r} must be {key.schema['type']}") from None
    return key.read(name, f"{place}: the name")


_ANYTHING = Hint({}, lambda value, place: value)
_OPEN: set[object] = {object, Any, numbers.Number, numbers.Complex, numbers.Real, collections.abc.Hashable}
"""Whatever JSON has is one of these, or nearly."""
