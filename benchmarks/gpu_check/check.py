"""What a check is, and what becomes of a list of them.

One rule: a check that did not run is named so, and a run in which none did is neither a success nor a failure.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PASSED, FAILED, SKIPPED = 0, 1, 77
"""Exit statuses; 77 is what test programs say by convention when they could not run."""
Became = Literal["passed", "failed", "did not run"]


class Differs(Exception):
    """A check found something else than it should."""


@dataclass(frozen=True)
class Place:
    """Where checks run."""

    num_gpus: int
    folder: Path
    """For models and what ranks write."""
    device: str = "cuda"
    trl: Path | None = None
    """An interpreter that has TRL."""


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Place], str]
    """Says what it measured. Raises `Differs`."""
    num_gpus: int = 1
    """It needs at least so many."""


@dataclass(frozen=True)
class Result:
    check: Check
    became: Became
    said: str

    def __str__(self) -> str:
        return f"{self.became:<12} {self.check.name}: {self.said}"


def run_checks(checks: Sequence[Check], place: Place) -> Iterator[Result]:
    """Every check, whatever becomes of those before it."""
    for check in checks:
        if check.num_gpus > place.num_gpus:
            yield Result(check, "did not run", f"it needs {check.num_gpus} GPUs, and there are {place.num_gpus}")
            continue
        try:
            yield Result(check, "passed", check.run(place))
        except Exception as error:  # a GPU fails in many ways, and the checks behind it are wanted all the same
            known = isinstance(error, Differs)
            yield Result(check, "failed", str(error) if known else traceback.format_exc().strip())


def status_of(results: Sequence[Result]) -> int:
    became = {result.became for result in results}
    if "failed" in became:
        return FAILED
    return PASSED if "passed" in became else SKIPPED


def require_close(found: float, bound: float, what: str) -> str:
    """Raises `Differs` where `found` is above `bound`, or no number."""
    if not found <= bound:
        raise Differs(f"{what}: {found:.3g} apart, and at most {bound:.3g} is allowed")
    return f"{what}: {found:.2g} apart (at most {bound:.2g})"
