"""Schemas of parameters as Gemini writes them, made JSON schema: types are in capitals there.

Rule: names of properties are anybody's and stay as they are; nothing else is changed.
"""

from __future__ import annotations

from gspo_core.json_value import JSON

_OF_ONE = frozenset({"items", "additionalProperties"})
_OF_SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_OF_NAMES = frozenset({"properties", "defs", "$defs"})


def as_json_schema(schema: JSON) -> JSON:
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
