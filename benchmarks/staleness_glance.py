"""What published numbers say about old data, as one picture: ``python -m benchmarks.staleness_glance``.

Rule: it measures nothing; every point is a setting of a gradient atlas or a run of the baselines, read from
``benchmarks/results``. ``docs/staleness.md`` shows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from benchmarks.baselines.pooled import SERIES, Pooled, runs_of
from benchmarks.gradient_atlas.estimators import GATED, NARROWER, PLAIN
from benchmarks.gradient_atlas.report import WORTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
ATLASES = ("gradient_atlas", "gradient_atlas_1", "gradient_atlas_1_length_200")
SHOWN: Mapping[str, str] = {
    PLAIN.name: "token weights (the default correction)",
    GATED.name: "the same, with the gates",
    "no correction, no gates": "no correction",
    "GRPO anchored on the sampler": "GRPO with its ratio to the sampler",
}
"""What a reader sees of an estimator."""
EDGES = (0.02, 0.06)
"""Where the table of docs/staleness.md changes its advice."""
KINDS = (("long_gspo_s16", "no bound"), ("bounded_growth_1_s16", "max_grad_growth: 1"))


class _Estimate(TypedDict):
    value: float
    margin: float


class _Line(TypedDict, total=False):
    """What is read of an estimator in a setting."""

    estimator: str
    cosine: _Estimate | None
    cosine_beside_truth: _Estimate | None


class _Where(TypedDict):
    length: int


class _Setting(TypedDict, total=False):
    """What is read of a setting."""

    setting: _Where
    k3: float
    spread: float
    lines: list[_Line]


def settings(results: Path = RESULTS) -> list[_Setting]:
    """Of all atlases."""
    found: list[_Setting] = []
    for name in ATLASES:
        found += json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["results"]
    return found


def directions(found: Sequence[_Setting], estimator: str) -> list[tuple[float, float]]:
    """The k3 of a token and the cosine, of each setting in which the estimator has a direction."""
    lines = ((one["k3"], _line(one, estimator).get("cosine")) for one in found)
    return [(k3, cosine["value"]) for k3, cosine in lines if cosine is not None]


@dataclass(frozen=True)
class ClipLoss:
    """What a clip loses in a setting in which the widest has a direction to lose."""

    length: int
    clip_low: float
    spreads: float
    """Its lower side, in spreads of log ratios at the last update."""
    lost: float
    """Of the cosine."""


def clip_losses(found: Sequence[_Setting]) -> list[ClipLoss]:
    points = []
    for one in found:
        widest = _line(one, PLAIN.name).get("cosine")
        if widest is None or widest["value"] < WORTH:
            continue
        for narrower in NARROWER:
            beside, low = _line(one, narrower.name).get("cosine_beside_truth"), narrower.config.clip_low
            if beside is not None:
                points.append(ClipLoss(one["setting"]["length"], low, low / one["spread"], -beside["value"]))
    return points


def _line(setting: _Setting, estimator: str) -> _Line:
    return next(line for line in setting["lines"] if line["estimator"] == estimator)


def draw(path: Path, results: Path = RESULTS) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = settings(results)
    figure, (where, width, falls) = pyplot.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    _draw_directions(where, found)
    _draw_clips(width, found)
    _draw_falls(falls, [(said, [run for one in SERIES for run in runs_of(one, cell, results)]) for cell, said in KINDS])
    for axis in (where, width, falls):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_directions(axis: Axes, found: Sequence[_Setting]) -> None:
    for left, right, colour in ((1e-4, EDGES[0], "#d9f0d3"), (*EDGES, "#fff2cc"), (EDGES[1], 1, "#f4cccc")):
        axis.axvspan(left, right, color=colour, alpha=0.6, zorder=0)
    for estimator, said in SHOWN.items():
        points = directions(found, estimator)
        axis.scatter([k3 for k3, _ in points], [cosine for _, cosine in points], s=26, alpha=0.8, label=said)
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set(
        title="Does old data still point the right way?",
        xlabel="how far the policy has moved: gspo/k3_proximal_behavior",
        ylabel="1: as fresh data would; below 0: backwards",
        xscale="log",
        xlim=(1e-4, 1),
        ylim=(-1.6, 1.1),
    )
    axis.legend(fontsize=8, loc="lower left")


def _draw_clips(axis: Axes, found: Sequence[_Setting]) -> None:
    points = clip_losses(found)
    for place, length in enumerate(sorted({point.length for point in points})):
        some = [point for point in points if point.length == length]
        colour, label = ("C0", "C1", "C3")[place], f"{length:,} tokens"
        axis.scatter(
            [one.spreads for one in some], [one.lost for one in some], s=26, color=colour, alpha=0.7, label=label
        )
    axis.axvline(3, color="C2", linewidth=1.5)
    axis.text(3.3, 1.2, "three spreads", color="C2", fontsize=9)
    axis.legend(fontsize=8)
    axis.set(
        title="How wide must the clip be?",
        xlabel="its lower side, in spreads of log ratios at the last update",
        ylabel="direction lost (cosine)",
        xscale="log",
    )


def _draw_falls(axis: Axes, kinds: Sequence[tuple[str, Sequence[Pooled]]]) -> None:
    for place, (_, runs) in enumerate(kinds):
        ordered = sorted(100 * run.fall for run in runs)
        across = [place - 0.3 + 0.6 * at / max(1, len(ordered) - 1) for at in range(len(ordered))]
        axis.scatter(across, ordered, s=22, alpha=0.7, color=("C3", "C0")[place])
    axis.axhline(10, color="0.4", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(kinds)), [f"{said}\n{len(runs)} runs" for said, runs in kinds])
    axis.set(title="How far does a run fall? (data up to 16 steps old)", ylabel="largest fall of each run, in points")


if __name__ == "__main__":
    draw(RESULTS / "staleness_glance.png")
