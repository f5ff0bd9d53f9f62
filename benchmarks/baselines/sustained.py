"""What an age costs that lasts: the cells of ``SUSTAINED``, seed by seed, with a picture.

Rule: differences are of runs with the same seed only, and say how many seeds they rest on. A run's end is the mean of
its last three evaluations, whose many episodes the page names.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.baselines.cells import (
    HELD_OUT,
    LATEST,
    SIZES,
    SUCCESSES,
    SUSTAINED,
    SUSTAINED_RUNS,
    UNSEEN,
    Model,
    Sizes,
    SustainedRun,
)
from benchmarks.baselines.falls import JUDGED, TOO_FAR, WINDOW, paired
from benchmarks.baselines.report import RESULTS, Row, area, largest_fall
from benchmarks.baselines.store import Run, Store

DEFAULT, FADED, ENDLESS, SIGNAL, GRPO = "gspo", "faded", "prefix", "signal", "grpo"
"""Kinds of cells."""
COMPARED = (
    (DEFAULT, None, "GSPO at age {age} less GSPO at age 0"),
    (DEFAULT, GRPO, "GSPO at age {age} less GRPO at age {age}"),
    (FADED, DEFAULT, "With prefix_threshold less without"),
    (FADED, None, "With prefix_threshold at age {age} less GSPO at age 0"),
    (FADED, GRPO, "With prefix_threshold less GRPO at age {age}"),
    (ENDLESS, DEFAULT, "The same with an endless memory less without"),
    (ENDLESS, None, "The same with an endless memory at age {age} less GSPO at age 0"),
    (SIGNAL, DEFAULT, "With signal_scaling less without"),
    (SIGNAL, None, "With signal_scaling at age {age} less GSPO at age 0"),
    (SIGNAL, GRPO, "With signal_scaling less GRPO at age {age}"),
    (SUCCESSES, DEFAULT, "Successes alone less all"),
    (SUCCESSES, SIGNAL, "Successes alone less all with signal_scaling"),
)
"""Two kinds at the age; without a second it is the default on fresh data."""
FRESH = ((SUCCESSES, DEFAULT, "Successes alone less all on fresh data"),)
"""Two kinds on fresh data."""
WORLDS: Mapping[Model, tuple[str, str]] = {
    "search": ("`search_qa`, the long demo's task", ", on the long demo's task"),
    "cashbook": (
        "the cashbook (`benchmarks/baselines/cashbook.py`), where success is what an episode is worth",
        ", in long episodes that successes alone do not teach",
    ),
}
"""What is played, and how a title says so; the others play the calculator."""
ALLOWED_COST = {16: 0.05, 64: 0.15}
"""Of the gain on fresh data, by age."""
KEPT = (*JUDGED, "staleness/mean", "staleness/within_one", "reward/mean")
"""Metrics of which every step is kept."""
OLD_ENOUGH = 0.9
"""An age is sustained in the steps in which so many of the tokens are so old, or one step more or less."""

PAGE = """# Data that stay {age} steps old{apart}

Written by `python -m benchmarks.baselines sustained`; [docs/staleness.md](../../docs/staleness.md) says what follows.
{steps} steps of {groups} groups of {size} episodes of {world}. Each episode begins under the weights of {age}
steps ago and goes on under those of {younger} steps ago from a drawn token on. *Sustained* is an age if at least 90 %
of the trained tokens are so many steps old, or one more or less, for at least four times as many steps. The seeds were
drawn ({drawn}). Held-out success on {tasks} tasks every {every} steps; after steps
{judged} each task is played {times} times, which is {episodes} episodes. Trained episodes have {turns:.1f} turns and
{tokens:.0f} sampled tokens, mean over all steps. {host}

- *end*: mean of the last three evaluations, mean over seeds and (lowest to highest). *area*: mean success over all
  steps. *fall*: how many points a run was at worst below what it had reached before, in means of three
  consecutive evaluations and in single ones, by seed; bold above 10.
- *age*: of the trained tokens, mean over the steps in which the age is sustained, and how many steps these are.
  *kept*: sequences that no gate withheld. *k3*: sampler against the policy at the start of the batch, a token, mean and
  (largest of a step).

![success over steps, and where each seed ends]({name}.png)

{table}

Differences of the same seeds, in points, with 95 % intervals (Student's):

{differences}

{verdict}

Runs by themselves, success at each evaluation in per cent:

{runs}
"""


def end(run: Run) -> float:
    """What the run is judged by."""
    return statistics.fmean(value for _, value in run.result.evaluations[-WINDOW:])


def smoothed_fall(run: Run) -> float:
    """The largest fall in means of three consecutive evaluations."""
    curve = [value for _, value in run.result.evaluations]
    return largest_fall([statistics.fmean(curve[at : at + WINDOW]) for at in range(len(curve) - WINDOW + 1)])


def sustained_steps(run: Run) -> list[int]:
    """The steps in which the age is what it is said to be."""
    shares = run.result.steps["staleness/within_one"]
    return [step for step, share in enumerate(shares) if share is not None and share >= OLD_ENOUGH]


def write(work: Path, results: Path = RESULTS, sizes: Sizes = SIZES, called: str = "") -> str:
    """The pages of all ages that have run; also written, with numbers and pictures, to ``results``. ``called``: what
    stands behind their names."""
    pages = [(f"sustained{about.suffix}{called}", about) for about in SUSTAINED_RUNS]
    return "\n".join(page for name, about in pages if (page := _write(name, about, Store(work), results, sizes)))


def _write(name: str, about: SustainedRun, store: Store, results: Path, sizes: Sizes) -> str:
    """Nothing where nothing has run."""
    found = []
    names = {about.cell(kind, about.age) for kind in (DEFAULT, *about.others)}
    names |= {about.cell(kind, 0) for kind in (DEFAULT, *about.fresh)}
    for one in SUSTAINED:
        if one.name not in names:
            continue
        runs = [run for seed in store.seeds(one) if (run := store.read(one, seed, sizes)) is not None]
        if runs:
            found.append(Row(one, runs))
    if not found:
        return ""
    differences, verdict = _differences(about, found)
    text = PAGE.format(
        name=name,
        steps=found[0].num_steps,
        groups=about.groups_per_step or sizes.groups_per_step,
        size=sizes.group_size,
        age=about.age,
        apart=_apart(about) + (", from another warm start" if name != f"sustained{about.suffix}" else ""),
        younger=about.age - 1,
        every=about.eval_every,
        tasks=HELD_OUT[about.model],
        world=WORLDS[about.model][0] if about.model in WORLDS else "the calculator",
        judged=", ".join(map(str, about.judged_at)),
        drawn=_drawn(found),
        times=found[0].cell.judged_times,
        episodes=f"{found[0].cell.judged_times * HELD_OUT[about.model]:,}",
        turns=_mean(found, "episodes/turns_mean"),
        tokens=_mean(found, "episodes/actions_mean"),
        host=_host(found),
        table=_table(found),
        differences=differences,
        verdict=verdict,
        runs=_curves(found),
    )
    (results / f"{name}.md").write_text(text, encoding="utf-8")
    lines = ",\n".join(json.dumps(_summary(row)) for row in found)
    (results / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    plot(about.age, found, results / f"{name}.png")
    return text


def _drawn(found: Sequence[Row]) -> str:
    """When they were: before what was known."""
    seeds = {run.seed for row in found for run in row.runs}
    said = [
        text
        for drawn, text in (
            (UNSEEN, "`UNSEEN` after all of the other pages' runs"),
            (LATEST, "`LATEST` when the default had been chosen"),
        )
        if seeds & set(drawn)
    ]
    return "; ".join(said)


def _apart(about: SustainedRun) -> str:
    """What makes these runs other ones than those of the first page."""
    if about.model in WORLDS:
        return WORLDS[about.model][1]
    if about.optimizer:
        return f", at a learning rate of {about.optimizer['lr']:g}"
    return ", where success is rare at first" if about.model == "rare" else ""


def _host(found: Sequence[Row]) -> str:
    runs = [run for row in found for run in row.runs]
    loads, seconds = [run.host["load"] for run in runs], sum(run.result.seconds["all"] for run in runs)
    one = runs[0].host
    return (
        f"One thread of {one['cpus']} CPUs, load {min(loads):g} to {max(loads):g}, Python {one['python']}, torch "
        f"{one['torch']}; {seconds / 60:.0f} minutes of CPU for all {len(runs)} runs."
    )


def _named(row: Row) -> str:
    return f"{row.cell.label}, age {row.cell.staleness}"


def _table(found: Sequence[Row]) -> str:
    head = ("", "runs", "end", "area", "fall of three by seed", "fall of one by seed", "age", "kept", "k3")
    lines: list[Sequence[str]] = [head, ("---",) * len(head)]
    for row in found:
        three, one = map(smoothed_fall, row.runs), row.falls()
        lines.append(
            (
                _named(row),
                str(len(row.runs)),
                _spread([end(run) for run in row.runs]),
                f"{statistics.fmean(row.areas()):.1%}",
                " ".join(f"{run.seed}: {_points(fall)}" for run, fall in zip(row.runs, three, strict=True)),
                " ".join(_points(fall) for fall in one),
                _age(row),
                f"{row.mean('gspo/kept_frac'):.2f}",
                f"{row.mean('gspo/k3_proximal_behavior'):.2g} ({_largest(row, 'gspo/k3_proximal_behavior'):.2g})",
            )
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _age(row: Row) -> str:
    steps = [sustained_steps(run) for run in row.runs]
    ages = [
        run.result.steps["staleness/mean"][step] for run, some in zip(row.runs, steps, strict=True) for step in some
    ]
    known = [age for age in ages if age is not None]
    return f"{statistics.fmean(known):.1f} in {min(map(len, steps))} steps"


def _mean(found: Sequence[Row], metric: str) -> float:
    """Over all steps of all runs."""
    return statistics.fmean(
        value for row in found for run in row.runs for value in run.result.steps[metric] if value is not None
    )


def _largest(row: Row, metric: str) -> float:
    return max(value for run in row.runs for value in run.result.steps[metric] if value is not None)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def _points(fall: float) -> str:
    return f"**{100 * fall:.0f}**" if fall > TOO_FAR else f"{100 * fall:.0f}"


def _differences(about: SustainedRun, found: Sequence[Row]) -> tuple[str, str]:
    rows = {row.cell.name: {run.seed: run for run in row.runs} for row in found}
    labels = {row.cell.name: row.cell.label for row in found}
    lines = ["| | seeds | end | area |", "| --- | --- | --- | --- |"]
    verdict = []
    for kind, beside, said, age in (*((*one, about.age) for one in COMPARED), *((*one, 0) for one in FRESH)):
        name = about.cell(kind, age)
        other = about.cell(DEFAULT, 0) if beside is None else about.cell(beside, age)
        seeds = sorted(rows.get(name, {}).keys() & rows.get(other, {}).keys())
        if len(seeds) < 2:
            continue
        pairs = [(rows[name][seed], rows[other][seed]) for seed in seeds]
        ends = [100 * (end(own) - end(beside)) for own, beside in pairs]
        areas = [100 * (area(own.result.evaluations) - area(beside.result.evaluations)) for own, beside in pairs]
        lines.append(f"| {said.format(age=age)} | {len(seeds)} | {_interval(ends)} | {_interval(areas)} |")
        if beside is None:
            verdict.append(f"{labels[name]}: {_cost(pairs, 100 * ALLOWED_COST[age])}")
    if len(lines) == 2:
        return "None yet: a pair of cells with two seeds in common is needed.", ""
    return "\n".join(lines), "\n".join(verdict)


def cost_of_age(old: Run, fresh: Run) -> float:
    """What the age cost at the end, as a share of what was gained on fresh data."""
    return (end(fresh) - end(old)) / (end(fresh) - fresh.result.evaluations[0][1])


def _cost(pairs: Sequence[tuple[Run, Run]], allowed: float) -> str:
    mean, margin = paired([100 * cost_of_age(old, fresh) for old, fresh in pairs])
    is_less = mean + margin < allowed
    told = "less than" if is_less else ("more than" if mean - margin > allowed else "not told from")
    return f"The age costs {mean:.1f} ± {margin:.1f} % of the gain on fresh data: {told} {allowed:.0f} %."


def _interval(values: Sequence[float]) -> str:
    mean, margin = paired(values)
    return f"{mean:+.1f} ± {margin:.1f}" if math.isfinite(margin) else f"{mean:+.1f}"


def _curves(found: Sequence[Row]) -> str:
    lines = ["| | seed | success |", "| --- | --- | --- |"]
    for row in found:
        for run in row.runs:
            curve = " ".join(f"{100 * value:.1f}" for _, value in run.result.evaluations)
            lines.append(f"| {_named(row)} | {run.seed} | {curve} |")
    return "\n".join(lines)


def _summary(row: Row) -> dict[str, object]:
    runs = [
        {
            "seed": run.seed,
            "evaluations": run.result.evaluations,
            "end": round(end(run), 4),
            "steps": {name: run.result.steps[name] for name in KEPT if name in run.result.steps},
            "seconds": run.result.seconds,
            "host": run.host,
        }
        for run in row.runs
    ]
    return {"name": row.cell.name, "label": row.cell.label, "job": row.runs[0].conditions["job"], "runs": runs}


def _apart_from_each_other(found: Sequence[Row]) -> list[str]:
    """The names of the rows, without what all of them have in common behind its first word."""
    names = [_named(row).split(", ") for row in found]
    shared = set(names[0]).intersection(*names[1:]) if len(names) > 1 else set[str]()
    return ["\n".join(part for place, part in enumerate(name) if place == 0 or part not in shared) for name in names]


def plot(age: int, found: Sequence[Row], path: Path) -> None:
    """Left every run and the mean of each cell, right where each seed ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over, ends) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained", width_ratios=(2, 1))
    for place, row in enumerate(found):
        colour = f"C{place}"
        steps = [step for step, _ in row.runs[0].result.evaluations]
        curves = [[100 * value for _, value in run.result.evaluations] for run in row.runs]
        for curve in curves:
            over.plot(steps, curve, color=colour, linewidth=0.7, alpha=0.4)
        means = [statistics.fmean(column) for column in zip(*curves, strict=True)]
        over.plot(steps, means, color=colour, linewidth=2.6, label=f"{_named(row)} ({len(row.runs)} seeds)")
        values = [100 * end(run) for run in row.runs]
        ends.scatter([place] * len(values), values, color=colour, alpha=0.6, s=22)
        ends.hlines(statistics.fmean(values), place - 0.25, place + 0.25, color=colour, linewidth=2.6)
    over.axvspan(0, age, color="0.93", zorder=0)
    over.text(1, 3, f"the first {age} steps:\nage {age} begins", fontsize=8, color="0.4")
    over.set(xlabel="step", ylabel="held-out success, %", ylim=(0, 100), title="every run, and the mean of each kind")
    over.legend(loc="lower right", fontsize=8)
    over.grid(alpha=0.3)
    ends.set(title="where each seed ends", xlim=(-0.6, len(found) - 0.4))
    ends.set_xticks(range(len(found)), _apart_from_each_other(found), fontsize=8, rotation=30, ha="right")
    ends.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
