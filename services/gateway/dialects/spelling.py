"""Names of fields in either spelling that Google's APIs take: ``functionCall`` and ``function_call``.

Rule: only names that stand in the table of a dialect, where they stand in it, are spelled anew. What is anybody's own,
like the arguments of a call, stays as it is.
"""

from __future__ import annotations

from gspo_core.json_value import JSON
from services.gateway.dialects.sent import Fields, FieldValue


def in_camel_case(value: JSON, fields: Fields, place: str = "") -> JSON:
    """Raises ``Refusal`` where a field is there in both spellings."""
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
