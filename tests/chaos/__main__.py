"""``python -m tests.chaos [--seed N] [--faults N] [--minutes M]``: a chaos run, judged by the oracle.

The oracle is a process of its own: ``python -m tests.chaos.oracle WORKDIR`` says the same again later.
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

from tests.chaos.report import table
from tests.chaos.runner import SETTLE_S, Options, Run, RunFailed
from tests.chaos.stack import Size

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the schedule; left out: any")
    parser.add_argument("--faults", type=int, default=320)
    parser.add_argument("--minutes", type=float, default=3.0, help="in which the faults strike")
    parser.add_argument("--steps", type=int, default=24, help="of each job")
    parser.add_argument("--jobs", type=int, default=2, help="at the same time")
    parser.add_argument("--kinds", default="", help="only these kinds of faults, separated by commas")
    parser.add_argument("--work", type=Path, default=None, help="directory of the run; left out: a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the directory also when all is well")
    parser.add_argument("--oracle-root", type=Path, default=ROOT, help="the tree whose oracle judges")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="for the jobs to end after the last fault")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    kinds = tuple(part.strip() for part in arguments.kinds.split(",") if part.strip())
    size = Size(jobs=arguments.jobs, trainers=arguments.jobs + 1, engines=arguments.jobs)
    options = Options(seed, arguments.faults, arguments.minutes, arguments.steps, size, kinds, arguments.settle_s)
    work = arguments.work or Path(tempfile.mkdtemp(prefix="gspo-chaos-")) / "run"
    again = f"make chaos CHAOS_FLAGS='--seed {seed} --faults {options.faults} --minutes {options.minutes:g}'"
    print(f"chaos: seed {seed}, {options.faults} faults in {options.minutes:g} minutes, in {work}", flush=True)
    # More threads give other numbers, and what is learned is computed again to the last bit.
    os.environ["OMP_NUM_THREADS"] = "1"
    run = Run(work, options)
    is_well = False
    try:
        asyncio.run(run.play())
        print(summary(work), flush=True)
        is_well = judge(work, arguments.oracle_root)
    except RunFailed as error:
        print(f"chaos: FAILED: {error}", flush=True)
    finally:
        if is_well and not arguments.keep:
            run.disk.close()
            shutil.rmtree(work.parent if arguments.work is None else work)
        else:
            run.keep()
            print(f"chaos: kept in {work}; once more: {again}", flush=True)
    return 0 if is_well else 1


def judge(work: Path, root: Path) -> bool:
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-m", "tests.chaos.oracle", str(work)], cwd=root, env=env).returncode == 0


def summary(work: Path) -> str:
    end, run = json.loads((work / "end.json").read_text()), json.loads((work / "run.json").read_text())
    left_out = f"; not possible here: {', '.join(run['without'])}" if run["without"] else ""
    missed = sum(end["misses"].values())
    return (
        f"{table(end['recoveries'])}\n{end['num_steps']} steps in {end['seconds']:.0f} s, {missed} faults found "
        f"nobody{left_out}"
    )


if __name__ == "__main__":
    sys.exit(main())
