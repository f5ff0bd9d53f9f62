"""``make demo``: the whole system on this machine, from nothing to a model that has learned to use a tool.

Set-up, stack, one job over HTTP, live progress, held-out success before and after, proof that the recorded log-probs
are true, an episode before and after, a learning curve. Everything that it says was measured in this very run.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.demo import demonstrations, search_demonstrations
from examples.demo.course import Course
from examples.demo.memory import PeakMemory
from examples.demo.model import NotADemoModel, make_demo_model
from examples.demo.provenance import TOLERANCE, Provenance, check_provenance
from examples.demo.report import DemoResult, chart, plot, shortcomings, summary
from examples.demo.side_by_side import play_both, show
from gspo_core.api_answers import Event
from gspo_core.cli.watch import WatchedJob, follow, numbers_of
from gspo_core.client import Client
from gspo_core.spec import JobSpec
from gspo_core.spec_file import load_job_spec
from services.files.data_dir import DataDir
from services.files.weights import WeightStore
from services.launch.log_view import LogView
from services.launch.stack import Stack, StackConfig, StackError, check_place, terminate_as_interrupt
from services.launch.up import greeting, look_after, typed_gspo


@dataclass(frozen=True)
class Scenario:
    job_file: Path
    taught: Course
    model_name: str


JOB_FILE = Path(__file__).with_name("job.yaml")
SHORT = Scenario(JOB_FILE, demonstrations.COURSE, "calculator-tiny")
LONG = Scenario(Path(__file__).with_name("job_long.yaml"), search_demonstrations.COURSE, "search-tiny")
NUM_PROVENANCE_TOKENS = 200
# The demo is reached over loopback only; keys that the user has set for another stack are not for it.
NO_KEYS = {"GSPO_API_KEYS": ""}
CHECK_S = 1.0


@dataclass(frozen=True)
class Followed:
    """A job that has succeeded, as its events told it."""

    view: WatchedJob
    steps: list[Mapping[str, float]]
    training_s: float


def run_demo(
    spec: JobSpec, data_dir: Path, model_dir: Path, *, quiet: bool = False, engine_urls: tuple[str, ...] = ()
) -> DemoResult:
    """Start a stack, submit ``spec``, follow it to its end, stop the stack. Raises StackError when it fails."""
    with started(data_dir, model_dir, quiet=quiet, engine_urls=engine_urls) as stack:
        followed = follow_job(stack, spec, quiet=quiet)
    return judge(spec, data_dir, followed, quiet=quiet)


@contextmanager
def started(
    data_dir: Path, model_dir: Path, *, quiet: bool = False, engine_urls: tuple[str, ...] = ()
) -> Iterator[Stack]:
    began = time.monotonic()
    if not quiet:
        print("starting Redis, engine, API, trainer and rollout worker ...", flush=True)
    with Stack(StackConfig(data_dir, model_dir, port=0, environment=NO_KEYS, engine_urls=engine_urls)) as stack:
        if not quiet:
            print(f"stack is up after {time.monotonic() - began:.0f} s (logs in {stack.log_dir})")
            print(f"look at it in a browser while it runs: {stack.api_url}/ui", flush=True)
        yield stack


def follow_job(stack: Stack, spec: JobSpec, *, quiet: bool = False) -> Followed:
    """Submit ``spec`` and draw what happens until it has succeeded."""
    with Client(stack.api_url) as client:
        job = client.create_job(spec)
        view = WatchedJob(job["id"], spec.steps)
        steps: list[Mapping[str, float]] = []
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
    return Followed(view, steps, training_s)


def judge(
    spec: JobSpec, data_dir: Path, followed: Followed, *, quiet: bool = False, tolerance: float = TOLERANCE
) -> DemoResult:
    """What the run showed, and whether what it recorded is true."""
    if not quiet:
        print(f"checking {NUM_PROVENANCE_TOKENS} trained tokens against the weights that sampled them ...", flush=True)
    provenance = check_provenance(
        DataDir(data_dir).jobs.job(followed.view.job_id), NUM_PROVENANCE_TOKENS, seed=spec.seed, tolerance=tolerance
    )
    return summarise(spec, followed.view, followed.steps, provenance, followed.training_s)


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


def _collect(events: Iterable[Event], steps: list[Mapping[str, float]]) -> Iterator[Event]:
    for event in events:
        if event.type == "step":
            steps.append(numbers_of(event.data))
        yield event


def summarise(
    spec: JobSpec, view: WatchedJob, steps: Sequence[Mapping[str, float]], provenance: Provenance, training_s: float
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


def demo_spec(model_dir: Path, seed: int, steps: int | None = None, scenario: Scenario = SHORT) -> JobSpec:
    spec = load_job_spec(scenario.job_file)
    changes = {"model": str(model_dir), "seed": seed} | ({"steps": steps} if steps else {})
    return JobSpec.model_validate(spec.model_dump(mode="json", exclude_unset=True) | changes)


def model_name(seed: int, scenario: Scenario = SHORT) -> str:
    """Each start has a directory of its own; the first one of the short demo is also what `gspo up` serves."""
    return f"{scenario.model_name}-{seed}" if seed else scenario.model_name


def demonstrate(spec: JobSpec, run_dir: Path, *, expected_points: float | None, keep: bool) -> int:
    """Everything between the making of the model and the prompt of the shell; the exit status."""
    model_dir, logs = Path(spec.model), LogView(DataDir(run_dir).logs)
    with PeakMemory() as peak, started(run_dir, model_dir) as stack:
        followed = follow_job(stack, spec)
        if not keep:
            stack.close()
        result = judge(spec, run_dir, followed)
        write_report(result, spec, run_dir, peak.num_bytes)
        found = shortcomings(result, expected_points)
        for one in found:
            print(f"demo: {one}", file=sys.stderr)
        print(f"look at this run again  {typed_gspo()} up --data-dir {run_dir} --model {model_dir}\n", flush=True)
        if keep:
            stay(stack, model_dir, logs)
    if keep:  # said when it is so
        print("stopped; nothing is left running", flush=True)
    return 1 if found else 0


def write_report(result: DemoResult, spec: JobSpec, run_dir: Path, peak_bytes: int | None) -> None:
    """On the terminal, as a picture, and as numbers for whoever measures."""
    from rich.console import Console

    picture = run_dir / "learning_curve.png"
    plot(result, picture)
    (run_dir / "result.json").write_text(json.dumps(asdict(result) | {"peak_memory_bytes": peak_bytes}, indent=2))
    weights = WeightStore(DataDir(run_dir).jobs.job(result.job))
    versions = weights.versions()
    pair = play_both(spec, weights.path(versions[0]), weights.path(versions[-1]))
    print()
    show(*pair, ("before training", f"after {result.steps} steps"), Console())
    print(f"\n{chart(result)}\n\n{summary(result, picture, peak_bytes)}", flush=True)


def stay(stack: Stack, model_dir: Path, logs: LogView) -> None:
    """Until Ctrl-C."""
    print(greeting(stack, model_dir), flush=True)
    for _ in logs.news():  # of the run that is over
        pass
    with suppress(KeyboardInterrupt):
        look_after(stack, logs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make demo", description="Train a tiny model to use a calculator.")
    parser.add_argument("--seed", type=int, default=0, help="of the model's random start and of the job")
    parser.add_argument("--steps", type=int, help="fewer or more steps than the job file says")
    parser.add_argument("--data-dir", type=Path, default=Path(".gspo"))
    parser.add_argument(
        "--expect-gain", type=float, metavar="POINTS", help="fail when held-out success has not risen by so much"
    )
    parser.add_argument("--keep", action="store_true", help="leave the stack up afterwards, until Ctrl-C")
    parser.add_argument("--long", action="store_true", help="several tool calls an episode instead of one")
    arguments = parser.parse_args(argv)
    scenario = LONG if arguments.long else SHORT
    root = arguments.data_dir.resolve()
    run_dir = DataDir(root).demo
    try:
        with terminate_as_interrupt():
            model_dir = DataDir(root).model(model_name(arguments.seed, scenario))
            check_place(StackConfig(root, model_dir, port=0))
            make_demo_model(model_dir, arguments.seed, taught=scenario.taught)
            shutil.rmtree(run_dir, ignore_errors=True)
            spec = demo_spec(model_dir, arguments.seed, arguments.steps, scenario)
            return demonstrate(spec, run_dir, expected_points=arguments.expect_gain, keep=arguments.keep)
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running", file=sys.stderr)
        return 130
    except (StackError, NotADemoModel) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
