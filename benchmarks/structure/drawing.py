"""The rooms as a picture: boxes on floors, arrows downwards to what a room imports.

The picture is SVG text that follows the reader's light or dark setting. An arrow that a longer way implies is left out.
"""

from __future__ import annotations

from collections import Counter
from xml.sax.saxutils import escape

from benchmarks.structure.graph import Graph
from benchmarks.structure.layout import BOX, Layout, Place, lay_out
from benchmarks.structure.measure import lines_by_room, room_graph
from benchmarks.structure.source import Module

# What each room is, in two short lines, and whether it is a process.
DUTIES = {
    "services.api": ("HTTP and SSE, the viewer:", "jobs, environments, views"),
    "services.rollout": ("plays episodes with their", "environments: turns, tools"),
    "services.workers": ("what holds episodes: leases,", "beats, engines, outcomes"),
    "services.trainer": ("admits groups, trains steps,", "publishes weights"),
    "services.engine": ("the embedded engine:", "SGLang's protocol on torch"),
    "services.gateway": ("the HTTP endpoint that", "outside agents talk to"),
    "services.evaluation": ("`gspo eval`: plays outside", "any job, and stores nothing"),
    "services.launch": ("starts the processes: here,", "or through a batch system"),
    "services.episodes": ("what plays an episode:", "ledger, history, outbox"),
    "services.hosts": ("where environments run:", "processes, pools, remote"),
    "services.state": ("Redis: queue, jobs, leases;", "nothing else speaks to it"),
    "services.engines": ("what an engine is to us:", "client, probe, weights"),
    "services.files": ("a job's directory:", "paths, logs, weights, fsync"),
    "services.process": ("how a process lives:", "settings, health, signals"),
    "environments": ("built-in worlds, written", "as a plug-in would be"),
    "gspo_core": ("what the system means:", "nouns, objective, learner"),
}
PROCESSES = {f"services.{name}" for name in ("api", "rollout", "trainer", "engine", "gateway", "launch")}

HEIGHT, RISE, MARGIN, LABELS, HEAD, FOOT = 80.0, 136.0, 28.0, 96.0, 78.0, 54.0
_STYLE = """
  .page { fill: #ffffff } .floor { fill: #f4f6f8 }
  .line { stroke: #8a96a3; fill: none; stroke-width: 1.6 } .tip { fill: #8a96a3 } .box { stroke-width: 1.4 }
  text { font-family: system-ui, sans-serif; fill: #1f2933 }
  .name { font: 600 16px ui-monospace, 'DejaVu Sans Mono', monospace } .duty { font-size: 12px; fill: #46525e }
  .size { font-size: 11px; fill: #6b7783 } .title { font-size: 20px; font-weight: 600 }
  .note { font-size: 13px; fill: #46525e }
  .process { fill: #e3efff; stroke: #3b78c4 } .shared { fill: #ffffff; stroke: #9aa6b2 }
  .library { fill: #e5f4e9; stroke: #3f9158 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0f1419 } .floor { fill: #171d24 } .line { stroke: #7c8998 } .tip { fill: #7c8998 }
    text { fill: #e6ebf0 } .duty, .note { fill: #b3bec9 } .size { fill: #8f9ba8 }
    .process { fill: #16304f; stroke: #5a97e0 } .shared { fill: #222a33; stroke: #66727f }
    .library { fill: #17351f; stroke: #58ad72 }
  }"""


def draw(modules: dict[str, Module]) -> str:
    return picture(room_graph(modules), lines_by_room(modules))


def picture(rooms: Graph, lines: Counter[str]) -> str:
    layout = lay_out(rooms, PROCESSES)
    width = layout.width + 2 * MARGIN + LABELS
    height = HEAD + RISE * len(layout.places) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        'aria-label="The rooms of the code on their floors, and which room imports which">',
        f"<style>{_STYLE}\n</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
        _text("title", MARGIN, 36, "Rooms with walls"),
        _text(
            "note",
            MARGIN,
            58,
            "Arrows point to what a room imports; those that a longer way implies are left out. "
            "Processes meet in Redis, HTTP and files.",
        ),
        *_floors(layout, width),
        *_lines(layout),
    ]
    for row in layout.places:
        parts += [_box(place, lines[place.name], layout) for place in row if place.name]
    parts += [*_legend(height), "</svg>", ""]
    return "\n".join(parts)


def _top(floor: int, layout: Layout) -> float:
    return HEAD + RISE * (len(layout.places) - 1 - floor) + (RISE - HEIGHT) / 2


def _x(place: Place) -> float:
    return MARGIN + LABELS + place.x


def _floors(layout: Layout, width: float) -> list[str]:
    parts = []
    for floor in range(len(layout.places)):
        top = _top(floor, layout) - 13
        parts.append(
            f'<rect class="floor" x="{MARGIN / 2}" y="{top:.0f}" width="{width - MARGIN:.0f}" '
            f'height="{HEIGHT + 26:.0f}" rx="10"/>'
        )
        parts.append(_text("size", MARGIN, top + HEIGHT / 2 + 17, f"floor {floor}"))
    return parts


def _lines(layout: Layout) -> list[str]:
    parts = []
    for line in layout.lines:
        upper, lower = line[0], line[-1]
        x, y = _port(upper, line[1], upper.below), _top(upper.floor, layout) + HEIGHT
        path = f"M{x:.1f},{y:.1f}"
        for place in line[1:]:
            to = _port(lower, line[-2], lower.above) if place is lower else _x(place)
            top = _top(place.floor, layout) - (2 if place is lower else 0)
            half = (y + top) / 2
            path += f" C{x:.1f},{half:.1f} {to:.1f},{half:.1f} {to:.1f},{top:.1f}"
            x, y = to, top
            if place is not lower:
                y = top + HEIGHT
                path += f" L{x:.1f},{y:.1f}"
        parts.append(f'<path class="line" d="{path}" marker-end="url(#tip)"/>')
    return parts


def _port(box: Place, towards: Place, neighbours: list[Place]) -> float:
    """Where a line leaves or enters a box, so that the lines of one side do not cross."""
    ordered = sorted(neighbours, key=lambda place: place.x)
    step = min(34.0, (BOX - 40) / max(1, len(ordered)))
    return _x(box) + step * (ordered.index(towards) - (len(ordered) - 1) / 2)


def _box(place: Place, num_lines: int, layout: Layout) -> str:
    name = place.name
    kind = "process" if name in PROCESSES else "shared" if name.startswith("services.") else "library"
    x, top = _x(place), _top(place.floor, layout)
    rectangle = (
        f'<rect class="box {kind}" x="{x - place.width / 2:.1f}" y="{top:.1f}" '
        f'width="{place.width:.0f}" height="{HEIGHT:.0f}" rx="8"/>'
    )
    texts = [_text("name", x, top + 22, f"{name.replace('services.', '')}/", middle=True)]
    texts += [_text("duty", x, top + 39 + 14 * row, duty, middle=True) for row, duty in enumerate(DUTIES.get(name, ()))]
    texts.append(_text("size", x, top + HEIGHT - 8, f"{num_lines:,} lines", middle=True))
    return "".join([rectangle, *texts])


def _legend(height: float) -> list[str]:
    parts = []
    x = MARGIN
    for kind, label in (
        ("process", "a process"),
        ("shared", "shared by processes"),
        ("library", "the library and its plug-ins"),
    ):
        y = height - 34
        parts.append(f'<rect class="box {kind}" x="{x:.0f}" y="{y:.0f}" width="18" height="14" rx="3"/>')
        parts.append(_text("note", x + 26, y + 12, label))
        x += 60 + 7.2 * len(label)
    return parts


def _text(kind: str, x: float, y: float, text: str, *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}"{anchor}>{escape(text)}</text>'
