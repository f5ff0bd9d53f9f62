"""``python -m tests.play [--seed N ...] [--episodes N] [PACKAGE ...]``: unmodified packages play random episodes.

Each is in an environment of its own below ``.make/agents`` (``make test-agents`` makes them). With ``--record`` what
was found is kept as it is found, and a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import services.episodes.outbox
from services.process.telemetry import configure_logging
from tests.play.packages import PACKAGES
from tests.play.report import Record, Run, commit_now
from tests.play.run import play

MOST_CHARS = 800


def main() -> int:
    arguments = _arguments()
    configure_logging("play", level="error", log_format="text")
    # Calls of an outbox keep a distance, which would be most of the time of many short episodes.
    services.episodes.outbox.DISTANCE_S = 0.0
    seeds = arguments.seed or [random.SystemRandom().randrange(2**32) for _ in range(arguments.draw)]
    print("seeds", *seeds, flush=True)
    commit, record = commit_now(), Record() if arguments.record else None
    runs = [
        Run(PACKAGES[name], seed, arguments.episodes, arguments.long, commit)
        for seed in seeds
        for name in arguments.packages or PACKAGES
    ]
    numbers = range(arguments.episodes) if arguments.only is None else [arguments.only]
    return max(_play(run, numbers, arguments.at_once, record) for run in runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.play", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", help="drawn and printed if left out")
    parser.add_argument("--draw", type=int, default=1, help="so many seeds (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=200, help="of each package (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="episodes side by side (default: %(default)s)")
    parser.add_argument("--long", action="store_true", help="many turns, behind prompts of every size")
    parser.add_argument("packages", nargs="*", choices=[*PACKAGES, []], help="left out: all")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--only", type=int, help="the episode of this number alone")
    kept.add_argument("--record", action="store_true", help="what is found is kept in benchmarks/results")
    return parser.parse_args()


def _play(run: Run, numbers: range | list[int], at_once: int, record: Record | None) -> int:
    told = record and record.row_of(run)
    if told:
        print(f"{run.package.name}, seed {run.seed}: played before, {len(told['faults'])} faults", flush=True)
        return int(bool(told["faults"]))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = play(run.package, run.seed, numbers, at_once, Path(folder), is_long=run.is_long)
    seconds = time.monotonic() - began
    print(f"{run.package.name}, seed {run.seed}: {found.line()} in {seconds:.0f} s", flush=True)
    for fault in found.faults:
        print(f"  FAULT {fault[:MOST_CHARS]}", flush=True)
    if record is not None:
        record.add(run, run.row(found, seconds))
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(main())
