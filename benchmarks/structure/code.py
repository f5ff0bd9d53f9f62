"""Sizes of functions and files, and annotations that say nothing about a value.

A loose annotation is ``Any``, ``object``, or a mapping from strings to JSON. Annotations are those of parameters,
results and variables; what stands in an expression (``cast(Any, x)``, a base class) is not counted.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from benchmarks.structure.source import Module

LONG_FUNCTION = 54
# Written from the API's document, so it defines nothing: a name that it shares with a model has that model's meaning.
WRITTEN = {"gspo_core.api_answers"}
_MAPPINGS = ("dict", "Mapping", "MutableMapping")
_JSON = re.compile(r"Json(Value)?|JSON(Value)?")


def function_lengths(modules: Iterable[Module]) -> list[int]:
    """Lines of each function and method, from ``def`` to its end, shortest first."""
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sorted(lengths)


def percentile(values: list[int], share: float) -> int:
    """The smallest value that is not below ``share`` of ``values``, which are sorted."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0


def loose_annotations(modules: Iterable[Module]) -> Counter[str]:
    """How often each loose type stands in an annotation, and under ``aliases`` how often a name that stands for one."""
    read = list(modules)
    aliases = {name for module in read for name in _loose_aliases(module.tree)}
    counted: Counter[str] = Counter()
    for module in read:
        for annotation in _annotations(module.tree):
            counted.update(_loose(annotation))
            names = (node.id for node in _nodes(annotation) if isinstance(node, ast.Name))
            counted["aliases"] += sum(name in aliases for name in names)
    return counted


def ambiguous_classes(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Public names of classes that several modules give to something of their own, with these modules."""
    places = defaultdict[str, set[str]](set)
    for name in modules.keys() - WRITTEN:
        for node in ast.walk(modules[name].tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(name)
    return {one: sorted(where) for one, where in places.items() if len(where) > 1}


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Aliases are definitions: what they stand for is counted once, as an annotation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.AnnAssign):
            yield node.value if _is_alias(node) and node.value else node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns


def _is_alias(node: ast.AnnAssign) -> bool:
    return "TypeAlias" in ast.unparse(node.annotation)


def _loose_aliases(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if _is_alias(node) and node.value and any(_loose(node.value)):
                yield node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id[:1].isupper() and any(_loose(node.value)):
                    yield target.id


def _loose(annotation: ast.expr) -> Iterator[str]:
    for node in _nodes(annotation):
        if isinstance(node, ast.Name) and node.id in ("Any", "object"):
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr == "Any":
            yield "Any"
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2:
            key, value = (ast.unparse(one) for one in node.slice.elts)
            if ast.unparse(node.value) in _MAPPINGS and key == "str" and _JSON.fullmatch(value):
                yield "dict[str, JSON]"


def _nodes(annotation: ast.expr) -> Iterator[ast.AST]:
    """Of an annotation and of those written as a string in it."""
    for node in ast.walk(annotation):
        yield node
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                yield from ast.walk(ast.parse(node.value, mode="eval"))
            except SyntaxError:  # a string that is a value, as in Literal["a b"]
                continue
