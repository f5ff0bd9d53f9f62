"""What a recorded run of the tests says: who failed with which error, behind whom, and what was skipped why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class End:
    test: str
    when: str
    outcome: str
    worker: str
    error: str

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


How: TypeAlias = Literal["passed", "failed", "did not run", "did not run to its end"]
LEFT_OPEN = "left open in "
"""How the error begins of a test at whose end something was found that nobody had closed (`apparatus/leaks.py`)."""


@dataclass(frozen=True, slots=True)
class Failure:
    test: str
    error: str
    behind: tuple[str, ...]
    """The files that the same interpreter had run before its own, in order."""
    can_be_repeated: bool
    """By its name: no file that cannot be read, no interpreter that ended."""
    is_of_fixture: bool
    """It failed before it began."""

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]

    @property
    def is_leak(self) -> bool:
        return LEFT_OPEN in self.error

    @property
    def cause(self) -> tuple[str, str]:
        """One for all tests of a file that a fixture of theirs has failed in one way."""
        return (self.file, self.error) if self.is_of_fixture else (self.test, "")


@dataclass(frozen=True, slots=True)
class Ends:
    ends: Sequence[End]
    is_whole: bool = False
    """Whether pytest ran all that it had chosen and came to its end, as it does when tests have passed or failed."""

    @classmethod
    def read(cls, path: Path) -> Ends:
        """Of a run that wrote nothing: no ends."""
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        is_whole = any(line.get("exit") in (0, 1) for line in lines)
        return cls([End(**line) for line in lines if "test" in line], is_whole)

    @property
    def num_passed(self) -> int:
        """Tests of which nothing failed."""
        return len({one.test for one in self.ends if one.outcome == "passed"} - {one.test for one in self._failed()})

    def failures(self) -> list[Failure]:
        """Each test once, with its first error."""
        found: dict[str, Failure] = {}
        for place, end in enumerate(self.ends):
            if end.outcome == "failed" and end.test not in found:
                can_be_repeated = end.when in ("setup", "call", "teardown") and "::" in end.test
                behind, of_fixture = self._behind(place), end.when == "setup"
                found[end.test] = Failure(end.test, end.error, behind, can_be_repeated, of_fixture)
        return list(found.values())

    def skips(self) -> Counter[str]:
        return Counter(end.error for end in self.ends if end.outcome == "skipped")

    def how(self, test: str) -> How:
        if not self.is_whole:
            return "did not run to its end"
        outcomes = {end.outcome for end in self.ends if end.test == test}
        return "failed" if "failed" in outcomes else "passed" if "passed" in outcomes else "did not run"

    def _failed(self) -> list[End]:
        return [end for end in self.ends if end.outcome == "failed"]

    def _behind(self, place: int) -> tuple[str, ...]:
        end = self.ends[place]
        same = (one.file for one in self.ends[:place] if one.worker == end.worker)
        return tuple(file for file in dict.fromkeys(same) if file != end.file)
