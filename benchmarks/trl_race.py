"""The demo's task and model beside TRL's GRPOTrainer: how long until the policy succeeds on held-out tasks?

    python -m benchmarks.trl_race [--seeds 0 1] [--cores 0] [--steps 50] [--work .gspo/trl-race]

Both sides start from the same warm-started model and train on the calculator with the same settings, derived from the
demo's job (`race.setting`): TRL with its own tool loop in an environment of its own, which is made here, and ours as
the whole stack that `make demo` starts. One after the other, on the same cores, each process with one thread. Both
leave their weights after every step; one judge measures them afterwards, out of the time. Before any time is compared,
TRL's first batch is held against our tokens (`race.tokens`).

What has run is kept under ``--work`` and not run again unless ``--again`` is said. Results: ``results/trl_race.*``;
with ``--by-steps``, for runs that had other programs beside them, ``results/trl_race_steps.*``, without any times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.race import by_steps
from benchmarks.race import report as by_time
from benchmarks.race.clock import CpuTime, SideFailed, run_watched
from benchmarks.race.judge import Judge
from benchmarks.race.setting import CannotRace, RaceSetting, write_orders
from benchmarks.race.tokens import NotTheSameTask, check_tokens
from benchmarks.trl_venv import TRL, NoTRL, make_trl_environment
from examples.demo.demo import demo_spec, model_name
from examples.demo.model import make_demo_model
from gspo_core.job_spec import JobSpec

RESULTS = Path(__file__).parent / "results" / "trl_race"
STEPS = RESULTS.with_name("trl_race_steps")
ROOT = Path(__file__).parents[1]
TARGETS = (0.8, 0.9)
SIDES = ("trl", "ours")
# Dense where the targets are passed; the last step is judged in any case.
JUDGED_AT = (4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 50)


def race_spec(model: Path, seed: int, steps: int | None) -> JobSpec:
    """The demo's job without evaluations: the judge makes them afterwards, for both sides."""
    return demo_spec(model, seed, steps).model_copy(update={"evaluation": None})


class Race:
    """One seed: where its files lie, and its two runs."""

    def __init__(self, arguments: argparse.Namespace, seed: int, trl_python: Path) -> None:
        self.seed = seed
        self.model = arguments.work / "models" / model_name(seed)
        make_demo_model(self.model, seed)
        self.spec = race_spec(self.model, seed, arguments.steps)
        self.setting = RaceSetting.of(self.spec)
        cores = "-".join(map(str, arguments.cores))
        self.place = arguments.work / f"seed-{seed}-steps-{self.setting.steps}-cores-{cores}"
        self.place.mkdir(parents=True, exist_ok=True)
        self._trl_python = trl_python
        self._judged_at = {0, *arguments.judge_at}
        self._tasks, self._episodes_per_task = arguments.tasks, arguments.episodes_per_task

    def run(self, side: str, *, again: bool) -> None:
        out = self.place / side
        done = out / "done.json"
        if done.exists() and not again:
            return
        shutil.rmtree(out, ignore_errors=True)
        orders = self.place / f"{side}.orders.json"
        if side == "trl":
            write_orders(orders, self.setting)
        else:
            out.mkdir()
            orders.write_text(self.spec.model_dump_json(exclude_unset=True))
        python = self._trl_python if side == "trl" else Path(sys.executable)
        module = "benchmarks.race.trl_side" if side == "trl" else "benchmarks.race.our_side"
        print(f"seed {self.seed}: {side} runs ...", flush=True)
        took = run_watched([str(python), "-m", module, *map(str, (self.model, orders, out))], _environment(), out)
        done.write_text(json.dumps(took))

    def measured(self, side: str, judge: Judge) -> dict[str, Any]:
        out = self.place / side
        timeline = [json.loads(line) for line in (out / "timeline.jsonl").read_text().splitlines()]
        start, last = timeline[0], timeline[-1]
        took, cpu = json.loads((out / "done.json").read_text()), CpuTime(out / "cpu.jsonl")
        points = []
        for record in timeline:
            step = record["step"]
            if step not in self._judged_at and record is not last:
                continue
            weights = self.model if not step else Path(record.get("weights") or out / f"step-{step}")
            points.append(
                {
                    "step": step,
                    "wall_s": record["at"] - start["at"] - record["not_counted_s"],
                    "cpu_s": cpu.at(record["at"]) - cpu.at(start["at"]) - record["not_counted_s"],
                    "success": judge.success("start" if not step else f"{side}/{step}", weights),
                }
            )
            print(f"seed {self.seed}: {side} step {step} {points[-1]['success']:.1%}", flush=True)
        return {
            "points": points,
            "to": {f"{target:.0%}": _first(points, target) for target in TARGETS},
            "before_s": start["at"] - took["started"],
            "generate_s": last.get("generate_s"),
            "cpu_by_process": cpu.by_process(start["at"], last["at"]),
            "load": took["load"],
        }

    def result(self) -> dict[str, Any]:
        tokens = check_tokens(self.model, self.place / "trl" / "first_batch.json", self.setting.max_turns)
        judge = Judge(
            self.model,
            self.setting,
            self.place / f"judged-{self._tasks}x{self._episodes_per_task}.json",
            tasks=self._tasks,
            episodes_per_task=self._episodes_per_task,
        )
        sides = {side: self.measured(side, judge) for side in SIDES}
        return {"setting": asdict(self.setting), "tokens": asdict(tokens)} | sides


def _first(points: Sequence[dict[str, Any]], target: float) -> dict[str, Any] | None:
    return next((point for point in points if point["success"] >= target), None)


def _environment() -> dict[str, str]:
    told = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **told}


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"trl": TRL.partition("==")[2]},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "cores": len(arguments.cores),
        "tasks": arguments.tasks,
        "episodes_per_task": arguments.episodes_per_task,
        "judged_at": sorted(arguments.judge_at),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cores", type=int, nargs="+", default=[0], help="that everything is confined to")
    parser.add_argument("--steps", type=int, help="fewer or more than the demo's job says")
    parser.add_argument("--work", type=Path, default=Path(".gspo/trl-race"), help="for TRL's environment and the runs")
    parser.add_argument("--again", action="store_true", help="run sides whose run is there, too")
    parser.add_argument("--run-only", action="store_true", help="judge and report another time")
    parser.add_argument("--judge-at", type=int, nargs="+", default=JUDGED_AT, metavar="STEP")
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks of each judgement")
    parser.add_argument("--episodes-per-task", type=int, default=2)
    parser.add_argument("--by-steps", action="store_true", help="report what a step teaches; no times")
    parser.add_argument("--results", type=Path, help="without a suffix")
    arguments = parser.parse_args()
    report = by_steps if arguments.by_steps else by_time
    results = arguments.results or (STEPS if arguments.by_steps else RESULTS)
    arguments.work = arguments.work.resolve()
    os.sched_setaffinity(0, arguments.cores)
    try:
        trl_python = make_trl_environment(arguments.work / "trl-venv")
        races = [Race(arguments, seed, trl_python) for seed in arguments.seeds]
        for number, race in enumerate(races):  # who comes first takes turns
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                race.run(side, again=arguments.again)
        if arguments.run_only:
            return 0
        found = conditions(arguments) | {"races": {str(race.seed): race.result() for race in races}}
    except (NoTRL, CannotRace, SideFailed, NotTheSameTask) as error:
        print(f"trl_race: {error}", file=sys.stderr)
        return 1
    page, picture = report.page(found), results.with_suffix(".png")
    results.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    results.with_suffix(".md").write_text(page)
    report.plot(found, picture)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
