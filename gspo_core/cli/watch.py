"""``gspo watch``: a job drawn live from its event stream; what it draws is a pure function of the events so far."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import plain
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from gspo_core.api_answers import Event

BLOCKS = "▁▂▃▄▅▆▇█"
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
# Steps that the moving rate looks back over.
RATE_WINDOW = 10
MAX_WIDTH = 108
# What a step's seconds went to, each with the character and the colour that it is drawn with.
PHASES = (("train", "█", "green"), ("publish", "▓", "magenta"), ("wait", "░", "yellow"))
COLOURS = {"succeeded": "green", "running": "green", "failed": "red", "cancelled": "red", "paused": "yellow"}


@dataclass
class WatchedJob:
    """The state of a job as it is drawn, kept up to date by ``take``."""

    job_id: str
    num_steps: int
    name: str = ""
    status: str = "queued"
    reason: str = ""
    connection: str = ""
    """The problem with it; empty while it stands."""
    rewards: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    last_evaluation: Mapping[str, float] = field(default_factory=dict)
    last_step: Mapping[str, float] = field(default_factory=dict)
    step_times_s: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_alarming: bool = False
    """The last note is of something that is wrong, not of its end."""

    @property
    def is_over(self) -> bool:
        return self.status in TERMINAL

    def take(self, kind: str, data: Mapping[str, JSON]) -> None:
        if kind == "job.status":
            self.status = str(data.get("status", self.status))
            reason = data.get("status_reason")
            self.reason = plain(str(reason.get("message", ""))) if isinstance(reason, dict) else ""
        elif kind == "step":
            self._take_step(numbers_of(data))
        elif kind == "evaluation":
            # Without a reward/mean when no episode got a reward.
            self.last_evaluation = held_out = numbers_of(data)
            self.evaluations.append((int(held_out["step"]), held_out.get("reward/mean", math.nan)))
        elif kind == "alert":
            self.notes.append(_note(data))
            self.is_alarming = True
        elif kind == "env.health":
            self._take_health(data)

    def _take_health(self, data: Mapping[str, JSON]) -> None:
        self.is_alarming = not data.get("healthy", True)
        worker = data.get("worker", "a worker")
        what = f"episodes of {data['environment']}" if "environment" in data else "episodes"
        is_ill = plain(f"{worker} cannot play {what}: ")
        if self.is_alarming:
            self._note_once(f"{is_ill}{data.get('error', 'unknown')}")
        else:
            self.notes = [note for note in self.notes if not note.startswith(is_ill)]
            self._note_once(f"{worker} plays {what} again")

    def _take_step(self, data: Mapping[str, float]) -> None:
        # After a crash steps are taken again: what came after the point where the job went on is void.
        if int(data["step"]) <= int(self.last_step.get("step", 0)):
            num_undone = int(self.last_step["step"]) - int(data["step"]) + 1
            for series in (self.rewards, self.step_times_s, self.speeds):
                del series[max(0, len(series) - num_undone) :]
        self.last_step = data
        self.rewards.append(float(data.get("reward/mean", 0.0)))
        self.step_times_s.append(float(data.get("time/step_s", 0.0)))
        self.speeds.append(float(data.get("throughput/tokens_per_s", 0.0)))

    def _note_once(self, note: str) -> None:
        """Last, and only once: a worker says it again every few seconds."""
        note = plain(note)
        self.notes = [*(known for known in self.notes if known != note), note]

    @property
    def eta_s(self) -> float | None:
        recent = self.step_times_s[-RATE_WINDOW:]
        if not recent or self.is_over:
            return None
        return sum(recent) / len(recent) * (self.num_steps - int(self.last_step.get("step", 0)))


def numbers_of(data: Mapping[str, JSON]) -> dict[str, float]:
    """The metrics in an event of a step."""
    return {name: value for name, value in data.items() if isinstance(value, int | float)}


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
        view = WatchedJob(job_id, job["steps"], name=plain(job["name"] or ""))
        if as_json:
            for event in client.events(job_id, after="0"):
                print(json.dumps({"id": event.id, "type": event.type, "data": event.data}), flush=True)
                view.take(event.type, event.data)
        else:
            view.status = job["status"]
            try:
                follow(view, lambda on_wait: client.events(job_id, after="0", on_wait=on_wait))
            except KeyboardInterrupt:
                if not view.is_over:
                    hint = f"{job_id} keeps running; watch it again: gspo watch {job_id}; end it: gspo cancel {job_id}"
                    print(f"\n{hint}", file=sys.stderr)
                raise
    return 0 if view.status == "succeeded" else 1


def follow(view: WatchedJob, open_events: Callable[[Callable[[int], None]], Iterable[Event]]) -> None:
    """Draw until the events end. Without a terminal: one line per step instead of a display.

    ``open_events`` is given whom to tell when the connection is lost and tried again.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        for event in open_events(lambda _: None):
            view.take(event.type, event.data)
            line = describe(view, event.type)
            if line:
                print(line, flush=True)
        return
    with Live(draw(view, console.width), console=console, refresh_per_second=4) as live:

        def lost(failures: int) -> None:
            view.connection = f"connection lost, reconnecting ({failures + 1})"
            live.update(draw(view, console.width))

        for event in open_events(lost):
            view.connection = ""
            view.take(event.type, event.data)
            live.update(draw(view, console.width))


def describe(view: WatchedJob, kind: str) -> str:
    if kind == "job.status":
        return f"{view.job_id}: {view.status}" + (f" ({view.reason})" if view.reason else "")
    if kind == "evaluation":
        at, reward = view.evaluations[-1]
        found = view.last_evaluation
        bounds = f" ({found['reward/low']:.3f} to {found['reward/high']:.3f})" if "reward/low" in found else ""
        return f"held-out reward {reward:.3f}{bounds} after step {at}"
    if kind in ("alert", "env.health") and view.notes:
        return f"alert: {view.notes[-1]}" if view.is_alarming else view.notes[-1]
    if kind != "step":
        return ""
    step = view.last_step
    return (
        f"step {step['step']:>4}/{view.num_steps}  reward {step.get('reward/mean', 0):.3f}  "
        f"staleness {step.get('staleness/mean', 0):.2f}  clip {step.get('gspo/clip_frac', 0):.2f}  "
        f"{step.get('throughput/tokens_per_s', 0):,.0f} tok/s"
    )


def draw(view: WatchedJob, width: int = MAX_WIDTH) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    inner = max(30, min(width, MAX_WIDTH) - 4)
    done = int(view.last_step.get("step", 0))
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right")
    head.add_row(Text(f"step {done} of {view.num_steps}", style="bold"), _time_left(view.eta_s))
    colour = COLOURS.get(view.status, "cyan")
    body: list[RenderableType] = [head, ProgressBar(total=view.num_steps, completed=done, width=inner), Text("")]
    body.append(_facts(view, max(8, inner - 52)))
    if view.reason and view.status != "succeeded":
        body.append(Text(f"\n{view.reason}", style="red" if view.status == "failed" else "dim"))
    body += [Text(f"! {note}", style="yellow") for note in view.notes[-3:]]
    if view.connection:
        body.append(Text(view.connection, style="reverse yellow"))
    name = f"{view.name}  " if view.name else ""
    title = Text.assemble((f"{name}{view.job_id}: ", "bold"), (view.status, f"bold {colour}"))
    return Panel(Group(*body), title=title, title_align="left", border_style=colour, width=inner + 4)


def _facts(view: WatchedJob, curve: int) -> RenderableType:
    """One line for each question; a curve, or what stands in its place, and the newest value in words."""
    from rich.table import Table
    from rich.text import Text

    step = view.last_step
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(no_wrap=True, min_width=curve)
    facts.add_column()
    if not step:
        facts.add_row("reward", "", Text("no step yet", style="dim"))
        return facts
    spread = f" ± {step['reward/std']:.3f}" if "reward/std" in step else ""
    facts.add_row(
        "reward", Text(sparkline(view.rewards, curve, 0.0), "green"), f"{step.get('reward/mean', 0):.3f}{spread}"
    )
    if view.evaluations:
        at, reward = view.evaluations[-1]
        held = [value for _, value in view.evaluations if not math.isnan(value)]
        facts.add_row("held out", Text(sparkline(held, curve, 0.0), "cyan"), f"{reward:.2f} @ {at}")
    speed = f"{view.speeds[-1]:,.0f} trained tokens/s"
    facts.add_row("speed", Text(sparkline(view.speeds, curve, 0.0), "blue"), speed)
    facts.add_row("time", _shares(step, curve), _shares_in_words(step))
    ages = f"mean {step.get('staleness/mean', 0):.2f}, oldest token {step.get('staleness/max', 0):.0f} steps"
    facts.add_row("staleness", "", ages)
    facts.add_row("clipped", "", _clipped(step))
    return facts


def _clipped(step: Mapping[str, float]) -> str:
    text = f"{100 * float(step.get('gspo/clip_frac', 0)):.0f} % of tokens"
    signs = [step.get(f"gspo/clip_frac_{sign}") for sign in ("positive", "negative")]
    if None in signs:
        return text
    return text + " (good {:.0f} %, bad {:.0f} %)".format(*(100 * float(one or 0) for one in signs))


def _phases(step: Mapping[str, float]) -> dict[str, float]:
    seconds = {name: float(step.get(f"time/{name}_s", 0.0)) for name, _, _ in PHASES}
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total else {}


def _shares(step: Mapping[str, float], width: int) -> Text:
    from rich.text import Text

    shares, bar = _phases(step), Text()
    for name, block, colour in PHASES:
        bar.append(block * round(shares.get(name, 0.0) * width), colour)
    return bar


def _shares_in_words(step: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in _phases(step).items())


def _note(alert: Mapping[str, JSON]) -> str:
    at = f"step {alert['step']}: " if "step" in alert else ""
    return plain(at + str(alert.get("message", alert)))


def _time_left(eta_s: float | None) -> str:
    if eta_s is None:
        return ""
    minutes, seconds = divmod(round(eta_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min left"
    return f"{minutes} min {seconds:02d} s left" if minutes else f"{seconds} s left"
