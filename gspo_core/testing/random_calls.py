"""Calls that fit the tools of an environment and mean nothing, to see what it does with them.

Rule: the same seed gives the same calls. Arguments fit their schemas as far as those are type hints; what only pydantic
checks, a pattern for instance, they may miss.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from gspo_core.json_value import JSON
from gspo_core.messages import ParameterSchema, ToolSchema

Action: TypeAlias = str | tuple[str, Mapping[str, JSON]]
"""Text, or a call."""
_FORMATS: Mapping[str, JSON] = {
    "date": "2026-11-22",
    "date-time": "2026-11-22T10:00:00",
    "time": "10:00:00",
    "uuid": "00000000-0000-4000-8000-000000000001",
}
# A class that holds itself ends here at the latest.
_MAX_DEPTH = 4


def random_actions(tools: Sequence[ToolSchema], task: Mapping[str, JSON], num_turns: int, seed: int) -> list[Action]:
    """Calls that fit the schemas, now and then with words from the task; words alone where there are no tools."""
    generator = random.Random(seed)
    texts = ["a", "1", "hello", *(value for value in task.values() if isinstance(value, str))]
    if not tools:
        return [generator.choice(texts) for _ in range(num_turns)]
    actions: list[Action] = []
    for _ in range(num_turns):
        function = generator.choice(tools)["function"]
        parameters = function.get("parameters", {})
        values = _Values(generator, texts, parameters.get("$defs", {}))
        actions.append((function["name"], values.members(parameters, 0)))
    return actions


class _Values:
    def __init__(
        self, generator: random.Random, texts: Sequence[str], definitions: Mapping[str, ParameterSchema]
    ) -> None:
        self._generator, self._texts, self._definitions = generator, texts, definitions

    def members(self, schema: ParameterSchema, depth: int) -> dict[str, JSON]:
        required = schema.get("required", ())
        return {
            name: self.value(member, depth + 1)
            for name, member in schema.get("properties", {}).items()
            if name in required or (self._generator.random() < 0.5 and depth < _MAX_DEPTH)
        }

    def value(self, schema: ParameterSchema, depth: int) -> JSON:
        generator = self._generator
        if "$ref" in schema:
            return self.value(self._definitions.get(schema["$ref"].rpartition("/")[2], {}), depth)
        if "enum" in schema:
            return generator.choice(schema["enum"])
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self.value(generator.choice(choices), depth)
        if "prefixItems" in schema:
            return [self.value(one, depth + 1) for one in schema["prefixItems"]]
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "array":
            least = schema.get("minItems", 0)
            most = 0 if depth >= _MAX_DEPTH else 2
            number = generator.randint(least, max(least, most))
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(number)]
        if kind == "object" and "properties" in schema:
            return self.members(schema, depth)
        return self._scalar(kind, schema)

    def _scalar(self, kind: str | None, schema: ParameterSchema) -> JSON:
        generator = self._generator
        low, high = _bounds(schema)
        values: dict[str | None, JSON] = {
            "integer": generator.randint(low, high),
            "number": generator.choice((0.5, 1.0, 2.0)),
            "boolean": generator.random() < 0.5,
            "object": {},
            "null": None,
        }
        return values.get(kind, generator.choice(self._texts))


def _bounds(schema: ParameterSchema) -> tuple[int, int]:
    """Those of a whole number, as pydantic's models declare them."""
    bounds: Mapping[str, object] = {**schema}
    low, above = bounds.get("minimum"), bounds.get("exclusiveMinimum")
    high, below = bounds.get("maximum"), bounds.get("exclusiveMaximum")
    least = low if isinstance(low, int) else above + 1 if isinstance(above, int) else None
    most = high if isinstance(high, int) else below - 1 if isinstance(below, int) else None
    if least is None:
        least = 0 if most is None else min(0, most)
    return least, max(least, most if most is not None else least + 5)
