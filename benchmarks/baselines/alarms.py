"""What the product's alarms would have said of the runs that are published: which of them see a real fall, and when.

``python -m benchmarks.baselines.alarms`` writes ``benchmarks/results/alarms.md`` from the other pages' numbers. Rule:
it runs nothing and chooses nothing; each alarm is judged by the product's own bound, on what a run recorded.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.baselines.falls import ROUNDING, TOO_FAR
from benchmarks.baselines.report import RESULTS, largest_fall
from gspo_core.bounds import exceeds, falls_below
from gspo_core.evaluation.intervals import score
from gspo_core.objective import Alarm, AlarmKind, AlarmPatience
from gspo_core.objective.alarms import DEFAULT_K3_GATE, MIN_COMPARED_FRAC, MIN_ESS, MIN_KEPT_FRAC
from services.trainer.telling.alarms import RunAlarm
from services.trainer.telling.aligned import ALIGNMENT, AlignedGradients
from services.trainer.telling.best_evaluation import HIGH, LOW, MEAN, BestEvaluation

SERIES = (
    "falls",
    "step_bounds",
    "signal_scaling",
    "clip_spread",
    "never_run",
    "sustained",
    "sustained_fast",
    "sustained_fast_again",
    "sustained_rare",
    "sustained_long",
    "sustained_long_again",
    "sustained_confirming",
    "sustained_search",
)
JUDGED_EPISODES, LAST_JUDGED = 1000, 3
"""The last evaluations of a sustained run have more episodes than the others."""
EVALUATIONS_BEFORE = 2
"""An alarm *warns* if it rings within so many evaluations before the one that shows the fall."""

PAGE = """# What the alarms would have said

Written by `python -m benchmarks.baselines.alarms` from the numbers of {series}, whose pages have the conditions;
nothing was run for it. {num_runs} runs at ages of 0 to 64 steps, {num_fallen} of which fell by more than 10 points
below the best of their evaluations before.

- *warned*: runs that fell in which the alarm rang in the steps between the second evaluation before the one that
  shows the fall and that one; *at the fall*: it rang with that evaluation. *elsewhere*: it rang earlier or later only.
- *false*: runs that did not fall in which it rang at all. Runs that did not record what it looks at are not counted.

| alarm | fell | warned | at the fall | elsewhere | never | did not fall | false |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

`evaluation_fell` compares held-out rewards by their intervals; here those of {few} to {many:,} single episodes.
`gate_pressure` looks at each gate for itself, and a run records what all of them leave; `no_signal` counts groups, a
run its idle sequences; `correction_collapse` looks at tokens and at cut weights too, which no run recorded. So these
three are near what a job would have told, and not the same. One run is in two of the files, so it counts twice.

## What `evaluation_fell` would have answered

Runs in which it rang, success in per cent: at the best evaluation before, at the one that rang, and at the end, where
no one had answered it. `watchdog.on_fall: go_back` would have gone back to the first of the three.

| series | run | seed | best | rang at step | there | end |
| --- | --- | --- | --- | --- | --- | --- |
{answered}
"""


@dataclass(frozen=True)
class Recorded:
    """A published run."""

    series: str
    label: str
    seed: int
    evaluations: Sequence[tuple[int, float]]
    steps: Mapping[str, Sequence[float | None]]
    num_tasks: int

    @property
    def curve(self) -> list[float]:
        return [value for _, value in self.evaluations]

    @property
    def has_fallen(self) -> bool:
        return largest_fall(self.curve) > TOO_FAR + ROUNDING

    @property
    def shown_at(self) -> int:
        """The evaluation, by its place, that is the first more than 10 points below what was reached."""
        curve = self.curve
        below = (best - value for best, value in zip(accumulate(curve, max), curve, strict=True))
        return next(place for place, fall in enumerate(below) if fall > TOO_FAR + ROUNDING)

    def episodes(self, place: int) -> int:
        is_judged = self.series.startswith("sustained") and place >= len(self.evaluations) - LAST_JUDGED
        return JUDGED_EPISODES if is_judged else self.num_tasks


@dataclass(frozen=True)
class Rung:
    """The steps after which one alarm rang in a run; None where the run did not record what it looks at."""

    run: Recorded
    after: Sequence[int] | None

    @property
    def kind(self) -> str:
        """What it was worth, as the page says it."""
        if self.after is None:
            return "unknown"
        if not self.run.has_fallen:
            return "false" if self.after else "silent"
        place = self.run.shown_at
        shown, first = self.run.evaluations[place][0], self.run.evaluations[max(0, place - EVALUATIONS_BEFORE)][0]
        if any(first < step < shown for step in self.after):
            return "warned"
        if shown in self.after:
            return "at the fall"
        return "elsewhere" if self.after else "never"


def recorded(results: Path = RESULTS) -> list[Recorded]:
    """All runs of ``SERIES``."""
    return [
        Recorded(series, row["label"], run["seed"], run["evaluations"], run["steps"], row["job"]["evaluation"]["tasks"])
        for series in SERIES
        for row in json.loads((results / f"{series}.json").read_text(encoding="utf-8"))
        for run in row["runs"]
    ]


def fallen_evaluations(run: Recorded) -> list[int]:
    """The steps with whose evaluation `evaluation_fell` rings."""
    best, found = BestEvaluation(), []
    for place, (step, success) in enumerate(run.evaluations):
        num = run.episodes(place)
        num_right = round(success * num)
        interval = score([[1.0]] * num_right + [[0.0]] * (num - num_right))
        assert interval is not None
        if best.compare(step, {MEAN: success, LOW: interval.low, HIGH: interval.high}) is not None:
            found.append(step)
    return found


def aligned_steps(run: Recorded) -> list[int] | None:
    """The steps after which `gradients_aligned` rings."""
    if ALIGNMENT not in run.steps:
        return None
    watch, found = AlignedGradients(), []
    for step, value in enumerate(run.steps[ALIGNMENT], 1):
        metrics = {} if value is None else {ALIGNMENT: value}
        if watch.alarms(RunAlarm.GRADIENTS_ALIGNED, metrics):
            found.append(step)
    return found


def _patient(kind: AlarmKind, metric: str, rings: Callable[[float], bool]) -> Callable[[Recorded], list[int] | None]:
    """An alarm about single steps, with the patience that the product has."""

    def steps(run: Recorded) -> list[int] | None:
        if metric not in run.steps:
            return None
        patience, found = AlarmPatience(), []
        for step, value in enumerate(run.steps[metric], 1):
            alarms = [Alarm(kind, metric, value, 0.0, "")] if value is not None and rings(value) else []
            if patience.ripe(alarms):
                found.append(step)
        return found

    return steps


NUM_SEQUENCES = 48
"""Of a step of all of these runs."""
ALARMS: Mapping[str, Callable[[Recorded], list[int] | None]] = {
    "evaluation_fell": fallen_evaluations,
    "far_step": _patient(AlarmKind.FAR_STEP, "gspo/k3_policy_proximal", lambda k3: exceeds(k3, DEFAULT_K3_GATE)),
    "gate_pressure": _patient(AlarmKind.GATE_PRESSURE, "gspo/kept_frac", lambda kept: falls_below(kept, MIN_KEPT_FRAC)),
    "correction_collapse": _patient(
        AlarmKind.CORRECTION_COLLAPSE, "gspo/ess_sequence", lambda share: falls_below(share, MIN_ESS)
    ),
    "no_signal": _patient(
        AlarmKind.NO_SIGNAL,
        "learner/num_idle_sequences",
        lambda idle: falls_below(1 - idle / NUM_SEQUENCES, MIN_COMPARED_FRAC),
    ),
    "gradients_aligned": aligned_steps,
}


def write(results: Path = RESULTS) -> str:
    runs = recorded(results)
    tasks = [run.num_tasks for run in runs]
    text = PAGE.format(
        series=", ".join(f"[{name}.json]({name}.json)" for name in SERIES),
        num_runs=len(runs),
        num_fallen=sum(run.has_fallen for run in runs),
        rows="\n".join(_row(name, [Rung(run, alarm(run)) for run in runs]) for name, alarm in ALARMS.items()),
        few=min(tasks),
        many=JUDGED_EPISODES,
        answered="\n".join(_answered(run, rang) for run in runs if (rang := fallen_evaluations(run))),
    )
    (results / "alarms.md").write_text(text, encoding="utf-8")
    return text


def _row(name: str, rung: Sequence[Rung]) -> str:
    kinds = [one.kind for one in rung]
    counts = [kinds.count(kind) for kind in ("warned", "at the fall", "elsewhere", "never")]
    quiet = kinds.count("silent") + kinds.count("false")
    return f"| `{name}` | {sum(counts)} | {' | '.join(map(str, counts))} | {quiet} | {kinds.count('false')} |"


def _answered(run: Recorded, rang: Sequence[int]) -> str:
    success: dict[int, Any] = dict(run.evaluations)
    best = max(value for step, value in run.evaluations if step < rang[0])
    end = statistics.fmean(run.curve[-LAST_JUDGED:]) if run.series.startswith("sustained") else run.curve[-1]
    told = (f"{100 * value:.0f}" for value in (best, success[rang[0]], end))
    first, there, last = told
    return f"| {run.series} | {run.label} | {run.seed} | {first} | {rang[0]} | {there} | {last} |"


if __name__ == "__main__":
    print(write())
