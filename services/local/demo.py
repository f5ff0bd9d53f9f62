"""``make demo``: the whole system on this machine, from nothing to a model that has learned to use a tool.

Set-up, stack, one job over HTTP, live progress, held-out success before and after, proof that the recorded log-probs
are true, a learning curve. Everything that it says was measured in this very run.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gspo_core.cli.watch import JobView, follow, sparkline
from gspo_core.client import Client, Event
from gspo_core.spec import JobSpec
from gspo_core.spec_file import load_job_spec
from services.local.demo_model import NotADemoModel, make_demo_model
from services.local.memory import PeakMemory
from services.local.provenance import Provenance, check_provenance
from services.local.stack import Stack, StackConfig, StackError, check_place, terminate_as_interrupt

JOB_FILE = Path(__file__).with_name("demo_job.yaml")
NUM_PROVENANCE_TOKENS = 200
# The demo is reached over loopback only; keys that the user has set for another stack are not for it.
NO_KEYS = {"GSPO_API_KEYS": ""}
CHECK_S = 1.0


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


def run_demo(
    spec: JobSpec, data_dir: Path, model_dir: Path, *, quiet: bool = False, engine_urls: tuple[str, ...] = ()
) -> DemoResult:
    """Start a stack, submit ``spec``, follow it to its end, stop the stack. Raises StackError when it fails."""
    started = time.monotonic()
    if not quiet:
        print("starting Redis, engine, API, trainer and rollout worker ...", flush=True)
    config = StackConfig(data_dir, model_dir, port=0, environment=NO_KEYS, engine_urls=engine_urls)
    with Stack(config) as stack, Client(stack.api_url) as client:
        if not quiet:
            print(f"stack is up after {time.monotonic() - started:.0f} s (logs in {stack.log_dir})")
            print(f"look at it in a browser while it runs: {stack.api_url}/ui", flush=True)
        job = client.create_job(spec)
        view = JobView(job["id"], spec.steps)
        steps: list[Mapping[str, Any]] = []
        submitted = time.monotonic()
        events = _collect(while_alive(stack, client.events(job["id"], after="0")), steps)
        if quiet:
            for event in events:
                view.take(event.type, event.data)
        else:
            follow(view, lambda _: events)
        training_s = time.monotonic() - submitted
        if view.status != "succeeded":
            raise StackError(f"the job {view.status}: {view.reason or 'see the logs'} ({stack.log_dir})")
    if not quiet:
        print(f"checking {NUM_PROVENANCE_TOKENS} trained tokens against the weights that sampled them ...", flush=True)
    provenance = check_provenance(data_dir / "jobs" / job["id"], NUM_PROVENANCE_TOKENS, seed=spec.seed)
    return summarise(spec, view, steps, provenance, training_s)


def while_alive(stack: Stack, events: Iterable[Event]) -> Iterator[Event]:
    """``events``; raises StackError when none comes because a process has died, which would last for ever."""
    arrived: queue.SimpleQueue[Event | Exception | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for event in events:
                arrived.put(event)
            arrived.put(None)
        except Exception as error:
            arrived.put(error)

    threading.Thread(target=read, name="events", daemon=True).start()
    while True:
        try:
            event = arrived.get(timeout=CHECK_S)
        except queue.Empty:
            stack.check()
            continue
        if event is None:
            return
        if isinstance(event, Exception):
            stack.check()  # the likely cause
            raise event
        yield event


def _collect(events: Iterable[Event], steps: list[Mapping[str, Any]]) -> Iterator[Event]:
    for event in events:
        if event.type == "step":
            steps.append(event.data)
        yield event


def summarise(
    spec: JobSpec, view: JobView, steps: Sequence[Mapping[str, Any]], provenance: Provenance, training_s: float
) -> DemoResult:
    episodes = [float(step["episodes/count"]) for step in steps]
    mixed = sum(
        float(step["episodes/mixed_versions_share"]) * count for step, count in zip(steps, episodes, strict=True)
    )
    return DemoResult(
        job=view.job_id,
        status=view.status,
        seed=spec.seed,
        steps=len(steps),
        rewards=view.rewards,
        evaluations=view.evaluations,
        mixed_versions_share=mixed / sum(episodes),
        staleness_mean=sum(float(step["staleness/mean"]) for step in steps) / len(steps),
        provenance=provenance,
        training_s=training_s,
    )


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
    axes.set(xlabel="step", ylabel="success", ylim=(0, 1.1), title="A tiny model learns to use a calculator")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def summary(result: DemoResult, picture: Path, peak_bytes: int | None) -> str:
    minutes, seconds = divmod(round(result.training_s), 60)
    memory = "not told by this system" if peak_bytes is None else f"{peak_bytes / 2**30:.2f} GiB at the most"
    return (
        f"\nheld-out success   {result.before:.0%} before, {result.after:.0%} after {result.steps} steps "
        f"({100 * result.gain:+.0f} points) in {minutes} min {seconds:02d} s\n"
        f"training reward    {sparkline(result.rewards, 60, 0.0, 1.0)}  {result.rewards[-1]:.2f}\n"
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


def demo_spec(model_dir: Path, seed: int, steps: int | None = None) -> JobSpec:
    spec = load_job_spec(JOB_FILE)
    changes = {"model": str(model_dir), "seed": seed} | ({"steps": steps} if steps else {})
    return JobSpec.model_validate(spec.model_dump(mode="json", exclude_unset=True) | changes)


def model_name(seed: int) -> str:
    """Each start has a directory of its own; the first one is also what `gspo up` serves."""
    return f"calculator-tiny-{seed}" if seed else "calculator-tiny"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make demo", description="Train a tiny model to use a calculator.")
    parser.add_argument("--seed", type=int, default=0, help="of the model's random start and of the job")
    parser.add_argument("--steps", type=int, help="fewer or more steps than the job file says")
    parser.add_argument("--data-dir", type=Path, default=Path(".gspo"))
    parser.add_argument(
        "--expect-gain", type=float, metavar="POINTS", help="fail when held-out success has not risen by so much"
    )
    arguments = parser.parse_args(argv)
    root = arguments.data_dir.resolve()
    run_dir = root / "demo"
    try:
        with terminate_as_interrupt(), PeakMemory() as peak:
            model_dir = root / "models" / model_name(arguments.seed)
            check_place(StackConfig(root, model_dir, port=0))
            make_demo_model(model_dir, arguments.seed)
            shutil.rmtree(run_dir, ignore_errors=True)
            result = run_demo(demo_spec(model_dir, arguments.seed, arguments.steps), run_dir, model_dir)
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running", file=sys.stderr)
        return 130
    except (StackError, NotADemoModel) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    plot(result, run_dir / "learning_curve.png")
    (run_dir / "result.json").write_text(json.dumps(asdict(result) | {"peak_memory_bytes": peak.num_bytes}, indent=2))
    print(summary(result, run_dir / "learning_curve.png", peak.num_bytes))
    found = shortcomings(result, arguments.expect_gain)
    print(*(f"demo: {one}" for one in found), sep="\n", file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
