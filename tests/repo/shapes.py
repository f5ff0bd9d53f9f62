"""The shape of a type as JSON: names and types of its fields, all the way down, without defaults and docstrings.

The rule: two types have the same shape exactly when what one writes the other reads as the same values. It knows
dataclasses, ``TypedDict``, ``msgspec.Struct``, named tuples, enumerations and what ``typing`` builds from them;
anything else is its name.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from gspo_core.json_value import JSON

Shape = str | list[Any] | dict[str, Any]


def shape_of(kind: Any, seen: tuple[Any, ...] = ()) -> Shape:
    if kind == JSON:
        return "JSON"
    if kind in seen:
        return str(kind.__name__)  # a type that holds itself
    origin = get_origin(kind)
    if origin is Literal:
        return {"literal": sorted(map(repr, get_args(kind)))}
    if origin in (Union, types.UnionType):
        return {"either": sorted((shape_of(one, seen) for one in get_args(kind)), key=str)}
    if origin in (Required, NotRequired):
        return shape_of(get_args(kind)[0], seen)
    if origin is not None:
        return {_name(origin): [shape_of(one, seen) for one in get_args(kind) if one is not Ellipsis]}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"one of": sorted(repr(one.value) for one in kind)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = [[one.encode_name, shape_of(one.type, (*seen, kind))] for one in msgspec.structs.fields(kind)]
        return {"in this order": fields} if kind.__struct_config__.array_like else _by_name(fields)
    if is_typeddict(kind) or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        names = _fields(kind, hints)
        return _by_name([[marked(kind, name, hints[name]), shape_of(hints[name], (*seen, kind))] for name in names])
    return _name(kind)


def _fields(kind: Any, hints: dict[str, Any]) -> list[str]:
    return [one.name for one in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(hints)


def marked(kind: Any, name: str, hint: Any) -> str:
    """A key of a ``TypedDict`` that may be missing is another key. (Python overlooks some of those in its own list.)"""
    may_be_missing = get_origin(hint) is NotRequired or (is_typeddict(kind) and name in kind.__optional_keys__)
    return f"{name}?" if may_be_missing and get_origin(hint) is not Required else name


def _by_name(fields: list[list[Any]]) -> dict[str, Any]:
    return {"fields": dict(sorted((name, shape) for name, shape in fields))}


# What is written is the same.
_SAME = {"Mapping": "dict", "Sequence": "list", "frozenset": "list", "set": "list", "tuple": "list"}


def _name(kind: Any) -> str:
    if kind is typing.Any:
        return "any"
    name = str(getattr(kind, "__name__", kind))
    return _SAME.get(name, name)
