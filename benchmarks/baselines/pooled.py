"""What published runs say together: how many with the bound collapsed, and what wrong attribution did.

``python -m benchmarks.baselines.pooled`` writes ``benchmarks/results/pooled.md`` from the other pages' numbers. Rule:
it runs nothing and chooses nothing; a run counts if it is in a file of ``SERIES`` under ``BOUNDED``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from benchmarks.baselines.falls import ROUNDING, TOO_FAR, collapsed, paired
from benchmarks.baselines.report import RESULTS, area, largest_fall

SERIES = ("falls", "step_bounds", "signal_scaling")
"""Each with a warm start of its own."""
BOUNDED = "bounded_growth_1_s16"
ASKED = (1, 16)
"""Seeds that collapsed before the bound, and that were to be shown."""
LOOKED_AT = (8819,)
"""Seen before by whoever chose another bound, the one of the whole step."""
CONFIDENCE = 0.95
CONTROLS = (
    ("attribution_oldest_s16", "gspo_s16", "oldest"),
    ("attribution_newest_s16", "gspo_s16", "newest"),
    ("attribution_oldest_no_gates_s16", "gates_off_s16", "oldest, no gates"),
    ("attribution_newest_no_gates_s16", "gates_off_s16", "newest, no gates"),
)
"""Of ``baselines.json``: the lie, what it is told about, and what a reader sees."""

PAGE = """# What published runs say together

Written by `python -m benchmarks.baselines.pooled` from [falls.json](falls.json), [step_bounds.json](step_bounds.json),
[signal_scaling.json](signal_scaling.json) and [baselines.json](baselines.json), whose pages have the conditions;
nothing was run for it.

## `max_grad_growth: 1` at staleness 16, 48 steps

{bounded}

{collapses}

## Wrong attribution in learning

The negative control of [baselines.md](baselines.md), 24 steps: all tokens of an episode attributed to one version, less
the truth with the same seed, in points, with 95 % intervals (Student's; an interval of 0 is three equal ends). Three
seeds show large effects only.

{attribution}
"""


class _Run(TypedDict):
    """What is read of a run."""

    seed: int
    evaluations: list[tuple[int, float]]


class _Row(TypedDict):
    """What is read of a cell."""

    name: str
    runs: list[_Run]


@dataclass(frozen=True)
class Pooled:
    """A bounded run."""

    series: str
    seed: int
    curve: Sequence[float]

    @property
    def has_collapsed(self) -> bool:
        return collapsed(self.curve)

    @property
    def fall(self) -> float:
        return largest_fall(self.curve)

    @property
    def has_fallen(self) -> bool:
        return self.fall > TOO_FAR + ROUNDING


def bounded_runs(results: Path = RESULTS) -> list[Pooled]:
    """All of them, in the order of their series."""
    return [run for series in SERIES for run in runs_of(series, BOUNDED, results)]


def runs_of(series: str, cell: str, results: Path = RESULTS) -> list[Pooled]:
    """Of one cell in one series; none where it has not run there."""
    runs = (run for row in _read(results, series) if row["name"] == cell for run in row["runs"])
    return [Pooled(series, run["seed"], [value for _, value in run["evaluations"]]) for run in runs]


def _read(results: Path, name: str) -> list[_Row]:
    found: list[_Row] = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return found


def highest_share(num_runs: int) -> float:
    """The largest chance of a collapse under which so many runs without one are not rarer than one in twenty."""
    return 1 - float((1 - CONFIDENCE) ** (1 / num_runs))


def write(results: Path = RESULTS) -> str:
    found = bounded_runs(results)
    text = PAGE.format(bounded=_bounded(found), collapses=_collapses(found), attribution=_attribution(results))
    (results / "pooled.md").write_text(text, encoding="utf-8")
    return text


def _bounded(found: Sequence[Pooled]) -> str:
    head = ("series", "runs", "collapsed", "fell by more than 10", "end", "largest fall by seed")
    lines: list[Sequence[str]] = [head, ("---",) * len(head)]
    for series in SERIES:
        some = [run for run in found if run.series == series]
        ends = [run.curve[-1] for run in some]
        lines.append(
            (
                series,
                str(len(some)),
                str(sum(run.has_collapsed for run in some)),
                str(sum(run.has_fallen for run in some)),
                f"{statistics.fmean(ends):.0%} ({min(ends):.0%} to {max(ends):.0%})",
                " ".join(f"{run.seed}: {100 * run.fall:.0f}" for run in some),
            )
        )
    return _table(lines)


def _collapses(found: Sequence[Pooled]) -> str:
    asked = [run for run in found if run.seed in ASKED]
    others = {run.seed for run in found} - set(ASKED)
    unseen = others - set(LOOKED_AT)
    num_collapsed, num_fallen = sum(run.has_collapsed for run in found), sum(run.has_fallen for run in found)
    seen, room = ", ".join(map(str, LOOKED_AT)), 100 * highest_share(len(unseen))
    return (
        f"{len(found)} runs: seeds {' and '.join(map(str, ASKED))} ({len(asked)} runs of them, as the series overlap) "
        f"and {len(others)} others. **{num_collapsed} collapsed**, and {num_fallen} fell by more than 10 points and "
        "came back. What to know about it:\n\n"
        f"- {len(unseen)} seeds were drawn and looked at by nobody before; {seen} had been, when another bound was "
        f"chosen. {len(unseen)} runs without a collapse leave room for {room:.0f} in a hundred.\n"
        "- A collapse is what [signal_scaling](signal_scaling.md) says; the rule was written down before the "
        "series signal_scaling, and after the other two.\n"
        "- The series have three warm starts, made on different machines: falls are not compared across them.\n"
        "- It is one small task and one small model."
    )


def _attribution(results: Path) -> str:
    rows = {row["name"]: row for row in _read(results, "baselines")}
    lines: list[Sequence[str]] = [("attributed to the", "seeds", "end", "area", "largest fall"), ("---",) * 5]
    for lie, truth, said in CONTROLS:
        told, true = (_by_seed(rows[name]) for name in (lie, truth))
        seeds = sorted(told.keys() & true.keys())
        kinds = (lambda curve: curve[-1][1], area, lambda curve: largest_fall([value for _, value in curve]))
        differences = ([100 * (kind(told[seed]) - kind(true[seed])) for seed in seeds] for kind in kinds)
        lines.append((said, str(len(seeds)), *(_interval(some) for some in differences)))
    return _table(lines)


def _by_seed(row: _Row) -> dict[int, list[tuple[int, float]]]:
    return {run["seed"]: run["evaluations"] for run in row["runs"]}


def _interval(differences: Sequence[float]) -> str:
    mean, margin = paired(differences)
    return f"{mean:+.1f} ± {margin:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(write())
