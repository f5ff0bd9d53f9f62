"""Tests that failed once and then passed, alone and behind their neighbours: `python -m tests.gate.flakes TEST ERROR`
adds a line to the list. It is written by hand, with this command, after a run that told of one.

A test may stand there for a week. Whoever fails after that is red, however it passes when it is repeated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path

LIST = Path(__file__).parents[1] / "flakes.tsv"
DAYS = 7


def known(text: str) -> Mapping[str, date]:
    """Test -> since when it stands on the list."""
    found: dict[str, date] = {}
    for number, line in enumerate(text.splitlines()[1:], 2):
        since, _, rest = line.partition("\t")
        try:
            found.setdefault(rest.partition("\t")[0], date.fromisoformat(since))
        except ValueError:
            meant = "a line is a date, a test, a load and an error, with tabs between"
            raise ValueError(f"{LIST.name}:{number}: {meant}") from None
    return found


def is_overdue(test: str, flakes: Mapping[str, date], today: date) -> bool:
    return test in flakes and (today - flakes[test]).days > DAYS


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    test, error = sys.argv[1:]
    if "::" not in test:
        print(f"{test} names no test: write it as pytest does, FILE::NAME")
        return 2
    with LIST.open("a") as rows:
        one_line = " ".join(error.split())
        rows.write("\t".join((date.today().isoformat(), test, f"{os.getloadavg()[0]:.1f}", one_line)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
