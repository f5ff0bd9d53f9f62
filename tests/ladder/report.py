"""The results of the ladder as a page: ``benchmarks/results/ladder.md``, made from ``ladder.json`` beside it.

Rule: rows and shapes are measured apart, and measuring one keeps what the page says of the others.
"""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.ladder.axes import TRAINED
from tests.ladder.commit import WRITTEN
from tests.ladder.covering import Pair
from tests.ladder.job import Result

if TYPE_CHECKING:
    from tests.ladder.run import Ladder

MIB = 2**20
LEGEND = """Each row is a real job of
two steps on the real stack. Rows with `j2` run two at a time, on two trainers and two engines. A row is named by the
tokens of its prompt (`p`, exact after `=`), the tokens added to an observation (`o`), turns (`t`), tools (`f`), world,
jobs at once (`j`), chat format, and what is trained. Memory is the peak of the largest process of a kind, shared pages
included; `trainer` is the process of the attempt. Rollout is how long the trainer waited for batches; what was sampled
while it trained is not in it. Redis is what its memory grew by, disk what the job's directory held at its end."""
HEAD = (
    "row",
    "prompt seen",
    "episode",
    "turns",
    "sampled",
    "s",
    "rollout s",
    "training s",
    "publishing s",
    "engine MiB",
    "trainer MiB",
    "rollout MiB",
    "host MiB",
    "Redis KiB",
    "disk MiB",
    "",
)


def table(results: Sequence[Result]) -> str:
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    return "\n".join([*lines, *(_line(_cells(result)) for result in results)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(result: Result) -> list[str]:
    least, most = result.prompt_seen
    memory = [f"{result.memory_bytes.get(kind, 0) / MIB:.0f}" for kind in ("engine", "attempt", "rollout", "host")]
    phases = [f"{result.phases_s.get(name, 0.0):.1f}" for name in ("rollout", "training", "publishing")]
    return [
        result.name,
        f"{least:,}" if least == most else f"{least:,} to {most:,}",
        f"{result.episode_tokens:,}",
        str(result.turns_seen),
        f"{result.sampled:,}",
        f"{result.seconds:.1f}",
        *phases,
        *memory,
        f"{result.redis_bytes / 1024:.0f}",
        f"{sum(result.disk_bytes.values()) / MIB:.0f}",
        "; ".join(result.problems) or "ok",
    ]


def write(root: Path, ladder: Ladder, results: Sequence[Result]) -> None:
    part = {
        "date": _today(),
        "seed": ladder.seed,
        "not_played": len({row.name for row in ladder.rows} - {result.name for result in results}),
        "cpus": os.cpu_count(),
        "impossible": _told(ladder.impossible),
        "without": ladder.without,
        "worlds": {
            name: {"tools": one.tools, "prompt": min(one.prompt.values())} for name, one in ladder.natures.items()
        },
        "results": [asdict(result) for result in results],
    }
    _update(root, "rows", part)


def write_shape(root: Path, train: str, part: Mapping[str, Any]) -> None:
    _update(root, f"shape {train}", {**part, "date": _today(), "cpus": os.cpu_count()})


def _update(root: Path, name: str, part: Mapping[str, Any]) -> None:
    kept, shown = (root / path for path in WRITTEN)
    parts = json.loads(kept.read_text()) if kept.is_file() else {}
    parts[name] = part
    kept.write_text(json.dumps(parts, indent=1) + "\n")
    shown.write_text(page(parts))


def page(parts: Mapping[str, Any]) -> str:
    shapes = (_shape_part(train, parts.get(f"shape {train}")) for train in reversed(TRAINED))
    return "\n".join(["# The size ladder", "", *_rows_part(parts.get("rows")), *chain.from_iterable(shapes)])


def _rows_part(part: Mapping[str, Any] | None) -> Iterator[str]:
    if part is None:
        return
    results = [Result(**one) for one in part["results"]]
    num_failed = sum(bool(result.problems) for result in results)
    # Two jobs at once share the clock.
    seconds = sum(result.seconds / result.row["jobs"] for result in results)
    commits = Counter(result.commit for result in results)
    played = ", ".join(f"{commit} ({number} rows)" for commit, number in commits.items())
    yield f"`make ladder LADDER_FLAGS='--seed {part['seed']}'`, {part['date']}, {part['cpus']} cores, commit {played}."
    left = f", {part['not_played']} more not played yet" if part["not_played"] else ""
    yield f"{len(results)} rows, {num_failed} failed{left}; {seconds:.0f} s of jobs. {LEGEND}"
    yield ""
    yield table(results)
    yield ""
    yield "Worlds, with the tools and the prompt that each has by itself:"
    yield ""
    yield from _worlds(part["worlds"])
    yield ""
    yield f"Pairs that cannot be: {'; '.join(part['impossible'])}."
    yield from (f"Not played: {what} ({why})." for what, why in part["without"].items())
    yield ""


def _worlds(worlds: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    yield _line(["world", "tools", "tokens"])
    yield _line(["---"] * 3)
    yield from (_line([name, str(one["tools"]), str(one["prompt"])]) for name, one in worlds.items())


def _shape_part(train: str, part: Mapping[str, Any] | None) -> Iterator[str]:
    if part is None:
        return
    yield f"## The exact shape of {part['shape']}, random weights, {train} training"
    yield ""
    command = f"python -m tests.ladder --shape {part['shape'].lower()} --train {train}"
    yield f"`{command}`, commit {part['commit']}, {part['date']},"
    yield f"{part['cpus']} cores. {part['about']}"
    yield ""
    yield _line(["what", "measured"])
    yield _line(["---"] * 2)
    yield from (_line([what, measured]) for what, measured in part["measured"].items())
    yield ""


def _told(impossible: Sequence[Pair]) -> list[str]:
    """Pairs with a common value in one line."""
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (first, one), (second, other) in impossible:
        grouped[f"{first} {one}", second].append(str(other))
    return [f"{left} with {right} {', '.join(values)}" for (left, right), values in grouped.items()]


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
