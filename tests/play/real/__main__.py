"""``python -m tests.play.real [--seed N] [--episodes N] [--minutes N] [NAME ...]``: harnesses play on the real stack.

The model that samples is made by the first run, in ``.make/play-real``, and kept there. With ``--record`` what was
found goes to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.process.telemetry import configure_logging
from tests.ladder.commit import commit_of
from tests.play.harnesses import HARNESSES
from tests.play.packages import PACKAGES
from tests.play.real import teaching
from tests.play.real.agent import NAMES
from tests.play.real.judged import Verdict, computed_again, judged, trajectories
from tests.play.real.page import GENERATION, KEPT, PAGE, ROOT, kept, row_of, told
from tests.play.real.run import GROUP_SIZE, Plan, Played, Run, run
from tests.play.report import version_of

MODEL = ROOT / ".make" / "play-real"
LESSON_SEED = 0
HEARD_EACH = 4
"""Episodes of each harness whose prompts the model is taught on."""
MOST_CHARS = 600


def main() -> int:
    given = _arguments()
    configure_logging("play", level="error", log_format="console")
    names = given.names or list(NAMES)
    model = given.model or made_model()
    if given.only_model:
        return 0
    print("seed", given.seed, flush=True)
    tasks = max(1, given.episodes // GROUP_SIZE)
    each = {name: tasks * (given.packages_times if name in PACKAGES else 1) for name in names}
    commit, load = commit_of(ROOT, (KEPT, PAGE)), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made:
        folder = given.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        plan = Plan(each, given.seed, given.at_once, given.groups_per_step, given.minutes * 60)
        found = run(model, plan, folder)
        if given.keep:
            (folder / "requests.jsonl").write_text("".join(map(_noted, found.played)))
        common = {"commit": commit, "load": [round(load, 1), round(os.getloadavg()[0], 1)]}
        return _tell(given, found, each, common)


def _tell(given: argparse.Namespace, found: Run, each: Mapping[str, int], common: Mapping[str, Any]) -> int:
    logged = trajectories(found.job)
    by_attempt = {(one.key, one.attempt): one for one in found.played}
    verdicts: dict[str, list[Verdict]] = {name: [] for name in each}
    strangers = [str(one.key) for one in logged if (one.key, one.attempt) not in by_attempt]
    for one in logged:
        if (one.key, one.attempt) in by_attempt:
            played = by_attempt[one.key, one.attempt]
            verdicts[played.name].append(judged(one, played.name, played.part, found.samples))
    computed = computed_again(found.job, logged)
    logged_keys = {(one.key, one.attempt) for one in logged}
    rows = []
    for name, of_name in verdicts.items():
        of_it = [one for one in found.played if one.name == name and (one.key, one.attempt) in logged_keys]
        ends = [end for one in of_it for end in one.ends]
        rows.append(row_of(name, _version(name), of_name, ends, [one.ended_s - one.began_s for one in of_it]))
    shared = {
        "seed": given.seed,
        **common,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count() or 0,
        "status": found.status,
        "seconds": round(found.seconds),
        "steps": found.num_steps(),
        "cpu": {name: round(seconds) for name, seconds in found.cpu.items()},
        "samples": found.samples.num,
        "computed": told(computed),
        "strangers": strangers,
        "at_once": given.at_once,
        "groups_per_step": given.groups_per_step,
        "generation": GENERATION,
    }
    _print(shared, rows)
    if given.record:
        kept(shared, rows)
    is_wrong = computed.equal != computed.tokens or bool(strangers) or not logged
    return int(is_wrong or any(row["faults"] or row["false_branches"] for row in rows))


def _print(shared: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    print(dict(shared), flush=True)
    for row in rows:
        print({name: value for name, value in row.items() if name not in ("faults", "false_branches")}, flush=True)
        for fault in (*row["faults"], *row["false_branches"]):
            print(f"  FAULT {fault[:MOST_CHARS]}", flush=True)


def _noted(one: Played) -> str:
    asked = [{"turn": each.turn, "refused": each.refused, "body": each.body} for each in one.part.requests]
    return (
        json.dumps({"harness": one.name, "episode": str(one.key), "report": one.part.report, "requests": asked}) + "\n"
    )


def _version(name: str) -> str:
    if name in HARNESSES:
        return HARNESSES[name].package
    package = PACKAGES[name]
    return ", ".join(f"{one} {version_of(package, one)}" for one in package.shows)


def made_model() -> Path:
    """The one that is kept, or a new one."""
    if not (MODEL / "tokenizer.json").is_file():
        with tempfile.TemporaryDirectory() as folder:
            print("listening to what harnesses ask", flush=True)
            prompts = teaching.heard(LESSON_SEED, Path(folder), NAMES, HEARD_EACH)
        teaching.make(MODEL, prompts, LESSON_SEED)
    return MODEL


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.play.real", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="drawn if left out")
    parser.add_argument("--episodes", type=int, default=200, help="of each harness (default: %(default)s)")
    parser.add_argument("--packages-times", type=int, default=1, help="packages play so many times as many")
    parser.add_argument("--at-once", type=int, default=6, help="episodes side by side (default: %(default)s)")
    parser.add_argument("--groups-per-step", type=int, default=8, help=f"of {GROUP_SIZE} episodes each (%(default)s)")
    parser.add_argument("--minutes", type=float, default=600.0, help="after that the job is cancelled, and judged")
    parser.add_argument("--model", type=Path, help="a model that was made before")
    parser.add_argument("--only-model", action="store_true", help="make it, and play nothing")
    parser.add_argument("--keep", type=Path, help="a folder where all that the run leaves is kept")
    parser.add_argument("--record", action="store_true", help="what is found is kept in benchmarks/results")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="left out: all")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
