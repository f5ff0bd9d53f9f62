"""``python -m tests.play.requirements [--seed N] [--record] [NAME ...]``: what is required of the gateway, by figures.

Each requirement is played on the whole stack. With ``--record`` what was found goes to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from services.process.telemetry import configure_logging
from tests.ladder.commit import commit_of
from tests.play.requirements.branches import branches
from tests.play.requirements.doors import doors
from tests.play.requirements.fields import fields
from tests.play.requirements.figures import KEPT, PAGE, ROOT, Figure, kept
from tests.play.requirements.pay import pay
from tests.play.requirements.place import Place, set_up
from tests.play.requirements.privacy import privacy
from tests.play.requirements.wire import wire

PLAYS: Mapping[str, Callable[[Place], Figure]] = {
    "pay": pay,
    "fields": fields,
    "branches": branches,
    "doors": doors,
    "wire": wire,
    "privacy": privacy,
}
"""The last one searches what all others leave."""
MOST_TRACE_CHARS = 4000


def main() -> int:
    given = _arguments()
    configure_logging("play", level="error", log_format="console")
    print("seed", given.seed, flush=True)
    commit, load, began = commit_of(ROOT, (KEPT, PAGE)), os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = given.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        with set_up(folder, given.seed) as place:
            figures = [_played(name, place) for name in PLAYS if name in given.names or not given.names]
    run = {
        "seed": given.seed,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 0,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "seconds": round(time.monotonic() - began),
        "figures": [one.as_json() for one in sorted(figures, key=lambda one: one.number)],
    }
    if given.record:
        kept(run)
    return int(any(one.faults for one in figures))


def _played(name: str, place: Place) -> Figure:
    """One that comes to no end is a fault of its own, and the others are played all the same."""
    began = time.monotonic()
    try:
        figure = PLAYS[name](place)
    except Exception as error:  # whatever it is, it is told in the table
        traceback.print_exc()
        number = {"pay": 2, "fields": 3, "branches": 4, "doors": 8, "wire": 9, "privacy": 10}[name]
        figure = Figure(number, name, "it came to no end")
        figure.expect(False, f"{type(error).__name__}: {error}"[:MOST_TRACE_CHARS])
    figure.seconds = time.monotonic() - began
    print(f"{figure.number} {figure.name}, {figure.seconds:.0f} s: {figure.held}", flush=True)
    print(f"  {dict(figure.many)}", flush=True)
    for fault, times in figure.faults.items():
        print(f"  FAULT {times} times: {fault}", flush=True)
    return figure


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.play.requirements", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="drawn if left out")
    parser.add_argument("--keep", type=Path, help="a folder where all that the run leaves is kept")
    parser.add_argument("--record", action="store_true", help="what is found is kept in benchmarks/results")
    parser.add_argument("names", nargs="*", choices=[*PLAYS, []], help="left out: all")
    given = parser.parse_args()
    if given.record and given.names:
        parser.error("the page has all plays: name none with --record")
    return given


if __name__ == "__main__":
    sys.exit(main())
