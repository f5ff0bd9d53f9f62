"""The tests that `tests/quarantine.md` names: not selected by `make test`, run by `make quarantine`.

The page is the one list: a test is marked because it stands there. A name without [parameters] means all of a test's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

PAGE = Path(__file__).with_name("quarantine.md")
DAYS = 14
ROW = re.compile(
    r"^\| (?P<since>\d{4}-\d\d-\d\d) \| `(?P<test>tests/\S+::[^`]+)` \| (?P<reason>\S.*) \|$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Row:
    since: date
    test: str
    reason: str


def rows(page: str) -> list[Row]:
    return [Row(date.fromisoformat(one["since"]), one["test"], one["reason"]) for one in ROW.finditer(page)]


def mark(items: Iterable[pytest.Item], quarantined: Iterable[Row]) -> None:
    names = {row.test for row in quarantined}
    for item in items:
        if item.nodeid in names or item.nodeid.partition("[")[0] in names:
            item.add_marker(pytest.mark.quarantined)


def main() -> int:
    standing = rows(PAGE.read_text())
    for row in standing:
        days = (date.today() - row.since).days
        print(f"{'OVERDUE' if days > DAYS else 'waiting'} {days} days: {row.test}: {row.reason}")
    if not standing:
        print("the quarantine is empty")
        return 0
    return int(pytest.main([row.test for row in standing]))


if __name__ == "__main__":
    sys.exit(main())
