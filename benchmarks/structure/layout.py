"""Where the boxes and lines of a layered graph go: floors, the order on each floor, positions.

A line that passes a floor holds a narrow slot there, so it never crosses a box. The same graph gives the same picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, islice, pairwise, permutations
from statistics import fmean

from benchmarks.structure.graph import Graph, cycles, floors

BOX, SLOT, GAP = 184.0, 14.0, 22.0
SWEEPS = 24
MAX_TRIED = 720
"""Orders of the highest floor that are compared: all of them, up to six boxes."""


@dataclass
class Place:
    """A box, or the slot of a line that passes."""

    name: str
    floor: int
    width: float
    x: float = 0.0
    """Of the middle."""
    above: list[Place] = field(default_factory=list)
    below: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class Layout:
    places: list[list[Place]]
    """By floor, lowest first, each from left to right; slots have no name."""
    lines: list[list[Place]]
    """Each from its upper box to its lower one."""
    width: float


def reduced(graph: Graph) -> Graph:
    """Without edges that a longer way implies. The graph has no cycle."""
    reached: Graph = {}

    def reach(node: str) -> set[str]:
        if node not in reached:
            reached[node] = set(graph[node]).union(*(reach(other) for other in graph[node]))
        return reached[node]

    return {
        node: {other for other in others if not any(other in reach(third) for third in others - {other})}
        for node, others in graph.items()
    }


def lay_out(graph: Graph, top: set[str]) -> Layout:
    """``top``: what stands on the highest floor although a lower one would do; nothing may point to it.

    Of all orders of the highest floor the one is taken whose lines cross the least, then the one with short lines.
    """
    if found := cycles(graph):
        raise ValueError(f"rooms that import each other cannot stand on floors: {found}")
    floor = floors(graph)
    highest = max(floor.values())
    floor |= dict.fromkeys(top & graph.keys(), highest)
    row = sorted(name for name in graph if floor[name] == highest)
    tried = (_in_order(graph, floor, order) for order in islice(permutations(row), MAX_TRIED))
    return min(tried, key=lambda layout: (_num_crossings(layout), _length(layout)))


def _in_order(graph: Graph, floor: dict[str, int], order: tuple[str, ...]) -> Layout:
    kept = reduced(graph)
    boxes = {name: Place(name, floor[name], BOX) for name in [*order, *sorted(graph.keys() - set(order))]}
    places: list[list[Place]] = [[] for _ in range(max(floor.values()) + 1)]
    for box in boxes.values():
        places[box.floor].append(box)
    lines = [_line(boxes[name], boxes[other], places) for name in sorted(kept) for other in sorted(kept[name])]
    for row in places:
        _spread(row, [place.x for place in row])
    for sweep in range(SWEEPS):
        for row in places if sweep % 2 else reversed(places):
            _settle(row, downwards=sweep % 2 == 0, sort=sweep < SWEEPS // 2 and row is not places[-1])
        if sweep == SWEEPS // 2:
            _untangle(places)
    return Layout(places, lines, _shift_to_zero(places))


def _untangle(places: list[list[Place]]) -> None:
    """Neighbours change places as long as fewer lines cross for it."""
    better = True
    while better:
        better = False
        for row in places:
            for index in range(len(row) - 1):
                one, other = row[index : index + 2]
                if _crossings_of(other, one) < _crossings_of(one, other):
                    row[index : index + 2] = [other, one]
                    one.x, other.x = other.x, one.x
                    better = True


def _crossings_of(left: Place, right: Place) -> int:
    """Between the lines of two neighbours, in this order."""
    return sum(
        one.x > other.x
        for side, facing in ((left.above, right.above), (left.below, right.below))
        for one in side
        for other in facing
    )


def _segments(layout: Layout) -> Iterator[tuple[Place, Place]]:
    return (segment for line in layout.lines for segment in pairwise(line))


def _num_crossings(layout: Layout) -> int:
    pairs = combinations(_segments(layout), 2)
    return sum(
        one.floor == other.floor and (one.x - other.x) * (under.x - below.x) < 0
        for (one, under), (other, below) in pairs
    )


def _length(layout: Layout) -> float:
    return sum(abs(one.x - other.x) for one, other in _segments(layout))


def _line(upper: Place, lower: Place, places: list[list[Place]]) -> list[Place]:
    line = [upper]
    for floor in range(upper.floor - 1, lower.floor, -1):
        slot = Place("", floor, SLOT)
        places[floor].append(slot)
        line.append(slot)
    line.append(lower)
    for one, other in pairwise(line):
        one.below.append(other)
        other.above.append(one)
    return line


def _settle(row: list[Place], *, downwards: bool, sort: bool) -> None:
    """Each place wants to be in the middle of its neighbours on the floor that was settled before."""

    def wish(place: Place) -> float:
        near = place.above if downwards else place.below
        near = near or place.below or place.above
        return fmean(one.x for one in near) if near else place.x

    wishes = {id(place): wish(place) for place in row}
    if sort:
        row.sort(key=lambda place: (wishes[id(place)], place.name))
    _spread(row, [wishes[id(place)] for place in row])


def _spread(row: list[Place], wanted: list[float]) -> None:
    """Positions near the wanted ones, in this order and without overlap: pushed to the right, then to the left, and
    the mean of both."""
    right = [*wanted]
    for index in range(1, len(row)):
        apart = (row[index - 1].width + row[index].width) / 2 + GAP
        right[index] = max(right[index], right[index - 1] + apart)
    left = [*wanted]
    for index in range(len(row) - 2, -1, -1):
        apart = (row[index].width + row[index + 1].width) / 2 + GAP
        left[index] = min(left[index], left[index + 1] - apart)
    for place, one, other in zip(row, right, left, strict=True):
        place.x = (one + other) / 2


def _shift_to_zero(places: list[list[Place]]) -> float:
    every = [place for row in places for place in row]
    start = min(place.x - place.width / 2 for place in every)
    for place in every:
        place.x -= start
    return max(place.x + place.width / 2 for place in every)
