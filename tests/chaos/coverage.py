"""What a run promised to play, and what of it was played: kinds of faults, of jobs, and of what users do.

The rule kept here: a kind counts when it has happened, not when it was ordered or found nobody. What the run's own
flags promise and never ran fails the run, whatever else went well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable


class Coverage:
    def __init__(self, promised: Iterable[str]) -> None:
        self.promised = frozenset(promised)
        self._ran: Counter[str] = Counter()

    def ran(self, kind: str) -> None:
        self._ran[kind] += 1

    def never_ran(self) -> list[str]:
        return sorted(self.promised - self._ran.keys())

    def to_dict(self) -> dict[str, object]:
        return {"ran": dict(sorted(self._ran.items())), "never_ran": self.never_ran()}


def told(ran: Collection[str], never_ran: Collection[str], left_out: Collection[str]) -> str:
    """A line for the end of a run."""
    parts = [f"{len(ran)} kinds of faults and jobs ran"]
    parts += [f"never ran: {', '.join(never_ran)}"] if never_ran else ["none of those promised is missing"]
    parts += [f"left out by the flags: {', '.join(left_out)}"] if left_out else []
    return "; ".join(parts)
