"""Directed graphs as plain dictionaries: cycles, floors, and the edges between groups of nodes. Knows no modules."""

from __future__ import annotations

from collections.abc import Callable

Graph = dict[str, set[str]]


def components(graph: Graph) -> list[list[str]]:
    """Strongly connected components (Tarjan), each after every component that it points to."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            start = stack.index(node)
            found.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def cycles(graph: Graph) -> list[list[str]]:
    return [component for component in components(graph) if len(component) > 1]


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each node: 0 for one that points to nothing, else one above the highest that it points to. The
    members of a cycle share a floor."""
    floor: dict[str, int] = {}
    for component in components(graph):
        below = {other for node in component for other in graph[node]} - set(component)
        height = 1 + max((floor[other] for other in below), default=-1)
        floor |= dict.fromkeys(component, height)
    return floor


def grouped(graph: Graph, group_of: Callable[[str], str]) -> Graph:
    """The graph between groups of nodes; edges within a group are left out."""
    between: Graph = {}
    for node, others in graph.items():
        edges = between.setdefault(group_of(node), set())
        edges |= {group_of(other) for other in others} - {group_of(node)}
    return between


def num_edges(graph: Graph) -> int:
    return sum(len(others) for others in graph.values())
