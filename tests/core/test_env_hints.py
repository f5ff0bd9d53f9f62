"""Typed arguments as others write them: what the policy is told, what it may write, and what the tool is handed."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypeVar

import pydantic
import pytest
from annotated_doc import Doc
from annotated_types import Ge, Len
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict

from gspo_core.env import PlainEnvironment
from gspo_core.env.hints import HintError, hint_of
from gspo_core.env.tools import ArgumentError, Tool, result_content
from gspo_core.environment_contract import InvalidEnvironment
from gspo_core.testing.checks import _tools
from gspo_core.testing.random_calls import random_actions
from tests.core.env_kit import call, play

T = TypeVar("T")


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


class Item(BaseModel):
    """A thing in the shop."""

    name: str = Field(min_length=1, description="as on the label")
    count: int = Field(1, ge=1, le=9)
    size: Size = Size.SMALL


class Order(BaseModel):
    items: list[Item]
    note: str | None = None
    by: datetime.date | None = None


class Node(BaseModel):
    value: int
    children: list[Node] = []


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0
    tags: list[str] = dataclasses.field(default_factory=list)


class Address(TypedDict):
    street: str
    number: NotRequired[int]


class Pair(NamedTuple):
    first: int
    second: str = "b"


@dataclasses.dataclass
class Tree:
    """One that holds itself."""

    size: Size
    left: Tree | None = None
    right: Tree | None = None


@pydantic_dataclass
class Bounded:
    count: Annotated[int, Field(gt=0)]


def busy(
    tree: Tree,
    order: Order,
    points: list[Point],
    where: dict[str, Address],
    when: datetime.datetime | None,
    some: set[int],
) -> None: ...


FITTING: dict[str, Any] = {
    "tree": {"size": "s"},
    "order": {"items": []},
    "points": [],
    "where": {},
    "when": None,
    "some": [],
}
PARAMETERS = list(FITTING)
MEMBERS = ["size", "left", "right", "items", "name", "count", "x", "y", "tags", "street", "number"]


def plain(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """What pydantic says, put into one piece: another way to write it than the one that is tested."""
    if isinstance(schema, list):
        return [plain(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    if "$ref" in schema:
        found = plain(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: plain(one, definitions) for name, one in value.items()}
        elif key not in ("$ref", "$defs") and not (key == "title" and isinstance(value, str)):
            found[key] = plain(value, definitions)
    return found


def pydantics(hint: Any) -> Any:
    schema = TypeAdapter(hint).json_schema()
    return plain(schema, schema.get("$defs", {}))


@pytest.mark.parametrize(
    "hint",
    [
        *(Item, Order, Bounded, list[Item], dict[str, Order], Item | Order, Item | None, tuple[Item, int]),
        Annotated[int, Field(ge=1, le=5, description="how many")],
        Annotated[str, Field(pattern="^a+$")],
        Annotated[list[int], Len(1, 3)],
        Annotated[int, Ge(2)],
        list[Annotated[int, Field(gt=0)]],
        pydantic.AnyUrl,
    ],
    ids=str,
)
def test_where_pydantic_is_needed_the_schema_is_pydantics(hint: Any) -> None:
    assert hint_of(hint).schema == pydantics(hint)


@pytest.mark.parametrize(
    "hint",
    [
        *(int, float, str, bool, Size, Literal["a", "b"], Point, Address, Pair, list[Point], dict[str, Address]),
        *(list[str], dict[str, list[int]], tuple[int, str], tuple[int, ...], set[str], frozenset[int]),
        *(datetime.date, datetime.datetime, datetime.time, uuid.UUID, Path, Sequence[int], Mapping[str, int]),
        *(int | list[str], NewType("Id", int)),  # but ``int | str`` is a list of types, as transformers has it
    ],
    ids=str,
)
def test_what_the_standard_library_describes_is_described_as_pydantic_does(hint: Any) -> None:
    """But for defaults, which are not told."""
    assert without_defaults(hint_of(hint).schema) == without_defaults(pydantics(hint))


def without_defaults(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_defaults(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("properties") is not None:
        schema = {"required": [], **schema}
    return {key: without_defaults(value) for key, value in schema.items() if key != "default"}


VALUES: list[tuple[Any, Any]] = [
    (Item, {"name": "tea", "count": 2, "size": "l"}),
    (Order, {"items": [{"name": "tea"}], "by": "2026-11-22"}),
    (Node, {"value": 1, "children": [{"value": 2}]}),
    (Bounded, {"count": 3}),
    (Point, {"x": 1, "tags": ["a"]}),
    (Address, {"street": "a"}),
    (Pair, [1]),
    (Tree, {"size": "s", "left": {"size": "l", "right": {"size": "s"}}}),
    (Size, "l"),
    (list[Size], ["s", "l"]),
    (dict[str, Point], {"a": {"x": 1.5}}),
    (tuple[int, str], [1, "a"]),
    (tuple[int, ...], [1, 2, 3]),
    (set[int], [1, 2, 2]),
    (datetime.datetime, "2026-11-22T10:00:00"),
    (uuid.UUID, "12345678-1234-5678-1234-567812345678"),
    (Path, "a/b"),
    (Item | Point, {"x": 1.0}),
    (Literal["a", 1], 1),
    (Sequence[int], [1]),
    (dict[int, str], {"3": "c"}),
    (Annotated[int, Field(ge=1)], 3),
]


@pytest.mark.parametrize(("hint", "value"), VALUES, ids=[str(hint) for hint, _ in VALUES])
def test_a_value_arrives_as_pydantic_would_hand_it_over(hint: Any, value: Any) -> None:
    found = hint_of(hint).read(value, "it")
    expected = TypeAdapter(hint).validate_json(json.dumps(value))
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value", "complaint"),
    [
        (Item, {"name": ""}, "it.name: String should have at least 1 character"),
        (Item, {"name": "tea", "count": 10}, "it.count: Input should be less than or equal to 9"),
        (Order, {"items": [{"name": "a"}, {}]}, "it.items[1].name: Field required"),
        (Order, 7, "it: Input should be an object"),
        (Point, {"y": 1.0}, "it needs 'x'"),
        (Point, {"x": "1"}, "it.x must be number, not string"),
        (Point, {"x": 1, "z": 1}, "it has no 'z'; it takes ['tags', 'x', 'y']"),
        (Point, {"x": 1, "tags": ["a", 2]}, "it.tags[1] must be string, not integer"),
        (list[Size], ["s", "m"], "it[1] must be one of ['s', 'l'], not 'm'"),
        (Tree, {"size": "s", "left": {"size": "l", "right": 1}}, "it.left.right must be object, not integer"),
        (tuple[int, str], [1], "it must have 2 items, not 1"),
        (datetime.date, "tomorrow", "it must be a date, not 'tomorrow'"),
        (set[Any], [{}], "it holds what cannot be in a set"),
        (dict[int, str], {"a": "b"}, "it: the name 'a' must be integer"),
        (int | list[str], {}, "it must be integer, not object; or it must be array, not object"),
        (int | str, None, "it must be integer or string, not null"),
        (Annotated[int, Field(ge=1)], 0, "it: Input should be greater than or equal to 1"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(hint: Any, value: Any, complaint: str) -> None:
    with pytest.raises(HintError) as error:
        hint_of(hint).read(value, "it")
    assert str(error.value).startswith(complaint)
    assert "http" not in str(error.value)


def test_a_class_that_holds_itself_has_definitions() -> None:
    def plant(tree: Tree, node: Node) -> None: ...

    parameters: Any = Tool.of("plant", plant).schema["function"]["parameters"]  # type: ignore[arg-type]
    assert parameters["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert parameters["properties"]["node"] == {"$ref": "#/$defs/Node"}
    assert parameters["$defs"]["Tree"] == {
        "description": "One that holds itself.",
        "type": "object",
        "properties": {
            "size": {"type": "string", "enum": ["s", "l"]},
            "left": {"$ref": "#/$defs/Tree"},
            "right": {"$ref": "#/$defs/Tree"},
        },
        "required": ["size"],
    }
    assert parameters["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}


def test_a_literal_of_members_is_told_and_read_by_their_values() -> None:
    hint = hint_of(Literal[Size.SMALL, "huge"])
    assert hint.schema == {"type": "string", "enum": [Size.SMALL.value, "huge"]}
    assert hint.read(Size.SMALL.value, "it") is Size.SMALL
    assert hint.read("huge", "it") == "huge"
    with pytest.raises(HintError, match="must be one of"):
        hint.read(Size.LARGE.value, "it")


def test_a_field_where_a_default_stands_is_a_constraint_and_a_default() -> None:
    def order(
        item: str = Field(description="what"),
        count: int = Field(2, ge=1),
        tags: list[str] = Field(default_factory=list),  # noqa: B008
    ) -> None: ...

    tool = Tool.of("order", order)
    parameters: Any = tool.schema["function"]["parameters"]  # type: ignore[typeddict-item]
    assert parameters["required"] == ["item"]
    assert parameters["properties"]["item"] == {"type": "string", "description": "what"}
    assert parameters["properties"]["count"] == {"type": "integer", "minimum": 1, "default": 2}
    first, second = tool.bind({"item": "a"}), tool.bind({"item": "a"})
    assert first == {"item": "a", "count": 2, "tags": []}
    assert first["tags"] is not second["tags"]
    with pytest.raises(ArgumentError, match="count: Input should be greater than or equal to 1"):
        tool.bind({"item": "a", "count": 0})


def test_a_field_in_annotated_brings_a_default_where_the_function_has_none() -> None:
    def order(
        count: Annotated[int, Field(default=2)],
        tags: Annotated[list[str], Field(default_factory=list)],
        few: Annotated[int, Field(default=1)] = Field(ge=1),
        own: Annotated[int, Field(default=7)] = 8,
        *,
        item: Annotated[str, Field(description="what")],
    ) -> None: ...

    tool = Tool.of("order", order)
    parameters: Any = tool.schema["function"]["parameters"]  # type: ignore[typeddict-item]
    assert parameters["required"] == ["item"]
    assert parameters["properties"]["count"] == {"type": "integer", "default": 2}
    first, second = tool.bind({"item": "a"}), tool.bind({"item": "a"})
    assert first == {"count": 2, "tags": [], "few": 1, "item": "a"}
    assert first["tags"] is not second["tags"]


@pytest.mark.parametrize(
    "hint", [Annotated[int, "a count"], Annotated[int, Doc("a count")], Annotated[int, Field(description="a count")]]
)
def test_words_in_annotated_describe_where_the_docstring_does_not(hint: Any) -> None:
    def bare(count: int) -> None: ...

    def told(count: int) -> None:
        """Count.

        Args:
            count: of the docstring
        """

    for function, text in ((bare, "a count"), (told, "of the docstring")):
        function.__annotations__["count"] = hint
        properties: Any = Tool.of("f", function).schema["function"]["parameters"]["properties"]  # type: ignore[typeddict-item]
        assert properties["count"] == {"type": "integer", "description": text}


GOOGLE = """Order something.

Args:
    item (str): what to order,
        by its name
    count: how many: at
        least one
    *rest: ignored

Returns:
    item: not this
"""
NUMPY = """Order something.

Parameters
----------
item : str
    what to order,
    by its name
count : {1, 2}, optional
    how many: at
    least one

Returns
-------
item : str
    not this
"""
SPHINX = """Order something.

:param item: what to order,
    by its name
:type item: str
:param int count: how many: at
    least one
:returns: not this
:raises ValueError: never
"""
EPYDOC = (
    SPHINX.replace(":param int", "@param").replace(":param", "@param").replace(":type", "@type").replace(":r", "@r")
)


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX, EPYDOC], ids=["google", "numpy", "sphinx", "epydoc"])
def test_docstrings_are_read_in_every_style(text: str) -> None:
    def order(item: str, count: int = 1) -> None: ...

    order.__doc__ = text
    function: Any = Tool.of("order", order).schema["function"]
    assert function["description"] == "Order something."
    texts = {name: schema["description"] for name, schema in function["parameters"]["properties"].items()}
    assert texts == {"item": "what to order, by its name", "count": "how many: at least one"}


def test_several_parameters_of_numpy_share_their_text_and_a_heading_in_the_text_is_none() -> None:
    def move(x: float, y: float) -> None:
        """Move.
        Parameters
        ----------
        x, y : float
            in metres
        """

    function: Any = Tool.of("move", move).schema["function"]
    assert function["description"] == "Move."
    assert {schema["description"] for schema in function["parameters"]["properties"].values()} == {"in metres"}


async def test_tools_get_what_they_declare_and_return_what_they_like() -> None:
    seen: list[object] = []

    class Shop:
        """Sell."""

        def reset(self) -> str:
            return "go"

        def order(self, order: Order, point: Point, size: Size) -> Order:
            """Order.

            Args:
                order: it
                point: where
                size: how large
            """
            seen.extend((order, point, size))
            return order

        def get_reward(self) -> float:
            return 1.0

    said = {"order": {"items": [{"name": "tea"}]}, "point": {"x": 1}, "size": "l"}
    played = await play(
        PlainEnvironment(Shop, {}, name="shop"), call("order", **said), call("order", **(said | {"order": {}}))
    )
    assert seen == [Order(items=[Item(name="tea")]), Point(1.0), Size.LARGE]
    assert [message["content"] for message in played.answers] == [
        '{"items":[{"name":"tea","count":1,"size":"s"}],"note":null,"by":null}',
        "error: order.items: Field required",
    ]


def test_results_of_every_kind_become_json() -> None:
    tree = Tree(Size.LARGE, Tree(Size.SMALL))
    text = '{"size":"l","left":{"size":"s","left":null,"right":null},"right":null}'
    assert result_content(tree) == text
    day = datetime.date(2026, 11, 22)
    assert result_content([day, uuid.UUID(int=1), Path("a")]) == f'["2026-11-22","{uuid.UUID(int=1)}","a"]'


def test_a_hint_that_pydantic_refuses_is_refused_by_name() -> None:
    class Opaque: ...

    def look(where: Annotated[Opaque, Field(description="x")]) -> None: ...

    look.__annotations__["where"] = Annotated[Opaque, Field(description="x")]
    with pytest.raises(InvalidEnvironment, match="'where' cannot be read from JSON"):
        Tool.of("look", look)


class Opaque:
    """Nobody here knows how to make one."""


@dataclasses.dataclass
class Trip:
    name: str
    lasts: datetime.timedelta


@pytest.mark.parametrize(
    ("hint", "unread"),
    [
        (list[Decimal], "Decimal"),
        (dict[str, bytes], "bytes"),
        (tuple[int, Opaque], "Opaque"),
        (int | list[deque[int]], "deque"),
        (Trip, "timedelta"),
        (list[Trip | Opaque] | None, "timedelta, Opaque"),
        (Annotated[list[Opaque], "some"], "Opaque"),
    ],
    ids=str,
)
def test_a_class_within_a_hint_that_is_not_understood_is_named(hint: Any, unread: str) -> None:
    assert f"take(given) gets plain JSON in place of {unread}, which" in tools_check_of(hint)


@pytest.mark.parametrize(
    "hint",
    [*(list[Any], dict, list, dict[str, object], list[Number], list[T], Tree, list[Pair], Address, Order, int | None)],
    ids=str,
)
def test_a_hint_that_is_open_or_understood_is_not_refused(hint: Any) -> None:
    assert "plain JSON" not in tools_check_of(hint)


def test_a_tool_that_gets_plain_json_can_be_played_as_before() -> None:
    def take(given: list[Decimal], own: Opaque) -> None: ...

    tool = Tool.of("take", take)  # type: ignore[arg-type]
    assert tool.bind({"given": [0.5], "own": {"a": 1}}) == {"given": [0.5], "own": {"a": 1}}


def tools_check_of(hint: Any) -> str:
    class Taking:
        def reset(self) -> str:
            return "go"

        def take(self, given: Any) -> None:
            """Take.

            Args:
                given: it
            """

        def get_reward(self) -> float:
            return 1.0

    Taking.take.__annotations__["given"] = hint
    return _tools(PlainEnvironment(Taking, {}, name="taking")).message


def test_pydantic_is_not_loaded_for_those_who_do_not_use_it(tmp_path: Path) -> None:
    """What runs in an environment's own interpreter may have no pydantic."""
    (tmp_path / "world.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n"
        "class World:\n    def reset(self): return 'go'\n"
        "    def go(self, to: Point) -> str:\n        '''Go.\n\n        Args:\n            to: there\n        '''\n"
        "    def get_reward(self): return 0.0\n"
    )
    program = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from gspo_core.env.loading import load_environment\n"
        f"print(load_environment({str(tmp_path / 'world.py')!r} + ':World').tools)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "'x': {'type': 'integer'}" in done.stdout


def test_random_calls_fit_the_schema() -> None:
    def busy(
        order: Order,
        tree: Tree,
        node: Node,
        point: Point,
        address: Address,
        pair: Pair,
        either: Item | Point,
        day: datetime.date,
        few: Annotated[int, Field(ge=3, lt=5)],
        none: Annotated[int, Field(le=-3)],
        some: Annotated[list[int], Len(1, 3)],
    ) -> None: ...

    tool = Tool.of("busy", busy)
    seen = [tool.bind(arguments) for _, arguments in random_actions([tool.schema], {}, 200, seed=1)]
    assert {one["few"] for one in seen} == {3, 4}
    assert any(one["tree"].left is not None for one in seen)  # type: ignore[attr-defined]


async def test_parameters_may_have_any_name() -> None:
    class Anything:
        def reset(self, name: str, timeout_s: float, function: str) -> str:
            return f"{name} {timeout_s} {function}"

        def call(self, name: str, timeout_s: float, function: str, arguments: str, keywords: str) -> str:
            """Call."""
            return f"{name} {timeout_s} {function} {arguments} {keywords}"

        async def wait(self, name: str, timeout_s: float, function: str) -> str:
            """Wait."""
            return f"{name} {timeout_s} {function}"

        def get_reward(self) -> float:
            return 1.0

    Anything.tasks = [{"name": "n", "timeout_s": 1.0, "function": "f"}]  # type: ignore[attr-defined]
    some = {"name": "n", "timeout_s": 2.0, "function": "f"}
    played = await play(
        PlainEnvironment(Anything, {}, name="x"),
        call("call", **some, arguments="a", keywords="k"),
        call("wait", **some),
    )
    assert played.first[-1]["content"] == "n 1.0 f"
    assert [message["content"] for message in played.answers] == ["n 2.0 f a k", "n 2.0 f"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("2026-11-22"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(MEMBERS), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(PARAMETERS), json_values))
def test_whatever_a_policy_writes_for_typed_parameters_binds_or_is_an_argument_error(arguments: Any) -> None:
    given_them: Any = {name: arguments.get(name, FITTING[name]) for name in PARAMETERS}
    try:
        bound = Tool.of("busy", busy).bind(given_them)
    except ArgumentError:
        return
    assert isinstance(bound["tree"], Tree)
    assert isinstance(bound["order"], Order)
    assert all(isinstance(one, Point) for one in bound["points"])  # type: ignore[attr-defined]
    assert isinstance(bound["when"], datetime.datetime | None)


def nested(depth: int) -> Any:
    tree: Any = {"size": "s"}
    for _ in range(depth):
        tree = {"size": "s", "left": tree}
    return tree


def test_what_is_nested_beyond_measure_or_too_large_is_an_argument_error() -> None:
    tool = Tool.of("busy", busy)
    assert tool.bind({**FITTING, "tree": nested(20)})["tree"] != FITTING["tree"]
    with pytest.raises(ArgumentError, match="tree is nested too deeply"):
        tool.bind({**FITTING, "tree": nested(500)})
    with pytest.raises(ArgumentError, match=r"points\[0\].x is too large"):
        tool.bind({**FITTING, "points": [{"x": 10**400}]})
