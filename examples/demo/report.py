"""What a finished demo says of itself: a summary, a learning curve in the terminal and as a picture, what must not be.

Rule: every number was measured in that very run. Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.demo.provenance import Provenance
from gspo_core.cli.watch import BLOCKS

CHART_WIDTH, CHART_HEIGHT = 72, 8


@dataclass(frozen=True)
class DemoResult:
    """What a run showed."""

    job: str
    status: str
    seed: int
    steps: int
    rewards: list[float]
    """Mean reward of the episodes that each step trained."""
    evaluations: list[tuple[int, float]]
    """Held-out success after a step."""
    mixed_versions_share: float
    """Of the trained episodes, those that went on under new weights in the middle."""
    staleness_mean: float
    provenance: Provenance
    training_s: float

    @property
    def before(self) -> float:
        return self.evaluations[0][1]

    @property
    def after(self) -> float:
        return self.evaluations[-1][1]

    @property
    def gain(self) -> float:
        return self.after - self.before


def moving_average(values: Sequence[float], width: int = 5) -> list[float]:
    """Over the last ``width`` values, fewer at the start."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def plot(result: DemoResult, path: Path) -> None:
    """The learning curve as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(result.rewards) + 1)
    axes.plot(steps, result.rewards, color="#2a9d8f", alpha=0.35, linewidth=1)
    axes.plot(steps, moving_average(result.rewards), color="#2a9d8f", linewidth=2.5, label="training episodes")
    axes.plot(*zip(*result.evaluations, strict=True), "o--", color="#e76f51", markersize=8, label="held-out tasks")
    for step, value in result.evaluations:
        axes.annotate(f"{value:.0%}", (step, value), textcoords="offset points", xytext=(0, 10), ha="center")
    axes.set(xlabel="step", ylabel="success", ylim=(0, 1.1), title="A tiny model learns to use a tool")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def chart(result: DemoResult) -> str:
    """The learning curve in characters: bars for the training episodes, circles for the held-out tasks."""
    smooth = moving_average(result.rewards)
    columns = min(CHART_WIDTH, len(smooth))
    heights = [smooth[round((i + 1) * len(smooth) / columns) - 1] * CHART_HEIGHT for i in range(columns)]
    marks = {
        (round(step * columns / len(smooth)), min(CHART_HEIGHT - 1, int(value * CHART_HEIGHT)))
        for step, value in result.evaluations
        if value == value
    }
    lines = []
    for row in reversed(range(CHART_HEIGHT)):
        cells = [_cell(height - row) for height in (0.0, *heights)]
        text = "".join("o" if (column, row) in marks else cell for column, cell in enumerate(cells))
        label = f"{(row + 1) / CHART_HEIGHT:.0%}" if row % 2 else ""
        lines.append(f"{label:>5} |{text.rstrip()}")
    lines.append("      +" + "-" * (columns + 1))
    lines.append(f"       0{len(smooth):>{columns}} steps   bars: training episodes, o: held-out tasks")
    return "\n".join(lines)


def _cell(height: float) -> str:
    """What of a column of ``height`` rows is in the lowest one."""
    if height <= 0:
        return " "
    return BLOCKS[min(len(BLOCKS) - 1, int(height * len(BLOCKS)))]


def summary(result: DemoResult, picture: Path, peak_bytes: int | None) -> str:
    minutes, seconds = divmod(round(result.training_s), 60)
    memory = "not told by this system" if peak_bytes is None else f"{peak_bytes / 2**30:.2f} GiB at the most"
    return (
        f"\nheld-out success   {result.before:.1%} before, {result.after:.1%} after {result.steps} steps "
        f"({100 * result.gain:+.1f} points) in {minutes} min {seconds:02d} s\n"
        f"asynchronous       {result.mixed_versions_share:.0%} of the trained episodes hold tokens of more than one "
        f"version; mean staleness {result.staleness_mean:.2f} steps\n"
        f"provenance         {result.provenance}\n"
        f"memory             {memory}, all processes together\n"
        f"learning curve     {picture}\n"
    )


def shortcomings(result: DemoResult, expected_points: float | None) -> list[str]:
    """What must not be, in a run that came to its end."""
    found = []
    provenance = result.provenance
    if provenance.num_equal < provenance.num_tokens:
        found.append(
            f"{provenance.num_tokens - provenance.num_equal} recorded log-probs are not those of their version"
        )
    if expected_points is not None and not 100 * result.gain >= expected_points:
        found.append(
            f"held-out success changed by {100 * result.gain:+.0f} points, {expected_points:.0f} were expected"
        )
    return found
