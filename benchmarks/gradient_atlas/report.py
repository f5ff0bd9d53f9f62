"""Tables and a picture of what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.gradient_atlas.estimators import ESTIMATORS, LIED_ABOUT, LIES, NARROWER, PLAIN
from benchmarks.gradient_atlas.jackknife import Estimate
from benchmarks.gradient_atlas.measure import GROUPS, UPDATE, Line, Result, Setting
from benchmarks.gradient_atlas.world import GROUP_SIZE, NUM_CONTEXTS, NUM_SYMBOLS

CLIP_LOSS = 0.05
"""Of the cosine: so much a clip may lose."""
WORTH = 0.5
"""A clip is judged where the widest leaves a cosine of so much: elsewhere there is little that it could lose."""
RESULTS = Path(__file__).parents[1] / "results"

PAGE = """# The gradient atlas

Written by `python -m benchmarks.gradient_atlas`; [docs/staleness.md](../../docs/staleness.md) says what follows.
A policy that is a table ({contexts} states, {symbols} symbols) was trained on fresh data, four updates a step. At some
version of it, groups are drawn by weights that are 4, 16 or 64 steps older: whole episodes by one version (*single*),
or episodes that began under the oldest and went through all versions between (*stitched*). Here is each objective's
expected update on such episodes beside the true one at the same weights, which lie {update:.0%} of the way to the next
version: where the last update of a batch is made.

- *Cosine*: between the two expected updates, ± half of its 95 % interval; 1 is the true direction, 0 none, below 0 the
  update undoes what the true one would do. A dash: gates left too little, or the interval is wider than 1.
- *Bias*: length of their difference, as a share of the true one's. *Noise*: variance of the update of {episodes}
  episodes, as a multiple of the true one's squared length. *ESS*: effective sample size of the token weights.
- {batches} batches of {episodes} episodes in each setting, the truth from twice as many.
- {conditions}

![cosine of each objective's update with the true one]({name}.png)

{tables}

## Who is said to have drawn a token

The cosine with all tokens of a stitched episode attributed to the oldest or to the newest of its versions, less that
with what was recorded, on the same episodes. Bold: the interval excludes 0. A dash: one of the two has no angle.

{lies}

## How narrow may a clip be?

Token weights, no gates, in the settings in which the widest clip leaves a cosine of at least {worth:g}. *Spread*:
standard deviation of a sequence's log ratio at this update, which a job reports as `gspo/log_ratio_std`. Then cosines
by the width of the clip, the widest last. *Enough*: the narrowest of them that, as all wider ones, loses at most
{loss:g} of the widest's cosine, and how many spreads its lower side is. Bold: significantly below the widest, on the
same episodes.

{clips}

{advice}

## All numbers at length {middle}, stitched, 16 steps

{details}
"""


def read(path: Path) -> tuple[list[Result], int, str]:
    """What ``write`` wrote: the results, the number of batches, and the conditions."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return TypeAdapter(list[Result]).validate_python(content["results"]), content["batches"], content["conditions"]


def write(
    results: Sequence[Result], num_batches: int, conditions: str, folder: Path = RESULTS, name: str = "gradient_atlas"
) -> str:
    text = PAGE.format(
        contexts=NUM_CONTEXTS,
        symbols=NUM_SYMBOLS,
        update=UPDATE,
        episodes=GROUPS * GROUP_SIZE,
        batches=num_batches,
        conditions=conditions,
        tables="\n\n".join(_cosines(some) for some in _by_place(results).values()),
        lies=_lies(results),
        loss=CLIP_LOSS,
        worth=WORTH,
        clips=_clips(results),
        advice=_advice(results),
        middle=_middle(results).setting.length,
        details=_details(_middle(results)),
        name=name,
    )
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    content = {"batches": num_batches, "conditions": conditions, "results": [asdict(one) for one in results]}
    (folder / f"{name}.json").write_text(json.dumps(_rounded(content), indent=1) + "\n", encoding="utf-8")
    plot(results, folder / f"{name}.png")
    return text


def _by_place(results: Sequence[Result]) -> Mapping[tuple[int, int], list[Result]]:
    found: dict[tuple[int, int], list[Result]] = {}
    for one in results:
        found.setdefault((one.setting.length, one.setting.point), []).append(one)
    return found


def _middle(results: Sequence[Result]) -> Result:
    wanted = [one for one in results if one.setting.kind == "stitched" and one.setting.age == 16] or list(results)
    return wanted[len(wanted) // 2]


def _cosines(results: Sequence[Result]) -> str:
    setting = results[0].setting
    head = ["cosine", *(_named(one.setting) for one in results)]
    rows = [head, ["---"] * len(head), ["k3 of a token", *(f"{one.k3:.2g}" for one in results)]]
    for estimator in ESTIMATORS:
        if estimator.name not in LIED_ABOUT and estimator.can_take(setting.length):
            rows.append([estimator.name, *(_said(_line(one, estimator.name).cosine) for one in results)])
    return f"## Length {setting.length}, version {setting.point}\n\n{_table(rows)}"


def _lies(results: Sequence[Result]) -> str:
    stitched = [one for one in results if one.setting.kind == "stitched"]
    heads = [f"{truth}: {which}" for truth in LIES for which in ("oldest", "newest")]
    rows = [["length", "version", "age", *heads], ["---"] * (3 + len(heads))]
    for one in stitched:
        setting = one.setting
        told = [_difference(_line(one, lie), _line(one, truth)) for lie, truth in LIED_ABOUT.items()]
        rows.append([str(setting.length), str(setting.point), str(setting.age), *told])
    return _table(rows)


def _difference(lie: Line, truth: Line) -> str:
    beside = lie.cosine_beside_truth
    if beside is None or lie.cosine is None or truth.cosine is None:
        return "-"
    said = f"{beside.value:+.2f} ± {beside.margin:.2f}"
    return f"**{said}**" if beside.excludes_zero() else said


def _clips(results: Sequence[Result]) -> str:
    widths = [*(one.name.removeprefix("clip ") for one in NARROWER), _widest()]
    rows = [["length", "version", "kind", "age", "k3", "spread", *widths, "enough"]]
    rows.append(["---"] * len(rows[0]))
    for result in results:
        setting, widest = result.setting, _line(result, PLAIN.name)
        if not _is_worth(widest) or widest.cosine is None:
            continue
        told = [_beside_widest(_line(result, one.name)) for one in NARROWER]
        place = [str(setting.length), str(setting.point), setting.kind, str(setting.age)]
        found = enough(result)
        said = "none narrower" if found is None else f"{found:g}, {found / result.spread:.1f} spreads"
        rows.append([*place, f"{result.k3:.2g}", f"{result.spread:.2g}", *told, f"{widest.cosine.value:.2f}", said])
    return _table(rows)


def _is_worth(widest: Line) -> bool:
    return widest.cosine is not None and widest.cosine.value >= WORTH


def _widest() -> str:
    return f"{PLAIN.config.clip_low:g} / {PLAIN.config.clip_high:g}"


def _beside_widest(line: Line) -> str:
    beside = line.cosine_beside_truth
    if line.cosine is None or beside is None:
        return "-"
    said = f"{line.cosine.value:.2f}"
    return f"**{said}**" if beside.value < -beside.margin else said


def enough(result: Result) -> float | None:
    """The lower side of the narrowest clip that, as all wider ones, loses at most ``CLIP_LOSS``; None: the widest."""
    found = None
    for one in reversed(NARROWER):
        line = _line(result, one.name)
        if line.cosine is None or line.cosine_beside_truth is None or line.cosine_beside_truth.value < -CLIP_LOSS:
            return found
        found = one.config.clip_low
    return found


def _advice(results: Sequence[Result]) -> str:
    """The range of what is enough, in spreads, over settings in which something can be lost."""
    judged = [one for one in results if _is_worth(_line(one, PLAIN.name))]
    found = [(one, enough(one)) for one in judged]
    spreads = [(PLAIN.config.clip_low if low is None else low) / one.spread for one, low in found]
    backwards = [one for one in judged if _points_backwards(_line(one, NARROWER[0].name))]
    middle, narrowest = sorted(spreads)[len(spreads) // 2], NARROWER[0].name.removeprefix("clip ")
    return (
        f"Enough is {min(spreads):.1f} to {max(spreads):.1f} spreads, {middle:.1f} in the middle of {len(spreads)} "
        f"settings. The narrowest, {narrowest}, points significantly backwards in {len(backwards)} of them."
    )


def _points_backwards(line: Line) -> bool:
    return line.cosine is not None and line.cosine.value < -line.cosine.margin


def _details(result: Result) -> str:
    rows = [["", "cosine", "bias", "noise", "kept", "clipped", "ESS"], ["---"] * 7]
    for line in result.lines:
        shares = (f"{value:.2f}" for value in (line.kept, line.clipped))
        noise, ess = f"{line.noise.value:.1f} ± {line.noise.margin:.1f}", _said(line.ess)
        rows.append([line.estimator, _said(line.cosine), _said(line.bias), noise, *shares, ess])
    return _table(rows)


def _line(result: Result, estimator: str) -> Line:
    return next(line for line in result.lines if line.estimator == estimator)


def _named(setting: Setting) -> str:
    return f"{setting.kind}, {setting.age} steps"


def _said(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.2f} ± {estimate.margin:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def plot(results: Sequence[Result], path: Path) -> None:
    """A square for each objective and setting, blue where the update points the true way and red where it undoes it."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    names = [one.name for one in ESTIMATORS]
    table = np.full((len(names), len(results)), np.nan)
    for column, result in enumerate(results):
        for line in result.lines:
            if line.cosine is not None:
                table[names.index(line.estimator), column] = line.cosine.value
    figure, axis = pyplot.subplots(figsize=(6 + 0.42 * len(results), 1.8 + 0.27 * len(names)), layout="constrained")
    axis.set_facecolor("0.85")
    image = axis.imshow(table, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(table):
        if np.isfinite(value):
            colour = "white" if abs(value) > 0.6 else "black"
            axis.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=7, color=colour)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    labels = [f"{one.setting.length}, v{one.setting.point}, {_named(one.setting)}" for one in results]
    axis.set_xticks(range(len(results)), labels, rotation=90, fontsize=8)
    axis.set_title("cosine of the expected update with the true one (grey: too little left)", fontsize=10)
    figure.colorbar(image, shrink=0.5)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
