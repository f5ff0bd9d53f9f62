"""Which long runs fall, seed by seed, and what a bound of the gradient does about it.

Rule: differences are of runs with the same seed only, and say how many seeds they rest on.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.baselines.cells import RUNNABLE, SIZES, Cell, Sizes, cell
from benchmarks.baselines.report import RESULTS, Row, area, largest_fall
from benchmarks.baselines.store import Run, Store

NAME = "falls"
DEFAULT = "long_gspo_s16"
CHOSEN_ON = frozenset({0, 1, 16, 8819, 45283, 20548, 49220})
"""Seeds that were looked at when bounds were chosen, two of them because they fell; they confirm nothing."""
# Successes are multiples of a hundredth.
ROUNDING = 1e-6
TOO_FAR = 0.1
"""A fall beyond it is one; as far as the product's alarms are concerned see `evaluation_fell`."""
WINDOW = 3
"""Consecutive evaluations whose mean is compared, to tell a collapse from a dent."""
LEARNED_AT = 12
"""From this step on a step is judged that goes far: before it, far steps are how the policy learns."""
JUDGED = (
    "gspo/k3_policy_proximal",
    "gspo/k3_proximal_behavior",
    "gspo/kept_frac",
    "gspo/clip_frac",
    "gspo/clip_low",
    "gspo/log_ratio_std",
    "learner/grad_norm",
    "learner/grad_norm_max",
    "learner/grad_alignment",
    "learner/num_bounded_updates",
    "learner/num_idle_sequences",
    "learner/rate_share",
    "gspo/ess_sequence",
    "learner/step_k3",
    "learner/step_kept",
)
"""Kept step by step; what a run looked like before it fell."""
# Two-sided 97.5 % points of Student's distribution by degrees of freedom; beyond them the normal one is near enough.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)

PAGE = """# Runs that fall

Written by `python -m benchmarks.baselines falls{option}`;
[docs/baselines.md](../../docs/baselines.md#runs-that-fall) says what follows. The cells with twice the steps at
staleness 16: {steps} steps, held-out success on {tasks} tasks every {every} steps.

- *end*: success after the last step, mean and (lowest to highest). *largest fall*: how many points a run was at worst
  below what it had reached before, by seed; bold above 10.
- *fell*: runs whose largest fall is above 10 points. *collapsed*: what does not come back: the last evaluation, or the
  mean of any three consecutive ones, is more than 10 points below the best before it (of single ones, of means of
  three). This was written down before the runs of `signal_scaling` on the confirming seeds.
- From step {learned} on: *farthest step*: the largest k3 by which one step moved the policy from where the step began,
  mean over runs and (largest). *longest gradient*: before any bound, as a multiple of the median of the steps' means;
  median over runs and (largest). *idle*: share of sequences without signal (all of their group had one reward).
- *fall, end, area beside it*: mean difference from "{beside}" with the same seeds and its 95 % interval (Student's), in
  points: of the largest fall, of the end, and of the area under the curve. Without the seeds {chosen}, on which bounds
  were chosen.

{table}

Runs by themselves, success at each evaluation in per cent:

{runs}

With data that are at most four steps old, {short} steps, success every {every} steps:

{young}
"""
YOUNG = ("gspo_s0", "gspo_s4", "young_growth_1_s4")
"""What the bound does where no run falls."""


def write(work: Path, results: Path = RESULTS, sizes: Sizes = SIZES, *, name: str = NAME, beside: str = DEFAULT) -> str:
    """The page; also written, with the numbers, to ``results`` under ``name``: models that were warm-started on
    different machines differ a little, and runs of one are compared with runs of the same."""
    found = [row for row in _rows(work, sizes, lambda one: one.table in ("long", "bounded")) if row.runs]
    young = [row for row in _rows(work, sizes, lambda one: one.name in YOUNG) if row.runs]
    default = next((row for row in found if row.cell.name == beside), None)
    text = PAGE.format(
        option=("" if name == NAME else f" --name {name}") + ("" if beside == DEFAULT else f" --beside {beside}"),
        beside=cell(beside).label,
        steps=2 * sizes.steps,
        tasks=sizes.eval_tasks,
        every=sizes.eval_every,
        learned=LEARNED_AT,
        chosen=", ".join(map(str, sorted(CHOSEN_ON))),
        table="\n".join(_table(found, default)),
        runs="\n".join(_curves(found)),
        short=sizes.steps,
        young="\n".join(_curves(young)),
    )
    (results / f"{name}.md").write_text(text, encoding="utf-8")
    lines = ",\n".join(json.dumps(_summary(row)) for row in (*found, *young))
    (results / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return text


def _rows(work: Path, sizes: Sizes, is_wanted: Callable[[Cell], bool]) -> list[Row]:
    store = Store(work)
    return [Row(one, _runs(store, one, sizes)) for one in RUNNABLE if is_wanted(one)]


def _runs(store: Store, cell: Cell, sizes: Sizes) -> list[Run]:
    return [run for seed in store.seeds(cell) if (run := store.read(cell, seed, sizes)) is not None]


def _table(found: Sequence[Row], default: Row | None) -> list[str]:
    head = (
        "",
        "runs",
        "end",
        "fell",
        "collapsed",
        "largest fall by seed",
        "farthest step",
        "longest gradient",
        "idle",
        "fall beside it",
        "end beside it",
        "area beside it",
    )
    lines = [head, ("---",) * len(head)]
    kinds = (Row.falls, Row.ends, Row.areas)
    for row in found:
        others = [_by_seed(default, kind(default)) if default and row is not default else {} for kind in kinds]
        falls = " ".join(f"{run.seed}: {_emphasis(fall)}" for run, fall in zip(row.runs, row.falls(), strict=True))
        far, long = [farthest_step(run) for run in row.runs], [longest_gradient(run) for run in row.runs]
        lines.append(
            (
                row.cell.label,
                str(len(row.runs)),
                f"{statistics.fmean(row.ends()):.0%} ({min(row.ends()):.0%} to {max(row.ends()):.0%})",
                str(sum(map(_is_too_far, row.falls()))),
                str(sum(collapsed([value for _, value in run.result.evaluations]) for run in row.runs)),
                falls,
                f"{statistics.fmean(far):.2g} ({max(far):.2g})",
                f"{statistics.median(long):.0f} ({max(long):.0f})",
                f"{statistics.fmean(map(idle_share, row.runs)):.0%}",
                *(_beside(_by_seed(row, kind(row)), other) for kind, other in zip(kinds, others, strict=True)),
            )
        )
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _emphasis(fall: float) -> str:
    said = f"{100 * fall:.0f}"
    return f"**{said}**" if _is_too_far(fall) else said


def _is_too_far(fall: float) -> bool:
    return fall > TOO_FAR + ROUNDING


def collapsed(curve: Sequence[float]) -> bool:
    """Whether a run fell and did not come back."""
    means = [statistics.fmean(curve[first : first + WINDOW]) for first in range(len(curve) - WINDOW + 1)]
    return _is_too_far(max(curve) - curve[-1]) or _is_too_far(largest_fall(means))


def _by_seed(row: Row, values: Sequence[float]) -> dict[int, float]:
    return {run.seed: value for run, value in zip(row.runs, values, strict=True)}


def _beside(own: Mapping[int, float], default: Mapping[int, float]) -> str:
    pairs = [100 * (value - default[seed]) for seed, value in own.items() if seed in default.keys() - CHOSEN_ON]
    if not pairs:
        return "-"
    mean, margin = paired(pairs)
    return f"{mean:+.1f} ± {margin:.1f} ({len(pairs)} seeds)" if math.isfinite(margin) else f"{mean:+.1f} (1 seed)"


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval; infinite for a single difference."""
    count = len(differences)
    if count < 2:
        return differences[0], math.inf
    student = STUDENT[count - 2] if count - 2 < len(STUDENT) else STUDENT[-1]
    return statistics.fmean(differences), student * statistics.stdev(differences) / math.sqrt(count)


def farthest_step(run: Run) -> float:
    return max(_learned(run, "gspo/k3_policy_proximal"), default=0.0)


def longest_gradient(run: Run) -> float:
    usual = statistics.median(_learned(run, "learner/grad_norm"))
    return max(_learned(run, "learner/grad_norm_max")) / usual if usual else math.inf


def idle_share(run: Run) -> float:
    job = run.conditions["job"]
    num_sequences: int = job["groups_per_step"] * job["rollout"]["group_size"]
    return statistics.fmean(_learned(run, "learner/num_idle_sequences")) / num_sequences


def _learned(run: Run, metric: str) -> list[float]:
    """By step, from the one on from which runs are judged."""
    return [value for value in run.result.steps[metric][LEARNED_AT:] if value is not None]


def _curves(found: Sequence[Row]) -> list[str]:
    lines = ["| | seed | success |", "| --- | --- | --- |"]
    for row in found:
        for run in row.runs:
            curve = " ".join(f"{100 * value:.0f}" for _, value in run.result.evaluations)
            lines.append(f"| {row.cell.label}{_age(row.cell)} | {run.seed} | {curve} |")
    return lines


def _age(cell: Cell) -> str:
    """Said where it is not that of the page."""
    return "" if cell.times > 1 else f", staleness {cell.staleness}"


def _summary(row: Row) -> dict[str, object]:
    runs = [
        {
            "seed": run.seed,
            "evaluations": run.result.evaluations,
            "area": round(area(run.result.evaluations), 4),
            "largest_fall": round(fall, 4),
            "farthest_step": farthest_step(run),
            "steps": {name: run.result.steps[name] for name in JUDGED if name in run.result.steps},
            "seconds": run.result.seconds,
            "host": run.host,
        }
        for run, fall in zip(row.runs, row.falls(), strict=True)
    ]
    return {"name": row.cell.name, "label": row.cell.label, "job": row.runs[0].conditions["job"], "runs": runs}
