"""YAML as people mean it: the core types of YAML 1.2, each key once.

One rule: a plain word is a text unless it is unmistakably something else, so that `no`, `12:30` and `1e-6` are what
they look like. It constructs no objects of types that a file names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gspo_core.strict_json import TextRejected

if TYPE_CHECKING:
    from collections.abc import Mapping

    import yaml

_PLAIN = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
    "merge": (re.compile(r"^<<$"), ["<"]),
}


def parse(text: str) -> Any:
    """The value of the one document in the text."""
    return _reading(text, lambda loader: loader.get_single_data())


def key_lines(text: str) -> Mapping[tuple[str | int, ...], int]:
    """The line of each key and list item, by its path; empty for a text that is not YAML."""
    try:
        root = _reading(text, lambda loader: loader.get_single_node())
    except TextRejected:
        return {}
    found: dict[tuple[str | int, ...], int] = {}
    pending: list[tuple[tuple[str | int, ...], Any]] = [((), root)]
    while pending and len(found) < 10_000:
        path, node = pending.pop()
        if getattr(node, "id", "") == "mapping":
            for key, value in node.value:
                found[(*path, key.value)] = key.start_mark.line + 1
                pending.append(((*path, key.value), value))
        elif getattr(node, "id", "") == "sequence":
            for position, item in enumerate(node.value):
                found[(*path, position)] = item.start_mark.line + 1
                pending.append(((*path, position), item))
    return found


def _reading(text: str, read: Callable[[yaml.SafeLoader], Any]) -> Any:
    import yaml

    try:
        loader = _loader_class()(text)
        try:
            return read(loader)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = error.problem or error.context or "not YAML"
        raise TextRejected(message, *((mark.line + 1, mark.column + 1) if mark else ())) from None
    except yaml.YAMLError as error:
        raise TextRejected(str(error).splitlines()[0]) from None
    except RecursionError:
        raise TextRejected("nested too deeply, or a value that contains itself") from None
    except ValueError as error:
        raise TextRejected(str(error)) from None


def _loader_class() -> type[yaml.SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 a table that the parent class has too

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            first: dict[Any, Any] = {}
            for key, _ in node.value:
                if key.value in first and isinstance(key.value, str) and key.tag != "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} occurs twice", key.start_mark
                    )
                if isinstance(key.value, str):
                    first[key.value] = key
            return super().construct_mapping(node, deep)

    for name, (pattern, first_characters) in _PLAIN.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", pattern, first_characters)
    # The parent reads 010 as eight.
    Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
    return Loader
