"""Runs a failed test twice more, in interpreters of its own: alone, and behind the files that it failed behind.

| alone | behind its files | verdict |
|---|---|---|
| fails | | red |
| passes | it or another one fails | red: something that ran before it is to blame, or struck another this time |
| passes | all pass | a flake: told, and the gate stays open for it |

Never excused: more than two of a run, what cannot be repeated by its name, what `never_excused` lists, and a flake that
has stood on the list for more than a week.
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
from tests.gate.never_excused import is_never_excused
from tests.gate.phases import Phase, run

MAX_EXCUSED = 2
LIMIT_S = 3300.0
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
    if len({one.cause for one in failures}) > MAX_EXCUSED:
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
    if others := [*alone.failures(), *behind.failures()]:
        what = "the test that leaves something open is" if others[0].is_leak else "it passed, and this failed instead:"
        return Verdict(failure, True, f"{what} {others[0].test}: {others[0].error[:120]}")
    passed = "it passed alone and behind the files that had run before it"
    if is_never_excused(failure.test):
        return Verdict(failure, True, f"{passed}; what it judges is never excused")
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
        record.unlink(missing_ok=True)
        chosen = " ".join(shlex.quote(one) for one in of).replace("$", "$$")
        command = ["make", "--no-print-directory", "suite", f"TEST_FLAGS={chosen}", f"RECORD={record}"]
        run(Phase(record.stem, command, LIMIT_S), logs, {"GSPO_TEST_LEAKS": "each"})
        return Ends.read(record)

    return repeat
