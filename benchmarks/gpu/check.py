"""What a check is, and what becomes of a list of them.

One rule: a check that did not run is named so, and a run in which none did is neither a success nor a failure.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PASSED, FAILED, SKIPPED = 0, 1, 77
"""Exit statuses; 77 is what test programs say by convention when they could not run."""
PREPARE = "--prepare"
Became = Literal["passed", "failed", "did not run"]


class Differs(Exception):
    """A check found something else than it should."""


class NotHere(Exception):
    """A check cannot run in this place."""


@dataclass(frozen=True)
class Place:
    """Where checks run."""

    num_gpus: int
    folder: Path
    """For what processes write."""
    models: Path
    """For models, which other runs find there."""
    kept: Path
    """For what somebody reads afterwards."""
    device: str = "cuda"
    is_toy: bool = False
    """At sizes that a CPU computes in seconds: this tests the checks, and says nothing about a device."""
    trl: Path | None = None
    """An interpreter that has TRL."""
    service: Any = None
    """What runs around all checks of a part that needs it."""


def place_record(place: Place) -> dict[str, Any]:
    """For another process, which has no service yet."""
    return {
        "num_gpus": place.num_gpus,
        "folder": str(place.folder),
        "models": str(place.models),
        "kept": str(place.kept),
        "device": place.device,
        "is_toy": place.is_toy,
        "trl": place.trl and str(place.trl),
    }


def place_of(record: Mapping[str, Any]) -> Place:
    paths = {key: record[key] and Path(record[key]) for key in ("folder", "models", "kept", "trl")}
    return Place(**{**record, **paths})


@dataclass(frozen=True)
class Found:
    """What a check that passed has to say: a line, and numbers for whoever compares runs."""

    said: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Place], Found | str]
    """Raises `Differs`."""
    num_gpus: int = 1
    """It needs at least so many."""


@dataclass(frozen=True)
class Result:
    name: str
    became: Became
    said: str
    seconds: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.became:<12} {self.name}: {self.said}"


def run_checks(checks: Sequence[Check], place: Place) -> Iterator[Result]:
    """Every check, whatever becomes of those before it, as long as the device answers."""
    broken_by = ""
    for check in checks:
        if broken_by:
            yield Result(check.name, "did not run", f"{broken_by} left the device unusable for this process")
            continue
        if check.num_gpus > place.num_gpus:
            said = f"it needs {check.num_gpus} GPUs, and there are {place.num_gpus}"
            yield Result(check.name, "did not run", said)
            continue
        began = time.monotonic()
        try:
            found = check.run(place)
        except NotHere as error:
            yield Result(check.name, "did not run", str(error))
        except Exception as error:  # a GPU fails in many ways, and the checks behind it are wanted all the same
            said = str(error) if isinstance(error, Differs) else traceback.format_exc().strip()
            yield Result(check.name, "failed", said, time.monotonic() - began)
            broken_by = check.name if is_broken(place.device) else ""
        else:
            found = found if isinstance(found, Found) else Found(found)
            yield Result(check.name, "passed", found.said, time.monotonic() - began, found.numbers)


def is_broken(device: str) -> bool:
    """After some errors a GPU refuses everything that the same process asks."""
    if device != "cuda":
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def status_of(results: Sequence[Result]) -> int:
    became = {result.became for result in results}
    if "failed" in became:
        return FAILED
    return PASSED if "passed" in became else SKIPPED


def largest(values: Iterable[float]) -> float:
    """NaN if any of them is: `max` would pass it over."""
    known = list(values)
    return next((value for value in known if math.isnan(value)), max(known))


def require_close(found: float, bound: float, what: str) -> str:
    """Raises `Differs` where `found` is above `bound`, or no number."""
    if not found <= bound:
        raise Differs(f"{what}: {found:.3g} apart, and at most {bound:.3g} is allowed")
    return f"{what}: {found:.2g} apart (at most {bound:.2g})"
