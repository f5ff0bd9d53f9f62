"""The race counted in steps: what one teaches on either side, whatever else the machine did meanwhile.

Two numbers a seed, of success on held-out tasks: its mean over the steps of the run (the area under the curve), and the
first step at which the mean of three judgements in a row (that step's in the middle) reaches the target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines.falls import paired
from benchmarks.baselines.report import area
from benchmarks.race.report import COLORS, table
from benchmarks.race.setting import NOT_THE_SAME

AIM = 1.2
TARGETS = (0.8, 0.85, 0.9)

PAGE = """# The demo's task beside TRL's GRPOTrainer, step by step

Written by `python -m benchmarks.trl_race --by-steps`, commit {commit}, {date}. TRL {trl} and ours
from the same warm-started model, with the same tasks, rewards and settings as in [the race against
time](trl_race.md#what-differs): {groups_per_step} groups of {group_size} episodes a step, {minibatches} updates a step,
{steps} steps, learning rate {lr:g} ({schedule} to 0). Ours is the whole stack and stays
asynchronous. Other programs ran beside both, so no times are stated here.

Success is that of the weights after a step on {tasks} held-out tasks x {episodes_per_task} episodes, by one judge, at
steps {judged_at} and the last one. One judgement has a standard deviation
of about {deviation:.1f} points at 85 %, so a target counts as reached where the mean of three judgements in a row
reaches it, at the step of the middle one. *Over all steps*: the mean over the curve. The {count} seeds were drawn.

{seeds}

{verdict}

![held-out success over steps, the mean of all seeds](trl_race_steps.png)

## Every judgement, in per cent

{judgements}

## What differs

{differences}
"""


def crossing(points: Sequence[Mapping[str, Any]], target: float) -> int | None:
    """The first step around which three judgements in a row have ``target`` as their mean."""
    trained = [point for point in points if point["step"]]
    for before, at, after in zip(trained, trained[1:], trained[2:], strict=False):
        if statistics.fmean(one["success"] for one in (before, at, after)) >= target - 1e-9:
            return int(at["step"])
    return None


def over_all_steps(points: Sequence[Mapping[str, Any]]) -> float:
    return area([(point["step"], point["success"]) for point in points])


def page(found: Mapping[str, Any]) -> str:
    races = found["races"]
    first = next(iter(races.values()))
    num_judged = found["tasks"] * found["episodes_per_task"]
    return PAGE.format(
        **{name: found[name] for name in ("tasks", "episodes_per_task", "commit", "date")},
        **{name: value for name, value in first["setting"].items() if name not in ("seed", "betas")},
        trl=found["versions"]["trl"],
        judged_at=", ".join(map(str, found["judged_at"])),
        deviation=100 * (0.85 * 0.15 / num_judged) ** 0.5,
        count=len(races),
        seeds=table(
            ("seed", "before", "over all steps: TRL", "ours", *_heads()),
            [_row(seed, race) for seed, race in races.items()],
        ),
        verdict=_verdict(races),
        judgements=table(
            ("seed", "side", "success at each of these steps"),
            [
                (seed, "TRL" if side == "trl" else "ours", _curve(race[side]["points"]))
                for seed, race in races.items()
                for side in ("trl", "ours")
            ],
        ),
        differences="\n".join(f"- {one}" for one in NOT_THE_SAME),
    )


def _heads() -> list[str]:
    return [f"{target:.0%}: {side}" for target in TARGETS for side in ("TRL", "ours")]


def _row(seed: str, race: Mapping[str, Any]) -> list[str]:
    areas = [f"{over_all_steps(race[side]['points']):.1%}" for side in ("trl", "ours")]
    reached = [crossing(race[side]["points"], target) for target in TARGETS for side in ("trl", "ours")]
    before = f"{race['trl']['points'][0]['success']:.1%}"
    return [seed, before, *areas, *("never" if step is None else str(step) for step in reached)]


def _curve(points: Sequence[Mapping[str, Any]]) -> str:
    return " ".join(f"{100 * point['success']:.0f}" for point in points)


def _verdict(races: Mapping[str, Any]) -> str:
    sides = {side: [race[side]["points"] for race in races.values()] for side in ("trl", "ours")}
    areas = {side: [over_all_steps(points) for points in curves] for side, curves in sides.items()}
    mean, margin = paired([100 * (b - a) for a, b in zip(areas["trl"], areas["ours"], strict=True)])
    said = [
        f"Over all steps: {statistics.fmean(areas['ours']):.1%} beside {statistics.fmean(areas['trl']):.1%}, "
        f"ours {mean:+.1f} ± {margin:.1f} points (paired, 95 %)."
    ]
    for target in TARGETS:
        steps = {side: [crossing(points, target) for points in curves] for side, curves in sides.items()}
        pairs = [(a, b) for a, b in zip(steps["trl"], steps["ours"], strict=True) if a and b]
        if len(pairs) < 2:
            said.append(f"{target:.0%}: reached by both in {len(pairs)} of {len(races)} seeds.")
            continue
        ratio, spread = paired([math.log(b / a) for a, b in pairs])
        low, high = math.exp(ratio - spread), math.exp(ratio + spread)
        never = {side: sum(step is None for step in found) for side, found in steps.items()}
        said.append(
            f"{target:.0%}: {math.exp(ratio):.2f} times TRL's steps ({low:.2f} to {high:.2f}; geometric mean of "
            f"{len(pairs)} of {len(races)} seeds, 95 %), {_steps(pairs, 1)} for {_steps(pairs, 0)} steps in the "
            f"median; never reached by TRL in {never['trl']}, by ours in {never['ours']}. The aim of {AIM:g} is "
            f"{'met' if math.exp(ratio) <= AIM and never['ours'] <= never['trl'] else 'NOT met'}."
        )
    return "  \n".join(said)


def _steps(pairs: Sequence[tuple[int, int]], side: int) -> str:
    return f"{statistics.median(pair[side] for pair in pairs):g}"


def plot(found: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for side, color in COLORS.items():
        curves = [race[side]["points"] for race in found["races"].values()]
        for points in curves:
            axes.plot(*_line(points), color=color, alpha=0.2, linewidth=1)
        steps = [point["step"] for point in curves[0]]
        means = [statistics.fmean(points[index]["success"] for points in curves) for index in range(len(steps))]
        name = "this project" if side == "ours" else "TRL's GRPOTrainer"
        axes.plot(steps, means, "o-", color=color, markersize=3, label=name)
    axes.set(xlabel="steps", ylabel="success on held-out tasks", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _line(points: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    return [point["step"] for point in points], [point["success"] for point in points]
