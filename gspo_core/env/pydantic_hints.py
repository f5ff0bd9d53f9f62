"""Hints that pydantic understands: its models, ``Field``, constraints. It is the pydantic that their author imported.

Rule: nothing here imports it, because an environment's own interpreter may have none. The schema says what pydantic
says, with references written out, because small models read no ``$ref`` and other readers look for types beside names,
and without the titles that repeat names. A class that holds itself keeps its ``$defs``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

from gspo_core.json_value import JSON
from gspo_core.messages import ParameterSchema

_OF_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types", "pydantic_extra_types")
_PREFIX = "#/$defs/"


def is_needed(hint: Any) -> bool:
    """Whether any part of the hint is pydantic's."""
    return any(_is_of_pydantic(part) for part in _parts(hint, set()))


class Field(Protocol):
    """What ``Field(...)`` makes."""

    def is_required(self) -> bool: ...

    def get_default(self, *, call_default_factory: bool) -> object: ...


def field_in(found: object) -> Field | None:
    """``Field(...)`` where a default or a note of ``Annotated`` stands."""
    fields = sys.modules.get("pydantic.fields")
    return cast(Field, found) if fields is not None and isinstance(found, fields.FieldInfo) else None


def default_in(hint: Any) -> Field | None:
    """The ``Field`` in ``Annotated`` that brings a default; the last one, as for pydantic."""
    notes = hint.__metadata__ if typing.get_origin(hint) is typing.Annotated else ()
    found = [field for note in notes if (field := field_in(note)) is not None and not field.is_required()]
    return found[-1] if found else None


class Adapter:
    """A hint, as pydantic reads it from JSON."""

    def __init__(self, hint: Any) -> None:
        pydantic = sys.modules.get("pydantic")
        if pydantic is None:
            raise ModuleNotFoundError("pydantic has not been imported", name="pydantic")
        self._adapter: Any = pydantic.TypeAdapter(hint)
        schema: dict[str, Any] = self._adapter.json_schema()
        definitions = schema.pop("$defs", {})
        kept: set[str] = set()
        self.schema = cast(ParameterSchema, _written_out(schema, definitions, (), kept))
        self.definitions: dict[str, ParameterSchema] = {}
        while kept - self.definitions.keys():
            for name in sorted(kept - self.definitions.keys()):
                whole = _written_out(definitions[name], definitions, (name,), kept)
                self.definitions[name] = cast(ParameterSchema, whole)
        self.accepts_none = self._reads(None)

    def read(self, value: JSON) -> object:
        """Raises ``ValueError``."""
        # As JSON, so that a text is a date where one is asked for even if the model is strict.
        return self._adapter.validate_json(json.dumps(value))

    def problem(self, error: ValueError, place: str) -> str:
        errors = getattr(error, "errors", None)
        if errors is None:
            return f"{place}: {error}"
        found = [f"{place}{_path(one['loc'])}: {one['msg']}" for one in errors(include_url=False)]
        return "; ".join(found)

    def _reads(self, value: JSON) -> bool:
        try:
            self.read(value)
        except ValueError:
            return False
        return True


def _path(places: tuple[int | str, ...]) -> str:
    return "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places)


def _is_of_pydantic(part: Any) -> bool:
    if isinstance(part, type) and (hasattr(part, "__pydantic_core_schema__") or hasattr(part, "__pydantic_fields__")):
        return True
    kind = part if isinstance(part, type) else type(part)
    own = hasattr(part, "__get_pydantic_core_schema__")
    return own or kind.__module__.partition(".")[0] in _OF_PYDANTIC


def _parts(hint: Any, seen: set[int]) -> Iterator[Any]:
    """The hint, what it is made of, and what the members of its classes are made of."""
    if id(hint) in seen:
        return
    seen.add(id(hint))
    hint = getattr(hint, "__value__", hint)
    yield hint
    if typing.get_origin(hint) is typing.Annotated:
        yield from hint.__metadata__
    for part in typing.get_args(hint):
        yield from _parts(part, seen)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or is_typed_dict(hint) or hasattr(hint, "_fields")):
        for member in _member_hints(hint):
            yield from _parts(member, seen)


def is_typed_dict(cls: object) -> bool:
    """Also one of typing_extensions, which `typing` does not know on every Python."""
    return isinstance(cls, type) and hasattr(cls, "__required_keys__") and hasattr(cls, "__total__")


def _member_hints(cls: type) -> list[Any]:
    try:
        return list(typing.get_type_hints(cls, include_extras=True).values())
    except (NameError, TypeError):  # reported where its members are read
        return []


def _written_out(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...], kept: set[str]) -> Any:
    """Without references and titles. ``kept`` receives the names of classes that hold themselves."""
    if isinstance(schema, list):
        return [_written_out(one, definitions, within, kept) for one in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix(_PREFIX)
    if name in definitions and (name in within or _holds_itself(name, definitions)):
        kept.add(name)
        return dict(schema)
    if name in definitions:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _written_out({**definitions[name], **beside}, definitions, (*within, name), kept)
    return {
        key: {name: _written_out(one, definitions, within, kept) for name, one in value.items()}
        if key in ("properties", "patternProperties")
        else _written_out(value, definitions, within, kept)
        for key, value in schema.items()
        if key not in ("title", "discriminator") or not isinstance(value, str | dict)
    }


def _holds_itself(name: str, definitions: Mapping[str, Any]) -> bool:
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        for other in _named(definitions[waiting.pop()]):
            if other == name:
                return True
            if other in definitions and other not in reached:
                reached.add(other)
                waiting.append(other)
    return False


def _named(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix(_PREFIX)
        for value in schema.values():
            yield from _named(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _named(value)
