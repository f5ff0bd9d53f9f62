"""Runs a failed test twice more, in interpreters of its own: alone, and behind the files that it failed behind.

| alone | behind its files | verdict |
|---|---|---|
| fails | | red |
| passes | fails | red: something that ran before it is to blame |
| passes | passes | a flake: told, and the gate stays open for it |

Never excused: more than two tests of a run, what cannot be repeated by its name, what asks no clock and starts no
process, what judges formats and releases, and a flake that has stood on the list for more than a week.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TypeAlias

from tests.gate.ends import Ends, Failure
from tests.gate.flakes import DAYS, is_overdue
from tests.gate.phases import Phase, run

MAX_EXCUSED = 2
NEVER_EXCUSED = ("tests/core/", "tests/environments/", "tests/oracles/", "tests/releases/", "tests/repo/")
LIMIT_S = 1500.0
# A file is named as a likely culprit only while there are few of them.
NUM_NAMED = 3

Repeat: TypeAlias = Callable[[Sequence[str]], Ends]
"""Runs files, or a test alone, in an interpreter of its own; what each test leaves open is looked for at its end."""


@dataclass(frozen=True, slots=True)
class Verdict:
    failure: Failure
    is_red: bool
    why: str

    def lines(self) -> list[str]:
        word = "RED" if self.is_red else "FLAKE"
        named = shlex.quote(self.failure.test)
        told = [f"{word:7} {self.failure.test}", f"        {self.failure.error}", f"        {self.why}"]
        if self.failure.can_be_repeated:
            told.append(f"        again: .venv/bin/pytest {named}")
        if not self.is_red:
            told.append(f"        note it: python -m tests.gate.flakes {named} {shlex.quote(self.failure.error[:80])}")
        return told


def judge(failures: Sequence[Failure], repeat: Repeat, flakes: Mapping[str, date], today: date) -> list[Verdict]:
    if len(failures) > MAX_EXCUSED:
        why = f"{len(failures)} tests failed: so many are never excused, and none was repeated"
        return [Verdict(one, True, why) for one in failures]
    return [_judge(one, repeat, flakes, today) for one in failures]


def _judge(failure: Failure, repeat: Repeat, flakes: Mapping[str, date], today: date) -> Verdict:
    if not failure.can_be_repeated:
        return Verdict(failure, True, "it cannot be repeated by its name")
    alone = repeat([failure.test])
    if (how := alone.how(failure.test)) != "passed":
        return Verdict(failure, True, f"alone it {how} again" if how == "failed" else f"alone it {how}")
    behind = repeat([*failure.behind, failure.file])
    if (how := behind.how(failure.test)) != "passed":
        return Verdict(failure, True, f"alone it passed; behind {_named(failure.behind)} it {how}")
    if failure.is_leak and (leaks := [one for one in behind.failures() if one.is_leak and one.file == failure.file]):
        return Verdict(failure, True, f"the test that leaves it open is {leaks[0].test}")
    passed = "it passed alone and behind the files that had run before it"
    if failure.test.startswith(NEVER_EXCUSED):
        return Verdict(failure, True, f"{passed}; what stands in {failure.test.split('/')[1]} is never excused")
    if is_overdue(failure.test, flakes, today):
        since = flakes[failure.test]
        return Verdict(failure, True, f"{passed}, and is a known flake since {since}, for more than {DAYS} days")
    return Verdict(failure, False, passed)


def _named(behind: Sequence[str]) -> str:
    if not behind:
        return "the tests of its own file"
    last = ", ".join(behind[-NUM_NAMED:])
    return f"{len(behind)} files (the last are {last})" if len(behind) > NUM_NAMED else last


def in_fresh_interpreters(logs: Path) -> Repeat:
    numbers = iter(range(1, 100))

    def repeat(of: Sequence[str]) -> Ends:
        record = logs / f"again-{next(numbers)}.jsonl"
        chosen = " ".join(shlex.quote(one) for one in of).replace("$", "$$")
        command = ["make", "--no-print-directory", "suite", f"TEST_FLAGS={chosen}", f"RECORD={record}"]
        run(Phase(record.stem, command, LIMIT_S), logs, {"GSPO_TEST_LEAKS": "each"})
        return Ends.read(record)

    return repeat
