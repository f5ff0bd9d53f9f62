"""``gspo watch``: a job drawn live from its event stream; what it draws is a pure function of the events so far."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gspo_core.cli.connection import connected

if TYPE_CHECKING:
    from rich.console import RenderableType

BLOCKS = "▁▂▃▄▅▆▇█"
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
# Steps that the moving rate looks back over.
RATE_WINDOW = 10


@dataclass
class JobView:
    """What a person wants to know of a job, kept up to date by ``take``."""

    job_id: str
    num_steps: int
    status: str = "queued"
    reason: str = ""
    rewards: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    last_step: Mapping[str, Any] = field(default_factory=dict)
    step_times_s: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.status in TERMINAL

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "job.status":
            self.status = data.get("status", self.status)
            self.reason = (data.get("status_reason") or {}).get("message", "")
        elif kind == "step":
            self.last_step = data
            self.rewards.append(float(data.get("reward/mean", 0.0)))
            self.step_times_s.append(float(data.get("time/step_s", 0.0)))
        elif kind == "evaluation":
            # Without a reward/mean when no episode got a reward.
            self.evaluations.append((int(data["step"]), float(data.get("reward/mean", "nan"))))
        elif kind == "alert":
            self.notes.append(str(data.get("message", data)))
        elif kind == "env.health" and not data.get("healthy", True):
            self._note_once(f"{data.get('worker', 'a worker')} cannot play episodes: {data.get('error', 'unknown')}")

    def _note_once(self, note: str) -> None:
        """Last, and only once: a worker says it again every few seconds."""
        self.notes = [*(known for known in self.notes if known != note), note]

    @property
    def eta_s(self) -> float | None:
        recent = self.step_times_s[-RATE_WINDOW:]
        if not recent or self.is_over:
            return None
        return sum(recent) / len(recent) * (self.num_steps - int(self.last_step.get("step", 0)))


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """``values`` as a row of blocks, averaged into at most ``width`` columns."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(means) if low is None else low
    high = max(means) if high is None else high
    span = (high - low) or 1.0
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[max(0, min(top, round((mean - low) / span * top)))] for mean in means)


def watch(url: str, job_id: str, *, as_json: bool) -> int:
    with connected(url) as client:
        job = client.job(job_id)
        view = JobView(job_id, int(client.config(job_id)["steps"]))
        events = client.events(job_id, after="0")
        if as_json:
            for event in events:
                print(json.dumps({"id": event.id, "type": event.type, "data": event.data}), flush=True)
                view.take(event.type, event.data)
        else:
            view.status = job["status"]
            follow(view, ((event.type, event.data) for event in events))
    return 0 if view.status == "succeeded" else 1


def follow(view: JobView, events: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Draw until the events end. Without a terminal: one line per step instead of a display."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        for kind, data in events:
            view.take(kind, data)
            line = describe(view, kind)
            if line:
                print(line, flush=True)
        return
    with Live(draw(view), console=console, refresh_per_second=4) as live:
        for kind, data in events:
            view.take(kind, data)
            live.update(draw(view))


def describe(view: JobView, kind: str) -> str:
    if kind == "job.status":
        return f"{view.job_id}: {view.status}" + (f" ({view.reason})" if view.reason else "")
    if kind == "evaluation":
        at, reward = view.evaluations[-1]
        return f"held-out reward {reward:.3f} after step {at}"
    if kind in ("alert", "env.health") and view.notes:
        return f"alert: {view.notes[-1]}"
    if kind != "step":
        return ""
    step = view.last_step
    return (
        f"step {step['step']:>4}/{view.num_steps}  reward {step.get('reward/mean', 0):.3f}  "
        f"staleness {step.get('staleness/mean', 0):.2f}  clip {step.get('gspo/clip_frac', 0):.2f}  "
        f"{step.get('throughput/tokens_per_s', 0):,.0f} tok/s"
    )


def draw(view: JobView) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    step = view.last_step
    done = int(step.get("step", 0))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("step", f"{done} of {view.num_steps}", _time_left(view.eta_s))
    facts.add_row("reward", Text(sparkline(view.rewards, 48, 0.0), style="green"), f"{step.get('reward/mean', 0):.3f}")
    if view.evaluations:
        played = "  ".join(f"{reward:.2f} @ {at}" for at, reward in view.evaluations[-6:])
        facts.add_row("held out", played, "")
    facts.add_row(
        "staleness",
        f"mean {step.get('staleness/mean', 0):.2f}, oldest token {step.get('staleness/max', 0):.0f} steps",
        "",
    )
    facts.add_row("clipped", f"{100 * float(step.get('gspo/clip_frac', 0)):.0f} % of tokens", "")
    facts.add_row("speed", f"{step.get('throughput/tokens_per_s', 0):,.0f} trained tokens/s", "")
    for note in view.notes[-3:]:
        facts.add_row(Text("alert", style="yellow"), note, "")
    title = f"{view.job_id}: {view.status}" + (f" ({view.reason})" if view.reason else "")
    return Panel(Group(ProgressBar(total=view.num_steps, completed=done, width=64), facts), title=title, width=96)


def _time_left(eta_s: float | None) -> str:
    if eta_s is None:
        return ""
    minutes, seconds = divmod(round(eta_s), 60)
    return f"{minutes} min {seconds:02d} s left" if minutes else f"{seconds} s left"
