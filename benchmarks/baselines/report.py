"""Tables and plots of what has been run, with what is missing said first."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from benchmarks.baselines.cells import CELLS, SEEDS, SIZES, STALENESS, Cell, Sizes
from benchmarks.baselines.store import Run, Store

RESULTS = Path(__file__).parents[1] / "results"
TARGET = 0.8
COLLAPSE = 0.2
"""A run has collapsed that ends so far below its best."""

PAGE = """# Baselines for asynchronous GSPO

Written by `python -m benchmarks.baselines report`; [docs/baselines.md](../../docs/baselines.md) says what is compared,
how, and what follows. {steps} steps of {groups} groups of {size} episodes; success on {tasks} held-out tasks, sampled
at temperature 1, every few steps. A cell is the mean over the seeds that have run, and (lowest to highest). One thread
of {host}.

{missing}

- *end*: success after the last step. *area*: mean success over all steps. *to {target:.0%}*: steps until success was
  first measured that high; a run that never got there counts as all of its steps, and is named. *collapsed*: runs
  that end more than {collapse:.0f} points below their best. *deepest fall*: how far a run was at worst below what it
  had reached before, as far as evaluations saw it.
- *clipped*: share of trained tokens in clipped terms; then by the sign of the advantage. *k3*: per token, sampler
  against the policy at the start of the batch (where the sampler is the anchor: against the policy of each update).
  *kept*: sequences that no gate withheld. *age*: of trained tokens, in steps. *CPU*: seconds of one core for all of it.
- All but success are means over the steps.

## GSPO, its behaviour anchor and GRPO over staleness

{main}

![success over steps](baselines.png)

## Nothing done about staleness {subject}

{naive}

## Staleness {subject} for twice as many steps

Two thirds of the batches are by weights of the full age; in the tables above a third is.

{long}

## Negative control at staleness {subject}: who is said to have sampled a token

{control}

## Ablations at staleness {subject}

{ablation}

## A small mixture of experts (staleness 0)

{mixture}

The paper reports clipped fractions of 0.15 for GSPO (3e-4 / 4e-4, four minibatches, long answers) and 0.0013 for GRPO.
"""


@dataclass(frozen=True)
class Row:
    """One cell over its seeds."""

    cell: Cell
    runs: Sequence[Run]

    def ends(self) -> list[float]:
        return [run.result.evaluations[-1][1] for run in self.runs]

    def areas(self) -> list[float]:
        return [area(run.result.evaluations) for run in self.runs]

    def steps_to_target(self) -> list[int | None]:
        return [next((step for step, value in run.result.evaluations if value >= TARGET), None) for run in self.runs]

    @property
    def num_steps(self) -> int:
        return self.runs[0].result.evaluations[-1][0]

    def num_collapsed(self) -> int:
        curves = [[value for _, value in run.result.evaluations] for run in self.runs]
        return sum(curve[-1] < max(curve) - COLLAPSE for curve in curves)

    def falls(self) -> list[float]:
        """How far each run was at worst below what it had reached before."""
        return [largest_fall([value for _, value in run.result.evaluations]) for run in self.runs]

    def mean(self, metric: str) -> float | None:
        """Over steps and seeds."""
        found = [value for run in self.runs for value in run.result.steps.get(metric, []) if value is not None]
        return statistics.fmean(found) if found else None

    def seconds(self) -> float:
        return statistics.fmean(run.result.seconds["all"] for run in self.runs)


def largest_fall(curve: Sequence[float]) -> float:
    """How far it was at worst below what it had reached before."""
    return max((best - value for best, value in zip(accumulate(curve, max), curve, strict=True)), default=0.0)


def area(evaluations: Sequence[tuple[int, float]]) -> float:
    """Mean height of the curve."""
    total = 0.0
    for (left, low), (right, high) in pairwise(evaluations):
        total += (right - left) * (low + high) / 2
    return total / (evaluations[-1][0] - evaluations[0][0])


def rows(work: Path, seeds: Sequence[int] = SEEDS, sizes: Sizes = SIZES) -> list[Row]:
    store = Store(work)
    found = []
    for cell in CELLS:
        runs = (store.read(cell, seed, sizes) for seed in seeds)
        found.append(Row(cell, [run for run in runs if run is not None]))
    return found


def missing_text(found: Iterable[Row], num_seeds: int = len(SEEDS)) -> str:
    lacking = [f"{row.cell.name} ({len(row.runs)} of {num_seeds})" for row in found if len(row.runs) < num_seeds]
    return f"**Missing**: {', '.join(lacking)}." if lacking else f"All cells have run with {num_seeds} seeds."


def write(work: Path, results: Path = RESULTS, sizes: Sizes = SIZES) -> str:
    """The page; also written, with numbers and picture, to ``results``."""
    found = rows(work, sizes=sizes)
    done = [row for row in found if row.runs]
    if not done:
        return missing_text(found)
    text = PAGE.format(
        steps=sizes.steps,
        groups=sizes.groups_per_step,
        size=sizes.group_size,
        tasks=sizes.eval_tasks,
        host=_host(done),
        missing=missing_text(found),
        target=TARGET,
        collapse=100 * COLLAPSE,
        subject=max(STALENESS),
        **{name: _table([row for row in done if row.cell.table == name]) for name in _TABLES},
    )
    (results / "baselines.md").write_text(text, encoding="utf-8")
    (results / "baselines.json").write_text(json.dumps([_summary(row) for row in done], indent=1) + "\n")
    plot(done, results / "baselines.png")
    return text


_TABLES = ("main", "naive", "long", "control", "ablation", "mixture")


_TITLES = {
    "long": f"staleness {max(STALENESS)} for twice as many steps",
    "naive": "nothing done",
    "control": "wrong attribution",
    "ablation": "ablations",
    "mixture": "mixture of experts, staleness 0",
}
"""In the order of the picture, after the staleness of the main table."""
_AT_THE_SUBJECT = frozenset({"naive", "control", "ablation"})


def _host(done: Sequence[Row]) -> str:
    hosts = [run.host for row in done for run in row.runs]
    loads = [host["load"] for host in hosts]
    one = hosts[0]
    return f"{one['cpus']} CPUs, torch {one['torch']}, load of the machine {min(loads):g} to {max(loads):g}"


def _table(some: Sequence[Row]) -> str:
    if not some:
        return "Nothing has run yet."
    head: tuple[str, ...] = (
        "",
        "staleness",
        "start",
        "end",
        "area",
        f"to {TARGET:.0%}",
        "collapsed",
        "deepest fall",
        "clipped (+ / -)",
        "k3",
        "kept",
    )
    lines: list[tuple[str, ...]] = [(*head, "age", "CPU")]
    lines += [_line(row) for row in sorted(some, key=lambda row: row.cell.staleness)]
    rule = ("---",) * len(lines[0])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (lines[0], rule, *lines[1:]))


def _line(row: Row) -> tuple[str, ...]:
    starts = [run.result.evaluations[0][1] for run in row.runs]
    reached = row.steps_to_target()
    lacking = reached.count(None)
    steps = statistics.fmean(row.num_steps if step is None else step for step in reached)
    return (
        row.cell.label,
        str(row.cell.staleness),
        f"{statistics.fmean(starts):.0%}",
        _spread(row.ends()),
        _spread(row.areas()),
        f"{steps:.0f}" + (f" ({lacking} of {len(reached)} never)" if lacking else ""),
        f"{row.num_collapsed()} of {len(row.runs)}",
        _spread(row.falls()),
        " ".join(
            (
                _number(row.mean("gspo/clip_frac")),
                f"({_number(row.mean('gspo/clip_frac_positive'))} / {_number(row.mean('gspo/clip_frac_negative'))})",
            )
        ),
        _number(row.mean("gspo/k3_proximal_behavior") or row.mean("gspo/k3_policy_behavior")),
        _number(row.mean("gspo/kept_frac")),
        _number(row.mean("staleness/mean")),
        f"{row.seconds():.0f}",
    )


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.0%}"
    return mean if len(values) < 2 else f"{mean} ({min(values):.0%} to {max(values):.0%})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _summary(row: Row) -> dict[str, object]:
    """One cell for the file of numbers: what it was, and for each seed its curve and the means of its metrics."""
    runs = [
        {
            "seed": run.seed,
            "evaluations": run.result.evaluations,
            "seconds": run.result.seconds,
            "engine_difference": run.result.engine_difference,
            "means": {
                name: float(f"{statistics.fmean(some):.4g}")
                for name, values in run.result.steps.items()
                if (some := [value for value in values if value is not None])
            },
            "host": run.host,
        }
        for run in row.runs
    ]
    first = row.runs[0].conditions
    about = {key: first[key] for key in ("staleness", "model", "attribution")}
    return {
        "name": row.cell.name,
        "label": row.cell.label,
        "table": row.cell.table,
        **about,
        "job": first["job"],
        "runs": runs,
    }


def plot(done: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(17, 9.5), layout="constrained", sharey=True)
    for axis, staleness in zip(axes[0], STALENESS, strict=False):
        _curves(axis, done, lambda cell, s=staleness: cell.table == "main" and cell.staleness == s)  # type: ignore[misc]
        axis.set_title(f"staleness {staleness}")
    subject = "gspo_s" + str(max(STALENESS))
    for axis, table in zip((axes[0][-1], *axes[1]), _TITLES, strict=True):
        beside = subject if table in _AT_THE_SUBJECT else ""
        _curves(axis, done, lambda cell, t=table, b=beside: cell.table == t or cell.name == b)  # type: ignore[misc]
        axis.set_title(_TITLES[table])
    for axis in axes.flat:
        axis.set(xlabel="step", ylim=(0, 1))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=8, frameon=False)
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out success")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(axis: object, done: Sequence[Row], wanted: Callable[[Cell], bool]) -> None:
    """Mean over the seeds as a line, lowest to highest as a band."""
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    for row in done:
        if not wanted(row.cell):
            continue
        steps = [step for step, _ in row.runs[0].result.evaluations]
        columns = list(zip(*([value for _, value in run.result.evaluations] for run in row.runs), strict=True))
        line = axis.plot(steps, [statistics.fmean(column) for column in columns], label=row.cell.label, linewidth=1.8)
        axis.fill_between(
            steps,
            [min(column) for column in columns],
            [max(column) for column in columns],
            color=line[0].get_color(),
            alpha=0.12,
            linewidth=0,
        )
