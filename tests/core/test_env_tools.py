"""Tool schemas from type hints and docstrings, arguments from JSON, results and errors as text."""

import enum
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.env.tools import MAX_ERROR_CHARS, ArgumentError, Tool, error_text, result_content
from gspo_core.environment_contract import InvalidEnvironment


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


def order(
    self: Any,
    item: str,
    count: int,
    size: Size,
    speed: Literal["slow", "fast"] = "slow",
    price: float = 1.5,
    gift: bool = False,
    tags: list[str] = [],  # noqa: B006
    extra: dict[str, int] | None = None,
    note: Optional[str] = None,  # noqa: UP045
    ctx: Any = None,
) -> str:
    """Order something
    from the shop.

    It is not sent at once.

    Args:
        item: what to order:
            its name
        count (int): how many
        size: of the parcel
        note: for the receiver

    Returns:
        nothing: of interest
    """
    return ""


def properties(function: Any) -> dict[str, Any]:
    schema: Any = Tool.of("f", function).schema
    result: dict[str, Any] = schema["function"]["parameters"]["properties"]
    return result


def test_schema_of_a_documented_tool() -> None:
    assert Tool.of("order", order).schema == {
        "type": "function",
        "function": {
            "name": "order",
            "description": "Order something from the shop.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "what to order: its name"},
                    "count": {"type": "integer", "description": "how many"},
                    "size": {"type": "string", "enum": ["s", "l"], "description": "of the parcel"},
                    "speed": {"type": "string", "enum": ["slow", "fast"]},
                    "price": {"type": "number"},
                    "gift": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "extra": {"type": "object", "additionalProperties": {"type": "integer"}},
                    "note": {"type": "string", "description": "for the receiver"},
                },
                "required": ["item", "count", "size"],
            },
        },
    }


def test_an_optional_parameter_without_a_default_is_not_required_and_arrives_as_none() -> None:
    def look(where: str | None, depth: int) -> None: ...

    tool = Tool.of("look", look)
    assert tool.schema["function"]["parameters"]["required"] == ["depth"]
    assert tool.bind({"depth": 2}) == {"depth": 2, "where": None}
    assert tool.bind({"depth": 2, "where": None}) == {"depth": 2, "where": None}


def test_string_annotations_are_resolved_and_the_context_is_not() -> None:
    def look(where: "int | str", ctx: "OnlyForTypeCheckers") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    tool = Tool.of("look", look)
    assert tool.schema["function"]["parameters"]["properties"] == {"where": {"type": ["integer", "string"]}}
    assert tool.wants_ctx


def test_a_hint_that_cannot_be_resolved_is_refused_by_name() -> None:
    def look(where: "OnlyForTypeCheckers") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidEnvironment, match="'where' cannot be resolved"):
        Tool.of("look", look)


def test_positional_only_parameters_are_refused() -> None:
    def look(where: str, /) -> None: ...

    with pytest.raises(InvalidEnvironment, match="'where' is positional only"):
        Tool.of("look", look)


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Any, {}),
        (list, {"type": "array"}),
        (dict, {"type": "object"}),
        (dict[str, Any], {"type": "object"}),
        (list[list[float]], {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}),
        (Annotated[int, "a count"], {"type": "integer", "description": "a count"}),
        (int | list[str], {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Literal["a", 1], {"type": ["string", "integer"], "enum": ["a", 1]}),
        (object, {}),
    ],
)
def test_type_hints_become_json_schema(hint: Any, schema: dict[str, Any]) -> None:
    def look(where) -> None: ...  # type: ignore[no-untyped-def]

    look.__annotations__["where"] = hint
    assert properties(look) == {"where": schema}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([1], "arguments must be an object, not array"),
        (None, "arguments must be an object, not null"),
        ("[1]", "arguments must be an object, not array"),
        ("not json", "arguments must be an object, not string"),
        ({"count": 1, "size": "s"}, "order needs the argument 'item'"),
        ({"item": "a", "count": 1, "size": "s", "colour": 1}, "order has no argument 'colour'"),
        ({"item": "a", "count": 1, "size": "s", "ctx": 1}, "order has no argument 'ctx'"),
        ({"item": "a", "count": 1, "size": "s", "self": 1}, "order has no argument 'self'"),
        ({"item": "a", "count": "1", "size": "s"}, "count must be integer, not string"),
        ({"item": "a", "count": 1.5, "size": "s"}, "count must be integer, not number"),
        ({"item": "a", "count": True, "size": "s"}, "count must be integer, not boolean"),
        ({"item": 1, "count": 1, "size": "s"}, "item must be string, not integer"),
        ({"item": None, "count": 1, "size": "s"}, "item must be string, not null"),
        ({"item": "a", "count": 1, "size": "m"}, "size must be one of ['s', 'l'], not 'm'"),
        ({"item": "a", "count": 1, "size": ["s"]}, "size must be one of ['s', 'l'], not ['s']"),
    ],
)
def test_arguments_that_do_not_fit_name_the_parameter(arguments: Any, complaint: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Tool.of("order", order).bind(arguments)
    assert str(error.value).startswith(complaint)


def test_arguments_are_converted_to_what_the_hint_says() -> None:
    given_arguments = '{"item": "a", "count": 2.0, "size": "l", "price": 3}'
    bound = Tool.of("order", order).bind(given_arguments)
    assert bound == {"item": "a", "count": 2, "size": Size.LARGE, "price": 3.0}
    assert type(bound["count"]) is int
    assert type(bound["price"]) is float


def test_further_keywords_reach_a_tool_that_takes_them() -> None:
    def log(level: int, **fields: Any) -> None: ...

    tool = Tool.of("log", log)
    assert list(properties(log)) == ["level"]
    assert tool.bind({"level": 1, "colour": "red"}) == {"level": 1, "colour": "red"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(json_values | st.dictionaries(st.sampled_from(["item", "count", "size", "tags", "x"]), json_values))
def test_whatever_a_policy_writes_binds_or_is_an_argument_error(arguments: Any) -> None:
    try:
        bound = Tool.of("order", order).bind(arguments)
    except ArgumentError:
        return
    order(None, **bound)


@given(json_values)
def test_results_are_compact_json_that_reads_back(value: Any) -> None:
    content = result_content(value)
    if isinstance(value, str):
        assert content == value
    elif isinstance(content, str):
        assert json.loads(content) == value
        assert content == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def test_content_parts_and_arrays_pass() -> None:
    import numpy as np

    parts = [{"type": "text", "text": "hello"}]
    assert result_content(parts) is parts
    assert result_content({"values": np.arange(3)}) == '{"values":[0,1,2]}'
    with pytest.raises(TypeError, match="not JSON"):
        result_content({1, 2})


HELLO = {"type": "text", "text": "hello"}
PICTURE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}


@pytest.mark.parametrize(
    "parts",
    [
        [HELLO, PICTURE],
        [{"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}],
        [{"type": "image", "url": "x"}],
        [{"type": "text", "text": "as MCP's models are dumped", "annotations": None, "meta": None}],
        [{"type": "text", "text": "kept", "cache_control": {"type": "ephemeral"}}],
        [{"type": "image", "image": "x", "min_pixels": 3, "max_pixels": 9}],
        [{"type": "image", "source": {"type": "base64", "data": "AAAA"}}],
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    ],
)
def test_parts_of_a_known_form_pass(parts: list[dict[str, Any]]) -> None:
    assert result_content(parts) is parts


@pytest.mark.parametrize(
    "rows",
    [
        [{"type": "hotel", "name": "Ritz"}],
        [{"type": "text", "text": "hi", "author": "bob"}],
        [{"type": "n", "text": None}],
        [{"type": "text", "text": None}],
        [HELLO, {"type": "image", "url": "x", "title": "The Ritz"}],
        [{"type": "image", "width": 3}],
        [{"type": "image"}],
        [{"type": ["image"], "url": "x"}],
    ],
)
def test_data_that_has_a_type_is_data(rows: list[dict[str, Any]]) -> None:
    assert result_content(rows) == json.dumps(rows, separators=(",", ":"))


@dataclass
class Opaque:
    address: int


def test_error_text_is_short_and_free_of_what_a_policy_should_not_learn() -> None:
    assert error_text(ValueError("count must be 1..5")) == "error: ValueError: count must be 1..5"
    assert error_text(KeyError()) == "error: KeyError"
    text = error_text(RuntimeError(f"{object()} failed\n  in /srv/app/shop/store.py\nFor further information visit x"))
    assert text == "error: RuntimeError: <object object at 0x> failed in store.py"
    assert error_text(ValueError("use a/b or https://example.org/c/d, 1/2/3")).endswith("/c/d, 1/2/3")
    assert len(error_text(ValueError("x" * 10_000))) == MAX_ERROR_CHARS
