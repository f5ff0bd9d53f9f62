"""``python -m tests.ladder [--seed N] [--only TEXT]``: every size that a user's job may have, as real jobs.

``--shape qwen3-0.6b`` plays one job of that exact shape with random weights instead.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

from services.launch.stack import StackError, terminate_as_interrupt
from tests.ladder import report
from tests.ladder.axes import TRAINED
from tests.ladder.commit import commit_of
from tests.ladder.job import Result
from tests.ladder.run import Climb, Place, climb

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ladder", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the rows; left out: that of the unfinished run, or any"
    )
    parser.add_argument("--only", default="", help="only the rows whose name contains this")
    parser.add_argument("--shape", choices=["qwen3-0.6b"], help="one job of this shape instead")
    parser.add_argument("--train", choices=TRAINED, default="lora", help="with --shape: full needs far more memory")
    parser.add_argument("--work", type=Path, default=ROOT / ".make" / "ladder", help="directory of the run")
    parser.add_argument("--any-commit", action="store_true", help="go on with rows that another commit has played")
    parser.add_argument("--fresh", action="store_true", help="play again what was played before")
    parser.add_argument("--keep", action="store_true", help="keep the directories of jobs, for benchmarks.replays")
    arguments = parser.parse_args()
    place = Place(arguments.work.resolve())
    place.path.mkdir(parents=True, exist_ok=True)
    if arguments.fresh:
        place.kept.unlink(missing_ok=True)
    shutil.rmtree(place.data / "redis", ignore_errors=True)  # jobs of an interrupted run are not gone on with
    shutil.rmtree(place.data / "jobs", ignore_errors=True)
    try:
        if arguments.shape:
            from tests.ladder.shape import measure

            return measure(place, commit_of(ROOT), arguments.train, say)
        return _climb(place, arguments.seed, arguments.only, arguments.any_commit, arguments.keep)
    except StackError as error:
        say(f"ladder: FAILED: {error}")
        return 1


def _climb(place: Place, given: int | None, only: str, any_commit: bool, keep: bool) -> int:
    seed_file = place.path / "seed"
    last = int(seed_file.read_text()) if seed_file.is_file() else None
    seed = next(one for one in (given, last, random.SystemRandom().randrange(10**6)) if one is not None)
    seed_file.write_text(str(seed))
    run = Climb(commit_of(ROOT), seed, only, any_commit, keep)
    say(f"ladder: seed {seed}, commit {run.commit}, in {place.path}")
    results: list[Result] = []
    num_rows = 0
    try:
        with terminate_as_interrupt():
            for ladder, results in climb(place, run, say):
                num_rows = len(ladder.rows)
                if not only:
                    report.write(ROOT, ladder, results)
    except KeyboardInterrupt:
        say("ladder: interrupted; the same command goes on with what is left")
    failed = [result for result in results if result.problems]
    say(report.table(results))
    say(f"{len(results)} rows, {len(failed)} failed")
    if len(results) == num_rows:
        seed_file.unlink()
    return 1 if failed or not (only or len(results) == num_rows) else 0


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
