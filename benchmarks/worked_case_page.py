"""The page of ``benchmarks.worked_case``, from what it has measured: ``python -m benchmarks.worked_case_page`` writes
it again from ``results/worked_case.json``. Rule: every number on it comes from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

RESULTS = Path(__file__).parent / "results"
RECORD, PAGE = RESULTS / "worked_case.json", RESULTS / "worked_case.md"
TEXT = """# A run that falls

Written by `python -m benchmarks.worked_case` on {day}: `{cell}`, seed {seed}, {cpus} cores, one thread, load {load:.1f}
at the end, torch {torch}; the first {last} of 48 steps. Numbers: `worked_case.json`. Held-out success on {tasks} tasks,
in per cent, after so many steps:

{curves}

How far each step moved the policy (`gspo/k3_policy_proximal`):

{far}

Step {step} is the farthest from step {learned} on.

{looks}

`gspo replay JOB@{step} --without {culprit}`: loss {loss:.4g} becomes {loss_otherwise:.4g}, and the step ends
{share:.1%} of its way elsewhere (update cosine {cosine:.3f}).

A fork after step {fork_at} trains {way} logged steps again. The fork as it was ends at its parent's weights: {control}.
Replays of steps {step} to {last}: {same}.
"""
LOOK = """`gspo replay JOB@{step} --influence`: how far the step would have ended from where it ended, with the
advantages of each group 0:

{influences}

Rewards of group {group}: {rewards}; its episode with the largest share of the loss is {episode}, {share:+.4g} of
{loss:+.4g}."""


class Pull(TypedDict):
    group: int
    share: float
    cosine: float | None


class Look(TypedDict):
    """Into a step: how far its groups pulled, and the first of them."""

    step: int
    influences: list[Pull]
    rewards: list[float | None]
    episode: str
    episode_loss: float
    loss: float


class RunMade(TypedDict):
    name: str
    curve: dict[str, float]
    far: dict[str, float]


class Without(TypedDict):
    loss: float
    loss_otherwise: float
    share: float
    cosine: float


class Measured(TypedDict):
    day: str
    cell: str
    seed: int
    cpus: int
    load: float
    torch: str
    tasks: int
    learned: int
    last: int
    step: int
    way: int
    control: bool
    same: bool
    runs: list[RunMade]
    looks: list[Look]
    """The farthest step, and the one behind it."""
    without: Without
    """The first group of the farthest step."""


def page(found: Measured) -> str:
    without, plain = found["without"], ("day", "cell", "seed", "cpus", "load", "torch", "tasks", "learned", "last")
    names, step = [run["name"] for run in found["runs"]], found["step"]
    return TEXT.format(
        **{name: value for name, value in found.items() if name in plain},
        step=step,
        fork_at=step - 1,
        way=found["way"],
        curves=table(names, [run["curve"] for run in found["runs"]], percent),
        far=table(names, [near(run["far"], step) for run in found["runs"]], few),
        looks="\n\n".join(map(look_text, found["looks"])),
        culprit=found["looks"][0]["influences"][0]["group"],
        loss=without["loss"],
        loss_otherwise=without["loss_otherwise"],
        share=without["share"],
        cosine=without["cosine"],
        control="bit for bit" if found["control"] else "NO",
        same="every published version bit for bit" if found["same"] else "NOT bit for bit",
    )


def near(far: Mapping[str, float], step: int) -> dict[str, float]:
    return {at: value for at, value in far.items() if -5 < int(at) - step < 4}


def percent(value: float) -> str:
    return f"{100 * value:.0f}"


def few(value: float) -> str:
    return f"{value:.2g}"


def table(names: Sequence[str], rows: Sequence[Mapping[str, float]], spelled: Callable[[float], str]) -> str:
    steps = sorted({step for row in rows for step in row}, key=int)
    lines = [f"| | {' | '.join(steps)} |", "|---" * (len(steps) + 1) + "|"]
    for name, row in zip(names, rows, strict=True):
        lines.append(f"| {name} | {' | '.join(spelled(row[step]) if step in row else '' for step in steps)} |")
    return "\n".join(lines)


def look_text(look: Look) -> str:
    lines = ["| group | of the way | update cosine |", "|---|---|---|"]
    for pull in look["influences"]:
        cosine = "" if pull["cosine"] is None else f"{pull['cosine']:.3f}"
        lines.append(f"| {pull['group']} | {pull['share']:.1%} | {cosine} |")
    return LOOK.format(
        step=look["step"],
        influences="\n".join(lines),
        group=look["influences"][0]["group"],
        rewards=" ".join("none" if one is None else f"{one:g}" for one in look["rewards"]),
        episode=look["episode"],
        share=look["episode_loss"],
        loss=look["loss"],
    )


def read() -> Measured:
    found: Measured = json.loads(RECORD.read_text())
    return found


if __name__ == "__main__":
    PAGE.write_text(page(read()))
