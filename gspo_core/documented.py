"""The kind of pydantic model that everything a user configures is made of, and that which answers are shown in.

One rule: the docstring under a field is its only description. It becomes the field's text in the JSON schema. Sources
are read when a schema is asked for, never on import, and validators of what a user configures are built when a value is
validated: a command line that imports these models starts in a blink.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Annotated, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    JsonValue,
    ValidationInfo,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

T = TypeVar("T")


class Described(BaseModel):
    """Described by the docstrings under its fields."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        described = field_docs(cls)
        for name, field in cls.model_fields.items():
            spelled = name if name in properties else field.alias or name
            if spelled in properties and name in described:
                properties[spelled]["description"] = described[name]
        return schema


class Documented(Described):
    """Frozen, refuses unknown keys and switches for numbers, described by the docstrings under its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_switch(cls, value: T, info: ValidationInfo) -> T:
        """Python counts false as 0, which for a bound means everything and not nothing."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"a number, not {str(value).lower()}" + (" (null: off)" * (type(None) in kinds)))
        return value


def _kinds(annotation: object) -> set[object]:
    """The types that an annotation is made of, itself included."""
    return {annotation}.union(
        *(_kinds(part) for part in get_args(annotation) if isinstance(part, type) or get_args(part))
    )


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field of a model, those of the classes that it extends included."""
    docs: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        docs |= _docs_of_module(owner.__module__).get(owner.__qualname__, {}) if owner is not object else {}
    return {name: text for name, text in docs.items() if name in model.model_fields}


@functools.cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    """Class name to field name to docstring. A module without source has none."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, KeyError, TypeError):
        return {}
    return {node.name: _docs_of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docs_of_class(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for above, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[above.target.id] = " ".join(inspect.cleandoc(below.value.value).split())
    return docs


def _finite(value: T) -> T:
    for number in _numbers(value):
        if not math.isfinite(number):
            raise ValueError(f"numbers must be finite, not {number}")
    return value


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)


FreeForm = Annotated[dict[str, JsonValue], AfterValidator(_finite)]
"""Any JSON. It is checked by hand: a validator's ban on NaN and infinity does not reach into it."""
