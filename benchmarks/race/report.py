"""What the race has shown, as a page and a picture. It measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.race.setting import NOT_THE_SAME

AIM = 3.0
COLORS = {"ours": "#2a9d8f", "trl": "#e76f51"}

PAGE = """# The demo's task beside TRL's GRPOTrainer

Written by `python -m benchmarks.trl_race`. TRL {trl} (`importance_sampling_level="sequence"`, `loss_type="grpo"`, its
tool loop with `tools=[...]`, transformers' `generate`), torch {torch}, transformers {transformers}, Python {python},
{machine}. Everything of a side, all its processes together, is confined to {cores} of {cpus} cores, each process with
one thread; one side after the other in one run of one script. The same warm-started model, tasks, prompts, rewards,
{groups_per_step} groups of {group_size} episodes a step, {minibatches} updates a step, clip {clip_low:g}/{clip_high:g},
learning rate {lr:g} ({schedule} to 0 over {steps} steps), AdamW {betas}, temperature {temperature:g}.

Time runs from the moment when the model is loaded and the first sampling can begin. Success is that of the weights
after a step on {tasks} held-out tasks x {episodes_per_task} episodes, judged at steps
{judged_at} and the last one, by one judge afterwards, out of the
time; one judgement has a standard deviation of about {deviation:.1f} points at 85 %. TRL's
writing of these weights is not counted either; ours publishes them as part of its work, so that is counted.

## Wall time to the target

{targets}

{verdict}

![held-out success over wall and CPU seconds]({picture})

## The whole run

{whole}

CPU is what all processes of the side computed. {reading}

## Where the time goes

{split}

## That both train the same thing

{tokens}

The longest episode of TRL's first batch with a tool call in it, as its policy read it (what is not trained stands in
brackets):

```
{example}
```

## What differs

{differences}
"""

ON_ONE_CORE = """Where it is much less than the wall time, other programs used the core.
A busy core is shared out by process, so a side of several processes gets more of it than a side of one: then the wall
times favour ours, and CPU is the fairer reading. The aim is therefore held against the smaller of the two ratios."""
ON_SEVERAL = """TRL is one process, which takes turns at sampling and learning, so
with one thread it leaves the other core idle; ours samples and learns at once, in several processes with one thread
each. That is part of what is compared: the aim is held against the wall time, and the CPU says what it cost."""


def page(found: Mapping[str, Any]) -> str:
    races = found["races"]
    first = next(iter(races.values()))
    num_judged = found["tasks"] * found["episodes_per_task"]
    return PAGE.format(
        **found["versions"],
        **{name: found[name] for name in ("python", "machine", "cores", "cpus", "tasks", "episodes_per_task")},
        **{name: value for name, value in first["setting"].items() if name not in ("seed", "betas")},
        betas=" / ".join(f"{value:g}" for value in first["setting"]["betas"]),
        judged_at=", ".join(map(str, found["judged_at"])),
        deviation=100 * (0.85 * 0.15 / num_judged) ** 0.5,
        targets=table(
            ("seed", "target", "TRL: step", "wall", "CPU", "ours: step", "wall", "CPU", "faster (wall)", "(CPU)"),
            (row for seed, race in races.items() for row in _target_rows(seed, race)),
        ),
        verdict=_verdict(races, found["cores"]),
        reading=ON_ONE_CORE if found["cores"] == 1 else ON_SEVERAL,
        picture="trl_race.png",
        whole=table(
            ("seed", "", "before", "after", "wall", "CPU", "wall a step", "CPU a step", "loading, not counted", "load"),
            (_whole_row(seed, side, race[side]) for seed, race in races.items() for side in ("trl", "ours")),
        ),
        split=_split(races),
        tokens="\n".join(_tokens(seed, race["tokens"]) for seed, race in races.items()),
        example=first["tokens"]["example"],
        differences="\n".join(f"- {one}" for one in NOT_THE_SAME),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _target_rows(seed: str, race: Mapping[str, Any]) -> Iterable[Sequence[object]]:
    for target, theirs in race["trl"]["to"].items():
        ours = race["ours"]["to"][target]
        ratios = ["-", "-"]
        if theirs and ours:
            ratios = [f"{theirs[unit] / ours[unit]:.2f}x" for unit in ("wall_s", "cpu_s")]
        yield (seed, target, *_reached(theirs), *_reached(ours), *ratios)


def _reached(point: Mapping[str, Any] | None) -> Sequence[str]:
    if point is None:
        return "not reached", "-", "-"
    return str(point["step"]), f"{point['wall_s']:.0f} s", f"{point['cpu_s']:.0f} s"


def _verdict(races: Mapping[str, Any], cores: int) -> str:
    said = []
    for target in next(iter(races.values()))["trl"]["to"]:
        pairs = [(race["trl"]["to"][target], race["ours"]["to"][target]) for race in races.values()]
        both = [(theirs, ours) for theirs, ours in pairs if theirs and ours]
        if not both:
            said.append(f"{target}: not reached by both in any seed.")
            continue
        wall, cpu = (
            statistics.median(theirs[unit] / ours[unit] for theirs, ours in both) for unit in ("wall_s", "cpu_s")
        )
        held_against = min(wall, cpu) if cores == 1 else wall
        said.append(
            f"{target}: {wall:.2f} times faster by wall time, {cpu:.2f} times by CPU time (medians of {len(both)} of "
            f"{len(races)} seeds); the aim of {AIM:g} is {'met' if held_against >= AIM else 'NOT met'}."
        )
    return "  \n".join(said)


def _whole_row(seed: str, side: str, one: Mapping[str, Any]) -> Sequence[object]:
    first, last = one["points"][0], one["points"][-1]
    steps = last["step"]
    load = " to ".join(f"{value:.1f}" for value in one["load"])
    spent = [last["wall_s"], last["cpu_s"]]
    return (
        *(seed, "TRL" if side == "trl" else "ours", f"{first['success']:.1%}", f"{last['success']:.1%}"),
        *(f"{value:.0f} s" for value in spent),
        *(f"{value / steps:.2f} s" for value in spent),
        *(f"{one['before_s']:.0f} s", load),
    )


def _split(races: Mapping[str, Any]) -> str:
    lines = []
    for seed, race in races.items():
        last = race["trl"]["points"][-1]
        share = race["trl"]["generate_s"] / last["wall_s"]
        lines.append(
            f"- seed {seed}, TRL: {share:.0%} of the wall time in its tool loop (sampling), the rest in updates"
        )
        used = race["ours"]["cpu_by_process"]
        total = sum(used.values())
        parts = ", ".join(f"{name} {value / total:.0%}" for name, value in used.items() if value / total >= 0.005)
        lines.append(f"- seed {seed}, ours, CPU by process: {parts}")
    return "\n".join(lines)


def _tokens(seed: str, tokens: Mapping[str, Any]) -> str:
    others = "; ".join(f"{count}: {why}" for why, count in tokens["differing"].items()) or "no others"
    return (
        f"- seed {seed}: TRL's first batch has {tokens['episodes']} episodes, {tokens['with_tool']} of them with an "
        f"answer of the tool, {tokens['turns']} turns and {tokens['trained_tokens']} trained tokens. Said again "
        f"turn by turn in our environment, {tokens['same']} have the same prompt, tokens, mask and reward ({others})."
    )


def plot(found: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    titles = {"wall_s": "wall seconds of training", "cpu_s": "CPU seconds of all processes of the side"}
    for axes, (unit, title) in zip(both, titles.items(), strict=True):
        for number, race in enumerate(found["races"].values()):
            for side, color in COLORS.items():
                points = race[side]["points"]
                name = ("this project" if side == "ours" else "TRL's GRPOTrainer") if number == 0 else None
                spent, success = [point[unit] for point in points], [point["success"] for point in points]
                axes.plot(spent, success, "o-", color=color, markersize=3, alpha=0.8, label=name)
        for target in next(iter(found["races"].values()))["trl"]["to"]:
            axes.axhline(float(target.rstrip("%")) / 100, color="gray", linestyle=":", linewidth=1)
        axes.set(xlabel=title, ylim=(0, 1.05))
        axes.grid(alpha=0.3)
    both[0].set_ylabel("success on held-out tasks")
    both[1].legend(loc="lower right")
    figure.suptitle(f"The demo's task on {found['cores']} core(s), one line a seed")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
