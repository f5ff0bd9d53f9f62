"""``python -m tests.chaos [--seed N] [--faults N] [--minutes M]``: a chaos run, judged by the oracle.

The oracle is a process of its own: ``python -m tests.chaos.oracle WORKDIR`` says the same again later. The status is 0
where all is well, 3 where something only came late (`lateness`), else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.chaos.coverage import told
from tests.chaos.departures import warnings
from tests.chaos.jobs import NUM_KINDS, ON_STALE, PLAYERS, TRANSPORTS
from tests.chaos.lateness import LATE
from tests.chaos.report import table
from tests.chaos.runner import SETTLE_S, Options, Run
from tests.chaos.schedule import WEIGHTS
from tests.chaos.stack import Size
from tests.chaos.streams import told_of
from tests.chaos.users import RunFailed, RunLate

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    arguments = parse()
    # More threads give other numbers, and what is learned is computed again to the last bit.
    os.environ["OMP_NUM_THREADS"] = "1"
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    options = options_of(arguments, seed)
    work = arguments.work or Path(tempfile.mkdtemp(prefix="gspo-chaos-")) / "run"
    again = f"chaos: again with: {command_of(arguments, seed)}"
    print(f"chaos: seed {seed}, {options.faults} faults in {options.minutes:g} minutes, in {work}\n{again}", flush=True)
    run = Run(work, options)
    status = 1
    try:
        asyncio.run(run.play())
        print(summary(work, options.kinds), flush=True)
        status = judge(work, arguments.oracle_root)
        if not nothing_is_missing(work):
            status = status or LATE
    except RunFailed as error:
        status = LATE if isinstance(error, RunLate) else 1
        print("\n".join(f"chaos: {line}" for line in warnings(work)), flush=True)
        print(f"chaos: FAILED: {error}", flush=True)
    finally:
        if not status and not arguments.keep:
            run.disk.close()
            shutil.rmtree(work.parent if arguments.work is None else work)
        else:
            run.keep()
            print(f"chaos: kept in {work}", flush=True)
        print(again, flush=True)
    return status


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the schedule and the jobs; left out: drawn")
    parser.add_argument("--faults", type=int, default=320)
    parser.add_argument("--minutes", type=float, default=3.0, help="in which the faults strike")
    parser.add_argument("--steps", type=int, default=24, help="of each job")
    parser.add_argument("--jobs", type=int, default=2, help="at the same time")
    parser.add_argument("--least-jobs", type=int, default=NUM_KINDS, help="so many in all, whatever the time")
    parser.add_argument("--kinds", default="", help="only these kinds of faults, separated by commas")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="of weights to engines, in turn by job")
    parser.add_argument("--tick-ms", type=float, default=1.0, help="for a token of an engine")
    parser.add_argument("--players", choices=PLAYERS, default="both", help="of jobs, where agents are installed")
    parser.add_argument("--on-stale", default=",".join(ON_STALE), help="of jobs, in turn")
    parser.add_argument("--hostile", action="store_true", help="a job beside them whose world attacks")
    parser.add_argument("--patient", action="store_true", help="each fault waits for the recovery from the one before")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="for the next step, after the last fault")
    parser.add_argument("--work", type=Path, default=None, help="directory of the run; left out: a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the directory also when all is well")
    parser.add_argument("--oracle-root", type=Path, default=ROOT, help="the tree whose oracle judges")
    return parser.parse_args(argv)


def options_of(arguments: argparse.Namespace, seed: int) -> Options:
    return Options(
        seed,
        arguments.faults,
        arguments.minutes,
        arguments.steps,
        Size(
            jobs=arguments.jobs,
            trainers=arguments.jobs + 1 + arguments.hostile,
            engines=arguments.jobs + arguments.hostile,
            tick_ms=arguments.tick_ms,
        ),
        tuple(part.strip() for part in arguments.kinds.split(",") if part.strip()),
        arguments.settle_s,
        transports=tuple(arguments.transports.split(",")),
        least_jobs=arguments.least_jobs,
        players=arguments.players,
        on_stale=tuple(arguments.on_stale.split(",")),
        hostile=arguments.hostile,
        is_patient=arguments.patient,
    )


def command_of(arguments: argparse.Namespace, seed: int) -> str:
    """What plays the same schedule and the same jobs."""
    names = (
        "faults",
        "minutes",
        "steps",
        "jobs",
        "least_jobs",
        "kinds",
        "transports",
        "players",
        "on_stale",
        "tick_ms",
    )
    given = {name: getattr(arguments, name) for name in names}
    usual = vars(parse([]))
    flags = [f"--{name.replace('_', '-')} {_shown(value)}" for name, value in given.items() if value != usual[name]]
    flags += [
        flag for flag, is_given in (("--hostile", arguments.hostile), ("--patient", arguments.patient)) if is_given
    ]
    return " ".join(["python -m tests.chaos", f"--seed {seed}", *flags])


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def judge(work: Path, root: Path) -> int:
    """0, LATE where nothing is wrong that more time might not have mended, or 1."""
    env = {**os.environ, "PYTHONPATH": str(root)}
    status = subprocess.run([sys.executable, "-m", "tests.chaos.oracle", str(work)], cwd=root, env=env).returncode
    return status if status in (0, LATE) else 1


def nothing_is_missing(work: Path) -> bool:
    """What the flags of the run promise has run."""
    never_ran = json.loads((work / "end.json").read_text())["coverage"]["never_ran"]
    if never_ran:
        print(f"chaos: FAILED: promised and never ran: {', '.join(never_ran)}", flush=True)
    return not never_ran


def summary(work: Path, kinds: tuple[str, ...]) -> str:
    end, run = json.loads((work / "end.json").read_text()), json.loads((work / "run.json").read_text())
    not_here = f"; not possible here: {', '.join(run['without'])}" if run["without"] else ""
    missed = sum(end["misses"].values())
    left_out = sorted(set(WEIGHTS) - set(kinds)) if kinds else []
    coverage = end["coverage"]
    of_streams = "".join(f"\n{line}" for line in told_of(work))
    return (
        f"{table(end['recoveries'])}{of_streams}\n{end['num_steps']} steps in {end['seconds']:.0f} s, {missed} faults "
        f"found nobody\n{told(coverage['ran'], coverage['never_ran'], left_out)}{not_here}"
    )


if __name__ == "__main__":
    sys.exit(main())
